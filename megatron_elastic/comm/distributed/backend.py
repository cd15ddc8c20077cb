"""Backend: elastic groups under the backend name ``elastic`` of ``torch.distributed``: making and editing them.

In an elastic job the transport belongs to the trainer (``initialize``). Elsewhere
``dist.init_process_group("elastic")`` works like any backend: addresses are exchanged through torch's store.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_elastic.cluster.rank.control import InterruptFlag
from megatron_elastic.comm.device.devices import BACKENDS, Devices
from megatron_elastic.comm.distributed.process_group import ElasticProcessGroup
from megatron_elastic.comm.group import Group
from megatron_elastic.comm.host.arena import here
from megatron_elastic.comm.links.seal import KEY
from megatron_elastic.comm.registration import NAME, register
from megatron_elastic.comm.transport import Transport
from megatron_elastic.device import allowance

__all__ = [
    "NAME", "ElasticProcessGroup", "adopt_sub_groups", "create", "edit", "groups", "initialize", "keep", "register",
]  # fmt: skip


_given: list[ElasticProcessGroup] = []
"""The next default group, when somebody else owns its transport."""


def create(options: Any) -> ElasticProcessGroup:
    """A group as torch asks for it: the one that ``initialize`` has prepared, one of members of the default group,
    or one with links of its own.
    """
    if not hasattr(c10d, "_register_pg_in_world"):  # torch before 2.13 does not ask the default group for others
        adopt_sub_groups()
    if _given:
        return _given.pop()
    whole = c10d._get_default_group() if options.global_ranks_in_group else None
    if isinstance(whole, ElasticProcessGroup):
        made = whole.sub_group(options.global_ranks_in_group, options.group_id)
        assert made is not None, "torch asks members only"
        return made
    rank, size = options.group_rank, options.group_size
    crowded = allowance.crowded(int(os.environ.get("LOCAL_WORLD_SIZE", size)))
    transport = Transport(rank, InterruptFlag(), options.timeout.total_seconds(), crowded)
    options.store.set(f"place/{rank}", here())
    if {options.store.get(f"place/{peer}") for peer in range(size)} != {here().encode()}:
        transport.listen()
        if rank == 0:
            options.store.set("key", secrets.token_bytes(KEY))
        transport.trust(options.store.get("key"))
    options.store.set(f"address/{rank}", transport.address)
    transport.add_peers({peer: options.store.get(f"address/{peer}") for peer in range(size)})
    group, devices = Group(transport, 0, range(size)), Devices(transport.interrupt, options.timeout)

    def end() -> None:
        devices.close()
        transport.run(group.barrier())  # nobody may close while another still sends
        transport.close()

    return ElasticProcessGroup(group, devices, end)


def initialize(
    transport: Transport, ranks: Sequence[int], timeout: timedelta, backends: Mapping[str, str] = BACKENDS
) -> ElasticProcessGroup:
    """Make torch.distributed's default group over ``transport``, whose owner keeps and closes it. Talks to nobody.

    ``ranks``: the members' global ids, in order; the transport's own among them.
    ``backends``: type of device -> name of the backend of torch that does the collectives there.
    """
    register()
    devices = Devices(transport.interrupt, timeout, backends)
    _given.append(ElasticProcessGroup(Group(transport, 0, ranks), devices, devices.close))
    # Addresses come from the coordinator, so nothing needs a store that other processes can reach.
    dist.init_process_group(
        NAME, store=dist.HashStore(), rank=ranks.index(transport.rank), world_size=len(ranks), timeout=timeout
    )
    group = c10d._get_default_group()
    assert isinstance(group, ElasticProcessGroup)
    return group


def adopt_sub_groups() -> None:
    """Let sub-groups of an elastic default group be elastic, whatever backend is asked for, as since torch 2.13."""
    make = c10d._new_process_group_helper
    if make.__module__ == __name__:
        return

    def made(size: int, rank: int, ranks: Sequence[int], backend: Any, *args: Any, **others: Any) -> Any:
        elastic = bool(ranks) and isinstance(c10d._get_default_group(), ElasticProcessGroup)
        return make(size, rank, ranks, dist.Backend(NAME) if elastic else backend, *args, **others)

    c10d._new_process_group_helper = made  # type: ignore[assignment]


def groups() -> list[ElasticProcessGroup]:
    """Every elastic group this process has, the default group first."""
    return [pg for pg in c10d._world.pg_map if isinstance(pg, ElasticProcessGroup)]


def edit(changes: Mapping[ElasticProcessGroup, Sequence[int]]) -> None:
    """Give groups new member lists (global ids, in order), all in one edit, in place. Idempotent.

    Every member calls it between the same two epochs of the transport. torch.distributed numbers the default group's
    members 0..n-1, so ranks as torch sees them are positions in its list; inside, groups keep the job's global ids.
    """
    for process_group, ranks in changes.items():
        process_group.group.edit(ranks)
        if process_group.group.index < 0:
            process_group.abort()
    world = groups()[0]
    position = {rank: index for index, rank in enumerate(world.group.ranks)}
    for process_group in groups():
        c10d._world.pg_group_ranks[process_group] = {
            position[rank]: index for index, rank in enumerate(process_group.group.ranks)
        }


def keep(live: Sequence[int]) -> None:
    """Take every rank not in ``live`` out of every group of this process."""
    kept = set(live)
    edit({pg: [rank for rank in pg.group.ranks if rank in kept] for pg in groups()})
