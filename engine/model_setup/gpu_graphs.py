"""What Inductor's graphs of a training step become for a GPU, so that its kernels move fewer bytes.

The figures are of GPT-2 124M over 32 x 1,024 tokens. Not for a CPU: sums in two stages took 1.05 s there, and
0.26 in one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import fx
from torch._inductor import config, custom_graph_pass
from torch.utils.checkpoint import CheckpointPolicy

if TYPE_CHECKING:
    from torch._inductor.scheduler import BaseSchedulerNode

aten = torch.ops.aten


class _Pass(custom_graph_pass.CustomGraphPass):
    def uuid(self) -> bytes:
        return custom_graph_pass.get_hash_for_files((__file__,))


class KeptResiduals(_Pass):
    """Keeps the sum of an fp32 residual and a product's 16 bits for the norm's backward pass (1.2 GB).

    Left to itself the backward pass adds both again, in the kernel of another norm that reads the residual.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
            terms = [term.meta["val"] for term in node.all_input_nodes]
            if len({t.shape for t in terms}) == 1 and {t.itemsize for t in terms} == {2, 4}:
                node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
                for user in {*node.users, *(second for first in node.users for second in first.users)}:
                    if user.target in (aten.sub.Tensor, aten.mul.Tensor):
                        user.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)


class SumsWithinSamples(_Pass):
    """Sums gradients of biases within each sample, then over samples.

    The first sum is then part of the kernel that makes what is summed. A sum over all rows is a kernel of its
    own to Inductor, which reads them again (4.9 GB). Where products are timed, what is done to each element
    of one can be part of its kernel, and a sum cannot.
    """

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.prims.convert_element_type.default):
            if {aten.mm.default} & {other.target for user in node.users for other in user.users}:
                # Else its kernel goes over rows and not samples, and can be part of no other (1.8 GB).
                node.meta["inductor_realize_to_strides"] = True
        for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
            rows, dims, *_ = node.args
            if rows.target is not aten.reshape.default or (config.max_autotune_gemm and _from_product(rows)):
                continue
            if dims == [0] and rows.args[0].meta["val"].ndim == 3:
                with graph.inserting_before(node):
                    sums = graph.call_function(node.target, (rows.args[0], [1]), {"dtype": torch.float32})
                node.args, node.kwargs = (sums, *node.args[1:]), {"dtype": node.meta["val"].dtype}


def _from_product(rows: fx.Node) -> bool:
    """Whether `rows` are a product to each of whose elements something was done."""
    found, nodes = set(), [rows]
    for node in nodes:
        if node.target in (aten.mm.default, aten.sum.dim_IntList):
            found.add(node.target)
        elif isinstance(node.target, torch._ops.OpOverload):  # noqa: SLF001  what attention returns is none
            nodes += [one for one in node.all_input_nodes if one not in nodes]
    return found == {aten.mm.default}


class WholeEpilogues(getattr(custom_graph_pass, "CustomSchedulerPass", _Pass)):  # type: ignore[misc]
    """Lets what is done to each element of a product be part of its kernel where that has another shape.

    Inductor compares their loops as they are written: rows x width with samples x length x width.
    """

    uuid = _Pass.uuid

    def __call__(self, nodes: list[BaseSchedulerNode]) -> list[BaseSchedulerNode]:
        from torch._inductor.scheduler import SchedulerNode

        for node in nodes:
            if node.is_template():
                users = {user.node for out in node.get_outputs() for user in out.users if user.node in nodes}
                user = users.pop() if len(users) == 1 else node
                if isinstance(user, SchedulerNode) and not (user.is_reduction() or user.is_template()):
                    node.set_read_writes(node.node.extract_read_writes(normalize=True))  # type: ignore[union-attr]
                    user.refresh_dependencies(normalize=True, need_clear_tiling_cache=False)
        return nodes
