"""Makes the pictures of README and docs from real runs: `make pictures` (needs Chromium and tmux)."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SHOWN = {
    "auto --task classifier --name demo --precision fp32": 7,
    "verify runs/demo --processes 2": 1,
    "plan --task causal-lm --model Llama-2-7b-hf --adapter lora --assume-length 512"
    " --compare rtx4080-laptop,h100,8xa100-80gb --price 2.10/h": 12,
}
"""Command -> how many of the last lines that it says are shown."""
COLUMNS = 112
PAGES = {"report": (1280, 900), "report-phone": (390, 844)}
"""Picture of the report's top -> the window's width and height."""
TERMINALS = (80, 200)
"""Columns of the terminals that show a command while it works, and what it ends with."""
WORKS_SECONDS, ENDS_SECONDS = 15, 120


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        terminal(SHOWN, folder)
        isobatch("auto --task compress --name small --quiet", folder)
        for name, (width, height) in PAGES.items():
            page(Path(folder) / "runs" / "small-qat" / "report" / "report.html", name, width, height)
        for columns in TERMINALS:
            at_work(columns, folder)


def isobatch(words: str, folder: str) -> str:
    """Run a command; what it says, both streams in order."""
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "ISOBATCH_CACHE": f"{folder}/cache"}
    return subprocess.run(
        [sys.executable, "-m", "isobatch", *words.split()],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    ).stdout


def terminal(commands: dict[str, int], folder: str) -> None:
    """Commands and the ends of what they say, as terminal.svg."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    for words, lines in commands.items():
        console.print(Text(f"$ isobatch {words}", style="bold"))
        for line in isobatch(words, folder).splitlines()[-lines:]:
            console.print(Text(line))
        console.print()
    (HERE / "terminal.svg").write_text(console.export_svg(title="isobatch"))


def page(report: Path, name: str, width: int, height: int) -> None:
    """The top of a report page, as NAME.png."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(f"{name}.png needs Chromium: apt-get install chromium")
    words = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    words += [f"--window-size={width},{height}", f"--screenshot={HERE / name}.png", report.as_uri()]
    subprocess.run(words, check=True, capture_output=True)


def at_work(columns: int, folder: str) -> None:
    """A real terminal while a model trains, and after a report, as terminal-COLUMNS.svg."""
    from rich.console import Console
    from rich.text import Text

    if shutil.which("tmux") is None:
        sys.exit("the pictures of terminals need tmux: apt-get install tmux")
    train = f"auto --task causal-lm --name work{columns} --again"
    console = Console(record=True, width=columns, file=io.StringIO())
    compared = "report runs/small-classifier runs/small-qat"
    for words, seconds in ((train, WORKS_SECONDS), (compared, ENDS_SECONDS)):
        console.print(Text(screen(f"{sys.executable} -m isobatch {words}", words, columns, seconds, folder)))
        console.print()
    (HERE / f"terminal-{columns}.svg").write_text(console.export_svg(title=f"{columns} columns"))


def screen(command: str, words: str, columns: int, seconds: float, folder: str) -> str:
    """What a terminal shows of a command after so many seconds, or when it has ended."""
    tmux = ["tmux", "-L", "pictures"]
    began = [*tmux, "new-session", "-d", "-s", "one", "-x", str(columns), "-y", "30", "-c", folder]
    environment = {**os.environ, "ISOBATCH_CACHE": f"{folder}/cache", "TERM": "xterm-256color"}
    subprocess.run([*began, f"{command}; sleep 5; echo; sleep 999"], env=environment, check=True)
    shown, deadline = "", time.monotonic() + seconds
    while time.monotonic() < deadline and "all figures" not in shown:
        time.sleep(0.5)
        taken = subprocess.run([*tmux, "capture-pane", "-p", "-t", "one"], capture_output=True, text=True)
        shown = taken.stdout.rstrip()
    subprocess.run([*tmux, "kill-server"], check=False)
    return f"$ isobatch {words}\n{shown}"


if __name__ == "__main__":
    main()
