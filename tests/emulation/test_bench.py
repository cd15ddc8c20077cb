"""The bench command, the plans of the benchmarks, and the page of flags."""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import forked
import pytest
import torch
from common import JobFailed
from disturbed.by_size import redoing
from undisturbed import turns, watching

from megatron_elastic import bench
from megatron_elastic.config import add_elastic_arguments
from megatron_elastic.layout import Layout
from megatron_elastic.observe.records import read_metrics
from megatron_elastic.plan import everything, lose
from tests.jobs import MODEL, PATIENT, Jobs

_CHECKOUT = Path(__file__).resolve().parents[2]


def _benchmark(name: str) -> ModuleType:
    return importlib.import_module(f"{bench.rooms()[name]}.{name}")


def test_a_benchmark_is_what_has_main() -> None:
    rooms = bench.rooms()
    assert (rooms["overhead"], rooms["recovery"], rooms["chaos"]) == ("undisturbed", "disturbed", "disturbed")
    assert not {"turns", "job", "data_parallel_gpt"} & set(rooms)
    assert bench.available() == [name for name in rooms if name != "chaos"]


def test_help_lists_all_by_room(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--help"]) == 0
    told = capsys.readouterr().out
    for name, room in bench.rooms().items():
        assert (f"\n  {name} " in told) is (name != "chaos"), name
        assert f"\n{room.replace('_', ' ').capitalize()}: " in told


@pytest.mark.job
@pytest.mark.parametrize("name", ["endurance", "overhead", "recovery"])
def test_bench_becomes_the_benchmark(name: str) -> None:
    command = [sys.executable, "-m", "megatron_elastic.cli", "bench", name, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"usage: megatron-elastic bench {name}" in done.stdout


def test_an_unknown_benchmark_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["recovrey"]) == 2
    assert "no benchmark 'recovrey'; one of control, leadership, " in capsys.readouterr().err


def test_without_a_checkout_it_says_where_benchmarks_come_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "_FOLDER", tmp_path / "benchmarks")
    assert bench.main(["recovery"]) == 2
    assert "clone the repository" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [4, 5, 8])
def test_recovery_leaves_two_columns_and_repeats_every_phase(columns: int) -> None:
    recovery = _benchmark("recovery")
    layout = Layout.grid(tp=1, pp=2, dp=columns, stage_units=[[0], [1]], units=["a", "b"], num_grains=columns,
                         num_slices=columns, replicas=1)
    column = {cell.ranks[0]: i for stage in layout.stages for i, cell in enumerate(stage.cells)}
    jobs = list(recovery.plan_jobs(3, columns))
    for faults in jobs:
        hit = [column[rank] for fault in faults for rank in fault.ranks]
        assert len(set(hit)) == len(hit) <= columns - 2
        steps = [fault.step for fault in faults]
        assert all(later - earlier > 3 for earlier, later in itertools.pairwise(steps))
    times = Counter(fault.phase for faults in jobs for fault in faults)
    assert times == dict.fromkeys((*recovery.PHASES, recovery.NESTED), 3)


def test_recovery_compares_kill_by_kill(tmp_path: Path) -> None:
    recovery = _benchmark("recovery")

    def series(*mttr_ms: float) -> Any:
        events = [("forward", {"mttr_ms": ms, "redo_ms": 10.0}) for ms in mttr_ms]
        return recovery.Series("job", tmp_path, events)

    few = recovery.ratios(series(30.0, 50.0), series(20.0, 30.0))
    assert few == {"mttr": {"min": 1.5, "max": 1.6667}, "pause": {"min": 2.0, "max": 2.0}}
    enough = recovery.ratios(series(*[30.0] * 4), series(*[20.0] * 4))
    assert enough["pause"] == {"min": 2.0, "max": 2.0, "mean": 2.0, "error": 0.0}


@pytest.mark.parametrize(("name", "wanted"), [("2M", 2e6), ("20M", 20e6), ("100M", 100e6), ("0.5M", 0.5e6)])
def test_models_have_about_the_size_asked_for(name: str, wanted: float) -> None:
    recovery = _benchmark("recovery")
    model = recovery.Model.parse(name)
    assert model.parameters == pytest.approx(wanted, rel=0.1)
    assert model.layers % 4 == 0  # four stages hold the same
    assert recovery.accumulation([model], available=1e15) == "bitwise"
    assert recovery.accumulation([model], available=1e3) == "fast"


