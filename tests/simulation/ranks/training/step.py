"""Step: compute, reduce, vote, apply, and what is the same whether a step was computed here or is only finished."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_elastic.cluster.messages import Committed, Plan, Profile, Settled, VoteResult
from megatron_elastic.cluster.rank import standing
from megatron_elastic.pipeline.program import unpack
from megatron_elastic.pipeline.schedule import for_cell
from megatron_elastic.plan.costs.cost import UnitCost
from megatron_elastic.plan.costs.profile import Sample
from tests.simulation.errors import Violation
from tests.simulation.layouts import decoded
from tests.simulation.ranks.training import intermission, parameters
from tests.simulation.ranks.training.verification import verify
from tests.simulation.ranks.work import Work, check_sums, grains

if TYPE_CHECKING:
    from tests.simulation.ranks.meeting import Meeting
    from tests.simulation.ranks.rank import Rank, Waits
    from tests.simulation.ranks.store import Store
    from tests.simulation.ranks.training.tenure import Tenure


def take(rank: Rank, tenure: Tenure) -> Waits:
    """Do the step in progress, or what is missing of it. Until the vote is over nothing is applied."""
    world, layout, step = rank.world, tenure.layout, rank.standing.step
    yield from parameters.gather(rank, tenure, step - 1)
    yield from intermission.hold(rank, tenure, step - 1)
    tenure.store.drop_gradients()
    yield world.delay(0.02)
    rank.control.check()
    yield from parameters.await_all(rank, tenure)
    yield from _compute(rank, tenure, step)
    yield from _reduce(rank, tenure, step)
    yield from _replay(rank, tenure, step)
    if tenure.preparation is not None:
        tenure.preparation.look()
        rank.standing = standing.lacks(rank.standing, not tenure.preparation.up_to_date)
    _note_copies(rank, tenure)
    yield world.delay(0.01)
    yield from verify(rank, tenure)
    result = yield from _cast_vote(rank, tenure, step)
    if world.rng.random() < 0.5:
        yield world.delay(0.003)
    apply(rank, tenure.store, step)
    if world.keeps:
        rank.copies.send_updated(layout, step)
    yield from complete(rank, tenure, result)
    if tenure.preparation is not None:
        tenure.preparation.apply(step)


def _compute(rank: Rank, tenure: Tenure, step: int) -> Waits:
    """Operation after operation, the ranks of a cell each for itself. Nobody waits for what another makes."""
    world, layout, ops = rank.world, tenure.layout, tenure.remainder
    cell, stage = layout.cell_of(rank.rank), layout.stage_of(rank.rank)
    if not cell.shadow:
        rank.parameters.check(layout.stages[stage].units, rank.rank, step)
    if ops is None:
        some = grains(layout, step)
        # Who only follows does nothing, and may have come when the others had their order.
        whole = (for_cell("1f1b", layout, cell.leader) if tenure.program is None or cell.shadow
                 else unpack(tenure.program, cell.leader))  # fmt: skip
        ops = tuple(op for op in whole if op.grain < some)
    if rank.work is None:
        rank.work = Work(step, grains(layout, step))
    chunks = layout.chunks(stage)
    for op in ops:
        yield world.delay(0.1 / len(ops))
        rank.control.check()
        rank.work.do(op, chunks[op.chunk], layout.num_chunks)


def _reduce(rank: Rank, tenure: Tenure, step: int) -> Waits:
    """The owners of slices get the sums of their gradients."""
    layout = tenure.layout
    assert rank.work is not None
    sums: Meeting = yield rank.transport.meeting(layout, "grads", step, tuple(rank.work.sums))
    if rank.rank == layout.ranks[0]:
        check_sums(layout, step, sums.posted)
    for at in layout.owned(rank.rank):
        state = tenure.store.live.get(at)
        if state is None or state.step != step - 1:
            raise Violation("invented", f"rank {rank.rank} owns slice {at} and has "
                                        f"{'nothing' if state is None else state.step} in step {step}")
        state.grad = True


def _replay(rank: Rank, tenure: Tenure, step: int) -> Waits:
    """What must exist twice does when this is over: gradients, or the states after the step before."""
    if rank.world.keeps:
        yield rank.copies.all_arrived
        tenure.store.settle()
    else:
        yield rank.transport.meeting(tenure.layout, "replay", step)
        for at in tenure.layout.replicated(rank.rank):
            tenure.store.set_gradient(at)


def _cast_vote(rank: Rank, tenure: Tenure, step: int) -> Waits:
    if plan := rank.control.take((Plan,)):
        assert isinstance(plan, Plan)
        tenure.plan, rank.standing = plan, standing.told(rank.standing, plan.epoch)
        rank.transport.reach(decoded(plan.layout))
    for at in tenure.layout.owned(rank.rank):
        if tenure.store.live[at].bad and rank.world.verifies:
            raise Violation("damage", f"rank {rank.rank} votes step {step} with a damaged slice {at}")
    informed = standing.informed(rank.standing)
    ballots: Meeting = yield rank.transport.meeting(tenure.layout, "vote", step, informed)
    rank.world.passed(rank, step)
    rank.saved = rank.save_first - 1
    result = _result(step)
    rank.standing = standing.voted(rank.standing, result, all(ballots.posted.values()))
    return result


def _result(step: int) -> VoteResult:
    """The same whoever computes the step and however often."""
    return VoteResult(step=step, loss=10 / step, grad_norm=1 + 1 / step, lr=0.1, consumed_samples=8 * step, tokens=64)


def apply(rank: Rank, store: Store, step: int) -> None:
    """Do the update. An interrupt that is here already may come in the middle of it."""
    if rank.control.error() is not None:
        store.apply(step, rank.world.rng.randrange(len(store.live) + 1))
        rank.control.check()
    store.apply(step)


def complete(rank: Rank, tenure: Tenure, result: VoteResult) -> Waits:
    """The rest of a step that has been voted and applied. May be repeated."""
    world, layout, store = rank.world, tenure.layout, tenure.store
    for at in layout.owned(rank.rank):
        if store.live[at].step != result.step:
            raise Violation("wrong step", f"rank {rank.rank} sends slice {at} of step {store.live[at].step} "
                                          f"after step {result.step}")
    rank.transport.meeting(layout, "params", result.step)
    rank.parameters.outdated()
    rank.standing = standing.distributing(rank.standing)
    if not world.overlaps:
        yield from parameters.await_all(rank, tenure)
    elif world.rng.random() < 0.3:
        yield world.delay(0.005)
    if rank.rank == _speaker(rank, tenure):
        first = rank.rank == layout.ranks[0]
        rank.control.send(
            Committed(rank=rank.rank, epoch=layout.epoch, vote=result, time=world.wall(rank.agent), first=first)
        )
    rank.standing = standing.committed(rank.standing)
    rank.settled = True
    rank.work = tenure.remainder = None
    if world.profiles and result.step % 3 == 0 and layout.place_of(rank.rank) == 0:
        _tell_times(rank, tenure)
    rank.copies.pull()
    store.settle()
    _note_copies(rank, tenure)


def _speaker(rank: Rank, tenure: Tenure) -> int:
    """The lowest rank of the layout on this host: it tells the agent of each step."""
    layout = tenure.layout
    return min(each for each in layout.hosts[layout.host_of(rank.rank)] if each in layout.places)


def _note_copies(rank: Rank, tenure: Tenure) -> None:
    """Tell, once in a layout, that all copies from and to this rank that it asks for are live."""
    if not tenure.settled and not tenure.store.replicating:
        tenure.settled = True
        rank.control.send(Settled(rank=rank.rank, epoch=tenure.layout.epoch))


def _tell_times(rank: Rank, tenure: Tenure) -> None:
    layout, stage = tenure.layout, tenure.layout.stage_of(rank.rank)
    units = {unit: UnitCost(rank.world.rng.choice((1.0, 1.0, 4.0)), 2.0, 6, 12, 0)
             for unit in layout.at_home(stage)}
    sample = Sample(units, 10, None if stage == layout.pipeline_size - 1 else 0.01, 0.0)
    rank.control.send(Profile(rank=rank.rank, epoch=layout.epoch, sample=sample))
