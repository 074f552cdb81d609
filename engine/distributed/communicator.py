"""The communicator: the processes of a run, and every collective between them.

All communication goes through this class, so that a test can record what each rank does. A single process
forms no process group, and every collective is then the identity.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from isobatch.core.errors import TrainingError, UserError
from isobatch.engine.distributed.device_memory import forbid_spilling
from isobatch.engine.distributed.recorder import Recorder
from isobatch.engine.machine.detect import check_world, node_and_nodes, rank_and_world_size

if TYPE_CHECKING:
    from accelerate import Accelerator

    from isobatch.core.plan import Plan

_BUCKET_BYTES = 25 << 20
BACKEND_LATER_SECONDS = 60
"""How much longer the backend's timeout is than the watchdog's."""
NO_TIMEOUT_SECONDS = 10**6
"""The backend's timeout where there is no watchdog: backends take no infinite one."""


def broadcast_choice_before_planning(
    choose: Callable[[], str], rank: int, cpu: bool, hang_timeout: int
) -> str:
    """The result of rank 0's `choose()` on every rank; a UserError of it is raised on every rank.

    Before there is a plan, and so a Communicator, which then uses the process group that is formed here.
    """
    from accelerate import PartialState

    PartialState(cpu=cpu, **process_group_arguments(cpu, hang_timeout))
    box = ["", ""]
    if rank == 0:
        try:
            box = [choose(), ""]
        except UserError as error:
            box = ["", str(error)]
    dist.broadcast_object_list(box, src=0)
    if box[1]:
        raise UserError(box[1])
    return box[0]


def process_group_arguments(cpu: bool, hang_timeout: int) -> dict[str, Any]:
    """Arguments of the process group: its timeout and, on CUDA GPUs, backends for host and device tensors.

    `hang_timeout` in seconds, 0 for none. The backend waits longer than the watchdog, whose message names the
    stuck rank.
    """
    seconds = hang_timeout + BACKEND_LATER_SECONDS if hang_timeout else NO_TIMEOUT_SECONDS
    arguments: dict[str, Any] = {"timeout": datetime.timedelta(seconds=seconds)}
    if not cpu and torch.cuda.is_available() and "LOCAL_RANK" in os.environ:  # else accelerate forms no group
        # NCCL alone refuses host tensors, and copies objects through the GPU, which waits for all its work.
        arguments["backend"] = "cpu:gloo,cuda:nccl"
    return arguments


