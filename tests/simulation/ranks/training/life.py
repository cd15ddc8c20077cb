"""Life: the loop of a model rank. A step after the other, or the recovery from what interrupted one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_elastic.cluster.messages import Enter, Finished, Hello, Invite, SliceDigest, Start, Stop
from tests.simulation.errors import Interrupted, Violation
from tests.simulation.ranks.training import adoption, building, intermission, interruption, parameters, step

if TYPE_CHECKING:
    from tests.simulation.ranks.rank import Rank, Waits
    from tests.simulation.ranks.training.tenure import Tenure


def live(rank: Rank) -> Waits:
    """From hello to the end of the job."""
    yield from _join(rank)
    while True:
        try:
            if not rank.standing.member:
                if (yield from _stand_by(rank)):
                    return
            elif rank.tenure is None:
                yield from building.build(rank)
            elif rank.standing.step <= rank.world.total:
                yield from step.take(rank, rank.tenure)
                if rank.standing.agreed:
                    yield from adoption.switch(rank, rank.tenure)
            else:
                yield from _finish(rank, rank.tenure)
                return
        except Interrupted as interrupted:
            yield from interruption.handle(rank, interrupted)


def _join(rank: Rank) -> Waits:
    world, transport = rank.world, rank.transport
    rank.control.send(Hello(
        rank=rank.rank, pid=1000 + rank.rank, host=rank.agent.host, address=transport.address,
        linked=transport.listening, layout=world.first_bytes, start_step=world.start_step, train_iters=world.total,
        flags={}, likeness=b"x" if not world.odd(rank.rank) else b"odd", tied=world.tied,
    ))  # fmt: skip
    if rank.standing.member:
        try:
            start: Start = yield (Start,)
        except Interrupted:
            raise Violation("too early", f"rank {rank.rank} is interrupted before Start") from None
        transport.known.update(start.addresses)


def _stand_by(rank: Rank) -> Waits:
    """In no cell: wait to be invited into one, and be let in. Returns whether the job is over."""
    message = yield (Stop, Invite, Enter)
    match message:
        case Invite():
            yield from building.prepare(rank, message)
        case Enter():
            yield from adoption.enter(rank, message)
    return isinstance(message, Stop)


def _finish(rank: Rank, tenure: Tenure) -> Waits:
    """Report what the model has become, and stay until everybody has."""
    done, layout = rank.standing.step - 1, tenure.layout
    yield from parameters.gather(rank, tenure, done)
    yield from intermission.hold(rank, tenure, done)
    yield from parameters.await_all(rank, tenure)
    digests = []
    for unit, k in layout.owned(rank.rank):
        state, weights = tenure.store.live.get((unit, k)), rank.parameters.steps[unit]
        if state is None or state.step != done:
            raise Violation("invented", f"rank {rank.rank} digests slice {unit, k}: "
                                        f"{'nothing' if state is None else state.step} at {done}")
        if weights != done:
            raise Violation("wrong weights", f"rank {rank.rank} digests unit {unit} of {weights}")
        part = layout.part_of(unit, rank.rank)
        digests.append(SliceDigest(unit=unit, slice=k, part=part, sha256=f"{unit}-{k}-{done}"))
    rank.control.send(Finished(rank=rank.rank, step=done, digests=digests))
    yield (Stop,)
