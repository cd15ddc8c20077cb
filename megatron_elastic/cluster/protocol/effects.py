"""Effects: what is to be done about an event.

They are carried out in order, in one place, which cannot raise (``cluster.coordination.coordinator``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from megatron_elastic.cluster.messages import Answer, Order, ToRank
from megatron_elastic.layout import Layout
from megatron_elastic.observe.dials import Figures
from megatron_elastic.plan import Costs
from megatron_elastic.plan.predict import Case


class Send(msgspec.Struct, frozen=True):
    """Send a message to ranks. Ranks that are not there any more are left out."""

    message: ToRank
    ranks: tuple[int, ...]


class Tell(msgspec.Struct, frozen=True):
    """Send a message to the agent of a node."""

    node: int
    message: Order


class Reply(msgspec.Struct, frozen=True):
    """Answer a person."""

    person: int
    answer: Answer


class SetTimer(msgspec.Struct, frozen=True):
    """``Expired(name, serial)`` is to happen in ``delay`` seconds, in place of an earlier timer of that name."""

    name: str
    serial: int
    delay: float


class CancelTimer(msgspec.Struct, frozen=True):
    """That is not to happen."""

    name: str


class ReadCosts(msgspec.Struct, frozen=True):
    """Read a profile for these units; ``Costed`` tells."""

    path: str
    units: tuple[str, ...]


class PlanClocks(msgspec.Struct, frozen=True):
    """Plan the clocks of a layout, which may take a while; ``Clocked`` tells. Arguments: those of ``plan_clocks``."""

    layout: Layout
    costs: Costs
    schedule: str
    present: bytes | None


class Search(msgspec.Struct, frozen=True):
    """Look for a better order of the work of ``layout``; ``Found`` tells. Arguments are those of
    ``plan.work.order``."""

    layout: Layout
    costs: Costs
    present: bytes | None
    tied: bool | None = None


class Tabulate(msgspec.Struct, frozen=True):
    """``scale_table.json``: how fast the job would be with other numbers of devices.

    ``tokens``: of a step; ``sizes``: the present layout with those of the model, None where there is no model of such.
    """

    layout: Layout
    costs: Costs
    tokens: int
    sizes: Case | None


class WriteScaleTable(msgspec.Struct, frozen=True):
    """What came of that."""

    text: str


class Record(msgspec.Struct, frozen=True):
    """Let a later coordinator know that ``epoch`` was begun; ``Recorded`` tells. ``step``: the last one on record."""

    epoch: int
    step: int


class WriteMetrics(msgspec.Struct, frozen=True):
    """One line of ``metrics.jsonl``."""

    record: Mapping[str, Any]


class WriteEvent(msgspec.Struct, frozen=True):
    """One line of ``events.jsonl``."""

    kind: str
    epoch: int
    time: float
    fields: Mapping[str, Any]


class WriteLayout(msgspec.Struct, frozen=True):
    """``layouts/EPOCH.json``."""

    layout: Layout


class WriteProfile(msgspec.Struct, frozen=True):
    """``profile.json``."""

    text: str


class WriteDigest(msgspec.Struct, frozen=True):
    """``digest.json``."""

    digest: Mapping[str, Any]


class Show(msgspec.Struct, frozen=True):
    """What the dials of these ranks show, for who watches."""

    figures: Mapping[int, Figures]


class Say(msgspec.Struct, frozen=True):
    """One line for people. ``tells``: the kind of the event that is written down about the same thing, or ``step``."""

    line: str
    tells: str = ""


class End(msgspec.Struct, frozen=True):
    """The job is over for the coordinator: nothing is decided any more."""

    ok: bool
    reason: str
    code: int = 1


Effect = (
    Send | Tell | Reply | SetTimer | CancelTimer | ReadCosts | PlanClocks | Search | Tabulate | Record | WriteMetrics
    | WriteEvent | WriteLayout | WriteProfile | WriteScaleTable | WriteDigest | Show | Say | End
)
