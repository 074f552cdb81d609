"""`evaluate`: metrics of a finished run."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from isobatch.core.errors import UserError, first_line, nearest_file
from isobatch.core.extras import need
from isobatch.core.flags import spelling
from isobatch.core.number_ranges import Positive
from isobatch.core.plan import PlanOptions
from isobatch.core.terminal import format_metrics, print_answer, print_lines
from isobatch.data.base import TEST, fingerprint, in_train, load, save
from isobatch.data.digests import file_hash
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.run_folder import RunFolder, finished_run, run_around
from isobatch.launch.local.arguments import command_options, split_words
from isobatch.launch.local.options import DataOptions
from isobatch.launch.local.run_setup import locate_data, one_run, open_run, plan_for_this_machine
from isobatch.models import hub, lora
from isobatch.models.encoder.prediction import onnx_file
from isobatch.models.protocols import Generates, KeepsBaselines

if TYPE_CHECKING:
    from isobatch.core.recipe import Recipe
    from isobatch.engine.verification.replay import Replay

T = TypeVar("T")
Measured = tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]
"""Split or task -> its metrics; and the rows of evaluations.jsonl, none for the run's own data."""


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
    """Usage: evaluate RUN [--split valid | --test FILE [--text-column NAME] [--label-column NAME] |
    --lm-eval TASKS] [--json]

    The newest checkpoint on held-out data. RUN may be an ONNX file of a classifier in its run, or the folder
    of one, such as RUN/chosen: then that is measured. Every flag by which the run's task finds a column does
    so in FILE.
    """
    positional, flags = split_words(words)
    asked = {name: flags.pop(name) for name in [*flags] if name.endswith("_column")}
    options = command_options(flags, EvaluateOptions, "evaluate")
    if len(positional) == 2 and Path(positional[1]).is_file():
        raise UserError(f"evaluate: a file of samples is given as --test {positional[1]}")
    place = finished_run(one_run(positional, "evaluate"))
    form, around = onnx_file(place), run_around(place)
    if form and not around:
        raise UserError(f"{place}: is in no run, by which rows are read: evaluate it there, as RUN/chosen")
    run = open_run((form and around) or place, options.trust)
    say_changed(run)
    given = {"--split": options.split, "--test": options.test, "--lm-eval": options.lm_eval}
    if len(both := [flag for flag, value in given.items() if value]) > 1:
        raise UserError(f"{' and '.join(both)} exclude each other: give one of them")
    if other := asked.keys() - (run.recipe.options if options.test else ()):
        raise UserError(f"{spelling(other.pop())}: is for --test FILE, a column that {run.recipe.task} reads")
    if options.limit and not options.lm_eval:
        raise UserError(f"--limit {options.limit}: is for --lm-eval")
    metrics, kept = _ask_harness(run, options) if options.lm_eval else _measure(run, options, asked, form)
    try:
        for row in kept:
            run.keep_evaluation(row)
    except UserError as error:  # its folder cannot be written: the figures are only printed
        print_lines(f"not kept: {error}")
    brief = [*metrics][: -1 if options.test else 0]  # the rows that were not trained on come last
    told = [(n, format_metrics(m, ".6g", "\n  ")) for n, m in metrics.items() if n not in brief]
    named = ((f"{n} with these, which were trained on", [*metrics[n].items()][:3]) for n in brief)
    told += [(name, format_metrics(dict(some), ".6g")) for name, some in named]
    return print_answer(metrics, "\n".join(map(": ".join, told)), options.json)


def _measure(run: RunFolder, options: EvaluateOptions, asked: dict[str, str], form: Path | None) -> Measured:
    """Metrics of each split, also of baselines that are kept beside the model; of its ONNX file `form` where
    one is given. `asked`: the columns that flags name. Raises UserError.
    """
    from isobatch.engine.train.evaluate import host_batches

    replay, checkpoint = replay_trained(run, options.data)
    if options.split and options.split not in run.facts.samples:
        raise UserError(f"--split {options.split}: the data has {', '.join(run.facts.samples)}")
    splits = [options.split] if options.split else [s for s in run.facts.samples if s != "train"]
    with replay.builder, tempfile.TemporaryDirectory() as folder:
        splits = _hold_out(replay, options.test, asked, Path(folder)) if options.test else splits
        state, metrics = replay.state, {name: {} if form else replay.evaluate(name) for name in splits}
        for name, found in metrics.items():
            if isinstance(state.task, KeepsBaselines) and run.final.is_dir():
                facts = state.facts if options.test else None
                model, beside = (form, form.parent) if form else (state.model, run.final)
                found |= state.task.kept_metrics(
                    model, beside, lambda split=name: host_batches(state.splits[split]), facts
                )
    unfinished = "" if run.status() == "done" else f"; the run is not finished ({run.status()})"
    print_lines(str(form) if form else f"{run.folder}: checkpoint {checkpoint}{unfinished}")
    if not options.test:
        return metrics, []
    row = {"data": options.test, "digest": file_hash(Path(options.test).expanduser())}
    row |= {"form": str(form.resolve().relative_to(run.folder.resolve()))} if form else {}
    names = [options.test, *splits[1:]]  # of the file, and without its rows of training
    kept = zip(names, metrics.values(), strict=True)
    return metrics, [{**row, "data": name, "checkpoint": checkpoint, "metrics": one} for name, one in kept]


