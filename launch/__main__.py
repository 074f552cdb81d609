"""`python -m launch COMMAND ...` in the project's folder, the same as `isobatch COMMAND ...` anywhere."""

import runpy
import sys
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parent / "_root.py"))

from isobatch.launch.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
