"""Makes the pictures of the README from real runs: `make pictures` (needs Chromium for the report's)."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
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
WIDTH, HEIGHT = 1280, 900


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        terminal(SHOWN, folder)
        isobatch("auto --task compress --name small --quiet", folder)
        report(Path(folder) / "runs" / "small-qat" / "report" / "report.html")


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


def report(page: Path) -> None:
    """The top of a report page, as report.png."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit("report.png needs Chromium: apt-get install chromium")
    words = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    words += [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={HERE / 'report.png'}", page.as_uri()]
    subprocess.run(words, check=True, capture_output=True)


if __name__ == "__main__":
    main()
