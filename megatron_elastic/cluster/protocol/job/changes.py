"""Changes: what is planned, asked for and measured while all is well."""

from __future__ import annotations

import msgspec
from immutables import Map

from megatron_elastic.layout import Layout
from megatron_elastic.plan import Costs, Sample
from megatron_elastic.plan.costs.cost import UnitCost
from megatron_elastic.plan.work.order import Order


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A layout that is planned, until it is true or a loss overtakes it (``protocol.change``)."""

    layout: Layout
    goal: Layout | None = None
    """What ``layout`` is to lead to, if that is another one."""
    entrants: frozenset[int] = frozenset()
    """Ranks that are in no cell yet."""
    missing: frozenset[int] = frozenset()
    """Entrants that are still building; if it reshapes cells, once announced, the ranks that have not all they need."""
    reshapes: bool = False
    """Whether its cells have another shape: then it comes into force when all ranks have what they need for it."""
    program: bytes | None = None
    """In what order cells do their work there, packed, if not in the usual one."""
    unordered: bool = False
    """Whether it waits for an order of its work that is being looked for."""
    stale: bool = False
    """Whether cells have become faster or slower since ``goal`` was chosen: it is to be chosen anew."""
    announced: bool = False
    """Whether the ranks that train have been told; from then on they may switch at the end of any step."""


class Arrangement(msgspec.Struct, frozen=True, kw_only=True):
    """Which units each stage should hold, as somebody asked for it or as costs suggest (``protocol.arrangement``)."""

    stages: int | None = None
    """Number of pipeline stages that somebody has asked for."""
    placed: tuple[tuple[int, ...], ...] | None = None
    """Units of each stage, if a search of orders has found that chunks should be placed so, until they are."""
    cells: int | None = None
    """Number of cells that somebody has asked for: ``Layout.most_cells``, as soon as a layout says so."""
    shape: tuple[int, int, int] | None = None
    """Tensor-, context- and expert-parallel size that somebody has asked for, until cells have them."""
    costs: Costs | None = None
    samples: Map[int, Sample] = Map()
    """What each rank measured last under the present layout."""
    at_clocks: Map[tuple[int, float], UnitCost] = Map()
    """What was measured last of each unit at each clock, in a job that sets clocks."""
    fitted: bool = True
    """Whether ``costs`` are of that."""
    tabulated: tuple[int, Costs] | None = None
    """The epoch and the costs by which the scale table was made last."""
    fits: bool = False
    """Whether units have been where they cost least since ranks last came or went."""
    weighed: tuple[int, ...] = ()
    """The ranks for which it was last written down what else there could be."""
    number: int = 0
    """How often what somebody has asked for has changed (``Wanted``)."""


class Ordering(msgspec.Struct, frozen=True, kw_only=True):
    """In what order cells do their work (``protocol.ordering``)."""

    epoch: int = -1
    """Of the layout that was begun in the order of ``program``; all others were in the usual one."""
    program: bytes | None = None
    """Packed; None: the usual one."""
    sought: Layout | None = None
    """The layout for which an order was looked for last; what cells do in it counts, not its epoch."""
    costs: Costs | None = None
    """By which."""
    before: bytes | None = None
    """The order that cells had, or would have there."""
    searching: bool = False
    """Whether it is being looked for."""
    better: Order | None = None
    """What was found, if it is better than that."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How fast cells are (``protocol.pace``). Cells are named by their leaders."""

    clocks: Map[int, float] = Map()
    """At which ranks run that were told to run at another than the base clock."""
    measured: Map[int, float] = Map()
    """Milliseconds that a grain takes on each rank by what it does in the present layout, and at these clocks."""
    told: Map[int, None] = Map()
    """Ranks that were measured since cells were compared last."""
    settled: Map[int, None] = Map()
    """Ranks that have told of their units since clocks were set: what comes next is of these clocks alone."""
    believed: Map[int, float] = Map()
    """How many times as long as usual a grain takes at the same clock, in cells where that is not once."""
    fixed: frozenset[int] = frozenset()
    """Nodes that cannot set clocks."""
    better: Map[int, int] = Map()
    """Cells that have been faster than was believed, since which step."""
    strikes: Map[int, int] = Map()
    """How often each has become slow."""
    lasts_at: int | None = None
    """Step at which layers are to be weighed by what is believed now, if that has not been done."""
    evicted: Map[int, int] = Map()
    """Ranks that were taken out because they are slow, with the cell of each."""
