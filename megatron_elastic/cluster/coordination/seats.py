"""Seats: the places among the members of an embedded store. Nodes that have none get those of lost members."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from megatron_elastic.cluster.coordination.coordinator import Coordinator
from megatron_elastic.cluster.leadership import Deposed, Member
from megatron_elastic.cluster.protocol.events import Seated
from megatron_elastic.cluster.protocol.job import Node


async def keep(store: Member, coordinator: Coordinator, seats: int, every: float) -> None:
    """Give away the seats of lost members, as long as this process leads; looks for them every so many seconds."""
    told: set[int] = set()
    while True:
        job = coordinator.job
        if job.gathering is None and job.layout is not None and job.outcome is None:
            nodes, members = dict(job.nodes), store.members()
            lost, by = vacancy(members, nodes.values(), seats)
            if by is not None:
                try:
                    await store.replace(lost, by)
                except Deposed:
                    return
                members = store.members()
            # The leader before may have given one a seat that it could not tell any more.
            for number, node in nodes.items():
                if node.member in members and number not in told:
                    told.add(number)
                    coordinator.post(Seated(now=time.time(), node=number, members=tuple(members)))
        await asyncio.sleep(every)


def vacancy(members: Iterable[str], nodes: Iterable[Node], seats: int) -> tuple[str | None, str | None]:
    """Which member has been lost, and which node's address can take its place; None where there is none."""
    members, there = list(members), [node.member for node in nodes if node.member]
    lost = next((member for member in members if member not in there), None)
    if lost is None and len(members) >= seats:
        return None, None
    return lost, next((member for member in there if member not in members), None)
