"""The predict command: tables as people write them, checks, scale tables, and what it refuses."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megatron_elastic import cli
from megatron_elastic.layout import Layout, gpt_units, joined, way
from megatron_elastic.pipeline import simulate
from megatron_elastic.pipeline.schedule import usual
from megatron_elastic.pipeline.simulate import fastest
from megatron_elastic.plan import Costs
from megatron_elastic.plan.costs.cost import UnitCost
from megatron_elastic.plan.graph import Planner
from megatron_elastic.plan.predict import (
    DEVICES,
    FITTED,
    Case,
    Columns,
    Constants,
    Predictor,
    ScaleTable,
    ScaleTableError,
    Table,
    TableError,
    by_model,
    by_profile,
    divisions,
    predict,
    scale_table,
)
from megatron_elastic.plan.predict.foresight import Foresee, Foreseen, stand_in
from megatron_elastic.plan.predict.likeness import case_of, likened, resized
from megatron_elastic.plan.predict.outlook import outlook
from megatron_elastic.plan.predict.past import corrected, past
from megatron_elastic.prediction import main
from tests.placements import along

HEADER = (
    "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,tensor parallelism,"
    "data parallelism,pipeline parallelism,iteration time (ms)"
)
ROW = "8,32,4,1024,16,24,1024,2,2,2,219.75"
EXPECTED = Case(24, 1024, 16, 1024, tp=2, pp=2, dp=2, micro_batch=4, global_batch=32, recompute=True)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def read(text: str) -> Table:
    return Table.parse(text, "T.csv", recompute=True)


# ---- tables ---------------------------------------------------------------------------------


def test_the_table_that_vtrain_publishes() -> None:
    table = read(f"{HEADER}\n{ROW}\n")
    assert table.cases == (EXPECTED,)
    assert (table.unit, table.seconds(1.0).tolist(), table.lines) == (1e-3, [pytest.approx(0.21975)], (2,))


@pytest.mark.parametrize(
    ("header", "row"),
    [
        # Other names, order and signs.
        ("TP,PP,DP,MBS,GBS,Hidden,Heads,Layers,Seq Len,Iteration Time (ms)", "2,2,2,4,32,1024,16,24,1024,219.75"),
        ("iter_time_ms,n_layers,d_model,n_heads,seq_len,world_size,tp,pp,micro_batch_size,global_batch_size",
         "219.75,24,1024,16,1024,8,2,2,4,32"),
        ("Number of GPUs;Tensor Parallel Size;Pipeline Parallel Size;Micro Batch;Global Batch;Num Layers;Hidden Dim;"
         "Num Attention Heads;Sequence Length;Step Time [s]", "8;2;2;4;32;24;1024;16;1024;0.21975"),
        ("model\tNum. Layers\tHiddenSize\tNum Heads\tSeqLen\ttensor-model-parallel-size\tpipeline-model-parallel-size\t"
         "data-parallel-size\tmicroBatchSize\tglobalBatchSize\telapsed time per iteration (ms)\tnote",
         "GPT\t24\t1024\t16\t1024\t2\t2\t2\t4\t32\t219.75\tfast, or so"),
        (" tp , pp , dp , micro batch (samples) , global batch , hidden size , heads , layers , seq , ms/iter ",
         " 2 , 2 , 2 , 4 , 32 , 1024 , 16 , 24 , 1024 , 219.75 "),
        # Quoted, with a thousands separator; grains in place of the global batch.
        ('TP,PP,DP,MBS,"gradient accumulation steps","Hidden size",Heads,Layers,"Context length","Latency, s"',
         '2,2,2,4,4,"1,024",16,24,"1,024",0.21975'),
        ("TP;PP;DP;MBS;GBS;Hidden;Heads;Layers;Seq;Iteration time (ms)", "2;2;2;4;32;1.024e3;16;24;1024;219,75"),
        # A prediction of others beside the measurement, and a step's number.
        ("step,predicted iteration time (ms),time (ms),iteration time (ms),tp,pp,dp,mbs,gbs,hidden,heads,layers,seq",
         "7,999,998,219.75,2,2,2,4,32,1024,16,24,1024"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("start", ["", "\ufeff", "\n\n"])
def test_tables_of_others(header: str, row: str, start: str) -> None:
    table = read(f"{start}{header}\r\n{row}\r\n\r\n{row}\r\n")
    assert table.cases == (EXPECTED, EXPECTED)
    assert table.seconds(1.0).tolist() == pytest.approx([0.21975] * 2)
    upper = read(f"{start}{header.upper().replace('[S]', '[s]')}\n{row}\n")
    assert upper.cases == (EXPECTED,)


def test_a_file_of_bytes_may_begin_with_a_mark_or_be_utf_16(tmp_path: Path) -> None:
    for coding in ("utf-8", "utf-8-sig", "utf-16"):
        path = tmp_path / f"{coding}.csv"
        path.write_bytes(f"{HEADER}\n{ROW}\n".encode(coding))
        assert Table.read(path, recompute=True).cases == (EXPECTED,)
    path.write_bytes(b"\xff\x00\x80")
    with pytest.raises(TableError, match="not text"):
        Table.read(path, recompute=True)


def test_what_else_a_table_may_say() -> None:
    header = f"{HEADER},vocab size,activation checkpointing,virtual stages,FFN hidden size,KV heads"
    cases = read(f"{header}\n{ROW},32000,none,2,4000,8\n{ROW},32000,full,,,\n{ROW},50000,selective,-,0,16").cases
    assert cases[0] == replace(EXPECTED, vocab_size=32_000, recompute=False, chunks=2, ffn=4000, groups=8)
    assert cases[1] == replace(EXPECTED, vocab_size=32_000, recompute=True)
    assert cases[2] == replace(EXPECTED, vocab_size=50_000, recompute=False, groups=16)


def test_rows_without_a_time_are_counted_and_left_out() -> None:
    table = read(f"{HEADER}\n{ROW}\n8,32,4,1024,16,24,1024,2,2,2,OOM\n8,32,4,1024,16,24,1024,2,2,2,\n")
    assert (len(table.cases), table.skipped) == (1, 2)


@pytest.mark.parametrize("lost", ["hidden size", "iteration time (ms)", "sequence length", "# layers",
                                  "attention heads"])  # fmt: skip
def test_a_column_that_is_missing_is_named_with_those_that_are_there(lost: str) -> None:
    with pytest.raises(TableError) as error:
        read(f"{HEADER.replace(lost, 'comment')}\n{ROW}\n")
    assert repr(lost.replace(" (ms)", "").replace("# ", "")) in str(error.value)
    assert "'comment'" in str(error.value) and "'global batch'" in str(error.value)


def test_all_columns_that_are_missing_are_named_and_those_that_say_nothing() -> None:
    with pytest.raises(TableError, match=r"no column 'hidden size'; the columns are .*; also missing: 'attention he"):
        read(f"{HEADER.replace('hidden size', 'x').replace('attention heads', 'y')}\n{ROW}\n")
    assert read(f"{HEADER},loss, note\n{ROW},1.5,a\n").unknown == ("loss", "note")
    assert read(f"{HEADER}\n{ROW}\n").unknown == ()


def test_one_parallel_size_follows_from_the_others_and_the_devices() -> None:
    for lost in ("tensor", "data", "pipeline"):
        assert read(f"{HEADER.replace(f'{lost} parallelism', 'x')}\n{ROW}\n").cases == (EXPECTED,)
        with pytest.raises(TableError, match=f"no column '{lost} parallelism', nor others that tell"):
            read(f"{HEADER.replace(f'{lost} parallelism', 'x').replace('# GPUs', 'y')}\n{ROW}\n")
    with pytest.raises(TableError, match="no column 'micro batch'"):
        read(f"{HEADER.replace('micro batch', 'x')}\n{ROW}\n")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "the file is empty"),
        (HEADER, "no row with a time"),
        (f"{HEADER}\n{ROW.replace('1024', 'big', 1)}", "line 2: 'hidden size' is 'big', but must be a positive number"),
        (f"{HEADER}\n{ROW.replace('24', '2.5')}", "must be a"),
        (f"{HEADER}\n{ROW[:-6]}-3", "line 2: 'iteration time .ms.' is '-3'"),
        (f"{HEADER}\n{ROW}\n16{ROW[1:]}", "line 3: '# GPUs' is 16, but the parallel sizes make 8"),
        (f"{HEADER},TP\n{ROW},2", "no row|the same"),
        (f"{HEADER},recompute\n{ROW},some", "line 2: 'recompute' is 'some', but must be 'full' or 'none'"),
        (f"{HEADER}\n8,32,4", "no row with a time"),
        (f'{HEADER}\n"' + f"{ROW}\n" * 10_000, r"line \d+ cannot be read .*; does a quotation end"),
    ],
)  # fmt: skip
def test_tables_that_cannot_be_read(text: str, why: str) -> None:
    if text.startswith(f"{HEADER},TP"):
        assert read(text).columns["tp"] == "tensor parallelism", "the fuller name counts"
        return
    with pytest.raises(TableError, match=why):
        read(text)


def test_two_columns_of_one_name_are_refused() -> None:
    with pytest.raises(TableError, match="are the same: leave one out"):
        read(f"{HEADER},Iteration time [s]\n{ROW},1")


# ---- checks ---------------------------------------------------------------------------------


def measured(path: Path, cases: Sequence[Case], constants: Constants, title: str = "iteration time (ms)") -> Path:
    """A table of what the cases take on a machine of these constants."""
    times = predict(Columns.of(cases), DEVICES["a100-80g"], constants).total * (1 if "(s)" in title else 1e3)
    rows = [
        f"{case.devices},{case.global_batch},{case.micro_batch},{case.hidden},{case.heads},{case.layers},"
        f"{case.seq_length},{case.tp},{case.dp},{case.pp},{time}"
        for case, time in zip(cases, times, strict=True)
    ]
    path.write_text("\n".join([HEADER.replace("iteration time (ms)", title), *rows]))
    return path


def some(count: int, seed: int, nodes: int = 1) -> list[Case]:
    """Layouts of up to so many nodes of 8, with recomputation."""
    rng = np.random.default_rng(seed)
    made: list[Case] = []
    while len(made) < count:
        tp, pp, dp = (int(2 ** rng.integers(0, 6)) for _ in range(3))
        hidden = int(1024 * 2 ** rng.integers(0, 3))
        if tp <= 8 and tp * pp * dp <= 8 * nodes:
            made.append(Case(
                2 * pp, hidden, hidden // 64, 2048, tp=tp, pp=pp, dp=dp, micro_batch=2,
                global_batch=2 * dp * int(rng.integers(1, 9)), recompute=True,
            ))  # fmt: skip
    return made


SLOW = replace(FITTED, matmul=0.4, launch_ms=1.5, network=0.2, message_us=90)


def last(out: str) -> dict[str, float]:
    figures = json.loads(out.splitlines()[-1])
    assert set(figures) == {"rows", "mean_error", "median_error", "worst"}
    assert isinstance(figures, dict)
    return figures


def test_a_check_by_the_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = measured(tmp_path / "T.csv", some(30, 1), FITTED)
    code, out, _ = run(capsys, "--check", table)
    assert code == 0
    figures = last(out)
    assert figures["rows"] == 30 and figures["worst"] < 1e-5
    assert "taken to be so: full recomputation, a vocabulary of 51200" in out
    assert "the defaults, fitted on 144 rows of vTrain's table" in out
    code, out, _ = run(capsys, "--check", table, "--json")
    assert out.count("\n") == 1 and last(out) == figures


def test_a_check_of_another_machine_says_that_it_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = measured(tmp_path / "T.csv", some(30, 1), replace(SLOW, matmul=0.1, launch_ms=9))
    _, out, _ = run(capsys, "--check", table)
    assert last(out)["mean_error"] > 0.3
    assert "the table may be of other devices" in out


@pytest.mark.parametrize("nodes", [1, 16])
def test_a_check_after_a_fit_on_others(tmp_path: Path, capsys: pytest.CaptureFixture[str], nodes: int) -> None:
    """24 rows of another machine tell the others, also of several nodes."""
    table = measured(tmp_path / "T.csv", some(200, 1, nodes), SLOW)
    others = measured(tmp_path / "O.csv", some(24, 2, nodes), SLOW)
    _, out, _ = run(capsys, "--check", table)
    before = last(out)["mean_error"]
    saved, drawn = tmp_path / "C.json", tmp_path / "e.svg"
    code, out, _ = run(capsys, "--check", table, "--fit", others, "--save-constants", saved, "--svg", drawn)
    assert code == 0 and "fitted on 24 rows of O.csv" in out and "held out in turn there" in out
    assert last(out)["mean_error"] < 0.05 < 2 * before
    root = ElementTree.fromstring(drawn.read_text())
    assert len(root.findall(".//{*}circle/{*}title")) == 200
    _, out, _ = run(capsys, "--check", table, "--constants", saved)
    model = last(out)
    _, out, _ = run(capsys, "--check", table, "--fit", others, "--model-only")
    assert last(out)["mean_error"] == pytest.approx(model["mean_error"], abs=1e-4)


def test_names_of_columns_are_shown_with_their_brackets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = measured(tmp_path / "T.csv", some(3, 1), FITTED, "iteration time [s]")
    _, out, _ = run(capsys, "--check", table)
    assert "time from 'iteration time [s]'" in out


def test_rows_that_were_fitted_on_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = some(40, 1)
    distinct = list(dict.fromkeys(cases))
    table = measured(tmp_path / "T.csv", distinct, SLOW)
    others = measured(tmp_path / "O.csv", distinct[:12], SLOW)
    _, out, _ = run(capsys, "--check", table, "--fit", others)
    assert "12 of the rows are also in O.csv" in out
    assert f"the {len(distinct) - 12} others: " in out
    assert last(out)["rows"] == len(distinct)


def test_times_in_seconds_are_seen_where_the_table_does_not_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for scale in (1.0, 1e3):
        cases = some(20, 1)
        title = f"iteration time ({'s' if scale == 1 else 'ms'})"
        table = measured(tmp_path / "T.csv", cases, FITTED, title)
        table.write_text(table.read_text().replace(" (s)", "").replace(" (ms)", ""))
        _, out, _ = run(capsys, "--check", table, "--fit", table)
        assert last(out)["mean_error"] < 0.05
        assert f"times in {'seconds' if scale == 1 else 'milliseconds'}, which the table does not say" in out


def test_what_a_check_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = measured(tmp_path / "T.csv", some(3, 1), FITTED)
    wrong = tmp_path / "W.csv"
    wrong.write_text("a,b\n1,2\n")
    for arguments, why in (
        (["--check", tmp_path / "none.csv"], "No such file"),
        (["--check", wrong], "W.csv: there is no column 'hidden size'; the columns are 'a', 'b'"),
        (["--check", table, "--fit", wrong], "W.csv: there is no column"),
        (["--check", table, "--save-constants", "x"], "need --fit"),
        (["--check", table, "--scale-table", "8"], "leave one out"),
        (["--check", table, "--device", "abacus"], "neither a file nor one of"),
        (["--fit", table], "--fit needs --check"),
        (["--layers", 4], "--hidden, --heads, --seq, --global-batch-size must be given"),
    ):
        code, out, err = run(capsys, *arguments)
        assert (code, out) == (2, "") and why in err and err.count("\n") == 1, arguments


# ---- shapes ---------------------------------------------------------------------------------

SHAPE = ["--layers", 24, "--hidden", 2048, "--heads", 16, "--seq", 2048, "--global-batch-size", 64]


def test_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *SHAPE, "--tp", "1,2", "--pp", "1-3", "--dp", "4,5", "--micro-batch-size", 2, "--json")
    assert (code, out.count("\n")) == (0, 1)
    figures = json.loads(out)
    assert len(figures["cases"]) == 6 and len(figures["refused"]) == 6, "64 samples cannot be divided among 5"
    speeds = [case["tokens_per_s"] for case in figures["cases"]]
    assert speeds == sorted(speeds, reverse=True)
    for case in figures["cases"]:
        assert case["devices"] == case["tp"] * case["pp"] * case["dp"]
        assert case["tokens_per_s"] == pytest.approx(64 * 2048 / case["step_ms"] * 1e3, rel=1e-3)
        assert 0 < case["utilisation"] < 1
        assert sum(case["parts_ms"].values()) == pytest.approx(case["step_ms"] - FITTED.step_ms, rel=1e-3)
        assert case["fits"] == (case["memory_bytes"] <= 80e9)
    code, out, _ = run(capsys, *SHAPE, "--dp", "4,5", "--device", "h100", "--micro-batch-size", 8)
    assert code == 0 and "does not fit" in out and "cannot be: TP1 PP1 DP5" in out and "989 TFLOP/s" in out


def test_layouts_of_so_many_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All, whatever their degrees; only the best of each number; and a picture of them."""
    plot = tmp_path / "speeds.svg"
    code, out, _ = run(capsys, *SHAPE, "--devices", "8,16", "--json", "--svg", plot)
    assert code == 0
    every = json.loads(out)["cases"]
    assert {case["devices"] for case in every} == {8, 16}
    assert {(case["tp"], case["pp"]) for case in every} >= {(1, 1), (8, 1), (2, 4), (1, 8)}
    assert all(case["tp"] <= 8 for case in every), "inside a node"
    assert plot.read_text().count("<circle") == len(every)
    code, out, _ = run(capsys, *SHAPE, "--devices", "8,16", "--best", "--json")
    best = json.loads(out)["cases"]
    assert [case["devices"] for case in best] == [8, 16]
    for case in best:
        fitting = [other for other in every if other["fits"] and other["devices"] == case["devices"]]
        assert case["tokens_per_s"] == max(other["tokens_per_s"] for other in fitting)
    code, out, _ = run(capsys, *SHAPE, "--devices", 16, "--tp", 2, "--dp", "4,8", "--json")
    assert [(case["pp"], case["dp"]) for case in json.loads(out)["cases"]] in ([(1, 8), (2, 4)], [(2, 4), (1, 8)])
    for arguments, why in (
        (["--devices", 6, "--tp", 4], "never makes so many devices"),
        (["--devices", 1, "--best", "--micro-batch-size", 64], "no layout fits the device's memory: TP1 PP1 DP1"),
        (["--devices", 8, "--scale-table", 8], "leave one out"),
    ):
        code, out, err = run(capsys, *SHAPE, *arguments)
        assert (code, out) == (2, "") and why in err


