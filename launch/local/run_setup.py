"""Finds a run by its recipe and data or creates it, and plans it for this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from isobatch.core import atomic_files, hub_cache
from isobatch.core.errors import UserError
from isobatch.core.extras import need
from isobatch.core.facts import Facts
from isobatch.core.flags import build_options
from isobatch.core.optimizers import OPTIMIZERS
from isobatch.core.package import CACHE, cache_folder
from isobatch.core.plan import INVARIANCES, Plan, PlanOptions
from isobatch.core.recipe import Recipe
from isobatch.core.strategies import traits_of
from isobatch.core.terminal import doing, print_lines, rendered
from isobatch.data.base import Data, in_train
from isobatch.data.digests import FACTS_FILE, changed_file
from isobatch.data.tokenizers import open_tokenizer
from isobatch.engine import consent
from isobatch.engine.loading.prepare import CHECK_SECONDS, assumed_facts, folder_of, prepare
from isobatch.engine.machine.detect import detect
from isobatch.engine.planning.choices import remarks_on_plan
from isobatch.engine.planning.estimate import Target
from isobatch.engine.registry import workload_of
from isobatch.engine.runs.run_folder import (
    FolderTakenError,
    RunFolder,
    finished_run,
    free_folder,
    list_runs,
    run_name,
)
from isobatch.engine.runs.summary import first_held_out
from isobatch.engine.task_files import task_file_problem
from isobatch.engine.verification.tolerance import TOLERANCE
from isobatch.launch.local.arguments import Request, read_command
from isobatch.models import hub
from isobatch.models.capabilities import KeepsRows
from isobatch.models.causal_lm import known_models
from isobatch.models.protocols import Batches


def planned_facts(request: Request, task: Any, data: Any) -> Facts:
    """What a plan is made for: prepared data, or what --assume-length says. Raises UserError."""
    if (length := request.extra.get("assume_length")) is None:
        return prepared_facts(request, task, data)
    known = known_models.find(name := request.recipe.model or "")
    if known not in (None, name) and not Path(name).exists():
        print_lines(f"--model {name}: by the shape of {known}", quiet=request.run.quiet)
    facts = assumed_facts(data, length * task.rows_per_sample, request.extra.get("assume_samples"))
    print_lines(f"assumed: {facts.samples['train']:,} samples of {facts.longest} tokens")
    return facts


def prepared_facts(request: Request, task: Any, data: Any) -> Facts:
    """Prepare the request's data where it is not in the cache, and say what it shares with the run of --from.

    Raises UserError, also where the weights of that run do not fit.
    """
    facts = prepare(data, partial(print_lines, quiet=request.run.quiet))
    if origin := request.recipe.starts_from:  # else training would refuse it, on the nodes of a cluster
        from isobatch.engine.checkpointing.weight_files import load_start_weights
        from isobatch.engine.model_setup.prepare_model import build_hollow

        if model := build_hollow(partial(task.build_model, facts)):
            load_start_weights(origin, model, task, facts, only_check=True)
        if isinstance(task, KeepsRows):
            run = Path(origin["run"])
            said = [task.kept_rows(run, facts)[1], task.trained_before(run, facts)]
        else:
            said = [trained_before(RunFolder.open(origin["run"]), facts, request.workload.option_flags())]
        print_lines(*filter(None, said), quiet=request.run.quiet)
    return facts


def trained_before(run: RunFolder, facts: Facts, flags: Collection[str]) -> str:
    """A line on held-out rows that the run of --from was trained on; "" where there are none, or its prepared
    data is not here. `flags`: names of the task's. Raises UserError where tokens mean something else now.
    """
    if (before := _prepared_facts(run)) is None or before.fingerprint == facts.fingerprint:
        return ""
    files = (Path(of.folder, "tokenizer.json") for of in (before, facts))
    vocabularies = [open_tokenizer(file).get_vocab() for file in files if file.is_file()]
    if vocabularies[1:] != vocabularies[:1]:
        raise UserError(f"--from {run.folder}: has another tokenizer: add --tokenizer {run.final}")
    train, here = Path(before.folder) / "train", Path(facts.folder)
    again = {split: in_train(here / split, train, facts) for split in facts.samples if split != "train"}
    return rendered(__file__, "trained_before", run=run, again=again, flags=flags)


def prepare_facts(request: Request) -> Facts:
    """Prepare the request's data where it is not in the cache, and fetch its model. Raises UserError."""
    task, data = request.workload.make(request.recipe)
    facts = planned_facts(request, task, data)
    if facts.extra.get("assumed"):
        return facts
    if sys.stderr.isatty() and not request.run.quiet:
        from isobatch.launch.local.shown_samples import shown_samples

        for text in shown_samples(data, facts, 1, on_terminal=True, most=300):
            print(text, file=sys.stderr)
    doing("looking for the model")
    task.fetch()
    preset = request.workload.task.presets.get(request.recipe.preset or "", {})
    if request.recipe.patience not in (0, preset.get("patience")) and "valid" not in facts.samples:
        way = "--patience 0, and --steps as many as were best where it had one"
        raise UserError(f"--patience {request.recipe.patience}: the data has no valid split: {way}")
    return facts


