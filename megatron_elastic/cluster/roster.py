"""Roster: every rank that a job ever had, where it runs, and how it stands."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_elastic.cluster.messages import AnyMessage, Finished, Hello, Message
from megatron_elastic.cluster.nodes import Node
from megatron_elastic.cluster.wire import AsyncWire, Unsendable


@dataclass(slots=True)
class Member:
    """One rank."""

    node: Node | None = None
    local_rank: int = 0
    host: int = 0
    """Its failure domain: the node's number, counting nodes that came later on."""
    joined: bool = True
    """It has had a part in training, if only as a spare."""
    standby: bool = False
    """It has no part in training and holds nothing that others need: it is not interrupted when somebody dies."""
    wire: AsyncWire[AnyMessage] | None = None
    hello: Hello | None = None
    returncode: int | None = None
    lost: bool = False
    dying: float | None = None
    """Since when it is being taken down by the kernel, while what killed it is not known yet."""
    stopped: float | None = None
    """Since when its process is there but does not run."""
    fenced: str | None = None
    """Why it was killed, in a word, if it was."""
    finished: Finished | None = None


class Roster(Mapping[int, Member]):
    """The members of a job by rank, and the nodes that run them. Ids are given in order and never reused.

    Args:
        world_size: ranks that the job begins with.
    """

    def __init__(self, world_size: int) -> None:
        self.nodes: list[Node] = []
        """Those whose agents are there."""
        self.launched = False
        self.torch_port = 0
        self._members = {rank: Member() for rank in range(world_size)}
        self._hosts = 0

    def __getitem__(self, rank: int) -> Member:
        return self._members[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    @property
    def alive(self) -> list[int]:
        """Ranks that have a part in the job."""
        return [rank for rank, member in self.items() if not member.lost and not member.standby]

    def add_node(self, ranks: Sequence[int], node: Node) -> None:
        """A node is ready to start ``ranks``, which are nobody else's. When all are taken, all nodes start theirs."""
        self.nodes.append(node)
        for local_rank, rank in enumerate(ranks):
            member = self._members[rank]
            member.node, member.local_rank, member.host = node, local_rank, min(ranks) // len(ranks)
        if all(member.node is not None for member in self.values()):
            self.launched, self._hosts = True, len(self.nodes)
            for each in self.nodes:
                each.launch({self[rank].local_rank: rank for rank in self.of(each)}, self.torch_port)

    def join_node(self, count: int, node: Node) -> list[int]:
        """A node comes to the running job: it starts ``count`` ranks that are to join. Returns their ids."""
        self.nodes.append(node)
        self._hosts += 1
        return self.spawn(node, range(count), self._hosts - 1)

    def spawn(self, node: Node, local_ranks: Iterable[int], host: int) -> list[int]:
        """Have a node start ranks that are to join; returns their ids."""
        ranks: dict[int, int] = {}
        for local_rank in local_ranks:
            rank = ranks[local_rank] = len(self._members)
            self._members[rank] = Member(node=node, local_rank=local_rank, host=host, joined=False, standby=True)
        node.launch(ranks, self.torch_port)
        return list(ranks.values())

    def of(self, node: Node) -> list[int]:
        """Ranks that a node's agent has started, or is to start."""
        return [rank for rank, member in self.items() if member.node is node]

    def addresses(self, ranks: Collection[int]) -> dict[int, bytes]:
        """Where the links of ranks start, as far as they have said so."""
        return {rank: hello.address for rank in ranks if (hello := self[rank].hello) is not None}

    def send(self, message: Message, ranks: Iterable[int]) -> None:
        """Send to every one of ``ranks`` that is connected."""
        for rank in ranks:
            if (wire := self[rank].wire) is not None:
                problem = wire.send(message)
                if isinstance(problem, Unsendable):  # ours, not that rank's
                    raise RuntimeError(str(problem))
