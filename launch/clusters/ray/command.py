"""`ray`: print the script of a run on a Ray cluster, run it, or hand it in as a job."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.core.errors import DONE, UserError
from isobatch.launch.clusters.ray.options import RayOptions
from isobatch.launch.clusters.ray.script import render
from isobatch.launch.local.arguments import parse_request

if TYPE_CHECKING:
    from collections.abc import Sequence

NO_STATISTICS = "RAY_USAGE_STATS_ENABLED"
"""Environment variable by which Ray sends nobody statistics of its use."""


def ray(words: Sequence[str]) -> int:
    """Usage: ray --task TASK --ray-workers N --gpus-per-worker G [flags] [--submit]

    flags: --cpu --cpus-per-worker C --min-ray-workers M --address auto|local|HOST:PORT|http://HOST:8265, and
           those of `auto`. All nodes see the folder in which this is run, --out and --data.
    """
    request = parse_request(words, "ray", RayOptions)
    options = RayOptions(**request.extra)
    if options.cpu:
        request = dataclasses.replace(request, plan=dataclasses.replace(request.plan, device="cpu"))
    for note in request.notes:
        print(note, file=sys.stderr)
    script = render(request, options)
    if not options.submit:
        print(script, end="")
        return DONE
    if importlib.util.find_spec("ray") is None:
        raise UserError("--submit needs: pip install 'isobatch[ray]', or 'ray[train]'")
    os.environ.setdefault(NO_STATISTICS, "0")
    return _hand_in(script, options.address) if options.hands_in_a_job else _run(script)


def _run(script: str) -> int:
    """Run a script in this process; its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "isobatch_on_ray.py"
        path.write_text(script, encoding="utf-8")
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            return int(end.code or 0)
    return DONE


def _hand_in(script: str, address: str) -> int:
    """Hand in a script as a job of Ray, and print the job's number. Raises UserError where Ray takes none."""
    from ray.job_submission import JobSubmissionClient

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "isobatch_on_ray.py").write_text(script, encoding="utf-8")
        # Of a library that says on standard output what it does: there the number alone is to stand.
        with contextlib.redirect_stdout(sys.stderr):
            try:
                job = JobSubmissionClient(address).submit_job(
                    entrypoint="python isobatch_on_ray.py", runtime_env={"working_dir": folder}
                )
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise UserError(f"--address {address}: {str(error).splitlines()[0]}") from None
    print(job)
    print(f"ray job logs --address {address} -f {job} shows what it does", file=sys.stderr)
    return DONE