def one_run(positional: Sequence[str], command: str) -> str:
    """The run that a command's words name. Raises UserError where they name none, or several."""
    if len(positional) != 1:
        raise UserError(f"{command}: give the folder of one run, as in runs/mine (`runs` lists them)")
    return positional[0]


def open_single_run(
    words: Sequence[str], command: str, kind: type, runs_code: bool = True, finished: bool = False
) -> tuple[RunFolder, Any]:
    """The run that the one positional word names, and the options. Raises UserError.

    `runs_code`: whether the command executes the run's code, to which the user has to agree. `finished`:
    whether it needs a run that is done.
    """
    positional, options = read_command(words, kind, command)
    named = one_run(positional, command)
    place = finished_run(named) if finished else named
    if not runs_code:
        return RunFolder.open(place), options
    return open_run(place, options.trust, getattr(options, "base", None)), options


def store_plan(run: RunFolder, plan: Plan) -> None:
    """Write plan.json; a run that was once trained with a weaker invariance keeps the weaker one.

    It keeps too what was measured when its training began.
    """
    if run.has_plan and any(run.checkpoints.glob("*-*")):
        before = run.plan
        plan = dataclasses.replace(plan, rounding=before.rounding)
        if INVARIANCES.index(before.invariance) > INVARIANCES.index(plan.invariance):
            reasons = {**plan.reasons, "invariance": f"part of this run was trained as {before.invariance}"}
            plan = dataclasses.replace(plan, invariance=before.invariance, reasons=reasons)
    run.write_plan(plan)


def plan_for_training(
    recipe: Recipe, facts: Facts, asked: PlanOptions, quiet: bool, run: RunFolder | None, world: int | None
) -> Plan:
    """The plan for this machine, and a line for each option that it could not follow.

    A run that has begun keeps its precision, unless the user asks for one: another is another loss curve. A
    device that lacks half precision computes in fp32.
    """
    has_begun = run and run.has_plan and (run.metrics.exists() or any(run.checkpoints.glob("*-*")))
    before = run.plan if run and has_begun else None
    if before and asked.precision == "auto":
        wishes: dict[str, Any] = {"bf16": "bf16-mixed", "fp16": "16-mixed"}
        begun = before.precision
        why = {**asked.measured_options, "precision": f"this run began in {begun}"}
        asked = dataclasses.replace(asked, precision=wishes.get(begun, begun), measured_options=why)
    plan = plan_for_this_machine(recipe, facts, asked, world, quiet)
    if before and (had := before.processes) != plan.processes:
        print_lines(f"processes: {plan.processes} here, {had} before; the same batches", quiet=quiet)
    return plan


def known_run(request: Request) -> tuple[Facts, RunFolder | None]:
    """The facts of a request that the user typed, and its run, if there is one."""
    facts = prepare_facts(request)
    consent.remember(request.recipe, request.run)
    return facts, find_run(request, facts)


