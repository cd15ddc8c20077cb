"""Resumption: what is missing of any step that was cut anywhere, after any losses, is planned whole and only once."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.cluster.messages import Kept
from megatron_elastic.layout import Cell, Layout, Stage, gpt_units
from megatron_elastic.pipeline.resumption import Remainder, check, remainder
from megatron_elastic.pipeline.route import Leg, usual
from megatron_elastic.pipeline.schedule import for_cell
from megatron_elastic.plan import everything, lose


def uneven(grains: int, widths: list[int], chunks: int, rng: random.Random) -> Layout:
    """Stages of the given widths and chunks, with every grain at a random cell of each."""
    pp = len(widths)
    chunks = chunks if pp > 1 else 1
    units, stage_units = gpt_units(pp * chunks, pp, True, False, chunks=chunks)
    layout = Layout.grid(
        tp=1, pp=pp, dp=1, stage_units=stage_units, units=units, num_grains=grains, num_slices=2, replicas=0
    )
    stages, rank = [], 0
    for width, stage in zip(widths, layout.stages, strict=True):
        at = [rng.randrange(width) for _ in range(grains)]
        cells = [Cell((rank + i,), tuple(g for g in range(grains) if at[g] == i)) for i in range(width)]
        stages.append(Stage(stage.units, tuple(cells)))
        rank += width
    owners = tuple((stages[layout.home(unit)].cells[0].leader,) * 2 for unit in range(len(units)))
    whole = replace(layout, stages=tuple(stages), owners=owners, hosts=(tuple(range(rank)),))
    whole.validate()
    return whole


class ModelStep:
    """Cells that do a step, operation by operation in any possible order, and are interrupted."""

    def __init__(self, layout: Layout, schedule: str, rng: random.Random) -> None:
        self.layout = layout
        self.schedule = schedule
        self.rng = rng
        self.begin({}, {leader: Remainder((), usual(layout, leader, for_cell(schedule, layout, leader)))
                        for leader in layout.cells})

    def begin(self, kept: dict[int, Kept], work: dict[int, Remainder]) -> None:
        """All cells get what they have to do."""
        check(self.layout, kept.values(), work)
        self.work, self.at = work, dict.fromkeys(work, 0)
        self.added, self.live, self.half = (
            {leader: set(getattr(kept[leader], name)) if leader in kept else set() for leader in work}
            for name in ("added", "live", "half")
        )
        self.sent = {each for leader in work for leg in work[leader].again for each in self.results(leader, leg)}

    def results(self, leader: int, leg: Leg) -> list[tuple[bool, int, int, int]]:
        """What a cell sends of an operation: whether it is a forward's, the grain, where it is sent to, and to whom."""
        here = leg.op.chunk * self.layout.pipeline_size + self.layout.stage_of(leader)
        forward = leg.op.kind == "forward"
        return [(forward, leg.op.grain, here + (1 if forward else -1), target) for target, _ in leg.targets]

    def is_ready(self, leader: int) -> bool:
        """Whether a cell's next operation has what it needs."""
        if self.at[leader] == len(self.work[leader].legs):
            return False
        leg = self.work[leader].legs[self.at[leader]]
        here = leg.op.chunk * self.layout.pipeline_size + self.layout.stage_of(leader)
        return not leg.sources or (leg.op.kind == "forward", leg.op.grain, here, leader) in self.sent

    def go_on(self, operations: int) -> None:
        """Do at most so many operations."""
        for _ in range(operations):
            ready = [leader for leader in self.work if self.is_ready(leader)]
            if not ready:
                break
            leader = self.rng.choice(ready)
            leg = self.work[leader].legs[self.at[leader]]
            item = leg.op.grain * self.layout.num_chunks + leg.op.chunk
            begun, ended = {
                "forward": (None, self.live), "backward": (self.live, self.added),
                "backward_input": (self.live, self.half), "backward_weight": (self.half, self.added),
            }[leg.op.kind]  # fmt: skip
            if begun is not None:
                begun[leader].remove(item)
            ended[leader].add(item)
            self.sent.update(self.results(leader, leg))
            self.at[leader] += 1

    def lose(self) -> None:
        """Some cells die, some have nothing that they can go on from, and all get what is missing of the step."""
        dead: list[int] = []
        for stage in self.layout.stages:
            leaders = [cell.leader for cell in stage.cells if not cell.shadow]
            dead += self.rng.sample(leaders, self.rng.choice([0, 0, *range(len(leaders))]))
        self.layout = lose(self.layout, dead, everything(self.layout), self.layout.epoch + 1)
        kept = {
            leader: Kept(
                leader=leader, added=sorted(self.added[leader]), live=sorted(self.live[leader]),
                half=sorted(self.half[leader]),
            )
            for leader in self.layout.cells
            if self.rng.random() < 0.9
        }  # fmt: skip
        self.begin(
            kept, {leader: remainder(self.schedule, self.layout, kept.values(), leader) for leader in self.layout.cells}
        )


@settings(max_examples=1500, deadline=None)
@given(
    grains=st.integers(1, 12), widths=st.lists(st.integers(1, 4), min_size=1, max_size=4), chunks=st.integers(1, 3),
    schedule=st.sampled_from(["1f1b", "split"]), seed=st.integers(0, 2**32), faults=st.integers(1, 3),
)  # fmt: skip
def test_whatever_is_cut_wherever_is_made_whole(
    grains: int, widths: list[int], chunks: int, schedule: str, seed: int, faults: int
) -> None:
    """Also if cells die while the step is resumed. ``check`` proves each plan."""
    rng = random.Random(seed)
    step = ModelStep(uneven(grains, widths, chunks, rng), schedule, rng)
    total = 3 * grains * len(widths) * chunks
    for _ in range(faults):
        step.go_on(rng.randrange(total))
        step.lose()
    step.go_on(total)
    positions = step.layout.num_chunks * grains
    for stage in step.layout.stages:
        assert sorted(n for cell in stage.cells for n in step.added[cell.leader]) == list(range(positions))
