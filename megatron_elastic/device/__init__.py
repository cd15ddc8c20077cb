"""Devices: what a rank computes on, behind one interface (``device.Device``), and which one it is (``choice``).

``names``, ``visible`` and ``allowance`` import no torch, for who chooses before a rank is there.
"""
