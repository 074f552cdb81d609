"""What the files may import and draw, and how soon the command line answers."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "launch": {"engine", "models", "data"},
    "engine": {"models", "data"},
    "models": {"hub"},
    "data": {"hub"},
    "hub": set(),
}
"""Package -> the others it may import."""
FILES = sorted(f for package in PACKAGES for f in (ROOT / package).rglob("*.py"))
HEAVY = ["torch", "transformers", "accelerate", "deepspeed", "datasets", "peft", "bitsandbytes"]
ONLY_WHERE_NEEDED = {"deepspeed", "bitsandbytes", "peft", "torchao", "onnx", "onnxruntime", "datasets"}
HELP_SECONDS = 0.3


def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def imported(nodes: Iterator[ast.AST]) -> Iterator[str]:
    for node in nodes:
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


@pytest.mark.parametrize("file", FILES, ids=name)
def test_imports_point_one_way(file: Path) -> None:
    package = file.relative_to(ROOT).parts[0]
    allowed = PACKAGES[package] | {package}
    roots = {module.split(".")[0] for module in imported(ast.walk(tree(file)))}
    assert roots & (PACKAGES.keys() | {"tests", "benchmarks"}) <= allowed


@pytest.mark.parametrize("file", FILES, ids=name)
def test_optional_libraries_are_imported_in_the_branch_that_needs_them(file: Path) -> None:
    roots = {module.split(".")[0] for module in imported(at_import(tree(file)))}
    assert not roots & ONLY_WHERE_NEEDED


@pytest.mark.parametrize("file", FILES, ids=name)
def test_nothing_unpickles(file: Path) -> None:
    """A run folder or a checkpoint may come from anywhere: reading it must run no code of its own."""
    calls = [ast.unparse(n.func) for n in ast.walk(tree(file)) if isinstance(n, ast.Call)]
    assert not {"torch.load", "pickle.load", "pickle.loads", "joblib.load", "yaml.load", "eval", "exec"} & {
        *calls
    }
    keywords = {k.arg for n in ast.walk(tree(file)) if isinstance(n, ast.Call) for k in n.keywords}
    assert "allow_pickle" not in keywords


@pytest.mark.parametrize("file", FILES, ids=name)
def test_models_code_runs_where_one_function_says_so(file: Path) -> None:
    words = [n.value for n in ast.walk(tree(file)) if isinstance(n, ast.Constant)]
    keywords = [k.arg for n in ast.walk(tree(file)) if isinstance(n, ast.Call) for k in n.keywords]
    assert "trust_remote_code" not in keywords
    # flags.py has it as a word that people bring from other tools.
    assert "trust_remote_code" not in words or name(file) in ("models/hub.py", "launch/flags.py")


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
        elif (
            function.startswith(RAW)
            and not seeded
            or isinstance(node.func, ast.Attribute)
            and node.func.attr in METHODS
            and not seeded
        ):
            yield f"{node.lineno}: {function}"


@pytest.mark.parametrize("file", [f for f in FILES if f.parts[-2] in ("models", "data")], ids=name)
def test_tasks_and_data_draw_no_noise_of_their_own(file: Path) -> None:
    """Their draws come from the step's noise, or from a generator that they seed."""
    assert list(raw_draws(tree(file))) == []


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
    script = (
        f"import sys; sys.path.append({str(ROOT)!r}); from launch.cli import main; code = main(sys.argv[1:]);"
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
