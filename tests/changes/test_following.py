"""What is cut anew while training goes on is what a new cut of the newest states would be, bit for bit."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from megatron_elastic.adaptor.training import interruption
from megatron_elastic.adaptor.training.trainer import Trainer
from megatron_elastic.cluster.rank.control import Interrupted, JobStopped
from megatron_elastic.comm.tag import Channel
from megatron_elastic.layout import Layout, ParameterShape, UnitShape, gpt_units
from megatron_elastic.observe.dials import WORDS, Dials, read
from megatron_elastic.plan import reshape
from megatron_elastic.state import following
from megatron_elastic.state.copying import SliceId
from megatron_elastic.state.following import Following
from megatron_elastic.state.optimizer import Adam, Rates, Update
from megatron_elastic.state.partition import Partition
from megatron_elastic.state.recut import Delivery, deliveries
from megatron_elastic.state.slice import SliceState
from megatron_elastic.state.store import StateStore
from tests import world
from tests.changes.test_recut import Matrix, cut
from tests.world import Peer

MODEL = [Matrix((4, 12), 0, 0), Matrix((1, 50), 1), Matrix((6, 24), 0, 1), Matrix((48, 5), 1, 0, 2)]
MEMBERS = tuple(matrix.told for matrix in MODEL)
ADAM = Adam(beta1=0.9, beta2=0.95, eps=1e-8)


def layout(tp: int, ep: int) -> Layout:
    """Four ranks, an embedding, a layer with experts, another one, and a head."""
    units, stage_units = gpt_units(2, 1, True, positions=False, routed=[0])
    return Layout.grid(
        tp=tp, pp=1, dp=4 // tp // ep, ep=ep, stage_units=stage_units, units=units, num_grains=4 // ep, num_slices=3,
        replicas=1 if tp * ep < 4 else 0,
    )  # fmt: skip


def states(of: Layout, rank: int, unit: int, shape: UnitShape, step: int) -> dict[SliceId, SliceState]:
    """What a rank keeps of a unit after so many steps, cut out of what is there in all."""
    kinds = [cut(of, unit, shape, MODEL, whole(shape, kind)) for kind in range(3)]
    found: dict[SliceId, SliceState] = {}
    partition = partition_of(of, rank, unit, shape)
    for at in (*of.owned(rank), *of.replicated(rank)):
        if at[0] == unit:
            found[at] = state = SliceState(kinds[0][at[1], partition.part].clone(), ADAM)
            state.moments = tuple(kind[at[1], partition.part].abs() for kind in kinds[1:])
    for number in range(1, step + 1):
        reduced = gradient(of, unit, shape, number)
        for at, state in found.items():
            state.grad = reduced[at[1], partition.part].clone()
            state.apply(update(number), partition.segments(at[1]))
    return found


def whole(shape: UnitShape, seed: int) -> list[list[torch.Tensor]]:
    """[expert, or 0][parameter]"""
    numbers = torch.Generator().manual_seed(seed)
    return [[torch.randn(matrix.shape, generator=numbers) for matrix in MODEL] for _ in range(max(shape.experts, 1))]


def gradient(of: Layout, unit: int, shape: UnitShape, step: int) -> dict[tuple[int, int], torch.Tensor]:
    """[slice, part]"""
    return cut(of, unit, shape, MODEL, whole(shape, 100 * step + unit))


def update(step: int) -> Update:
    return Update(step, 0.5, (Rates(0.01, 0.1), Rates(0.02, 0.0)))


def partition_of(of: Layout, rank: int, unit: int, shape: UnitShape) -> Partition:
    return Partition(shape, of.num_slices, of.part_of(unit, rank), of.tp, of.ep)


def shapes(of: Layout) -> dict[int, UnitShape]:
    return {unit: UnitShape(MEMBERS, "float32", 8 if name.startswith("experts") else 0)
            for unit, name in enumerate(of.units)}  # fmt: skip


@pytest.mark.job
@pytest.mark.parametrize(("before", "after"), [((2, 1), (1, 1)), ((1, 1), (2, 1)), ((1, 2), (1, 1)), ((4, 1), (1, 1)),
                                               ((1, 1), (1, 4))])  # fmt: skip
@pytest.mark.parametrize("rate", [0.0, 1e6])
def test_follows(
    monkeypatch: pytest.MonkeyPatch, before: tuple[int, int], after: tuple[int, int], rate: float
) -> None:
    """Unit after unit, while steps are done; each is here some steps after it was begun. Dials show all of it."""
    monkeypatch.setattr(following, "_ROUND", 1)

    def body(peer: Peer) -> None:
        me, old = peer.rank, layout(*before)
        new, every = reshape(old, after[0], 1, after[1], 1), shapes(old)
        partitions = {unit: partition_of(new, me, unit, shape) for unit, shape in every.items()}
        held = StateStore(
            {unit: partition_of(old, me, unit, shape) for unit, shape in every.items()}, ADAM, peer.transport
        )
        for unit, shape in every.items():
            held.take(states(old, me, unit, shape, 0))
        words, begun = memoryview(bytearray(8 * WORDS)).cast("q"), []
        new_cut = Following(old, new, every, held, partitions, peer.transport, lambda _: rate, Dials(words),
                            lambda: begun.append(1))  # fmt: skip
        step = 0
        while not new_cut.complete or step < len(every) + 2:
            peer.meet()  # as the vote lets all know that everybody is
            if not new_cut.complete:
                new_cut.begin(step)
            while True:
                step += 1
                reduced = {unit: gradient(old, unit, shape, step) for unit, shape in every.items()}
                for unit, k, part in held.held():
                    held.set_gradient((unit, k), reduced[unit][k, part].clone())
                new_cut.before_vote()
                held.apply(update(step))
                new_cut.apply(update(step))
                if all(agreed(peer, new_cut.up_to_date)):
                    break
        assert len(begun) == len(every)
        made = new_cut.finish()
        shown = read(words, 0)
        assert shown.copied == shown.copies and shown.epoch == old.epoch
        assert set(made) == {*new.owned(me), *new.replicated(me)}
        for unit, shape in every.items():
            for at, state in states(new, me, unit, shape, step).items():
                assert made[at].step == step
                assert all(torch.equal(a, b) for a, b in zip(made[at].tensors, state.tensors, strict=True)), at
        peer.leave()

    world.run(body, size=4)


def agreed(peer: Peer, mine: bool) -> list[bool]:
    """What each of the ranks says."""
    said = [torch.tensor([float(mine)]) for _ in range(4)]
    others = [rank for rank in range(4) if rank != peer.rank]
    peer.transport.wait(*peer.transport.exchange(
        Channel.DIGEST, 0, [(rank, said[peer.rank]) for rank in others], [(rank, said[rank]) for rank in others]
    ))
    return [bool(each) for each in said]


@pytest.mark.job
def test_all_at_once() -> None:
    """Where states cannot follow."""

    def body(peer: Peer) -> None:
        me, old = peer.rank, layout(2, 1)
        new, every = reshape(old, 1, 1, 1, 1), shapes(old)
        held = StateStore(
            {unit: partition_of(old, me, unit, shape) for unit, shape in every.items()}, ADAM, peer.transport
        )
        for unit, shape in every.items():
            held.take(states(old, me, unit, shape, 2))
        partitions = {unit: partition_of(new, me, unit, shape) for unit, shape in every.items()}
        unbegun = Following(old, new, every, held, partitions, peer.transport, held.rate, Dials.alone(), lambda: None)
        made = unbegun.whole(2)
        assert set(made) == {*new.owned(me), *new.replicated(me)}
        for unit, shape in every.items():
            for at, state in states(new, me, unit, shape, 2).items():
                assert all(torch.equal(a, b) for a, b in zip(made[at].tensors, state.tensors, strict=True)), at
        peer.leave()

    world.run(body, size=4)


def test_rounds_are_even_enough() -> None:
    """Units come together up to what a round holds; one that is larger than that comes alone."""
    assert following._rounds({unit: 1.0 for unit in range(9)}) == [list(range(9))]
    large = float(following._ROUND)
    assert following._rounds({0: large / 2, 1: large / 2, 2: 2 * large, 3: 1.0, 4: 1.0}) == [[0, 1], [2], [3, 4]]
    assert len(following._rounds({unit: large for unit in range(1000)})) <= following._ROUNDS + 1


def test_what_does_not_move_is_not_copied() -> None:
    """Of units that are not cut anew, slices that stay are the same memory."""
    old, shape = layout(1, 2), UnitShape((ParameterShape(64, 0),), "float32")
    shares = [following._share(0, shape, old, reshape(old, 1, 1, 1, 1), rank) for rank in range(4)]
    assert any(share.kept for share in shares) and not any(share.own for share in shares)


def test_a_rank_looks_at_units_that_it_has_a_part_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks look between two steps, and a large job has many units."""
    units, stage_units = gpt_units(4, 2, True, positions=False)
    old = Layout.grid(tp=2, pp=2, dp=2, stage_units=stage_units, units=units, num_grains=4, num_slices=2, replicas=1)
    new, looked = reshape(old, 1, 1, 1, 1), set[int]()

    def noted(unit: int, shape: UnitShape, old: Layout, new: Layout) -> Iterator[Delivery]:
        looked.add(unit)
        return deliveries(unit, shape, old, new)

    monkeypatch.setattr(following, "deliveries", noted)
    for rank in old.ranks:
        looked.clear()
        for unit, shape in shapes(old).items():
            share = following._share(unit, shape, old, new, rank)
            roles = {k for at in (old, new) for of, k in (*at.owned(rank), *at.replicated(rank)) if of == unit}
            assert bool(roles) == (unit in looked) == bool(share.makes or share.kept or share.given)
        assert len(looked) < len(units)


def test_what_was_made_in_vain_is_let_go_of_before_a_recovery_takes_room() -> None:
    """Its step has been cut, and the error that cut it leads to all that the step had."""
    left = list[weakref.ref[SliceState]]()
    found = list[SliceState | None]()

    def step() -> None:
        made = SliceState(torch.zeros(5), ADAM)
        left.append(weakref.ref(made))
        raise Interrupted(2)

    def at(point: str) -> None:
        found.append(left[-1]())
        if len(left) < 2:
            step()  # another fault in the recovery
        raise JobStopped("it has been seen")

    trainer = cast(Trainer, SimpleNamespace(hooks=SimpleNamespace(at=at)))

    def live() -> None:
        try:
            step()
        except Interrupted as interrupted:
            interruption.handle(trainer, interrupted)

    with pytest.raises(JobStopped):
        live()
    assert found == [None, None]
