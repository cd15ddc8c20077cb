"""Copies: tensors between a device and host memory, so that nobody waits who need not.

To the host they go in a stream of their own, after what the calling thread's stream has been told, into pinned memory;
samples go to the device in another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch

_streams: dict[tuple[torch.device, str], torch.Stream] = {}
_making = threading.Lock()


class Landing:
    """What the calling thread's stream has been told so far, for who has to know when it is over. Nobody else waits.

    Args:
        joins: each makes the current stream wait for other work that counts, too.
    """

    def __init__(self, joins: Sequence[Callable[[], object]] = ()) -> None:
        current = torch.accelerator.current_stream()
        stream = _stream_of(current.device, "landings")
        stream.wait_stream(current)
        self._over = torch.Event(current.device)
        with stream:
            for join in joins:
                join()
            self._over.record(stream)

    def wait(self) -> None:
        """Return when it is over. Raises the fault of a device that has one."""
        self._over.synchronize()


class HostCopy:
    """A tensor of a device on its way to the host, as it is in the order of the calling thread's stream.

    The tensor must not change before ``wait`` has returned.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        tensor = tensor.detach()
        stream = _stream_of(tensor.device, "copies")
        stream.wait_stream(torch.accelerator.current_stream(tensor.device.index))
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._there = torch.Event(tensor.device)
        with stream:
            self._host.copy_(tensor, non_blocking=True)
            self._there.record(stream)
        tensor.record_stream(stream)

    def wait(self) -> torch.Tensor:
        """The contiguous copy, in pinned memory, when it is here. Raises the fault of a device that has one."""
        self._there.synchronize()
        return self._host


class DeviceCopy:
    """Tensors of the host on their way to a device, whatever that does meanwhile. They may change afterwards."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        stream = _stream_of(device, "arrivals")
        self._there = torch.Event(device)
        with stream:
            self._tensors = {name: to_device(tensor, device) for name, tensor in tensors.items()}
            self._there.record(stream)

    def wait(self) -> Mapping[str, torch.Tensor]:
        """They, for what the calling thread's stream is told from now on; the thread does not wait."""
        current = torch.accelerator.current_stream(self._there.device.index)
        current.wait_event(self._there)
        for tensor in self._tensors.values():
            tensor.record_stream(current)
        return self._tensors


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a device, or one that is there. Does not wait. Unless it is in pinned memory, which the
    device reads later, it may change when this returns.
    """
    if not tensor.is_cpu:
        return tensor
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    # From other memory than this a copy would wait for what the device does before.
    if not tensor.is_pinned():
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True)


def _stream_of(device: torch.device, use: str) -> torch.Stream:
    with _making:
        if (device, use) not in _streams:
            _streams[device, use] = torch.Stream(device)
        return _streams[device, use]
