"""Injection: faults on purpose, written as ``ACTION:key=value,...`` and fired at a hook point."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

HOOK_POINTS = (
    "data", "forward", "backward", "grad_sync", "replay", "vote", "apply", "param_sync", "commit",
    "interrupt", "report", "edit", "promote", "resume", "replicate", "checkpoint", "prepare", "switch", "reload",
    "backward_weight", "evaluate", "recut",
)
"""Where faults can be injected and detectors attach, in the order of a step and a recovery; then those of some jobs."""

ACTIONS = ("kill", "raise", "stop", "hang", "slow", "disconnect", "disk", "flip", "device")
FLIPS = ("weights", "moments", "replica")
"""What a bit can be flipped in: the model's weights, an optimizer moment of a slice owned, or of one replicated."""
DISKS = ("full", "slow")
"""What a disk can be."""
DEVICES = ("error", "lost", "hang", "memory")
"""What can happen to a device: a kernel fails, the device is gone, a kernel never ends, no memory is left."""
_FIELDS: dict[str, Callable[[str], Any]] = {
    "rank": int, "step": int, "at": str, "grain": int, "what": str, "for": float, "factor": float,
    "peers": lambda text: tuple(map(int, text.split("+"))),
}  # fmt: skip
_OWN = {"what": ("flip", "disk", "device"), "for": ("hang", "slow", "disconnect", "disk"), "factor": ("slow",),
        "peers": ("disconnect",)}
"""Fields that only some actions take."""
_NEEDED = {"flip": ("what",), "disk": ("what",), "device": ("what",), "slow": ("factor",), "disconnect": ("peers",)}
_WHAT = {"flip": FLIPS, "disk": DISKS, "device": DEVICES}


@dataclass(frozen=True, slots=True)
class Injection:
    """One fault: ``action`` on ``rank`` when it reaches hook point ``at``, in ``step`` and at ``grain`` if given."""

    action: str
    rank: int
    step: int | None
    at: str
    grain: int | None = None
    what: str | None = None
    """One of ``FLIPS``, ``DISKS`` or ``DEVICES``, for the actions ``flip``, ``disk`` and ``device``."""
    seconds: float | None = None
    """How long a ``hang``, ``slow``, ``disconnect`` or ``disk`` lasts; None: for ever."""
    factor: float | None = None
    """How many times as long computing takes from then on, for ``slow``."""
    peers: tuple[int, ...] = ()
    """Whom nothing of this rank reaches from then on, for ``disconnect``."""

    @classmethod
    def parse(cls, text: str) -> Injection:
        """Parse ``kill:rank=5,step=12,at=backward,grain=3``. Raises ValueError with what is wrong."""
        action, _, rest = text.partition(":")
        if action not in ACTIONS:
            raise ValueError(f"unknown action {action!r} in {text!r}: one of {', '.join(ACTIONS)}")
        values: dict[str, Any] = {}
        for item in filter(None, rest.split(",")):
            key, sep, value = item.partition("=")
            if not sep or key not in _FIELDS:
                raise ValueError(f"{item!r} in {text!r}: expected key=value with key one of {', '.join(_FIELDS)}")
            if key in values:
                raise ValueError(f"{text!r} has {key} twice")
            try:
                values[key] = _FIELDS[key](value)
            except ValueError:
                what = {"peers": "list of ranks, as 1+4", "for": "number", "factor": "number"}.get(key, "integer")
                raise ValueError(f"{item} in {text!r} is no {what}") from None
        missing = [key for key in ("rank", "at", *_NEEDED.get(action, ())) if key not in values]
        if missing:
            raise ValueError(f"{text!r} lacks {', '.join(missing)}")
        foreign = [key for key in values if action not in _OWN.get(key, ACTIONS)]
        if foreign:
            raise ValueError(f"{text!r}: {action} takes no {', '.join(foreign)}")
        if values["at"] not in HOOK_POINTS:
            raise ValueError(f"at={values['at']} in {text!r} is no hook point: one of {', '.join(HOOK_POINTS)}")
        if "what" in values and values["what"] not in _WHAT[action]:
            raise ValueError(f"what={values['what']} in {text!r}: one of {', '.join(_WHAT[action])}")
        if not (1 <= values.get("factor", 1.0) < math.inf and 0 < values.get("for", 1.0) <= threading.TIMEOUT_MAX):
            raise ValueError(f"{text!r}: factor= is at least 1, and for= more than 0 seconds (without it: for ever)")
        return cls(action, values["rank"], values.get("step"), values["at"], values.get("grain"), values.get("what"),
                   values.get("for"), values.get("factor"), values.get("peers", ()))

    @property
    def deadly(self) -> bool:
        """Whether the rank does not go on after it."""
        return self.action in ("kill", "raise", "stop", "hang", "device") and self.seconds is None

    def matches(self, at: str, rank: int, step: int, grain: int | None) -> bool:
        """Whether this fault fires here."""
        return (self.at == at and self.rank == rank and self.step in (None, step)
                and self.grain in (None, grain))

    def __str__(self) -> str:
        given = {"rank": self.rank, "step": self.step, "at": self.at, "grain": self.grain, "what": self.what,
                 "for": self.seconds, "factor": self.factor, "peers": "+".join(map(str, self.peers)) or None}
        return f"{self.action}:" + ",".join(
            f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in given.items() if value is not None
        )  # fmt: skip