def test_shapes_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *SHAPE, "--dp", 3)
    assert (code, out) == (2, "") and "64 cannot be divided into micro-batches" in err
    with pytest.raises(SystemExit):
        run(capsys, *SHAPE, "--tp", "two")
    assert "'two' is not a number" in capsys.readouterr().err
    for numbers in ("8-4", "1,8-4"):
        with pytest.raises(SystemExit):
            run(capsys, *SHAPE, "--tp", numbers)
        assert "'8-4' has no numbers in it: give the smaller one first" in capsys.readouterr().err


def test_constants_that_cannot_be_read_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "constants.json"
    path.write_text("[")
    code, _, err = run(capsys, *SHAPE, "--constants", path)
    assert code == 2 and f"--constants {path}: the constants are not JSON" in err


# ---- scale tables ---------------------------------------------------------------------------

PRESENT = Case(24, 2048, 16, 1024, tp=1, pp=4, dp=2, micro_batch=1, global_batch=32)


def costs(case: Case, memory_bytes: int | None = None) -> tuple[Costs, list[str]]:
    """A profile that agrees with the model."""
    step = predict(Columns.of([case]), DEVICES["a100-80g"], FITTED)
    units, _ = gpt_units(case.layers, 1, tied=True, positions=False)
    third = {name: 1e3 * float(getattr(step, name)[0]) / 3 for name in ("embedding", "head")}
    times = {"layer": (1e3 * float(step.layer_forward[0]), 1e3 * float(step.layer_backward[0]))}
    times |= {name: (value, 2 * value) for name, value in third.items()}
    size = {"layer": 6 * 12 * case.hidden**2, "embedding": 6 * case.vocab_size * case.hidden, "head": 1000}
    made = [UnitCost(*times[kind], size[kind], 2 * size[kind], 10**8) for kind in (u.partition(".")[0] for u in units)]
    overhead = 1e3 * float((step.reduction + step.update)[0]) + FITTED.step_ms
    return Costs(tuple(made), latency_ms=1e3 * float(step.boundary[0]), overhead_ms=overhead,
                 memory_bytes=memory_bytes), units  # fmt: skip


