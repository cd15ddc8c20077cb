"""Arena: shared memory through which ranks of one host pass the bytes of large messages.

A message travels as a frame through the receiver's mailbox (``comm.host.mailbox``); when it is large, what travels
describes where in the sender's arena its bytes are. One block can have several readers. Only the sender allocates, and
each reader only sets a byte of its own when it has read, so nobody who dies can leave another stuck.

The memory is a memfd that peers open through ``/proc``: it has no name that could be left behind, and what a rank sent
before it died can still be read.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from megatron_elastic.comm.host import life

LINE = 64
"""Bytes of a cache line, to which blocks are aligned."""
_COOKIE = 16
_HUNGRY = _COOKIE
"""Where the owner says that it waits for room, so that readers tell it when they release a block."""
_LIFE = LINE
_BLOCKS = _LIFE + life.SIZE

copy = ctypes.CDLL(None).memcpy
"""``copy(to, source, bytes)`` between addresses. It leaves the interpreter to other threads meanwhile."""
copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
copy.restype = None


class ArenaAddress(msgspec.Struct, frozen=True):
    """Where an arena is: seen from ``place``, under /proc/PID/fd/FD, beginning with the cookie."""

    place: str
    pid: int
    fd: int
    size: int
    cookie: bytes


@dataclass(slots=True)
class _Block:
    start: int
    end: int
    readers: tuple[int, ...]


class Arena:
    """This rank's outgoing blocks.

    Blocks for background traffic have a quarter of the memory for themselves: they may lie there for long, and must
    not take the room of a step's messages.

    Args:
        size: bytes.
    """

    def __init__(self, size: int) -> None:
        self._fd = os.memfd_create("megatron-elastic", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, size)
        self._memory = mmap.mmap(self._fd, size)
        self._base = ctypes.c_char.from_buffer(self._memory)
        cookie = secrets.token_bytes(_COOKIE)
        self._memory[:_COOKIE] = cookie
        border = size // 4 * 3
        self._regions = (_Region(self._memory, _BLOCKS, border), _Region(self._memory, border, size))
        self._life = life.Life(self._memory, _LIFE)
        self.address = ArenaAddress(here(), os.getpid(), self._fd, size, cookie)

    @staticmethod
    def header(readers: int) -> int:
        """Bytes between a block's start, where each reader has a byte to release it, and its data."""
        return -(-readers // LINE) * LINE

    def put(self, source: int, length: int, readers: tuple[int, ...], background: bool) -> int | None:
        """Copy ``length`` bytes from an address into a new block for some ranks. Its start; None: there is no room."""
        start = self._regions[background].allocate(length, readers)
        if start is not None:
            copy(ctypes.addressof(self._base) + start + self.header(len(readers)), source, length)
        return start

    @property
    def hungry(self) -> bool:
        """Whether readers shall tell this rank when they release a block."""
        return self._memory[_HUNGRY] != 0

    @hungry.setter
    def hungry(self, value: bool) -> None:
        self._memory[_HUNGRY] = value

    def holders(self) -> set[int]:
        """Ranks that have not released all their blocks."""
        return {reader for region in self._regions for reader in region.holders()}

    def forget(self, peer: int) -> None:
        """Release every block for a peer that is dead."""
        for region in self._regions:
            region.forget(peer)

    def close(self) -> None:
        """Unmap; peers that still have it open keep the memory."""
        del self._base, self._regions
        if self._life.release():
            self._memory.close()
        os.close(self._fd)


class _Region:
    """Part of an arena: blocks allocated in a circle and freed in order."""

    def __init__(self, memory: mmap.mmap, low: int, high: int) -> None:
        self._memory = memory
        self._low, self._high = low, high
        self._blocks: deque[_Block] = deque()

    def allocate(self, length: int, readers: tuple[int, ...]) -> int | None:
        count = len(readers)
        need = Arena.header(count) + -(-length // LINE) * LINE
        start = self._find(need)
        if start is not None:
            self._memory[start : start + count] = bytes(count)
            self._blocks.append(_Block(start, start + need, readers))
        return start

    def holders(self) -> set[int]:
        return {
            reader for block in self._blocks for i, reader in enumerate(block.readers)
            if not self._memory[block.start + i]
        }  # fmt: skip

    def forget(self, peer: int) -> None:
        for block in self._blocks:
            if peer in block.readers:
                self._memory[block.start + block.readers.index(peer)] = 1

    def _find(self, need: int) -> int | None:
        blocks = self._blocks
        while blocks and self._released(blocks[0]):
            blocks.popleft()
        if not blocks:
            # Begin at the bottom again, where the memory is still in the cache.
            return self._low if self._low + need <= self._high else None
        head, tail = blocks[0].start, blocks[-1].end
        if tail > head:
            if tail + need <= self._high:
                return tail
            return self._low if self._low + need <= head else None
        return tail if tail + need <= head else None

    def _released(self, block: _Block) -> bool:
        return 0 not in self._memory[block.start : block.start + len(block.readers)]


class ArenaView:
    """A peer's arena, seen by a reader. Unmapped when nothing refers to it any more."""

    def __init__(self, memory: mmap.mmap, nudge: Callable[[], None]) -> None:
        self.memory = memory
        self.size = len(memory)
        self._base = ctypes.c_char.from_buffer(memory)
        self.start = ctypes.addressof(self._base)
        """Address of the first byte."""
        self.life = life.LifeView(memory, _LIFE)
        self._nudge = nudge

    @classmethod
    def open(cls, address: ArenaAddress, nudge: Callable[[], None]) -> ArenaView | None:
        """Map a peer's arena; None if it is on another machine or cannot be reached. ``nudge`` wakes its owner."""
        if address.place != here():
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
        return cls(memory, nudge)

    def tensor(self, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Data where it lies, as a flat tensor."""
        return torch.frombuffer(self.memory, dtype=dtype, count=count, offset=start)

    def release(self, byte: int) -> None:
        """Let the owner use a block again; ``byte`` is this reader's in it."""
        # Who turns hungry asks every holder after it has set its mark, and is answered (``Outbox``). So a mark that is
        # not seen here yet costs no wake-up: the answer follows this store.
        self.memory[byte] = 1
        if self.memory[_HUNGRY]:
            self._nudge()


@functools.cache
def here() -> str:
    """Names this boot of this machine, and the namespace in which its process numbers mean something."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def address_of(tensor: torch.Tensor) -> int:
    """Address of a contiguous tensor's memory. Raises ValueError for one that is not, or lies in no host's memory."""
    if not tensor.is_cpu:
        raise ValueError(f"a tensor on {tensor.device} has no address here: send or receive a copy in host memory")
    if not tensor.is_contiguous():
        raise ValueError(f"strides {tensor.stride()} are not contiguous: send or receive a contiguous copy")
    return tensor.data_ptr()


