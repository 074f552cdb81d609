"""`report`: models measured on this machine and runs' records, as one HTML page without scripts or anything
from elsewhere, as Markdown and as JSON.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from isobatch.core import atomic_files
from isobatch.core.errors import DONE, UserError
from isobatch.core.extras import need
from isobatch.core.measures import counted, printable
from isobatch.core.package import cache_folder, call_in_child
from isobatch.core.terminal import doing, on_screen, print_answer, print_lines, rendered, table
from isobatch.engine.checkpointing.digests import folder_digests
from isobatch.engine.machine.detect import cpu_model, detect
from isobatch.engine.runs.run_folder import SWEEP, RunFolder, finished_runs
from isobatch.launch.local.arguments import read_command
from isobatch.launch.local.options import AnswerOptions
from isobatch.launch.local.run_setup import held_out, open_run
from isobatch.launch.report import records, sweeps
from isobatch.launch.report.tables import baselines_tables, in_markdown, results_table, runs_table
from isobatch.models.encoder import report as comparison
from isobatch.models.protocols import Drawing, ReportRow


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions(AnswerOptions):
    """Flags of `report`."""

    to: str | None = None
    """Folder for report.md, report.json and report.html; by default report/ in the last run's folder, or
    report-alone/ where that has the report of its chain."""
    png: bool = False
    """Only draw the figures of each run into its plots/, or into --to FOLDER; also while it trains. Of a
    sweep its own picture."""
    metric: str | None = None
    """Of a sweep: the metric of table and picture, such as perplexity or accuracy; test_accuracy has the test
    split's, of every setting. What is best stays."""
    again: bool = False
    """Measure classifiers anew. What was measured of the same files on this machine is kept in the cache."""


def report(words: Sequence[str]) -> int:
    """Usage: report RUN|SWEEP... [--to FOLDER] [--metric NAME] [--json] [--png]

    Markdown, JSON and one HTML page that opens offline.
    The first run is the baseline of the others.
    Of a run that is not done the page shows what there is.
    Of runs/sweep-NAME it shows the table, by any --metric, and the runs of the best setting.
    """
    positional, options = read_command(words, ReportOptions, "report")
    if not positional:
        raise UserError("report: give the folders of one or more runs, the baseline first")
    if Path(options.to or "").suffix.lower() in (".html", ".pdf", ".md", ".json"):
        raise UserError(f"--to {options.to}: give a folder: a browser prints the report.html in it as PDF")
    folders = [folder for place in positional for folder in finished_runs(place)]
    found = {one: sweeps.read(one, options.metric) for one in folders if (one / SWEEP).is_file()}
    if options.metric and not found:
        raise UserError(f"--metric {options.metric}: is for a sweep, as in: report runs/sweep-NAME")
    by = f"-{options.metric}" if options.metric else ""
    opened = partial(open_run, trust=True) if options.trust else RunFolder.open
    to = Path(options.to).expanduser() if options.to else None
    if options.png:
        for one in folders:
            if one in found:
                drawn = sweeps.draw(found[one], one, (to or one) / f"{one.name if to else 'sweep'}{by}")
            else:
                into = (to / one.name if folders[1:] else to) if to else one / "plots"
                drawn = records.write_plots(opened(one), into)
            print(*map(printable, drawn), sep="\n")
        return DONE
    need("matplotlib", "report")  # said before minutes of measuring
    of_a_chain = len(folders) == 1 and (folders[0] / "chosen").is_dir()  # whose report stays
    folder = to or folders[-1] / ("report-alone" if of_a_chain else "report")
    named = ([one] if one not in found else sweeps.places_of(found[one]["best"], one) for one in folders)
    runs = [opened(place) for place in itertools.chain.from_iterable(named)]
    above = [part for one in found for part in _parts_of_sweep(one, found[one])]
    contents = write_report(collect(runs, above, options.again), folder)
    for one in found:
        sweeps.write_tables(found[one], folder / f"{one.name}{by}")
    tables = (f"\ntables of the sweep: {folder / one.name}{by}.tex, .md and .csv" for one in found)
    return print_answer(contents.to_dict(), text_of(contents, folder) + "".join(tables), options.json)


