"""Takeover: a new coordinator learns a job that another has begun, from the agents that are left and their ranks.

Training goes on meanwhile. Who has not come within a limit is lost with the old coordinator. Then the ranks are
interrupted once: their reports tell the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from immutables import Map
from msgspec.structs import replace

from megatron_elastic.cluster.messages import Committed, Damaged, Fence, Stop, TellLayout
from megatron_elastic.cluster.protocol import ledger, watch
from megatron_elastic.cluster.protocol.changes import arrangement, drain, membership
from megatron_elastic.cluster.protocol.effects import ReadCosts
from megatron_elastic.cluster.protocol.events import LayoutTold, News, NodeCame, Said, TookOver
from megatron_elastic.cluster.protocol.faults import damage, error, loss, recovery
from megatron_elastic.cluster.protocol.job import Gathering, Job, Ledger, Rank
from megatron_elastic.cluster.protocol.turn import Turn
from megatron_elastic.layout import Holdings, Layout, decode
from megatron_elastic.plan import NoLayout
from megatron_elastic.plan.work.order import foreseen


def took_over(turn: Turn, event: TookOver) -> None:
    """Begin to learn."""
    job = turn.job
    turn.set(
        term=event.term, name=event.name, members=event.members, epoch=event.epoch, newest_epoch=event.epoch,
        recorded=event.epoch, launched=True, silent=0, ranks=job.ranks.__class__(),
        gathering=Gathering(written=event.written, before=event.before, limit=event.limit),
    )  # fmt: skip
    turn.record("took_over", term=event.term)
    turn.say(f"this node coordinates from now on, at {event.address} (term {event.term})", "took_over")
    turn.set_timer("gather", event.limit)


def came(turn: Turn, event: NodeCame) -> None:
    """An agent tells what it knows."""
    job, hello, known, past = turn.job, event.hello, turn.job.gathering, event.hello.past
    assert known is not None
    if (wrong := membership.unlike(job, hello)) is not None and not hello.running:
        membership.turned_away(turn, event, wrong)
        return
    membership.add(turn, event.node, hello)
    if past is None or not past.torch_port:  # nothing was ever started there: it can join when the job is known
        turn.set(early=(*job.early, (event.node, hello.slots)))
        membership.tell_members(turn, event.node)
        return
    running = {each.rank: Rank(node=event.node, local_rank=each.local_rank, hello=each.hello)
               for each in hello.running}
    node = turn.job.nodes[event.node]
    known = known.came(event.node, running, past.in_force)
    known = replace(
        known, newest=max(known.newest, past.newest), written=max(known.written, past.recorded),
        committed=known.committed.update({_step(each): each for each in past.committed
                                          if _step(each) not in known.committed}),
        since=past.alone_since if known.since is None else min(known.since, past.alone_since),
        resigned=known.resigned or past.resigned, failed=(*known.failed, *past.failed),
        wanted=max(known.wanted, past.wanted, key=lambda each: -1 if each is None else each.number),
    )  # fmt: skip
    turn.set(
        nodes=turn.job.nodes.set(event.node, replace(node, ranks=tuple(running))),
        torch_port=past.torch_port, key=job.key or past.key, shapes=job.shapes.update(past.shapes),
        epoch=max(job.epoch, past.epoch), newest_epoch=max(job.newest_epoch, past.epoch),
        first=job.first or next((each.hello for each in hello.running if each.hello is not None), None),
        gathering=known,
    )  # fmt: skip
    if known.asked == event.node:
        turn.tell(event.node, TellLayout())
    if not _go_on_if_complete(turn):
        _wait_anew(turn)


def layout_told(turn: Turn, event: LayoutTold) -> None:
    """An agent tells the layout that its ranks are in, which may be a newer one since it came."""
    known = turn.job.gathering
    if known is None or not event.layout or (layout := decode(event.layout)).epoch < known.epoch:
        return
    turn.set(gathering=known.told(layout))
    if not _go_on_if_complete(turn):
        _wait_anew(turn)


def _step(each: Committed) -> tuple[int, int, str, str]:
    return each.vote.step, each.epoch, each.vote.loss.hex(), each.vote.grad_norm.hex()


def remember(turn: Turn, event: Said | News) -> None:
    """What is said meanwhile is heard when the job is known."""
    known = turn.job.gathering
    assert known is not None
    turn.set(gathering=replace(known, later=known.later.set(len(known.later), event)))


def remembered(before: Job, after: Job) -> tuple[Said | News, ...]:
    """What was said until the job became known just now."""
    return _later(before.gathering) if before.gathering is not None and after.gathering is None else ()


def _later(known: Gathering) -> tuple[Said | News, ...]:
    return tuple(known.later[i] for i in range(len(known.later)))


def late(turn: Turn) -> None:
    """Whoever has not come is lost; but if those who have cannot go on, the others have longer."""
    known = turn.job.gathering
    assert known is not None
    if known.layout is None or turn.job.first is None:
        if not known.long:
            turn.set(gathering=replace(known, long=True))
            turn.set_timer("gather", turn.job.settings.start_timeout)
            return
        turn.end(False, "no node that knows the job has come to its new coordinator; restart the job from its newest "
                        "checkpoint")
    elif not known.needed and not _enough(turn.job, known, known.layout):
        # They may be as slow to come as they may be silent.
        turn.set(gathering=replace(known, needed=True))
        turn.set_timer("gather", turn.job.settings.heartbeat_timeout)
    else:
        _go_on(turn, known, known.layout)


def _enough(job: Job, known: Gathering, layout: Layout) -> bool:
    """Whether those who have come have all state that the layout asks for, and can go on."""
    missing = [rank for rank in layout.ranks if rank in known.missing]
    try:
        job.policy.lose(layout, missing, Holdings.of(layout), layout.epoch, job.costs,
                        foreseen(job.settings.schedule))  # fmt: skip
    except NoLayout:
        return False
    return True


def _wait_anew(turn: Turn) -> None:
    """Somebody has come: the others have as long again. It may take this process longer than that to hear all."""
    job, known = turn.job, turn.job.gathering
    assert known is not None
    if known.long:
        if known.layout is None or job.first is None:
            return  # it knows nothing of the job; others have longer anyway
        turn.set(gathering=replace(known, long=False))
    heartbeat = job.settings.heartbeat_timeout
    if known.needed:
        turn.set_timer("gather", heartbeat)
    else:
        # Where nothing says that a node has failed, it may be silent as long as any other.
        turn.set_timer("gather", known.limit + (heartbeat if known.resigned else 0.0))


def _go_on_if_complete(turn: Turn) -> bool:
    """Nobody is waited for but those who may come: not for the coordinator's before, unless that one has resigned."""
    job, known = turn.job, turn.job.gathering
    if known is None or known.layout is None or job.first is None or _several(known.missing.values()):
        return False
    here = {node.address for node in job.nodes.values()}
    failed = known.before and not known.resigned and known.before not in here
    # A node that is about to join is in no layout yet; it has a seat, or nobody would have been elected.
    absent = set(job.members) - {node.member for node in job.nodes.values()}
    if max(len(absent), min(len(known.missing), 1)) > (1 if failed else 0):
        return False
    _go_on(turn, known, known.layout)
    return True


