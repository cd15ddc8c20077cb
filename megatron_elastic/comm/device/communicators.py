"""Communicators: device groups by their members, kept from layout to layout."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_elastic.comm.device.device_group import DeviceGroup
from megatron_elastic.comm.device.devices import Devices
from megatron_elastic.comm.group import Group
from megatron_elastic.comm.transport import Transport

Members = tuple[int, ...]
"""Global ranks, in order."""


class Communicators:
    """The device groups of a rank that are not torch's. Where members stay, communicators do.

    Args:
        transport: links the members.
        devices: makes device groups, and aborts them in faults.
        device: type of device.
    """

    def __init__(self, transport: Transport, devices: Devices, device: str) -> None:
        self._transport, self._devices, self._device = transport, devices, device
        self._groups: dict[Members, tuple[Group, DeviceGroup]] = {}
        self._former: list[DeviceGroup] = []
        """Those of the layout before, which others may not have done with."""

    def arrange(self, members: Mapping[int, Members]) -> Mapping[Members, tuple[Group, DeviceGroup]]:
        """Have just the groups of a layout. Talks to nobody.

        ``members``: by the groups' numbers in this layout, which all members know them by; no two have the same.
        """
        for former in self._former:
            former.abort()
        older, self._groups = self._groups, {}
        for ident, ranks in members.items():
            self._groups[ranks] = older.pop(ranks) if ranks in older else self._make(ident, ranks)
            self._groups[ranks][0].ident = ident
        self._former = [on_device for _, on_device in older.values()]
        return self._groups

    def _make(self, ident: int, ranks: Members) -> tuple[Group, DeviceGroup]:
        group = Group(self._transport, ident, ranks)
        return group, self._devices.make(group, self._device)
