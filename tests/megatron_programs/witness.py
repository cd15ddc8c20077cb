"""Trains like examples/pretrain_gpt.py. In every layout each rank asks Megatron where it is, and compares.

Environment: ``WITNESS_DIES`` = ``RANK@POINT``: that rank kills itself where it first meets the hook point while the
number of stages or the shape of cells changes, or in the step after.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from pretrain_gpt import check_arguments, main

if TYPE_CHECKING:
    from megatron_elastic.adaptor.model.stage import Stage
    from megatron_elastic.adaptor.training.tenure import Tenure
    from megatron_elastic.adaptor.training.trainer import Trainer
    from megatron_elastic.layout import Cell, Layout

__all__ = ["check_arguments"]


def check(layout: Layout, rank: int) -> None:
    """What Megatron's functions say at this rank follows from the layout. torch's ranks are positions in it."""
    import torch.distributed as dist
    from megatron.core import parallel_state as ps
    from megatron.core.process_groups_config import ProcessGroupCollection

    position = {member: index for index, member in enumerate(layout.ranks)}
    stage, cell, tp, cp, ep = layout.stage_of(rank), layout.cell_of(rank), layout.tp, layout.cp, layout.ep
    cells, last = layout.stages[stage].cells, layout.pipeline_size - 1
    place, size, context = layout.place_of(rank), layout.cell_size, layout.cp_index(rank)

    def across(first: int, step: int, *each: Cell) -> list[int]:
        """The positions of every ``step``-th rank of cells, from place ``first`` on."""
        return [position[member] for of in each for member in of.ranks[first::step]]

    team = across(place // tp * tp, 1, cell)[:tp]
    batch = across(layout.batch_of(rank) * tp * cp, 1, cell)[: tp * cp]
    experts = across(place // (tp * ep) * tp * ep, 1, cell)[: tp * ep]
    columns = across(place % (tp * cp), tp * cp, *cells)
    same: dict[str, tuple[Any, Any]] = {
        "rank": (dist.get_rank(), position[rank]),
        "ranks": (dist.get_world_size(), len(layout.ranks)),
        "pipeline rank": (ps.get_pipeline_model_parallel_rank(), stage),
        "pipeline size": (ps.get_pipeline_model_parallel_world_size(), layout.pipeline_size),
        "first stage": (ps.is_pipeline_first_stage(), stage == 0),
        "last stage": (ps.is_pipeline_last_stage(), stage == last),
        "tensor rank": (ps.get_tensor_model_parallel_rank(), place % tp),
        "tensor size": (ps.get_tensor_model_parallel_world_size(), tp),
        "tensor source": (ps.get_tensor_model_parallel_src_rank(), team[0]),
        "data rank": (ps.get_data_parallel_rank(), columns.index(position[rank])),
        "data size": (ps.get_data_parallel_world_size(), len(columns)),
        "data size with cp": (ps.get_data_parallel_world_size(with_context_parallel=True), len(cells) * size // tp),
        "data source": (ps.get_data_parallel_src_rank(), columns[0]),
        "context size": (ps.get_context_parallel_world_size(), cp),
        "context rank": (ps.get_context_parallel_rank(), context),
        "expert size": (ps.get_expert_model_parallel_world_size(), ep),
        "expert rank": (ps.get_expert_model_parallel_rank(), place // tp % ep),
        "in embedding group": (ps.is_rank_in_embedding_group(), stage in (0, last)),
        "in positions group": (ps.is_rank_in_position_embedding_group(), stage == 0),
    }
    groups = ProcessGroupCollection.use_mpu_process_groups()
    alike = across(place % tp, tp, *cells)
    members = {
        "tp": team, "dp": columns, "dp_cp": alike, "intra_dp_cp": alike,
        "expt_dp": across(place % (tp * ep), tp * ep, *cells), "tp_dp_cp": across(0, 1, *cells),
        "cp": batch[place % tp :: tp], "tp_cp": batch, "ep": experts[place % tp :: tp], "tp_ep": experts,
        "expt_tp": team,
    }  # fmt: skip
    for name, wanted in members.items():
        group = getattr(groups, name)
        same[f"members of {name}"] = (dist.get_process_group_ranks(group), wanted)
        same[f"rank in {name}"] = (group.rank(), wanted.index(position[rank]))
    for name, sizes in {"pp": 1, "mp": tp}.items():
        group = getattr(groups, name)
        through = [layout.ranks[member] for member in dist.get_process_group_ranks(group)]
        stages = [index for index in range(layout.pipeline_size) for _ in range(sizes)]
        same[f"stages of {name}"] = ([layout.stage_of(member) for member in through], stages)
        same[f"rank in {name}"] = (through[group.rank()], rank)
    pipeline = dist.get_process_group_ranks(groups.pp)
    same["first of pipeline"] = (ps.get_pipeline_model_parallel_first_rank(), pipeline[0])
    same["last of pipeline"] = (ps.get_pipeline_model_parallel_last_rank(), pipeline[-1])
    same["next in pipeline"] = (ps.get_pipeline_model_parallel_next_rank(), pipeline[(stage + 1) % len(pipeline)])
    same["previous in pipeline"] = (ps.get_pipeline_model_parallel_prev_rank(), pipeline[(stage - 1) % len(pipeline)])
    if stage in (0, last):
        ends = [layout.stage_of(layout.ranks[m]) for m in dist.get_process_group_ranks(groups.embd)]
        same["stages of embd"] = (ends, sorted({0, last}))
    wrong = {name: pair for name, pair in same.items() if pair[0] != pair[1]}
    assert not wrong, f"rank {rank} in\n{layout}\nMegatron's answers and those expected: {wrong}"


def layers(stage: Stage) -> dict[int, tuple[Any, int]]:
    """The layers of a stage by number, and how many hooks each has."""
    return {
        layer.layer_number: (layer, sum(len(module._forward_pre_hooks) for module in layer.modules()))
        for model in stage.models
        for layer in model.decoder.layers
    }


class Death:
    """A rank's end while the number of stages or the shape of cells changes: ``RANK@POINT`` after the ``switch``, and
    ``RANK@recut`` or ``RANK@recut>POINT`` before it, while states are cut anew.
    """

    def __init__(self, spec: str) -> None:
        rank, _, where = spec.partition("@")
        after, _, self.point = where.rpartition(">")
        self.after = after or ("recut" if where == "recut" else "switch")
        self.rank = int(rank)
        self.near = False

    def look(self, trainer: Trainer, point: str) -> None:
        """``trainer``'s rank is at a hook point."""
        if point == "interrupt":
            self.near = False
        if point == self.after:
            from megatron_elastic.layout import decode

            assert trainer.tenure is not None and trainer.tenure.plan is not None
            planned, now = (
                (layout.pipeline_size, layout.tp, layout.cp, layout.ep)
                for layout in (decode(trainer.tenure.plan.layout), trainer.layout)
            )
            self.near = planned != now
        if self.near and point == self.point:
            os.kill(os.getpid(), signal.SIGKILL)


