"""Mistakes that users make at the command line: each is answered by one line with the right way out."""

from __future__ import annotations

import importlib
import runpy
import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core.atomic_files import write_json
from isobatch.core.errors import IsobatchError, UserError
from isobatch.core.package import ROOT
from isobatch.engine.registry import complete
from isobatch.engine.runs.run_folder import RunFolder
from isobatch.launch.cli import COMMANDS, find_command

if TYPE_CHECKING:
    from pathlib import Path

LM, CLF, REC, VAE = (f"--task {name}" for name in ("causal-lm", "classifier", "recommender", "sequence-vae"))
MISTAKES = [
    # What is trained
    ("auto causal-lm", "what is 'causal-lm'? Give it as --task causal-lm"),
    ("auto --task causallm", "did you mean causal-lm?"),
    ("auto --task ./missing.py:Task", "missing.py"),
    (f"auto {LM} --warmup-ratio 10", "has no meaning here"),
    (f"auto {LM} --preset fats", "--preset fats: valid for causal-lm"),
    # Data and models
    (f"auto {LM} --data nowhere/", "nowhere"),
    (f"auto {LM} --template chatlm", "did you mean chatml?"),
    (f"auto {CLF} --metric_for_best_model f1", "--load-best-model-at-end, or with --patience 3"),
    (f"auto {REC} --text of", "did you mean off?"),
    (f"auto {CLF} --text x", "a text stands alone, as in `predict RUN"),
    *(
        (
            f"{start} --{word} x",
            f"--{word} x: --label-column NAME says which column of --data, or of evaluate's",
        )
        for start in (f"auto {CLF}", "evaluate runs/b --test rows.csv", "predict runs/b hi")
        for word in ("label", "labels", "target", "class")
    ),
    *((f"{start} --text x", "--text-column NAME") for start in ("evaluate runs/b", "predict runs/b hi")),
    (f"auto {CLF} --file x.csv", "give it as --data FILE to `auto`"),
    (f"auto {CLF} --data rows.csv --seeds 0-2", "--seeds 0-2: name them: --seed 0-2 is three"),
    # The machine
    (f"auto {LM} --deepspeed ds.json", "use --strategy zero1, zero2 or zero3"),
    (f"auto {LM} --memory-limit lots", "is not a size such as 10GB"),
    (f"auto {LM} --accelerator tpu", "--accelerator tpu"),
    (f"plan {LM} --compare h100 --price cheap", "give 2.10/h"),
    (f"plan {LM} --compare h100 --deadline soon", "is no time such as 6h"),
    (f"plan {LM} --mtbf 6h", "taken out: --save-every 5m"),
    ("auto --task orpo --response-only off", "taken out: the tokens of answers are learnt"),
    ("auto --task dpo --loss_type ipo", "taken out: the loss is DPO's own"),
    ("auto --task sequence-vae --pretrain 3", "taken out: hold the posterior up"),
    # Where it is kept, and other files
    (f"auto {LM} --name a/b", "is a folder's name in --out"),
    (f"auto {LM} --save-every 0ep", "--save-every 0ep: must be above 0"),
    (f"auto {LM} --tracker wandbb", "did you mean wandb?"),
    (f"auto {LM} --config none.yaml", "No such file"),
    (f"auto {LM} --like nowhere", "nowhere is not a run"),
    ("resume", "give the folder of one run"),
    ("resume runs/none", "runs/none"),
    ("evaluate", "folder"),
    ("generate runs/none --prompt hi", "runs/none"),
    ("predict", "predict"),
    ("compare runs/a runs/none", "is not a run"),
    ("rm", "give the folders of runs"),
    ("runs nowhere", "there is no folder nowhere"),
    ("describe causal-ln", "did you mean causal-lm?"),
    ("report", "folder"),
    ("logs", "give the folder of one run"),
    ("serve", "give the folder of one run"),
]
"""What was typed -> a part of the answer."""
# Where runs/a is a finished run of causal-lm, runs/b one of classifier, and rows.csv a file.
MISTAKES += [
    # Words in the wrong place, and several mistakes at once
    ("lst runs/a", "there is no command 'lst'"),
    ("runs/a", "a command comes first"),
    ("--task causal-lm", "a command comes first"),
    ("grpo --data rows.csv", "learn from the pairs with --task dpo"),
    ("auto classifier", "Give it as --task classifier"),
    ("auto text-classification", "Give it as --task text-classification"),
    (f"auto {CLF} rows.csv", "Give it as --data rows.csv"),
    (f"auto {LM} runs/a", "Give it as --from runs/a"),
    (f"auto {LM} --warmup 10 %", "10%, not 10 %"),
    (f"auto {LM} -e 3", "-e: auto --task causal-lm has no such flag (`describe` lists flags)"),
    (f"auto {LM} --lr abc --epochs two", "--lr abc: is not a number; --epochs two: is not a number"),
    (f"auto {LM} --lr abc --optimizr x", "--lr abc: is not a number; --optimizr: auto --task causal-lm has"),
    (f"auto {LM} --fsdp x --sed 1", "--fsdp x: use --strategy fsdp2; --sed: auto --task causal-lm has"),
    ("resume runs/a --processes x --sed 1", "--processes x: is not an integer; --sed: resume has no"),
    ("resume runs/a --learning_rate 1 --adapter lora", "`auto --like runs/a --lr 1 --adapter lora` trains"),
    # Numbers as they are written elsewhere
    (f"auto {LM} --lr 0,001", "--lr 0,001: is not a number: decimals have a point, as in 0.001"),
    (f"auto {LM} --dropout 0,5", "--dropout 0,5: is not a number: decimals have a point, as in 0.5"),
    (
        "predict runs/b hi --threshold 0,9",
        "0,9: is not a number: decimals have a point, as in 0.9",
    ),
    ("predict runs/b hi --threshold 0.5,0.9", "decimals have a point, as in 0.001"),
    (f"auto {LM} --lr 1e-3 3e-3", "values have commas between (1e-3,3e-3)"),
    (f"auto {LM} --steps 10%", "--steps 10%: is not an integer"),
    (f"auto {LM} --train-fraction 120%", "--train-fraction 120%: must be above 0"),
    # A path one level too high, too low, or without its folder
    ("resume runs", "runs is not a run but a folder of runs: give one, as runs/a or runs/b"),
    ("verify runs/a/final", "runs/a/final is not a run but inside one: give runs/a"),
    ("doctor runs", "give one, as runs/a or runs/b"),
    ("serve runs/c", "`runs` lists the runs here"),
    (f"auto {LM} --from runs", "--from: runs is not a run but a folder of runs"),
    (f"auto {LM} --like runs/a/final", "--like: runs/a/final is not a run but inside one: give runs/a"),
    (f"auto {CLF} --data rows.csv --model runs", "holds no config.json; there is one in runs/a/final"),
    (f"auto {CLF} --data rows.csv --model runs/a/checkpoints", "there is one in runs/a/final"),
    ("auto --task pruning --data rows.csv --teacher runs", "/runs: holds no config.json; there is one in"),
    # A run where something else is wanted
    (f"auto {CLF} --data rows.csv --model runs/b", "--model runs/b/final is its model"),
    (f"auto {LM} --data runs/a", "--data runs/a: is a run: --like runs/a takes its recipe and data"),
    (f"auto {LM} --out runs/a", "--out runs/a: is a run: --out is the folder that holds runs"),
    ("auto --task pruning --from runs/b", "is a run of classifier, not of pruning: give it as --teacher"),
    ("auto --task dpo --from runs/a", "is a run of causal-lm, not of dpo: --model RUN/final begins"),
    (f"auto {CLF} --like runs/a", "is a run of causal-lm, not of classifier"),
    # A name that is nearly one beside it: every flag that takes a path
    (f"auto {LM} --data row.csv", "--data row.csv: there is no such file or folder (did you mean rows.csv?)"),
    (f"auto {LM} --model ./run", "did you mean runs?"),
    (f"auto {LM} --tokenizer ./run", "did you mean runs?"),
    (f"auto {LM} --config row.csv", "did you mean rows.csv?"),
    (f"auto {LM} --data rows.csv --text-column text --valid row.csv", "did you mean rows.csv?"),
    ("runs run", "did you mean runs?"),
    (f"auto {CLF} --data rows.csv --deduplicate", "a drawn validation split (--valid 0.1) has equal texts"),
    (f"auto {CLF} --data rows.csv --drop-duplicates on", "a drawn validation split (--valid 0.1)"),
    ("predict runs/b hi --precision 95", "at most 0.9999 (95 % is 0.95)"),
    # What other tools take
    (f"auto {LM} --precision int8", "--load-bits 4 or 8"),
    (f"plan {LM} --gpu-type h100", "`plan --hardware 8xh100`"),
    ("auto --task merge", "isobatch export RUN --to merged"),
]


