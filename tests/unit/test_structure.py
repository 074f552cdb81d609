"""Tests of the repository: imports between rooms, forbidden calls, start-up time of the command line."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import time
from collections import Counter
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.core.package import own_command
from isobatch.core.strategies import STRATEGIES
from isobatch.tests.integration.helpers import command
from isobatch.tests.paths import REGISTER, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LAYERS = ("core", "data", "models", "engine", "launch", "benchmarks")
"""From the ground up: a file imports from its own layer and from those below it; benchmarks are no part
of the package."""
FILES = sorted(f for layer in LAYERS for f in (ROOT / layer).rglob("*.py"))
PACKAGE = [f for f in FILES if f.relative_to(ROOT).parts[0] != "benchmarks"]
HEAVY = ["torch", "transformers", "accelerate", "deepspeed", "datasets", "peft", "bitsandbytes"]
ONNX = {"onnx", "onnxruntime", "onnxscript"}
ONLY_WHERE_NEEDED = {"deepspeed", "bitsandbytes", "peft", "torchao", "datasets", *ONNX}
HELP_SECONDS = 0.3


@pytest.fixture(scope="module", autouse=True)
def _forget_trees() -> Iterator[None]:
    """They are some 100 MB, and no other test reads them."""
    yield
    for kept in (tree, nodes):
        kept.cache_clear()


@functools.cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(tree(file)))


def imported(found: Iterator[ast.AST]) -> Iterator[str]:
    for node in found:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: no function bodies, nothing for type checkers only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from at_import(child)


def name(file: Path) -> str:
    return str(file.relative_to(ROOT))


@functools.cache
def room_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).parent.parts)


@functools.cache
def files_imported(file: Path, for_types: bool = True) -> list[Path]:
    """Our files that a file imports, wherever in it; `isobatch` itself counts as none.

    `for_types`: also those that only type checkers import.
    """
    blocks = [] if for_types else [n for n in nodes(file) if isinstance(n, ast.If)]
    unread = {id(n) for b in blocks if "TYPE_CHECKING" in ast.unparse(b.test) for n in ast.walk(b)}
    found = []
    for node in nodes(file):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("isobatch."):
            module = (node.module or "").removeprefix("isobatch.").replace(".", "/")
            for alias in node.names if id(node) not in unread else ():
                inside = ROOT / module / f"{alias.name}.py"
                found.append(inside if inside.is_file() else ROOT / f"{module}.py")
    return found


def rooms_imported(file: Path) -> Iterator[str]:
    """The rooms from which a file imports anything."""
    yield from map(room_of, files_imported(file))


def test_layers_point_one_way() -> None:
    """Models know no data: what they get are arrays and facts."""
    seen = {(name(f), room) for f in FILES for room in rooms_imported(f)}
    up = [(file, room) for file, room in seen if layer_of(room) > layer_of(file.replace("/", "."))]
    assert up == []
    assert [
        (file, room) for file, room in seen if file.startswith("models/") and room.startswith("data")
    ] == []


def layer_of(room: str) -> int:
    """Tests, which benchmarks borrow from, stand beside them."""
    top = room.partition(".")[0]
    return LAYERS.index(top) if top in LAYERS else len(LAYERS) - 1


def test_no_rooms_import_each_other_in_a_circle() -> None:
    rooms = {room_of(f): set[str]() for f in FILES}
    for file in FILES:
        rooms[room_of(file)] |= set(rooms_imported(file)) - {room_of(file)}
    TopologicalSorter(rooms).prepare()  # raises CycleError


def test_no_files_import_each_other_in_a_circle() -> None:
    TopologicalSorter({f: set(files_imported(f, False)) for f in FILES}).prepare()  # raises CycleError


LEAST_LINES = 60
SMALL = {
    "data/text/template_process.py": "a program: templates of strangers run in its sandbox",
    "data/interactions/demo.py": "the embedded demo",
    "engine/distributed/recorder.py": "a step's parts by the clock, for whoever profiles it",
    "engine/loading/group_order.py": "an order by itself, which proofs compute again",
    "engine/model_setup/gpu_graphs.py": "imported where a plan compiles, with Inductor",
    "engine/model_setup/prepare_model.py": "what a plan does to a model, in order",
    "engine/optimization/parameter_groups.py": "what a recipe says to an optimizer",
    "launch/commands/compress.py": "imported where --task compress is typed",
    "launch/predicting/neighbours.py": "imported where --neighbours is typed, with torch",
    "models/causal_lm/known_models.py": "a table with its reader",
    "models/causal_lm/softmax_kernel.py": "imported where there is Triton",
}
"""Files of fewer code lines that one other file names -> why they are files."""


def code_lines(file: Path) -> int:
    """Neither blank, nor a comment, nor in a docstring or the string under a field."""
    words = [n for n in nodes(file) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    said = {line for n in words for line in range(n.lineno, (n.end_lineno or 0) + 1)}
    lines = enumerate(file.read_text().splitlines(), start=1)
    return sum(
        bool(text.strip()) and not text.lstrip().startswith("#") and n not in said for n, text in lines
    )


def test_no_small_file_has_one_importer() -> None:
    """It belongs into the file that imports it; programs that are started by their path may be small."""
    importers = Counter(imported for file in PACKAGE for imported in set(files_imported(file)))
    small = {name(f) for f, count in importers.items() if count == 1 and code_lines(f) < LEAST_LINES}
    small = {file for file in small if not file.startswith("engine/hooks/")}  # one hook, one file
    assert sorted(small - SMALL.keys()) == []
    assert [path for path in SMALL if not (ROOT / path).is_file()] == []


def test_the_loop_knows_no_hook_and_no_hook_another() -> None:
    """What two of them need stands in `Training`."""
    hooks = ROOT / "engine" / "hooks"
    files = [*(ROOT / "engine" / "train").glob("*.py"), *hooks.glob("*.py")]
    assert [name(f) for f in files if hooks in {other.parent for other in files_imported(f)}] == []


def members(file: str, kind: str) -> list[ast.stmt]:
    """The body of a class, without private methods."""
    (found,) = [n for n in tree(ROOT / file).body if isinstance(n, ast.ClassDef) and n.name == kind]
    return [n for n in found.body if not getattr(n, "name", "").startswith("_")]


def test_contracts_stay_short() -> None:
    state = members("engine/train/state.py", "Training")
    assert sum(isinstance(n, ast.AnnAssign) for n in state) <= 12
    task = [n.name for n in members("models/base.py", "Task") if isinstance(n, ast.FunctionDef)]
    assert len(task) <= 12, task


def test_the_engine_asks_traits_and_protocols() -> None:
    """Never which strategy it has, nor whose method a task's is."""
    strategies = {traits.implementation.partition(":")[2] for traits in STRATEGIES.values()}
    engine = [f for f in PACKAGE if name(f).startswith("engine/")]
    asked = [(name(f), c.args[1]) for f in engine for c in calls(f) if ast.unparse(c.func) == "isinstance"]
    assert [file for file, kind in asked if strategies & set(ast.unparse(kind).split(" | "))] == []
    compared = [(name(f), ast.unparse(n)) for f in engine for n in nodes(f) if isinstance(n, ast.Compare)]
    assert [(file, text) for file, text in compared if re.match(r"type\(.*task\)\.\w+ is", text)] == []


