"""Runs a launcher's module with a TCPStore of our own: who reaches torch's port can execute code.

    python launch/launcher.py accelerate.commands.launch ARGUMENTS
    python launch/launcher.py torch.distributed.run --rdzv-backend=static --node-rank=N ARGUMENTS

For the processes of one machine it listens on the loopback address alone. torch's listens on every address
and asks nobody who they are (torch 2.13), and the agents of torchrun unpickle what they find in it.

For the nodes of a Slurm job another process serves it: the launcher of the first node. Two reasons against
torchrun as it is (torch 2.13). Its static rendezvous binds the store's port itself, so that it must have been
probed and released before, and may be taken meanwhile. Its c10d rendezvous needs no port, but numbers the
nodes by their addresses, and takes nodes for dead whose clocks are 15 s apart.
"""

import runpy
import socket
import sys
from typing import Any

from torch import distributed
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, static_tcp_rendezvous

ADDRESS = "127.0.0.1"


class LoopbackStore(distributed.TCPStore):
    """A TCPStore whose server, where it is one, listens on the loopback address."""

    def __init__(
        self, host_name: str, port: int, world_size: int | None = None, is_master: bool = False, **more: Any
    ) -> None:
        if is_master:
            listener = socket.create_server((ADDRESS, port), backlog=1024)
            host_name, port = listener.getsockname()
            more["master_listen_fd"] = listener.detach()  # the store closes it
        super().__init__(host_name, port, world_size, is_master, **more)


class ClientStore(distributed.TCPStore):
    """A TCPStore that serves nobody, whatever its rank."""

    def __init__(self, host: str, port: int, nodes: int, _is_master: bool, *more: Any, **names: Any) -> None:
        super().__init__(host, port, nodes, False, *more, **names)


if __name__ == "__main__":
    distributed.TCPStore = LoopbackStore  # type: ignore[assignment,misc]
    c10d_rendezvous_backend.TCPStore = LoopbackStore  # type: ignore[assignment,misc]
    static_tcp_rendezvous.TCPStore = ClientStore  # type: ignore[assignment,misc]
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