def find_run(request: Request, facts: Facts, any_name: bool = False) -> RunFolder | None:
    """The run of --resume, else the newest in --out with this recipe and data, of the request's name if it
    has one; None where there is none.

    Raises UserError where the run of --resume has another recipe or other data.
    """
    resume, wanted = request.run.resume, (request.recipe.hash(), facts.fingerprint)
    if resume not in ("auto", "never"):
        run = RunFolder.open(resume)
        if not _is_of(run, wanted):
            raise UserError(f"--resume {resume}: is of another recipe or other data; see `resume {resume}`")
        return run
    if resume == "never" or request.run.again:
        return None
    runs = [run for run in list_runs(Path(request.run.out).expanduser()) if _is_of(run, wanted)]
    matching = [run for run in runs if any_name or request.run.name in (None, run.folder.name)]
    return RunFolder.open(matching[-1].folder) if matching else None


def _is_of(run: RunFolder, wanted: tuple[str, str]) -> bool:
    """Whether a run is of this recipe and data; one that cannot be read is not."""
    try:
        return run.recorded_hash == wanted[0] and (run.recipe.hash(), run.facts.fingerprint) == wanted
    except UserError:
        return False


def create_run(request: Request, facts: Facts) -> RunFolder:
    """A new run folder with recipe and facts, named after the recipe unless the user named it.

    Where another process has just made one for the same request, that one. Raises UserError.
    """
    out, name = Path(request.run.out).expanduser(), request.run.name
    while True:
        folder = out / name if name else free_folder(out, run_name(request.recipe))
        if made := find_run(request, facts):
            return made
        try:
            return RunFolder.create(folder, request.recipe, facts, request.run)
        except FolderTakenError:
            if name and find_run(request, facts) is None:
                raise


def plan_for_this_machine(
    recipe: Recipe, facts: Facts, options: PlanOptions, world: int | None = None, quiet: bool = True
) -> Plan:
    """The plan for this machine, with its remarks unless `quiet`; `world`: number of processes, if given.

    Raises UserError.
    """
    doing("planning")
    here = detect()
    target = Target("here", workload_of(recipe), recipe, facts, here, options, world)
    plan = target.plan()
    print_lines(*remarks_on_plan(options, plan, here), quiet=quiet)
    is_trained = any(phase.epochs for phase in target.task.phases())
    if plan.device == "cpu" and plan.precision != "fp32" and is_trained:
        how = f"faster, with fewer digits; trained again a loss may be {TOLERANCE[plan.invariance][0]:g} off"
        exact = f"with --precision fp32, which is slower, {TOLERANCE['exact'][0]:g}"
        print_lines(f"{plan.precision}: {how}, {exact} (`verify`, receipts)", quiet=quiet)
    need(traits_of(plan.strategy).library.lower(), f"--strategy {plan.strategy}")
    need(OPTIMIZERS[recipe.optimizer].library, f"--optimizer {recipe.optimizer}")
    return plan


def open_run(folder: str | Path, trust: bool = False, base: str | None = None) -> RunFolder:
    """An existing run whose code may be executed: this user agreed to it, or does so now by `trust`.

    `base`: where that lies now with which it begins. Raises UserError.
    """
    run = RunFolder.open(folder)
    consent.require(run.recipe, run.folder, trust)
    if base is not None:  # typed: where all else was agreed to, this is
        run.here = recipe_here(run.recipe, base)
        consent.require(run.here, run.folder, trust or not consent.asks(run.recipe, run.folder))
    return run


class OtherDataError(UserError):
    """The data here is not what a run was trained on; `what` says in what it differs."""


BEGINNINGS = (*consent.NAMED_ONLY, "from", "tokenizer")
"""What of a recipe `--base` stands for."""
READ_ONCE = ("data", "tokenizer", "valid")
"""Places of a recipe that are read where its data is prepared, and not after."""


