"""How long finished classifiers take, as a program that runs them waits; the only code that times one.

Texts have the lengths of held-out ones. Models take turns, so that what slows the machine down slows all, and
are compared within each turn.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from isobatch.core.measures import peak_resident_bytes
from isobatch.models.base import Batch
from isobatch.models.encoder import evaluation

BATCHES = (1, 32)
"""Texts of a batch."""
TEXTS = {1: 16, 32: 32}
"""Texts of a batch -> texts of a round."""
WARM_UP = 2
"""Batches that a model runs before its turn: another one's threads wait for work, spinning, for 1 ms."""
ROUNDS = 9
"""Odd."""
ALL_THREADS = "_all_threads"
"""Ends the names of what was measured on every core."""
Inputs = list[dict[str, np.ndarray]]
"""Of each batch."""
Model = dict[str, Any]
"""model_path, vocabulary, lengths."""


def drawn_lengths(batches: Iterable[Batch]) -> list[int]:
    """Tokens of as many samples as are timed, drawn from all; the same whenever it is called."""
    lengths, draw = np.concatenate([batch["length"] for batch in batches]), np.random.default_rng(0)
    return draw.choice(lengths, max(TEXTS.values())).tolist()


def texts(lengths: Sequence[int], vocabulary: int, rows: int) -> Inputs:
    """Batches of `rows` texts, padded to the longest; a forward's time does not depend on the token ids."""
    found = []
    for start in range(0, min(len(lengths), TEXTS[rows]), rows):
        group = np.array(lengths[start : start + rows])
        inside = (np.arange(group.max()) < group[:, None]).astype(np.int64)
        ids = np.arange(inside.size).reshape(inside.shape) * 7919 % vocabulary
        found.append({"input_ids": ids, "attention_mask": inside})
    return found


def time_in_turn(
    runners: Sequence[evaluation.Runner], inputs: Sequence[Inputs], clock: Callable[[], float]
) -> np.ndarray:
    """(models, ROUNDS, batches) ms. `inputs`: of each model; `clock`: seconds."""
    found = np.zeros((len(runners), ROUNDS, len(inputs[0])))
    for number in range(ROUNDS):
        for turn in range(len(runners)):
            place = (number + turn) % len(runners)
            run = runners[place]
            for given in inputs[place][:WARM_UP]:
                run(given)
            for batch, given in enumerate(inputs[place]):
                began = clock()
                run(given)
                found[place, number, batch] = (clock() - began) * 1e3
    return found


def speedup(times: dict[str, Any], first: dict[str, Any]) -> list[float]:
    """[median, low, high] of the ratio within each round; the second and the last but one of the rounds.

    Of 9 rounds these hold the median with 96 %, whatever the distribution (order statistics).
    """
    rounds = np.array(first["rounds"]) / np.array(times["rounds"])
    _, low, *_, high, _ = np.sort(rounds).tolist()
    return [round(float(one), 3) for one in (np.median(rounds), low, high)]


def quantiles(times: np.ndarray) -> dict[str, Any]:
    """p50 and p95 of a batch in ms, and the mean of each round. `times`: (ROUNDS, batches)."""
    p50, p95 = np.percentile(times, (50, 95)).round(4).tolist()
    return {"p50": p50, "p95": p95, "rounds": times.mean(1).round(4).tolist()}


def measure_speed(models: list[Model]) -> list[dict[str, Any]]:
    """Per model and batch of BATCHES, on one thread and on all: quantiles of ms, and each round's mean.

    In a process of its own. On one thread the ms are its own time, which does not pass while another program
    has the processor; on all they are the clock's. Texts a second are those of the larger batch on one.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found: list[dict[str, Any]] = [
        {"threads": 1, "all_threads": cores, "tokens": round(float(np.mean(model["lengths"])), 1)}
        for model in models
    ]
    for threads, ending, clock in ((1, "", time.thread_time), (cores, ALL_THREADS, time.perf_counter)):
        runners = [evaluation.open_runner(model["model_path"], threads) for model in models]
        for rows in BATCHES:
            inputs = [texts(model["lengths"], model["vocabulary"], rows) for model in models]
            for one, times in zip(found, time_in_turn(runners, inputs, clock), strict=True):
                one[f"batch_{rows}{ending}"] = quantiles(times)
                if not ending:
                    one["samples_per_second"] = round(rows / one[f"batch_{rows}"]["p50"] * 1e3, 2)
    return found


def peak_memory(model: Model) -> int:
    """Bytes that a process takes which opens this model alone and runs it. Call it in a new process."""
    run = evaluation.open_runner(model["model_path"], threads=1)
    for rows in BATCHES:
        for given in texts(model["lengths"], model["vocabulary"], rows):
            run(given)
    return peak_resident_bytes()
