"""Runs a launcher's module for the processes of one machine: it listens on the loopback address alone.

    python launch/loopback.py accelerate.commands.launch ARGUMENTS

torch's TCPStore listens on every address of the machine and asks nobody who they are (torch 2.13), and the
agents of torchrun unpickle what they find in it: whoever reaches its port can execute code.
"""

import runpy
import socket
import sys
from typing import Any

from torch import distributed
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

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


if __name__ == "__main__":
    distributed.TCPStore = LoopbackStore  # type: ignore[assignment,misc]
    c10d_rendezvous_backend.TCPStore = LoopbackStore  # type: ignore[assignment,misc]
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