def recipe_here(recipe: Recipe, base: str) -> Recipe:
    """A recipe with the places where what it begins with lies now: what is gone lies in the folder `base` by
    its last name, or is `base` itself where that is one model. Raises UserError.
    """
    folder, here, begun = Path(base).expanduser().resolve(), dict[str, str](), recipe.starts_from
    folder = folder.parent if folder.name == "final" and (folder.parent / "recipe.json").is_file() else folder
    named = [(name, place) for name, place in consent.places(recipe) if name in BEGINNINGS]
    gone = {n: p for n, p in named if not (Path(p).expanduser().exists() or hub.snapshot(p, recipe.revision))}
    models = {hub.last_name(place) for name, place in gone.items() if name != "tokenizer"}
    unknown = sorted(name for name in models if not (folder / name).exists())
    if unknown and len(models) > 1:
        all_of = f"give a folder that holds {', '.join(sorted(models))} by these names"
        raise UserError(f"--base {base}: holds no {' and no '.join(unknown)}: {all_of}")
    for name, place in gone.items():
        at = at if (at := folder / hub.last_name(place)).exists() else folder
        at = at / "final" if name != "from" and (at / "final").is_dir() else at
        here[name] = hub.resolve_model(str(at), "--base") if name in consent.NAMED_ONLY else str(at)
    options = recipe.options | {name: here.pop(name) for name in ("teacher", "pruned") if name in here}
    begun = {**begun, "run": here.pop("from")} if begun and "from" in here else begun
    return dataclasses.replace(recipe, **here, options=options, starts_from=begun)  # type: ignore[arg-type]


def locate_data(run: RunFolder, data: str | None, mend: bool = False) -> None:
    """Make sure that the run's prepared data exists, prepared anew where the cache has lost it.

    `data`: where the source lies now. The run's folder stays as it is: what was found counts in this process.
    With `mend`, for training, it is written there, and prepared anew where a file of it was changed, too.
    Raises UserError where the task's code or the samples have changed, or the recipe names places that this
    user has not agreed to.
    """
    if changed := task_file_problem(run.recipe):
        raise UserError(changed)
    here = None if data else _prepared_facts(run)
    if here and mend and changed_file(Path(here.folder), CHECK_SECONDS):
        here = None  # it is read anew, so asked for
    consent.require_reading(run.recipe, run.folder, READ_ONCE if here else ("data",) if data else ())
    keep = run.write_facts if mend else partial(setattr, run, "facts")
    if here:
        keep(here)
        return
    data_source = _source(run, data)
    try:
        data_source.check()
    except UserError as error:
        way = f"; where it has moved, `verify {run.folder} --level records --data PATH` finds it for all"
        if not str(error).startswith("--data"):
            way = "; put it back, say where it lies now (receipt check --base), or hand over the run (--run)"
        raise UserError(f"{error}{'' if data and '--data' in way else way}") from None
    new_facts = prepare(data_source, partial(print_lines, quiet=run.options().quiet))
    if new_facts.fingerprint != run.facts.fingerprint:
        prints = f"fingerprint {new_facts.fingerprint} against {run.facts.fingerprint}"
        said = f"the data is not what {run.folder} was trained on ({prints})"
        raise OtherDataError(f"{said}: --again starts a new run, `evaluate --test FILE` measures it", prints)
    if differing := run.facts.differing_fields(new_facts):
        what = f"{', '.join(differing)} differs from the data's"
        said = f"{run.folder}/facts.json was changed: {what}"
        raise OtherDataError(f"{said}; put it right or start a new run with --again", what)
    keep(new_facts)


def known_data(run: RunFolder, flag: str) -> Data:
    """The data of a run, where its source holds what was learnt. Raises UserError that names the flag."""
    locate_data(run, None)
    data = workload_of(run.recipe).make(run.recipe)[1]
    if folder_of(data) != Path(run.facts.folder):
        raise UserError(f"{flag}: {run.recipe.data} here is not what {run.folder} learnt: put that back")
    return data


