"""Exchange: what the planner thinks that a step sends, against what real ranks send; and what it makes of that."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.comm.operation import Sending
from megatron_elastic.comm.tag import Channel
from megatron_elastic.layout import Layout, gpt_units
from megatron_elastic.numerics.exact import ExactAccumulator
from megatron_elastic.plan import everything, lose
from megatron_elastic.plan.choice import best, step, ways
from megatron_elastic.plan.costs.cost import Costs, ProfileError, UnitCost
from megatron_elastic.plan.costs.exchange import Exchange, Link
from megatron_elastic.plan.growth import admit, approach, even
from megatron_elastic.plan.policies import POLICIES
from megatron_elastic.state.buffer import Member, UnitBuffer, shape_of
from megatron_elastic.state.optimizer import Adam, Rates, Update
from megatron_elastic.state.partition import Partition
from megatron_elastic.state.reduction import Reduction
from megatron_elastic.state.replay import GradientReplay
from megatron_elastic.state.slice import SliceState
from megatron_elastic.state.store import StateStore
from tests import world
from tests.world import Peer

REAL = Exchange(sum_bytes=8, gradient_bytes=4, weight_bytes=4)
SIZES = (70, 300, 33, 128)
"""Elements of each unit's parameters."""
ADAM = Adam(beta1=0.9, beta2=0.95, eps=1e-8)


# ---- what is really sent -----------------------------------------------------------------------------


def _grid(**others: Any) -> Layout:
    values: dict[str, Any] = {
        "tp": 1, "pp": 2, "dp": 2, "stage_units": [[0, 1], [2, 3]],
        "units": ["embedding", "layer.0", "layer.1", "head"], "num_grains": 4, "num_slices": 4, "replicas": 1,
    }  # fmt: skip
    return Layout.grid(**(values | others))


def _lost() -> Layout:
    """One of three cells of a stage is lost, so that slices and replicas are uneven."""
    before = _grid(pp=1, dp=4, stage_units=[[0, 1, 2, 3]], ranks_per_host=3)
    return replace(lose(before, [1], everything(before).without([1]), 1), epoch=0)


def _growing() -> Layout:
    """A cell follows as a shadow, and gets the parameters of a stage that it is not in yet."""
    before = _grid(pp=2, dp=1, num_slices=3, ranks_per_host=1)
    grown = admit(before, {2: 2, 3: 2}, 0)
    return approach(grown, even(grown, 0), 0)


LAYOUTS: dict[str, Callable[[], Layout]] = {
    "one host": _grid,
    "two hosts": lambda: _grid(ranks_per_host=2),
    "three of a host": lambda: _grid(ranks_per_host=3, num_slices=3),
    "tied": lambda: _grid(stage_units=[[0, 1], [0, 2, 3]], ranks_per_host=2),
    "a cell was lost": _lost,
    "cells follow": _growing,
    "experts": lambda: _grid(
        pp=1, ep=2, units=["embedding", "layer.0", "experts.0", "head"], stage_units=[[0, 1, 2, 3]], ranks_per_host=2,
    ),
}  # fmt: skip


@pytest.mark.job
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_sends_what_the_planner_counts(name: str) -> None:
    layout = LAYOUTS[name]()

    def body(peer: Peer) -> None:
        if peer.rank in layout.places:
            sent, sizes = _one_step(peer, layout)
            counted = REAL.traffic(layout, sizes)[peer.rank]
            assert counted.gradients.sent == _by_side(layout, peer.rank, sent, Channel.GRADIENT, Channel.REPLAY)
            assert counted.weights.sent == _by_side(layout, peer.rank, sent, Channel.PARAMETER)
        peer.leave()

    world.run(body, size=4)


def _one_step(peer: Peer, layout: Layout) -> tuple[Counter[tuple[int, Channel]], list[int]]:
    """Exchange gradients and weights; returns the bytes to each rank by channel, and the elements of each unit."""
    partitions, units = {}, {}
    for unit, size in enumerate(SIZES):
        member = Member(torch.nn.Parameter(torch.ones(size)), 0)
        partitions[unit] = Partition(shape_of("a", [member]), layout.num_slices, 0, 1)
        if unit in layout.held_by(peer.rank):
            units[unit] = UnitBuffer(partitions[unit], ExactAccumulator(4))
            units[unit].bind([member], fill=True)
            units[unit].zero()
    store = StateStore(partitions, ADAM, peer.transport)
    for unit, k in (*layout.owned(peer.rank), *layout.replicated(peer.rank)):
        store.take({(unit, k): SliceState(torch.ones(partitions[unit].slice_size), ADAM)})
    sent = _recorded(peer)
    reduction = Reduction(layout, peer.transport, units, store, ExactAccumulator(4))
    reduction.reduce_gradients(layout.num_grains)
    GradientReplay(layout, peer.transport, store, torch.float32).before_vote()
    store.apply(Update(1, 0.5, (Rates(0.01, 0.0),)))
    reduction.gather_parameters()
    return sent, [partitions[unit].size for unit in range(len(SIZES))]


def _recorded(peer: Peer) -> Counter[tuple[int, Channel]]:
    """Bytes that the transport is given to send from now on, by rank and channel."""
    sent: Counter[tuple[int, Channel]] = Counter()
    one, several = peer.transport.send, peer.transport.send_all

    def send(to: int, channel: Channel, coordinate: int, buffer: torch.Tensor) -> Sending:
        sent[to, channel] += buffer.nbytes
        return one(to, channel, coordinate, buffer)

    def send_all(to: Sequence[int], channel: Channel, coordinate: int, buffer: torch.Tensor) -> Sequence[Sending]:
        for each in to:
            sent[each, channel] += buffer.nbytes
        return several(to, channel, coordinate, buffer)

    peer.transport.send, peer.transport.send_all = send, send_all  # type: ignore[method-assign,assignment]
    return sent


