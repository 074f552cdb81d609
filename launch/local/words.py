"""What the words of a command line mean: those of other tools, flags from files, and lists for a sweep.

A flag of the command or of the task always comes before a word of another tool with the same name, and what
stands on the command line before what a file says.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from isobatch.core import atomic_files
from isobatch.core.errors import UserError, nearest_file
from isobatch.core.flags import ON_WORDS, BareValue, Flag, convert, spelling, value_text
from isobatch.core.package import table_beside
from isobatch.core.recipe import HOOK_CODE, TASK_CODE, Recipe
from isobatch.engine import consent
from isobatch.engine.runs.run_folder import no_run, runs_named

_TABLES = table_beside(__file__, "other_tools")
SYNONYMS: dict[str, str] = {word: ours for ours, words in _TABLES["names"].items() for word in words.split()}
"""Names in other tools -> our flag, which takes the same values."""


def _rules(table: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    return {
        word: rule if isinstance(rule, dict) else {"any": rule}
        for words, rule in table.items()
        for word in words.split()
    }


WORDS = _rules(_TABLES["words"])
"""Word -> form of its value -> what it is here, see other_tools.toml."""
OF_CLUSTERS = {flag: _rules(table) for flag, table in _TABLES["of_clusters"].items()}
"""A flag of one cluster's command alone -> as WORDS, for that command."""
VALUES: dict[str, dict[str, str]] = _TABLES["values"]
GIVE_WAY: list[str] = _TABLES["give_way"]["words"].split()
LEFT: dict[str, str] = _TABLES["left"]
"""Flags that were taken out -> what to use instead."""
A_RUN: dict[str, str] = _TABLES["a_run"]
"""Flags that take no run -> which flags do."""
FORMS: dict[str, str] = _TABLES["forms"]
"""Name of a form of values -> its pattern."""


@dataclass(frozen=True, slots=True)
class Translation:
    """Flags in our words."""

    flags: dict[str, str]
    """Our name -> value; names that nobody knows are among them."""
    notes: dict[str, str]
    """Our name, or a word without effect -> a line that says what was understood."""
    wrong: tuple[str, ...] = ()
    """What is wrong with words that cannot be understood."""

    def below(self, typed: Translation) -> Translation:
        """These flags of a file, with those that were typed over them."""
        taken = {*typed.flags}.union(*(INSTEAD.get(name, ()) for name in typed.flags))
        flags, notes = ({k: v for k, v in own.items() if k not in taken} for own in (self.flags, self.notes))
        return Translation(flags | typed.flags, notes | typed.notes, self.wrong + typed.wrong)


INSTEAD = {"epochs": {"steps", "least_steps"}, "steps": {"epochs", "least_steps"}}
"""A flag that is typed -> the flags of a file that it replaces: the length of a run is said anew."""


def translate(flags: Mapping[str, str], own: Collection[str]) -> Translation:
    """Flags as they were written in our words. `own`: names of the command's and the task's flags.

    `wrong` has words whose meaning cannot be had, and two that set one flag.
    """
    found, notes, written = dict[str, str](), dict[str, str](), dict[str, str]()
    wrong: list[str] = []
    for word, value in sorted(flags.items(), key=lambda flag: flag[0] in GIVE_WAY):
        try:
            meaning, note = _meaning(word, value, own)
        except UserError as error:
            wrong.append(str(error))
            continue
        twice = meaning.keys() & found.keys()
        if twice and word in GIVE_WAY:
            continue
        if twice:
            two = f"{spelling(word)} and {spelling(written[twice.pop()])}"
            wrong.append(f"{two} say the same thing: give one of them")
        found |= meaning
        written |= dict.fromkeys(meaning, word)
        if note:
            notes[next(iter(meaning), word)] = note
    return Translation(found, notes, tuple(wrong))


def _meaning(word: str, value: str, own: Collection[str]) -> tuple[dict[str, str], str]:
    """(flags that a word with its value sets, what the user reads of it). Raises UserError."""
    if isinstance(value, BareValue) and re.fullmatch(r"[A-Za-z][\d:]+", word):  # -N2
        word, value = word[0], word[1:]
    rules = WORDS | next((words for flag, words in OF_CLUSTERS.items() if flag in own), {})
    is_foreign = word not in own and word in rules
    synonym = SYNONYMS.get(word, word)
    names = (word, synonym, _TABLES["of_finished_models"].get(synonym))
    name = next((one for one in names if one in own), word)
    forms = rules[word] if is_foreign else VALUES.get(name, {})
    written = spelling(word) if isinstance(value, BareValue) else f"{spelling(word)} {value}"
    rule = next((r for form, r in forms.items() if re.fullmatch(FORMS.get(form, form), value.lower())), None)
    if rule is None and is_foreign:
        wrong = "needs a value" if isinstance(value, BareValue) else "has no meaning here"
        raise UserError(f"{written}: {wrong}: `describe` lists flags")
    if rule is None:
        return {name: value}, ""
    if rule.startswith("!"):
        raise UserError(f"{written}: {rule[2:]}")
    said, _, remark = rule.partition("#")
    pairs = iter(said.split())
    found = {flag: _filled(form, value) for flag, form in zip(pairs, pairs, strict=True)}
    if found.keys() - set(own):  # a word for what this command does not have
        return {word: value}, ""
    if not found:
        return {}, remark and f"{written} has no effect:{remark}"
    if word in found.values() or found == {word: value}:
        return found, ""
    ours = " ".join(f"{spelling(flag)} {text}" for flag, text in found.items())
    return found, f"{written} is {ours}" + (f":{remark}" if remark else "")


