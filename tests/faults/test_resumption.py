"""Resumption: whatever is missing of a step that was cut anywhere, after any losses, is done, and once."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.cluster.messages import Kept, Report, WorkDone
from megatron_elastic.cluster.protocol.salvage import Counted, Needed, count, kept
from megatron_elastic.layout import Cell, Layout, Part, Stage
from megatron_elastic.pipeline.program import Op, ProgramError
from megatron_elastic.pipeline.resumption import Remainder, check, remainder
from megatron_elastic.pipeline.route import Leg, first_of, usual
from megatron_elastic.pipeline.schedule import for_cell
from megatron_elastic.plan import everything, lose
from tests.placements import along, ways
from tests.tiers.examples import examples

STEP = 7


def uneven(grains: int, widths: list[int], through: tuple[int, ...], rng: random.Random) -> Layout:
    """Stages of the given widths, passed as ``through`` says, with every grain at a random cell of each."""
    layout = along(through, [1] * len(through), 1, grains)
    stages, rank = [], 0
    for width, stage in zip(widths, layout.stages, strict=False):
        at = [rng.randrange(width) for _ in range(grains)]
        cells = [Cell((rank + i,), tuple(g for g in range(grains) if at[g] == i)) for i in range(width)]
        stages.append(Stage(stage.units, tuple(cells)))
        rank += width
    owners = tuple((stages[layout.home(unit)].cells[0].leader,) for unit in range(len(layout.units)))
    whole = replace(layout, stages=tuple(stages), owners=owners, hosts=(tuple(range(rank)),))
    whole.validate()
    return whole


class ModelCell:
    """What one cell, here of one rank, knows: the layout that it has made true, and what it has done of the step."""

    def __init__(self) -> None:
        self.layout = 0
        self.added: set[int] = set()
        self.live: set[int] = set()
        self.half: set[int] = set()
        self.todo: list[Leg] = []
        self.damaged = False
        """Whether its weights are."""

    def report(self, rank: int, grains: int) -> Report:
        return Report(
            rank=rank, epoch=0, member=True, step=STEP, vote=None, last=None, held=None, interrupted_at=0.0,
            layout=self.layout,
            work=WorkDone(step=STEP, grains=grains, added=sorted(self.added), live=sorted(self.live),
                          half=sorted(self.half)),
        )  # fmt: skip

    def adopt(self, epoch: int, kept: Kept | None, todo: Remainder) -> None:
        """As a rank does it: the layout, and with it what counts of its work."""
        if kept is None:
            self.added, self.live, self.half = set(), set(), set()
        else:
            self.live &= set(kept.live)
            assert (kept.added, kept.half) == (sorted(self.added), sorted(self.half))
        self.layout, self.todo = epoch, list(todo.legs)

    def do(self, op: Op, number: int) -> None:
        begun, ended = {
            "forward": (set(), self.live), "backward": (self.live, self.added),
            "backward_input": (self.live, self.half), "backward_weight": (self.half, self.added),
        }[op.kind]  # fmt: skip
        assert op.kind == "forward" or number in begun
        begun.discard(number)
        ended.add(number)


class ModelStep:
    """Cells that do a step of the first ``grains`` grains, operation by operation in any possible order, and are
    interrupted.
    """

    def __init__(self, layout: Layout, schedule: str, rng: random.Random, grains: int) -> None:
        self.layout = layout
        self.grains = grains
        self.schedule = schedule
        self.rng = rng
        self.cells = {leader: ModelCell() for leader in layout.cells}
        self.kept: tuple[Kept, ...] = ()
        self.wrong: set[tuple[bool, int, int]] = set()
        """Results that something damaged had a part in: whether of a forward, grain and position."""
        self.plan()
        self.adopt(1.0)

    def plan(self) -> None:
        """What each cell has to do, from what is kept."""
        self.work = {leader: self.of_cell(leader) for leader in self.layout.cells}
        check(self.layout, self.kept, self.work, self.grains)
        self.sent = {
            each for leader, work in self.work.items() for leg in work.again for each in self.sends(leader, leg)
        }

    def of_cell(self, leader: int) -> Remainder:
        if self.kept:
            told = Needed(self.layout, self.kept).of(self.layout.cells[leader].ranks)
            mine = remainder(self.schedule, self.layout, told, leader, self.grains)
            assert mine == remainder(self.schedule, self.layout, self.kept, leader, self.grains)
            return mine
        legs = usual(self.layout, leader, for_cell(self.schedule, self.layout, leader))
        return Remainder((), first_of(legs, self.grains))

    def adopt(self, share: float) -> None:
        """So many of the cells make the layout true before the next fault."""
        mine = {each.leader: each for each in self.kept}
        for leader in self.layout.cells:
            if self.rng.random() <= share:
                self.cells[leader].adopt(self.layout.epoch, mine.get(leader), self.work[leader])

    def position(self, leader: int, op: Op) -> int:
        return self.layout.position(self.layout.stage_of(leader), op.chunk)

    def sends(self, leader: int, leg: Leg) -> list[tuple[bool, int, int, int]]:
        """What a cell sends of an operation: whether it is a forward's, the grain, where it is needed, and by whom."""
        forward = leg.op.kind == "forward"
        there = self.position(leader, leg.op) + (1 if forward else -1)
        return [(forward, leg.op.grain, there, target) for target, _ in leg.targets]

    def is_ready(self, leader: int) -> bool:
        """Whether a cell's next operation has what it needs."""
        cell = self.cells[leader]
        if cell.layout != self.layout.epoch or not cell.todo:
            return False
        leg = cell.todo[0]
        needed = leg.op.kind == "forward", leg.op.grain, self.position(leader, leg.op), leader
        return not leg.sources or needed in self.sent

    def go_on(self, operations: int) -> None:
        """Do at most so many operations."""
        for _ in range(operations):
            ready = [leader for leader in self.work if self.is_ready(leader)]
            if not ready:
                break
            leader = self.rng.choice(ready)
            leg = self.cells[leader].todo.pop(0)
            self.cells[leader].do(leg.op, leg.op.grain * self.layout.num_chunks + leg.op.chunk)
            self.spoil(self.cells[leader], leg.op.kind == "forward", leg.op.grain, self.position(leader, leg.op))
            self.sent.update(self.sends(leader, leg))

    def spoil(self, cell: ModelCell, forward: bool, grain: int, position: int) -> None:
        """A result is wrong if what made it or what it was made of is; and right if it is made anew of what is right.

        Gradients are as wrong as the backward that gives them.
        """
        inputs = {(True, grain, position - 1)} if forward else {(False, grain, position + 1), (True, grain, position)}
        if cell.damaged or not self.wrong.isdisjoint(inputs):
            self.wrong.add((forward, grain, position))
        else:
            self.wrong.discard((forward, grain, position))

    def damage(self) -> None:
        """The weights of some cells are damaged; that is found out before the vote, or at the next fault."""
        for leader in self.layout.cells:
            self.cells[leader].damaged = self.rng.random() < 0.2

    def fault(self) -> None:
        """Some cells die, or lose what they have done. It is decided how to go on; some do not come to hear it.

        Whatever is damaged is known by then, and healed before anything is computed again.
        """
        dead: list[int] = []
        for stage in self.layout.stages:
            leaders = [cell.leader for cell in stage.cells if not cell.shadow]
            dead += self.rng.sample(leaders, self.rng.choice([0, 0, *range(len(leaders))]))
        new = lose(self.layout, dead, everything(self.layout), self.layout.epoch + 1)
        reports = {leader: self.cells[leader].report(leader, self.grains) for leader in new.cells}
        for leader in reports:
            if self.rng.random() < 0.1:
                reports[leader] = msgspec.structs.replace(reports[leader], work=None)
        damaged = [leader for leader in self.layout.cells if self.cells[leader].damaged]
        self.kept = kept(self.layout, new, STEP, reports, self.kept, damaged) if self.rng.random() < 0.9 else ()
        for cell in self.cells.values():
            cell.damaged = False
        self.layout = new
        self.plan()
        self.adopt(self.rng.choice([0.5, 1.0]))

    def finish(self) -> None:
        """What has not been heard is heard, and all is done."""
        mine = {each.leader: each for each in self.kept}
        for leader in self.layout.cells:
            if self.cells[leader].layout != self.layout.epoch:
                self.cells[leader].adopt(self.layout.epoch, mine.get(leader), self.work[leader])
        self.go_on(3 * self.layout.num_grains * self.layout.pipeline_size * self.layout.num_chunks)