def test_optional_libraries_are_imported_in_the_branch_that_needs_them() -> None:
    found = [(name(f), module) for f in PACKAGE for module in imported(at_import(tree(f)))]
    assert [(file, m) for file, m in found if m.split(".")[0] in ONLY_WHERE_NEEDED] == []


def test_one_class_name_has_one_meaning() -> None:
    """But for the public Recipe, which is the core's, completed."""
    names = [
        node.name
        for file in FILES
        for node in tree(file).body
        if isinstance(node, ast.ClassDef) and (name(file), node.name) != ("launch/api/functions.py", "Recipe")
    ]
    assert [n for n, count in Counter(names).items() if count > 1] == []


RECORDS = ("recipe.json", "facts.json", "plan.json", "run.json", "summary.json", "exit.json")
"""Files of a run folder, and who reads them."""
READERS = ("atomic_files.read_json", "json.loads", "json.load")


@functools.cache
def reads() -> list[tuple[str, list[Any]]]:
    """The places in engine/ and launch/ that read a file, with the constants of each."""
    return [
        (f"{name(file)}:{node.lineno}", [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)])
        for file in PACKAGE
        for node in nodes(file)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in READERS
    ]


def reads_of(record: str) -> list[str]:
    """The places that read a file of this name."""
    prepared = "engine/loading/prepare.py"
    return [place for place, words in reads() if record in words and not place.startswith(prepared)]


@pytest.mark.parametrize("record", RECORDS)
def test_each_file_of_a_run_is_read_in_one_place(record: str) -> None:
    """Recipe, plan and facts are read once and passed on as objects."""
    places = reads_of(record)
    if record == "summary.json":  # by way of a name: the file may not be there yet
        assert places == []
        return
    assert len(places) == 1, places
    assert places[0].startswith("engine/runs/run_folder.py")


def calls(file: Path) -> list[ast.Call]:
    return [n for n in nodes(file) if isinstance(n, ast.Call)]


def keywords(file: Path) -> set[str | None]:
    return {keyword.arg for call in calls(file) for keyword in call.keywords}


