"""Arrangement: which units stages should hold, and which shape cells have, as somebody asked or as the policy wants it
by costs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from immutables import Map
from msgspec.structs import replace

from megatron_elastic.cluster.messages import Profile, Wanted
from megatron_elastic.cluster.protocol.effects import Tabulate, WriteProfile
from megatron_elastic.cluster.protocol.job import Arrangement, Job
from megatron_elastic.cluster.protocol.turn import Turn
from megatron_elastic.layout import EXPERTS, Layout
from megatron_elastic.plan import Costs, NoLayout, replan, reshape
from megatron_elastic.plan import measured as costs_of
from megatron_elastic.plan.choice import HORIZON_MS, SEARCH, Way, best, splits
from megatron_elastic.plan.costs.recomputation import recomputing
from megatron_elastic.plan.graph import Graph
from megatron_elastic.plan.growth import even
from megatron_elastic.plan.predict.likeness import case_of
from megatron_elastic.plan.replan import fill
from megatron_elastic.plan.work.order import alike, foreseen


def measured(turn: Turn, message: Profile) -> bool:
    """A rank has measured its stage. Returns whether there are new costs."""
    job, layout = turn.job, turn.job.layout
    if layout is None or message.epoch != layout.epoch or message.rank not in layout.places:
        return False
    samples = job.arrangement.samples.set(message.rank, message.sample)
    costs = costs_of(layout, samples.values())
    turn.set(arrangement=replace(job.arrangement, samples=samples, costs=costs or job.arrangement.costs))
    if costs is None:
        return False
    turn.do(WriteProfile(costs.to_json(layout.units)))
    return True


def rearranging(turn: Turn, layout: Layout, newcomers: bool) -> Callable[[Layout], Layout] | None:
    """What chooses the stages there should be, if it may have something better than ``layout``."""
    arrangement = turn.job.arrangement
    if newcomers:
        arrangement = replace(arrangement, fits=False)
        turn.set(arrangement=arrangement)
    job = turn.job
    wanted = job.policy.arranges(arrangement.costs) and not arrangement.fits
    due = arrangement.stages not in (None, layout.pipeline_size) or wanted or arrangement.placed is not None
    return (lambda present: _chosen(turn, present)) if due else None


def _chosen(turn: Turn, layout: Layout) -> Layout:
    """The stages there should be. What was compared to choose them is written down once for the ranks there are, and
    whenever something moves.
    """
    job, arrangement, costs = turn.job, turn.job.arrangement, turn.job.costs
    placed = arrangement.placed
    assert job.first is not None
    if placed is not None and len(placed) == layout.pipeline_size and costs is not None:
        graph = Graph(placed, tuple(stage.width for stage in layout.stages))
        placing = even(fill(layout, costs, graph, layout.epoch), layout.epoch, costs.slow)
        return recomputing(placing, costs)
    if arrangement.stages is not None:
        return arranged(job, layout)
    found = job.policy.ways(layout, costs, job.first.tied, foreseen(job.settings.schedule))
    if not found:
        return arranged(job, layout)
    chosen, unclocked = best(found), best(found, clocked=False)
    came_or_went = arrangement.weighed != layout.ranks
    if came_or_went or chosen.layout.stages != layout.stages or chosen is not unclocked:
        turn.set(arrangement=replace(arrangement, weighed=layout.ranks))
        turn.record("considered", chosen=chosen.name, horizon_s=HORIZON_MS / 1e3, ways=list(map(_told, found)),
                    **({"without_clocks": unclocked.name} if chosen.clocks else {}),
                    **({"slow": _rounded(job.slow)} if job.slow else {}))  # fmt: skip
    return chosen.layout


def _rounded(slow: Mapping[int, float]) -> dict[str, float]:
    """In a record."""
    return {str(leader): round(times, 3) for leader, times in sorted(slow.items())}


def _told(way: Way) -> dict[str, Any]:
    """Of a way, in a record."""
    clocks = Counter(way.clocks.values())
    return {
        "way": way.name, "cells": [stage.width for stage in way.layout.stages], "step_ms": round(way.step_ms, 3),
        "moves_ms": round(way.moves_ms, 3) if math.isfinite(way.moves_ms) else None, "gain": round(way.gain, 4),
        **({} if way.problem is None else {"problem": way.problem}),
        **({"base_ms": round(way.base_ms, 3), "clocks": {f"{clock:g}": clocks[clock] for clock in sorted(clocks)}}
           if clocks else {}),
    }  # fmt: skip


def reshaped(turn: Turn, layout: Layout) -> Layout | None:
    """The layout with cells of the shape that somebody has asked for, if they have another one."""
    job, shape = turn.job, turn.job.arrangement.shape
    if shape is None:
        return None
    if shape != (layout.tp, layout.cp, layout.ep):
        try:
            return with_shape(job, layout, *shape)
        except NoLayout as error:  # cells may have been lost since it was asked for
            turn.record("refused", reason=str(error))
            turn.say(f"cells stay as they are: {error}", "refused")
    turn.set(arrangement=replace(job.arrangement, shape=None))
    return None


def with_shape(job: Job, layout: Layout, tp: int, cp: int, ep: int) -> Layout:
    """A layout with cells of other sizes. Raises NoLayout, saying why, if the job cannot be computed so."""
    flags = job.first.flags if job.first is not None else {}
    length = int(flags.get("seq_length", 0))
    if tp != layout.tp:
        _check_tensors(job, flags, tp)
    for unit, name in enumerate(layout.units):
        if name.startswith(EXPERTS) and (tp, ep) != (layout.tp, layout.ep):
            experts = job.shapes[unit].experts if unit in job.shapes else 0
            if not experts:
                raise NoLayout("the parameters of single experts cannot be told apart: start the job without "
                               "--moe-grouped-gemm, or with another --expert-model-parallel-size")
            if experts % ep:
                raise NoLayout(f"{experts} experts cannot be divided among {ep}: ask for an expert-parallel size that "
                               "divides them")
    if ep > 1 and not any(name.startswith(EXPERTS) for name in layout.units):
        raise NoLayout("the model has no experts: leave out --ep")
    if cp > 1 and length % (2 * cp):
        raise NoLayout(f"--seq-length {length} is not divisible by 2 x {cp}: a rank has two chunks of each sequence; "
                       "ask for another context-parallel size")
    if tp > 1 and _in_sequence(flags) and length // cp % tp:
        raise NoLayout(f"--seq-length {length} is not divisible by tensor-parallel size {tp} x {cp}: ask for other "
                       "sizes")
    if flags.get("rampup_batch_size", "None") != "None" and max(cp, ep) // cp != layout.batches:
        raise NoLayout("with --rampup-batch-size a cell has as many micro-batches at once as the job began with: ask "
                       "for sizes of the same ratio, or start the job anew from its newest checkpoint")
    return reshape(layout, tp, cp, ep, job.newest_epoch + 1)


def _check_tensors(job: Job, flags: Mapping[str, str], tp: int) -> None:
    """Raise NoLayout, saying why, if tensors cannot be divided among ``tp`` ranks."""
    grouped = ["num_query_groups"] if flags.get("group_query_attention") == "True" else []
    for name in ("num_attention_heads", *grouped):
        if int(flags.get(name, 0)) % tp:
            raise NoLayout(f"--{name.replace('_', '-')} {flags[name]} is not divisible by {tp}: ask for a "
                           "tensor-parallel size that divides it")
    for unit, shape in job.shapes.items():
        for rows in (member.rows for member in shape.members if member.runs and member.rows % tp):
            what = job.layout.units[unit] if job.layout is not None else unit
            raise NoLayout(f"a parameter of unit {what} has {rows} rows or columns, which cannot be divided among {tp} "
                           "ranks: ask for a tensor-parallel size that divides them (an embedding keeps the padded "
                           "vocabulary that the job began with)")
    if tp == 1:
        return
    if "sequence_parallel_asked" not in flags and flags.get("tensor_model_parallel_size") == "1":
        raise NoLayout("nobody knows whether more than one tensor-parallel rank would share sequences: start the job "
                       "with a larger --tensor-model-parallel-size, or with a script that keeps what was asked for")
    needs = [f"--{flag.replace('_', '-')}" for flag in ("num_experts", "multi_latent_attention")
             if flags.get(flag, "None") not in ("None", "False")]
    if needs and not _in_sequence(flags):
        raise NoLayout(f"{needs[0]} with more than one tensor-parallel rank needs --sequence-parallel, which the job "
                       "was started without: start it from its newest checkpoint with that flag")


def _in_sequence(flags: Mapping[str, str]) -> bool:
    """Whether tensor-parallel ranks, where there are several, share sequences between their layers."""
    return flags.get("sequence_parallel_asked", flags.get("sequence_parallel")) == "True"


def adapt(turn: Turn, old: Layout, new: Layout) -> None:
    """Cells have another shape. What somebody has asked for meanwhile is still to be done; of cells, as many ranks."""
    asked = turn.job.arrangement
    cells = asked.cells
    if cells is not None:
        cells = max(cells * old.cell_size // new.cell_size, new.pipeline_size)
    shape = asked.shape if asked.shape != (new.tp, new.cp, new.ep) else None
    turn.set(arrangement=replace(asked, shape=shape, cells=cells, at_clocks=Map()))


def wanted(job: Job) -> Wanted:
    """What somebody has asked for, as agents keep it."""
    asked, size = job.arrangement, 1 if job.layout is None else job.layout.cell_size
    return Wanted(number=asked.number, stages=asked.stages, shape=asked.shape,
                  ranks=None if asked.cells is None else asked.cells * size)


def tell_if_new(turn: Turn, before: Arrangement) -> None:
    """If something else is asked for than was, or nothing any more, agents are to know it."""
    now = turn.job.arrangement
    if now is before or (now.stages, now.cells, now.shape) == (before.stages, before.cells, before.shape):
        return
    turn.set(arrangement=replace(now, number=now.number + 1))
    for node in turn.job.nodes:
        turn.tell(node, wanted(turn.job))


def recall(turn: Turn, told: Wanted, layout: Layout) -> None:
    """A coordinator before has heard what somebody asks for. ``layout``: the present one."""
    cells = None if told.ranks is None else max(told.ranks // layout.cell_size, layout.pipeline_size)
    shape = None if told.shape == (layout.tp, layout.cp, layout.ep) else told.shape
    turn.set(arrangement=replace(turn.job.arrangement, number=told.number, stages=told.stages, cells=cells,
                                 shape=shape))


def described(layout: Layout) -> str:
    """What cells there are, for people."""
    sizes = " x ".join(f"{name}{size}" for name, size in (("TP", layout.tp), ("CP", layout.cp), ("EP", layout.ep)))
    return f"{sizes} ({layout.cell_size} ranks)"


def reached(turn: Turn) -> None:
    """The present layout is what costs suggest."""
    arrangement = turn.job.arrangement
    turn.set(arrangement=replace(arrangement, fits=turn.job.policy.arranges(arrangement.costs), placed=None))


def tabulate(turn: Turn, layout: Layout) -> None:
    """Have the scale table made anew if the layout is another one, or costs have changed."""
    arrangement, flags = turn.job.arrangement, {} if turn.job.first is None else turn.job.first.flags
    if arrangement.costs is None or "seq_length" not in flags or "global_batch_size" not in flags:
        return
    if arrangement.tabulated is not None:
        epoch, costs = arrangement.tabulated
        if epoch == layout.epoch and alike(layout, arrangement.costs, costs):
            return
    turn.set(arrangement=replace(arrangement, tabulated=(layout.epoch, arrangement.costs)))
    tokens = int(flags["seq_length"]) * int(flags["global_batch_size"])
    turn.do(Tabulate(layout, arrangement.costs, tokens, case_of(layout, flags)))


def arranged(job: Job, layout: Layout) -> Layout:
    """The stages there should be. Raises NoLayout if the cells cannot make the number that was asked for."""
    assert job.first is not None
    stages, costs, tied = job.arrangement.stages, job.costs, job.first.tied
    if stages is None:
        return job.policy.arrange(layout, costs, tied, foreseen(job.settings.schedule))
    costs, searched = costs or Costs.assumed(layout.units), job.settings.schedule == SEARCH
    found = replan(layout, costs, layout.epoch, stages={stages}, tied=tied,
                   split=splits(foreseen(job.settings.schedule)), recompute=searched)  # fmt: skip
    return recomputing(even(found, layout.epoch, job.slow), costs) if searched else found


def cells(job: Job, layout: Layout, newcomers: Collection[int], leaving: Collection[int]) -> int | None:
    """How many cells there should be; None: as many as so far. Raises NoLayout."""
    asked = job.arrangement.cells
    if job.policy.uses_all(job.arrangement.costs):
        return asked
    if asked is None and job.settings.spares:
        asked = job.world_size // layout.cell_size
    whole = [cell for cell in layout.cells.values() if set(leaving).isdisjoint(cell.ranks)]
    taken = {*leaving, *(rank for cell in whole for rank in cell.ranks)}
    there = len(whole) + len({*layout.ranks, *layout.spares, *newcomers} - taken) // layout.cell_size
    there = there if asked is None else min(asked, there)
    most = job.policy.cells(layout, there, job.costs, foreseen(job.settings.schedule))
    # A limit stays in the layout, also for a later coordinator, which may not know the costs.
    return None if most == there and asked is None and layout.most_cells is None else most
