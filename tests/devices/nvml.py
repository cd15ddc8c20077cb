"""A stand-in for ``pynvml``: as much of it as is used, with its names. It keeps state, and refuses as the real one
does: who is not root, what is out of range, and a device that has fallen off the bus.
"""

from __future__ import annotations

from dataclasses import dataclass

CLOCKS = (1980, 1500, 750)
MEMORY = (2619, 1593)
LIMITS = (200_000, 700_000)
"""Milliwatts."""


@dataclass
class Gpu:
    """What a device is like; ``limit`` is what it boots with."""

    locked: tuple[int, int] | None = None
    limit: int = 700_000
    reasons: int = 0
    now: int = 300
    lost: bool = False
    has_limit: bool = True


class Nvml:
    """The module. ``root``: whether who calls is it."""

    NVML_CLOCK_GRAPHICS = 0

    class NVMLError(Exception):
        """All have one type here; the text tells which it is, as it does there."""

    def __init__(self, count: int = 1, root: bool = True) -> None:
        self.gpus = [Gpu() for _ in range(count)]
        self.root = root
        self._ready = False

    def nvmlInit(self) -> None:
        self._ready = True

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        if not self._ready:
            raise self.NVMLError("Uninitialized")
        if not 0 <= index < len(self.gpus):
            raise self.NVMLError("Invalid Argument")
        return self._there(self.gpus[index])

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:
        if not self._ready:
            raise self.NVMLError("Uninitialized")
        known = {f"GPU-{index}": gpu for index, gpu in enumerate(self.gpus)}
        if uuid not in known:
            raise self.NVMLError("Not Found")
        return self._there(known[uuid])

    def nvmlDeviceGetSupportedMemoryClocks(self, handle: Gpu) -> list[int]:
        self._there(handle)
        return list(MEMORY)

    def nvmlDeviceGetSupportedGraphicsClocks(self, handle: Gpu, memoryClockMHz: int) -> list[int]:
        self._there(handle)
        if memoryClockMHz not in MEMORY:
            raise self.NVMLError("Not Found")
        return list(CLOCKS) if memoryClockMHz == max(MEMORY) else list(CLOCKS[1:])

    def nvmlDeviceGetDefaultApplicationsClock(self, handle: Gpu, type: int) -> int:
        self._there(handle)
        return 1500

    def nvmlDeviceSetGpuLockedClocks(self, handle: Gpu, minGpuClockMHz: int, maxGpuClockMHz: int) -> None:
        self._may(handle)
        if not min(CLOCKS) <= minGpuClockMHz <= maxGpuClockMHz <= max(CLOCKS):
            raise self.NVMLError("Invalid Argument")
        handle.locked = minGpuClockMHz, maxGpuClockMHz

    def nvmlDeviceResetGpuLockedClocks(self, handle: Gpu) -> None:
        self._may(handle)
        handle.locked = None

    def nvmlDeviceGetPowerManagementLimit(self, handle: Gpu) -> int:
        self._limited(handle)
        return handle.limit

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: Gpu) -> list[int]:
        self._limited(handle)
        return list(LIMITS)

    def nvmlDeviceSetPowerManagementLimit(self, handle: Gpu, limit: int) -> None:
        self._limited(handle)
        self._may(handle)
        if not LIMITS[0] <= limit <= LIMITS[1]:
            raise self.NVMLError("Invalid Argument")
        handle.limit = limit

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Gpu) -> int:
        return self._there(handle).reasons

    def nvmlDeviceGetClockInfo(self, handle: Gpu, type: int) -> int:
        return self._there(handle).now

    def _there(self, gpu: Gpu) -> Gpu:
        if gpu.lost:
            raise self.NVMLError("GPU is lost")
        return gpu

    def _limited(self, gpu: Gpu) -> None:
        if not self._there(gpu).has_limit:
            raise self.NVMLError("Not Supported")

    def _may(self, gpu: Gpu) -> None:
        self._there(gpu)
        if not self.root:
            raise self.NVMLError("Insufficient Permissions")