def _by_side(layout: Layout, rank: int, sent: Counter[tuple[int, Channel]], *channels: Channel) -> list[float]:
    """Bytes to ranks of the same host, and to others."""
    sides = [0.0, 0.0]
    for (other, channel), size in sent.items():
        if channel in channels:
            sides[layout.host_of(other) != layout.host_of(rank)] += size
    return sides


def test_what_is_sent_is_received() -> None:
    for make in LAYOUTS.values():
        traffic = REAL.traffic(make(), SIZES).values()
        for kind in ("gradients", "weights"):
            for far in (0, 1):
                sent = sum(getattr(each, kind).sent[far] for each in traffic)
                assert sent == pytest.approx(sum(getattr(each, kind).received[far] for each in traffic))


# ---- what that takes, and what is made of it ---------------------------------------------------------


def _costs(layout: Layout, **exchange: Any) -> Costs:
    """Layers of a million parameters, 10 ms forward and 20 backward; 1 GB/s between hosts, 100 GB/s within them."""
    layer = UnitCost(10.0, 20.0, 6_000_000, 12_000_000, 0)
    nothing = UnitCost(0.0, 0.0, 0, 0, 0)
    values = {"sum_bytes": 4, "gradient_bytes": 4, "weight_bytes": 2, "near_bandwidth": 100e9, "near_latency_ms": 0.0}
    return Costs(
        tuple(layer if name.startswith("layer") else nothing for name in layout.units),
        bandwidth=1e9, latency_ms=0.0, exchange=Exchange(**(values | exchange)),
    )  # fmt: skip


def _job(pp: int = 4, dp: int = 4, replicas: int = 1) -> Layout:
    units, stages = gpt_units(10 * pp, pp, tied=False, positions=False)
    return Layout.grid(tp=1, pp=pp, dp=dp, stage_units=stages, units=units, num_grains=8 * dp, num_slices=dp,
                       replicas=replicas, ranks_per_host=8)  # fmt: skip


def test_two_cells_share_a_stage() -> None:
    """Each owns half, sends sums of the other half, means of its own half to the replica, and its weights."""
    layout = _job(pp=1, dp=2)
    for per_host, bandwidth in ((None, 100e9), (1, 1e9)):
        here = _costs(layout, ranks_per_host=per_host, memory_bandwidth=1e12).phases(layout)[0]
        assert here.reduce_ms == pytest.approx(10 * (4e6 / 2 + 4e6 / 2) / bandwidth * 1e3)
        assert here.spread_ms == pytest.approx(10 * 2e6 / 2 / bandwidth * 1e3 + 10 * 2 * 6e6 / 1e12 * 1e3)


def test_a_link_of_a_host_is_like_others_where_nothing_is_said() -> None:
    assert Exchange(4, 4, 2).near(Link(1e9, 0.5)) == Link(1e9, 0.5)


@settings(deadline=None, max_examples=25)
@given(per_host=st.sampled_from([1, 3, 4, 8, 16]), slow=st.sampled_from([1.0, 10.0, 100.0]), data=st.data())
def test_nothing_is_slower_than_what_moves_nothing(per_host: int, slow: float, data: st.DataObject) -> None:
    """Whatever links carry, a job comes to no slower layout than those of policies that move no layer."""
    layout = _job(replicas=3)
    costs = _costs(layout, ranks_per_host=per_host)
    costs = replace(costs, bandwidth=25e9 / slow)
    lost = data.draw(st.lists(st.sampled_from(layout.ranks), min_size=1, max_size=3, unique=True))
    times = {}
    for name in ("elastic", "recycle", "column"):
        (found,) = POLICIES[name].foresee(layout, lost, costs, ["split"]).layouts
        times[name] = step(found, costs, ["split"])
    assert times["elastic"] <= min(times.values()) * 1.003, times


def test_a_cell_of_another_host_joins_only_if_links_are_fast() -> None:
    before = _job()
    after = even(lose(before, [4], everything(before).without([4]), 1), 1)
    fast, costs = _costs(before), replace(_costs(before), bandwidth=1e8)
    assert best(ways(after, fast, False, ["split"])).name == "cells"
    slow = best(ways(after, costs, False, ["split"]))
    for stage in slow.layout.stages:
        assert len({after.host_of(cell.leader) for cell in stage.cells}) == 1
    assert step(slow.layout, costs, ["split"]) < step(after, costs, ["split"]), "layers moved"


def test_a_profile_has_the_exchange() -> None:
    layout = _job(pp=1, dp=2)
    costs = _costs(layout, ranks_per_host=4)
    assert Costs.from_json(costs.to_json(layout.units), layout.units) == costs
    for change, message in (
        ({"sum_bytes": None}, "has no 'sum_bytes'"), ({"sum_bytes": 0}, "sum_bytes must be positive"),
        ({"colour": 1}, "must be an object of sum_bytes"), ({"near_latency_ms": -1}, "not negative"),
        ({"ranks_per_host": 1.5}, "ranks_per_host must be a whole number"), ({"sum_bytes": 10**400}, "not negative"),
    ):  # fmt: skip
        data = json.loads(costs.to_json(layout.units))
        for key, value in change.items():
            data["exchange"].pop(key, None)
            data["exchange"] |= {} if value is None else {key: value}
        with pytest.raises(ProfileError, match=message):
            Costs.from_json(json.dumps(data), layout.units)
