"""LinkStore: a torch store whose keys the members of a group tell each other over their links.

A device backend needs a store to find its peers. One that a single process serves dies with it, and its waits end only
by their timeout; this one is at every member, and its waits end with the fault that makes them pointless.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from megatron_elastic.comm.tag import Channel, at_group
from megatron_elastic.comm.transport import Transport

_SIZE, _ENTRY = 1, 2
"""Second halves of the coordinates under which entries travel; 0 belongs to ``DeviceGroup``."""


class LinkStore(dist.Store):
    """What setting up a communicator needs: ``set``, ``get``, ``wait``, ``check``. A key is set once.

    Args:
        transport: carries the entries.
        ident: the group's number.
        ranks: its members (global ids), this rank among them.
    """

    def __init__(self, transport: Transport, ident: int, ranks: Sequence[int]) -> None:
        super().__init__()
        self._transport = transport
        self._size, self._entry = at_group(ident, _SIZE), at_group(ident, _ENTRY)
        self._others = [rank for rank in ranks if rank != transport.rank]
        self._entries: dict[str, bytes] = {}
        self._lock = threading.RLock()  # backends also look into the store from threads of their own

    def set(self, key: str, value: str | bytes) -> None:
        """Tell every member. Raises Interrupted when one of them is lost meanwhile."""
        value = value.encode() if isinstance(value, str) else bytes(value)
        self._entries[key] = value
        entry = torch.frombuffer(bytearray(msgspec.msgpack.encode((key, value))), dtype=torch.uint8)
        size, transport = torch.tensor([entry.numel()]), self._transport
        sends = []
        for rank in self._others:
            sends += [transport.send(rank, Channel.RENDEZVOUS, self._size, size)]
            sends += [transport.send(rank, Channel.RENDEZVOUS, self._entry, entry)]
        transport.wait(*sends)

    def get(self, key: str) -> bytes:
        """The value, as soon as somebody has set it. Raises as ``wait`` does."""
        self.wait([key])
        return self._entries[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Block until all keys are set. Raises Interrupted on a fault, TimeoutError after the transport's limit."""
        with self._lock:
            while any(key not in self._entries for key in keys):
                self._receive()

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are known here already."""
        return all(key in self._entries for key in keys)

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing: waits have the transport's limit."""

    def _receive(self) -> None:
        """Take in the next entry that somebody sends."""
        transport, size = self._transport, torch.zeros(1, dtype=torch.int64)
        sender = transport.first_of(self._others, Channel.RENDEZVOUS, self._size)
        transport.wait(transport.recv(sender, Channel.RENDEZVOUS, self._size, size))
        entry = torch.empty(int(size.item()), dtype=torch.uint8)
        transport.wait(transport.recv(sender, Channel.RENDEZVOUS, self._entry, entry))
        key, value = msgspec.msgpack.decode(entry.numpy().tobytes(), type=tuple[str, bytes])
        self._entries[key] = value