def replay_trained(
    run: RunFolder, data: str | None = None, recipe: Recipe | None = None
) -> tuple[Replay, str]:
    """A run's model, that of final/ or the newest checkpoint, on one process; and the checkpoint's name.

    `data`: where the data lies now, if it has moved; `recipe`: another than the run's. Raises UserError.
    """
    from isobatch.engine.verification.replay import Replay

    locate_data(run, data)
    plan = plan_for_this_machine(run.recipe, run.facts, PlanOptions(processes=1, compile="off"))
    replay = Replay(run, plan, recipe)
    if (checkpoint := replay.load_trained()) is None:
        raise UserError(f"{run.folder} has no checkpoint: train it first")
    return replay, checkpoint.name


def _ask_harness(run: RunFolder, options: EvaluateOptions) -> Measured:
    """What lm-evaluation-harness measures of final/, an adapter on its base, by task. Raises UserError."""
    names = str(options.lm_eval)
    task = require_capability(run, Generates, "evaluate --lm-eval", "writes no text")
    need("lm_eval", "--lm-eval")
    import torch
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    folder = Path(names).expanduser().resolve()
    own = folder if folder.is_dir() else None
    manager = TaskManager(include_path=own, include_defaults=own is None)
    asked = manager.all_subtasks if own else names.split(",")
    if unknown := [name for name in asked if not manager.match_tasks([name])] or ["in it"] * (not asked):
        raise UserError(f"--lm-eval {names}: is no folder, and lm-eval has no task {unknown[0]}")
    final = str(run.final)
    model: dict[str, Any] = {"pretrained": final, "tokenizer": final}
    if (run.final / lora.CONFIG_FILE).is_file():
        base, revision = lora.base_model_of(run.final)
        model |= {"pretrained": base, "revision": revision or "main", "peft": final}
    model |= hub.remote_code_kwargs(getattr(task.options, "remote_code", False))  # type: ignore[attr-defined]
    try:
        found = simple_evaluate(
            "hf",
            model_args=model,
            device="cuda" if torch.cuda.is_available() else "cpu",
            tasks=list(asked),
            limit=options.limit,
            task_manager=manager,
            log_samples=False,
            apply_chat_template=bool(run.facts.extra.get("template")),
        )
    except Exception as error:  # a task's data, its YAML, the hub: each becomes one line
        raise UserError(f"--lm-eval {names}: {first_line(error)}") from error
    metrics = {
        name: {key.removesuffix(",none"): v for key, v in figures.items() if isinstance(v, int | float)}
        for name, figures in found["results"].items()
    }
    return metrics, [{"lm_eval": names, "limit": options.limit, "metrics": metrics}]


def _hold_out(replay: Replay, file: str, asked: dict[str, str], folder: Path) -> list[str]:
    """Prepare the samples of a file in `folder` as those of the run were; the name of their split, and of one
    of those that are not in the training data, where only some are.
    """
    run, path, state = replay.run, Path(file).expanduser(), replay.state
    if not path.is_file():
        near = f"there is no such file{nearest_file(file)}"
        raise UserError(f"--test {file}: {'is a folder: give one file of it' if path.is_dir() else near}")
    recipe = dataclasses.replace(run.recipe, data=str(path), format=None, options=run.recipe.options | asked)
    _, data = workload_of(recipe).make(recipe)
    try:
        sizes, name = {**data.prepare_test(folder, run.facts)}, path.name
    except UserError as error:
        said = str(error).replace("--data ", "--test ").replace("--file ", "--test ")
        raise UserError(f"{said} (it is read as the data of {run.folder} was)") from None
    notes, splits = [*sizes.pop("notes", ())], {name: TEST}
    extra = {k: v for k, v in run.facts.extra.items() if k != "sets"} | {"unknown": sizes.pop("unknown", 0)}
    again = in_train(folder / TEST, Path(run.facts.folder) / "train", run.facts)
    if count := int(again.sum()):
        notes.append(f"{count:,} of {len(again):,} rows are in the run's train data too and flatter it")
        if count < len(again) and not sizes:  # sizes are of the whole file
            save(folder / "new", {k: column[~again] for k, column in load(folder / TEST).items()})
            splits[f"{name} without these {count:,}"] = "new"
    print_lines(*(f"--test {file}: {note}" for note in notes))
    for split, part in splits.items():
        replay.builder.hold_out(split, data.open(folder, part), fingerprint(folder / part))
    state.facts = dataclasses.replace(run.facts, extra={**extra, "splits": dict.fromkeys(splits, sizes)})
    return [*splits]


def require_capability(run: RunFolder, capability: type[T], command: str, refusal: str) -> T:
    """A finished run's task. Raises UserError without the protocol `capability`, or without final/."""
    task, _ = workload_of(run.recipe).make(run.recipe)
    if not isinstance(task, capability):
        raise UserError(f"{command}: {run.folder} trained {run.recipe.task}, which {refusal}")
    if not run.final.is_dir():
        raise UserError(f"{run.folder} has no final/ yet: {run.why_unfinished()}")
    say_changed(run)
    return task


def say_changed(run: RunFolder) -> None:
    """Name files of a run's model, in any form, that are not as the run wrote them."""
    if changed := ", ".join(run.changed_export(only_later=True)[:3]):
        print_lines(f"{run.folder}: {changed}: not as the run wrote it (`inspect {run.folder}`)")