@settings(max_examples=examples(1000), deadline=None)
@given(
    grains=st.integers(1, 12), fewer=st.integers(0, 11), through=ways(4),
    widths=st.lists(st.integers(1, 4), min_size=4, max_size=4), schedule=st.sampled_from(["1f1b", "split"]),
    seed=st.integers(0, 2**32), faults=st.integers(1, 4),
)  # fmt: skip
def test_a_step_that_is_cut_anywhere_again_and_again_is_added_once(
    grains: int, fewer: int, widths: list[int], through: tuple[int, ...], schedule: str, seed: int, faults: int
) -> None:
    """Each plan is proved by ``check``, and the sums that cells have in the end are looked at."""
    rng = random.Random(seed)
    some = max(grains - fewer, 1)
    step = ModelStep(uneven(grains, widths, through, rng), schedule, rng, some)
    total = 3 * some * len(through)
    for _ in range(faults):
        if rng.random() < 0.3:
            step.damage()
        step.go_on(rng.randrange(total))
        step.fault()
    step.finish()
    assert not step.wrong, "what damaged weights have made is in the sums"
    most = step.layout.num_chunks
    for index, stage in enumerate(step.layout.stages):
        numbers = [grain * most + chunk for grain in range(some) for chunk in range(len(step.layout.chunks(index)))]
        assert sorted(number for cell in stage.cells for number in step.cells[cell.leader].added) == numbers


