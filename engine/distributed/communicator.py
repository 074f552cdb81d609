"""The processes of a run and every collective between them, behind one object.

All communication goes through here, so that a test can record what each rank would do. One process makes
no process group and every collective is the identity.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from isobatch.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch
    from accelerate import Accelerator
    from torch import Tensor, nn

    from isobatch.core.plan import Plan

_BUCKET_BYTES = 25 << 20
BACKEND_LATER_SECONDS = 60


def rank_and_world_size(environment: Mapping[str, str]) -> tuple[int, int]:
    """(rank, world size) as torchrun, accelerate or srun formed them, before torch is imported.

    A scheduler that started several processes which nobody joined is refused: each would train alone.
    """
    if "WORLD_SIZE" in environment and "RANK" in environment:
        return int(environment["RANK"]), int(environment["WORLD_SIZE"])
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        started = int(environment.get(name, 1) or 1)
        if started > 1:
            raise UserError(
                f"{started} processes were started ({name}={started}) but no world was formed: each would"
                " train alone. Start one launcher per node (torchrun or accelerate launch), or use `slurm`"
            )
    return 0, 1


def check_world(planned: int, actual: int) -> None:
    """Refuse to train in a world other than the planned one."""
    if planned != actual:
        raise UserError(
            f"the plan is for {planned} process{'es' if planned > 1 else ''} and this world has {actual}:"
            f" start it with {planned}, or plan anew with `resume RUN --processes {actual}`"
        )


def broadcast_choice_before_planning(
    choose: Callable[[], str], rank: int, size: int, cpu: bool, timeout: int
) -> str:
    """Rank 0's choice on every rank, or its error on every rank: nobody waits for one that gave up."""
    if size == 1:
        return choose()
    import torch.distributed as dist
    from accelerate import PartialState

    PartialState(cpu=cpu, timeout=datetime.timedelta(seconds=max(1, timeout)))
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


