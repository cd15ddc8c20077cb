"""Stages that begin with different numbers of layers, or with none: as Megatron splits them, and the same bits."""

from __future__ import annotations

import argparse
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.layout import LayoutError, gpt_units
from megatron_elastic.plan.split import split, through
from tests.jobs import Grid, Jobs, assert_same_training, inject
from tests.tiers.examples import examples


def flags(layers: int, pp: int, chunks: int = 1, **others: object) -> argparse.Namespace:
    return argparse.Namespace(**{
        "num_layers": layers, "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None, "pipeline_model_parallel_layout": None,
        "decoder_first_pipeline_num_layers": None, "decoder_last_pipeline_num_layers": None,
        "account_for_embedding_in_pipeline_split": False, "account_for_loss_in_pipeline_split": False, **others,
    })  # fmt: skip


# ---- as Megatron does it -----------------------------------------------------------------------


def of_megatron(args: argparse.Namespace) -> tuple[tuple[int, ...], ...]:
    """What Megatron's own function says for every stage and chunk."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    config = SimpleNamespace(
        num_layers=args.num_layers, pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=args.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=args.decoder_last_pipeline_num_layers,
        account_for_embedding_in_pipeline_split=args.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=args.account_for_loss_in_pipeline_split,
    )  # fmt: skip
    chunks = args.virtual_pipeline_model_parallel_size
    return tuple(
        tuple(get_num_layers_to_build(config, chunk if chunks else None, stage) for chunk in range(chunks or 1))
        for stage in range(args.pipeline_model_parallel_size)
    )


@settings(max_examples=examples(2000))
@given(
    pp=st.integers(2, 6), chunks=st.integers(1, 3), each=st.integers(1, 4), before=st.booleans(), after=st.booleans()
)
def test_ends_that_count_as_layers(pp: int, chunks: int, each: int, before: bool, after: bool) -> None:
    layers = pp * chunks * each - before - after
    args = flags(layers, pp, chunks, account_for_embedding_in_pipeline_split=before,
                 account_for_loss_in_pipeline_split=after)
    assert split(args) == of_megatron(args)


@settings(max_examples=examples(2000))
@given(
    pp=st.integers(2, 6), chunks=st.integers(1, 3), each=st.integers(1, 4), first=st.none() | st.integers(1, 4),
    last=st.none() | st.integers(1, 4),
)
def test_ends_with_numbers_of_their_own(pp: int, chunks: int, each: int, first: int | None, last: int | None) -> None:
    ends = [chunks * number for number in (first, last) if number is not None]
    args = flags(chunks * each * (pp - len(ends)) + sum(ends), pp, chunks,
                 decoder_first_pipeline_num_layers=first and chunks * first,
                 decoder_last_pipeline_num_layers=last and chunks * last)
    assert split(args) == of_megatron(args)


@settings(max_examples=examples(2000))
@given(pp=st.integers(1, 5), chunks=st.integers(1, 3), data=st.data())
def test_drawn(pp: int, chunks: int, data: st.DataObject) -> None:
    """Repetitions, nested or not, are unrolled as Megatron does it."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    piece = st.sampled_from(["t", "tt", "t*3", "t,t", "t*2"])
    inner = [data.draw(piece) for _ in range(pp * chunks)]
    text = "E" + "|".join(inner) + data.draw(st.sampled_from(["", "t", "(tt)*2"])) + "L"
    theirs = PipelineParallelLayerLayout(text, pp)
    args = flags(theirs.flatten_layout.count(LayerType.decoder), pp, pipeline_model_parallel_layout=text)
    assert split(args) == tuple(
        tuple(chunk.count(LayerType.decoder) for chunk in stage) for stage in theirs.layout
    )


def test_stages_repeat() -> None:
    assert split(flags(61, 8, pipeline_model_parallel_layout="Et*7|(t*8|)*6t*6L")) == ((7,), *[(8,)] * 6, (6,))
    assert split(flags(61, 16, pipeline_model_parallel_layout="Et|(tt|)*30L")) == ((1, 2), *[(2, 2)] * 14, (2, 0))


def test_any_number_of_layers() -> None:
    """What is left over is not at the end, where the head is."""
    assert split(flags(61, 8)) == (*[(8,)] * 5, *[(7,)] * 3)
    assert split(flags(61, 8, 2)) == (*[(4, 4)] * 5, *[(4, 3)] * 3)


def test_as_a_v() -> None:
    """The two chunks at the turn are one; flags of Megatron's say what they say of a loop, along the way."""
    assert split(flags(8, 2, elastic_placement="v")) == ((2, 2), (4,))
    assert split(flags(10, 4, 2, elastic_placement="v")) == ((2, 1), (2, 1), (1, 1), (2,))
    assert through(flags(10, 4, elastic_placement="v")) == (0, 1, 2, 3, 2, 1, 0)
    assert split(flags(7, 2, elastic_placement="v", account_for_loss_in_pipeline_split=True)) == ((2, 1), (4,))
    assert split(flags(8, 2, elastic_placement="v", decoder_last_pipeline_num_layers=3)) == ((3, 2), (3,))
    drawn = flags(6, 2, elastic_placement="v", pipeline_model_parallel_layout="Et|tt|t|ttL")
    assert split(drawn) == ((1, 2), (3,))
    assert through(flags(8, 2, 2, elastic_placement="search")) == (0, 1, 0, 1)


