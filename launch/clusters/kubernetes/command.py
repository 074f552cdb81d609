"""`k8s`: print the manifest of a run on a Kubernetes cluster, or give it to kubectl."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

from isobatch.core.errors import DONE, UserError
from isobatch.launch.clusters.kubernetes.manifest import render
from isobatch.launch.clusters.kubernetes.options import KubernetesOptions
from isobatch.launch.local.arguments import parse_request

if TYPE_CHECKING:
    from collections.abc import Sequence


def k8s(words: Sequence[str]) -> int:
    """Usage: k8s --task TASK --image IMAGE --claim CLAIM --nodes N --gpus-per-node G [flags] [--submit]

    flags: --cpu --cpus N --mem 64Gi --node-selector gpu=h100 --namespace NAME --secret NAME, and those of
           `auto`; --data is a path under /isobatch, where pods see the claim, or a name on the hub
    """
    request = parse_request(words, "k8s", KubernetesOptions)
    options = KubernetesOptions(**request.extra)
    if options.cpu:
        request = dataclasses.replace(request, plan=dataclasses.replace(request.plan, device="cpu"))
    for note in request.notes:
        print(note, file=sys.stderr)
    text = render(request, options)
    if not options.submit:
        print(text, end="")
        return DONE
    return _apply(text)


def _apply(text: str) -> int:
    """Give a manifest to kubectl; its exit code. Raises UserError where there is none, or it refuses."""
    if shutil.which("kubectl") is None:
        raise UserError("--submit: there is no kubectl here: without --submit the manifest is printed")
    done = subprocess.run(
        ["kubectl", "apply", "-f", "-"], input=text, text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise UserError(f"kubectl: {(done.stderr.strip() or 'refused the manifest').splitlines()[-1]}")
    print(done.stdout, end="")
    return DONE