def model() -> Predictor:
    return Predictor(DEVICES["a100-80g"], FITTED)


def test_a_scale_table_grows_and_is_read_as_it_is_written() -> None:
    table = scale_table(range(1, 40), lambda n: divisions(n, PRESENT, [1, 2]), by_model(model()), present=PRESENT,
                        memory_bytes=80e9)  # fmt: skip
    speeds = [entry.tokens_per_s for entry in table.entries.values()]
    assert len(speeds) > 5 and all(b >= a * 1.05 for a, b in pairwise(speeds))
    assert set(table.entries) | set(table.left_out) == set(range(1, 40))
    assert ScaleTable.from_json(table.to_json()) == table
    assert json.loads(table.to_json())["version"] == 1
    assert {"layout", "schedule", "tokens_per_s", "memory_bytes", "confidence"} <= set(
        json.loads(table.to_json())["devices"]["8"]
    )
    assert all(entry.confidence is None for entry in table.entries.values()), "nobody else was asked"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 2}', '{"version": 1, "devices": {"8": {}}}'])
def test_what_is_no_scale_table(text: str) -> None:
    with pytest.raises(ScaleTableError, match="scale table"):
        ScaleTable.from_json(text)


def one_each(count: int) -> list[Case]:
    return [replace(PRESENT, pp=1, dp=count)]


