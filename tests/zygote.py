"""Commands without the five seconds of imports: a process that has imported all and forks for each of them.

A forked command is a process of its own, with its own folder, environment, output and exit code; what differs
from a fresh one is only that libraries, and our modules, were imported before it began, and that its plan
rests on typical ceilings, not on measured ones. The launcher that it starts for several processes, and these,
are forked as well: `CLIENT` stands in for the interpreter. All forks of one process iterate over a set in the
same order, as fresh ranks do not: those of odd numbers are forked from a process of another hash seed.
Started as: zygote.py SOCKET
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import logging
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).resolve().parents[1]
READ_AT_IMPORT = ("HF_", "TRANSFORMERS_", "OMP_", "GOMP_", "THP_", "TORCH", "PYTHON", "CUDA", "LD_", "LANG")
"""Variables that libraries read when they are imported: another value needs a fresh process."""
SET_BY_TORCH = "TORCHINDUCTOR_CACHE_DIR"
"""Not so this one: torch sets it in a process whose tests compile, and reads it when it compiles."""
HASH_SEEDS = {"": "2", ".odd": "4"}
"""Suffix of a socket -> the hash seed behind it: in these two, small sets of our words have other orders."""
START_SECONDS = 60.0
MODULES = (
    "accelerate.commands.launch",
    "torch.distributed.run",
    *(f"isobatch {command}" for command in ("auto", "resume", "call", "chat", "plots", "serve")),
)
SCRIPTS = (
    *("launch/train.py", "launch/launcher.py", "launch/__main__.py"),
    *("benchmarks/__main__.py", "tests/tasks/measure.py", "tests/integration/test_hook_tensors.py"),
)
"""Modules, commands of ours and scripts that are run in a fork."""
LIBRARIES = (
    *("fire", "matplotlib.figure", "pandas", "peft"),
    *(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2")),
)
FRESH = (":peak_memory", ".onnx")
"""What the command that measures the memory of a process without torch holds: a fork has torch."""
NOT_IMPORTED = [
    "isobatch.models.causal_lm.softmax_kernel",
    *(
        f"isobatch.launch.{name}"
        for name in ("__main__", "_root", "loopback", "torchrun", "train", "clusters.ray.workers")
    ),
]
"""Scripts, and what imports Triton or Ray."""
CLIENT = """#!{python} -IS
import array, json, os, signal, socket, sys
words = [w for w in sys.argv[1:] if w not in ("-P", "-u")]
environment = dict(os.environ)
name = words[1] if words[:1] == ["-m"] else words[0] if words else ""
name = " ".join(words[1:3]) if name == "isobatch" else name
fresh = all(mark in " ".join(words) for mark in {fresh})
if fresh or not (name in {modules} or name.endswith({scripts})):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
connection = socket.socket(socket.AF_UNIX)
odd = int(environment.get("RANK", 0)) % 2
connection.connect({socket!r} + (".odd" if odd else ""))
connection.sendmsg([b"+"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
asked = {{"program": words, "cwd": os.getcwd(), "environment": environment}}
connection.sendall(json.dumps(asked).encode() + b"\\n")
answers = connection.makefile()
pid = int(answers.readline())
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
    signal.signal(number, lambda n, _: os.kill(pid, n))
code = int(answers.readline() or 1)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code not in (9, 19) else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""
"""The interpreter of forks: asks for another fork, passes signals on to it and ends as it ends.

It starts in 20 ms, without site-packages. Only the launcher and its script are forked; others run as always.
"""


class Zygote:
    """The processes that fork, with their own environment where one is given, else with this process's."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="zygote-")
        self._path = f"{self._folder.name}/socket"
        variables = dict(os.environ if environment is None else environment)
        self._at_start = _read_at_import(variables)
        client = Path(self.python)
        client.write_text(
            CLIENT.format(
                python=sys.executable, modules=MODULES, scripts=SCRIPTS, fresh=FRESH, socket=self._path
            )
        )
        client.chmod(0o755)
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-P", __file__, self._path + suffix],
                env={**variables, "PYTHONHASHSEED": seed},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            for suffix, seed in HASH_SEEDS.items()
        ]
        end = time.monotonic() + START_SECONDS
        while not all(Path(self._path + suffix).exists() for suffix in HASH_SEEDS):
            if any(p.poll() is not None for p in self._processes) or time.monotonic() > end:
                raise RuntimeError("the processes that tests fork from did not start")
            time.sleep(0.02)

    @property
    def python(self) -> str:
        """An interpreter for our scripts that forks them from here."""
        return f"{self._folder.name}/python"

    def serves(self, environment: Mapping[str, str]) -> bool:
        return _read_at_import(environment) == self._at_start

    def run(
        self,
        words: Sequence[str],
        cwd: Path,
        environment: Mapping[str, str],
        timeout: float,
        program: Sequence[str] = (),
        given: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """`isobatch WORDS`, or `python PROGRAM`, to its end, with `given` as its input.

        Raises subprocess.TimeoutExpired.
        """
        files = [tempfile.TemporaryFile() for _ in range(3)]  # noqa: SIM115
        with contextlib.ExitStack() as stack:
            typed, out, err = map(stack.enter_context, files)
            typed.write(given.encode())
            typed.seek(0)
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(self._path)
                asked = {"words": list(words), "cwd": str(cwd), "environment": dict(environment)}
                asked |= {"program": list(program)} if program else {}
                socket.send_fds(connection, [b"+"], [file.fileno() for file in files])
                connection.sendall(json.dumps(asked).encode() + b"\n")
                with connection.makefile() as answers:
                    pid = int(answers.readline())
                    connection.settimeout(timeout)
                    try:
                        code = int(answers.readline())
                    except TimeoutError:
                        os.kill(pid, signal.SIGKILL)
                        raise subprocess.TimeoutExpired(list(words), timeout) from None
            out.seek(0)
            err.seek(0)
            texts = (stream.read().decode(errors="replace") for stream in (out, err))
            return subprocess.CompletedProcess(list(words), code, *texts)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._folder.cleanup()


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if k.startswith(READ_AT_IMPORT) and k != SET_BY_TORCH}


def serve(path: str) -> NoReturn:
    """Fork for every connection; only a fork whose command raised an exception leaves this function.

    Libraries are imported when the first comes: many tests need no process of an odd rank.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen()
    Path(f"{path}.new").replace(path)
    client = str(Path(path).with_name("python"))
    has_imported = False
    while True:
        connection, _ = listener.accept()
        if not has_imported:
            gc.disable()
            _import_all()
            gc.freeze()  # what is here stays: neither this process nor a fork need look through it
            gc.enable()
            has_imported = True
        _, files, _, _ = socket.recv_fds(connection, 1, 3)
        asked = json.loads(connection.makefile().readline())
        pid = os.fork()
        if pid == 0:
            listener.close()
            connection.close()
            _end(_become(asked, files, client))
        for file in files:
            os.close(file)
        connection.sendall(f"{pid}\n".encode())
        threading.Thread(target=_report, args=(pid, connection), daemon=True).start()


def _report(pid: int, connection: socket.socket) -> None:
    """Tell the other end how the fork ended; where the other end is killed, kill the fork."""
    ended = threading.Event()

    def watch() -> None:
        with contextlib.suppress(OSError):
            if not connection.recv(1) and not ended.is_set():
                os.kill(pid, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
    _, status = os.waitpid(pid, 0)
    ended.set()
    with contextlib.suppress(OSError):
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def _end(code: int) -> NoReturn:
    """End as the interpreter does, but leave objects where they are: taking them apart copies all memory."""
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
    atexit._run_exitfuncs()  # noqa: SLF001
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _become(asked: dict[str, Any], files: list[int], client: str) -> int:
    from isobatch.launch.cli import main

    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    # A stream remembers what it was opened on: whether it may seek, for one.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["cwd"])
    sys.executable = client
    if program := asked.get("program"):
        os.setsid()
        return _run(program)
    sys.argv = ["isobatch", *asked["words"]]
    return main()


def _run(program: list[str]) -> int:
    """Run a script, `-m module` or `-c code` as the interpreter does; returns its exit code."""
    try:
        if program[0] == "-c":
            sys.argv = ["-c", *program[2:]]
            exec(compile(program[1], "<string>", "exec"), {"__name__": "__main__"})
        elif program[0] == "-m":
            sys.argv = program[1:]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = program
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as end:
        if end.code and not isinstance(end.code, int):
            raise
        return int(end.code or 0)
    return 0


def _import_all() -> None:
    """Import libraries, and every module of ours that neither is a script nor needs a cluster."""
    logging.disable(logging.WARNING)  # bitsandbytes says what this machine lacks
    for library in LIBRARIES:
        importlib.import_module(library)
    logging.disable(logging.NOTSET)
    for room in ("core", "data", "engine", "models", "launch"):
        for module in pkgutil.walk_packages([str(ROOT / room)], f"isobatch.{room}."):
            if module.name not in NOT_IMPORTED:
                importlib.import_module(module.name)
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from transformers import conversion_mapping

    from isobatch.core.terminal import compiled
    from isobatch.engine.hooks.checkpoint import installed_packages
    from isobatch.engine.machine import ceilings
    from isobatch.engine.planning.calibration import typical_ceilings
    from isobatch.engine.registry import TASKS
    from isobatch.launch.local.arguments import known_flags

    ceilings.measure = lambda hardware: typical_ceilings(hardware.cpus)  # not for seconds in every new cache
    installed_packages()
    for page in ("engine/trainer/headline", "models/model_card.md", "launch/local/verify"):
        compiled(ROOT / f"{page}.jinja", autoescape=False, trim_blocks=True)
    conversion_mapping.get_checkpoint_conversion_mapping("gpt2")
    # A launcher names its functions in torch's log: it looks for their frames in all modules, for a second.
    dynamic_rendezvous.get_method_name = str
    for task in TASKS:  # the words under the fields of its options, which every command reads
        known_flags(task)


if __name__ == "__main__":
    runpy.run_path(str(ROOT / "launch" / "_root.py"))
    from isobatch.launch.cli import BEFORE_TORCH

    for name, value in {**BEFORE_TORCH, "TRANSFORMERS_VERBOSITY": "error"}.items():
        os.environ.setdefault(name, value)
    serve(sys.argv[1])
