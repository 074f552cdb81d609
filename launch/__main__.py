"""`python -m launch COMMAND ...` in the project's folder, the same as `isobatch COMMAND ...` anywhere."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parents[1] / "__main__.py"), run_name=__name__)