def test_layouts_that_break_constraints_do_not_fit_or_bring_little_are_left_out() -> None:
    def foresee(case: Case) -> Foreseen | None:
        return None if case.dp == 16 else Foreseen(100 / min(case.dp, 4), 10**9 * (9 - case.dp if case.dp < 4 else 2))

    table = scale_table([1, 2, 3, 4, 8, 16], one_each, foresee, present=PRESENT, memory_bytes=7e9)
    assert set(table.entries) == {2, 4}
    assert table.left_out[1] == "does not fit: TP1 PP1 DP1 needs 8.0 of 7.0 GB a device"
    assert table.left_out[3].startswith("breaks constraints: a global batch of 32")
    assert table.left_out[8].startswith("brings little: ")
    assert table.left_out[16].startswith("unlike what was measured")
    uneven = scale_table([2, 3, 4], one_each, foresee, present=PRESENT, uneven=True)
    assert set(uneven.entries) == {2, 3, 4}


def test_layouts_that_two_predict_inconsistently_are_left_out() -> None:
    """Both may be wrong about the speed, if they are wrong by one factor."""

    def one(case: Case) -> Foreseen:
        return Foreseen(100 / case.dp, 0)

    def other(case: Case) -> Foreseen:
        return Foreseen(500 / case.dp ** (0.9 if case.dp < 8 else 0.3), 0)

    table = scale_table([2, 4, 8], one_each, one, present=replace(PRESENT, pp=1, dp=2), second=other)
    assert set(table.entries) == {2, 4}
    assert table.entries[2].confidence == 1 and table.entries[4].confidence == pytest.approx(2**-0.1, abs=1e-3)
    assert table.left_out[8].startswith("predicted inconsistently: 4.00 or ")


