"""Hooks: what watches training and decides when it saves, evaluates and stops. None computes what is learnt.

A hook overrides what it needs, and is asked for nothing else. Every rank has the same hooks, in one order.
Only `at_pause` may run collectives: everywhere else the ranks may stand in different places.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from isobatch.core.errors import IsobatchError, TrainingError, UserError
from isobatch.core.measures import now
from isobatch.core.strategies import traits_of
from isobatch.engine.checkpointing.portable_state import cut
from isobatch.engine.runs.classify_errors import user_code_error
from isobatch.models.capabilities import SeesGradients

if TYPE_CHECKING:
    from torch import Tensor

    from isobatch.engine.checkpointing.checkpoint import SavedCheckpoint
    from isobatch.engine.train.figures import StepFigures, StepOutput
    from isobatch.engine.train.state import Training

Signal = Literal["pause", "save", "stop", "end_phase"]
"""What a hook may ask for. `pause`: its `at_pause` has something to do; the others pause as well."""
SIGNALS = frozenset(get_args(Signal))
Ending = Literal["done", "stopped", "early"]
"""How a phase ended: all its steps, a request to stop, or a hook's `end_phase`."""


class Hook:
    """Base of all hooks: nothing here does anything. Steps count from 1."""

    name: ClassVar[str] = ""
    """Its key in checkpoints and messages; by default the class's name in lower case."""
    votes: ClassVar[tuple[str, ...]] = ()
    """Names of its numbers in the step's one reduction. The layout is fixed before the first step."""
    weights: ClassVar[bool] = False
    """Whether `tensors` are weights, such as an average: they are evaluated beside the model's own, and
    exported to final/NAME."""
    changes_learning: ClassVar[bool] = False
    """Whether the recipe must name it, because what is learnt depends on it."""

    def phase(self, state: Training) -> contextlib.AbstractContextManager[Any]:  # noqa: ARG002  for hooks to use
        """Entered when a phase begins, left when it ends, by an error too."""
        return contextlib.nullcontext()

    def ended(self) -> bool:
        """Whether a checkpoint that is resumed from had already ended its phase early."""
        return False

    def vote(self, step: int) -> Mapping[str, float]:  # noqa: ARG002
        """Numbers by the names in `votes`, or 0. `StepFigures.votes` has their sums over ranks."""
        return {}

    def due(self, step: int) -> bool:  # noqa: ARG002
        """Whether to pause after this step: the same on every rank."""
        return False

    def around(self, state: Training, step: int) -> contextlib.AbstractContextManager[Any]:  # noqa: ARG002
        """Context of a step's computation."""
        return contextlib.nullcontext()

    def on_gradients(self, state: Training, step: int) -> Mapping[str, Any] | None:
        """Gradients are whole and not clipped yet. Returns figures for the step's row, as JSON.

        Refused before the first step under strategies that shard gradients.
        """

    def after_update(self, state: Training, step: int) -> None:
        """After the optimizer, on every rank: work for the device alone, such as an average of weights."""

    def on_figures(self, figures: StepFigures) -> set[Signal] | None:
        """A step's figures on the host, while the next one runs: it waits for nothing. None: no signal."""

    def on_left_out(self, phase: str, step: int) -> None:
        """In place of `on_figures` where the run leaves the step out."""

    def at_pause(self, state: Training, step: int, asked: set[Signal]) -> set[Signal] | None:
        """Between two steps, on all ranks, with all figures read: collectives are allowed.

        `asked`: by the hooks of the steps since the last pause and those before it in the list. Returns more.
        """

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it, as JSON."""
        return {}

    def tensors(self) -> Mapping[str, Tensor]:
        """By a parameter's name a tensor like what `Strategy.held` yields of it: saved, dealt to another
        number of processes and cut to a pruned model as the optimizer's moments are.
        """
        return {}

    def load(self, state: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `state` and `tensors` returned when a checkpoint was saved."""


class Seen(Hook):
    """Keeps the figures of every step, for those who compute steps again."""

    def __init__(self) -> None:
        self.figures: list[StepFigures] = []

    def on_figures(self, figures: StepFigures) -> None:
        figures.output.loaded.batches = []  # they may be large
        self.figures.append(figures)


def name_of(hook: Hook) -> str:
    """A hook's key in checkpoints and messages."""
    return hook.name or type(hook).__name__.lower()