def test_the_victim_of_a_step_has_done_its_share() -> None:
    recovery = _benchmark("recovery")
    model = recovery.Model.parse("2M")
    assert [redoing.kill(model, 1, 1, 0, share).partition("at=")[2] for share in redoing.SHARES] == [
        "backward,grain=0", "forward,grain=32", "forward,grain=56",
    ]  # fmt: skip


def test_endurance_measures_from_each_fault_to_the_full_width(tmp_path: Path) -> None:
    endurance = _benchmark("endurance")
    even = {"kind": "switched", "entered": [], "shadows": [], "epoch": 1}
    events = [
        {"time": 5.0, "kind": "fault", "epoch": 1, "rank": 1, "exited_at": 4.0},
        {"time": 6.0, **even, "world_size": 7},
        {"time": 7.0, **even, "world_size": 8, "entered": [8], "shadows": [8]},
        {"time": 8.0, **even, "world_size": 8},
        {"time": 9.0, **even, "world_size": 8},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert endurance.times_to_width(tmp_path, 8) == [4.0]


def test_peers_count_from_the_kill_to_the_first_commit(tmp_path: Path) -> None:
    peers = _benchmark("peers")

    def line(step: int, began: float, committed: bool = True, replicas: int = 8) -> dict[str, Any]:
        return {"step": step, "began": began, "ended": began + 0.2, "committed": committed, "replicas": replicas}

    usual = [line(1, 0.0), line(2, 1.0), line(3, 2.0, committed=False), line(3, 2.5), line(4, 3.0)]
    survivors = [[*usual, line(5, 4.0, committed=False), line(5, at, replicas=7), line(6, 6.0, replicas=7)]
                 for at in (5.0, 4.9)]
    (tmp_path / "2.jsonl").write_text("".join(json.dumps(each) + "\n" for each in [*usual, {"killed": 4.1}]))
    found = peers.outcome([*survivors, peers.read_lines(tmp_path / "2.jsonl")])
    assert found.step_ms == pytest.approx([200.0] * 6)  # of all three, without what warms up and what failed
    assert found.loss == {"back_ms": pytest.approx(1000.0), "passes_discarded": 4, "batch_after": 7,
                          "failed_before": 3}
    assert peers.outcome([usual]).loss == {}
    with pytest.raises(peers.JobFailed, match="no survivor committed"):
        peers.outcome([usual, [*usual, {"killed": 4.1}]])


def test_peers_give_medians_and_ranges() -> None:
    peers = _benchmark("peers")
    outcomes = {
        "megatron_elastic": [peers.Outcome([10.0, 20.0], {"back_ms": 30.0}), peers.Outcome([30.0], {"back_ms": 50.0})],
        "torchft": [peers.Outcome([24.0], {"back_ms": 90.0}), peers.Outcome([36.0], {"back_ms": 80.0})],
        "ddp": [peers.Outcome([20.0], {}), peers.Outcome([20.0], {})],
    }
    found = peers.figures(outcomes)
    assert found["megatron_elastic"] == {"step_ms": {"median": 20.0, "min": 10.0, "max": 30.0},
                                         "back_ms": {"median": 40.0, "min": 30.0, "max": 50.0}}
    assert found["torchft_to_ddp"] == 1.5
    assert found["torchft_to_ddp_rounds"] == {"min": 1.2, "max": 1.8}


@pytest.mark.job
def test_peers_say_how_to_get_torchft(tmp_path: Path) -> None:
    peers = _benchmark("peers")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torchft'\" >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(peers.JobFailed, match=r"(?s)No module named 'torchft'.*pip install torchft-nightly"):
        peers.versions_of(str(python))


def test_overhead_rotates_the_order() -> None:
    overhead = _benchmark("overhead")
    width = len(overhead.VARIANTS)
    jobs = list(overhead.plan_jobs(width))
    assert Counter(name for _, name in jobs) == dict.fromkeys(overhead.VARIANTS, width)
    assert {name for _, name in jobs[::width]} == set(overhead.VARIANTS)


def test_jobs_take_turns(jobs: Jobs, tmp_path: Path) -> None:
    """One trains, the other does nothing at all; and nobody is lost by standing still."""
    flags = [*PATIENT, "--data-path", str(jobs.data), *MODEL.split(), "--pipeline-model-parallel-size", "2"]
    starts = {name: partial(turns.TakingTurns, tmp_path / name, 2, [*flags, "--train-iters", "1000", *more])
              for name, more in {"elastic": ["--elastic"], "plain": []}.items()}

    def recorded() -> dict[str, int]:
        return {name: len(read_metrics(tmp_path / name)) for name in starts}

    with turns.started(starts) as training:
        for name, other in itertools.permutations(starts, 2):
            before = recorded()
            turn = training[name].take(3)
            assert len(turn.step_ms) == 3
            assert turn.cpu_ms > 0
            assert recorded()[other] == before[other]
            assert recorded()[name] >= before[name] + 4  # the one that it was stopped in does not count
    short = partial(turns.TakingTurns, tmp_path / "short", 2, [*flags, "--train-iters", "5"])
    with pytest.raises(JobFailed, match="ended before step"), turns.started({"short": short}) as training:
        training["short"].take(10)


@pytest.mark.job
def test_the_slowest_rank_counts() -> None:
    times = forked.Times(2, 3)

    def body(me: int, _: Path) -> None:
        times[0, me] = 10.0 - me
        if me == 1:
            times[1, me] = 5.0

    forked.run_ranks(3, body)
    assert (times.slowest(0), times.slowest(1)) == (10.0, 5.0)


@pytest.mark.job
def test_a_rank_that_fails_takes_the_others_along(capfd: pytest.CaptureFixture[str]) -> None:

    def body(me: int, _: Path) -> None:
        if me == 1:
            raise RuntimeError("on purpose")
        signal.pause()

    with pytest.raises(JobFailed, match="rank 1 ended with exit code 1"):
        forked.run_ranks(3, body)
    assert capfd.readouterr().err.count("RuntimeError: on purpose") == 1


def test_ratios_are_of_medians() -> None:
    overhead = _benchmark("overhead")
    result = overhead.figures({"plain": [[10.0], [20.0]], "fast": [[11.0], [20.0]], "bitwise": [[12.0], [30.0]],
                               "without_log": [[12.0], [18.0]]})
    assert result["ratio_log"] == pytest.approx(21 / 15, abs=1e-4)
    assert result["ratio_fast"] == pytest.approx(15.5 / 15, abs=1e-4)
    assert result["ratio_bitwise"] == pytest.approx(21 / 15, abs=1e-4)
    assert result["ratio_bitwise_rounds"] == {"min": 1.2, "max": 1.5}
    assert "ratio_bitwise_same_transport" not in result  # that was not measured
    jobs = {"bitwise": [[2.0]] * 4 + [[4.0]] * 4, "against": [[2.0], [1.0]] * 2 + [[2.0]] * 4}
    turns = overhead.figures(jobs, jobs=4)
    assert turns["ratio_against_jobs"] == {"min": 1.4142, "max": 2.0, "mean": 1.6818, "error": 0.1}
    more = overhead.figures({"same_transport": [[10.0]], "bitwise": [[11.0]], "against": [[12.0]]})
    assert [more[key] for key in ("ratio_bitwise_same_transport", "ratio_against_same_transport", "ratio_against")] == [
        1.1, 1.2, 0.9167]


def test_traced_steps_are_compared_with_their_neighbours() -> None:
    """The machine becomes slower all the time."""
    tracing = _benchmark("tracing")
    took = {0: 1.0, 1: 1.05, 2: 1.02}
    result = tracing.figures([{step: took[step % 3] * 1.001**step for step in range(1, 61)}])
    assert result["ratio_traced"] == pytest.approx(1.05, rel=2e-3)
    assert result["ratio_written"] == pytest.approx(1.02, rel=2e-3)
    assert list(result["step_ms"]) == ["off", "traced", "written"]


def test_watching_costs_what_is_written_and_looked_at(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for rank, moved in enumerate((100, 300)):
        (tmp_path / "logs" / f"rank{rank}.log").write_text(f'step 10\nodometer {{"worked": 10, "moved": {moved}}}\n')
    result = watching.watching(tmp_path, 2, 100.0)
    assert result["writes_a_step"] == 31.0
    us = 30 * result["write_us"]["moved"] + result["write_us"]["worked"]
    assert result["ratio_rank"] == pytest.approx(us / 1e5, abs=1e-6)
    assert result["ratio_agent"] == pytest.approx(result["look_us"] / 1e6 / result["looks_every_s"], rel=0.01)
    (tmp_path / "logs" / "rank1.log").write_text("")
    with pytest.raises(JobFailed, match=r"rank1\.log does not say"):
        watching.watching(tmp_path, 2, 100.0)


def test_replay_is_compared_with_no_replicas() -> None:
    replay = _benchmark("replay")
    times = {"off": [[10.0], [20.0]], "gradient": [[11.0], [20.0]], "state": [[12.0], [30.0]]}
    result = replay.figures(times, {"off": [1.0], "gradient": [2.0], "state": [4.0]})
    assert result["ratio_state"] == pytest.approx(21 / 15, abs=1e-4)
    assert result["ratio_gradient_rounds"] == {"min": 1.0, "max": 1.1}
    assert result["bytes_per_step"] == {"off": 1, "gradient": 2, "state": 4}


def test_dataflow_is_compared_after_the_loss() -> None:
    dataflow = _benchmark("dataflow")
    before = {"reroute": [[10.0]], "resize": [[10.0]]}
    result = dataflow.figures(before, {"reroute": [[20.0]], "resize": [[15.0]]})
    assert (result["after_ms"], result["ratio_after"]) == ({"reroute": 20.0, "resize": 15.0}, 0.75)
    layout = Layout.grid(tp=1, pp=1, dp=3, stage_units=[[0]], units=["a"], num_grains=3, num_slices=3, replicas=1,
                         samples=4)
    assert dataflow.samples_of_fullest(lose(layout, [2], everything(layout), 1), 4) == 6


def test_consistency_is_held_against_the_usual_way() -> None:
    consistency = _benchmark("consistency")
    assert consistency.kills(1, 4, 2) == ["kill:rank=5,step=5,at=vote", "kill:rank=2,step=9,at=forward"]
    ours = consistency.Trained({4: 8.0, 5: 4.0, 6: 2.0}, {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])})
    theirs = consistency.Trained({4: 8.0, 5: 5.0, 6: 1.0}, {"a": torch.tensor([3.0, 1.0]), "b": torch.tensor([4.0])})
    found = consistency.deviation(ours, theirs)
    assert found == {"final_loss": 0.5, "loss": 0.375, "weights": pytest.approx(0.2)}
    half = {name: value / 2 for name, value in found.items()}
    assert consistency.figures({"fast": [half, half], "usual": [found, found]})["less_than_usual"] == {
        "fast": {name: pytest.approx(0.5) for name in found}}


