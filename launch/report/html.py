"""The report as one HTML page: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import io
from html import escape
from typing import Any

from isobatch.launch.report.tables import COLUMNS, caption, runs_table, table

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 100rem; color: #1b1f24 }
body { margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .35rem .6rem; border-bottom: 1px solid #d8dee4; text-align: right; white-space: nowrap }
th { font-weight: 600; background: #f6f8fa } th:first-child, td:first-child { text-align: left }
p.note { color: #57606a; max-width: 60rem } figure { margin: 1rem 0 } svg { max-width: 100%; height: auto }
h3 { font-size: 1rem } pre { white-space: pre-wrap; background: #f6f8fa; padding: .8rem; max-width: 60rem }
"""


def page(made: dict[str, Any]) -> str:
    """The whole document."""
    parts = ["<h1>Report</h1>", f'<p class="note">{escape(caption(made))}</p>']
    if made["models"]:
        parts += [_table(list(COLUMNS), table(made)), "<h2>Accuracy against latency</h2>", _trade(made)]
    if shown := runs_table(made):
        parts.append(_table(shown[0], shown[1:]))
    pruned = [r for r in made["runs"] if (r["metrics"] or {}).get("heads_left")]
    if pruned:
        parts += ["<h2>Heads and neurons left per layer</h2>", *(_layers(run) for run in pruned)]
    parts += ["<h2>Training</h2>", *(_curves(run) for run in made["runs"])]
    if writers := [r for r in made["runs"] if r["sample"]]:
        parts += ["<h2>What they write</h2>", *(_written(run) for run in writers)]
    body = "\n".join(parts)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Report</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>'
        f"<body>{body}</body></html>\n"
    )


def _written(run: dict[str, Any]) -> str:
    return f"<h3>{escape(run['run'])}</h3><pre>{escape(run['sample'])}</pre>"


def _table(head: list[str], rows: list[list[str]]) -> str:
    cells = "".join(f"<th>{escape(c)}</th>" for c in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


def _figure(draw: Any, width: float, height: float, columns: int = 1) -> str:
    """An inline SVG of what `draw(axes)` draws."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.fonttype"] = "none"
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.25)
        ax.set_axisbelow(True)
    draw(*axes)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return f"<figure>{svg[svg.index('<svg') :]}</figure>"


def _trade(made: dict[str, Any]) -> str:
    def draw(ax: Any) -> None:
        for row in made["models"]:
            low, high = row["accuracy_ci95"]
            span = [[100 * (row["accuracy"] - low)], [100 * (high - row["accuracy"])]]
            x, y = row["batch_1"]["p50"], 100 * row["accuracy"]
            ax.errorbar(x, y, yerr=span, fmt="o", capsize=3, label=f"{row['run']}, {row['form']}")
        ax.set(
            xlabel="ms for one text, one thread (p50)", ylabel="accuracy, % (95 % interval)", xlim=(0, None)
        )
        ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)

    return _figure(draw, 9, 3.6)


def _layers(run: dict[str, Any]) -> str:
    heads, neurons = run["metrics"]["heads_left"], run["metrics"]["neurons_left"]
    layers = list(range(1, len(heads) + 1))

    def draw(one: Any, other: Any) -> None:
        for ax, left, name in ((one, heads, "heads"), (other, neurons, "neurons")):
            bars = ax.bar(layers, left, color="#4c78a8" if name == "heads" else "#72b7b2")
            ax.bar_label(bars, fontsize=8)
            ax.set(xlabel="layer", ylabel=f"{name} left", xticks=layers, title=run["run"])

    return _figure(draw, 9, 2.6, columns=2)


def _curves(run: dict[str, Any]) -> str:
    """Loss, and of accuracy and sparsity what was measured."""
    training, evaluations = run["training"], run["evaluations"]
    more = [
        (curve, name) for curve, name in ((evaluations, "accuracy"), (training, "sparsity")) if name in curve
    ]

    def draw(loss: Any, *others: Any) -> None:
        loss.plot(training["step"], training["loss"], lw=0.8, alpha=0.7, label="training")
        if "loss" in evaluations:
            loss.plot(evaluations["step"], evaluations["loss"], marker="o", ms=2.5, lw=1.2, label="held out")
        loss.set(xlabel="step", ylabel="loss")
        loss.set_title(f"{run['run']} ({run['task']})", loc="left")
        loss.legend(fontsize=8, frameon=False)
        for ax, (curve, name) in zip(others, more, strict=True):
            ax.plot(curve["step"], curve[name], lw=1.2)
            ax.set(xlabel="step", ylabel=name)

    return _figure(draw, 3.8 * (1 + len(more)), 2.6, columns=1 + len(more))