def _source(run: RunFolder, data: str | None) -> Data:
    """The data of a run, at `data` if it has moved. Where the folder of its tokenizer is gone, it has that
    of the run's final/: one that differs makes other data, which its fingerprint shows.
    """
    recipe, named = run.here, run.here.tokenizer
    is_gone = named and not hub_cache.is_id(named) and not Path(named).expanduser().exists()
    tokenizer = str(run.final) if is_gone and (run.final / "tokenizer.json").is_file() else named
    here = dataclasses.replace(recipe, data=data or recipe.data, tokenizer=tokenizer)
    return workload_of(here).make(here)[1]


def held_out(run: RunFolder, data: str | None = None) -> tuple[str, Batches]:
    """(the split that a finished model is measured on, `train` where nothing is held out; its batches:
    `batches("train")` gives those of training). `data`: where the data lies now, if it has moved.
    """
    from isobatch.engine.train.evaluate import host_batches

    locate_data(run, data)
    source, folder = workload_of(run.recipe).make(run.recipe)[1], Path(run.facts.folder)
    found = first_held_out(run.facts.samples) or "train"
    return found, lambda split=found: host_batches(source.open(folder, split))


def compare_source(run: RunFolder, data: str | None) -> tuple[list[str], list[str]]:
    """(what speaks against that the run's prepared data is made of what its recipe names, else that this was
    taken on trust): a sentence, or a phrase. `data`: where the source lies now.
    """
    source = _source(run, data)
    try:
        consent.require_reading(run.recipe, run.folder, ("data",) if data else ())
        source.check()
        if folder_of(source) == Path(run.facts.folder):
            return [], []
        found = prepare(source, partial(print_lines, quiet=True))
    except UserError:
        return [], [f"that the prepared data is made of {data or run.recipe.data}, which is not here"]
    if found.fingerprint == run.facts.fingerprint:
        return [], []
    prints = f"{found.fingerprint} and not {run.facts.fingerprint}"
    return [f"{data or run.recipe.data} holds other data than was trained on: {prints}"], []


def is_prepared(run: RunFolder) -> bool:
    """Whether the run's prepared data lies in this machine's cache."""
    # What is computed from the data is kept beside it: never in a place that a received run names.
    prepared = Path(run.facts.folder)
    ours = prepared.resolve().parent == (cache_folder() / "prepared").resolve()
    return ours and (prepared / FACTS_FILE).is_file()


def _prepared_facts(run: RunFolder) -> Facts | None:
    """The facts of the run's prepared data, wherever it lies in this machine's cache; None where it does not.

    A run that was made with another cache, or from a source that has moved since, names another folder.
    """
    if is_prepared(run):
        return run.facts
    for file in sorted((cache_folder() / "prepared").glob(f"[!.]*/{FACTS_FILE}")):
        with contextlib.suppress(UserError):
            found = Facts.from_dict({**atomic_files.read_json(file), "folder": str(file.parent)})
            if found.fingerprint == run.facts.fingerprint and not run.facts.differing_fields(found):
                return found
    return None


def plan_options_from_request(values: Mapping[str, Any]) -> PlanOptions:
    """The plan options that `options_to_dict` wrote for a process elsewhere."""
    asked = {k: v for k, v in values.items() if v is not None}
    reasons = {name: asked.pop(name, {}) for name in ("preset_options", "measured_options")}
    return dataclasses.replace(build_options(PlanOptions, asked), **reasons)


HUB_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "XDG_CACHE_HOME", *hub_cache.OFFLINE)


def environment_elsewhere() -> dict[str, str]:
    """Our own variables and those of the model cache, for processes that inherit none from this one. They ask
    no hub where it does not answer here.
    """
    folders = {CACHE: cache_folder(), consent.STATE: consent.state_folder()}
    return {
        **{name: str(folder.expanduser().absolute()) for name, folder in folders.items()},
        **{name: os.environ[name] for name in HUB_VARIABLES if os.environ.get(name)},
        **({} if hub_cache.is_reachable() else {hub_cache.OFFLINE[0]: "1"}),
        **consent.environment(),
    }
