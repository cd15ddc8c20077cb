"""What planning raises when there is no way on."""

from __future__ import annotations

ADVICE = "restart the job from its newest checkpoint"


NO_CHECKPOINT = "no checkpoint has been written: start the job anew, with --save and --save-interval"


def without_advice(reason: str) -> str:
    """A reason without what there is to do."""
    return reason.removesuffix(f": {ADVICE}").removesuffix(f". {ADVICE.capitalize()}")


def advised(reason: str, saved: bool) -> str:
    """A reason with what can be done if there is a checkpoint, or none."""
    return reason if saved or not reason.lower().endswith(ADVICE) else f"{without_advice(reason)}; {NO_CHECKPOINT}"


class NoLayout(Exception):
    """No layout can go on after what happened. The message says why, and what to do."""


class StateLost(NoLayout):
    """The ranks that are left could go on, but some part of a slice is held by none of them."""
