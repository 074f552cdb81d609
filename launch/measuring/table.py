"""The table and the plot of `tune`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from isobatch.launch.report.figures import draw_figure

if TYPE_CHECKING:
    from pathlib import Path

DOTS_PER_INCH = 110


def table_lines(found: dict[str, Any]) -> list[str]:
    """The findings for a person."""
    noise = found["noise"]
    lines = [
        f"{found['task']}, phase {found['phase']}, on {found['machine']}: {found['seconds'] / 60:.1f} of"
        f" {found['minutes']:g} minutes",
        f"the recipe against itself: {noise.get('ratio', 0):.2f} +-{noise.get('spread', 0):.0%}",
        "",
        f"  {'measure':<26}{'tried':<34}{'quoted':>10}{'here':>7}{'+-':>6}{'memory':>8}  {'changes':<8}",
    ]
    lines += [_line(row) for row in found["rows"]]
    lines += ["", *_outcome(found)]
    return lines


def _line(row: dict[str, Any]) -> str:
    quoted = "{:.2f}-{:.2f}".format(*row["quoted"]) if row["quoted"] else ""
    start = f"  {row['measure']:<26}{row['flags']:<34}{quoted:>10}"
    if "worth" not in row:
        return f"{start}  {row['problem']}"
    memory = f"{row['memory']:.0%}" if row["memory"] else ""
    remarks = [
        "the plan has it" if row["has_it"] else "",
        row.get("true_here", ""),
        "1 round" if row["rounds"] == 1 else "",
        f"first steps {row['warm_seconds']:.0f} s" if row["warm_seconds"] > SLOW_START else "",
    ]
    changes = "-" if row["changes"] == "nothing" else row["changes"]
    remark = ", ".join(filter(None, remarks))
    spread = f"{row['spread']:.0%}" if row["rounds"] > 1 else "?"
    return f"{start}{row['worth']:>7.2f}{spread:>6}{memory:>8}  {changes:<8} {remark}".rstrip()


SLOW_START = 10.0
"""Seconds of the first steps that are worth a word."""


def _outcome(found: dict[str, Any]) -> list[str]:
    lines = [
        "(here: times as fast with the measure, a sample or a token; memory: tensors of a step, more where"
        " micro-batches become larger; open: within the noise)"
    ]
    if found["keep"]:
        factor = found["keep_rounds"]["ratio"]
        lines.append(f"type: {' '.join(found['keep'])} ({factor:.2f} times as fast, the same recipe)")
    else:
        lines.append("keep the plan as it is: no choice of it is faster beyond the noise")
    if found["rounds_differently"]:
        lines.append(f"faster, but rounds differently: {' '.join(found['rounds_differently'])}")
    if found["other_recipe"]:
        lines.append(f"faster, but another recipe: {' '.join(found['other_recipe'])}")
    if everything := found.get("everything"):
        factor = everything.get("ratio")
        what = f"{factor:.2f} times as fast" if factor else everything.get("problem", "not measured")
        if len(everything["flags"]) > 1:
            lines.append(f"all that helps together ({' '.join(everything['flags'])}): {what}")
        else:
            lines.append(f"nothing together is faster than {everything['flags'][0]} alone: {what}")
    return [*lines, f"plot: {found['plot']}"]


def write_plot(found: dict[str, Any], file: Path) -> None:
    """Draw what each measure is worth, with its spread, over the range that is commonly quoted."""
    rows = [row for row in found["rows"] if "worth" in row][::-1]

    def draw(ax: Any) -> None:
        for place, row in enumerate(rows):
            if row["quoted"]:
                low, high = row["quoted"]
                ax.barh(place, high - low, left=low, height=0.7, color="#dddddd")
        worth = [row["worth"] for row in rows]
        error = [row["worth"] * row["spread"] for row in rows]
        ax.errorbar(worth, range(len(rows)), xerr=error, fmt="o", ms=4, color="#1f5fa8", capsize=2)
        ax.axvline(1.0, color="black", lw=0.8)
        ax.set_yticks(range(len(rows)), [f"{row['measure']} ({row['flags']})" for row in rows], fontsize=7)
        ax.set(xlabel="times as fast here; grey: commonly quoted")
        ax.set_title(f"{found['task']} on {found['machine']}", loc="left", fontsize=9)

    figure = draw_figure(draw, 7.5, 1.2 + 0.28 * len(rows))
    figure.savefig(file, dpi=DOTS_PER_INCH)