ASKED = ("vote", "due", "around", "on_gradients", "after_update", "on_figures", "on_left_out", "at_pause")


class Hooks:
    """All hooks of a run, in order. Each method asks those that override it."""

    def __init__(self, hooks: Sequence[Hook] = ()) -> None:
        """Raises UserError where two hooks have one name, or one vote."""
        for hook in hooks:
            if isinstance(hook.votes, str):
                raise UserError(f"hook {name_of(hook)}: votes is a text: write votes = ({hook.votes!r},)")
        self.all = tuple(hooks)
        self.votes = tuple(vote for hook in hooks for vote in hook.votes)
        """The layout of the votes."""
        self._no_votes = dict.fromkeys(self.votes, 0.0)
        names = [name_of(hook) for hook in hooks]
        for what, many in (("name", names), ("vote", self.votes)):
            if twice := [one for one in many if many.count(one) > 1]:
                raise UserError(f"two hooks have the {what} {twice[0]}: rename one")
        self._asked = {
            method: [(name_of(h), h, getattr(h, method)) for h in hooks if overrides(h, method)]
            for method in ASKED
        }
        self._began = 0.0
        """When the step that runs began, without pauses; a clock of `now`."""
        self._first = -1
        """The first step after the phase began or was resumed: it pauses."""
        self.see_gradients = False
        """Whether a hook or the task looks at gradients in this phase."""

    @contextlib.contextmanager
    def phase(self, state: Training, start: int) -> Iterator[None]:
        """A phase, from before its step `start` (from 0).

        Raises UserError for a hook that the strategy cannot serve.
        """
        if self._asked["on_gradients"] and not traits_of(state.plan.strategy).sees_gradients:
            hook = self._asked["on_gradients"][0][1]
            raise UserError(
                f"hook {name_of(hook)} looks at gradients, and --strategy {state.plan.strategy} never has"
                " them whole: use ddp, or leave the hook out"
            )
        self._first, self._began = start + 1, now()
        self.see_gradients = bool(self._asked["on_gradients"]) or isinstance(state.task, SeesGradients)
        with contextlib.ExitStack() as open_phases:
            for hook in self.all:
                with blaming(hook, state, start + 1):
                    open_phases.enter_context(hook.phase(state))
            yield

    def ended(self) -> bool:
        """Whether what was resumed had already ended this phase early."""
        return any(hook.ended() for hook in self.all)

    @contextlib.contextmanager
    def around(self, state: Training, step: int) -> Iterator[None]:
        """Context of a step's computation."""
        with contextlib.ExitStack() as stack:
            self._ask("around", state, step, state, step, enter=stack.enter_context)
            yield

    def vote(self, state: Training, step: int) -> list[float]:
        """This rank's votes in the order of `self.votes`."""
        given: dict[str, float] = {}
        for hook, votes in self._ask("vote", state, step, step):
            if undeclared := votes.keys() - set(hook.votes):
                names = ", ".join(sorted(undeclared))
                voted = f"{names}, which its `votes` do not name"
                raise TrainingError(f"hook {name_of(hook)} votes {voted}: add it there")
            given |= votes
        return list((self._no_votes | given).values())

    def gradients(self, state: Training, step: int) -> dict[str, Any]:
        """Figures about whole gradients before they are clipped."""
        asked = self._ask("on_gradients", state, step, state, step)
        return {name: value for _, found in asked if found for name, value in found.items()}

    def load(self, state: Training, saved: SavedCheckpoint) -> None:
        """Give every hook what a checkpoint holds of it."""
        for hook in self.all:
            name = name_of(hook)
            if overrides(hook, "load"):
                own, tensors = saved.state["hooks"].get(name, {}), state.strategy.read_held(saved, name)
                with blaming(hook, state, state.progress.step):
                    hook.load(own, tensors)

    def cut(self, state: Training, keep: Mapping[str, Sequence[tuple[int, Tensor]]]) -> None:
        """Cut the hooks' tensors as a task has cut its model: parameter -> (dimension, indices that stay)."""
        for hook in self.all:
            if tensors := hook.tensors():
                kept = {name: cut(tensor, keep.get(name, ())) for name, tensor in tensors.items()}
                with blaming(hook, state, state.progress.step):
                    hook.load(hook.state(), kept)

    def updated(self, state: Training, step: int) -> None:
        """After the optimizer."""
        self._ask("after_update", state, step, state, step)

    def lap(self) -> float:
        """Seconds from the end of the step before, pauses left out."""
        began, self._began = self._began, now()
        return self._began - began

    def figures(self, state: Training, pending: StepOutput | None) -> set[Signal]:
        """Read a step's figures from the device and show them to the hooks; what these ask for."""
        if pending is None:
            return set()
        figures = pending.read(state)
        if figures is None:
            step = pending.loaded.work.step + 1
            self._ask("on_left_out", state, step, state.schedule.name, step)
            self._began = now()
            return set()
        asked: set[Signal] = set()
        for hook, wanted in self._ask("on_figures", state, figures.step, figures):
            if wanted:
                asked |= _known(hook, wanted)
        return asked

    def due(self, state: Training, step: int) -> bool:
        """Whether to pause after this step; the first one always does."""
        return step == self._first or any(map(itemgetter(1), self._ask("due", state, step, step)))

    def pause(self, state: Training, step: int, asked: set[Signal]) -> set[Signal]:
        """Let every hook do what is due; returns all that was asked for. The step's clock stands still."""
        began = now()
        for _, hook, at_pause in self._asked["at_pause"]:
            with blaming(hook, state, step):
                asked = asked | _known(hook, at_pause(state, step, asked))
        self._began += now() - began
        return asked

    def _ask(
        self, method: str, state: Training, step: int, *arguments: Any, enter: Any = None
    ) -> list[tuple[Hook, Any]]:
        """Each hook with its answer, outside a pause: a collective in it raises TrainingError.

        `enter`: called with each answer, as if the hook did it.
        """
        answers, world = [], state.world
        for name, hook, ask in self._asked[method]:
            world.barred = name
            try:
                answers.append((hook, answer := ask(*arguments)))
                if enter is not None:
                    enter(answer)
            except Exception as error:
                raise blamed(hook, state, step, error) from error
            finally:
                world.barred = ""
        return answers


