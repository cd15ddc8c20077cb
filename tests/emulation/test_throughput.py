"""The benchmark of policies: what it takes, what it refuses before anything starts, and what it makes of records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from common import JobFailed
from emulated import job, slowed, throughput
from emulated.cases import Case
from emulated.ceiling import ceiling

from tests.emulation.test_emulation import layout, profile_of


def test_the_forms_of_the_command(tmp_path: Path) -> None:
    (trace := tmp_path / "trace.csv").write_text("0,add,a\n0,add,b\n3600000,remove,a\n")
    losses = throughput.parse_args(["--emulate", "llama2-13b", "--layout", "tp1,pp4,dp4", "--lose", "1,2,3", "--policy",
                                    "all", "--elastic-dvfs", "performance"])
    assert losses.counts == [1, 2, 3] and losses.replicas == 3
    spread = throughput.parse_args(["--layout", "tp1,pp8,dp12", "--lose", "4,12", "--where", "different"])
    assert spread.replicas == 2, "as of no stage more are lost at once"
    schedules = {each.name: each.schedule for each in losses.variants}
    assert schedules["elastic"] == "search" and schedules["recycle"] == "split"
    assert schedules["elastic+performance"] == "search", "as without clocks"
    slow = throughput.parse_args(["--slow", "5:2", "--slow", "3:1.43", "--bursts", "4", "--noise", "0.05"])
    assert [(each.rank, each.factor, each.bursts) for each in slow.slow] == [(5, 2.0, 4), (3, 1.43, 4)]
    flags = slow.slow[0].flags(16)
    assert flags[1::2] == [f"slow:rank=5,step={step},at=forward,factor={factor}"
                           for step, factor in ((6, 2), (10, 1), (14, 2))]
    replayed = throughput.parse_args(["--trace", str(trace), "--hours", "0:2", "--minutes", "2"])
    assert [(change.at, change.comes) for change in replayed.happens] == [(60.0, False)] * 8


@pytest.mark.parametrize(("flags", "says"), [
    (["--lose", "0"], "is not like 1,2,3"), (["--lose", "x"], "is not like 1,2,3"),
    (["--slow", "3"], "is not like 5:2"), (["--slow", "3:0.5"], "for half the speed it is 2"),
    (["--slow", "16:2"], "there are ranks 0 to 15"), (["--bursts", "3"], "is about --slow"),
    (["--slow", "3:2", "--ablate"], "one at a time"), (["--svg", "x.svg"], "--svg draws what --trace gives"),
    (["--trace", "nowhere.csv"], "No such file"), (["--trace", "x", "--hours", "2:1"], "is not like 0.5:2.5"),
    (["--policy", "bamboo"], "nothing twice"), (["--policy", "quick"], "no job runs under quick"),
    (["--schedule", "1f1b", "--policy", "recycle"], "recycle needs split, or search"),
    (["--steps", "8"], "--steps must be at least 10"), (["--where", "here"], "one of same, different"),
])
def test_what_cannot_be_meant_is_said_before_anything_starts(
    capsys: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    with pytest.raises(SystemExit) as end:
        throughput.parse_args(flags)
    assert end.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "says"), [
    (["--emulate", "llama2-34b", "--device", "a100"], "would hold 77.1 GB of weights.*but has 80.0 GB"),
    (["--lose", "4", "--where", "same"], "a stage of 4 cells has none left"),
])
def test_what_cannot_be_emulated_is_said_before_anything_starts(flags: list[str], says: str) -> None:
    with pytest.raises(JobFailed, match=says):
        throughput.main(flags)


def test_a_case_has_what_nothing_can_pass(tmp_path: Path) -> None:
    """One of four cells of two stages of two layers is lost: the other has twice as many grains, or all move. Eight
    grains cannot be dealt evenly to three cells, so that less can be had than is left.
    """
    found, case = layout(pp=2, dp=2, replicas=1), Case(1, "same", (2,))
    most = ceiling(found, profile_of(layer_ms=10.0), case, 0)
    assert set(most) == {"share_of_limit", "recycle", "column"}
    recycle, column, share = (most[name] for name in ("recycle", "column", "share_of_limit"))
    assert recycle is not None and column is not None and share is not None
    assert recycle > 1.2 and column > 1.2 and 0.95 < share < 1.0


def test_slow_ranks_are_held_against_what_is_left() -> None:
    assert slowed.Slow(5, 2.0).limit_share(layout(pp=4, dp=4, grains=32)) == pytest.approx(15.5 / 16)
    assert slowed.Slow(5, 2.0, bursts=3).limit_share(layout(pp=4, dp=4, grains=32)) == pytest.approx(15.75 / 16)


def test_orders_that_are_searched_do_not_count_as_undisturbed() -> None:
    """They begin with the usual order; where all are searched, it is what has changed that counts."""
    variants = [job.Variant("elastic", "elastic", (), "search"), job.Variant("recycle", "recycle"),
                job.Variant("elastic+performance", "elastic", ("--elastic-dvfs", "performance"))]  # fmt: skip
    found: dict[str, dict[str, Any]] = {
        "elastic": {"undisturbed_tokens_per_s": 80.0}, "recycle": {"undisturbed_tokens_per_s": 100.0},
        "elastic+performance": {"undisturbed_tokens_per_s": 120.0},
    }  # fmt: skip
    assert job.usual_rate(variants, [found]) == 100.0
    found["recycle"] = {"failed": "no"}
    assert job.usual_rate(variants, [found, found]) == 80.0
    metrics = {step: {"epoch": int(step > 3)} for step in range(1, 10)}
    assert job.undisturbed_steps(metrics) == [5]
    assert job.undisturbed_steps({step: {"epoch": 0} for step in range(1, 10)}) == [4, 5]


def test_shares_are_of_what_all_cases_do_undisturbed() -> None:
    """One of three was measured while the machine was busy."""
    variants = throughput.parse_args(["--policy", "recycle"]).variants
    cases: list[dict[str, Any]] = [{"limit_share": 0.8, "ceiling": {"share_of_limit": 1.25}, "policies": {
        "recycle": {"tokens_per_s": 64.0, "tokens_per_s_since": 48.0, "undisturbed_tokens_per_s": rate}}}
        for rate in (100.0, 70.0, 100.0)]  # fmt: skip
    throughput.add_shares([*cases, {"limit_share": 0.7, "ceiling": {}, "policies": {"recycle": {"failed": ""}}}],
                          variants)  # fmt: skip
    for case in cases:
        each = case["policies"]["recycle"]
        assert (each["share_of_undisturbed"], each["share_of_limit"], each["share_of_ceiling"]) == (0.64, 0.8, 0.64)
        assert each["share_of_limit_since"] == 0.6


def test_rounds_give_medians_and_how_far_they_are_apart() -> None:
    rounds = [{"tokens_per_s": rate, "ranks": 15, "widths": [4, 3]} for rate in (99.0, 100.0, 104.0)]
    found = throughput._median(rounds)
    assert found["tokens_per_s"] == 100.0 and found["spread"] == [99.0, 104.0] and found["widths"] == [4, 3]
    assert found["deviation"] == pytest.approx(0.0262, abs=1e-3)


def test_the_table_leaves_out_who_could_not_go_on() -> None:
    figures = {"tokens_per_s": 1.0, "share_of_undisturbed": 0.9, "share_of_limit": 0.96, "predicted_share": 0.95,
               "share_of_ceiling": 0.9, "share_of_limit_since": 0.8, "joules_per_token": 0.1, "seconds_until": 3.0}
    case = {"lost": 1, "where": "same",
            "limit_share": 0.9375, "limit_share_at_highest_clock": 1.1, "highest_clock": 1.2,
            "policies": {"elastic": figures, "column": {"failed": "no room"}}}
    text = throughput.table([json.loads(json.dumps(case))])
    rows, limits = text.split("\n\n")
    assert len(rows.splitlines()) == 3 and "column" not in text
    assert limits == "1 lost (same): the limit is 0.938 of undisturbed; at a clock of 1.2 it is 1.100"


def test_a_plot_has_every_policy(tmp_path: Path) -> None:
    """Also those beyond the colours that there are."""
    pytest.importorskip("matplotlib")
    from emulated.plot import draw

    names = [f"policy {number}" for number in range(14)]
    draw({name: [(0.0, 0.0), (60.0, 0.5)] for name in names}, [], 4, 60.0, 1.0, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert [name for name in names if f">{name}<" not in text] == []


def test_a_plot_has_every_number_of_stages(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from planned.searched.plot import draw

    stages = range(1, 15)
    draw([{"stages": each, "grains": 4, "search_s": 0.1} for each in stages], tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    assert [each for each in stages if f">{each} stages<" not in text] == []
