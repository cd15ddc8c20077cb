"""Scale: somebody asks for another number of pipeline stages or of cells, or for cells of another shape.

What is asked for is kept (``Arrangement``) and planned as other changes are. Cells that are too many leave as politely
as those of a node that is to go (``protocol.drain``), but their ranks stay, as spares, and come again when more cells
are asked for.
"""

from __future__ import annotations

import dataclasses

from msgspec.structs import replace

from megatron_elastic.cluster.messages import Answer, Scale
from megatron_elastic.cluster.protocol.changes import arrangement, change
from megatron_elastic.cluster.protocol.effects import Reply
from megatron_elastic.cluster.protocol.job import Job
from megatron_elastic.cluster.protocol.turn import Turn
from megatron_elastic.layout import Layout
from megatron_elastic.plan import NoLayout, admit


def asked(turn: Turn, person: int, request: Scale) -> None:
    """Says whether it will be done; that takes some steps."""
    job, layout = turn.job, turn.job.layout
    if layout is None:
        turn.do(Reply(person, Answer(ok=False, text="the job is not training yet")))
        return
    if not request.cp is request.ep is request.tp is None:
        _reshape(turn, person, request, layout)
        return
    try:
        stages, cells = _sizes(job, layout, request)
    except NoLayout as error:
        turn.do(Reply(person, Answer(ok=False, text=str(error))))
        return
    as_now = request.stages is None and stages == _stages(job, layout)
    wanted = replace(
        job.arrangement, fits=False, stages=job.arrangement.stages if as_now else stages,
        cells=job.arrangement.cells if cells is None else cells,
    )  # fmt: skip
    turn.set(arrangement=wanted)
    turn.record("asked", stages=wanted.stages, cells=wanted.cells)
    text = f"the pipeline will have {stages} stages, from {layout.pipeline_size}"
    if cells is not None:
        text += f", and {cells} cells of {layout.cell_size} ranks, from {len(layout.cells)}"
    change.consider(turn)
    turn.do(Reply(person, Answer(ok=True, text=text)))


def _reshape(turn: Turn, person: int, request: Scale, layout: Layout) -> None:
    """Cells are to have another tensor-, context- or expert-parallel size."""
    job = turn.job
    tp, cp, ep = request.tp or layout.tp, request.cp or layout.cp, request.ep or layout.ep
    try:
        new = arrangement.with_shape(job, layout, tp, cp, ep)
    except NoLayout as error:
        turn.do(Reply(person, Answer(ok=False, text=str(error))))
        return
    turn.set(arrangement=replace(job.arrangement, shape=(tp, cp, ep), fits=False))
    turn.record("asked", tp=tp, cp=cp, ep=ep)
    change.consider(turn)
    text = f"cells will be {arrangement.described(new)}, from {arrangement.described(layout)}; "
    text += _exactness(job, layout, new)
    turn.do(Reply(person, Answer(ok=True, text=text)))


def _exactness(job: Job, layout: Layout, new: Layout) -> str:
    """What another shape means for the numbers, for people."""
    flags = job.first.flags if job.first is not None else {}
    wanted = {"moe_token_dispatcher_type": "alltoall", "elastic_consistency": "bitwise"}
    same = (new.tp, new.cp) == (layout.tp, layout.cp)
    if same and wanted.items() <= flags.items():
        return "the numbers stay the same, bit for bit"
    draws = any(flags.get(f"{kind}_dropout", "0.0") != "0.0" for kind in ("attention", "hidden"))
    if not same and draws:
        return "from then on the numbers differ by rounding, and by what dropout draws for other parts of layers and " \
               "sequences"
    return "the numbers stay the same but for rounding"


def _stages(job: Job, layout: Layout) -> int:
    """As somebody has asked, or as there are."""
    return job.arrangement.stages or layout.pipeline_size


def _sizes(job: Job, layout: Layout, request: Scale) -> tuple[int, int | None]:
    """How many stages, and how many cells in all if anything is said about that. Raises NoLayout if it cannot be.

    For a number of ranks there are fewer stages where there are not enough cells for each, but never so few cells that
    copies of states have no place beside them.
    """
    stages, size = request.stages or _stages(job, layout), layout.cell_size
    cells = None if request.width is None else request.width * stages
    if request.ranks is not None:
        cells = request.ranks // size
        if request.stages is None and 1 + layout.num_replicas <= cells < stages:
            stages = cells
    newcomers, leaving = change.newcomers(job), change.leaving(job)
    if cells is not None:
        there = len({*layout.ranks, *layout.spares, *newcomers} - leaving)
        if cells < stages:
            raise NoLayout(f"{stages} stages take {stages * size} ranks at least, {size} for a cell of each: ask for "
                           "more ranks, or for fewer stages")
        if cells * size > there:
            raise NoLayout(f"{cells} cells of {size} ranks take {cells * size} ranks, and {there} are there: ask for "
                           "fewer, or start more (a node that is started with the same command joins)")
    if stages != layout.pipeline_size or request.stages is not None:
        wide = dataclasses.replace(layout, most_cells=layout.most_cells if cells is None else cells)
        asked_for = replace(job, arrangement=replace(job.arrangement, stages=stages))
        arrangement.arranged(asked_for, admit(wide, newcomers, layout.epoch, leaving))
    return stages, cells