def test_a_profile_predicts_what_the_simulator_and_the_model_say() -> None:
    profile, units = costs(PRESENT)
    foresee = by_profile(profile, units, True, PRESENT)
    for pp, dp in ((1, 1), (2, 2), (4, 2), (4, 4), (8, 2), (3, 1)):
        case = replace(PRESENT, pp=pp, dp=dp)
        seen = foresee(case)
        assert seen is not None
        stage_units = Planner(units, profile, True, 32).split([dp] * pp).stage_units
        layout = Layout.grid(tp=1, pp=pp, dp=dp, stage_units=stage_units, units=units, num_grains=32, num_slices=dp,
                             replicas=0)  # fmt: skip
        simulated = fastest(layout, profile)[1].makespan + profile.overhead_ms
        assert seen.step_ms == pytest.approx(simulated, rel=0.01)
        assert seen.step_ms == pytest.approx(by_model(model())(case).step_ms, rel=0.25)  # type: ignore[union-attr]
    assert foresee(replace(PRESENT, tp=2)) is None and foresee(replace(PRESENT, micro_batch=2)) is None


def test_a_table_by_profile_and_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, units = costs(PRESENT, 40_000_000_000)
    path, out_path = tmp_path / "P.json", tmp_path / "S.json"
    path.write_text(profile.to_json(units))
    shape = ["--layers", 24, "--hidden", 2048, "--heads", 16, "--seq", 1024, "--global-batch-size", 32, "--pp", 4]
    code, out, _ = run(capsys, *shape, "--dp", 2, "--scale-table", "1-16", "--profile", path, "--out", out_path)
    assert code == 0 and "confidence" in out
    table = ScaleTable.from_json(out_path.read_bytes())
    assert {4, 8, 16} <= set(table.entries)
    assert table.entries[8].confidence is not None and table.entries[8].confidence > 0.8
    assert all(entry.memory_bytes <= 40e9 for entry in table.entries.values())
    for folder in (tmp_path, Path(".")):
        code, _, err = run(capsys, *shape, "--dp", 2, "--scale-table", "4", "--out", folder)
        assert code == 2 and f"--out {folder} is a folder: name a file in it" in err


