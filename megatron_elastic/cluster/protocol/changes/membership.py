"""Membership: nodes come, and start ranks."""

from __future__ import annotations

from collections.abc import Iterable

from immutables import Map
from msgspec.structs import replace

from megatron_elastic.cluster.messages import AgentHello, Given, Hello, Launch, Members, Seat, Stop
from megatron_elastic.cluster.protocol import ledger
from megatron_elastic.cluster.protocol.changes import arrangement
from megatron_elastic.cluster.protocol.effects import Tell
from megatron_elastic.cluster.protocol.events import NodeCame, Seated
from megatron_elastic.cluster.protocol.job import Job, Node, Rank
from megatron_elastic.cluster.protocol.turn import Turn

_YOUNG = 30.0
"""Seconds after its start in which a rank's death says something about its node."""
_LONGEST = 300.0
"""Seconds that a node is left out at most."""


def runs_on(job: Job, rank: int, node: int) -> bool:
    """Whether ``rank`` was started by this node's agent."""
    return rank in job.ranks and job.ranks[rank].node == node


def came(turn: Turn, event: NodeCame) -> None:
    """An agent is ready. When every rank of the beginning has one, all are launched.

    The ranks of a node that comes to a running job join it, under new ids. Raises Diverged.
    """
    if (past := event.hello.past) is not None:
        given(turn, past.newest)
        if (layout := turn.job.layout) is not None:
            # Ranks that are no longer part of the job may have finished a step that the others are asked about now.
            for told in past.committed:
                ledger.commit(turn, told.vote, told.epoch, len(layout.ranks), told.time)
    job, hello = turn.job, event.hello
    if hello.running:
        # Others have taken over what its ranks did, while it had no coordinator, or had not heard that it may go.
        turn.do(Tell(event.node, Stop(ok=hello.leaving, reason="its ranks are no longer part of the job", again=True)))
        return
    if (wrong := unlike(job, hello)) is not None:
        if job.launched:
            turned_away(turn, event, wrong)
        else:
            turn.end(False, wrong)
        return
    add(turn, event.node, hello)
    first = hello.node_rank * hello.slots
    if job.settings.elastic and (job.launched or first >= job.world_size):
        if job.layout is None:
            turn.set(early=(*job.early, (event.node, hello.slots)))
        else:
            join(turn, event.node, hello.slots)
        return
    last = first + hello.slots
    _take_place(turn, event.node, range(first, min(last, job.world_size) if job.settings.spares else last))


def unlike(job: Job, hello: AgentHello) -> str | None:
    """What an agent was told otherwise than this coordinator, for people; None if they can work together."""
    ours, theirs = job.settings.heartbeat_timeout, hello.heartbeat_timeout
    if theirs == ours:
        return None
    return (f"--elastic-heartbeat-timeout is {ours:g} s where the job is coordinated and {theirs:g} s on node "
            f"{hello.node_rank}; give every node the same flags")


def turned_away(turn: Turn, event: NodeCame, why: str) -> None:
    """A node cannot be one of a running job, which goes on without it."""
    turn.record("refused", reason=why)
    turn.say(f"node {event.hello.node_rank} is turned away: {why}", "refused")
    turn.do(Tell(event.node, Stop(ok=False, reason=why)))


def add(turn: Turn, node: int, hello: AgentHello) -> None:
    """An agent is there."""
    there = Node(node_rank=hello.node_rank, host=hello.host, slots=hello.slots, address=hello.address,
                 member=hello.member, broken=tuple(hello.broken))
    turn.set(nodes=turn.job.nodes.set(node, there))
    if hello.here:
        turn.set(here=node)
    if hello.leaving:
        turn.set(leaving=turn.job.leaving | {node})


def introduced(turn: Turn, hello: Hello) -> None:
    """Write down which process a rank is."""
    turn.record("hello", rank=hello.rank, pid=hello.pid, host=hello.host, device=hello.device,
                flops_per_token=hello.flops_per_token, kernels=hello.kernels)


