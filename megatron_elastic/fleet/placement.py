"""Placement: which devices each job holds. No device is held twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

NODE = 8
"""Devices of a node."""


class Placement(Protocol):
    """Devices 0 to ``total - 1``."""

    moved: int
    """Devices of other jobs that had to change so that somebody fits."""

    def resize(self, job: int, devices: int) -> None:
        """Let ``job`` hold so many, 0 to let it go. Raises ValueError if so many are not free."""

    def part(self, job: int, devices: int, other: int) -> None:
        """Let ``job`` hold so many, and ``other`` the rest of what it held."""

    def of(self, job: int) -> Sequence[int]:
        """What ``job`` holds."""

    def holders(self, node: int) -> list[int]:
        """Jobs with devices on ``node``."""


class Nodes:
    """Whole nodes for who asks for whole nodes, and the fullest node that has room for who asks for less."""

    def __init__(self, total: int) -> None:
        self.moved = 0
        self._free = [list(range(first, min(first + NODE, total)))[::-1] for first in range(0, total, NODE)]
        self._held: dict[int, list[int]] = {}
        self._count = total

    def resize(self, job: int, devices: int) -> None:
        """Extra devices are added, or the last ones taken away."""
        held = self._held.setdefault(job, [])
        if devices - len(held) > self._count:
            raise ValueError(f"job {job} cannot get {devices - len(held)} devices: {self._count} are free")
        while len(held) > devices:
            device = held.pop()
            self._free[device // NODE].append(device)
            self._count += 1
        self._count -= devices - len(held)
        while len(held) < devices:
            need = devices - len(held)
            node = self._node_for(need)
            for _ in range(min(need, len(node))):
                held.append(node.pop())
        if not held:
            del self._held[job]

    def _node_for(self, need: int) -> list[int]:
        whole = [node for node in self._free if len(node) >= min(need, NODE)]
        return min(whole, key=len) if whole else max(self._free, key=len)

    def part(self, job: int, devices: int, other: int) -> None:
        """The last devices leave."""
        held = self._held[job]
        self._held[other] = held[devices:]
        del held[devices:]

    def of(self, job: int) -> Sequence[int]:
        """What ``job`` holds."""
        return self._held.get(job, ())

    def holders(self, node: int) -> list[int]:
        """Jobs with devices on ``node``, by index."""
        return sorted(job for job, held in self._held.items() if any(device // NODE == node for device in held))


class Buddies:
    """Blocks of powers of two, aligned to their size; where free ones are too small, jobs migrate.

    A number that is not a power of two is held as several blocks.
    """

    def __init__(self, total: int) -> None:
        self.moved = 0
        self._total = total
        self._held: dict[int, list[tuple[int, int]]] = {}
        """Blocks of each job: (first device, size)."""
        self._free = _blocks(0, total)

    def resize(self, job: int, devices: int) -> None:
        """The job gets other blocks where its own do not suffice."""
        before = self._held.pop(job, [])
        self._free = _merged([*self._free, *before])
        if devices == 0:
            return
        if devices > sum(size for _, size in self._free):
            raise ValueError(f"job {job} cannot get {devices} devices: {sum(size for _, size in self._free)} are free")
        found = self._take(_powers(devices))
        if found is None:
            self._pack(job, devices)
        else:
            self._held[job] = found

    def part(self, job: int, devices: int, other: int) -> None:
        """Blocks are halved where that is needed."""
        free, self._free = self._free, self._held.pop(job)
        self._held[job] = [part for size in _powers(devices) for part in self._take([size]) or self._scattered(size)]
        self._held[other], self._free = self._free, free

    def _take(self, sizes: Sequence[int]) -> list[tuple[int, int]] | None:
        free = list(self._free)
        taken: list[tuple[int, int]] = []
        for size in sizes:
            best = min(
                (block for block in free if block[1] >= size), key=lambda block: (block[1], block[0]), default=None
            )
            if best is None:
                return None
            free.remove(best)
            first, room = best
            while room > size:
                room //= 2
                free.append((first + room, room))
            taken.append((first, size))
        self._free = free
        return taken

    def _pack(self, job: int, devices: int) -> None:
        """All jobs anew, the largest blocks first; who gets other devices than before has moved."""
        sizes = [(size, index) for index, blocks in self._held.items() for _, size in blocks]
        sizes += [(size, job) for size in _powers(devices)]
        before = {index: set(self.of(index)) for index in self._held}
        self._free, self._held = _blocks(0, self._total), {}
        for size, index in sorted(sizes, key=lambda found: (-found[0], found[1])):
            parts = self._take([size])
            if parts is None:  # a block larger than any that the cluster's size has left
                parts = self._scattered(size)
            self._held.setdefault(index, []).extend(parts)
        self.moved += sum(len(set(self.of(index)) - held) for index, held in before.items())

    def _scattered(self, size: int) -> list[tuple[int, int]]:
        parts: list[tuple[int, int]] = []
        while size:
            largest = 1 << (max(block for _, block in self._free).bit_length() - 1)
            part = self._take([min(largest, 1 << (size.bit_length() - 1))])
            assert part is not None
            parts += part
            size -= part[0][1]
        return parts

    def of(self, job: int) -> Sequence[int]:
        """What ``job`` holds."""
        return [device for first, size in self._held.get(job, ()) for device in range(first, first + size)]

    def holders(self, node: int) -> list[int]:
        """Jobs with devices on ``node``, by index."""
        return sorted(job for job in self._held if any(device // NODE == node for device in self.of(job)))


def _powers(number: int) -> list[int]:
    return [1 << bit for bit in range(number.bit_length() - 1, -1, -1) if number >> bit & 1]


def _blocks(first: int, total: int) -> list[tuple[int, int]]:
    blocks = []
    for size in _powers(total):
        blocks.append((first, size))
        first += size
    return blocks


def _merged(blocks: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Buddies that are both free become one block."""
    free = set(blocks)
    for first, size in sorted(free, key=lambda block: block[1]):
        block = (first, size)
        while block in free:
            buddy = (block[0] ^ block[1], block[1])
            if buddy not in free:
                break
            free -= {block, buddy}
            block = (min(block[0], buddy[0]), 2 * block[1])
            free.add(block)
    return sorted(free)