FLAGS = {
    "num_layers": "24", "hidden_size": "2048", "num_attention_heads": "16", "seq_length": "1024",
    "padded_vocab_size": "51200", "ffn_hidden_size": "8192", "group_query_attention": "False", "num_query_groups": "1",
    "swiglu": "False", "micro_batch_size": "1", "global_batch_size": "32", "num_experts": "None",
}  # fmt: skip
"""Of a job like ``PRESENT``, as its script has them."""


def grid(pp: int, dp: int, stage_units: Sequence[Sequence[int]], units: Sequence[str], tp: int = 1) -> Layout:
    return Layout.grid(tp=tp, pp=pp, dp=dp, stage_units=stage_units, units=units, num_grains=32, num_slices=2,
                       replicas=1)  # fmt: skip


def test_sizes_of_a_job_by_its_flags() -> None:
    units, stage_units = gpt_units(24, 4, tied=True, positions=False)
    layout = grid(4, 2, stage_units, units)
    case = case_of(layout, FLAGS)
    assert case == replace(PRESENT, pp=4, dp=2, ffn=8192, groups=16, sharded=True)
    grouped = case_of(layout, {**FLAGS, "group_query_attention": "True", "num_query_groups": "4", "swiglu": "True"})
    assert grouped is not None and (grouped.groups, grouped.gated) == (4, True)
    for name, value in (("num_experts", "8"), ("mtp_num_layers", "1"), ("multi_latent_attention", "True")):
        assert case_of(layout, {**FLAGS, name: value}) is None
    assert case_of(layout, {name: value for name, value in FLAGS.items() if name != "hidden_size"}) is None
    assert resized(case, grid(2, 4, gpt_units(24, 2, tied=True, positions=False)[1], units)).pp == 2