def _filled(template: str, value: str) -> str:
    """The template with the value in its place; a list as Python writes it becomes a,b."""
    if template == "{%}":
        return f"{(Decimal(value) * 100).normalize():f}%"
    if template.startswith("{:"):
        return value.split(":")[int(template[2:-1])]
    if items := re.fullmatch(r"[\[(](.*)[\])]", value):
        value = ",".join(part.strip(" '\"") for part in items[1].split(",") if part.strip())
    return template.replace("{}", value)


SOURCES = ("config", "like", "from")
"""Flags that name where other flags come from: a file, the recipe of a run, and that with its weights."""
NOTHING = ("null", "~", "")


def flags_of_files(flags: Mapping[str, str]) -> dict[str, str]:
    """The flags, as text, of the file that one of SOURCES among these flags names; none where none is.

    A file holds flags by name, of isobatch or of the tools whose words it understands. A run's recipe.json is
    one too. Raises UserError.
    """
    given = [name for name in SOURCES if name in flags]
    if not given:
        return {}
    if len(given) > 1:
        raise UserError(f"--{given[0]} and --{given[1]} both say where flags come from: give one of them")
    typed = f"--{given[0]} {flags[given[0]]}"
    if isinstance(flags[given[0]], BareValue):
        raise UserError(f"--{given[0]}: needs a value")
    path = Path(flags[given[0]]).expanduser()
    if given != ["config"]:
        path = runs_named(path)[-1] / "recipe.json"
        if not path.is_file():
            raise UserError(f"--{given[0]}: {no_run(path.parent)}")
    values = _read_mapping(path, typed)
    if given == ["config"] and not ("task" in values and isinstance(values.get("options"), dict)):
        texts = {name: _as_text(f"{typed}: {name}", value) for name, value in values.items()}
        return {str(k).lstrip("-").replace("-", "_"): v for k, v in texts.items() if v not in NOTHING}
    recipe = Recipe.from_dict(atomic_files.read_json(path))  # of a run, whoever made it
    consent.require(recipe, path.parent, flags.get("trust", "").lower() in ON_WORDS)
    consent.require_reading(recipe, path.parent, flags.keys())  # what is typed instead is not read
    if HOOK_CODE in recipe.options and "hook" not in flags:
        taught = ", ".join(recipe.options[HOOK_CODE])
        raise UserError(f"{typed}: what it learnt depends on its hook {taught}: give --hook FILE:CLASS too")
    found = {**recipe.values(), "from": (recipe.starts_from or {}).get("run")}
    return {k: value_text(v) for k, v in found.items() if v is not None and k not in (TASK_CODE, HOOK_CODE)}


def _read_mapping(path: Path, typed: str) -> dict[Any, Any]:
    import yaml

    try:
        # No type is guessed: 1e-3, on and 007 stay as they are written.
        found = yaml.BaseLoader(path.read_text(encoding="utf-8")).get_single_data()
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        near = nearest_file(path) if isinstance(error, FileNotFoundError) else ""
        raise UserError(f"{typed}: cannot be read: {' '.join(str(error).split())}{near}") from None
    if not isinstance(found, dict):
        raise UserError(f"{typed}: holds no lines such as lr: 1e-3")
    return found


def _as_text(where: str, value: Any) -> str:
    """A value as it would be typed."""
    if isinstance(value, dict):
        raise UserError(f"{where}: holds names of its own; write each flag by itself, as in lr: 1e-3")
    return ",".join(_as_text(where, item) for item in value) if isinstance(value, list) else str(value)


def config_text(groups: Iterable[tuple[str, Mapping[str, Flag], Mapping[str, Any]]]) -> str:
    """A file for --config. `groups`: (title, flags, their values); values that are None stand as remarks."""
    lines: list[str] = []
    for title, flags, values in groups:
        lines += [*([""] if lines else []), f"# {title}"]
        for name, flag in flags.items():
            value = values.get(name, flag.default)
            text = f"# {name}:" if value is None else f"{name}: {scalar(value_text(value))}"
            lines.append(f"{text:<28}  # {flag.help}")
    return "\n".join(lines)


