"""`python -m launch COMMAND ...` in the project's folder, the same as `isobatch COMMAND ...` anywhere."""

import os
import runpy
import sys
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parent / "_root.py"))

from isobatch.core.package import TYPED_VARIABLE  # noqa: E402
from isobatch.launch.cli import main  # noqa: E402

if __name__ == "__main__":
    os.environ[TYPED_VARIABLE] = "python -m launch"
    sys.exit(main())
