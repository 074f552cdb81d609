"""Checks of what is installed: versions, locale, a compiler; what bitsandbytes and DeepSpeed can do."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from isobatch.core.package import ROOT
from isobatch.launch.doctor.check import Check, broken, ok, warning

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from isobatch.launch.doctor.children import Answer

ONLY_FOR_SOME = (
    *("deepspeed", "bitsandbytes", "peft", "onnx", "onnxruntime", "datasets", "matplotlib", "nvidia-ml-py"),
)
"""Requirements without which training still works, but for the flags that need them."""
LATE = 'try it again when the machine is idle; if it stays so: pip install --force-reinstall "{}"'
PROGRAM = "#include <vector>\nint main() { std::vector<int> v(3, 14); return v[1] - 14; }\n"


def requirements(root: Path = ROOT) -> list[str]:
    """What this copy of isobatch requires: of its pyproject.toml, else of the installed package."""
    project = root / "pyproject.toml"
    if project.is_file():
        found: list[str] = tomllib.loads(project.read_text())["project"]["dependencies"]
        return found
    return importlib.metadata.requires("isobatch") or []


def installed_version(name: str) -> str | None:
    """The version of an installed package; None where it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_versions(
    required: Iterable[str], installed: Callable[[str], str | None] = installed_version
) -> list[Check]:
    """A line for each requirement that is not met; one line where all are."""
    from packaging.requirements import Requirement

    wrong, count = [], 0
    for text in required:
        need = Requirement(text)
        if need.marker is not None and not need.marker.evaluate({"extra": ""}):
            continue
        count += 1
        version = installed(need.name)
        if version is not None and need.specifier.contains(version, prereleases=True):
            continue
        say = warning if need.name in ONLY_FOR_SOME else broken
        here = "is not installed" if version is None else f"{version} is here"
        text = f"{here}; isobatch needs {need.name}{need.specifier}"
        wrong.append(say(need.name, text, f'{pip()} install "{need.name}{need.specifier}"'))
    return wrong or [ok("versions", f"all {count} required packages are here, in versions that fit")]


def pip() -> str:
    """The command of this interpreter's pip."""
    return f"{sys.executable} -m pip"


def check_locale(encoding: str) -> Check:
    """`encoding`: in which Python reads names of files."""
    if encoding.lower().replace("-", "") == "utf8":
        return ok("locale", "UTF-8")
    lost = "names and texts in other letters cannot be read"
    return warning("locale", f"{encoding}: {lost}", "export LC_ALL=C.UTF-8")


def check_compiler(command: str = "g++") -> Check:
    """Compile and run a small C++ program, with OpenMP as torch.compile does."""
    remedy = "apt-get install g++ (or your cluster's module of gcc); CXX=PATH names another"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program"
        words = [command, "-x", "c++", "-fopenmp", "-O1", "-", "-o", str(program)]
        try:
            done = subprocess.run(words, input=PROGRAM, capture_output=True, text=True, timeout=30)
            if done.returncode == 0:
                done = subprocess.run([str(program)], capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.SubprocessError) as error:
            return warning("C++ compiler", f"torch.compile needs one: {error}", remedy)
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if "error" in line), "it fails")
        return warning("C++ compiler", f"{command} cannot make a program: {said.strip()}", remedy)
    return ok("C++ compiler", f"{command} makes programs that run")


def check_compile(answer: Answer) -> Check:
    """Of `probes.compiled`."""
    name = "torch.compile"
    off = "--compile off trains without it; its message in full: TORCH_LOGS=+inductor"
    if answer.late:
        return ok(name, f"not waited for: {answer.error}, as the first compilation is slow here")
    if answer.error:
        return warning(name, f"fails: {answer.error}", off)
    if answer.found["difference"] > 1e-5:
        return broken(name, f"computes wrongly, by {answer.found['difference']:.1e}", off)
    if answer.found["passed_by"]:
        return warning(name, answer.found["passed_by"], "rename that folder")
    return ok(name, f"compiled for {answer.found['device']} in {answer.found['seconds']:.1f} s")


def check_bitsandbytes(answer: Answer) -> Check:
    """Of `probes.quantised`: what --load-bits, qlora and 8-bit optimizers need."""
    name, remedy = "bitsandbytes", f'{pip()} install --force-reinstall "bitsandbytes>=0.49"'
    needs = "--load-bits, --adapter qlora and 8-bit optimizers need it"
    if answer.error:
        return warning(name, f"{answer.error}; {needs}", LATE.format(name) if answer.late else remedy)
    found = answer.found
    if not 0.03 < found["error"] < 0.15:  # of nf4: 0.07
        return broken(name, f"4 bits there and back are off by {found['error']:.2f}; {needs}", remedy)
    return ok(name, f"{found['version']} quantises to 4 bits and back on {found['device']}")


def check_deepspeed(answer: Answer) -> Check:
    """Of `probes.deepspeed_step`: what --strategy zero1, zero2 and zero3 need."""
    name, remedy = "DeepSpeed", f'{pip()} install --force-reinstall "deepspeed>=0.19"'
    needs = "--strategy zero1, zero2 and zero3 need it"
    if "CUDA_HOME" in answer.error:
        remedy = "install CUDA's compiler (nvcc) and export CUDA_HOME=/usr/local/cuda"
    if answer.error:
        return warning(name, f"{answer.error}; {needs}", LATE.format("deepspeed") if answer.late else remedy)
    if abs(answer.found["moved"] - 0.1) > 1e-6:
        return broken(name, f"a step of 0.1 moved the weights by {answer.found['moved']:g}; {needs}", remedy)
    return ok(name, f"{answer.found['version']} makes a step of ZeRO-1")