def write_report(contents: Contents, folder: Path) -> Contents:
    """Write report.json, report.md and report.html. Raises UserError."""
    with atomic_files.explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    doing("drawing the report")
    atomic_files.write_json(folder / "report.json", contents.to_dict())
    for ending in ("md", "html"):
        page = rendered(__file__, f"page.{ending}", parts=parts_of(contents), svg=_svg, md=in_markdown)
        atomic_files.write_text(folder / f"report.{ending}", page)
    return contents


def text_of(contents: Contents, folder: Path) -> str:
    """What a command prints of a report: its summary."""
    parts = (part for part in summary_parts(contents) if part.kind != "note")
    said = [table(part.rows) if part.rows else part.text for part in parts]
    said.append(f"all figures: {folder}/report.html, as text {folder}/report.md")
    return on_screen("\n\n".join(filter(None, said)))


@dataclass(frozen=True, slots=True)
class Contents:
    """All that a report shows of its runs."""

    machine: str
    runs: list[dict[str, Any]]
    models: list[ReportRow]
    """A row for each form of each model that was measured."""
    drawings: list[Drawing]
    above: Sequence[PagePart] = ()

    def to_dict(self) -> dict[str, Any]:
        """The object of report.json."""
        found = {"machine": self.machine, "runs": self.runs, "verdicts": comparison.verdicts(self.models)}
        return {**found, "models": self.models}


def collect(runs: Sequence[RunFolder], above: Sequence[PagePart] = (), again: bool = False) -> Contents:
    """Read the runs' records; compare the models of those that are done on this machine. Of other runs only
    the records are shown. `above`: what stands before them; `again`: nothing is taken from the cache. Raises
    UserError.
    """
    tasks = [records.task_of(run) for run in runs]
    reports = [records.report_of(task) for task in tasks]
    machine = f"{cpu_model()}, {detect().describe()}"
    pairs = zip(runs, reports, strict=True)
    done = [(a, b) for a, b in pairs if isinstance(b, comparison.ClassifierReport) and a.status() == "done"]
    models = _measure(done, machine, again) if done else []
    picked = {digest for run, _ in done for digest in (run.exports().get("chosen") or {}).values()}
    models = [{**row, "chosen": row["digest"] in picked} for row in models]
    doing("reading the runs")
    read = [records.read_records(run, task) for run, task in zip(runs, tasks, strict=True)]
    return Contents(machine, read, models, records.drawings_of(read, reports), above)


def _measure(
    done: Sequence[tuple[RunFolder, comparison.ClassifierReport]], machine: str, again: bool
) -> list[ReportRow]:
    """A row for each form of the runs' models, compared; none of a run of which no split is held out. From
    the cache where it has them: a run's folder, which may be anybody's, says nothing of speeds.
    """
    from isobatch.engine.hooks.checkpoint import environment

    files = [[*report.variants(a.final, a.folder / "exports").values()] for a, report in done]
    written = [[folder_digests(file.parent) for file in some] for some in files]
    names = [(run.folder.name, run.identity, run.facts.fingerprint) for run, _ in done]
    asked = atomic_files.json_text([environment(machine, ""), names, written])
    kept = cache_folder() / "measured" / f"{hashlib.sha256(asked.encode()).hexdigest()[:16]}.json"
    if kept.is_file() and not again:
        when = datetime.fromtimestamp(kept.stat().st_mtime).astimezone().isoformat(" ", "minutes")
        print_lines(f"the same files were measured here on {when}: --again measures anew")
        return list(atomic_files.read_json(kept)["models"])
    models: list[ReportRow] = []
    for (run, report), some, known in zip(done, files, written, strict=True):
        print_lines(f"measuring every form of {run.folder.name} on held-out samples")
        split, batches = held_out(run)
        if split == "train":
            continue
        rows = report.measure(run.final, run.folder / "exports", run.facts, batches, call_in_child)
        where: ReportRow = {"run": printable(run.folder.name), "task": printable(run.recipe.task)}
        where |= {"setting": dataclasses.replace(run.recipe, seed=0).hash()}
        where |= {"split": split, "train_seconds": (run.summary() or {}).get("train_seconds")}
        each = zip(rows, some, known, strict=True)
        models += [{**where, **row, "digest": digests[file.name]} for row, file, digests in each]
    if models:
        print_lines(f"measuring the speed of {counted(len(models), 'model')} in turn, in nine rounds")
        models = comparison.compare(models, call_in_child)
    with atomic_files.explain_write_errors(kept):
        kept.parent.mkdir(parents=True, exist_ok=True)
    atomic_files.write_json(kept, {"models": models})
    return models