class Communicator:
    """This process among the others."""

    def __init__(
        self, plan: Plan, hang_timeout: int = 1800, tracker: str = "none", folder: str = "."
    ) -> None:
        rank, size = rank_and_world_size(os.environ)
        check_world(plan.processes, size)
        self.plan, self.rank, self.size = plan, rank, size
        self.accelerator = _accelerator(plan, hang_timeout, tracker, folder)
        if self.accelerator.num_processes != size:
            check_world(size, self.accelerator.num_processes)
        self.device: torch.device = self.accelerator.device
        self.place = "the start"
        self.moved_at = time.monotonic()
        self.waiting = ""
        """The collective this process stands in, or nothing."""

    def mark_progress(self, place: str) -> None:
        """Say what this process is at; whoever watches sees that it moves."""
        self.place, self.moved_at = place, time.monotonic()

    @contextlib.contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Around whatever waits for other processes."""
        self.waiting, self.moved_at = what, time.monotonic()
        yield
        self.waiting, self.moved_at = "", time.monotonic()

    def store(self) -> Any:
        """The key-value store that formed this world; None where there is one process."""
        if self.size == 1:
            return None
        import torch.distributed as dist

        return dist.distributed_c10d._get_default_store()  # noqa: SLF001  torch has no public way

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def wrap_in_ddp(self, model: nn.Module) -> nn.Module:
        """The model as the strategy runs it: in DDP where there are others, itself where there are none."""
        if self.size == 1:
            return model
        from torch.nn.parallel import DistributedDataParallel

        # Buffers are the same on every rank; broadcasting them would be a collective per forward.
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(
            model, device_ids=devices, broadcast_buffers=False, gradient_as_bucket_view=devices is not None
        )

    def broadcast_model(self, model: nn.Module) -> None:
        """Rank 0's weights and buffers on every rank: no two ranks may train two separate models."""
        if self.size > 1:
            import torch.distributed as dist

            with self.waiting_for("the first weights"):
                for tensor in (*model.parameters(), *model.buffers()):
                    dist.broadcast(tensor.detach(), src=0)

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.size > 1:
            import torch.distributed as dist

            with self.waiting_for("a sum"):
                dist.all_reduce(values)
        return values

    def all_reduce_gradients(self, parameters: list[nn.Parameter]) -> bool:
        """Sum gradients over ranks in flat buckets. A parameter no rank used keeps no gradient.

        Returns whether every rank that had work used every parameter.
        """
        if self.size == 1:
            return all(p.grad is not None for p in parameters)
        import torch

        mine = [p.grad is not None for p in parameters]
        *used, busy = self.all_reduce_sum(
            torch.tensor([*mine, any(mine)], dtype=torch.int32, device=self.device)
        ).tolist()
        kept = [p for p, n in zip(parameters, used, strict=True) if n]
        for p in kept:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        for bucket in _buckets(kept):
            flat = self.all_reduce_sum(torch.cat([p.grad.reshape(-1) for p in bucket if p.grad is not None]))
            for p, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                assert p.grad is not None
                p.grad.copy_(piece.view_as(p))
        return all(n == busy for n in used)

    def all_reduce_sparse(self, p: nn.Parameter) -> Tensor:
        """A table's sparse gradient, summed over ranks; what is sent grows with the rows of the batch."""
        import torch

        if self.size == 1 and p.grad is not None:
            return p.grad.coalesce()
        rows, values = torch.empty(0, dtype=torch.int64, device=p.device), p.detach()[:0]
        if p.grad is not None:
            mine = p.grad.coalesce()
            rows, values = mine.indices()[0], mine.values()
        counts = self.all_gather(torch.tensor([len(rows)], device=p.device)).tolist()
        most = max(1, *counts)
        every = self.all_gather(_padded(rows, most)).split(most)
        of_every = self.all_gather(_padded(values, most)).split(most)
        rows = torch.cat([part[:n] for part, n in zip(every, counts, strict=True)])
        values = torch.cat([part[:n] for part, n in zip(of_every, counts, strict=True)])
        return torch.sparse_coo_tensor(rows[None], values, p.shape, check_invariants=False).coalesce()

    def all_gather(self, values: Tensor) -> Tensor:
        """(ranks * n, ...) of every rank's (n, ...), in their order."""
        import torch
        import torch.distributed as dist

        found = [torch.empty_like(values) for _ in range(self.size)]
        with self.waiting_for("rows of a table"):
            dist.all_gather(found, values.contiguous())
        return torch.cat(found)

    def all_gather_objects(self, value: Any) -> list[Any]:
        """Every rank's object, on every rank."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        with self.waiting_for("a vote"):
            dist.all_gather_object(found, value)
        return found

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's object, on every rank."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        box = [value]
        with self.waiting_for("rank 0's word"):
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        if self.size > 1:
            with self.waiting_for("a barrier"):
                self.accelerator.wait_for_everyone()

    def close(self) -> None:
        """Nothing more will be said to the others; trackers write what they hold."""
        for tracker in self.accelerator.trackers:
            tracker.finish()
        if self.size > 1:
            self._wait_for_the_last()

    def exit_process(self, code: int) -> None:
        """End this process with `code` where there are others; one alone goes on.

        Not by way of the interpreter's end: there gloo's destructor waits, holding the interpreter, for
        its own thread that wants it (torch 2.13, seen as a hang and as an abort).
        """
        if self.size > 1:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _wait_for_the_last(self) -> None:
        """Nobody closes a connection that another may still read: gloo's threads abort when one is reset."""
        store = self.store()
        with contextlib.suppress(RuntimeError):  # whoever kept the store may have left already
            store.set(f"isobatch/left/{self.rank}", "1")
            everyone = [f"isobatch/left/{rank}" for rank in range(self.size)]
            store.wait(everyone, datetime.timedelta(seconds=60))


def _padded(values: Tensor, count: int) -> Tensor:
    """(count, ...) with zeros below."""
    import torch

    return torch.cat([values, values.new_zeros(count - len(values), *values.shape[1:])])


def _buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
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
    from accelerate.utils import GradScalerKwargs

    # Later than the watch, which can say who and where.
    timeout = datetime.timedelta(seconds=hang_timeout + BACKEND_LATER_SECONDS if hang_timeout else 10**6)
    return Accelerator(
        cpu=plan.device == "cpu",
        mixed_precision="no" if plan.precision == "fp32" else plan.precision,
        log_with=None if tracker == "none" else tracker,
        project_dir=folder,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout), GradScalerKwargs(enabled=False)],
    )
