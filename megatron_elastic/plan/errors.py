"""What planning raises when there is no way on."""

from __future__ import annotations

ADVICE = "restart the job from its newest checkpoint"


class NoLayout(Exception):
    """No layout can go on after what happened. The message says why, and what to do."""


class StateLost(NoLayout):
    """The ranks that are left could go on, but some part of a slice is held by none of them."""
