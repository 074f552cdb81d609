"""Where the processes of a world meet: network interfaces, addresses, and a store that a launcher serves."""

from __future__ import annotations

import socket
from typing import Any


def loopback_interfaces() -> dict[str, str]:
    """The variables by which gloo and NCCL listen where only this machine reaches them."""
    return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), _interface_of("127.0.0.1"))


def gloo_interface(local: str, alone: bool) -> dict[str, str]:
    """The variable by which gloo listens at `local`, the address of a connection to the first node.

    By itself it listens at the address of the host name, which may be a loopback. `alone`: all processes are
    on this machine.
    """
    if is_loopback(local) and not alone:
        return {}
    return {"GLOO_SOCKET_IFNAME": _interface_of(local)}


def serve_store(alone: bool) -> Any:
    """A TCPStore that this process serves at a free port. `alone`: no other machine is to reach it."""
    from torch.distributed import TCPStore

    where: dict[str, Any] = {"port": 0}  # it listens on every address
    if alone:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        where = {"port": listener.getsockname()[1], "master_listen_fd": listener.detach()}
    return TCPStore("localhost", **where, is_master=True, wait_for_workers=False)


def local_address(host: str, port: int) -> str:
    """The numeric local address of a connection to host:port; empty where nothing answers."""
    try:
        with socket.create_connection((host, port), timeout=5) as connection:
            return str(connection.getsockname()[0])
    except OSError:
        return ""


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _interface_of(address: str) -> str:
    import psutil

    found = psutil.net_if_addrs().items()
    return next((name for name, own in found if any(a.address == address for a in own)), "lo")