@pytest.mark.parametrize("slower", [1.0, 40.0])
def test_a_device_like_that_of_a_job(slower: float) -> None:
    """However slow it is, a layer takes there what was measured, and so does the end of a step.

    The model gives all stages as many layers, costs fewer to the first and the last: 14 % of the pipeline.
    """
    profile, units = costs(PRESENT)
    layout = grid(4, 2, gpt_units(24, 4, tied=True, positions=False)[1], units)
    case = case_of(layout, FLAGS)
    assert case is not None
    made = replace(
        profile, units=tuple(replace(unit, forward_ms=unit.forward_ms * slower, backward_ms=unit.backward_ms * slower)
                             for unit in profile.units), bandwidth=20e9, overhead_ms=slower * 100.0)  # fmt: skip
    predictor = likened(case, layout, made)
    assert predictor is not None
    step = predict(Columns.of([case]), predictor.device, predictor.constants)
    layer = made.units[layout.units.index("layer.3")]
    assert 1e3 * float((step.layer_forward + step.layer_backward)[0]) == pytest.approx(
        layer.forward_ms + layer.backward_ms
    )
    end = 1e3 * float((step.reduction + step.update)[0]) + predictor.constants.step_ms
    assert end == pytest.approx(made.overhead_ms)
    seen = by_profile(made, layout.units, True, case)(case)
    assert seen is not None and seen.step_ms == pytest.approx(1e3 * float(step.total[0]), rel=0.15)
    assert likened(case, layout, replace(made, units=tuple(UnitCost(0, 0, 1, 1, 1) for _ in units))) is None


def test_what_was_measured_corrects_what_is_predicted_of_it_and_its_kin() -> None:
    """The present layout takes a tenth longer than predicted; others half as long again as that, and a fifth less."""
    profile, units = costs(PRESENT)
    foresee = by_profile(profile, units, True, PRESENT)

    def step(foresee: Foresee, pp: int, dp: int) -> float:
        seen = foresee(replace(PRESENT, pp=pp, dp=dp))
        assert seen is not None
        return seen.step_ms

    seen = {(pp, dp): times * step(foresee, pp, dp) for (pp, dp), times in
            {(4, 2): 1.1, (4, 4): 1.65, (2, 2): 0.88}.items()}  # fmt: skip
    better = corrected(foresee, seen, PRESENT)
    for (pp, dp), measured in seen.items():
        assert step(better, pp, dp) == pytest.approx(measured, rel=0.01)
    ratios = [step(better, 4, dp) / step(foresee, 4, dp) for dp in (4, 8, 16, 32)]
    assert ratios == sorted(ratios, reverse=True) and ratios[1] > 1.2, "neighbours share it"
    assert step(better, 24, 32) == pytest.approx(1.1 * step(foresee, 24, 32), rel=0.01), "far from all"
    assert corrected(foresee, {}, PRESENT) is foresee
    layout = grid(4, 2, gpt_units(24, 4, tied=True, positions=False)[1], units)
    (entry,) = outlook(layout, profile, 32_768, [16]).entries.values()
    slow = {(4, 2): step(foresee, 4, 2), (entry.pp, entry.dp): 3 * entry.step_ms}
    (other,) = outlook(layout, profile, 32_768, [16], seen=slow).entries.values()
    assert (other.pp, other.dp) != (entry.pp, entry.dp), "what was slow is not proposed again"


def test_the_past_of_a_job() -> None:
    """Steps of a layout but its first two, at least three, of stages that are equally wide."""
    units, stage_units = gpt_units(24, 4, tied=True, positions=False)
    wide, narrow = (replace(grid(4, dp, stage_units, units), epoch=epoch) for epoch, dp in ((0, 2), (1, 1)))
    took = [(0, 900), (0, 500), *[(0, 100)] * 3, (1, 300), (1, 300), (1, 200), (1, 200), (0, 900), (0, 900)]
    lines = [{"epoch": epoch, "step_ms": ms} for epoch, ms in took]
    assert past(wide, [wide, narrow], lines) == {(4, 2): 100}
    assert past(wide, [wide, narrow], [*lines, *[{"epoch": 1, "step_ms": 200}] * 3]) == {(4, 2): 100, (4, 1): 200}
    assert past(narrow, [narrow], lines) == {}


def test_confidence_of_a_job_that_runs() -> None:
    """Costs take the end of a step to stay as it is; the model knows that more replicas have more to reduce.

    With fast links both say the same of all numbers of devices; with slow ones, of few, and others are left out.
    """
    profile, units = costs(PRESENT)
    layout = grid(4, 2, gpt_units(24, 4, tied=True, positions=False)[1], units)
    case = case_of(layout, FLAGS)
    fast = outlook(layout, replace(profile, bandwidth=200e9), 32_768, range(1, 17), case)
    assert fast.present == case and {1, 2, 4, 8, 16} <= set(fast.entries)
    assert all(0.8 < (entry.confidence or 0) <= 1 for entry in fast.entries.values())
    slow = outlook(layout, replace(profile, bandwidth=0.5e9), 32_768, range(1, 17), case)
    assert 0 < len(slow.entries) < len(fast.entries)
    assert any(why.startswith("predicted inconsistently") for why in slow.left_out.values())
    unknown = outlook(layout, profile, 32_768, range(1, 17))
    assert unknown.present is None and all(entry.confidence is None for entry in unknown.entries.values())
    assert ScaleTable.from_json(fast.to_json()) == fast
    older = json.loads(fast.to_json())
    del older["present"]
    assert ScaleTable.from_json(json.dumps(older)) == replace(fast, present=None)