class PagePart(NamedTuple):
    """A part of the report."""

    kind: str
    """`h2`, `h3`, `verdict`, `note`, `sample`, `table`, `texts` (a table of such) or `figure`."""
    text: str = ""
    rows: Sequence[Sequence[str]] = ()
    """Of a table, its head first."""
    drawing: Drawing | None = None


def _parts_of_sweep(folder: Path, found: dict[str, Any]) -> Iterator[PagePart]:
    yield PagePart("h2", f"Sweep {printable(folder.name.removeprefix('sweep-'))}")
    yield PagePart("table", rows=sweeps.cells_of(found))
    yield from (PagePart("verdict", line) for line in sweeps.legend(found))
    yield PagePart("figure", drawing=sweeps.drawing(found, folder))


def summary_parts(contents: Contents) -> Iterator[PagePart]:
    """What the models are worth: all that a terminal shows, too."""
    runs, models, measured = contents.runs, contents.models, {row["run"] for row in contents.models}
    unmeasured = [run for run in runs if run["run"] not in measured]
    yield from contents.above
    if runs[1:]:
        title = "Runs of the best setting" if contents.above else "Runs"
        yield from (PagePart("h2", title), PagePart("table", rows=results_table(runs)))
    yield from (PagePart("verdict", f"{run['run']}: {run['remark']}") for run in runs if run.get("remark"))
    for title, rows in baselines_tables(unmeasured):
        yield from (PagePart("h2", title), PagePart("table", rows=rows))
    yield from (PagePart("verdict", verdict) for verdict in comparison.verdicts(models))
    if models:
        cells = [comparison.cells(row) for row in models]
        yield PagePart("table", rows=[[*cells[0]], *([*one.values()] for one in cells)])
        yield PagePart("note", comparison.caption(models[0], contents.machine))
    yield PagePart("table", rows=runs_table(unmeasured))


def parts_of(contents: Contents) -> Iterator[PagePart]:
    """The parts in order: the summary, its details, the training, and how the runs used their machines."""
    yield from summary_parts(contents)
    drawings = contents.drawings
    for title in dict.fromkeys(drawing.title for drawing in drawings):
        yield PagePart("h2", title)
        yield from (PagePart("figure", drawing=one) for one in drawings if one.title == title)
    first_forms = {row["run"]: row for row in reversed(contents.models)}
    shown = [row for row in contents.models if row["chosen"] or row is first_forms[row["run"]]]
    for one in itertools.chain.from_iterable(map(comparison.tables, shown)):
        yield from (PagePart("h2", one.title), PagePart("note", one.note))
        yield PagePart("table", rows=[one.head, *one.rows])
    for run in contents.runs:
        if run["sample"]:
            yield from (PagePart("h2", f"Sample of {run['run']}"), PagePart("sample", str(run["sample"])))
        if run["later"]:
            yield PagePart("h2", f"Measured after training: {run['run']}")
            yield PagePart("note", "The newest first; without its line in evaluations.jsonl one is left out.")
            yield PagePart("texts", rows=run["later"])
        if run["answers"]:
            yield PagePart("h2", f"Held-out prompts before and after training: {run['run']}")
            yield PagePart("texts", rows=[["prompt", "reference", "before", "after"], *run["answers"]])
    yield PagePart("h2", "How they ran")
    for run in contents.runs:
        yield PagePart("h3", f"{run['run']} ({run['task']}): {run['state']}")
        yield from (PagePart("note", note) for note in (*run["about"], *run["notes"]))
        if run["use"]:
            yield PagePart("table", rows=[["", "measured", "beside", "is"], *run["use"]])
        else:
            yield PagePart("note", "No step is logged yet.")
        made = run["environment"].items()
        said = ", ".join(f"{name} {value}" for name, value in made if value and name != "packages")
        yield PagePart("note", f"trained with {said}" if said else "")


def _svg(drawing: Drawing) -> str:
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}):
        text = io.StringIO()
        records.draw_figure(drawing).savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]
