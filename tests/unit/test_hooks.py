"""Tests of engine/train/hooks.py and loop.py: who is asked for what and when, on one rank and on several."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from isobatch.core.errors import TrainingError, UserError
from isobatch.core.recipe import Recipe
from isobatch.data.base import ArraySource
from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint
from isobatch.engine.distributed.communicator import Communicator
from isobatch.engine.loading.sampler import Sampler
from isobatch.engine.strategies.replicated import ReplicatedStrategy
from isobatch.engine.train.hooks import ASKED, Hook, Hooks, Seen
from isobatch.engine.train.loop import run_phase
from isobatch.tests.forgery import one_process
from isobatch.tests.tasks.failing import Line, Points
from isobatch.tests.unit.helpers import optimizer_of, plan, same, save_checkpoint, training

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from isobatch.engine.train.state import Training

RECIPE = Recipe(task="line", batch_size=8, lr=0.1, clip=0.0, optimizer="sgd", weight_decay=0.0)
FILE_OF_A_USER = "mine"


def state_of(world: Any, steps: int = 4, left_out: tuple[int, ...] = ()) -> Training:
    model = nn.Linear(4, 1)
    nn.init.zeros_(model.weight)
    chosen = plan(processes=world.size)
    strategy = ReplicatedStrategy(model, lambda m: optimizer_of(m, RECIPE), chosen, world, RECIPE.clip)
    source = ArraySource(dict(Points(RECIPE, None).read()["train"]))
    made = training(Line(RECIPE, None), strategy, source, Sampler(64, 8, 0), steps=steps)
    made.schedule = dataclasses.replace(made.schedule, left_out=frozenset(left_out))
    return made


class Told(Hook):
    """Writes down all that it is asked for."""

    def __init__(self, told: list[Any], name: str = "told", votes: tuple[str, ...] = ()) -> None:
        self.told = told
        self.name, self.votes = name, votes  # type: ignore[misc]

    def _tell(self, what: str, step: int) -> None:
        self.told.append((self.name, what, step))

    @contextlib.contextmanager
    def phase(self, state: Training) -> Iterator[None]:
        self._tell("phase", state.progress.step)
        yield
        self._tell("end", state.progress.step)

    def vote(self, step: int) -> dict[str, float]:
        self._tell("vote", step)
        return {}

    @contextlib.contextmanager
    def around(self, state: Training, step: int) -> Iterator[None]:
        self._tell("enter", step)
        yield
        self._tell("leave", step)

    def on_gradients(self, state: Training, step: int) -> dict[str, Any]:
        assert all(p.grad is not None for p in state.model.parameters())
        self._tell("gradients", step)
        return {f"seen by {self.name}": step}

    def after_update(self, state: Training, step: int) -> None:
        self._tell("updated", step)

    def on_figures(self, figures: Any) -> Any:
        assert figures.row[f"seen by {self.name}"] == figures.step
        self._tell("figures", figures.step)
        return set()

    def on_left_out(self, phase: str, step: int) -> None:
        self._tell("left out", step)

    def at_pause(self, state: Training, step: int, asked: Any) -> Any:
        self._tell("pause", step)
        return set()


def hook(**methods: Any) -> Hook:
    """One with these methods alone, from a file of a user's."""
    own = {name: staticmethod(method) if callable(method) else method for name, method in methods.items()}
    return type("Own", (Hook,), {"__module__": FILE_OF_A_USER, **own})()  # type: ignore[no-any-return]


def run(
    run_ranks: Any, *hooks: Hook, size: int = 1, start: int = 0, **more: Any
) -> tuple[Any, Training, list[Any]]:
    """How a phase with these hooks ended, its state and its figures."""
    seen = Seen()

    def part(world: Any) -> Any:
        state = state_of(world, **more)
        state.progress.step = start
        return run_phase(state, Hooks([*hooks, seen] if world.is_main else hooks), start), state

    ending, state = run_ranks(size, part).values[0]
    return ending, state, seen.figures


def test_a_step_asks_in_the_order_of_the_list_and_shows_figures_one_step_late(run_ranks: Any) -> None:
    told: list[Any] = []
    run(run_ranks, Told(told, "a"), Told(told, "b"), steps=3)

    def both(what: str, step: int) -> list[Any]:
        return [("a", what, step), ("b", what, step)]

    def computed(step: int) -> list[Any]:
        around = [("b", "leave", step), ("a", "leave", step)]
        asked = ("enter", "gradients", "updated", "vote")
        return [*(one for what in asked for one in both(what, step)), *around]

    assert told == [
        *both("phase", 0),
        *computed(1), *both("figures", 1), *both("pause", 1),  # the first step always pauses
        *computed(2),
        *computed(3), *both("figures", 2),
        *both("figures", 3), *both("pause", 3),
        ("b", "end", 3), ("a", "end", 3),
    ]  # fmt: skip


