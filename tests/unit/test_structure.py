"""Tests of the repository: imports between rooms, forbidden calls, start-up time of the command line."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import time
import tomllib
from collections import Counter
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING, Any

import pytest

from isobatch.tests.paths import REGISTER, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WARM, CLUSTER = "tests", "tests.slurm"
"""Commands from a warm process and the Slurm on one machine, which benchmarks use as the tests do."""
ROOMS: dict[str, set[str]] = {
    "core": set(),
    "core.terminal": {"core"},
    "data.preparation": {"core", "core.terminal"},
    "data.tables": {"core"},
    "data": {"core", "core.terminal", "data.preparation", "data.tables"},
    "data.cleaning": {"core", "data"},
    "data.interactions": {"core", "data", "data.preparation", "data.tables"},
    "data.labelled": {"core", "data", "data.preparation"},
    "data.text": {"core", "data", "data.cleaning", "data.labelled", "data.preparation"},
    "data.preferences": {"core", "data", "data.text"},
    "data.streaming": {"core", "core.terminal", "data", "data.cleaning", "data.preparation", "data.text"},
    "models": {"core"},
    "models.causal_lm": {"core", "models"},
    "models.preference": {"core", "models", "models.causal_lm"},
    "models.encoder": {"core", "models"},
    "models.classification": {"core", "models", "models.encoder"},
    "models.compression": {"core", "models", "models.encoder", "models.classification"},
    "models.recommendation": {"core", "core.terminal", "models", "models.causal_lm"},
    "models.sequence_vae": {"core", "models", "models.causal_lm"},
    "engine": {"core", "data", "data.streaming", "models", "models.causal_lm", "models.classification"},
    "engine.machine": {"core", "core.terminal"},
    "engine.runs": {"core", "data.streaming"},
    "engine.profiling": {"core", "engine.machine", "engine.runs"},
    "engine.distributed": {"core", "engine.profiling"},
    "engine.checkpointing": {"core", "engine.distributed"},
    "engine.optimization": {"core", "models", "engine.runs"},
    "engine.loading": {"core", "core.terminal", "data", "data.preparation", "engine.machine"},
    "engine.noise": {"core", "models", "engine.loading"},
    "engine.planning": {"core", "models", "engine.loading", "engine.machine"},
    "engine.model_setup": {"core", "models", "engine.checkpointing", "engine.loading", "engine.noise"},
    "engine.strategies": {"core", "engine.checkpointing", "engine.distributed", "engine.model_setup"},
    "engine.training": {
        *(
            "core",
            "core.terminal",
            "data",
            "models",
            "engine",
            "engine.checkpointing",
            "engine.distributed",
            "engine.loading",
        ),
        *(
            "engine.model_setup",
            "engine.noise",
            "engine.optimization",
            "engine.machine",
            "engine.planning",
            "engine.profiling",
            "engine.runs",
        ),
        "engine.strategies",
    },
    "engine.verification": {
        *("core", "data", "engine", "engine.checkpointing", "engine.distributed", "engine.loading"),
        *("engine.optimization", "engine.runs", "engine.strategies", "engine.training", "models"),
    },
    "engine.forensics": {
        *("core", "data", "models", "engine", "engine.checkpointing", "engine.loading"),
        *("engine.optimization", "engine.runs", "engine.training", "engine.verification"),
    },
    "launch.local.words": {"core", "engine"},
    "launch.local.observers": {"core", "engine", "engine.distributed", "engine.runs", "engine.training"},
    "launch.local": {
        *(
            "core",
            "core.terminal",
            "models",
            "data",
            "engine",
            "engine.distributed",
            "engine.loading",
            "engine.optimization",
        ),
        *(
            "engine.machine",
            "engine.planning",
            "engine.runs",
            "engine.strategies",
            "engine.training",
            "engine.verification",
        ),
        "launch.local.observers",
        "launch.local.words",
    },
    "launch": {"core", "core.terminal", "engine", "engine.distributed", "engine.runs", "launch.local"},
    "launch.report": {
        *(
            "core",
            "core.terminal",
            "models",
            "engine",
            "engine.machine",
            "engine.runs",
            "engine.training",
            "launch.local",
        ),
    },
    "launch.forensics": {
        *("core", "core.terminal", "engine", "engine.forensics", "engine.loading", "engine.runs"),
        *(
            "engine.checkpointing",
            "engine.optimization",
            "engine.verification",
            "launch.local",
            "launch.report",
        ),
    },
    "launch.sweeps": {
        *("core", "core.terminal", "engine", "engine.machine", "engine.runs"),
        *("launch.local", "launch.local.words", "launch.report"),
    },
    "launch.measuring": {
        *("core", "models", "engine.distributed", "engine.loading", "engine.machine", "engine.planning"),
        *("engine.profiling", "engine.runs", "engine.training", "launch.local", "launch.report"),
    },
    "launch.clusters": {"core", "engine", "engine.runs", "launch.local"},
    "launch.clusters.kubernetes": {
        *("core", "engine", "engine.distributed", "engine.runs", "launch.clusters", "launch.local"),
    },
    "launch.clusters.slurm": {
        *("core", "engine", "engine.distributed", "engine.machine", "engine.planning", "engine.runs"),
        *("launch.clusters", "launch.local", "launch.sweeps"),
    },
    "launch.control": {
        *(
            "core",
            "core.terminal",
            "engine",
            "engine.optimization",
            "engine.planning",
            "engine.runs",
            "launch.local",
        ),
        "launch.local.words",
    },
    "launch.planning": {
        *("core", "models", "engine", "engine.loading", "engine.machine", "engine.optimization"),
        *("engine.planning", "engine.runs", "launch.local"),
    },
    "launch.doctor": {
        *("core", "engine.checkpointing", "engine.machine", "engine.model_setup"),
        *("engine.runs", "launch.local", "launch.clusters.slurm", "launch.control"),
    },
    "launch.commands": {
        "launch",
        *(
            "core",
            "core.terminal",
            "data.preparation",
            "data.streaming",
            "data.text",
            "models",
            "models.causal_lm",
            "engine",
            "engine.checkpointing",
            "engine.loading",
            "engine.machine",
            "engine.planning",
        ),
        *(
            "engine.runs",
            "engine.training",
            "engine.verification",
            "launch.local",
            "launch.local.words",
            "launch.planning",
            "launch.report",
            "launch.sweeps",
        ),
    },
    "launch.clusters.ray": {
        *("core", "engine.distributed", "engine.machine", "engine.runs"),
        *("launch", "launch.clusters", "launch.commands", "launch.local"),
    },
    "launch.predicting": {
        *(
            "core",
            "core.terminal",
            "data",
            "data.interactions",
            "data.labelled",
            "data.text",
            "engine",
            "engine.loading",
            "engine.runs",
            "engine.verification",
        ),
        *(
            "launch.commands",
            "launch.local",
            "models",
            "models.encoder",
        ),
    },
    "launch.api": {
        *(
            "core",
            "engine",
            "engine.loading",
            "engine.machine",
            "engine.planning",
            "engine.runs",
            "engine.verification",
        ),
        *("engine.forensics", "launch.forensics", "launch.local", "launch.predicting"),
    },
    "launch.serving": {
        *(
            "core",
            "core.terminal",
            "data",
            "data.text",
            "launch.local",
            "launch.predicting",
            "models",
            "models.causal_lm",
        ),
    },
    "benchmarks": {
        *(
            "core",
            "engine",
            "engine.distributed",
            "engine.loading",
            "engine.machine",
            "engine.planning",
            "engine.training",
        ),
        "launch",
    },
    "benchmarks.components": {
        *("benchmarks", "core", "data", "engine", "engine.checkpointing"),
        *("engine.forensics", "engine.loading", "engine.noise", "engine.optimization", "engine.runs"),
        *("engine.verification", "launch.report"),
    },
    "benchmarks.scale": {
        *("benchmarks", "core", "data", "data.preparation", "engine"),
        *("engine.checkpointing", "engine.loading", "engine.planning"),
        WARM,
    },
    "benchmarks.speed": {
        *("core", "data", "models.causal_lm", "models.encoder", "models.recommendation"),
        *("models.sequence_vae", "engine"),
        *(
            "engine.checkpointing",
            "engine.loading",
            "engine.machine",
            "engine.planning",
            "engine.runs",
            "engine.training",
        ),
        *("engine.verification", "launch.local", "launch.measuring", "engine.distributed", "benchmarks"),
    },
    "benchmarks.gpu": {
        *("core", "models", "models.causal_lm", "engine.distributed", "engine.loading", "engine.noise"),
        *("engine.machine", "engine.planning", "engine.runs", "engine.training", "launch", "launch.local"),
        *("benchmarks", "benchmarks.speed"),
    },
    "benchmarks.quality": {
        *(
            "core",
            "data",
            "data.interactions",
            "models",
            "models.causal_lm",
            "models.recommendation",
            "engine",
        ),
        "engine.checkpointing",
        *(
            "engine.distributed",
            "engine.loading",
            "engine.machine",
            "engine.planning",
            "engine.training",
            "benchmarks",
        ),
        "engine.runs",
        "launch.planning",
        WARM,
    },
    "benchmarks.soak": {"core", "engine.runs", CLUSTER},
}
"""Room -> the rooms it imports, from the ground up: each imports only what stands above it in this list."""
FILES = sorted(f for room in ROOMS for f in (ROOT / room.replace(".", "/")).glob("*.py"))
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
def files_imported(file: Path) -> list[Path]:
    """Our files that a file imports, wherever in it; `isobatch` itself counts as none."""
    found = []
    for node in nodes(file):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("isobatch."):
            module = (node.module or "").removeprefix("isobatch.").replace(".", "/")
            for alias in node.names:
                inside = ROOT / module / f"{alias.name}.py"
                found.append(inside if inside.is_file() else ROOT / f"{module}.py")
    return found


def rooms_imported(file: Path) -> Iterator[str]:
    """The rooms from which a file imports anything."""
    yield from map(room_of, files_imported(file))


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_it_says_and_only_what_stands_below(room: str) -> None:
    """No arrow up and no circle; and the list holds no arrow that is not there."""
    files = [f for f in FILES if room_of(f) == room]
    assert {r for f in files for r in rooms_imported(f)} - {room} == ROOMS[room]
    assert ROOMS[room] - {WARM, CLUSTER} <= set(list(ROOMS)[: list(ROOMS).index(room)])


def test_every_folder_of_code_is_a_room() -> None:
    tops = {room.partition(".")[0] for room in ROOMS}
    found = {room_of(f) for top in tops for f in (ROOT / top).rglob("*.py")}
    assert found == {*ROOMS}


def test_no_files_import_each_other_in_a_circle() -> None:
    TopologicalSorter({f: set(files_imported(f)) for f in FILES}).prepare()  # raises CycleError


def test_the_package_holds_every_room() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    configs = {"isobatch.configs.accelerate", "isobatch.configs.deepspeed"}
    rooms = {f"isobatch.{room}" for room in ROOMS if not room.startswith("benchmarks")}
    assert set(settings["packages"]) == {"isobatch", *rooms, *configs}


def test_optional_libraries_are_imported_in_the_branch_that_needs_them() -> None:
    found = [(name(f), module) for f in PACKAGE for module in imported(at_import(tree(f)))]
    assert [(file, m) for file, m in found if m.split(".")[0] in ONLY_WHERE_NEEDED] == []


def test_one_class_name_has_one_meaning() -> None:
    """But for the public Recipe, which is the core's, completed."""
    names = [
        node.name
        for file in FILES
        for node in tree(file).body
        if isinstance(node, ast.ClassDef) and name(file) != "launch/api/recipe.py"
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
    # other_tools.py has it as a word that people bring from other tools.
    said = [name(f) for f in PACKAGE for n in nodes(f) if isinstance(n, ast.Constant) and n.value == word]
    assert set(said) <= {"models/hub.py", "launch/local/words/other_tools.py"}


def test_a_recipes_task_is_loaded_where_its_code_may_run() -> None:
    """`workload` is for a name that the user typed; `workload_of` asks, as a recipe may be anybody's."""
    files = [f for f in PACKAGE if name(f) != "engine/registry.py"]
    taken = [(name(f), ast.unparse(c)) for f in files for c in calls(f) if ast.unparse(c.func) == "workload"]
    assert [c for c in taken if ".task)" in c[1]] == []


RAW = ("torch.rand", "torch.normal", "torch.bernoulli", "torch.multinomial", "torch.poisson", "np.random.")
RAW += ("numpy.random.", "random.")
SEEDED = ("np.random.default_rng", "numpy.random.default_rng", "np.random.Generator", "random.Random")
SEEDED += ("np.random.PCG64",)
METHODS = {
    "normal_",
    "uniform_",
    "bernoulli_",
    "random_",
    "exponential_",
    "multinomial",
    "dropout",
    "dropout_",
}


def raw_draws(module: ast.AST) -> Iterator[str]:
    """Calls that draw from a hidden generator; `generator=` or a seeded generator makes them harmless."""
    for node in ast.walk(module):
        if not isinstance(node, ast.Call):
            continue
        function = ast.unparse(node.func)
        seeded = any(k.arg == "generator" for k in node.keywords)
        if function.startswith(SEEDED):
            if not node.args and not node.keywords:
                yield f"{node.lineno}: {function}() without a seed"
        elif (function.startswith(RAW) and not seeded) or (
            isinstance(node.func, ast.Attribute) and node.func.attr in METHODS and not seeded
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
        ("torch.randint(3, (2,), generator=g)", False),
        ("torch.multinomial(p, 1, generator=g)", False),
        ("torch.bernoulli(p)", True),
        ("x.normal_()", True),
        ("nn.functional.dropout(x)", True),
        ("np.random.shuffle(x)", True),
        ("np.random.default_rng()", True),
        ("np.random.default_rng(seed)", False),
        ("generator.integers(3)", False),
        ("random.choice(x)", True),
        ("random.Random(3)", False),
        ("step.noise.normal('z', (3,))", False),
    ],
)
def test_the_lint_sees_raw_draws(code: str, found: bool) -> None:
    assert bool(list(raw_draws(ast.parse(code)))) == found


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["tasks"], 0),
        (["describe", "causal-lm"], 0),
        (["auto", "--help"], 0),
        (["auto", "--task", "causal-lm", "--epohs", "3"], 2),
        (["auto", "--task", "casual-lm"], 2),
        (["auto", "--task", "causal-lm", "--batch-size", "0"], 2),
        (["resume", "nowhere"], 2),
        (["train-it"], 2),
    ],
)
def test_an_answer_needs_nothing_heavy(words: list[str], code: int, tmp_path: Path) -> None:
    script = REGISTER + (
        "import sys; from isobatch.launch.cli import main; code = main(sys.argv[1:]);"
        f" print('heavy:', *[m for m in {HEAVY} if m in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    *lines, heavy = done.stderr.splitlines()
    assert heavy == "heavy:"
    assert len(lines) == (1 if code else 0), "one line for the user's error, none otherwise"
    assert list(tmp_path.iterdir()) == []


def test_help_answers_at_once(cli) -> None:  # type: ignore[no-untyped-def]
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        answer = cli("--help")
        seconds.append(time.perf_counter() - began)
        assert (answer.code, answer.err) == (0, "")
    assert min(seconds) < HELP_SECONDS


def test_users_own_folders_of_our_names_do_not_hide_ours(cli, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    folder = tmp_path / 'it\'s my "project" 日本'
    for package in ("engine", "models", "data", "hub"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text("raise RuntimeError('the wrong one')")
    (folder / "fire.py").write_text("raise RuntimeError('the wrong one')")
    answer = cli("tasks", folder=folder)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("causal-lm")
