"""Contexts: several ranks have a part each of the same sequences; whoever dies, the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic import cli
from tests.jobs import Grid, Jobs, assert_same_training, inject
from tests.models.test_experts import BIAS, EVERYTHING, EXPERTS

LLAMA = "--position-embedding-type rope --group-query-attention --num-query-groups 2 --swiglu --disable-bias-linear"
LATENT = ("--multi-latent-attention --position-embedding-type rope --q-lora-rank 24 --kv-lora-rank 20 --qk-head-dim 12 "
          "--qk-pos-emb-head-dim 8 --v-head-dim 10 --qk-layernorm --normalization RMSNorm")  # fmt: skip
WITHOUT_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")


@settings(deadline=None)  # Megatron is imported
@given(size=st.integers(1, 4), chunk=st.integers(1, 3),
       window=st.none() | st.tuples(st.integers(0, 9), st.integers(0, 2)))  # fmt: skip
def test_ranks_have_the_rows_of_the_whole_mask(size: int, chunk: int, window: tuple[int, int] | None) -> None:
    """Of what ``get_default_causal_mask`` and ``get_sliding_window_causal_mask`` make on a device."""
    from megatron_elastic.adaptor.layers import attention, context

    length = 2 * size * chunk
    every = torch.ones(length, length, dtype=torch.bool)
    whole = every.triu(1) if window is None else ~every.triu(-window[0]).tril(window[1])
    chunks = [rows for index in range(size) for rows in context.chunks(length, size, index)]
    assert sorted(row for rows in chunks for row in rows) == list(range(length))
    for rows in chunks:
        mask, expected = attention._mask(rows, length, window, every.device), whole[rows.start : rows.stop]
        assert torch.equal(mask, expected[:, : mask.shape[1]])
        assert expected[:, mask.shape[1] :].all(), "what is left out nobody looks at"
        assert not mask[-1, -1], "and no more is computed"


@pytest.mark.parametrize(("tp", "cp", "pp", "extra"), [
    (1, 2, 2, EVERYTHING),
    pytest.param(2, 2, 1, f"--sequence-parallel {LLAMA} --bf16"),
    pytest.param(1, 2, 1, "--elastic-replay state"),
    pytest.param(1, 2, 2, f"{LATENT} --elastic-schedule split"),
    pytest.param(2, 2, 1, f"{LATENT} --sequence-parallel --bf16"),
    pytest.param(1, 4, 1, ""),
    pytest.param(1, 2, 2, f"{EXPERTS} {BIAS} --expert-model-parallel-size 2"),
    pytest.param(1, 2, 1, f"{EXPERTS} --expert-model-parallel-size 4"),
    pytest.param(1, 4, 1, f"{EXPERTS} {BIAS} --expert-model-parallel-size 2"),
    pytest.param(2, 2, 1, f"{EXPERTS} --sequence-parallel"),
], ids=["CP2 x PP2, everything", "TP2 x CP2, as Llama", "CP2, states replayed", "CP2 x PP2, latent",
        "TP2 x CP2, latent", "CP4", "CP2 x EP2 x PP2, biased", "CP2 x EP4", "CP4 x EP2, biased",
        "TP2 x CP2 with experts"])  # fmt: skip
def test_killed(jobs: Jobs, tp: int, cp: int, pp: int, extra: str) -> None:
    flags = (*Grid(tp=tp, pp=pp, steps=4).flags, "--context-parallel-size", str(cp), *extra.split())
    reference = jobs.undisturbed(*flags)
    first = reference.layouts()[0]
    assert (first.tp, first.cp) == (tp, cp)
    kills = {5: "5@2:backward"} if first.cell_size == 4 else {5: "5@2:backward", 1: "1@4:apply"}  # of two cells a stage
    job = jobs.run(*flags, *inject(*kills.values()))
    assert_same_training(job, reference, sorted(kills))


@pytest.mark.parametrize("extra", ["", LLAMA, LATENT, f"{EXPERTS} --moe-router-load-balancing-type aux_loss"],
                         ids=["GPT", "as Llama", "latent", "with experts"])  # fmt: skip
def test_contexts_change_losses_by_rounding_only(jobs: Jobs, extra: str) -> None:
    flags = (*Grid(tp=1, pp=2, steps=4).flags, *WITHOUT_DROPOUT, *extra.split())
    assert_contexts_round_only(jobs, *flags)


def assert_contexts_round_only(jobs: Jobs, *flags: str) -> None:
    """Losses and norms of the job with these flags are the same but rounding with two context-parallel ranks."""
    one, two = (
        jobs.undisturbed(*flags, "--context-parallel-size", str(cp), ranks=4 * cp).metrics() for cp in (1, 2)
    )
    for step, line in one.items():
        for name in ("loss", "grad_norm"):
            assert two[step][name] == pytest.approx(line[name], rel=1e-5), (step, name)


def test_micro_batches_are_cut(jobs: Jobs) -> None:
    """Nine of two samples, over two cells of two ranks: losses are the same but rounding, dropout included."""
    flags = (*Grid(tp=1, pp=1, steps=4).flags, "--context-parallel-size", "2", "--micro-batch-size", "2",
             "--global-batch-size", "18")  # fmt: skip
    reference = jobs.undisturbed(*flags, ranks=6)
    job = jobs.run(*flags, "--elastic-dataflow", "resize", *inject("3@2:backward"), ranks=6)
    cells = job.layouts()[-1].stages[0].cells
    assert [cell.ranks for cell in cells] == [(0, 1), (4, 5)] and all(cell.parts for cell in cells)
    for step, line in reference.metrics().items():
        assert job.metrics()[step]["loss"] == pytest.approx(line["loss"], rel=1e-6, abs=0), step


@pytest.mark.parametrize("victim", [1, 2])
def test_ranks_of_a_context_are_replaced(jobs: Jobs, victim: int) -> None:
    flags = (*Grid(tp=1, pp=1, steps=100, ranks=4).flags, "--context-parallel-size", "2", "--num-layers", "2")
    job = jobs.start(*flags, "--elastic-respawn", *inject(f"{victim}@3:grad_sync"), ranks=4)
    job.read_until("slices and grains are even over 4 ranks")
    job.finish()
    assert_same_training(job, jobs.undisturbed(*flags, ranks=4), [victim])


def test_layers_move_and_checkpoints_load_without_contexts(jobs: Jobs, tmp_path: Path) -> None:
    """A stage loses its last cell; a checkpoint goes on without contexts, with the losses that it would have had."""
    flags = (*Grid(tp=1, pp=2, steps=6).flags, *WITHOUT_DROPOUT)
    contexts, saves = ("--context-parallel-size", "2"), ("--save", str(tmp_path), "--save-interval", "3")
    reference = jobs.undisturbed(*flags, *contexts)
    job = jobs.run(*flags, *contexts, *saves, *inject("4@2:backward", "6@4:backward"))
    assert job.layouts()[-1].pipeline_size == 1
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0, job.output
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    rest = jobs.run(*flags, "--load", str(tmp_path), ranks=4)
    theirs = reference.metrics()
    assert [line["loss"] for line in rest.metrics().values()] == pytest.approx(
        [theirs[step]["loss"] for step in (4, 5, 6)], rel=1e-5
    )
