"""``megatron-elastic bench search``: cases, held against what papers and a simulation of other code say of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from planned import search

from megatron_elastic.layout import Layout
from megatron_elastic.pipeline.schedule import usual
from megatron_elastic.pipeline.simulate import simulate


def cases(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, Any]]:
    assert search.main(argv) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    found: list[dict[str, Any]] = json.loads(last)["cases"]
    return found


def test_all_that_is_asked_for_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    found = cases(capsys, "--stages", "1,2,3", "--grains", "4", "--memory", "0.5,1,1.5", "--layers", "2,7",
                  "--optimum", "20")
    assert [(case["stages"], case["memory"], case["layers"]) for case in found] == [
        (stages, memory, layers) for stages in (1, 2, 3) for memory in (0.5, 1, 1.5) for layers in (2, 7)
    ]  # fmt: skip
    for case in found:
        steps = {name: of["step"] for name, of in case["schedules"].items() if of is not None}
        assert set(case["schedules"]) == {"1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "search"}
        if case["stages"] > case["layers"]:
            assert not steps and case["optimum"] is case["bound"] is case["search_s"] is None
            continue
        assert case["memory"] < 1 or {"1f1b", "zb-h1", "search"} <= set(steps)
        if "search" not in steps:
            assert case["memory"] == 0.5 and case["bound"] is None
            continue
        assert case["bound"] <= (case["optimum"] or steps["search"]) <= steps["search"]
        assert steps["search"] == min(steps.values())
        assert all(of["peak"] <= case["memory"] for of in case["schedules"].values() if of is not None)
        work = 3 * case["layers"] * case["grains"]
        for of in case["schedules"].values():
            assert of is None or of["bubble"] == pytest.approx(1 - work / case["stages"] / of["step"], abs=1e-4)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_the_papers_figures(stages: int, capsys: pytest.CaptureFixture[str]) -> None:
    """What stages wait for one another, in forwards of a layer, of which each has four, and what they keep at most."""
    grains = 4 * stages
    (case,) = cases(capsys, "--stages", f"{stages}", "--grains", f"{grains}", "--memory", "2", "--layers",
                    f"{4 * stages}", "--optimum", "0")
    found = {name: (of["step"] - 12 * grains, of["peak"]) for name, of in case["schedules"].items()}
    behind = 4 * (stages - 1)
    assert found["1f1b"] == (3 * behind, 1)
    assert found["interleaved"] == (3 * behind / 2, pytest.approx(1 + (stages - 1) / (2 * stages), abs=1e-4))
    assert found["zb-h1"] == (behind, 1)
    # Without what the last stage waits for the first time, which a step that begins for all at once has.
    assert found["zb-h2"] == (behind, pytest.approx((2 * stages - 1) / stages, abs=1e-4))
    assert found["zb-v"][0] <= behind and found["zb-v"][1] <= 1
    assert case["optimum"] is None


@pytest.mark.parametrize(("layers", "stages"), [(15, 4), (29, 8), (61, 16)])
def test_layers_that_no_number_of_stages_divides(
    layers: int, stages: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """1F1B is as long as the simulator of programs says, with the stages in front a layer more."""
    (case,) = cases(capsys, "--stages", f"{stages}", "--grains", "16", "--memory", "1", "--layers", f"{layers}",
                    "--optimum", "0")
    layout = Layout.grid(tp=1, pp=stages, dp=1, units=[f"{unit}" for unit in range(stages)], num_grains=16,
                         num_slices=1, replicas=0, stage_units=[[stage] for stage in range(stages)])
    size = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    line = simulate(usual(layout), layout, lambda leader, stage, op: size[stage] * {"forward": 1.0}.get(op.kind, 2.0))
    assert case["schedules"]["1f1b"]["step"] == line.makespan
    assert case["bound"] <= case["schedules"]["search"]["step"] < line.makespan


@pytest.mark.parametrize("wrong", ["0", "2,,4", "two", "-1", "inf"])
def test_bad_sizes_are_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--stages", "--memory"):
        with pytest.raises(SystemExit) as error:
            search.main([f"{flag}={wrong}"])
        assert error.value.code == 2
        assert f"{flag}: {wrong!r} are no positive numbers" in capsys.readouterr().err
