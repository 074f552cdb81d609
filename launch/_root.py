"""Registers the folder above this file as the package `isobatch`. Entry scripts run it first.

It is run by its path (`runpy.run_path`), because before it nothing of isobatch can be imported.
"""

import importlib.util
import os
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parent.parent


# This copy, even where another one is installed.
found = sys.modules.get("isobatch")
if found is None or Path(str(found.__file__)).resolve().parent != HOME:
    spec = importlib.util.spec_from_file_location(
        "isobatch", HOME / "__init__.py", submodule_search_locations=[str(HOME)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["isobatch"] = module
    spec.loader.exec_module(module)

# The working directory or the script's folder must not stay on sys.path: files there would hide libraries.
first = os.path.realpath(sys.path[0] or ".") if sys.path else ""
if first in (os.path.realpath("."), str(HOME), str(HOME / "launch"), str(HOME / "benchmarks")):
    del sys.path[0]
for name in ("launch", "benchmarks"):  # `python -m launch` has imported the folder under its bare name
    sys.modules.pop(name, None)