# ---- the checker ----------------------------------------------------------------------------


def test_the_checker_refuses_what_is_wrong() -> None:
    """One operation more or less, in another order, a result that is not sent, or one that nobody needs."""
    layout = uneven(4, [2, 2], (0, 1), random.Random(1))
    step = ModelStep(layout, "split", random.Random(2), 4)
    step.go_on(13)
    told = {leader: cell.report(leader, 4) for leader, cell in step.cells.items()}
    mine = kept(layout, layout, STEP, told, (), ())
    work = {leader: remainder("split", layout, mine, leader, 4) for leader in layout.cells}
    check(layout, mine, work, 4)
    for leader, each in work.items():
        for at, leg in enumerate(each.legs):
            rest = each.legs[:at] + each.legs[at + 1 :]
            for legs in (rest, (*rest, leg, leg), (leg, *each.legs)):
                with pytest.raises(ProgramError):
                    check(layout, mine, work | {leader: Remainder(each.again, legs)}, 4)
            if leg.targets:
                silent = (*each.legs[:at], leg._replace(targets=()), *each.legs[at + 1 :])
                with pytest.raises(ProgramError, match="never comes"):
                    check(layout, mine, work | {leader: Remainder(each.again, silent)}, 4)
        for at in range(len(each.again)):
            for again in (each.again[:at] + each.again[at + 1 :], (*each.again, each.again[at])):
                with pytest.raises(ProgramError):
                    check(layout, mine, work | {leader: Remainder(again, each.legs)}, 4)


# ---- what cells agree on ------------------------------------------------------------------------

TP2 = Layout.grid(
    tp=2, pp=2, dp=2, stage_units=[[0, 1], [2, 3]], units=["embedding", "layer.0", "layer.1", "head"], num_grains=4,
    num_slices=2, replicas=0,
)  # fmt: skip


