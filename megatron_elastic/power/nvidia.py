"""Clocks of NVIDIA GPUs, by NVML: locked graphics clocks, and power limits. Needs ``nvidia-ml-py``, and to be root."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

_HELD_DOWN = 0x04 | 0x08 | 0x20 | 0x40 | 0x80
"""Of NVML's reasons: power cap by software, slowdown by hardware, heat seen by software or hardware, power brake."""
_UNLOCKED = "unlocked"


class Nvidia:
    """A device is the index of a GPU, or its UUID.

    Args:
        nvml: the module ``pynvml``; imported when it is needed.
    """

    name = "nvidia"

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml

    def steps(self, device: str) -> tuple[float, ...]:
        """The supported graphics clocks at the highest memory clock; 1 is the one that applications get by default."""
        nvml, handle = self._handle(device)
        memory = max(_asked(nvml, nvml.nvmlDeviceGetSupportedMemoryClocks, handle))
        base = self._base(nvml, handle)
        return tuple(mhz / base for mhz in sorted(
            _asked(nvml, nvml.nvmlDeviceGetSupportedGraphicsClocks, handle, memory)))  # fmt: skip

    def read(self, device: str) -> str:
        """Its power limit. NVML does not say whether clocks are locked: what is restored is that they are not."""
        nvml, handle = self._handle(device)
        try:
            return f"{_UNLOCKED}, {_asked(nvml, nvml.nvmlDeviceGetPowerManagementLimit, handle)} mW"
        except OSError:  # not all have one
            return _UNLOCKED

    def write(self, device: str, clock: float) -> None:
        """Lock it."""
        nvml, handle = self._handle(device)
        mhz = round(self._base(nvml, handle) * clock)
        _asked(nvml, nvml.nvmlDeviceSetGpuLockedClocks, handle, mhz, mhz)

    def limit(self, device: str, watts: float) -> None:
        """Within what it can be limited to."""
        nvml, handle = self._handle(device)
        low, high = _asked(nvml, nvml.nvmlDeviceGetPowerManagementLimitConstraints, handle)
        _asked(nvml, nvml.nvmlDeviceSetPowerManagementLimit, handle, min(max(round(watts * 1e3), low), high))

    def actual(self, device: str) -> float | None:
        """Its clock now, if it says that heat or power holds it down: one that is idle is slow for no such reason."""
        nvml, handle = self._handle(device)
        if not _asked(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) & _HELD_DOWN:
            return None
        return float(_asked(nvml, nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_GRAPHICS)) / self._base(
            nvml, handle)

    def restore(self, device: str, before: str) -> None:
        """Unlock it, with the power limit that it had."""
        nvml, handle = self._handle(device)
        _asked(nvml, nvml.nvmlDeviceResetGpuLockedClocks, handle)
        limit = before.removeprefix(_UNLOCKED).removeprefix(", ").removesuffix(" mW")
        if limit and _asked(nvml, nvml.nvmlDeviceGetPowerManagementLimit, handle) != int(limit):
            _asked(nvml, nvml.nvmlDeviceSetPowerManagementLimit, handle, int(limit))

    def _handle(self, device: str) -> tuple[Any, Any]:
        if self._nvml is None:
            try:
                self._nvml = importlib.import_module("pynvml")
            except ImportError:
                raise OSError("clocks of NVIDIA GPUs need the package nvidia-ml-py: pip install nvidia-ml-py") from None
        _asked(self._nvml, self._nvml.nvmlInit)
        if device.isdecimal():
            return self._nvml, _asked(self._nvml, self._nvml.nvmlDeviceGetHandleByIndex, int(device))
        return self._nvml, _asked(self._nvml, self._nvml.nvmlDeviceGetHandleByUUID, device)

    def _base(self, nvml: Any, handle: Any) -> int:
        return int(_asked(nvml, nvml.nvmlDeviceGetDefaultApplicationsClock, handle, nvml.NVML_CLOCK_GRAPHICS))


def _asked(nvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """What NVML answers; its errors as Python's."""
    try:
        return function(*arguments)
    except nvml.NVMLError as error:
        if "permission" in str(error).lower():
            raise PermissionError(f"NVML, {function.__name__}: {error}; root may: sudo -E megatron-elastic run ...") \
                from None
        raise OSError(f"NVML, {function.__name__}: {error}") from None