@pytest.mark.parametrize(("args", "message"), [
    (flags(8, 1, elastic_placement="v"), "--elastic-placement v places 2 chunks on each of several stages, not 2 on 1"),
    (flags(12, 2, 3, elastic_placement="v"), "places 2 chunks on each of several stages, not 3 on 2"),
    (flags(2, 2, elastic_placement="v"), "chunk 1 of stage 1 of the pipeline would be empty"),
    (flags(2, 4), "stage 2 of the pipeline would be empty with --num-layers 2: use fewer stages, or more layers"),
    (flags(5, 2, 4), "chunk 2 of stage 1 of the pipeline would be empty"),
    (flags(4, 2, decoder_first_pipeline_num_layers=4),
     "--decoder-first-pipeline-num-layers 4 leave 0 of 4 layers for 1 other stages"),
    (flags(4, 2, decoder_first_pipeline_num_layers=1, decoder_last_pipeline_num_layers=2),
     "--decoder-first-pipeline-num-layers 1 and --decoder-last-pipeline-num-layers 2 leave 1 of 4 layers for 0 other"),
    (flags(4, 2, decoder_last_pipeline_num_layers=0), "--decoder-last-pipeline-num-layers 0 leave 4 of 4 layers"),
    (flags(4, 2, decoder_last_pipeline_num_layers=1, account_for_loss_in_pipeline_split=True),
     "--decoder-first/last-pipeline-num-layers and --account-for-embedding/loss-in-pipeline-split say different"),
    (flags(4, 2, pipeline_model_parallel_layout="Ett|tx*2L"), "--pipeline-model-parallel-layout Ett|tx*2L: x is unkn"),
    (flags(4, 2, pipeline_model_parallel_layout="Ett|ttmL"), "has m 1 times, but --mtp-num-layers is 0"),
    (flags(4, 2, pipeline_model_parallel_layout="Ettmm|ttL", mtp_num_layers=2), "directly before L"),
    (flags(4, 2, pipeline_model_parallel_layout="Ett|tt|mm|L", mtp_num_layers=2), "directly before L"),
    (flags(4, 2, pipeline_model_parallel_layout="tt|ttL"), "it has to begin with E, the embedding, and to end with L"),
    (flags(4, 2, pipeline_model_parallel_layout="Ett|tt|L"), "has 3 stages, which is no multiple of --pipeline-model-"),
    (flags(5, 2, pipeline_model_parallel_layout="Ett|ttL"), "has 4 layers, not --num-layers 5"),
    (flags(4, 4, pipeline_model_parallel_layout="Ett||tt|L"), "stage 1 of the pipeline would be empty"),
])  # fmt: skip
def test_what_cannot_be_split(args: argparse.Namespace, message: str) -> None:
    with pytest.raises(LayoutError) as refused:
        split(args)
    assert message in str(refused.value)


def test_units() -> None:
    """An end may be alone; chunks are runs of units."""
    assert gpt_units(4, 3, True, True, split=[[0], [4], [0]])[1] == [[0, 1], [2, 3, 4, 5], [0, 6]]
    assert gpt_units(4, 2, False, False, split=[[1, 2], [1, 0]])[1] == [[0, 1, 3, 4], [2, 5]]


# ---- real ranks ------------------------------------------------------------------------------


PP2, PP4 = Grid(tp=1, pp=2, steps=4), Grid(tp=1, pp=4, steps=4)


def test_ends_alone(jobs: Jobs) -> None:
    """A stage with only the embedding, and one with only the head: the same bits, when they lose ranks, too."""
    job = jobs.run(*PP4.flags, "--pipeline-model-parallel-layout", "E|tt|tt|L", *inject("1@2:forward", "7@3:backward"))
    assert [stage.units for stage in job.layouts()[0].stages] == [(0, 1), (2, 3), (4, 5), (0, 6)]
    assert_same_training(job, jobs.undisturbed(*PP4.flags), [1, 7])


def test_uneven(jobs: Jobs) -> None:
    job = jobs.run(*PP2.flags, "--decoder-first-pipeline-num-layers", "1", *inject("5@2:backward"))
    assert_same_training(job, jobs.undisturbed(*PP2.flags), [5])


def test_chunks_of_different_sizes(jobs: Jobs) -> None:
    """Interleaved; the last chunk has only the head."""
    job = jobs.run(*PP2.flags, "--pipeline-model-parallel-layout", "E|t*2|t*2|L", *inject("6@3:forward"))
    assert job.layouts()[0].num_chunks == 2
    assert_same_training(job, jobs.undisturbed(*PP2.flags), [6])
