"""Names of the types of devices that a rank can compute on, by which ``--elastic-device`` chooses."""

from __future__ import annotations

NAMES = ("cpu", "cuda", "npu", "soft")
"""``cuda`` are AMD's GPUs, too, as in torch; ``soft`` is made of software, for tests."""
