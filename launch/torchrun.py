"""Runs torchrun on a node of a world whose TCPStore another process serves: the launcher of the first node.

    python launch/torchrun.py --rdzv-backend=static --rdzv-endpoint=HOST:PORT --node-rank=N ARGUMENTS

Two reasons against torchrun as it is (torch 2.13). Its static rendezvous binds the store's port itself, so
that it must have been probed and released before, and may be taken meanwhile. Its c10d rendezvous needs no
port, but numbers the nodes by their addresses, and takes nodes for dead whose clocks are 15 s apart.
"""

import runpy
from typing import Any

from torch import distributed
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous


class ClientStore(distributed.TCPStore):
    """A TCPStore that serves nobody, whatever its rank."""

    def __init__(self, host: str, port: int, nodes: int, _is_master: bool, *more: Any, **names: Any) -> None:
        super().__init__(host, port, nodes, False, *more, **names)


if __name__ == "__main__":
    static_tcp_rendezvous.TCPStore = ClientStore  # type: ignore[assignment,misc]
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
