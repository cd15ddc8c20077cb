"""Nodes: what the coordinator asks of the agents that start the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from megatron_elastic.cluster.messages import AnyMessage, Fence, Launch, Stop
from megatron_elastic.cluster.wire import AsyncWire


class Node(Protocol):
    """The agent of a node. The coordinator's own agent is one as it is."""

    def launch(self, ranks: Mapping[int, int], torch_port: int) -> None:
        """Start ranks, given by their local rank: at the start all of the node's, later some in place of dead ones."""

    def kill(self, rank: int) -> None:
        """End one rank at once."""


class RemoteNode:
    """The agent at the other end of a connection."""

    def __init__(self, wire: AsyncWire[AnyMessage], world_size: int) -> None:
        self._wire = wire
        self._world_size = world_size

    def launch(self, ranks: Mapping[int, int], torch_port: int) -> None:
        """Start ranks, given by their local rank."""
        self._wire.send(Launch(ranks=dict(ranks), world_size=self._world_size, torch_port=torch_port))

    def kill(self, rank: int) -> None:
        """End one rank at once."""
        self._wire.send(Fence(rank=rank))

    def stop(self, ok: bool, reason: str) -> None:
        """Tell that the job is over for this node."""
        self._wire.send(Stop(ok=ok, reason=reason))