class Communicator:
    """One process (rank) of a run, and its collectives with the others.

    Raises UserError where the world size is not the plan's. `hang_timeout` in seconds, 0 for none;
    `folder` is where trackers write.
    """

    node, nodes = 0, 1
    """The number of this process's node, and how many there are."""
    barred = ""
    """The hook that is asked outside of a pause: ranks might not meet in a collective of it."""
    waiting = ""
    """The collective that this process is in; empty where it is in none."""
    recorder = Recorder()
    """Times the parts of this process's steps; off unless somebody profiles them."""

    def __init__(
        self, plan: Plan, hang_timeout: int = 1800, tracker: str = "none", folder: str = "."
    ) -> None:
        rank, size = rank_and_world_size(os.environ)
        check_world(plan.processes, size)
        self.plan, self.rank, self.size = plan, rank, size
        self.node, self.nodes = node_and_nodes(os.environ, rank, size)
        self._hang_timeout, self._meshes = hang_timeout, dict[int, DeviceMesh]()
        self.accelerator = _accelerator(plan, hang_timeout, tracker, folder)
        check_world(size, self.accelerator.num_processes)
        self.device: torch.device = self.accelerator.device
        forbid_spilling(self.device)
        self.recorder = Recorder()
        self.position = "the start"
        """What this process is doing, for the watchdog's message."""
        self.moved_at = time.monotonic()
        self.is_finishing = False
        """Whether rank 0 exports the model while the others wait: it alone hears a request to stop then."""

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Context of a forward pass, in the plan's precision."""
        if self.plan.precision == "fp32":
            return contextlib.nullcontext()
        kind = torch.bfloat16 if self.plan.precision == "bf16" else torch.float16
        return torch.autocast(self.device.type, kind)

    def mark_progress(self, position: str) -> None:
        """Tell the watchdog that this process makes progress, and what it is doing."""
        self.position, self.moved_at = position, time.monotonic()

    @contextlib.contextmanager
    def waiting_for(self, collective: str) -> Iterator[None]:
        """Context of a collective: tells the watchdog that this process waits for others in it.

        What reads a collective's result on the host belongs inside: on a GPU the call itself does not wait.
        """
        if self.barred:
            raise TrainingError(
                f"hook {self.barred} runs a collective ({collective}) outside of at_pause, where the ranks"
                ' might not meet: ask for "pause", and run it there'
            )
        outer = self.waiting
        self.waiting, self.moved_at = collective, time.monotonic()
        try:
            yield
        finally:
            self.waiting, self.moved_at = outer, time.monotonic()

    def store(self) -> Any:
        """The key-value store of the process group; None where there is one process."""
        # torch has no public way.
        return None if self.size == 1 else dist.distributed_c10d._get_default_store()  # noqa: SLF001

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def form_group(self) -> None:
        """Form a process group where there is one process too, for strategies that need one."""
        if not dist.is_initialized():
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)

    def device_mesh(self, copies: int) -> DeviceMesh:
        """The ranks; where there are several copies of a model, as (copies, ranks that share each).

        Of the run's own backend and timeout: init_device_mesh may make an NCCL group where it has gloo alone.
        """
        self.form_group()
        if copies == 1:
            assert dist.group.WORLD is not None
            return DeviceMesh.from_group(dist.group.WORLD, self.device.type)
        if copies not in self._meshes:
            ranks = torch.arange(self.size).view(copies, -1)
            limit = process_group_arguments(self.device.type == "cpu", self._hang_timeout)["timeout"]
            with self.waiting_for("the groups of a mesh"):
                found = (dist.new_subgroups_by_enumeration(r.tolist(), limit) for r in (ranks.T, ranks))
                groups = [group for group, _ in found]
            names = ("copies", "shards")
            made = DeviceMesh.from_group(groups, self.device.type, ranks, mesh_dim_names=names)
            self._meshes[copies] = made
        return self._meshes[copies]

    def wrap_in_ddp(self, model: nn.Module) -> nn.Module:
        """The model in DistributedDataParallel, for several processes."""
        # Buffers are the same on every rank: broadcasting them would cost a collective per forward pass.
        devices = [self.device] if self.device.type == "cuda" else None
        with self.waiting_for("DDP's comparison of the models"):
            return nn.parallel.DistributedDataParallel(
                model,
                device_ids=devices,
                broadcast_buffers=False,
                gradient_as_bucket_view=devices is not None,
            )

    def broadcast_model(self, model: nn.Module) -> None:
        """Copy rank 0's weights and buffers to every rank, so that all ranks start from the same model."""
        for tensor in (*model.parameters(), *model.buffers()):
            self._broadcast(tensor.detach())

    def broadcast_onto_device(self, tensors: Iterable[Tensor]) -> None:
        """Put rank 0's weights and buffers on every rank's device; only rank 0 needs to have their values."""
        for tensor in tensors:
            if self.is_main:
                tensor.data = tensor.data.to(self.device)
            else:
                tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            self._broadcast(tensor.data)

    def _broadcast(self, tensor: Tensor) -> None:
        if self.size > 1:
            with self.waiting_for("the broadcast of the initial weights"):
                dist.broadcast(tensor, src=0)

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, in place; returns `values`."""
        if self.size > 1 or self.barred:
            with self.waiting_for("an all-reduce"), self.recorder.part("communication"):
                dist.all_reduce(values)
        return values

    def all_reduce_gradients(self, parameters: list[nn.Parameter]) -> bool:
        """Sum gradients over ranks in flat buckets. A parameter that no rank used keeps no gradient.

        Returns whether every rank that had samples used every parameter.
        """
        if self.size == 1:
            return all(p.grad is not None for p in parameters)
        used_here = [p.grad is not None for p in parameters]
        votes = torch.tensor([*used_here, any(used_here)], dtype=torch.int32, device=self.device)
        with self.waiting_for("the votes on which parameters are used"):
            *num_users, num_busy = self.all_reduce_sum(votes).tolist()
        used = [p for p, n in zip(parameters, num_users, strict=True) if n]
        for p in used:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        for bucket in _buckets(used):
            flat = self.all_reduce_sum(torch.cat([p.grad.reshape(-1) for p in bucket if p.grad is not None]))
            for p, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                assert p.grad is not None
                p.grad.copy_(piece.view_as(p))
        return all(n == num_busy for n in num_users)

    def all_reduce_sparse(self, p: nn.Parameter) -> Tensor:
        """An embedding's sparse gradient, summed over ranks; only rows that were read are sent."""
        if self.size == 1 and p.grad is not None:
            return p.grad.coalesce()
        rows, values = torch.empty(0, dtype=torch.int64, device=p.device), p.detach()[:0]
        if p.grad is not None:
            gradient = p.grad.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
        with self.waiting_for("the counts of rows that were read"):
            counts = self.all_gather(torch.tensor([len(rows)], device=p.device)).tolist()
        most = max(1, *counts)
        rows_by_rank = self.all_gather(_padded(rows, most)).split(most)
        values_by_rank = self.all_gather(_padded(values, most)).split(most)
        rows = torch.cat([part[:n] for part, n in zip(rows_by_rank, counts, strict=True)])
        values = torch.cat([part[:n] for part, n in zip(values_by_rank, counts, strict=True)])
        return torch.sparse_coo_tensor(rows[None], values, p.shape, check_invariants=False).coalesce()

    def all_gather(self, values: Tensor) -> Tensor:
        """(world size * n, ...): every rank's (n, ...), in the order of ranks."""
        gathered = [torch.empty_like(values) for _ in range(self.size)]
        with self.waiting_for("an all-gather"), self.recorder.part("communication"):
            dist.all_gather(gathered, values.contiguous())
        return torch.cat(gathered)

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Every rank's object, in the order of ranks, on every rank. Objects are pickled."""
        if self.size == 1 and not self.barred:
            return [value]
        gathered: list[Any] = [None] * self.size
        with self.waiting_for("an all-gather of objects"), self.recorder.part("communication"):
            dist.all_gather_object(gathered, value)
        return gathered

    def gather_objects(self, value: Any) -> list[Any]:
        """On rank 0 every rank's object, in the order of ranks; nothing elsewhere. Objects are pickled."""
        if self.size == 1 and not self.barred:
            return [value]
        gathered: list[Any] | None = [None] * self.size if self.is_main else None
        with self.waiting_for("a gather on rank 0"), self.recorder.part("communication"):
            dist.gather_object(value, gathered, dst=0)
        return gathered or []

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's object, on every rank."""
        if self.size == 1 and not self.barred:
            return value
        box = [value]
        with self.waiting_for("a broadcast from rank 0"):
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1 or self.barred:
            with self.waiting_for("a barrier"):
                self.accelerator.wait_for_everyone()

    def close(self) -> None:
        """Finish trackers and wait for all ranks. No collective may follow.

        Connections stay open until every rank is done: gloo's threads abort when one is reset.
        """
        for tracker in self.accelerator.trackers:
            tracker.finish()
        if (store := self.store()) is None:
            return
        with contextlib.suppress(RuntimeError):  # the process that hosts the store may have exited already
            store.set(f"isobatch/left/{self.rank}", "1")
            keys = [f"isobatch/left/{rank}" for rank in range(self.size)]
            store.wait(keys, datetime.timedelta(seconds=60))

    def exit_process(self, code: int) -> None:
        """End this process with `code` where there are several; a single process continues.

        os._exit, because at a normal exit gloo's destructor holds the GIL and waits for its own thread, which
        wants the GIL (torch 2.13: seen as a hang and as an abort).
        """
        if self.size > 1:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _padded(values: Tensor, count: int) -> Tensor:
    """(count, ...): `values` with zero rows appended."""
    return torch.cat([values, values.new_zeros(count - len(values), *values.shape[1:])])


def _buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Consecutive parameters in groups of at most _BUCKET_BYTES; a larger parameter is a group of its own."""
    buckets: list[list[nn.Parameter]] = [[]]
    size = 0
    for p in parameters:
        if size and size + p.numel() * 4 > _BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(p)
        size += p.numel() * 4
    return [b for b in buckets if b]


def _accelerator(plan: Plan, hang_timeout: int, tracker: str, folder: str) -> Accelerator:
    from accelerate import Accelerator, InitProcessGroupKwargs
    from accelerate.state import AcceleratorState
    from accelerate.utils import GradScalerKwargs

    AcceleratorState._reset_state()  # noqa: SLF001  a run before in this process may be of another precision
    cpu = plan.device == "cpu"
    group = InitProcessGroupKwargs(**process_group_arguments(cpu, hang_timeout))
    return Accelerator(
        cpu=cpu,
        mixed_precision="no" if plan.precision == "fp32" else plan.precision,
        log_with=None if tracker == "none" else tracker,
        project_dir=folder,
        kwargs_handlers=[group, GradScalerKwargs(enabled=False)],
    )