def type_in(typed: str) -> None:
    command, words = find_command(shlex.split(typed))
    COMMANDS[command].load()(words)


ONE, TWO = (
    "runs cancel, runs logs, runs rm, inspect, verify, export, resume, evaluate, report, doctor, serve",
    "runs compare, diff",
)
OF_A_RUN = [
    *(f"{command} {{}}" for command in ONE.split(", ")),
    *(f"{command} {{}} {{}}" for command in TWO.split(", ")),
    *(
        "predict {} hi",
        "receipt make {}",
        "replay {} 1",
        "seen {} --sample 1",
        "chat {} --prompt hi",
        "recommend {} 1",
    ),
    *("auto --like {} --dump-config", "auto --from {} --dump-config"),
]
"""Commands that take a run."""


@dataclass
class Without:
    """A finder of modules that does not find these libraries."""

    finder: Any
    missing: list[str]

    def find_spec(self, name: str, *more: Any) -> Any:
        return None if name.partition(".")[0] in self.missing else self.finder.find_spec(name, *more)

    def find_distributions(self, context: Any) -> Any:
        find = getattr(self.finder, "find_distributions", None)
        return find(context) if find and context.name not in self.missing else ()

    def invalidate_caches(self) -> None:
        pass


def test_where_torch_is_absent_every_command_works_or_says_in_a_line_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, absent = tmp_path / "runs" / "a", ["torch", "transformers", "accelerate"]
    folder.mkdir(parents=True)
    write_json(folder / "recipe.json", complete("classifier", {})[0].to_dict())
    (folder / "facts.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for name in [*sys.modules]:  # as in a new process
        if name.partition(".")[0] in (*absent, "isobatch"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Without(finder, absent) for finder in sys.meta_path])
    monkeypatch.setattr(sys, "path", [*sys.path])
    runpy.run_path(str(ROOT / "launch" / "_root.py"))
    cli = importlib.import_module("isobatch.launch.cli")
    assert cli.guarded(lambda: cli._run(["--version"])) == 0  # noqa: SLF001
    assert "(no torch, no transformers, no accelerate, " in capsys.readouterr().out
    needing = 0
    for typed in (*COMMANDS, *OF_A_RUN):
        if typed.startswith("doctor"):
            continue  # of the machine: see test_doctor
        command, words = cli.find_command(shlex.split(typed.format("runs/a", "runs/a")))
        code = cli.guarded(lambda c=command, w=words: cli.COMMANDS[c].load()(w))
        said = capsys.readouterr().err
        assert "Traceback" not in said, typed
        assert code in (0, 2, 3), f"{typed}: {said}"
        needing += "this command needs" in said
    assert needing, "some command needs what is missing"
    for name in [*sys.modules]:
        if name.partition(".")[0] == "isobatch":
            del sys.modules[name]  # what was imported without these libraries


