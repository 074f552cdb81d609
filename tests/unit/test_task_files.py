"""A user's task file: its neighbours are its own, and what is wrong with it is said in a line."""

from __future__ import annotations

import importlib
import re
import sys
from typing import TYPE_CHECKING

import pytest

from isobatch.core.errors import UserCodeError, UserError
from isobatch.engine.registry import complete
from isobatch.engine.task_files import load_task_class, task_file_hash
from isobatch.engine.train.hooks import Hook, name_of
from isobatch.engine.train.own_hooks import BUILT_IN, load_hooks, with_learning_hooks
from isobatch.tests.integration.helpers import launch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


TASK = """
from isobatch import Task

class Mine(Task):
    def build_model(self, facts): ...
    def loss(self, model, batch, step): ...
"""


@pytest.fixture(autouse=True)
def _forget_modules() -> Iterator[None]:
    """Modules and the path are the process's: the next test has neither."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in sys.modules.keys() - modules:
        if name.partition(".")[0] in ("models", "data", "neighbour") or name.startswith("isobatch_user_"):
            del sys.modules[name]


def written(folder: Path, text: str) -> str:
    (folder / "mine.py").write_text(text)
    return f"{folder}/mine.py:Mine"


def test_neighbours_called_as_our_rooms_are_the_users(tmp_path: Path) -> None:
    for name in ("models", "data"):
        (tmp_path / f"{name}.py").write_text(f"PLACE = {name!r}\n")
    (tmp_path / "engine").mkdir()
    text = "import data, models\nassert (data.PLACE, models.PLACE) == ('data', 'models')\n" + TASK
    assert load_task_class(written(tmp_path, text)).__name__ == "Mine"


def test_another_projects_neighbours_are_forgotten(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name / "models").mkdir(parents=True)  # without an __init__.py
        (tmp_path / name / "models" / "net.py").write_text(f"PLACE = {name!r}\n")
        text = f"from models import net\nassert net.PLACE == {name!r}\n{TASK}"
        assert load_task_class(written(tmp_path / name, text)).__name__ == "Mine"


def test_an_import_error_shows_the_users_frames_alone(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("import no_such_library\n")
    with pytest.raises(UserCodeError, match="cannot be imported: ModuleNotFoundError") as caught:
        load_task_class(written(tmp_path, "import neighbour\n" + TASK))
    frames = caught.value.what
    assert f'File "{tmp_path}/mine.py", line 1' in frames
    assert f'File "{tmp_path}/neighbour.py", line 1' in frames
    assert "task_files.py" not in frames
    assert caught.value.exit_code == 2


def test_on_the_command_line_it_ends_with_2(tmp_path: Path) -> None:
    written(tmp_path, "def broken(:\n")
    done = launch("describe", "./mine.py:Mine", cwd=tmp_path)
    assert done.returncode == 2
    assert "SyntaxError" in done.stderr.splitlines()[-1]
    assert "launch/cli.py" not in done.stderr


def test_a_file_is_known_by_its_content(tmp_path: Path) -> None:
    place = written(tmp_path, TASK)
    before = task_file_hash(place)
    assert before == task_file_hash(place)
    assert task_file_hash(written(tmp_path, TASK + "# changed\n")) != before
    assert task_file_hash("causal-lm") is None


OPTIONS = """
import dataclasses
from isobatch import Task
from isobatch.data.base import ArraySource, Data

class Nothing(Data):
    def read(self): ...

@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    FIELD

class Mine(Task):
    Options, data = Options, Nothing
    def build_model(self, facts): ...
    def loss(self, model, batch, step): ...
