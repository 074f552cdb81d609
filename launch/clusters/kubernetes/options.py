"""The flags of `k8s` beside those of `auto`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from isobatch.core.errors import UserError
from isobatch.core.flags import check_fields
from isobatch.core.number_ranges import Count, Positive

LABEL = r"(?=.{1,63}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?"
"""What Kubernetes takes as the name of a namespace (RFC 1123)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesOptions:
    """Flags of `k8s` beside the recipe's, the plan's and the run's."""

    data_is_elsewhere: ClassVar[bool] = True
    """--data is a path within the claim, or a name on the hub."""

    image: str | None = None
    """The image of the pods: with Python, isobatch and what it requires."""
    claim: str | None = None
    """A PersistentVolumeClaim that all nodes may write (ReadWriteMany): runs, prepared data and downloads."""
    nodes: Positive = 1
    """Pods, each on a node of its own as far as its GPUs fill one."""
    gpus_per_node: Count = 0
    """GPUs of each pod."""
    cpu: bool = False
    """Train on CPUs."""
    cpus: Positive | None = None
    """Cores of each pod."""
    mem: str | None = None
    """Memory of each pod, as Kubernetes writes it: 64Gi."""
    node_selector: str | None = None
    """A label that nodes must have: gpu=h100."""
    secret: str | None = None
    """A Secret whose entries pods get as environment variables, such as HF_TOKEN."""
    namespace: str | None = None
    """By default kubectl's own."""
    submit: bool = False
    """Give the manifest to kubectl."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name, why in (
            ("image", "the image that pods run, with isobatch in it"),
            ("claim", "the volume for runs and data that all pods share"),
        ):
            if not getattr(self, name):
                raise UserError(f"k8s: needs --{name}, {why}")
        if not self.cpu and not self.gpus_per_node:
            raise UserError("k8s: needs --gpus-per-node, or --cpu for nodes without GPUs")
        if self.cpu and self.gpus_per_node:
            raise UserError("--cpu: and GPUs were asked for, too; leave one of them out")
        if self.secret is not None and not re.fullmatch(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", self.secret):
            name = self.secret.partition("=")[0]
            raise UserError(
                f"--secret {name}...: is no name of a Secret, which alone belongs into a manifest"
            )
        if self.namespace is not None and not re.fullmatch(LABEL, self.namespace):
            raise UserError(
                f"--namespace {self.namespace}: is no name of a namespace: at most 63 small letters, digits"
                " and -"
            )
        if self.mem is not None and not re.fullmatch(r"\d+(\.\d+)?([KMGT]i?)?", self.mem):
            raise UserError(f"--mem {self.mem}: is no amount such as 64Gi")
        if self.node_selector is not None and self.node_label is None:
            raise UserError(f"--node-selector {self.node_selector}: is no label such as gpu=h100")

    @property
    def node_label(self) -> tuple[str, str] | None:
        name, equals, value = (self.node_selector or "").partition("=")
        is_label = equals and re.fullmatch(r"[\w./-]+", name) and re.fullmatch(r"[\w.-]{1,63}", value)
        return (name, value) if is_label else None