@pytest.mark.parametrize("method", ASKED)
def test_only_what_a_hook_overrides_is_asked(
    method: str, run_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("asked in vain")

    for other in ASKED:
        monkeypatch.setattr(Hook, other, never)
    told: list[Any] = []
    whole = Told(told)
    monkeypatch.setattr(Told, "on_figures", lambda own, figures: own._tell("figures", figures.step) or set())  # noqa: SLF001
    asked = hook(**{method: getattr(whole, method)}) if method != "due" else hook(due=lambda _: False)
    run(run_ranks, asked, steps=3, left_out=(2,))
    assert len({what for _, what, _ in told}) == {"due": 0, "around": 2}.get(method, 1)


@pytest.mark.parametrize("size", [1, 3])
def test_votes_are_summed_by_name_over_ranks(size: int, run_ranks: Any) -> None:
    found: list[Any] = []

    def part(world: Any) -> None:
        one = hook(name="one", votes=("a", "b"), vote=lambda step: {"b": 10.0 * step, "a": world.rank + 1.0})
        two = hook(name="two", votes=("c",), on_figures=lambda f: found.append(f.votes) or set())
        three = hook(name="three", votes=("d",), vote=lambda step: {"d": 1.0} if step == 2 else {})
        run_phase(state_of(world, steps=2), Hooks([one, two, three]))

    run_ranks(size, part)
    ranks = sum(range(1, size + 1))
    first = {"a": ranks, "b": 10.0 * size, "c": 0.0, "d": 0.0}
    assert sorted(found, key=lambda votes: votes["b"]) == [
        *[first] * size,
        *[{**first, "b": 20.0 * size, "d": size}] * size,
    ]


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        ({"vote": lambda _: {"mine": 1.0}}, "hook own votes mine, which its `votes` do not name"),
        ({"on_figures": lambda _: {"sleep"}}, "hook own asks for sleep: known are end_phase, pause, save"),
        ({"at_pause": lambda *_: {"halt"}}, "hook own asks for halt: known are end_phase, pause, save, stop"),
        ({"on_figures": lambda _: {"end_phase"}}, "hook own ends the phase, which changes what is learnt"),
    ],
)
def test_what_is_not_known_is_refused(methods: dict[str, Any], said: str, run_ranks: Any) -> None:
    with pytest.raises(TrainingError, match=rf"^{said}"):
        run(run_ranks, hook(**methods))


def test_two_hooks_have_two_names_and_other_votes() -> None:
    with pytest.raises(UserError, match="two hooks have the name own: rename one"):
        Hooks([hook(), hook()])
    with pytest.raises(UserError, match="two hooks have the vote stop: rename one"):
        Hooks([hook(votes=("stop",)), hook(name="other", votes=("stop",))])


def test_gradients_are_refused_where_they_are_never_whole(run_ranks: Any) -> None:
    def part(world: Any) -> None:
        state = state_of(world)
        state.plan = plan(processes=2, strategy="fsdp2")
        with pytest.raises(UserError, match=r"^hook told looks at gradients, and --strategy fsdp2 never has"):
            run_phase(state, Hooks([Told([])]))

    run_ranks(2, part)


@pytest.mark.parametrize("method", [m for m in ASKED if m not in ("at_pause", "on_left_out")])
@pytest.mark.parametrize("size", [1, 2])
def test_a_collective_outside_of_a_pause_is_refused(size: int, method: str, run_ranks: Any) -> None:
    """Also in one process, where it would hang nothing yet."""

    def part(world: Any) -> None:
        def collective(*_: Any) -> Any:
            world.all_gather_objects(1)

        if size == 1:
            world = Communicator(plan())
        with pytest.raises(TrainingError, match=r"^hook own runs a collective .* outside of at_pause"):
            run_phase(state_of(world), Hooks([hook(**{method: collective})]))
        assert not world.barred
        state, gathered = state_of(world), list[Any]()
        pausing = hook(at_pause=lambda *_: gathered.append(world.all_gather_objects(world.rank)) or set())
        run_phase(state, Hooks([pausing]))
        assert gathered == [list(range(size))] * 2

    run_ranks(size, part)


def fail(*_: Any) -> Any:
    raise ValueError("as it was told")


@contextlib.contextmanager
def fail_inside(*_: Any) -> Iterator[None]:
    raise ValueError("as it was told")
    yield


@pytest.mark.parametrize(
    ("method", "how", "step"),
    [
        *((m, fail, 3 if m == "on_left_out" else 1) for m in ASKED if m != "due"),
        ("due", fail, 2),
        ("around", fail_inside, 1),
        ("phase", fail_inside, 1),
    ],
)
def test_a_hook_that_raises_is_named_with_its_step(
    method: str, how: Callable[..., Any], step: int, run_ranks: Any
) -> None:
    own = hook(**{method: how})
    with pytest.raises(TrainingError, match=rf"^hook own failed in step {step} of train: ValueError: as it"):
        run(run_ranks, own, left_out=(3,))
    type(own).__module__ = "isobatch.engine.hooks.own"  # one of ours: a bug, whose traceback says more
    with pytest.raises(ValueError, match=r"^as it was told$"):
        run(run_ranks, own, left_out=(3,))


