"""Start: until all ranks of the beginning have come up, agree, and train."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from msgspec.structs import replace

from megatron_elastic.cluster.messages import Hello, Start
from megatron_elastic.cluster.protocol import watch
from megatron_elastic.cluster.protocol.adoption import use
from megatron_elastic.cluster.protocol.changes import change, membership
from megatron_elastic.cluster.protocol.effects import ReadCosts
from megatron_elastic.cluster.protocol.events import Begun, Costed
from megatron_elastic.cluster.protocol.faults.suspicion import clear, fence
from megatron_elastic.cluster.protocol.job import Ledger, Rank, Trust
from megatron_elastic.cluster.protocol.turn import Turn
from megatron_elastic.config import USAGE
from megatron_elastic.layout import LayoutError, decode
from megatron_elastic.plan.costs.power import Clocking

_STARTS = 3
"""How often a rank is started that dies before training begins."""


def begun(turn: Turn, event: Begun) -> None:
    """Nodes may come."""
    turn.set(torch_port=event.torch_port, key=event.key, name=event.name, seats=event.seats)
    turn.set_timer("start", turn.job.settings.start_timeout)


def late(turn: Turn) -> None:
    """Not everybody came up in time."""
    job = turn.job
    missing = sorted(rank for rank, each in job.ranks.items() if each.hello is None)
    unlaunched = [rank for rank in missing if job.ranks[rank].node is None]
    limit = f"within {job.settings.start_timeout:g} s"
    if not unlaunched:
        turn.end(False, f"ranks {missing} did not come up {limit}; see their logs, or raise --elastic-start-timeout")
        return
    slots = next((node.slots for node in job.nodes.values()), job.world_size)  # as many on every node
    there = {node.node_rank for node in job.nodes.values()}
    absent = [node for node in range(job.world_size // slots) if node not in there]
    turn.end(False, f"node{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))} did not come {limit}: see "
                    "what the launcher says there, or start it, with the --master-addr and --master-port of node 0; or "
                    "raise --elastic-start-timeout")


def hello(turn: Turn, message: Hello) -> None:
    """A rank introduces itself."""
    job, rank = turn.job, message.rank
    if job.ranks[rank].hello is not None or job.ranks[rank].lost:
        return
    turn.set_rank(rank, hello=message)
    turn.cancel_timer(f"coming {rank}")
    membership.introduced(turn, message)
    if rank >= job.world_size:
        _newcomer(turn, message)
        return
    turn.set(silent=job.silent - 1)
    if rank == 0:
        turn.set(first=message)
    if turn.job.silent == 0:
        _all_up(turn)


def does_not_come(turn: Turn, rank: int) -> None:
    """A rank that was started while the job runs has not introduced itself in time."""
    limit = turn.job.settings.start_timeout
    fence(turn, rank, "fenced", f"it did not come up within {limit:g} s (--elastic-start-timeout)", stack=True)


def again(turn: Turn, number: int, cause: str) -> None:
    """A rank has died before training began: nobody knows it yet, so it is started again, a few times."""
    job, rank = turn.job, turn.job.ranks[number]
    if rank.starts >= _STARTS or rank.node not in job.nodes:
        turn.end(False, f"rank {number} died before training began ({cause}), {rank.starts} times; see its log")
        return
    assert rank.node is not None
    clear(turn, number)
    if rank.hello is not None:
        turn.set(silent=job.silent + 1, first=None if number == 0 else job.first)
    fresh = Rank(node=rank.node, local_rank=rank.local_rank, host=rank.host, starts=rank.starts + 1)
    turn.set(ranks=turn.job.ranks.set(number, fresh))
    turn.record("restarted", rank=number, cause=cause, starts=fresh.starts)
    turn.say(f"rank {number} died before training began ({cause}), and is started again", "restarted")
    membership.launch(turn, rank.node, [number])


def _newcomer(turn: Turn, message: Hello) -> None:
    first = turn.job.first
    assert first is not None  # there are no newcomers before training begins
    wrong = difference(message, first)
    if wrong is None:
        _note_computing(turn, [message])
        change.consider(turn)
    else:
        fence(turn, message.rank, "refused", f"it is not like the running job: {wrong}")


def _all_up(turn: Turn) -> None:
    job = turn.job
    first = job.first
    assert first is not None
    for rank, each in sorted(job.ranks.items()):
        assert each.hello is not None
        wrong = difference(each.hello, first)
        if wrong is None and each.hello.start_step != first.start_step:
            wrong = f"its newest checkpoint is that of step {each.hello.start_step} instead of {first.start_step}"
        if wrong is not None:
            turn.end(False, f"rank {rank} is not like rank 0: {wrong}; "
                            "all ranks must get the same flags and the same checkpoint")
            return
    turn.cancel_timer("start")
    _note_computing(turn, [each.hello for each in job.ranks.values() if each.hello is not None])
    try:
        layout = decode(first.layout)
        layout.validate()
    except LayoutError as error:
        turn.end(False, f"rank 0 proposes a layout that is none: {error}")
        return
    if (profile := job.settings.profile_file) is None:
        _train(turn)
    else:
        turn.do(ReadCosts(profile, layout.units))


def _note_computing(turn: Turn, hellos: Iterable[Hello]) -> None:
    """Say which ranks compute on something else than the first one does: results may differ in their last bits."""
    first = turn.job.first
    assert first is not None
    others: dict[str, list[int]] = {}
    for each in hellos:
        if _computes_on(each) != _computes_on(first):
            others.setdefault(_computes_on(each), []).append(each.rank)
    for what, ranks in others.items():
        turn.record("unlike", ranks=sorted(ranks), computes_on=what, instead_of=_computes_on(first))
        turn.say(f"WARNING: ranks {sorted(ranks)} compute on {what}, others on {_computes_on(first)}: equal bits are "
                 "promised on one type of machine only", "unlike")


def _computes_on(hello: Hello) -> str:
    return hello.processor if hello.device == "cpu" else f"{hello.device}, {hello.processor}"


def costed(turn: Turn, event: Costed) -> None:
    """What units cost is known, or never will be. Whoever has taken over a job that trains goes on without."""
    job, costs = turn.job, event.costs
    if costs is not None and job.settings.dvfs is not None:
        costs = dataclasses.replace(costs, clocking=Clocking(job.settings.dvfs))
    if job.layout is not None:
        change.costed(turn, costs, event.problem)
    elif costs is None:
        turn.end(False, f"--elastic-profile {event.problem}", USAGE)
    else:
        turn.set(arrangement=replace(job.arrangement, costs=costs))
        if not job.silent:  # else one has died meanwhile, and all are looked at again when it is back
            _train(turn)


def _train(turn: Turn) -> None:
    first = turn.job.first
    assert first is not None
    use(turn, decode(first.layout))
    turn.set(
        ledger=Ledger(written=first.start_step, total=first.train_iters, previous_time=turn.now),
        trust=Trust(saves=(first.start_step,) if first.start_step else ()),
    )
    turn.record("started", world_size=len(turn.job.ranks), step=first.start_step, train_iters=first.train_iters)
    what = f"training from step {first.start_step + 1} to {first.train_iters}"
    if first.start_step >= first.train_iters:
        what = (f"nothing is left to train, as the checkpoint that the job begins with is of step {first.start_step} "
                f"and training ends at step {first.train_iters}: raise --train-iters to train on")
    turn.say(f"{len(turn.job.ranks)} ranks are up; {what}", "started")
    turn.send(Start(addresses={}, key=turn.job.key), turn.job.ranks)
    members = [node.member for node in sorted(turn.job.nodes.values(), key=lambda node: node.node_rank)]
    turn.set(members=tuple(members[: turn.job.seats]))
    watch.anew(turn)
    for node in turn.job.nodes:
        membership.tell_members(turn, node)
    early = turn.job.early
    turn.set(early=())
    for node, slots in early:
        membership.join(turn, node, slots)
    membership.start_spares(turn)


def difference(hello: Hello, first: Hello) -> str | None:
    """What a rank was told otherwise than the first one, for people; None if they can work together."""
    if hello.likeness == first.likeness:
        return None
    for name in sorted({*hello.flags, *first.flags}):
        theirs, ours = hello.flags.get(name), first.flags.get(name)
        if theirs != ours:
            return f"its --{name.replace('_', '-')} is {theirs} instead of {ours}"
    for name in sorted({*hello.versions, *first.versions}):
        theirs, ours = hello.versions.get(name), first.versions.get(name)
        if theirs != ours:
            return f"it has {name} {theirs} instead of {ours}"
    return "it would begin with another layout or number of steps; give it the same --nproc-per-node"
