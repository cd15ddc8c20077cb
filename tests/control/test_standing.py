"""Tests of ``cluster.rank.standing``: one rank's decisions, and those of all ranks of a job, interrupted anywhere."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from megatron_elastic.cluster.messages import VoteResult
from megatron_elastic.cluster.protocol.faults.decision import decide, working
from megatron_elastic.cluster.protocol.job import Decided, Told
from megatron_elastic.cluster.rank import standing
from megatron_elastic.cluster.rank.standing import Standing
from megatron_elastic.layout import Layout
from tests.tiers.examples import examples

LAYOUT = Layout.grid(
    tp=1, pp=1, dp=2, stage_units=[[0, 1, 2]], units=["embedding", "layer.0", "head"], num_grains=4, num_slices=2,
    replicas=0,
)  # fmt: skip
ASKED = [(0, 1, 0), (1, 1, 0), (2, 1, 0)]
"""What it asks of rank 1."""


def vote(step: int) -> VoteResult:
    return VoteResult(step=step, loss=0.5, grad_norm=1.0, lr=0.1, consumed_samples=16 * step, tokens=512)


def at_step(step: int, epoch: int = 3, member: bool = True) -> Standing:
    """In a step; the one before was committed here."""
    return Standing(rank=1, step=step, epoch=epoch, member=member, last=vote(step - 1) if step > 1 else None)


def test_a_step_is_voted_and_committed() -> None:
    voted = standing.voted(standing.built(at_step(4)), vote(4), agreed=True)
    assert (voted.step, voted.vote, voted.agreed) == (4, vote(4), True)
    committed = standing.committed(standing.distributing(voted))
    assert (committed.step, committed.vote, committed.last) == (5, None, vote(4))
    assert not committed.stale, "all weights were sent"
    assert committed.agreed, "the switch is due"
    assert committed.gathering, "the weights may still be on their way"
    assert not standing.distributed(committed).gathering


def test_who_is_interrupted_with_weights_on_their_way_reports_it() -> None:
    for now, stale in (
        (at_step(4), False),
        (standing.distributing(at_step(4)), True),
        (standing.distributed(standing.distributing(at_step(4))), False),
        (standing.edited(at_step(4), 5, 4, member=True, gather=True), True),
    ):
        assert standing.report(now, 7, LAYOUT, [(0, 1, 0)], {}, 0.0, 0, 0).stale == stale


def test_a_report_says_all_of_it() -> None:
    now = standing.voted(at_step(4), vote(4), agreed=False)
    report = standing.report(now, 7, LAYOUT, [(0, 1, 0)], {4: [(0, 1, 0)]}, 12.5, 0, 2)
    assert (report.rank, report.epoch, report.layout, report.member) == (1, 7, 3, True)
    assert (report.step, report.vote, report.last) == (4, vote(4), vote(3))
    assert (report.held, report.versions) == ([(0, 1, 0)], {4: [(0, 1, 0)]})
    assert (report.interrupted_at, report.saved) == (12.5, 2)


def test_who_holds_just_what_the_newest_layout_asks_for_does_not_list_it() -> None:
    for newest, held, told in ((0, ASKED, None), (0, ASKED[1:], ASKED[1:]), (5, ASKED, ASKED)):
        assert standing.report(at_step(4), 7, LAYOUT, held, {}, 0.0, newest, 0).held == told


def test_who_has_no_part_of_the_model_yet_says_so() -> None:
    report = standing.report(at_step(1), 7, LAYOUT, None, {}, 0.0, 0, 0)
    assert (report.held, report.built) == ([], False)


def test_only_a_newer_plan_counts_as_known() -> None:
    now = standing.told(at_step(4, epoch=3), 4)
    assert standing.informed(now)
    assert not standing.informed(standing.edited(now, 4, 4, member=True, gather=False))
    assert not standing.informed(standing.told(at_step(4, epoch=5), 4)), "a fault has overtaken it"


def test_a_spare_does_not_remember_that_weights_are_stale() -> None:
    """Where it enters later nobody else would distribute any, and it would wait for itself."""
    spare = standing.edited(standing.distributing(at_step(4)), 5, 4, member=False, gather=True)
    spare = standing.forward(spare, vote(4))
    assert (spare.step, spare.vote, spare.stale) == (5, None, False)
    back_in = standing.enter(standing.edited(spare, 6, 9, member=True, gather=False), 9)
    assert (back_in.step, back_in.stale, back_in.gathering) == (9, False, False)


def test_who_becomes_a_member_tells_of_no_older_step_even_if_that_layout_is_replaced_at_once() -> None:
    """Newcomers stand at the first step of the job, spares at that in which they became one."""
    spare = at_step(4, member=False)
    assert standing.edited(spare, 5, 9, member=True, gather=True).step == 9
    assert standing.edited(spare, 5, 9, member=False, gather=True).step == 4


def test_who_leaves_as_a_step_is_finished_has_states_that_count_until_the_next_one_is() -> None:
    """Who had left before has none that do."""
    leaving = standing.edited(at_step(4), 5, 4, member=False, gather=True, vote=vote(4))
    assert (leaving.step, leaving.vote, leaving.owed) == (5, None, vote(4))
    assert standing.forward(leaving, vote(4)) == replace(leaving, owed=None)
    again = standing.edited(leaving, 6, 5, member=False, gather=True)
    assert standing.owes(again, 5) == vote(4), "it was stopped before its states had done the update"
    assert standing.owes(again, 4) is standing.owes(standing.back(again, 5), 5) is None
    assert standing.edited(at_step(2, member=False), 5, 4, member=False, gather=True, vote=vote(4)).step == 2


def test_steps_that_are_done_again_have_no_votes() -> None:
    ahead = standing.edited(at_step(9), 5, 9, member=True, gather=False)
    assert standing.edited(ahead, 6, 8, member=True, gather=False).last is None, "if it is interrupted here"
    assert standing.edited(ahead, 6, 8, member=False, gather=False).last is None
    assert standing.back(ahead, 9).last == vote(8)
    assert standing.back(ahead, 8).last is None
    assert standing.reload(ahead, 3) == standing.back(standing.edited(ahead, 5, 3, member=True, gather=True), 3)


@given(st.integers(1, 20), st.booleans(), st.booleans(), st.booleans())
def test_nothing_of_a_layout_outlives_it(step: int, was_member: bool, member: bool, gather: bool) -> None:
    before = standing.told(standing.voted(at_step(step, member=was_member), vote(step), agreed=True), 4)
    after = standing.edited(standing.distributing(standing.built(before)), 5, step, member, gather)
    same = at_step(step, member=was_member)
    if not member:
        same = standing.voted(same, vote(step), agreed=False)
    assert after == standing.edited(same, 5, step, member, gather)


def test_who_finishes_a_step_in_a_new_layout_has_its_vote_as_soon_as_it_is_in() -> None:
    """If all are interrupted before their states are what was decided, the next decision must be the same one."""
    for now in (at_step(4), standing.committed(standing.voted(at_step(4), vote(4), agreed=False))):
        inside = standing.edited(now, 5, 4, member=True, gather=True, vote=vote(4))
        assert (inside.step, inside.vote) == (4, vote(4))
        assert standing.forward(inside, vote(4)) == inside


class ModelJob:
    """Ranks that do steps, each at its own pace as far as the exchanges between them let it, and are interrupted.

    ``weights``: the number of steps after which a rank's weights are, None if that is not known.
    """

    def __init__(self, ranks: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.epoch = 0
        self.ranks = {rank: standing.built(Standing(rank=rank, step=1, epoch=0, member=True)) for rank in range(ranks)}
        self.layout = set(self.ranks)
        self.since = dict.fromkeys(self.ranks, 0)
        """Epoch of the first of the layouts that each member has been in without a gap."""
        self.weights: dict[int, int | None] = dict.fromkeys(self.ranks)
        self.following: set[int] = set()
        """Members that compute nothing before their first weights have come."""
        self.entered: set[int] = set()
        """Members that have done their part of the step that the slowest one does, and go into its vote."""
        self.votes: dict[int, Told] = {}
        """As the coordinator's ledger has them: all that anybody has told."""

    @property
    def step(self) -> int:
        """The slowest member's."""
        return min(self.ranks[rank].step for rank in self.layout)

    def advance(self) -> None:
        """Some member does what comes next for it, if it has not to wait for another."""
        rank = self.random.choice(sorted(self.layout))
        now = self.ranks[rank]
        if now.vote is not None:
            self.commit(rank)
        elif now.step == self.step and rank in self.entered:
            if self.entered == self.layout:
                self.ranks[rank] = standing.voted(now, vote(now.step), agreed=False)
        elif now.step == self.step:
            self.compute(rank)

    def compute(self, rank: int) -> None:
        """All up to the vote; weights come only when their owners, here all members, send them."""
        now = self.ranks[rank]
        same = [self.ranks[other] for other in self.layout if self.ranks[other].step == now.step]
        if now.gathering and len(same) < len(self.layout):
            return
        assert len({other.stale for other in same}) == 1, "some would wait for weights from others who send none"
        if now.stale or now.gathering:
            self.weights[rank] = now.step - 1
        self.ranks[rank] = standing.distributed(now)
        assert self.weights[rank] == now.step - 1 or rank in self.following, "computed with other weights"
        self.entered.add(rank)

    def commit(self, rank: int) -> None:
        """Weights begin to be sent; they may be there before the next step is computed, or not."""
        self.weights[rank] = None
        self.following.discard(rank)
        self.ranks[rank] = standing.committed(standing.distributing(self.ranks[rank]))
        if self.step == self.ranks[rank].step:
            self.entered.clear()

    def switch(self) -> None:
        """Between two steps: everybody enters a layout with the spares."""
        while any(self.ranks[rank].step > self.step or self.ranks[rank].vote for rank in self.layout):
            self.advance()
        if self.entered or any(self.ranks[rank].stale for rank in self.layout):
            return
        step = self.step
        self.epoch += 1
        for rank, now in self.ranks.items():
            if rank in self.layout:
                self.weights[rank] = step - 1
                now = standing.distributed(now)
            else:
                self.following.add(rank)
            self.ranks[rank] = standing.enter(standing.edited(now, self.epoch, step, member=True, gather=False), step)
        self.layout = set(self.ranks)
        self.use()

    def use(self) -> None:
        self.since = {rank: self.since.get(rank, self.epoch) for rank in self.layout}

    def recover(self) -> None:
        """Everybody is interrupted, reports, and gets a decision; perhaps again before all have made it true."""
        decision = Decided("back", self.step, None)
        before, gather = self.step, False
        while True:
            self.epoch += 1
            at_work = working(
                self.since,
                [standing.report(now, self.epoch, LAYOUT, [], {}, 0.0, -1, 0) for now in self.ranks.values()],
            )
            self.votes |= {
                each.step: Told(each, report.layout, report.layout)
                for report in sorted(at_work, key=lambda report: report.layout)
                for each in (report.vote, report.last) if each is not None
            }  # fmt: skip
            if decision.decision != "reload":
                decision = decide(at_work, self.votes)
                skipped = decision.step > before and before not in self.votes
                assert decision.step >= before and not skipped, "a step is skipped, or a committed one done again"
                before = decision.step
                if self.random.random() < 0.1:
                    decision = Decided("reload", self.random.randint(1, decision.step), None)
            gather = gather or any(report.stale for report in at_work)
            for rank in self.random.sample(sorted(self.layout), self.random.randint(0, len(self.layout) - 1)):
                if self.random.random() < 0.5 and (self.layout - {rank}).intersection(each.rank for each in at_work):
                    self.layout.discard(rank)
            spares = sorted(set(self.ranks) - self.layout)
            if self.random.random() < 0.1 and spares:
                self.layout.add(self.random.choice(spares))
                gather = True  # it has no weights
            self.use()
            self.following &= self.layout
            self.entered.clear()
            for rank in self.random.sample(sorted(self.ranks), len(self.ranks)):
                if self.random.random() < 0.05:
                    break  # the next fault, before this rank has heard of it
                now, member = self.ranks[rank], rank in self.layout
                self.ranks[rank] = standing.edited(now, self.epoch, decision.step, member, gather, vote=decision.vote)
                if self.random.random() < 0.05:
                    break  # the next fault, before its state is what was decided
                self.adopt(rank, decision)
            else:
                break
        if decision.decision == "forward":
            self.entered = set(self.layout)

    def adopt(self, rank: int, decision: Decided) -> None:
        """A rank's state is what was decided."""
        now = self.ranks[rank]
        match decision:
            case Decided("forward", _, VoteResult() as result):
                self.ranks[rank] = standing.forward(now, result)
            case Decided("back", step):
                self.ranks[rank] = standing.back(now, step)
            case Decided("reload", step):
                self.ranks[rank] = standing.reload(now, step)
                self.weights[rank] = None  # only what it owns was loaded

    def check(self) -> None:
        """What holds between any two events."""
        for rank, now in self.ranks.items():
            assert now.member == (rank in self.layout)
            assert now.vote is None or now.vote.step == now.step
            assert now.last is None or now.last.step <= now.step
            assert now.member or not (now.stale or now.gathering)
            assert not now.member or now.step - self.step <= 1

    def finish(self) -> None:
        """Without further faults everybody gets through the next two steps."""
        until = self.step + 2
        for _ in range(100 * len(self.ranks)):
            self.advance()
        while self.step < until:
            before = dict(self.ranks), set(self.entered)
            for _ in range(100 * len(self.ranks)):
                self.advance()
            assert before != (self.ranks, self.entered), "nobody gets on"


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(1, 5), st.integers(0, 2**32))
def test_ranks_that_are_interrupted_anywhere_do_each_step_once(ranks: int, seed: int) -> None:
    job = ModelJob(ranks, seed)
    for _ in range(150):
        chance = job.random.random()
        if chance < 0.06:
            job.recover()
        elif chance < 0.1:
            job.switch()
        else:
            job.advance()
        job.check()
    job.finish()
