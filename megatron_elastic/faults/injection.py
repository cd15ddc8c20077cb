"""Injection: faults on purpose, written as ``ACTION:key=value,...`` and fired at a hook point."""

from __future__ import annotations

from dataclasses import dataclass

HOOK_POINTS = (
    "data", "forward", "backward", "grad_sync", "replay", "vote", "apply", "param_sync", "commit",
    "interrupt", "report", "edit", "promote", "resume", "replicate", "checkpoint", "prepare", "switch", "reload",
    "backward_weight",
)
"""Where faults can be injected and detectors attach, in the order of a step and a recovery; then those of some jobs."""

ACTIONS = ("kill", "raise", "flip")
FLIPS = ("weights", "moments", "replica")
"""What a bit can be flipped in: the model's weights, an optimizer moment of a slice owned, or of one replicated."""
_FIELDS = ("rank", "step", "at", "grain", "what")


@dataclass(frozen=True, slots=True)
class Injection:
    """One fault: ``action`` on ``rank`` when it reaches hook point ``at``, in ``step`` and at ``grain`` if given."""

    action: str
    rank: int
    step: int | None
    at: str
    grain: int | None = None
    what: str | None = None
    """One of ``FLIPS``, for the action ``flip``."""

    @classmethod
    def parse(cls, text: str) -> Injection:
        """Parse ``kill:rank=5,step=12,at=backward,grain=3``. Raises ValueError with what is wrong."""
        action, _, rest = text.partition(":")
        if action not in ACTIONS:
            raise ValueError(f"unknown action {action!r} in {text!r}: one of {', '.join(ACTIONS)}")
        values: dict[str, str] = {}
        for item in filter(None, rest.split(",")):
            key, sep, value = item.partition("=")
            if not sep or key not in _FIELDS:
                raise ValueError(f"{item!r} in {text!r}: expected key=value with key one of {', '.join(_FIELDS)}")
            values[key] = value
        missing = [k for k in ("rank", "at") if k not in values]
        if missing:
            raise ValueError(f"{text!r} lacks {', '.join(missing)}")
        if values["at"] not in HOOK_POINTS:
            raise ValueError(f"at={values['at']} in {text!r} is no hook point: one of {', '.join(HOOK_POINTS)}")
        if (action == "flip") != ("what" in values) or values.get("what", FLIPS[0]) not in FLIPS:
            raise ValueError(f"{text!r}: flip, and only flip, takes what=, which is one of {', '.join(FLIPS)}")
        numbers: dict[str, int] = {}
        for key in ("rank", "step", "grain"):
            if key in values:
                try:
                    numbers[key] = int(values[key])
                except ValueError:
                    raise ValueError(f"{key}={values[key]} in {text!r} is no integer") from None
        return cls(action, numbers["rank"], numbers.get("step"), values["at"], numbers.get("grain"),
                   values.get("what"))

    def matches(self, at: str, rank: int, step: int, grain: int | None) -> bool:
        """Whether this fault fires here."""
        return (self.at == at and self.rank == rank and self.step in (None, step)
                and self.grain in (None, grain))

    def __str__(self) -> str:
        step = "" if self.step is None else f",step={self.step}"
        grain = "" if self.grain is None else f",grain={self.grain}"
        what = "" if self.what is None else f",what={self.what}"
        return f"{self.action}:rank={self.rank}{step},at={self.at}{grain}{what}"
