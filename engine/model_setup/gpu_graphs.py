"""What Inductor's graphs of a training step become for a GPU, so that its kernels move fewer bytes.

The figures are of GPT-2 124M over 32 x 1,024 tokens. Not for a CPU: sums in two stages took 1.05 s there, and
0.26 in one.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

aten = torch.ops.aten


class _Pass(CustomGraphPass):
    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))


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
    own to Inductor, which reads them again (4.9 GB).
    """

    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.prims.convert_element_type.default):
            if {aten.mm.default} & {other.target for user in node.users for other in user.users}:
                # Else its kernel goes over rows and not samples, and can be part of no other (1.8 GB).
                node.meta["inductor_realize_to_strides"] = True
        for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
            rows, dims, *_ = node.args
            if dims == [0] and rows.target is aten.reshape.default and rows.args[0].meta["val"].ndim == 3:
                with graph.inserting_before(node):
                    sums = graph.call_function(node.target, (rows.args[0], [1]), {"dtype": torch.float32})
                node.args, node.kwargs = (sums, *node.args[1:]), {"dtype": node.meta["val"].dtype}