def _several(hosts: Iterable[int]) -> bool:
    """Whether these are more than one. Where they are, that is seen at once."""
    first = next(iter(hosts), None)
    return any(host != first for host in hosts)


def _go_on(turn: Turn, known: Gathering, layout: Layout) -> None:
    """Coordinate: the ranks' reports tell what is still to be known."""
    job = turn.job
    assert job.first is not None
    turn.cancel_timer("gather")
    missing = [rank for rank in (*layout.ranks, *layout.spares) if rank in known.missing]
    hosts = _hosts(turn, known, layout)
    turn.set(
        gathering=None, layout=layout, since=Map(dict.fromkeys(layout.ranks, 0)),
        hosts=1 + max([len(layout.hosts) - 1, *hosts.values()]),
        ranks=job.ranks.update(_ranks(known, layout, hosts)),
        ledger=Ledger(written=max(known.written, job.first.start_step), total=job.first.train_iters,
                      previous_time=turn.now),
        unsettled=job.unsettled.update(dict.fromkeys(layout.ranks)),
    )  # fmt: skip
    for each in known.running.values():
        if each.hello is not None:
            membership.introduced(turn, each.hello)
    membership.given(turn, known.newest)
    membership.tell_given(turn)
    for committed in sorted(known.committed.values(), key=lambda each: (each.vote.step, -each.epoch)):
        ledger.commit(turn, committed.vote, committed.epoch, len(layout.ranks), committed.time)
    error.recall(turn, known.failed)
    if known.wanted is not None:
        arrangement.recall(turn, known.wanted, layout)
    if (profile := job.settings.profile_file) is not None:
        turn.do(ReadCosts(profile, layout.units))
    ledger.recall(turn)  # steps since they came, which the layout's first rank would have told, if it is not lost
    for rank, each in known.running.items():
        if each.hello is None and not turn.job.ranks[rank].lost:
            turn.set_timer(f"coming {rank}", job.settings.start_timeout)
    if drain.end_if_all_leave(turn):
        return
    _send_away(turn, layout)  # who comes again, so that the job does not end though all others leave
    since = turn.now if known.since is None else known.since
    if missing:
        loss.lose(turn, missing, f"node {layout.host_of(missing[0])} lost", since)
    else:
        recovery.interrupt(turn, (), None, since)
    for said in _later(known):  # by whom does not matter, or whether that one has gone since
        if isinstance(said, Said) and isinstance(said.message, Damaged):
            damage.noted(turn, said.message)
    watch.anew(turn)
    early = turn.job.early
    turn.set(early=())
    for node, slots in early:
        if node in turn.job.nodes:
            membership.join(turn, node, slots)