def _is_ours(hook: Hook) -> bool:
    return type(hook).__module__.startswith("isobatch.")


def _known(hook: Hook, asked: set[Signal] | None) -> set[Signal]:
    """What a hook asks for. Raises TrainingError where that is no signal, or not for it to ask."""
    if unknown := set(asked or ()) - SIGNALS:
        raise TrainingError(
            f"hook {name_of(hook)} asks for {', '.join(sorted(unknown))}: known are"
            f" {', '.join(sorted(SIGNALS))}"
        )
    if asked and "end_phase" in asked and not (hook.changes_learning or _is_ours(hook)):
        raise TrainingError(
            f"hook {name_of(hook)} ends the phase, which changes what is learnt: say changes_learning = True,"
            ' so that the recipe names it, or ask for "stop", behind which the run can be resumed'
        )
    return asked or set()


def overrides(hook: Hook, method: str) -> bool:
    """Whether a hook has this method of its own."""
    return getattr(type(hook), method) is not getattr(Hook, method)


def blamed(hook: Hook, state: Training, step: int, error: Exception) -> Exception:
    """What an error in a hook is for the user; the project's own errors, and its bugs, stay what they are."""
    if isinstance(error, IsobatchError) or _is_ours(hook):
        return error
    said = user_code_error(error) or f"{type(error).__name__}: {error}"
    return TrainingError(f"hook {name_of(hook)} failed in step {step} of {state.schedule.name}: {said}")


@contextlib.contextmanager
def blaming(hook: Hook, state: Training, step: int) -> Iterator[None]:
    """Inside, an error is the hook's: see `blamed`."""
    try:
        yield
    except Exception as error:
        raise blamed(hook, state, step, error) from error


def saved_of(
    hooks: Sequence[Hook], state: Training, step: int
) -> tuple[dict[str, dict[str, Any]], dict[str, Mapping[str, Tensor]]]:
    """By their names the states and the tensors of those that have any, for a checkpoint."""
    states, tensors = {}, {}
    for hook in hooks:
        with blaming(hook, state, step):
            if own := hook.state():
                states[name_of(hook)] = json.loads(json.dumps(own))
            if held := hook.tensors():
                tensors[name_of(hook)] = held
    return states, tensors