class Average(Hook):
    """Holds a tensor for each weight, and how often it was asked."""

    def __init__(self) -> None:
        self.count, self.held = 0, dict[str, Any]()

    def after_update(self, state: Training, step: int) -> None:
        self.count += 1
        self.held = {name: tensor.clone() + step for name, tensor in state.strategy.held()}

    def state(self) -> dict[str, Any]:
        return {"count": self.count}

    def tensors(self) -> Any:
        return self.held

    def load(self, state: dict[str, Any], tensors: Any) -> None:
        self.count, self.held = state["count"], dict(tensors)


def test_state_and_tensors_come_back(tmp_path: Path, run_ranks: Any) -> None:
    def part(world: Any) -> None:
        state, one, other, new = state_of(world), Average(), Average(), hook(load=fail, name="new")
        run_phase(state, Hooks([one]))
        collected = state.strategy.collect_state({"average": one.tensors()})
        facts = {"hooks": {"average": one.state()}, "progress": dataclasses.asdict(state.progress)}
        save_checkpoint(tmp_path / "train-4", collected, facts, one_process())
        saved = SavedCheckpoint(tmp_path / "train-4")
        again = state_of(world)
        again.strategy.restore(saved)
        Hooks([other]).load(again, saved)
        assert other.count == one.count == 4
        assert same(other.held, one.held)
        keep = {"weight": [(1, torch.tensor([0, 3]))]}
        Hooks([other]).cut(again, keep)
        assert same(other.held, {**one.held, "weight": one.held["weight"][:, [0, 3]]})
        with pytest.raises(TrainingError, match=r"^hook new failed in step 4 of train: ValueError"):
            Hooks([new]).load(dataclasses.replace(again, progress=state.progress), saved)

    run_ranks(1, part)


def test_what_had_ended_early_trains_nothing(run_ranks: Any) -> None:
    told: list[Any] = []
    ending, state, seen = run(run_ranks, Told(told), hook(ended=lambda: True), start=2)
    assert (ending, seen, state.progress.step) == ("early", [], 2)
    assert not state.model.weight.any()
    assert [what for _, what, _ in told] == ["phase", "end"]


@pytest.mark.parametrize("start", [0, 2])
def test_the_first_step_after_a_start_and_what_is_due_pause(start: int, run_ranks: Any) -> None:
    pauses: list[Any] = []
    pausing = hook(
        due=lambda step: step == 5, at_pause=lambda _, step, asked: pauses.append((step, asked)) or set()
    )
    assert run(run_ranks, pausing, start=start, steps=7)[0] == "done"
    assert pauses == [(start + 1, set()), (5, set()), (7, {"save"})]


@pytest.mark.parametrize(
    ("signal", "ending", "steps"),
    [("stop", "stopped", 3), ("end_phase", "early", 3), ("save", "done", 6), ("pause", "done", 6)],
)
def test_what_figures_ask_for_is_done_one_step_later(
    signal: str, ending: str, steps: int, run_ranks: Any
) -> None:
    pauses: list[Any] = []
    asking = hook(on_figures=lambda figures: {signal} if figures.step == 2 else set(), changes_learning=True)
    pausing = hook(name="late", at_pause=lambda _, step, asked: pauses.append((step, asked)) or set())
    found, state, seen = run(run_ranks, asking, pausing, steps=6)
    assert (found, state.progress.step, len(seen)) == (ending, steps, steps)
    assert pauses[1] == (3, {signal})


def test_a_pause_hands_on_what_hooks_before_ask_for(run_ranks: Any) -> None:
    heard: list[Any] = []
    first = hook(at_pause=lambda _, step, asked: {"stop"} if step == 2 else set(), due=lambda s: s == 2)
    last = hook(name="last", at_pause=lambda _, step, asked: heard.append((step, asked)) or set())
    assert run(run_ranks, first, last)[0] == "stopped"
    assert heard[:2] == [(1, set()), (2, {"stop"})]


def test_steps_that_are_left_out_keep_their_rows_and_pauses(run_ranks: Any) -> None:
    told: list[Any] = []
    due = hook(due=lambda step: step == 3)
    _, state, seen = run(run_ranks, Told(told), due, steps=5, left_out=(2, 3, 5))
    assert [figures.step for figures in seen] == [1, 4]
    assert [(what, step) for _, what, step in told if what in ("left out", "pause", "figures")] == [
        ("figures", 1), ("pause", 1), ("left out", 2), ("left out", 3), ("pause", 3), ("figures", 4),
        ("left out", 5), ("pause", 5),
    ]  # fmt: skip
    assert [what for _, what, step in told if step == 2] == ["left out"]
    assert state.progress.step == 5
    assert state.progress.samples == 16