NAMES = ["runs/small", "small-classifier", "runs/small-classifier", "../runs/small-classifier"]


@pytest.mark.parametrize(
    ("typed", "name"), [*((typed, "small") for typed in OF_A_RUN), *(("runs rm {}", name) for name in NAMES)]
)
def test_every_command_takes_a_run_by_its_path_its_name_or_its_chain(
    typed: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is one whose facts are damaged: each command says that, or does without them."""
    folder = tmp_path / "runs" / "small-classifier"
    folder.mkdir(parents=True)
    write_json(folder / "recipe.json", complete("classifier", {})[0].to_dict())
    (folder / "facts.json").write_text("{}")
    monkeypatch.chdir(folder.parent if name.startswith("../") else tmp_path)
    assert RunFolder.open(name).folder.resolve() == folder
    said = ""
    try:
        type_in(typed.format(*[name] * 2))
    except IsobatchError as error:
        said = str(error)
    assert "not a run" not in said


@pytest.mark.parametrize(("typed", "way_out"), MISTAKES, ids=[typed for typed, _ in MISTAKES])
def test_a_mistake_is_answered_with_the_way_out(
    typed: str, way_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("text,label\ngood,1\nbad,0\n" * 20)
    for name, task in (("a", "causal-lm"), ("b", "classifier")):
        for inside in ("final", "checkpoints"):
            (tmp_path / "runs" / name / inside).mkdir(parents=True)
        write_json(tmp_path / "runs" / name / "recipe.json", complete(task, {})[0].to_dict())
        (tmp_path / "runs" / name / "facts.json").write_text("{}")
        (tmp_path / "runs" / name / "final" / "config.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError) as refused:
        type_in(typed)
    assert way_out in str(refused.value)
    assert "\n" not in str(refused.value).strip()
    assert sorted(tmp_path.rglob("*")) == before, "a refused command leaves nothing behind"