def scalar(text: str) -> str:
    """The text as YAML, in quotes where it may need them."""
    is_plain = re.fullmatch(r"[\w./][\w./,%+-]*", text) and text not in NOTHING
    return text if is_plain else json.dumps(text, ensure_ascii=False)


MOST_COMBINATIONS = 1000


def combinations(
    flags: Mapping[str, str], sweepable: Mapping[str, Flag]
) -> list[tuple[dict[str, str], tuple[str, ...]]]:
    """(flags with one value each, names of those that had several) for every combination of the values in
    `flags`, the last flag changing fastest: --lr 1e-3,3e-3 --seed 0-2 is six.

    `sweepable`: those that may have several values. Raises UserError for too many.
    """
    values = {k: values_of(sweepable[k], text) if k in sweepable else [text] for k, text in flags.items()}
    swept = tuple(sorted(name for name, several in values.items() if len(several) > 1))
    if math.prod(map(len, values.values())) > MOST_COMBINATIONS:
        raise UserError(f"a sweep has {MOST_COMBINATIONS:,} runs at most, and these lists make more")
    return [(dict(zip(values, chosen, strict=True)), swept) for chosen in itertools.product(*values.values())]


def drawn(flags: Mapping[str, str], sweepable: Mapping[str, Flag], trials: int) -> list[dict[str, str]]:
    """For each trial a value of each flag whose text is a range, as in --lr 1e-4..1e-2: of three digits, and
    whole between whole numbers. It is uniform, or its logarithm is where the range spans a decade or more.

    A value follows from the seed, the flag and the trial. Raises UserError for a range without trials.
    """
    ranges = {k: ends for k, text in flags.items() if k in sweepable and (ends := _range(sweepable[k], text))}
    if bool(ranges) != bool(trials):
        given = " ".join([f"{spelling(name)} {flags[name]}" for name in ranges] or [f"--trials {trials}"])
        raise UserError(f"{given}: a range and the times to draw go together: --lr 1e-4..1e-2 --trials 8")
    seed = values_of(sweepable["seed"], flags.get("seed", "0"))[0]
    return [
        {name: _draw(*ends, f"{seed} {name} {trial}") for name, ends in ranges.items()}
        for trial in range(trials or 1)
    ]


def _range(flag: Flag, text: str) -> tuple[float, float] | None:
    """The ends of a range of numbers; None where the text is none, or the flag takes no single number."""
    low, dots, high = text.partition("..")
    ends = [value for end in (low, high) if type(value := _value(flag, end)) in (int, float)]
    return (min(ends), max(ends)) if dots and len(ends) == 2 and flag.name != "seed" else None


def _draw(low: float, high: float, key: str) -> str:
    share, whole = random.Random(key).random(), isinstance(low, int)
    top = high + whole
    value = low * (top / low) ** share if 0 < low <= high / 10 else low + (top - low) * share
    return str(min(int(value) if whole else max(float(f"{value:.3g}"), low), high))


def values_of(flag: Flag, text: str) -> list[str]:
    """The values that `text` lists for a flag, each once; the text itself where it is one value of the flag,
    as a text with commas is, and what --epochs takes. Of a range, which is drawn from, the ends.
    """
    # 0,001 is no list but 0.001, as some write it, and so is 0,9 where there is no value 9.
    decimal = re.fullmatch(r"0,\d+", text) and (text[2] == "0" or _value(flag, text[2:]) is None)
    if isinstance(text, BareValue) or decimal or _value(flag, text) is not None:
        return [text]
    if _range(flag, text):
        return text.split("..")
    parts = [value for part in text.split(",") for value in _numbers(flag, part.strip())]
    return list(dict.fromkeys(parts)) if all(parts) else [text]


def _numbers(flag: Flag, part: str) -> list[str]:
    """0-2, of seeds 0..2 too, as 0, 1, 2 for whole numbers; anything else as it is."""
    match = re.fullmatch(r"(\d+)(?:-|\.\.)(\d+)" if flag.name == "seed" else r"(\d+)-(\d+)", part)
    if match is None or type(_value(flag, match[1])) is not int:
        return [part]
    low, high = int(match[1]), int(match[2])
    return list(map(str, range(low, high + 1))) if 0 <= high - low <= MOST_COMBINATIONS else [part]


def _value(flag: Flag, text: str) -> Any:
    """The value that the text is of a flag; None where it is none."""
    try:
        return convert(flag, text)
    except UserError:
        return None


def label(recipe: Recipe, swept: Iterable[str]) -> str:
    """What a run of a sweep is called: lr0.001-seed0, the seed last, whatever the order of the flags."""
    names = sorted(swept, key=lambda name: (name == "seed", name))
    values = [str(getattr(recipe, name, recipe.options.get(name))).removesuffix(".0") for name in names]
    pairs = zip(names, values, strict=True)
    return "-".join(name.replace("_", "-") + re.sub(r"[^\w.+-]", "_", value) for name, value in pairs)
