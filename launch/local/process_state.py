"""Restores the state of the process after a run inside another program, such as a notebook."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import warnings
from collections.abc import Iterator
from unittest.mock import patch

from isobatch.core.errors import UserError

_one_run = threading.Lock()
"""Held while a run is at work: torch's and accelerate's state is the process's."""


@contextlib.contextmanager
def preserve_process_state() -> Iterator[None]:
    """Context that restores environment, warning filters, torch's number of threads, all random generators
    and accelerate's state at its end. Inside, accelerate's state is empty.
    """
    import numpy as np
    import torch
    from accelerate.state import AcceleratorState, GradientState, PartialState

    if not _one_run.acquire(blocking=False):
        raise UserError("another run is at work in this process: wait for it, or use a process of its own")
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with contextlib.ExitStack() as ended:
        ended.callback(_one_run.release)
        ended.enter_context(patch.dict(os.environ))
        for kind in (PartialState, AcceleratorState, GradientState):
            # accelerate has no public way to keep it.
            ended.enter_context(patch.dict(kind._shared_state, clear=True))  # noqa: SLF001
        ended.callback(torch.set_num_threads, torch.get_num_threads())
        ended.callback(random.setstate, random.getstate())
        ended.callback(np.random.set_state, np.random.get_state())
        ended.enter_context(warnings.catch_warnings())
        ended.enter_context(torch.random.fork_rng(devices))
        yield
