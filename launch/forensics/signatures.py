"""Signatures of files by ssh keys: `ssh-keygen -Y sign` and `-Y verify`, in the namespace `isobatch`."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

from isobatch.core.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

NAMESPACE = "isobatch"


def sign(text: str, key: Path) -> str:
    """A signature by a private key, or a public one whose private key an agent holds. Raises UserError."""
    done = _ssh_keygen("-Y", "sign", "-f", str(key), "-n", NAMESPACE, text=text)
    if done.returncode or not done.stdout:
        raise UserError(f"--sign {key}: {_last_line(done)}")
    return done.stdout


def signature_of(file: Path) -> Path:
    """Where the signature of a file lies."""
    return file.with_name(f"{file.name}.sig")


def check(file: Path, signers: Path | None) -> tuple[str, str]:
    """(who signed a file, what is wrong); one of them is empty. `signers`: an allowed_signers file of ssh.

    Without `signers` only that the signature is one of this file; who holds its key is then not known.
    """
    signature = signature_of(file)
    common = ["-n", NAMESPACE, "-s", str(signature)]
    text = file.read_text(encoding="utf-8")
    if signers is None:
        done = _ssh_keygen("-Y", "check-novalidate", *common, text=text)
        return ("", _last_line(done)) if done.returncode else (_key_in(done), "")
    found = _ssh_keygen("-Y", "find-principals", "-s", str(signature), "-f", str(signers))
    names = found.stdout.split()
    if found.returncode or not names:
        return "", f"its key is none of those in {signers}"
    done = _ssh_keygen("-Y", "verify", "-f", str(signers), "-I", names[0], *common, text=text)
    return ("", _last_line(done)) if done.returncode else (names[0], "")


def _ssh_keygen(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    if shutil.which("ssh-keygen") is None:
        raise UserError("there is no ssh-keygen here: install OpenSSH's client (8.2 or newer)")
    return subprocess.run(["ssh-keygen", *words], input=text, capture_output=True, text=True, check=False)


def _key_in(done: subprocess.CompletedProcess[str]) -> str:
    words = (done.stdout + done.stderr).split()
    return next((word for word in words if word.startswith("SHA256:")), "a key")


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"ssh-keygen ended with {done.returncode}"