@pytest.mark.job
def test_fast_deviates_less_than_the_usual_way_and_bitwise_not_at_all(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_elastic.cli", "bench", "consistency", "--repeat", "1", "--steps", "12",
               "--faults", "1", "--nproc-per-node", "6"]
    done = subprocess.run(command, capture_output=True, text=True, check=False,
                          env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])["deviation"]
    assert not any(found["bitwise"].values())
    assert 0 < found["fast"]["weights"] < 0.01 * found["usual"]["weights"]
    assert not list(tmp_path.glob("megatron-elastic-*"))  # torch may leave a cache of its own


@pytest.mark.job
def test_control_is_measured_with_the_real_coordinator(tmp_path: Path) -> None:
    sizes = ["--ranks", "32,64", "--pure", "32,64", "--processes", "2", "--repeat", "1"]
    command = [sys.executable, "-m", "megatron_elastic.cli", "bench", "control", *sizes]
    done = subprocess.run(command, capture_output=True, text=True, check=False,
                          env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    phases = {"start", "rank_lost", "rank_lost_even", "node_lost", "node_lost_even", "node_joins", "steps", "resume",
              "takeover"}
    assert [size["ranks"] for size in figures["sizes"]] == [32, 64]
    for size in figures["sizes"]:
        assert size["nodes"] == size["ranks"] // 8
        assert phases | {"idle"} <= size.keys()
        assert all(size[phase]["processor_s"] > 0 and size[phase]["own_bytes_in"] > 0 for phase in phases)
        assert size["idle"]["own_bytes_in"] == 0 < size["idle"]["bytes_in"]
    assert all(phases <= pure.keys() for pure in figures["pure"])
    assert figures["growth"].keys() == phases | {"idle"}
    assert not list(tmp_path.glob("megatron-elastic-*"))  # torch may leave a cache of its own


def test_the_page_of_flags_is_up_to_date() -> None:
    rows = []
    for action in add_elastic_arguments(argparse.ArgumentParser(add_help=False))._actions:
        value = "" if action.nargs == 0 else " " + ("{" + ",".join(map(str, action.choices)) + "}" if action.choices
                                                    else str(action.metavar))
        default = "" if action.default in (None, False) else f"`{action.default}`"
        meaning = (action.help or "").replace(" (default: %(default)s)", "").replace("|", "\\|")
        rows.append(f"| `{action.option_strings[0]}{value}` | {default} | {meaning} |")
    page = (_CHECKOUT / "docs" / "flags.md").read_text()
    assert "\n".join(rows) in page, "docs/flags.md should have this table:\n" + "\n".join(rows)


def test_the_table_of_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    """Searched orders are no slower than known ones that fit, in each row; layers by cost than layers and no-ops."""
    schedules = _benchmark("schedules")
    assert schedules.main(["--table", "--models", "flextrain-small", "--stages", "2", "--optimum", "0"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert [row["memory"] for row in found["pipelines"]] == [0.5, 0.75, 1.0, 1.5, 2.0]
    for row in found["pipelines"]:
        known = [row[name] for name in ("1f1b", "zb-h1", "zb-h2") if row[name] is not None]
        assert row["search"] is None or row["bound"] <= row["search"] <= min(known, default=row["search"])
    assert found["pipelines"][-1]["zb-h2"] is not None
    assert found["gain_over_1f1b"]["least"] > 1
    assert {row["stages"] for row in found["no_ops"]} == set(range(2, 17))
    assert all(row["by_cost"] <= row["padded"] * 1.01 for row in found["no_ops"])
    assert "| flextrain-small | 2 | 0.5 |" in err


def test_predicted_layouts_are_held_against_measured_ones() -> None:
    """The present one says nothing of errors, and counts in the order."""
    foresight = _benchmark("foresight")
    rows = [{"predicted_ms": predicted, "measured_ms": measured, "error": error} for predicted, measured, error in
            [(100.0, 50.0, 1.0), (200.0, 190.0, 0.05), (90.0, 100.0, -0.1), (300.0, 240.0, 0.25)]]  # fmt: skip
    assert foresight.figures(rows) == {
        "median_error": 0.1, "mean_error": 0.1333, "worst": 0.25, "pairs": 6, "pairs_in_order": 5}  # fmt: skip
    assert len(foresight.OTHERS) == 7 and foresight.PRESENT not in foresight.OTHERS


def test_what_emulated_jobs_tell_of_schedules() -> None:
    measured = _benchmark("schedules").measured
    jobs = [
        {"layout": layout, "schedule": schedule, "step_ms": ms, "foreseen_ms": 0.98 * ms, "error": -0.02}
        for layout in ("tp1,pp2,dp2", "tp1,pp4,dp2")
        for schedule, ms in (("1f1b", 100.0), ("split", 90.0), ("search", 80.0), ("placed", 75.0))
    ]
    found = measured.summary(jobs)
    assert (found["median_error"], found["worst_error"]) == (0.02, -0.02)
    assert set(found["search_to_1f1b"]) == {"tp1,pp2,dp2", "tp1,pp4,dp2"}
    assert all(each == {"step_ms": 0.8, "foreseen_ms": 0.8} for each in found["search_to_1f1b"].values())
    assert all(each == {"step_ms": 0.75, "foreseen_ms": 0.75} for each in found["placed_to_1f1b"].values())
