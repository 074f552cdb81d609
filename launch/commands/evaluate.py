"""`evaluate`: metrics of a finished run."""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from isobatch.core.errors import UserError
from isobatch.core.extras import need
from isobatch.core.measures import printable
from isobatch.core.number_ranges import Positive
from isobatch.core.plan import PlanOptions
from isobatch.core.terminal.console import format_metrics, print_answer
from isobatch.data.base import TEST, fingerprint
from isobatch.data.digests import file_hash
from isobatch.engine.registry import workload_of
from isobatch.launch.local.run_setup import DataOptions, locate_data, open_single_run, plan_for_this_machine
from isobatch.models import hub, lora
from isobatch.models.protocols import Generates, KeepsBaselines

if TYPE_CHECKING:
    from isobatch.engine.runs.run_folder import RunFolder
    from isobatch.engine.verification.replay import Replay

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateOptions(DataOptions):
    """Flags of `evaluate`."""

    split: str | None = None
    """Only this split; by default every held-out one."""
    test: str | None = None
    """A file of other samples, in place of the held-out splits: with the run's own tokenizer, template,
    labels and items. The figures stay in evaluations.jsonl, and the report shows them."""
    lm_eval: str | None = None
    """Tasks of lm-evaluation-harness, with commas, or a folder of such (YAML), in place of the held-out data:
    of final/, with the chat template where it learnt conversations. Kept and shown as of --test."""
    limit: Positive | None = None
    """Only so many samples of each task of --lm-eval."""


def evaluate(words: Sequence[str]) -> int:
    """Usage: evaluate RUN [--split valid | --test FILE | --lm-eval TASKS] [--json]

    The newest checkpoint on held-out data.
    """
    from isobatch.engine.verification.replay import Replay

    run, options = open_single_run(words, "evaluate", EvaluateOptions)
    given = {"--split": options.split, "--test": options.test, "--lm-eval": options.lm_eval}
    if len(both := [flag for flag, value in given.items() if value]) > 1:
        raise UserError(f"{' and '.join(both)} exclude each other: give one of them")
    if options.limit and not options.lm_eval:
        raise UserError(f"--limit {options.limit}: is for --lm-eval")
    if options.lm_eval:
        metrics = _ask_harness(run, options.lm_eval, options.limit)
        _keep(run, {"lm_eval": options.lm_eval, "limit": options.limit, "metrics": metrics})
        return _print_metrics(metrics, options.json)
    locate_data(run, run.recipe, options.data)
    plan = plan_for_this_machine(run.recipe, run.facts, PlanOptions(processes=1, compile="off"))
    replay = Replay(run, plan)
    checkpoint = replay.trained()
    if checkpoint is None or not replay.load_trained():
        raise UserError(f"{run.folder} has no checkpoint to evaluate: train it first")
    if options.split and options.split not in run.facts.samples:
        raise UserError(f"--split {options.split}: the data has {', '.join(run.facts.samples)}")
    splits = [options.split] if options.split else [s for s in run.facts.samples if s != "train"]
    with tempfile.TemporaryDirectory() as folder:
        splits = [_hold_out(replay, options.test, Path(folder))] if options.test else splits
        metrics = _measure(replay, splits)
    if options.test:
        found = {"data": options.test, "digest": file_hash(Path(options.test).expanduser())}
        _keep(run, {**found, "checkpoint": checkpoint.name, "metrics": metrics[splits[0]]})
    unfinished = "" if run.status() == "done" else f"; the run is not finished ({run.status()})"
    print(printable(f"{run.folder}: checkpoint {checkpoint.name}{unfinished}"), file=sys.stderr)
    return _print_metrics(metrics, options.json)


def _keep(run: RunFolder, row: Mapping[str, Any]) -> None:
    """Add figures to the run; where its folder cannot be written they are only printed."""
    try:
        run.keep_evaluation(row)
    except UserError as error:
        print(printable(f"not kept: {error}"), file=sys.stderr)