@pytest.mark.parametrize("pp", [2, 4])
def test_a_v_counts_as_the_two_chunks_that_it_has(pp: int) -> None:
    """A step as the simulator has it, where stages are alike, as these are also after they were cut anew."""
    through = joined(way("v", pp, 2))
    layout = along(through, [4 if stage == pp - 1 else 2 for stage in through], 2, 8 * pp, tied=False)
    free, layer = UnitCost(0, 0, 10, 10, 0), UnitCost(10, 20, 100, 100, 100)
    costs = Costs(tuple(layer if name.startswith("layer") else free for name in layout.units), latency_ms=0.01)
    present = stand_in(layout, 32_768)
    assert (present.pp, present.dp, present.chunks) == (pp, 2, 2)
    foreseen = by_profile(costs, layout.units, False, present)(present)
    assert foreseen is not None
    assert foreseen.step_ms == pytest.approx(simulate.run(usual(layout), layout, costs).makespan, rel=0.01)
    table = outlook(layout, costs, 32_768, [pp, 2 * pp])
    entry = table.entries[2 * pp]
    assert (entry.chunks, entry.schedule) == (2, "in-step")
    assert ScaleTable.from_json(table.to_json()) == table


def test_a_table_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the records of a job: no shapes, and replicas that may have uneven numbers of grains."""
    profile, units = costs(PRESENT)
    _, stage_units = gpt_units(24, 4, tied=True, positions=False)
    layout = Layout.grid(
        tp=2, pp=4, dp=2, stage_units=stage_units, units=units, num_grains=32, num_slices=2, replicas=1
    )
    (tmp_path / "layouts").mkdir()
    arguments = ["--run", tmp_path, "--scale-table", "2-24"]
    for why in ("has no layouts", "is not there (yet): start the job with --elastic-profile measured"):
        code, _, err = run(capsys, *arguments)
        assert code == 2 and why in err
        (tmp_path / "layouts" / "0.json").write_text(layout.to_json())
    (tmp_path / "layouts" / "copy of 0.json").write_text("not a job's")
    (tmp_path / "profile.json").write_text(profile.to_json(units))
    (tmp_path / "metrics.jsonl").touch()
    code, _, err = run(capsys, *arguments)
    assert (code, err.count("\n")) == (2, 1) and "there is no step in the records" in err
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "step_ms": null, "tokens_per_s": 65536}\n')
    code, _, err = run(capsys, *arguments)
    assert code == 2 and "metrics.jsonl is damaged: step_ms is null, where a number belongs" in err
    record = {"step": 3, "step_ms": 500.0, "tokens_per_s": 65_536.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    code, _, err = run(capsys, *arguments)
    assert code == 0, err
    table = ScaleTable.from_json((tmp_path / "scale_table.json").read_bytes())
    assert {4, 16} <= set(table.entries) and all(entry.tp == 2 for entry in table.entries.values())
    assert any(32 % entry.dp for entry in table.entries.values()), "uneven"
    assert table.left_out[5] == "there is no such layout"
    assert all(entry.confidence is None for entry in table.entries.values())
    entry = table.entries[16]
    assert entry.tokens_per_s == pytest.approx(32_768 / entry.step_ms * 1e3, rel=1e-3)
    # What plan says of it: of a number that is there, of one that is not worth having, of others.
    assert cli.main(["plan", "--devices", "16", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["asked"], told["devices"], told["why"]) == (16, 16, None) and told["pp"] == entry.pp
    assert cli.main(["plan", str(tmp_path / "scale_table.json"), "--devices=5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["devices"], told["why"]) == (4, "there is no such layout")
    assert cli.main(["plan", "--devices", "99", str(tmp_path)]) == 0
    assert "99 devices (the table says nothing of so many, it goes from 2 to 24" in capsys.readouterr().out
    for devices, where, why in ((1, tmp_path, "the least is 2"), (8, tmp_path / "layouts", "is not there")):
        assert cli.main(["plan", "--devices", str(devices), str(where)]) == 2
        assert why in capsys.readouterr().err
    # The job itself has written what its model is like.
    (tmp_path / "scale_table.json").write_text(replace(table, present=replace(PRESENT, tp=1, pp=1, dp=1)).to_json())
    code, _, err = run(capsys, *arguments)
    assert code == 0, err
    known = ScaleTable.from_json((tmp_path / "scale_table.json").read_bytes())
    assert known.present == replace(PRESENT, tp=2, pp=4, dp=2)
    assert all(entry.confidence is not None for entry in known.entries.values())
