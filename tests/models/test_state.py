"""Slices of parameters and optimizer state: how they are cut, updated, voted on, and moved between processes."""

from __future__ import annotations

import math
import os
import random
import signal
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.cluster.rank.control import Interrupted
from megatron_elastic.comm.group import Group, place_in_tree
from megatron_elastic.comm.tag import Channel
from megatron_elastic.layout import Holdings, Layout, Transfer, transfers
from megatron_elastic.numerics.exact import Accumulator, ExactAccumulator, FloatAccumulator, GradientOverflow
from megatron_elastic.numerics.kernels import block_squares
from megatron_elastic.observe.dials import WORDS, Dials, read
from megatron_elastic.state.buffer import Member, UnitBuffer, shape_of
from megatron_elastic.state.copying import fetch, serve
from megatron_elastic.state.optimizer import Adam, Rates, Update
from megatron_elastic.state.partition import Partition
from megatron_elastic.state.reduction import Reduction
from megatron_elastic.state.replay import GradientReplay, StateReplay
from megatron_elastic.state.slice import SliceState
from megatron_elastic.state.store import StateStore
from megatron_elastic.state.vote import Ballot, add_up, count, vote
from tests import world
from tests.tiers.examples import examples
from tests.world import Peer

ADAM = Adam(beta1=0.9, beta2=0.95, eps=1e-8)


def _members(sizes: Sequence[tuple[int, bool, bool]], seed: int = 0) -> list[Member]:
    """(elements, in group 1, sharded) -> parameters with values of their own."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Member(torch.nn.Parameter(torch.randn(size, generator=generator)), int(group), int(sharded))
        for size, group, sharded in sizes
    ]


def _buffer(
    members: Sequence[Member], num_slices: int = 1, tp: int = 0, accumulator: Accumulator | None = None
) -> UnitBuffer:
    """A unit's buffer that has taken the parameters over."""
    buffer = UnitBuffer(Partition(shape_of("a", members, 2), num_slices, tp, 2), accumulator or ExactAccumulator(1))
    buffer.bind(members, fill=True)
    buffer.zero()
    return buffer


# ---- buffers ------------------------------------------------------------------------------

SIZES = st.lists(st.tuples(st.integers(1, 200), st.booleans(), st.booleans()), min_size=1, max_size=8)


def test_a_buffer_and_its_parameters_are_let_go_of_at_once() -> None:
    """The collector does not see where hooks of parameters lead, so what leaves a rank would stay for ever."""
    done: list[Member] = []
    members = _members([(64, False, False)])
    buffer = _buffer(members)
    (member,) = members
    twin = buffer.twin(member.parameter)
    buffer.expect(1, partial(done.append, member))  # leads to all that is held, as a reduction does
    (member.parameter.sum() + twin.sum()).backward()
    assert done == members
    left = [weakref.ref(each) for each in (buffer, member.parameter, twin)]
    del buffer, member, members, twin, done
    assert [each() for each in left] == [None, None, None]


