"""`python -m launch COMMAND ...`, the same as `isobatch COMMAND ...`."""

import os
import sys
from pathlib import Path

HOME = str(Path(__file__).resolve().parent.parent)
# `python -m` puts the working directory first: the user's own models.py or data/ there would hide ours.
if os.path.realpath(sys.path[0] or ".") != HOME:
    sys.path.pop(0)
if HOME not in sys.path:
    sys.path.append(HOME)

from launch.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