def given(turn: Turn, newest: int) -> None:
    """Ids up to ``newest`` were given. Who had one that is not known here is dead, and others may remember that."""
    known = turn.job.ranks
    turn.set(ranks=known.update({rank: Rank(joined=False, standby=True, lost=True)
                                 for rank in range(newest + 1) if rank not in known}))


def tell_given(turn: Turn, without: int | None = None) -> None:
    """All agents but that of node ``without`` are to know which ids were given."""
    newest = max(turn.job.ranks)
    for node in turn.job.nodes:
        if node != without:
            turn.tell(node, Given(newest=newest))


def tell_members(turn: Turn, node: int) -> None:
    """An agent is to know how it learns who coordinates, when this coordinator is lost."""
    job = turn.job
    turn.tell(node, Members(addresses=list(job.members), name=job.name, term=job.term))


def seated(turn: Turn, event: Seated) -> None:
    """A node is a member of the embedded store."""
    node = turn.job.nodes.get(event.node)
    if node is not None and set(event.members) != set(turn.job.members):
        turn.say(f"node {node.node_rank} is given a lost member's seat in the store")
    turn.set(members=event.members)
    turn.tell(event.node, Seat(addresses=list(event.members)))


def _take_place(turn: Turn, node: int, ranks: range) -> None:
    job = turn.job
    taken = [rank for rank in ranks if rank not in job.ranks or job.ranks[rank].node is not None]
    if taken:
        turn.end(False, f"an agent wants to start ranks {taken}, which are another node's or outside the world size; "
                        "give every node the same --nnodes and --nproc-per-node and its own --node-rank")
        return
    host = job.nodes[node].node_rank
    _place(turn, node, ((rank, replace(job.ranks[rank], node=node, local_rank=local, host=host))
                        for local, rank in enumerate(ranks)))
    turn.set(unplaced=turn.job.unplaced - len(ranks))
    job = turn.job
    if job.unplaced:
        return
    turn.set(launched=True, hosts=len(job.nodes))
    for each, value in job.nodes.items():
        if not value.launched:  # else it is there since before another was lost
            turn.set(nodes=turn.job.nodes.set(each, replace(value, launched=True)))
            launch(turn, each, value.ranks)
    if not job.settings.elastic:
        turn.cancel_timer("start")


def join(turn: Turn, node: int, slots: int) -> None:
    """A node comes to the running job: it starts ranks that are to join."""
    turn.set(hosts=turn.job.hosts + 1)
    tell_members(turn, node)
    if turn.job.arrangement.number:
        turn.tell(node, arrangement.wanted(turn.job))
    broken = turn.job.nodes[node].broken
    if ranks := spawn(turn, node, [slot for slot in range(slots) if slot not in broken], turn.job.hosts - 1):
        turn.say(f"ranks {ranks} are started on a node that has come", "spawned")


def start_spares(turn: Turn) -> None:
    """Nodes of the beginning start the ranks that have no place in it: they can join at once when others are lost."""
    for number, node in turn.job.nodes.items():
        if missing := range(len(node.ranks), node.slots):
            ranks = spawn(turn, number, missing, turn.job.ranks[node.ranks[0]].host)
            turn.say(f"ranks {ranks} are started as spares", "spawned")


def spawn(turn: Turn, node: int, local_ranks: Iterable[int], host: int) -> list[int]:
    """Have a node start ranks that are to join; returns their ids."""
    if not (local_ranks := list(local_ranks)):
        return []
    first = 1 + max(turn.job.ranks)
    ranks = {
        first + i: Rank(node=node, local_rank=local_rank, host=host, joined=False, standby=True, spawned=turn.now)
        for i, local_rank in enumerate(local_ranks)
    }
    _place(turn, node, ranks.items())
    tell_given(turn, node)  # first: a new coordinator that nobody has told of them would give their ids to others
    launch(turn, node, ranks)
    for rank in ranks:
        turn.set_timer(f"coming {rank}", turn.job.settings.start_timeout)
    turn.record("spawned", ranks=list(ranks), node=turn.job.nodes[node].node_rank)
    return list(ranks)


