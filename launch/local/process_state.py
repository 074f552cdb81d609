"""Restores the state of the process after a run inside another program, such as a notebook."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import warnings
from collections.abc import Iterator
from typing import Any

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
    environment, threads = dict(os.environ), torch.get_num_threads()
    python, numpy = random.getstate(), np.random.get_state()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    kinds = (PartialState, AcceleratorState, GradientState)
    shared = [kind._shared_state for kind in kinds]  # noqa: SLF001  accelerate has no public way to keep it
    before: list[dict[str, Any]] = [dict(state) for state in shared]
    for state in shared:
        state.clear()
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices):
            yield
    finally:
        for state, content in zip(shared, before, strict=True):
            state.clear()
            state.update(content)
        torch.set_num_threads(threads)
        random.setstate(python)
        np.random.set_state(numpy)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        _one_run.release()