def reports(**work: WorkDone | None) -> dict[int, Report]:
    """What the ranks r0, r1, ... have done; the others nothing."""
    return {
        rank: Report(
            rank=rank, epoch=0, member=True, step=STEP, vote=None, last=None, held=None, interrupted_at=0.0,
            layout=TP2.epoch, work=work.get(f"r{rank}"),
        )
        for rank in TP2.ranks
    }  # fmt: skip


def done(added: str = "", live: str = "", half: str = "", step: int = STEP) -> WorkDone:
    return WorkDone(step=step, grains=4, added=list(map(int, added)), live=list(map(int, live)),
                    half=list(map(int, half)))


def test_what_all_ranks_of_a_cell_have_is_kept() -> None:
    both = reports(r0=done("0", live="2"), r1=done("0"), r2=done("1", "3"), r3=done("1", "3"), r4=done("0"))
    expected = (
        Kept(leader=0, added=[0], live=[], half=[]),
        Kept(leader=2, added=[1], live=[3], half=[]),
    )
    assert kept(TP2, TP2, STEP, both, (), ()) == expected
    assert count(TP2, expected, 4) == Counted(kept=5, redone=8), "all of the second stage is done again"
    assert count(TP2, expected, 3) == Counted(kept=5, redone=6), "of a batch with as many grains"


@pytest.mark.parametrize(
    ("one", "other"),
    [(done("02"), done("0")), (done("0", half="2"), done("0", live="2")), (done("0"), done("0", step=STEP - 1))],
    ids=["sums", "halves", "step"],
)
def test_ranks_that_differ_in_their_sums_begin_anew(one: WorkDone, other: WorkDone) -> None:
    assert kept(TP2, TP2, STEP, reports(r0=one, r1=other), (), ()) == ()


def test_a_node_is_told_what_its_grains_are_about_and_no_more() -> None:
    layout = Layout.grid(tp=1, pp=2, dp=8, stage_units=[[0, 1], [2]], units=["embedding", "layer.0", "head"],
                         num_grains=16, num_slices=8, replicas=1)  # fmt: skip
    what = [Kept(leader=leader, added=[leader % 8], live=[leader % 8 + 8], half=[]) for leader in layout.ranks]
    assert Needed(layout, what).of([2, 3, 99]) == [what[leader] for leader in (2, 3, 10, 11)]
    assert Needed(layout, what[:8]).of([10]) == [what[2]]
    moved = Kept(leader=1, added=[1, 5], live=[], half=[])  # grain 5 is another's in the layout
    told = Needed(layout, [moved, what[5]]).of([1])
    assert told == [moved, replace_kept(what[5], added=[5], live=[])]


def replace_kept(kept: Kept, **fields: list[int]) -> Kept:
    return msgspec.structs.replace(kept, **fields)


def test_where_units_move_or_grains_are_cut_nothing_is_kept() -> None:
    told = reports(r0=done("0"), r1=done("0"))
    assert kept(TP2, TP2, STEP, told, (), ())
    first, second = TP2.stages
    moved = replace(TP2, stages=(replace(first, units=(0,)), replace(second, units=(1, 2, 3))))
    assert kept(TP2, moved, STEP, told, (), ()) == ()
    cut = replace(second.cells[0], grains=(0,), parts=(Part(2, 0, 1),))
    other = replace(TP2, stages=(first, replace(second, cells=(cut, second.cells[1]))))
    assert kept(TP2, other, STEP, told, (), ()) == ()


def test_who_has_not_heard_of_the_newest_layout_counts_only_if_that_has_counted_on_it() -> None:
    told = reports(r0=done("0"), r1=done("0"))
    later = replace(TP2, epoch=TP2.epoch + 1)
    assert kept(later, later, STEP, told, (), ()) == ()
    before = kept(TP2, later, STEP, told, (), ())
    assert kept(later, later, STEP, told, before, ()) == before
