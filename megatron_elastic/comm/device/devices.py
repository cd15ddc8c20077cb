"""Devices: the device groups of a process, and the thread that aborts them when an interrupt is raised."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from weakref import WeakSet

from megatron_elastic.comm.device.device_group import DeviceGroup
from megatron_elastic.comm.group import Group
from megatron_elastic.comm.interrupts import Interruptible

BACKENDS: Mapping[str, str] = {"cuda": "nccl", "npu": "hccl", "soft": "softccl"}
"""Type of device -> the backend of torch that does its collectives."""

_AGAIN_MS = 5.0

_everybody: WeakSet[Devices] = WeakSet()
"""All of this process that are not closed."""
_aborting = threading.Lock()
"""Held while groups are aborted in a fault, so that none is after that; and while there come to be more."""


def end_blocked(acknowledge: Callable[[], None]) -> None:
    """Abort what is under way on devices, by whoever made it, and acknowledge the interrupt.

    Who trains may learn of the interrupt before the thread that aborts does, and go on where the device cannot. And
    what begins after the acknowledgement must not be taken for what it ended.
    """
    with _aborting:
        for devices in _everybody:
            devices.abort_blocked()
        acknowledge()


class Devices:
    """Makes device groups, and watches over them.

    The thread that trains may be blocked in a device's driver when an interrupt is raised, where it looks at nothing;
    so another thread, which sleeps otherwise, aborts whatever has work under way.

    Args:
        interrupt: raised when the layout must change.
        timeout: after which a backend gives an operation up.
        backends: type of device -> name of the backend of torch to use there.
    """

    def __init__(self, interrupt: Interruptible, timeout: timedelta, backends: Mapping[str, str] = BACKENDS) -> None:
        self._interrupt, self._timeout, self._backends = interrupt, timeout, backends
        self._groups: WeakSet[DeviceGroup] = WeakSet()
        self._closing = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        with _aborting:
            _everybody.add(self)

    def __contains__(self, device: str) -> bool:
        """Whether tensors on this type of device go to a backend of its own."""
        return device in self._backends

    def make(self, group: Group, device: str) -> DeviceGroup:
        """The device group of ``group``; its communicator is made later, with the first operation."""
        made = DeviceGroup(group, device, self._backends[device], self._timeout)
        with _aborting:  # who aborts goes through all that there are
            self._groups.add(made)
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, daemon=True, name="devices")
            self._thread.start()
        return made

    def abort_blocked(self) -> None:
        """Abort every group that has something under way."""
        for group in list(self._groups):
            group.abort_blocked()

    def close(self) -> None:
        """End the thread. Nothing can be made afterwards. Closing twice is fine."""
        if self._closing < 0:
            return
        if self._thread is not None:
            os.eventfd_write(self._closing, 1)
            self._thread.join()
        os.close(self._closing)
        self._closing = -1
        _everybody.discard(self)

    def _watch(self) -> None:
        closing = select.poll()
        closing.register(self._closing, select.POLLIN)
        either = select.poll()
        either.register(self._closing, select.POLLIN)
        either.register(self._interrupt.fd, select.POLLIN)
        while all(fd != self._closing for fd, _ in either.poll()):
            # Until it is acknowledged, who has not noticed may still start what cannot end.
            while self._interrupt.raised:
                with _aborting:
                    if self._interrupt.raised:
                        self.abort_blocked()
                if closing.poll(_AGAIN_MS):
                    return