@given(SIZES, st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_every_element_is_in_exactly_one_slice(sizes: list[tuple[int, bool, bool]], num_slices: int) -> None:
    members = _members(sizes)
    values = [member.parameter.detach().clone() for member in members]
    buffer = _buffer(members, num_slices)
    for member, value in zip(members, values, strict=True):
        assert torch.equal(member.parameter, value)
    assert buffer.params.numel() == num_slices * buffer.partition.slice_size
    # Mark each slice through its view; what the parameters show then says which slice they are in.
    counts = torch.zeros_like(buffer.params)
    for k in range(num_slices):
        buffer.slice_of(counts, k).add_(1)
    assert (counts == 1).all()
    buffer.params.copy_(torch.arange(buffer.params.numel()))
    seen = torch.cat([member.parameter.detach() for member in members])
    assert len(set(seen.tolist())) == sum(size for size, _, _ in sizes)
    for parameter, start in buffer.bound:
        assert start % 32 == 0
        assert parameter[0] == start


@given(SIZES, st.integers(1, 9))
@settings(deadline=None, max_examples=60)
def test_segments(sizes: list[tuple[int, bool, bool]], num_slices: int) -> None:
    """They treat every parameter as it wants, whoever asks; only who counts depends on the tensor-parallel index."""
    members = _members(sizes)
    partitions = [Partition(shape_of("a", members, 2), num_slices, tp, 2) for tp in (0, 1)]
    groups = torch.full((partitions[0].size,), math.nan)
    counted = torch.zeros_like(groups)
    for k in range(num_slices):
        first, second = (partition.segments(k) for partition in partitions)
        assert [(s.start, s.end, s.group) for s in first] == [(s.start, s.end, s.group) for s in second]
        assert all(segment.counted for segment in first)
        ends = [bound for segment in first for bound in (segment.start, segment.end)]
        assert ends == sorted(ends)
        assert all(0 <= bound <= partitions[0].slice_size for bound in ends)
        for segment in first:
            partitions[0].slice_of(groups, k)[segment.start : segment.end] = float(segment.group)
        for segment in second:
            partitions[1].slice_of(counted, k)[segment.start : segment.end] = float(segment.counted)
    for member, start in zip(members, partitions[0].starts, strict=True):
        here = slice(start, start + member.parameter.numel())
        assert (groups[here] == float(member.group)).all()
        assert (counted[here] == float(member.runs)).all()


def test_gradients_are_summed() -> None:
    members = _members([(40, True, False), (3, False, False)])
    buffer = _buffer(members, 2, accumulator=FloatAccumulator())
    for factor in (1.0, 2.0):
        (factor * sum(member.parameter.sum() for member in members)).backward()  # type: ignore[union-attr]
    assert all(member.parameter.grad is None for member in members)
    assert buffer.sums.sum() == 3 * 43
    buffer.zero()
    assert not buffer.sums.any()


def test_who_has_a_gradient_that_is_too_large_is_told() -> None:
    """By its name, whichever use of the parameter it is that has it."""
    members = [Member(torch.nn.Parameter(torch.ones(3)), 0, name=f"{name} of layer.7") for name in ("bias", "weight")]
    buffer = _buffer(members, 2)
    weight = members[1].parameter
    for leaf in (weight, buffer.twin(weight)):
        with pytest.raises(GradientOverflow, match=r"the gradient of weight of layer\.7 lies outside ±8\.38861e\+06"):
            (2.0**24 * leaf.sum()).backward()


def test_buffers_keep_bf16() -> None:
    members = [Member(torch.nn.Parameter(torch.randn(33).bfloat16()), 0)]
    buffer = _buffer(members, 2)
    assert (buffer.params.dtype, buffer.sums.dtype) == (torch.bfloat16, torch.int64)


def test_parameters_of_two_types_are_refused() -> None:
    types = torch.float32, torch.bfloat16
    members = [Member(torch.nn.Parameter(torch.zeros(4, dtype=dtype)), 0) for dtype in types]
    with pytest.raises(ValueError, match=r"unit layer\.3 have types bfloat16, float32: cast them"):
        shape_of("layer.3", members)


def test_twins_sum_apart() -> None:
    """As two ranks with one use each do, where autograd's own sum would be rounded."""
    members = _members([(64, False, False)])
    parameter = members[0].parameter
    buffer = _buffer(members, 2, accumulator=ExactAccumulator(2))
    twin = buffer.twin(parameter)
    assert twin.data_ptr() == parameter.data_ptr()
    (parameter.sum() * 1.0 + twin.sum() * 2.0**-30).backward()
    assert (buffer.sums[:64] == 2**40 + 2**10).all()


# ---- the update ---------------------------------------------------------------------------


def _trained(steps: int, clip: float = 1.0) -> tuple[SliceState, UnitBuffer]:
    """A state after some steps, on gradients that depend on the step alone."""
    buffer = _buffer(_members([(70, False, False), (50, True, False)]))
    state = SliceState(buffer.params.clone(), ADAM)
    for step in range(1, steps + 1):
        state.grad = _gradient(step, state.master.numel())
        state.apply(Update(step, clip, _rates(0.01 * step)), buffer.partition.segments(0))
    return state, buffer


def _rates(lr: float) -> tuple[Rates, Rates]:
    """Group 0 decays, group 1 does not."""
    return Rates(lr, 0.1), Rates(lr, 0.0)


def _gradient(step: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("clip", [1.0, 0.3, 5.0])
def test_update_equals_adamw(clip: float) -> None:
    """Clipping only ever makes gradients smaller; what is not to decay does not."""
    steps = 12
    state, buffer = _trained(steps, clip)
    members = _members([(70, False, False), (50, True, False)])
    decayed, plain = (member.parameter for member in members)
    optimizer = torch.optim.AdamW(
        [{"params": [decayed], "weight_decay": 0.1}, {"params": [plain], "weight_decay": 0.0}],
        betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps,
    )  # fmt: skip
    for step in range(1, steps + 1):
        flat = _gradient(step, state.master.numel()) * min(clip, 1.0)
        for member, start in zip(members, buffer.partition.starts, strict=True):
            member.parameter.grad = flat[start : start + member.parameter.numel()].clone()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * step
        optimizer.step()
    for member, start in zip(members, buffer.partition.starts, strict=True):
        found = state.master[start : start + member.parameter.numel()]
        torch.testing.assert_close(found, member.parameter.detach(), rtol=1e-6, atol=1e-6)
    assert state.step == steps


def test_update_is_done_once() -> None:
    state, buffer = _trained(3)
    before = state.sha256(buffer.params)
    state.apply(Update(3, 1.0, _rates(0.5)), buffer.partition.segments(0))
    state.grad = _gradient(3, state.master.numel())
    state.apply(Update(2, 1.0, _rates(0.5)), buffer.partition.segments(0))
    assert state.sha256(buffer.params) == before


def test_a_skipped_update_changes_nothing_but_the_step() -> None:
    state, buffer = _trained(3)
    before = [tensor.clone() for tensor in state.tensors]
    state.grad = torch.full_like(state.master, float("nan"))
    state.apply(Update(4, float("nan"), _rates(0.5), skipped=True), buffer.partition.segments(0))
    assert state.step == 4
    assert state.grad is None
    assert all(torch.equal(old, new) for old, new in zip(before, state.tensors, strict=True))


def test_update_out_of_turn_is_an_error() -> None:
    state, buffer = _trained(3)
    with pytest.raises(RuntimeError, match=r"at step 3 \(without a gradient\) cannot do step 4"):
        state.apply(Update(4, 1.0, _rates(0.5)), buffer.partition.segments(0))
    state.grad = _gradient(5, state.master.numel())
    with pytest.raises(RuntimeError, match=r"at step 3 \(with a gradient\) cannot do step 5"):
        state.apply(Update(5, 1.0, _rates(0.5)), buffer.partition.segments(0))


def test_owner_and_replica_stay_equal() -> None:
    """Bit for bit, wherever their memory lies."""
    owner, buffer = _trained(8)
    shifted = torch.zeros(owner.master.numel() + 1)[1:]
    shifted.copy_(buffer.params)
    replica = SliceState(shifted, ADAM)
    for step in range(1, 9):
        replica.grad = _gradient(step, replica.master.numel())
        replica.apply(Update(step, 1.0, _rates(0.01 * step)), buffer.partition.segments(0))
    for mine, theirs in zip(owner.tensors, replica.tensors, strict=True):
        assert torch.equal(mine, theirs)
    assert owner.sha256(buffer.params) == replica.sha256(buffer.params)
    replica.moments[1][5] *= 1 + 2**-20
    assert owner.sha256(buffer.params) != replica.sha256(buffer.params)


def test_norm_counts_what_is_counted() -> None:
    for tp, expected in ((0, 40.0 + 9.0), (1, 40.0)):
        buffer = _buffer(_members([(40, True, True), (9, False, False)]), tp=tp)
        state = SliceState(buffer.params.clone(), ADAM)
        state.grad = torch.zeros_like(state.master)
        for parameter, start in buffer.bound:
            state.grad[start : start + parameter.numel()] = 1.0
        assert block_squares(state.counted(buffer.partition.segments(0))).sum() == expected


@given(sizes=SIZES, num_slices=st.integers(1, 5))
def test_zeros_are_those_of_parameters(sizes: Sequence[tuple[int, bool, bool]], num_slices: int) -> None:
    """Not what lies between them; and what two tensor-parallel ranks hold alike is counted once."""
    zeros = 0
    for tp in (0, 1):
        buffer = _buffer(_members(sizes), num_slices, tp)
        for parameter, start in buffer.bound:
            buffer.params[start : start + parameter.numel()] = torch.arange(parameter.numel()) % 2
        for k in range(num_slices):
            segments = buffer.partition.segments(k)
            state = SliceState(buffer.slice_of(buffer.params, k).clone(), ADAM)
            state.grad = state.master
            zeros += buffer.partition.elements(k) - sum(int(part.count_nonzero()) for part in state.counted(segments))
    assert zeros == sum((size + 1) // 2 * (1 + sharded) for size, _, sharded in sizes)


# ---- between processes --------------------------------------------------------------------


def _layout(dp: int = 2, replicas: int = 1) -> Layout:
    return Layout.grid(
        tp=1, pp=1, dp=dp, stage_units=[[0, 1]], units=["a", "b"], num_grains=4, num_slices=2, replicas=replicas
    )


def _rank_state(
    peer: Peer, layout: Layout, rate: float = 0.0, dials: Dials | None = None
) -> tuple[dict[int, UnitBuffer], StateStore, Reduction]:
    accumulator = ExactAccumulator(4)
    units = {
        unit: _buffer(_members([(70 + unit, True, False), (9, False, False)], unit), layout.num_slices, 0, accumulator)
        for unit in (0, 1)
    }
    partitions = {unit: buffer.partition for unit, buffer in units.items()}
    store = StateStore(partitions, ADAM, peer.transport, rate=lambda _: rate, dials=dials)
    return units, store, Reduction(layout, peer.transport, units, store, accumulator)


def _slices(store: StateStore) -> list[tuple[int, int]]:
    """(unit, slice) of everything live."""
    return [(unit, k) for unit, k, _ in store.held()]


def _step(layout: Layout, units: dict[int, UnitBuffer], store: StateStore, reduction: Reduction, rank: int,
          step: int) -> None:  # fmt: skip
    """One whole step: each grain's gradient depends on step and grain alone, and goes in where the layout says."""
    for unit, buffer in units.items():
        buffer.zero()
        for grain in layout.cell_of(rank).grains:
            gradient = torch.randn(buffer.params.numel(), generator=torch.Generator().manual_seed(step * 10 + grain))
            reduction._accumulator.add(buffer.sums, gradient + unit)
    store.drop_gradients()
    reduction.reduce_gradients(layout.num_grains)
    GradientReplay(layout, reduction._transport, store, torch.float32).before_vote()
    store.apply(Update(step, 0.5, _rates(0.01)))
    reduction.gather_parameters()


@pytest.mark.job
def test_two_ranks_do_what_one_does() -> None:
    """Bit for bit; and owner and replica of every slice have the same state."""

    def body(peer: Peer) -> None:
        layout = _layout(dp=2)
        units, store, reduction = _rank_state(peer, layout)
        store.create(layout, units)
        assert store.held() == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
        for step in (1, 2, 3):
            _step(layout, units, store, reduction, peer.rank, step)
        digests = [store[at].sha256(units[at[0]].params) for at in _slices(store)]
        assert _exchange(peer, digests) == digests
        if peer.rank == 0:
            layout = _layout(dp=1)
            alone, store, reduction = _rank_state(peer, layout)
            store.create(layout, alone)
            for step in (1, 2, 3):
                _step(layout, alone, store, reduction, 0, step)
            for unit in (0, 1):
                assert torch.equal(alone[unit].params, units[unit].params)
            assert [store[at].sha256(alone[at[0]].params) for at in _slices(store)] == digests
        peer.leave()

    world.run(body, size=2)


@pytest.mark.job
@pytest.mark.parametrize(("missed", "rate"), [(0, 0.0), (1, 0.0), (3, 0.0), (3, 3e3), (12, 3e3)])
def test_replicas_are_made_while_training_goes_on(missed: int, rate: float) -> None:
    """A replica whose copying begins before some steps and ends after them catches up by replaying those.

    At 3 kB/s each slice takes 0.3 s: the second one is asked for when some steps have been done. Dials show how far
    it is.
    """

    def body(peer: Peer) -> None:
        bare, words = _layout(replicas=0), memoryview(bytearray(8 * WORDS)).cast("q")
        units, store, reduction = _rank_state(peer, bare, rate, Dials(words))
        store.create(bare, units)
        assert _slices(store) == list(bare.owned(peer.rank))
        _step(bare, units, store, reduction, peer.rank, 1)

        layout = replace(_layout(), epoch=1)
        peer.transport.advance(1)
        moves = transfers(layout, Holdings.of(bare))
        assert {(move.role, move.src, move.dst) for move in moves} == {("replica", 0, 1), ("replica", 1, 0)}
        assert read(words, 0).copies == 0
        store.replicate(moves, layout, 1)
        size = sum(12 * store._partitions[move.unit].slice_size for move in moves if move.dst == peer.rank)
        shown = read(words, 0)
        assert (shown.epoch, shown.copied, shown.copies) == (1, 0, size)
        store.copy_in_background()
        reduction = Reduction(layout, peer.transport, units, store, reduction._accumulator)
        for step in range(2, 2 + missed):
            _step(layout, units, store, reduction, peer.rank, step)
        assert store.replicating
        assert _slices(store) == list(bare.owned(peer.rank))

        Dials(words).copied(-4)  # as if two threads had counted at once
        peer.meet()
        store.arrive()
        shown = read(words, 0)
        assert (shown.copied, shown.copies, shown.behind, shown.unit, shown.source) == (size, size, 0, None, None)
        store.show_held()
        assert read(words, 0).states == 2 * size
        assert _slices(store) == sorted((*layout.owned(peer.rank), *layout.replicated(peer.rank)))
        store.flush()
        assert not store.replicating
        _step(layout, units, store, reduction, peer.rank, 2 + missed)
        assert all(store[at].step == 2 + missed for at in _slices(store))
        digests = [store[at].sha256(units[at[0]].params) for at in _slices(store)]
        assert len(digests) == 4
        assert _exchange(peer, digests) == digests
        store.retire(layout.owned(peer.rank))
        assert _slices(store) == list(layout.owned(peer.rank))
        with pytest.raises(KeyError):
            store[layout.replicated(peer.rank)[0]]
        peer.leave()

    world.run(body, size=2)


@pytest.mark.job
def test_copying_keeps_to_its_rate() -> None:
    """And comes piece by piece, from a snapshot."""
    rate, size = 100e3, 5000
    states = {(0, k): [torch.full((size,), float(3 * k + part)) for part in range(3)] for k in (0, 1)}

    def body(peer: Peer) -> None:
        if peer.rank == 0:
            task = peer.transport.start(serve(peer.transport, 1, list(states), lambda at: (7 + at[1], states[at])))
        else:
            got: dict[tuple[int, int], int] = {}
            pieces: list[tuple[tuple[int, int], int]] = []
            buffers = {at: [torch.zeros(size) for _ in tensors] for at, tensors in states.items()}
            begun = time.monotonic()
            wanted = [(0, at) for at in states]
            task = peer.transport.start(fetch(
                peer.transport, wanted, lambda source, at: buffers[at], lambda *piece: pieces.append(piece),
                got.__setitem__, lambda _: rate,
            ))  # fmt: skip
        peer.transport.wait(task)
        if peer.rank == 1:
            assert got == {(0, 0): 7, (0, 1): 8}
            sums = {at: sum(part for to, part in pieces if to == at) for at in states}
            assert sums == dict.fromkeys(states, 3 * 4 * size)
            assert len(pieces) > 4 and sorted(pieces, key=lambda piece: piece[0]) == pieces
            assert time.monotonic() - begun >= 2 * 3 * 4 * size / rate
            for at, tensors in states.items():
                assert all(torch.equal(a, b) for a, b in zip(tensors, buffers[at], strict=True))
        peer.leave()

    world.run(body, size=2)


@pytest.mark.job
def test_slices_are_asked_for_ahead() -> None:
    """So that the way to who has them and back is not waited for with each; they come as they were asked for."""
    states = {(0, k): [torch.full((5,), float(3 * k + part)) for part in range(3)] for k in range(5)}

    def body(peer: Peer) -> None:
        if peer.rank == 0:
            peer.transport.wait(peer.transport.recv(1, Channel.POINT_TO_POINT, 0, torch.empty(1)))
            task = peer.transport.start(serve(peer.transport, 1, list(states), lambda at: (at[1], states[at])))
        else:
            begun: dict[tuple[int, int], list[torch.Tensor]] = {}
            came: list[tuple[int, int]] = []

            def begin(source: int, at: tuple[int, int]) -> list[torch.Tensor]:
                return begun.setdefault(at, [torch.zeros(5) for _ in range(3)])

            task = peer.transport.start(fetch(
                peer.transport, [(0, at) for at in states], begin, lambda *_: None, lambda at, _: came.append(at),
                lambda _: 0.0,
            ))  # fmt: skip
            assert list(begun) == list(states)[:3]  # nobody has answered
            peer.transport.wait(peer.transport.send(0, Channel.POINT_TO_POINT, 0, torch.zeros(1)))
        peer.transport.wait(task)
        if peer.rank == 1:
            assert came == list(states)
            for at, tensors in states.items():
                assert all(torch.equal(a, b) for a, b in zip(tensors, begun[at], strict=True))
        peer.leave()

    world.run(body, size=2)


@pytest.mark.job
def test_copies_under_way_can_be_abandoned() -> None:
    """And begun anew in the next epoch, without mixing up the bytes of both."""

    def body(peer: Peer) -> None:
        bare, words = _layout(replicas=0), memoryview(bytearray(8 * WORDS)).cast("q")
        units, store, reduction = _rank_state(peer, bare, dials=Dials(words))
        store.create(bare, units)
        for epoch in (1, 2):
            peer.transport.advance(epoch)
            store.abandon_loading()
            layout = replace(_layout(), epoch=epoch)
            moves = transfers(layout, Holdings.of(bare))
            for at in bare.owned(peer.rank):
                store[at].moments[0].fill_(epoch)
            store.replicate(moves, layout, 0)
            if epoch == 1:
                _step(bare, units, store, reduction, peer.rank, 1)
                store.settle()
                assert read(words, 0).behind == 1
            store.copy_in_background()
        store.arrive()
        for at in layout.replicated(peer.rank):
            assert (store[at].moments[0] == 2).all()
        shown = read(words, 0)
        assert (shown.epoch, shown.copied, shown.behind) == (2, shown.copies, 0), "what was abandoned does not count"
        store.flush()
        peer.leave()

    world.run(body, size=2)


@pytest.mark.job
def test_reduction_begins_with_the_last_backward() -> None:
    """Of the last grain, and of each unit for itself."""

    def body(peer: Peer) -> None:
        layout = _layout()
        units, store, reduction = _rank_state(peer, layout)
        store.create(layout, units)
        for buffer in units.values():
            buffer.zero()
        reduction.reduce_when_complete(layout.num_grains)
        for _ in layout.cell_of(peer.rank).grains:
            assert not reduction._reducing
            for parameter, _ in units[1].bound:
                parameter.sum().backward()
        assert list(reduction._reducing) == [1]
        peer.transport.wait(reduction._reducing[1])
        assert [at for at in layout.owned(peer.rank) if store[at].grad is not None] == [(1, peer.rank)]
        for _ in layout.cell_of(peer.rank).grains:
            for parameter, _ in units[0].bound:
                parameter.sum().backward()
        reduction.reduce_gradients(layout.num_grains)
        for unit, buffer in units.items():
            grad = store[unit, peer.rank].grad
            assert grad is not None
            used = torch.zeros_like(buffer.params)
            for parameter, start in buffer.bound:
                used[start : start + parameter.numel()] = 1.0
            assert torch.equal(grad, buffer.slice_of(used, peer.rank)), "four grains' gradients of 1, divided by 4"
        peer.leave()

    world.run(body, size=2)


@pytest.mark.job
def test_states_are_replayed() -> None:
    """Replicas are behind until the next vote, and both sides can go back to the step before."""

    def body(peer: Peer) -> None:
        layout = _layout()
        units, _, _ = _rank_state(peer, layout)
        partitions = {unit: buffer.partition for unit, buffer in units.items()}
        store = StateStore(partitions, ADAM, peer.transport, keeps=True)
        store.create(layout, units)
        replay = StateReplay(layout, peer.rank, store)
        owned = [(*at, 0) for at in layout.owned(peer.rank)]
        copied = [(*at, 0) for at in layout.replicated(peer.rank)]
        everything = sorted(owned + copied)
        for step in (1, 2, 3):
            replay.before_vote()
            assert store.held() == everything
            before = {at: store[at].sha256(units[at[0]].params) for at in _slices(store)}
            for at in layout.owned(peer.rank):
                store.set_gradient(at, _gradient(10 * step + at[0], store[at].master.numel()))
            assert store.versions()[step] == owned, "they have the gradients, so they can do it once it is voted"
            store.apply(Update(step, 1.0, _rates(0.01)))
            assert (store.versions()[step], store.versions()[step - 1]) == (owned, everything)
            replay.after_update(step)
            assert store.held() == owned
            if step == 2:
                replay.finish()
        peer.meet()
        store.abandon_loading()
        assert (store.versions()[3], store.versions()[2]) == (owned, everything)
        peer.transport.advance(1)
        store.return_to(2, [(unit, k) for unit, k, _ in everything])
        assert store.held() == everything
        assert {at: store[at].sha256(units[at[0]].params) for at in _slices(store)} == before
        digests = list(before.values())
        assert _exchange(peer, digests) == digests
        peer.leave()

    world.run(body, size=2)


class _Passed(StateStore):
    """Keeps what it is told to copy."""

    def __init__(self) -> None:
        self.moves: list[Transfer] = []

    def replicate(self, transfers: Iterable[Transfer], layout: Layout, step: int) -> None:
        self.moves += transfers


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (2, 2)])
def test_states_are_replayed_by_who_has_a_part_in_it(tp: int, ep: int) -> None:
    """In a large job nobody could look at all of them in each step."""
    layout = Layout.grid(tp=tp, pp=2, dp=3, ep=ep, stage_units=[[0, 1], [2]], units=["a", "experts.0", "b"],
                         num_grains=4, num_slices=4, replicas=2)  # fmt: skip
    sent, got = set(), set()
    for rank in layout.ranks:
        store = _Passed()
        StateReplay(layout, rank, store).after_update(1)
        assert all(rank in (move.src, move.dst) for move in store.moves)
        sent |= {move for move in store.moves if move.src == rank}
        got |= {move for move in store.moves if move.dst == rank}
    assert sent == got == {
        Transfer(unit, k, part, layout.owner(unit, k, part), copy, "replica")
        for unit, k, part in layout.parts for copy in layout.copies(unit, k, part)
    }  # fmt: skip


# ---- the vote -----------------------------------------------------------------------------


@pytest.mark.job
def test_vote() -> None:
    """Everybody learns the same numbers, which are those of one rank that knows everything."""
    norms = {(unit, k): 0.1 * (unit + 1) + 7.7 * k for unit in (0, 1) for k in (0, 1)}
    losses = {grain: (1.1 * grain + 0.3, 10.0 + grain) for grain in range(4)}

    def body(peer: Peer) -> None:
        layout = _layout()
        ballot = Ballot(
            squares=np.array([norms[at] for at in layout.owned(peer.rank)]),
            losses={grain: losses[grain] for grain in layout.cell_of(peer.rank).grains},
            measures={"z_loss": [0.1, 0.7] if peer.rank else [], "balance": [0.1 * (1 + peer.rank)]},
        )
        found = vote(Group(peer.transport, 7, layout.ranks), ballot)
        assert found.tokens == 46
        assert found.grad_norm == math.sqrt(math.fsum(norms.values()))
        assert found.loss == math.fsum(loss for loss, _ in losses.values()) / 46
        assert found.measures == {"z_loss": math.fsum((0.1, 0.7)), "balance": math.fsum((0.1, 0.2))}
        if peer.rank == 0:
            squares = np.array(list(norms.values()))
            alone = Ballot(squares, losses, measures={"balance": [0.2, 0.1], "z_loss": [0.7, 0.1]})
            assert vote(Group(peer.transport, 8, [0]), alone) == found
        nothing = vote(Group(peer.transport, 9, layout.ranks), Ballot(np.zeros(0), {}))
        assert (nothing.loss, nothing.tokens, nothing.grad_norm) == (0.0, 0, 0.0)
        peer.leave()

    world.run(body, size=2)


@pytest.mark.job
def test_a_vote_of_many_interrupts_all_when_one_dies() -> None:
    """In a tree most have nothing to do with the one that dies."""

    def body(peer: Peer) -> None:
        group = Group(peer.transport, 7, range(peer.size))
        ballot = Ballot(np.array([0.1 * peer.rank]), {peer.rank: (0.3, 2.0)}, informed=True)
        expected = math.sqrt(math.fsum(0.1 * rank for rank in range(peer.size)))
        found = vote(group, ballot)
        assert (found.grad_norm, found.tokens, found.switch) == (expected, 2 * peer.size, True)
        assert not vote(group, replace(ballot, informed=peer.rank != 9)).switch
        if peer.rank == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(Interrupted) as caught:
            vote(group, ballot)
        assert caught.value.suspects == (10,)
        peer.leave()

    world.run(body, size=11, killed=[10])


def _by_slots(ballots: Sequence[Ballot]) -> tuple[float, ...]:
    """What the vote is to find: numbers of each slice and grain, collected at one place and added up there."""
    slots: tuple[dict[Any, float], ...] = {}, {}, {}
    for rank, ballot in enumerate(ballots):
        slots[0].update({(rank, at): square for at, square in enumerate(ballot.squares.tolist())})
        for grain, numbers in ballot.losses.items():
            for slot, number in zip(slots[1:], numbers, strict=True):
                slot[grain] = slot.get(grain, 0.0) + number
    return *(math.fsum(slot.values()) for slot in slots), sum(ballot.informed for ballot in ballots)


SQUARES = st.floats(0, 1e300) | st.floats(0, 1e-300)
LOSSES = st.floats(0.0009765625, 131072, width=32)
"""As they are summed in single precision; those of a grain's parts differ by less than double precision holds."""


@st.composite
def _elections(draw: st.DrawFn) -> list[Ballot]:
    """Ballots under a layout: stages of uneven width, a unit of two stages, which one of them owns, and cut grains."""
    widths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    tp, slices, grains = draw(st.integers(1, 2)), draw(st.integers(1, 5)), draw(st.integers(1, 6))
    units = [[stage, len(widths)] if stage in (0, len(widths) - 1) else [stage] for stage in range(len(widths))]
    ballots, cut = [], draw(st.sets(st.integers(0, grains - 1)))
    for stage, width in enumerate(widths):
        homed = [unit for unit in units[stage] if unit == stage or stage == 0]
        for cell in range(width):
            for tp_index in range(tp):
                squares = np.array([draw(SQUARES) for _ in homed for k in range(slices) if k % width == cell])
                speaks = stage == len(widths) - 1 and tp_index == 0
                shares = [g for g in range(grains) if speaks and (g in cut or g % width == cell)]
                losses = {g: (draw(LOSSES), float(draw(st.integers(0, 9999)))) for g in shares}
                ballots.append(Ballot(squares, losses, draw(st.booleans())))
    return ballots


def _elect(ballots: Sequence[Ballot]) -> tuple[tuple[float, ...], int]:
    """The same, along the tree, and the most messages that one member sends and receives."""
    size = len(ballots)
    numbers = [count(ballot) for ballot in ballots]
    places = [place_in_tree(i, size) for i in range(size)]
    for i in reversed(range(size)):  # children come after their parents
        parent, children = places[i]
        assert all(places[child][0] == i for child in children)
        if parent is None:
            assert i == 0
        else:
            assert parent < i
            assert i in places[parent][1]
            numbers[parent] = numbers[parent] + numbers[i]
    busiest = max(2 * len(children) + 2 * (parent is not None) for parent, children in places)
    return add_up(numbers[0]), busiest


@given(_elections())
@settings(deadline=None, max_examples=examples(150))
def test_a_vote_finds_the_same_bits_as_one_place_would(ballots: list[Ballot]) -> None:
    assert _elect(ballots)[0] == _by_slots(ballots)


@pytest.mark.parametrize(("ranks", "messages"), [(8, 14), (96, 30), (1000, 44)])
def test_a_vote_of_many_makes_nobody_busy(ranks: int, messages: int) -> None:
    """Messages that the busiest rank sends and receives, each of the same size."""
    draw = random.Random(ranks)
    ballots = [
        Ballot(np.array([draw.random() for _ in range(4)]), {i: (draw.random(), 3.0)}, True) for i in range(ranks)
    ]
    found, busiest = _elect(ballots)
    assert found == _by_slots(ballots)
    assert busiest == messages
    assert {count(ballot).nbytes for ballot in ballots} == {1688}


def _exchange(peer: Peer, texts: list[str]) -> list[str]:
    """The other one's texts, which are as long as ours."""
    mine = torch.tensor(list("".join(texts).encode()), dtype=torch.uint8)
    theirs = torch.empty_like(mine)
    peer.transport.wait(
        peer.transport.send(1 - peer.rank, Channel.POINT_TO_POINT, 1, mine),
        peer.transport.recv(1 - peer.rank, Channel.POINT_TO_POINT, 1, theirs),
    )
    text, size = bytes(theirs.tolist()).decode(), len(texts[0])
    return [text[i : i + size] for i in range(0, len(text), size)]
