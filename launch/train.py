"""The script that launchers start in every process: `accelerate launch launch/train.py --task T [flags]`.

`auto` starts it with `--run FOLDER`, `verify` with `--redo FOLDER`.
"""

import os
import runpy
import sys
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parent / "_root.py"))

from isobatch.core.errors import DONE, STOPPED  # noqa: E402
from isobatch.engine.distributed.stop_signals import end_early_on_signals  # noqa: E402
from isobatch.launch.cli import BEFORE_TORCH, guarded  # noqa: E402

end_early_on_signals()


def work() -> int:
    """One process of a run. It imports torch here, where a signal is answered: that takes seconds."""
    from isobatch.launch.local.worker import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    os.environ.update({**BEFORE_TORCH, **os.environ})
    code = guarded(work, debug="--debug" in sys.argv)
    # torchrun treats any other code as a crash and would kill ranks that are still writing.
    sys.exit(DONE if code == STOPPED else code)