"""


@pytest.mark.parametrize(
    ("field", "problem"),
    [
        ("width: int", "--width: this task needs it"),
        ("lr: float = 1.0", "its Options have lr, which every recipe has: rename it"),
        ("sizes: list = ()", "--sizes 3: a field of type <class 'list'> cannot be a flag: use int"),
    ],
)
def test_options_that_cannot_be_had_are_one_line(field: str, problem: str, tmp_path: Path) -> None:
    place = written(tmp_path, OPTIONS.replace("FIELD", field))
    with pytest.raises(UserError, match=re.escape(problem)):
        complete(place, {"sizes": "3"} if "sizes" in field else {})


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("    forms = ('circle',)", "Mine has forms and no open_predictor, which belongs to it"),
        ("    sample = 3", "Mine.sample must be a method: rename it"),
        ("    def step_figures(self): ...", r"Mine.step_figures takes \(self, recorded\), not \(self\)"),
    ],
)
def test_part_of_what_is_asked_for_together_is_refused_by_name(
    body: str, problem: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=problem):
        load_task_class(written(tmp_path, f"{TASK}\n{body}\n"))


WHOLE = (
    "from isobatch import Data\nclass Rows(Data):\n    def read(self): return {}\n"
    + TASK
    + "    data = Rows\n"
)


def test_a_task_that_forgets_its_base_is_told_so(tmp_path: Path) -> None:
    text = WHOLE + "    def __init__(self, recipe, options): self.width = 3\n"
    with pytest.raises(UserError, match=r"Mine.__init__ must call super\(\).__init__\(recipe, options\)"):
        complete(written(tmp_path, text), {})


def test_a_method_that_is_nearly_a_capability_is_told(tmp_path: Path) -> None:
    _, notes = complete(written(tmp_path, WHOLE + "    def step_figure(self, recorded): ...\n"), {})
    assert notes[-1] == "Mine.step_figure is not step_figures, which may be meant"
    other = tmp_path / "other"
    other.mkdir()
    _, notes = complete(written(other, WHOLE + "    def step_figures(self, recorded): ...\n"), {})
    assert notes == []


HOOK = """
from isobatch import Hook

class Mine(Hook):
    {}
"""


def hook(folder: Path, body: str = "pass", name: str = "Mine") -> str:
    (folder / "hooks.py").write_text(HOOK.format(body).replace("Mine", name))
    return f"{folder}/hooks.py:{name}"


def test_hooks_are_loaded_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    words = [hook(tmp_path), hook(tmp_path / "other", "name = 'second'")]
    assert [name_of(one) for one in load_hooks(words)] == ["mine", "second"]


@pytest.mark.parametrize(
    ("body", "name", "said"),
    [
        ("def due(self): ...", "Mine", r"Mine.due takes \(self, step\), not \(self\)"),
        ("votes = 1\n    def __init__(self, size): ...", "Mine", "missing 1 required positional argument"),
        ("pass", "Checkpoint", "another hook is called checkpoint: give its class another `name`"),
        ("pass", "DataGuard", "another hook is called dataguard"),
        ("name = 'a/b'", "Mine", "no word is a/b"),
    ],
)
def test_a_hook_that_cannot_be_one_is_refused_by_name(
    body: str, name: str, said: str, tmp_path: Path
) -> None:
    word = hook(tmp_path, body, name)
    with pytest.raises(UserError, match=f"^--hook {re.escape(word)}: .*{said}"):
        load_hooks([word])


def test_what_is_no_hook_is_said_before_data_is_read(tmp_path: Path) -> None:
    word = hook(tmp_path)
    gone, other = word.replace("hooks", "gone"), word.replace("Mine", "Min")
    for words, said in (
        ((gone,), "there is no file"),
        ((other,), "no Hook called Min there (did you mean Mine?); found: Mine"),
        ((word, word), "another hook is called mine"),
        (("mine",), "is no file; several processes, or a resume, need ./file.py:Class"),
    ):
        done = launch(
            "auto", "--task", "causal-lm", "--data", "nowhere", "--hook", ",".join(words), cwd=tmp_path
        )
        assert done.returncode == 2
        assert done.stderr.count("\n") == 1
        assert f"--hook {words[-1]}: {said}" in done.stderr


def test_only_a_hook_that_says_so_is_in_the_recipe(tmp_path: Path) -> None:
    recipe = complete("causal-lm", {})[0]
    assert with_learning_hooks(recipe, [hook(tmp_path)]) == recipe
    named = with_learning_hooks(recipe, [hook(tmp_path, "changes_learning = True")])
    assert named.hash() != recipe.hash()
    other = with_learning_hooks(recipe, [hook(tmp_path, "changes_learning = True  # another")])
    assert len({recipe.hash(), named.hash(), other.hash()}) == 3
    assert with_learning_hooks(named, []) == recipe


def test_built_in_hooks_are_called_as_their_files_and_change_nothing() -> None:
    for path in BUILT_IN.glob("[!_]*.py"):
        module = vars(importlib.import_module(f"isobatch.engine.hooks.{path.stem}"))
        own = [v for v in module.values() if isinstance(v, type) and issubclass(v, Hook)]
        own = [kind for kind in own if kind.__module__.endswith(f".{path.stem}")]
        assert path.stem.replace("_", "") in {kind.name or kind.__name__.lower() for kind in own}
        assert not any(kind.changes_learning for kind in own)
