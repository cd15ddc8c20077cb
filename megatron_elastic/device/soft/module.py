"""``torch.soft``: what programs call on a device's module, as on ``torch.cuda``, and what tests ask of it."""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

_soft = torch.ops.soft

Device = torch.device | str | int | None


class Counters(NamedTuple):
    """What a device has done since the last reset."""

    launches: int
    """Kernels, copies among them."""
    synchronisations: int
    """Times that the host has waited for the device."""
    to_device: int
    """Bytes copied from the host to the device."""
    to_host: int
    """Bytes copied from the device to the host."""
    on_device: int
    """Bytes copied within the device, or to another."""


def _index(device: Device) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return current_device() if index is None else index


# ---- as torch.cuda has them ---------------------------------------------------------------------


def is_available() -> bool:
    """Whether there is a device: always, but in a process forked from one that had used it."""
    return device_count() > 0


def is_initialized() -> bool:
    """Whether this process has used a device, after which it must not fork."""
    return _soft.initialised()


def init() -> None:
    """Nothing: a device begins with its first use."""


def _is_in_bad_fork() -> bool:
    return _soft.in_bad_fork()


def device_count() -> int:
    """Number of devices of this process."""
    return _soft.device_count()


def current_device() -> int:
    """Index of the calling thread's device."""
    return _soft.current_device()


def set_device(device: Device) -> None:
    """Make a device the calling thread's."""
    _soft.set_device(_index(device))


@contextmanager
def device(device: Device) -> Iterator[None]:
    """The calling thread's device is this one inside."""
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def get_device_name(device: Device = None) -> str:
    """Name of a device."""
    return f"soft:{_index(device)}"


def get_device_capability(device: Device = None) -> tuple[int, int]:
    """Older than any GPU."""
    return (0, 0)


def synchronize(device: Device = None) -> None:
    """Wait for everything on a device. Raises torch.AcceleratorError if it has failed."""
    _soft.synchronize(_index(device))


def Stream(device: Device = None, priority: int = 0) -> torch.Stream:
    """A new stream."""
    return torch.Stream(torch.device("soft", _index(device)), priority=priority)


def Event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    """A new event. Raises RuntimeError if other processes are to see it."""
    if interprocess:
        raise RuntimeError("soft: events cannot be shared with other processes")
    return torch.Event("soft", enable_timing=enable_timing, blocking=blocking)


def current_stream(device: Device = None) -> torch.Stream:
    """The calling thread's stream on a device."""
    return torch.accelerator.current_stream(_index(device))


def set_stream(stream: torch.Stream) -> None:
    """Make a stream, and its device, the calling thread's."""
    torch.accelerator.set_stream(stream)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """The calling thread's stream is this one inside."""
    if stream is None:
        yield
        return
    with stream:
        yield


def memory_allocated(device: Device = None) -> int:
    """Bytes in tensors, each rounded up to 512."""
    return _soft.memory(_index(device))[0]


def memory_reserved(device: Device = None) -> int:
    """Bytes that streams have taken, those in use included."""
    return _soft.memory(_index(device))[1]


def max_memory_allocated(device: Device = None) -> int:
    """The most bytes in tensors since the last reset."""
    return _soft.memory(_index(device))[2]


def max_memory_reserved(device: Device = None) -> int:
    """The most bytes taken by streams since the last reset."""
    return _soft.memory(_index(device))[3]


def reset_peak_memory_stats(device: Device = None) -> None:
    """Begin the two peaks anew."""
    _soft.reset_peaks(_index(device))


