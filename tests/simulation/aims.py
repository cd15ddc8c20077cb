"""Aims: histories near a defect that few come near, so that a search for one does not take a day.

A history of any seed has one fault of each kind at each moment about as often as the next. An ``Aim`` says what happens
in those that come to where a defect shows, and chance the rest.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.simulation.scenario import Fault, Scenario

_EVENTS = tuple(range(10, 150))
_SEVERAL = tuple(range(1, 15))
_SOON = (0, 0, 1, 2, 3, 5, 8, 10, 15, 20, 40, 80, 160)
_FEW = (1, 1, 1, 2, 2, 3)
_PLAIN: Mapping[str, Any] = {
    "store": "alone", "policy": "elastic", "profiles": False, "searches": False, "early": False, "spares": False,
}  # fmt: skip
_MOST_RANKS = 6
"""Small jobs have short histories, and what is aimed at happens in them as well."""


@dataclass(frozen=True, slots=True)
class _Some:
    """One of ``whats`` at one of ``moments`` (see ``Fault``), the more often the more often it is named; or nothing."""

    moments: Sequence[str]
    whats: Sequence[str]
    counts: Sequence[int] = _FEW
    chance: float = 1.0

    def fault(self, rng: random.Random) -> Fault:
        """One of them."""
        return Fault(rng.choice(self.moments), rng.choice(self.counts), rng.choice(self.whats),
                     rng.randrange(1 << 16), rng.randrange(1 << 16))


def _soon(*whats: str, chance: float = 0.5) -> _Some:
    """Right after the fault before."""
    return _Some(("fault",), whats, _SOON, chance)


def _once(*whats: str) -> _Some:
    """After some events."""
    return _Some(("",), whats, _EVENTS)


@dataclass(frozen=True, slots=True)
class Aim:
    """What happens, and fields of ``Scenario`` with what they may be."""

    faults: Sequence[_Some]
    fields: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def scenario(self, seed: int) -> Scenario:
        """That of a seed."""
        rng = random.Random(seed)
        chosen = {**_PLAIN, **{name: rng.choice(values) for name, values in self.fields.items()}}
        while True:
            some = Scenario.of(rng.randrange(1 << 40))
            if some.size <= _MOST_RANKS and (chosen["store"] == "alone" or some.size // some.per_node >= 3):
                break
        faults = tuple(each.fault(rng) for each in self.faults if rng.random() < each.chance)
        return replace(some, **chosen, steps=rng.choice((5, 8, 10)), faults=faults)


_ELECTED = ("embedded", "etcd")
_DECIDED = ("Forward", "Back", "Resume", "Reload")
_STEPS_LOST = Aim(
    (_Some(("Committed", "Recall", "Interrupt"), ("node lost", "partition", "kill", "link"), _SEVERAL),
     _soon("node lost", "partition", "kill"), _Some(("Committed",), ("kill", "node lost"), _SEVERAL, 0.5)),
)  # fmt: skip
AIMS: Mapping[str, Aim] = {
    "healed-when-decided": Aim(
        (_once("flip"), _Some((*_DECIDED, "Damaged", "Interrupt", "Report"), ("kill", "kill two", "link", "suspect")),
         _soon("kill")),
        {"verifies": (True,), "overlaps": (False,), "replicas": (1, 2)},
    ),
    "suspicions-of-the-epoch-before-are-dropped": Aim(
        (_once("join", "join", "kill", "pace", "scale"),
         _Some(("Switched", "Switched", "Enter", "Plan"), ("link", "link", "link", "suspect"))),
        {"respawn": (False, True)},
    ),
    "lost-steps-are-not-recalled": _STEPS_LOST,
    "who-becomes-a-member-tells-of-an-old-step": Aim(
        (_once("kill"), _Some(("Committed",), ("kill", "kill two", "link"), tuple(range(5, 40))),
         _Some(("Forward",), ("kill", "link", "suspect", "kill two"), (1, 1, 1, 2))),
        {"tp": (2,), "pp": (1,), "dp": (3,), "per_node": (1, 2, 6), "slices": (1, 3)},
    ),
    "who-is-entering-is-not-needed": Aim(
        (_once("join", "kill"), _Some(("Plan", "Switched", "Enter", "Settled", "Recovered"), ("kill newcomer", "kill")),
         _soon("kill newcomer", "kill")),
        {"respawn": (False, True)},
    ),
    "votes-are-forgotten": Aim(
        (_Some(("Committed",), ("kill", "kill", "node lost", "kill two"), _SEVERAL), _soon("kill", "link")),
        {"overlaps": (True,)},
    ),
    "votes-count-for-ever": Aim(
        (_Some(("Committed",), ("partition",), _SEVERAL), _soon("kill", chance=1.0),
         _Some(("Back", "Resume", "Recovered", "Recovered"), ("kill", "link", "suspect"))),
        {"overlaps": (True,), "tp": (1,), "pp": (1,), "dp": (3, 4), "per_node": (1,), "slices": (1, 3)},
    ),
    "who-finishes-a-step-has-its-vote-only-then": Aim(
        (_Some(("Committed",), ("kill", "kill", "link", "suspect"), _SEVERAL),
         _Some(("Forward",), ("kill", "link", "link"), (1, 1, 1, 2)), _soon("coordinator", "depose", chance=1.0)),
        {"store": _ELECTED},
    ),
    "steps-are-recorded-as-they-are-told": _STEPS_LOST,
    "what-is-not-on-record-is-not-told-to-the-next": Aim(
        (_Some(("Committed",), ("coordinator", "coordinator", "depose"), _SEVERAL),
         _Some(("Recall",), ("node lost", "node lost", "kill"))),
        {"store": _ELECTED, "apart": (True, True, False)},
    ),
    "who-stepped-down-goes-on-writing": Aim(
        (_Some(("Committed",), ("depose",), _SEVERAL), _soon("kill", "partition", "depose")),
        {"store": _ELECTED, "shared": (True,)},
    ),
    "who-was-cut-off-is-not-fenced": Aim(
        (_once("partition"), _Some((*_DECIDED, "Recovered"), ("coordinator", "depose"))),
        {"store": _ELECTED, "apart": (True, True, False)},
    ),
    "cells-have-another-shape-before-all-have-their-states": Aim(
        (_once("scale"), _Some(("Recut",), ("kill", "kill", "link", "suspect", "kill two"), (1, 1, 2, 3))),
        {"tp": (2,), "pp": (1,), "dp": (2, 3), "per_node": (1, 2), "slices": (1, 2, 3),
         "divided": ("tensors", "experts", "contexts", "both")},
    ),
}  # fmt: skip
"""Name of a mutant -> what comes near it. The others are found by histories of any seed."""


def scenario(mutant: str | None, seed: int) -> Scenario:
    """The scenario of a seed near a mutant, or near none."""
    aim = AIMS.get(mutant or "")
    return Scenario.of(seed) if aim is None else aim.scenario(seed)