def install() -> None:
    """Have every layout looked at."""
    from megatron_elastic.device import stand_in

    stand_in.install()
    from megatron_elastic.adaptor.model.stage import Stage
    from megatron_elastic.adaptor.training import building
    from megatron_elastic.adaptor.training.trainer import Trainer
    from megatron_elastic.state.store import StateStore

    begin, begin_tenure, hold = Trainer.__init__, building.begin_tenure, Stage.hold

    def begin_tenure_and_check(trainer: Trainer, layout: Layout, store: StateStore, program: bytes | None) -> Tenure:
        check(layout, trainer.rank)
        return begin_tenure(trainer, layout, store, program)

    def hold_and_compare(self: Stage, layout: Layout) -> None:
        before = layers(self)
        hold(self, layout)
        after = layers(self)
        for number in before.keys() & after:
            assert before[number] == after[number], f"layer {number} stayed, but was built anew or has other hooks"

    def begin_to_die(self: Trainer, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        death = Death(os.environ["WITNESS_DIES"])
        if death.rank == self.rank:
            self.hooks.attach(lambda point, step, grain: death.look(self, point))

    Stage.hold = hold_and_compare  # type: ignore[method-assign]
    building.begin_tenure = begin_tenure_and_check
    if "WITNESS_DIES" in os.environ:
        Trainer.__init__ = begin_to_die  # type: ignore[method-assign]


if __name__ == "__main__":
    install()
    sys.exit(main())