def memory_stats(device: Device = None) -> dict[str, int]:
    """The four figures under torch.cuda's names."""
    allocated, reserved, peak_allocated, peak_reserved, _ = _soft.memory(_index(device))
    return {
        "allocated_bytes.all.current": allocated,
        "allocated_bytes.all.peak": peak_allocated,
        "reserved_bytes.all.current": reserved,
        "reserved_bytes.all.peak": peak_reserved,
    }


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Bytes that are free, and all."""
    _, reserved, _, _, limit = _soft.memory(_index(device))
    return limit - reserved, limit


def empty_cache() -> None:
    """Give back what no tensor uses, on all devices. Waits for them."""
    for index in range(device_count() if is_initialized() else 0):
        _soft.empty_cache(index)


def default_generator(device: Device = None) -> torch.Generator:
    """The generator of what names none."""
    return _soft.default_generator(_index(device))


def manual_seed(seed: int) -> None:
    """Seed the current device's default generator."""
    default_generator().manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the default generators of all devices."""
    for index in range(device_count()):
        default_generator(index).manual_seed(seed)


def initial_seed() -> int:
    """The seed of the current device's default generator."""
    return default_generator().initial_seed()


def get_rng_state(device: Device = "soft") -> torch.Tensor:
    """Seed and offset of the default generator: 16 bytes on the host, without waiting for the device."""
    return default_generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Device = "soft") -> None:
    """Set the default generator to a state that ``get_rng_state`` has told in this process."""
    default_generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """States of all devices' default generators."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the states of all devices' default generators."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Types that autocast may choose."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    """Whether bfloat16 can be used."""
    return True


# ---- what no accelerator has, for tests ---------------------------------------------------------


def counters(device: Device = None) -> Counters:
    """What a device has done since the last reset."""
    return Counters(*_soft.counters(_index(device)))


def synchronised_by(device: Device = None) -> dict[str, int]:
    """For what the host has waited since the last reset, and how often: an operator, ``item``, a copy, ...

    What other threads than the main one have waited for is told apart.
    """
    lines = (line.rpartition("=") for line in _soft.synchronised_by(_index(device)))
    return {why: int(times) for why, _, times in lines}


def reset_counters(device: Device = None) -> None:
    """Set all counts to 0."""
    _soft.reset_counters(_index(device))


def set_memory_limit(limit: int, device: Device = None) -> None:
    """How many bytes the device has from now on. What is allocated stays."""
    _soft.set_limit(_index(device), limit)


@contextmanager
def delayed(seconds: float) -> Iterator[None]:
    """Kernels that are launched inside start so much later, unless the host waits for the device, or asks it."""
    _soft.set_delay(seconds)
    try:
        yield
    finally:
        _soft.set_delay(0.0)


def inject(fault: str, device: Device = None) -> None:
    """Let a fault happen: ``error``, a kernel that fails, so that every later call raises; ``lost``, the device is gone
    at once; ``hang``, a kernel on the current stream that never ends; ``memory``, none is left for what comes.
    """
    if fault == "memory":
        set_memory_limit(0, device)
    else:
        _soft.inject(_index(device), fault)


def abort_kernels(device: Device = None) -> None:
    """End kernels that hang."""
    _soft.abort_kernels(_index(device))


_KERNEL = ctypes.CFUNCTYPE(ctypes.c_int)
_launched: list[tuple[Any, list[bool]]] = []
"""Kernels in Python that may not have run yet, and whether they have."""


def launch(kernel: Callable[..., None], *tensors: torch.Tensor) -> None:
    """Run ``kernel`` on the current stream of the current device, as a compiled kernel would be launched.

    It gets tensors of the CPU over the same bytes, which it must not keep. Nobody looks where the tensors are: one that
    is not on the current device is an illegal access, which the device finds later.
    """
    _launched[:] = [each for each in _launched if not each[1]]
    aliases = [_soft._alias(tensor) if tensor.device.type == "soft" else tensor for tensor in tensors]
    ran: list[bool] = []

    def run() -> int:
        try:
            kernel(*aliases)
        except Exception:
            traceback.print_exc()
            return 1
        finally:
            ran.append(True)
        return 0

    function = _KERNEL(run)
    _launched.append((function, ran))
    address = ctypes.cast(function, ctypes.c_void_p).value
    _soft.launch(address, list(tensors))
