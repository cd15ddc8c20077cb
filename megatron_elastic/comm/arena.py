"""Arena: shared memory through which ranks of one host pass the bytes of large messages.

UCX has no shared-memory transport that survives the death of a peer: its queues are shared by all senders, and one
that dies while it writes an entry blocks the queue for ever. So a message still travels over the link, where matching,
wake-ups and the detection of dead peers are, but what travels is a descriptor; the bytes are in the sender's arena.
Only the sender allocates and only the receiver releases, by setting one byte, so neither can leave the other stuck.

The memory is a memfd that peers open through ``/proc``: it has no name that could be left behind.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

_HEADER = 64
"""Bytes before each block, the first of which says that it is released; keeps blocks on cache lines."""
_COOKIE = 16


class ArenaAddress(msgspec.Struct, frozen=True):
    """Where an arena is: on the machine of this boot, under /proc/PID/fd/FD, beginning with the cookie."""

    boot: str
    pid: int
    fd: int
    size: int
    cookie: bytes


@dataclass(slots=True)
class _Block:
    start: int
    end: int
    peer: int


class Arena:
    """This rank's outgoing blocks, allocated in a circle and freed in order.

    Args:
        size: bytes; a message that finds no room travels over its link instead.
    """

    def __init__(self, size: int) -> None:
        self._fd = os.memfd_create("megatron-elastic", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, size)
        self._memory = mmap.mmap(self._fd, size)
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        cookie = secrets.token_bytes(_COOKIE)
        self._memory[:_COOKIE] = cookie
        self._blocks: deque[_Block] = deque()
        self._size = size
        self.address = ArenaAddress(_boot(), os.getpid(), self._fd, size, cookie)

    def put(self, data: torch.Tensor, peer: int) -> int | None:
        """Copy flat bytes (uint8) into a new block for ``peer``. Returns its offset, or None if there is no room."""
        start = self._find(_HEADER + data.numel())
        if start is None:
            return None
        end = start + _HEADER + -(-data.numel() // _HEADER) * _HEADER
        self._memory[start] = 0
        self._bytes[start + _HEADER : start + _HEADER + data.numel()].copy_(data)
        self._blocks.append(_Block(start, end, peer))
        return start

    def forget(self, peer: int) -> None:
        """Release every block for a peer that is dead."""
        for block in self._blocks:
            if block.peer == peer:
                self._memory[block.start] = 1

    def close(self) -> None:
        """Unmap; peers that still have it open keep the memory."""
        del self._bytes
        self._memory.close()
        os.close(self._fd)

    def _find(self, need: int) -> int | None:
        blocks = self._blocks
        while blocks and self._memory[blocks[0].start]:
            blocks.popleft()
        if not blocks:
            # Begin at the bottom again, where the memory is still in the cache.
            return _HEADER if _HEADER + need <= self._size else None
        head, tail = blocks[0].start, blocks[-1].end
        if tail > head:
            if tail + need <= self._size:
                return tail
            return _HEADER if _HEADER + need <= head else None
        return tail if tail + need <= head else None


class ArenaView:
    """A peer's arena, seen by a receiver. Unmapped when nothing refers to it any more."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)

    @classmethod
    def open(cls, address: ArenaAddress) -> ArenaView | None:
        """Map a peer's arena; None if it is on another machine or cannot be reached."""
        if address.boot != _boot():
            return None
        try:
            fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            if os.fstat(fd).st_size != address.size:
                return None
            memory = mmap.mmap(fd, address.size)
        finally:
            os.close(fd)
        # Another container may run another process under this pid.
        if memory[:_COOKIE] != address.cookie:
            memory.close()
            return None
        return cls(memory)

    def bytes(self, start: int, length: int) -> torch.Tensor:
        """A block's bytes where they lie, flat uint8; to be released after use."""
        return self._bytes[start + _HEADER : start + _HEADER + length]

    def take(self, start: int, into: torch.Tensor) -> None:
        """Copy a block's bytes out and release it. ``into`` is flat uint8 of the message's size."""
        into.copy_(self.bytes(start, into.numel()))
        self.release(start)

    def release(self, start: int) -> None:
        """Let the sender use the block again."""
        self._memory[start] = 1


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
