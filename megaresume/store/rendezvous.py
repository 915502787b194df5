"""Where the ranks of a run find their control plane: rank 0 hosts its store, and tells the others the address.

That is one broadcast of 1 KiB over the default process group, the only message that goes over one of the training's.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from datetime import timedelta
from typing import Any

from megaresume.errors import MegaresumeError
from megaresume.store.control import DEFAULT_TIMEOUT_S, ControlPlane, Store, first_line

_CONNECT_TIMEOUT_S = 60.0
_ADDRESS_BYTES = 1024


def open_control_plane(*, timeout_s: float = DEFAULT_TIMEOUT_S, label: str = "") -> ControlPlane:
    """The control plane of this run. Collective over the default process group, where there is one.

    Rank 0 hosts a TCPStore on a free port, reached at `MASTER_ADDR` or, where that is not set, at its host's name. A
    process alone needs no network. Raises `MegaresumeError` where rank 0 cannot host it or another rank cannot reach
    it.
    """
    dist = _torch_distributed()

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return ControlPlane(
            dist.HashStore(), 0, 1, timeout_s=timeout_s, label=label, connect=lambda _: dist.HashStore()
        )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store, address = _host_store(timeout_s) if rank == 0 else (None, {})
    address = _broadcast_address(address)
    if "error" in address:
        raise MegaresumeError(f"open the control plane: rank 0 cannot host it: {address['error']}")
    control = ControlPlane(
        store or _connect(address, timeout_s),
        rank,
        world_size,
        timeout_s=timeout_s,
        label=label,
        connect=lambda name: dist.PrefixStore(name, _connect(address, timeout_s)),
    )
    control.together("open the control plane", lambda: None)
    return control


def _host_store(timeout_s: float) -> tuple[Store | None, dict[str, str]]:
    """The store and the address to tell the others; what went wrong stands in the address, for they must hear of it."""
    host, token = os.environ.get("MASTER_ADDR") or socket.gethostname(), secrets.token_hex(8)
    try:
        store = _tcp_store(host, 0, is_master=True, timeout_s=timeout_s)
        store.set("token", token)
    except Exception as error:
        return None, {"error": f"at {host}: {first_line(error)[:120]}; set MASTER_ADDR to an address of rank 0's host"}
    return store, {"host": host, "port": str(store.port), "token": token}


def _connect(address: dict[str, str], timeout_s: float) -> Store:
    where = f"{address['host']}:{address['port']}"
    try:
        store: Store = _tcp_store(address["host"], int(address["port"]), is_master=False, timeout_s=timeout_s)
        token = store.get("token").decode("utf-8")
    except Exception as error:
        raise MegaresumeError(
            f"open the control plane: {socket.gethostname()} cannot reach rank 0 at {where}: {first_line(error)}. "
            "Look for a firewall, or set MASTER_ADDR to an address of rank 0's host that all hosts reach."
        ) from error
    if token != address["token"]:
        raise MegaresumeError(
            f"open the control plane: what answers at {where} is not rank 0 of this run. "
            "Set MASTER_ADDR to an address that means rank 0's host on every host."
        )
    return store


def _torch_distributed() -> Any:
    """Imported only when a control plane is opened: all else of the store works without torch.

    Untyped, for torch does not export its stores to type checkers.
    """
    import torch.distributed

    return torch.distributed


def _tcp_store(host: str, port: int, *, is_master: bool, timeout_s: float) -> Any:
    dist = _torch_distributed()
    connect_timeout = timedelta(seconds=min(timeout_s, _CONNECT_TIMEOUT_S))
    store = dist.TCPStore(host, port, is_master=is_master, wait_for_workers=False, timeout=connect_timeout)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _broadcast_address(address: dict[str, str]) -> dict[str, str]:
    """Rank 0's `address`, on every rank: one broadcast of a byte tensor, for an object collective would pickle."""
    import torch

    dist = _torch_distributed()
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    text = json.dumps(address).encode("utf-8") if address else b""
    assert len(text) <= _ADDRESS_BYTES, "an address longer than any host name"
    buffer = torch.tensor(list(text.ljust(_ADDRESS_BYTES)), dtype=torch.uint8, device=device)
    dist.broadcast(buffer, src=0)
    told: dict[str, str] = json.loads(bytes(buffer.tolist()))
    return told