def test_nothing_unpickles() -> None:
    """A run folder or a checkpoint may come from anywhere: reading it must run no code of its own."""
    forbidden = {"torch.load", "pickle.load", "pickle.loads", "joblib.load", "yaml.load", "eval", "exec"}
    found = [
        (name(f), call.lineno) for f in PACKAGE for call in calls(f) if ast.unparse(call.func) in forbidden
    ]
    assert found == []
    assert [name(f) for f in PACKAGE if "allow_pickle" in keywords(f)] == []


def test_models_code_runs_where_one_function_says_so() -> None:
    word = "trust_remote_code"
    assert [name(f) for f in PACKAGE if word in keywords(f)] == []
    said = [name(f) for f in PACKAGE for n in nodes(f) if isinstance(n, ast.Constant) and n.value == word]
    assert set(said) <= {"models/hub.py"}


def test_a_recipes_task_is_loaded_where_its_code_may_run() -> None:
    """`workload` is for a name that the user typed; `workload_of` asks, as a recipe may be anybody's."""
    files = [f for f in PACKAGE if name(f) != "engine/registry.py"]
    taken = [(name(f), ast.unparse(c)) for f in files for c in calls(f) if ast.unparse(c.func) == "workload"]
    assert [c for c in taken if ".task)" in c[1]] == []


RAW = ("torch.rand", "torch.normal", "torch.bernoulli", "torch.multinomial", "torch.poisson", "np.random.")
RAW += ("numpy.random.", "random.")
SEEDED = ("np.random.default_rng", "numpy.random.default_rng", "np.random.Generator", "random.Random")
SEEDED += ("np.random.PCG64",)
METHODS = "normal_ uniform_ bernoulli_ random_ exponential_ multinomial dropout dropout_"


def raw_draws(module: ast.AST) -> Iterator[str]:
    """Calls that draw from a hidden generator; `generator=` or a seeded generator makes them harmless."""
    for node in ast.walk(module):
        if not isinstance(node, ast.Call):
            continue
        function = ast.unparse(node.func)
        seeded = any(k.arg == "generator" for k in node.keywords)
        if function == "random.SystemRandom":  # of pauses between calls of a store: nothing learns from it
            continue
        if function.startswith(SEEDED):
            if not node.args and not node.keywords:
                yield f"{node.lineno}: {function}() without a seed"
        elif (function.startswith(RAW) and not seeded) or (
            isinstance(node.func, ast.Attribute) and node.func.attr in METHODS.split() and not seeded
        ):
            yield f"{node.lineno}: {function}"


def test_tasks_and_data_draw_no_noise_of_their_own() -> None:
    """Their draws come from the step's noise, or from a generator that they seed."""
    files = [f for f in FILES if room_of(f).startswith(("models", "data"))]
    assert [(name(f), draw) for f in files for draw in raw_draws(tree(f))] == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("torch.rand(3)", True),
        ("torch.randn_like(x)", True),
        ("x.normal_()", True),
        ("nn.functional.dropout(x)", True),
        ("np.random.default_rng()", True),
        ("np.random.default_rng(seed)", False),
        ("random.Random(3)", False),
        ("step.noise.normal('z', (3,))", False),
    ],
)
def test_the_lint_sees_raw_draws(code: str, found: bool) -> None:
    assert bool(list(raw_draws(ast.parse(code)))) == found


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["auto", "--help"], 0),
        (["describe", "causal-lm"], 0),
        (["auto", "--task", "causal-lm", "--epohs", "3"], 2),
        (["resume", "nowhere"], 2),
        (["train-it"], 2),
    ],
)
def test_an_answer_needs_nothing_heavy(words: list[str], code: int, tmp_path: Path) -> None:
    script = REGISTER + (
        "import sys; from isobatch.launch.cli import main; code = main(sys.argv[1:]);"
        f" heavy = {HEAVY} + ['numpy'] * (sys.argv[-1] == '--help');"
        " print('heavy:', *[m for m in heavy if m in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    *lines, heavy = done.stderr.splitlines()
    assert heavy == "heavy:"
    assert len(lines) == (1 if code else 0), "one line for the user's error, none otherwise"
    assert list(tmp_path.iterdir()) == []


def test_help_answers_at_once(tmp_path: Path) -> None:
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        answer = command(own_command("--help"), tmp_path)
        seconds.append(time.perf_counter() - began)
        assert (answer.returncode, answer.stderr) == (0, "")
    assert min(seconds) < HELP_SECONDS


def test_users_own_folders_of_our_names_do_not_hide_ours(tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s my "project" 日本'
    for package in ("engine", "models", "data", "hub"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text("raise RuntimeError('the wrong one')")
    (folder / "fire.py").write_text("raise RuntimeError('the wrong one')")
    answer = command(own_command("tasks"), folder)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.startswith("causal-lm")
