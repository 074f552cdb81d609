"""`python -m isobatch COMMAND ...`, or `python CLONE/__main__.py COMMAND ...` where it is not installed."""

import runpy
import sys
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parent / "launch" / "_root.py"))

from isobatch.launch.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