def _print_metrics(metrics: Mapping[str, Mapping[str, Any]], as_json: bool) -> int:
    lines = (f"{name}: {format_metrics(found, '.6g')}" for name, found in metrics.items())
    return print_answer(metrics, "\n".join(lines), as_json)


def _ask_harness(run: RunFolder, names: str, limit: int | None) -> dict[str, dict[str, Any]]:
    """Task -> what lm-evaluation-harness measures of final/, an adapter on its base. Raises UserError."""
    task, folder = require_capability(run, Generates, "evaluate --lm-eval", "writes no text"), Path(names)
    need("lm_eval", "--lm-eval")
    import torch
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    own = folder.expanduser().resolve() if folder.expanduser().is_dir() else None
    manager = TaskManager(include_path=own, include_defaults=own is None)
    asked = manager.all_subtasks if own else names.split(",")
    if unknown := [name for name in asked if not manager.match_tasks([name])] or ["in it"] * (not asked):
        raise UserError(f"--lm-eval {names}: is no folder, and lm-eval has no task {unknown[0]}")
    adapter = run.final / lora.CONFIG_FILE
    base, revision = lora.base_model_of(run.final) if adapter.is_file() else (run.final, None)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    more: dict[str, Any] = {"peft": str(run.final)} if adapter.is_file() else {}
    more |= hub.remote_code_kwargs(getattr(task.options, "remote_code", False))  # type: ignore[attr-defined]
    try:
        model = HFLM(str(base), revision=revision or "main", tokenizer=str(run.final), device=device, **more)
        found = simple_evaluate(
            model,
            tasks=list(asked),
            limit=limit,
            task_manager=manager,
            log_samples=False,
            apply_chat_template=bool(run.facts.extra.get("template")),
        )
    except Exception as error:  # a task's data, its YAML, the hub: each becomes one line
        raise UserError(
            f"--lm-eval {names}: {(str(error) or type(error).__name__).splitlines()[0]}"
        ) from error
    return {
        name: {key.removesuffix(",none"): v for key, v in figures.items() if isinstance(v, int | float)}
        for name, figures in found["results"].items()
    }


def _measure(replay: Replay, splits: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Split -> its metrics, also of baselines that are kept beside the model."""
    from isobatch.engine.train.evaluate import host_batches

    task, model, run = replay.state.task, replay.state.model, replay.run
    metrics = {name: replay.evaluate(name) for name in splits}
    for name, found in metrics.items():
        if isinstance(task, KeepsBaselines) and run.final.is_dir():
            found |= task.kept_metrics(model, run.final, partial(host_batches, replay.state.splits[name]))
    return metrics


def _hold_out(replay: Replay, file: str, folder: Path) -> str:
    """Prepare the samples of a file in `folder` as those of the run were; the name of their split."""
    run, path, state = replay.run, Path(file).expanduser(), replay.state
    if not path.is_file():
        raise UserError(f"--test {file}: there is no such file")
    _, data = workload_of(run.recipe).make(dataclasses.replace(run.recipe, data=str(path), format=None))
    try:
        sizes, name = data.prepare_test(folder, run.facts), path.name
    except UserError as error:
        said = str(error).replace("--data ", "--test ").replace("--file ", "--test ")
        raise UserError(f"{said} (it is read as the data of {run.folder} was)") from None
    replay.builder.hold_out(name, data.open(folder, TEST), fingerprint(folder))
    extra = {key: value for key, value in run.facts.extra.items() if key != "sets"}
    state.facts = dataclasses.replace(run.facts, extra={**extra, "splits": {name: sizes}})
    return name


def require_capability(run: RunFolder, capability: type[T], command: str, refusal: str) -> T:
    """A finished run's task. Raises UserError without the protocol `capability`, or without final/."""
    task, _ = workload_of(run.recipe).make(run.recipe)
    if not isinstance(task, capability):
        raise UserError(f"{command}: {run.folder} trained {run.recipe.task}, which {refusal}")
    require_final(run)
    return task


def require_final(run: RunFolder) -> None:
    """Raises UserError for a run that is not finished."""
    if not run.final.is_dir():
        raise UserError(f"{run.folder} has no final/ yet: {run.why_unfinished()}")