def _place(turn: Turn, node: int, ranks: Iterable[tuple[int, Rank]]) -> None:
    placed = dict(ranks)
    job = turn.job
    there = job.nodes[node]
    turn.set(
        ranks=job.ranks.update(placed),
        nodes=job.nodes.set(node, replace(there, ranks=(*there.ranks, *placed))),
    )


def launch(turn: Turn, node: int, ranks: Iterable[int]) -> None:
    """Have a node start ranks that were placed on it."""
    job = turn.job
    slots = {job.ranks[rank].local_rank: rank for rank in ranks}
    first = 0 if job.layout is None else sum(rank < job.world_size for rank in job.layout.hosts[0])
    turn.tell(node, Launch(ranks=slots, world_size=job.world_size, first_host=first, torch_port=job.torch_port))


def respawn(turn: Turn, rank: int) -> None:
    """Start a rank in place of one whose process has ended, if that is wanted.

    The next one too will probably die where others have died soon after they were started: it is started later.
    """
    job, ended = turn.job, turn.job.ranks[rank]
    node = None if ended.node is None else job.nodes.get(ended.node)
    wanted = job.settings.respawn and job.layout is not None and ended.fenced != "refused"
    if node is None or ended.node is None or ended.node in job.leaving or not wanted:
        return
    if ended.local_rank in node.broken:
        return
    young = not ended.joined or (ended.spawned is not None and turn.now - ended.spawned < _YOUNG)
    strikes = node.strikes + 1 if young else 0
    turn.set(nodes=job.nodes.set(ended.node, replace(node, strikes=strikes)))
    if not strikes:
        replaced(turn, rank)
        return
    delay = min(2.0 ** (strikes - 1), _LONGEST)
    turn.record("left_out", node=node.node_rank, seconds=delay, deaths=strikes)
    turn.say(f"rank {rank} has died soon after it was started on node {node.node_rank}, {strikes} in a row: the next "
             f"one is started there in {delay:g} s", "left_out")
    turn.set_timer(f"respawn {rank}", delay)


def broke(turn: Turn, rank: int, device: str, reason: str) -> None:
    """The device of a rank has failed: none is started on it any more, as long as the node's agent is there."""
    job, place = turn.job, turn.job.ranks[rank]
    node = None if place.node is None else job.nodes.get(place.node)
    if node is None or place.node is None or place.local_rank in node.broken:
        return
    turn.set(nodes=job.nodes.set(place.node, replace(node, broken=(*node.broken, place.local_rank))))
    turn.record("device_out", rank=rank, node=node.node_rank, local_rank=place.local_rank, device=device, reason=reason)


def replaced(turn: Turn, rank: int) -> None:
    """Start a rank in place of one that has died, if its node is there."""
    ended = turn.job.ranks[rank]
    if ended.node in turn.job.nodes and ended.node not in turn.job.leaving:
        assert ended.node is not None
        new = spawn(turn, ended.node, [ended.local_rank], ended.host)
        turn.say(f"rank {new[0]} is started in place of rank {rank}", "spawned")


def leave(turn: Turn, node: Node) -> None:
    """Before training begins another agent can take the place of one that has gone; its ranks begin anew."""
    job = turn.job
    there = [job.ranks[rank] for rank in node.ranks]
    ranks: Map[int, Rank] = job.ranks.update({rank: Rank() for rank in node.ranks})
    turn.set(ranks=ranks, unplaced=job.unplaced + len(node.ranks), launched=job.launched and not node.ranks,
             silent=job.silent + sum(rank.hello is not None for rank in there),
             first=None if 0 in node.ranks else job.first)
    if job.launched and node.ranks:
        turn.say(f"node {node.node_rank} is lost before training has begun; another one with its --node-rank can take "
                 f"its place for {job.settings.start_timeout:g} s (--elastic-start-timeout)")
        turn.set_timer("start", job.settings.start_timeout)
