"""Scenario: what a history is made of besides chance: the job, and the faults. A seed makes one; it can be cut down."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, field, replace
from typing import Any

KINDS = {
    "kill": 30, "kill two": 8, "kill newcomer": 10, "stop": 8, "busy": 3, "hang": 6, "link": 12, "suspect": 4,
    "node lost": 7, "partition": 9, "join": 12, "drain": 6, "pace": 9, "scale": 6, "flip": 9, "clock": 3,
    "trouble": 1, "exit": 1, "fail": 4,
    "coordinator": 25, "depose": 25,
}
"""How often each kind of fault is chosen; the last two where another can coordinate."""
SUCCESSIONS = ("coordinator", "depose")
MOMENTS = (
    "Interrupt", "Forward", "Back", "Resume", "Resume", "Reload", "Invite", "Plan", "Enter", "Moves", "Launch", "Fence",
    "Recall",
)  # fmt: skip
"""Messages of the coordinator at which something may happen."""
SAYINGS = (
    "Committed", "Committed", "Committed", "Report", "Recovered", "Settled", "Ready", "Switched", "Finished", "Damaged",
    "Suspect",
)  # fmt: skip
"""Messages of ranks at which something may happen, most likely to who says it."""
ENTRIES = ("Ready", "Plan", "Plan", "Switched", "Switched", "Switched", "Enter", "Settled")
"""What is said when ranks enter."""

_POLICIES = {"elastic": 16, "recycle": 1, "column": 1, "oobleck": 1, "varuna": 1}
"""How often each is chosen."""


@dataclass(frozen=True, slots=True)
class Fault:
    """``what`` happens at the ``count``-th message ``moment``, or if that is empty after so many events; or, with a
    ``moment`` of "fault", right after the fault before. ``victim`` and ``more`` choose whom and how long.
    """

    moment: str
    count: int
    what: str
    victim: int
    more: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """One job and what happens to it."""

    seed: int
    tp: int = 1
    pp: int = 1
    dp: int = 2
    layers: int = 2
    tied: bool = True
    slices: int = 2
    replicas: int = 1
    per_node: int = 2
    steps: int = 8
    start_step: int = 0
    respawn: bool = False
    spares: bool = False
    """Whether there is a node more, whose ranks wait until others are lost."""
    replay: str = "gradient"
    save_every: int = 0
    profiles: bool = False
    searches: bool = False
    """Whether the order of work is searched by what units cost, which ranks tell."""
    verifies: bool = False
    overlaps: bool = True
    slow_copies: bool = False
    early: bool = False
    """Whether faults happen before every rank has its part of the model."""
    apart: bool = False
    """Whether the coordinator is in no node's process: it reaches the first node over a network, and goes alone."""
    store: str = "alone"
    """What says who coordinates, as with ``--elastic-store``."""
    shared: bool = True
    """Whether all nodes write records on one disk."""
    divided: str = "tensors"
    """What is divided among the ``tp`` ranks of a cell: tensors, experts, contexts, or both of the latter."""
    policy: str = "elastic"
    """What is made of losses and joins, as with ``--elastic-policy``."""
    faults: tuple[Fault, ...] = field(default=())

    @property
    def size(self) -> int:
        """Ranks of the beginning."""
        return self.tp * self.pp * self.dp

    @classmethod
    def of(cls, seed: int) -> Scenario:
        """The scenario of a seed."""
        rng = random.Random(seed)
        tp = rng.choice((1, 1, 1, 2))
        pp = rng.choice((1, 1, 2, 2, 3))
        dp = rng.choice((1, 2, 2, 3, 3, 4)) if pp > 1 else rng.choice((2, 2, 3, 4))
        while tp * pp * dp > 12:
            dp -= 1
        size = tp * pp * dp
        fits = [each for each in range(1, size + 1) if size % each == 0 and each >= tp]
        per_node = rng.choice((*fits, *(each for each in fits if size // each >= 3)))
        store = rng.choice(("alone", "embedded", "etcd", "etcd")) if size // per_node >= 3 else "alone"
        kinds = {kind: often for kind, often in KINDS.items() if store != "alone" or kind not in SUCCESSIONS}
        verifies = rng.random() < 0.2
        respawn = rng.random() < 0.5
        faults: list[Fault] = []
        for index in range(rng.choice((1, 1, 2, 2, 3, 3, 4, 5))):
            what = rng.choices(list(kinds), list(kinds.values()))[0]
            if index == 0 and verifies and rng.random() < 0.6:
                what = "flip"
            elif store != "alone" and rng.random() < 0.15:
                what = rng.choice(SUCCESSIONS)
            if what == "flip" and not verifies:
                what = "kill"
            dice, victim, more = rng.random(), rng.randrange(1 << 16), rng.randrange(1 << 16)
            if what == "kill newcomer":
                first = "kill" if respawn and victim % 3 else "join"
                faults.append(Fault("", rng.randrange(8 * size, 40 * size), first, more, victim))
                moment, count = rng.choice(ENTRIES), rng.choice((1, 1, 1, 1, 2, 3, 5))
            elif dice < 0.3 and faults:
                moment, count = "fault", rng.choice((0, 1, 2, 5, 10, 20, 40))
            elif dice < 0.5:
                moment, count = rng.choice(MOMENTS), rng.choice((1, 1, 1, 2, 2, 3, 4))
            elif dice < 0.7:
                moment, count = rng.choice(SAYINGS), rng.choice((1, 1, 2, 3, 4, 6, 9))
                if moment == "Committed" and what in ("link", "join", "suspect"):
                    what = "kill"  # of who alone may know that step's vote
            else:
                moment, count = "", rng.randrange(8 * size, 80 * size)
            if what == "link" and victim % 5 == 0:  # while some know of a new layout and some do not
                moment, count = rng.choice(ENTRIES), rng.choice((1, 1, 2, 3))
            faults.append(Fault(moment, count, what, victim, more))
            if what in SUCCESSIONS and victim % 3 == 0:
                what = rng.choice(("kill", "kill two", "join", "partition", *SUCCESSIONS))
                faults.append(Fault("fault", more % 60, what, victim >> 1, more >> 1))
            if what == "scale" and victim % 3:  # perhaps while states are put together, or some have heard of it
                what = rng.choice(("kill", "kill two", "link", *(SUCCESSIONS if store != "alone" else ("kill",))))
                faults.append(Fault(("Recut", "Enter")[more % 2], 1 + victim % 5 // 2, what, victim >> 1, more >> 1))
            if what == "flip" and victim % 3:
                moment = ("Back", "Back", "Reload", "Back", "Recovered", "Back")[more % 6]
                faults.append(Fault(moment, 1 + victim % 2, "kill", victim >> 1, more >> 1))
        return cls(
            seed=seed, tp=tp, pp=pp, dp=dp, layers=pp * rng.choice((1, 1, 2)), tied=rng.random() < 0.5,
            slices=rng.choice((dp, dp, 1, 2, dp + 1)), replicas=rng.choice((1, 2, 2) if verifies else (0, 1, 1, 1, 2)),
            per_node=per_node, steps=rng.choice((5, 8, 12, 20) if store == "alone" else (12, 20, 30)),
            start_step=rng.choice((0, 0, 0, 3)),
            respawn=respawn, spares=rng.random() < 0.2, replay="state" if rng.random() < 0.2 else "gradient",
            save_every=rng.choice((0, 2, 3, 5)), profiles=rng.random() < 0.06, verifies=verifies,
            overlaps=rng.random() < 0.7 and not verifies, slow_copies=rng.random() < 0.2,
            early=rng.random() < 0.15, apart=rng.random() < 0.5, store=store, shared=rng.random() < 0.3,
            faults=tuple(faults), divided=rng.choice(("tensors", "experts", "contexts", "both")),
            policy=rng.choices(tuple(_POLICIES), tuple(_POLICIES.values()))[0],
            searches=random.Random(~seed).random() < 0.12,
        )  # fmt: skip

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Scenario:
        """Read what ``to_json`` wrote."""
        values = json.loads(text)
        return cls(**{**values, "faults": tuple(Fault(**each) for each in values["faults"])})

    def smaller(self) -> list[Scenario]:
        """Scenarios that are a little smaller, the smallest first."""
        found = [replace(self, faults=self.faults[:i] + self.faults[i + 1 :]) for i in range(len(self.faults))]
        plain: dict[str, Any] = {
            "tp": 1, "profiles": False, "searches": False, "verifies": False, "save_every": 0, "start_step": 0,
            "slow_copies": False, "respawn": False, "spares": False, "replay": "gradient", "overlaps": True,
            "tied": False, "apart": False, "store": "etcd" if self.store != "alone" else "alone", "shared": True,
            "divided": "tensors", "layers": self.pp, "slices": self.dp,
        }  # fmt: skip
        found += [replace(self, **{name: value}) for name, value in plain.items() if getattr(self, name) != value]
        if self.steps > 3:
            found += [replace(self, steps=self.steps // 2), replace(self, steps=self.steps - 1)]
        return [each for each in found if each.size % each.per_node == 0]