def _send_away(turn: Turn, layout: Layout) -> None:
    """Some run that were cut off, and taken for dead meanwhile. A node of which all were comes again."""
    lost = frozenset(layout.lost)
    for number, node in turn.job.nodes.items():
        cut_off = [rank for rank in node.ranks if rank in lost]
        if cut_off and len(cut_off) == len(node.ranks):
            turn.tell(number, Stop(ok=False, reason="its ranks are no longer part of the job", again=True))
            turn.set(nodes=turn.job.nodes.delete(number), leaving=turn.job.leaving - {number})
        else:
            for rank in cut_off:
                turn.tell(number, Fence(rank=rank))


def _ranks(known: Gathering, layout: Layout, hosts: Mapping[int | None, int]) -> Iterable[tuple[int, Rank]]:
    """All ranks there ever were, as far as that matters."""
    lost = frozenset(layout.lost)
    told = {*layout.ranks, *layout.spares, *lost}
    for rank in told:
        each = known.running.get(rank, Rank())
        yield rank, replace(each, host=layout.host_of(rank), lost=rank in lost)
    for rank, each in known.running.items():
        if rank not in told:
            yield rank, replace(each, host=hosts[each.node], joined=False, standby=True)


def _hosts(turn: Turn, known: Gathering, layout: Layout) -> dict[int | None, int]:
    """The failure domain of each node that runs ranks: the layout's, or a new one if none of its ranks is in that."""
    hosts: dict[int | None, int] = {}
    new, told = len(layout.hosts), {*layout.ranks, *layout.spares}
    running = {each.node for each in known.running.values()}
    for node, there in turn.job.nodes.items():
        ranks = [rank for rank in there.ranks if rank in told]
        if node in running:
            hosts[node] = layout.host_of(ranks[0]) if ranks else new
            new += not ranks
    return hosts
