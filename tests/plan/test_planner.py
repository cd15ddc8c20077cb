"""The plan command: events, what it prints, and what it refuses."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from megatron_elastic.layout import Layout, gpt_units
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.planner import main, plan


def make(tp: int, pp: int, dp: int, layers: int, *, replicas: int = 1) -> Layout:
    units, stage_units = gpt_units(layers, pp, tied=True, positions=True)
    return Layout.grid(
        tp=tp, pp=pp, dp=dp, stage_units=stage_units, units=units, num_grains=16, num_slices=dp, replicas=replicas,
        ranks_per_host=4,
    )  # fmt: skip


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    """A layout file of a run directory: TP1 x PP4 x DP2 with 12 layers."""
    path = tmp_path / "layouts" / "0.json"
    path.parent.mkdir()
    path.write_text(make(1, 4, 2, 12).to_json())
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_loss(layout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    code, out, _ = run(capsys, "--layout", layout, "--event", "lose:rank=5")
    assert code == 0
    assert "costs: assumed" in out
    assert "before (epoch 0)" in out and "interim (epoch 1)" in out and "after (epoch 2)" in out
    assert "4: 16 grains each" in out
    assert "transfers, in the background:" in out and "(owner)" in out
    assert "stage  0  cell 0 0" in out, "a picture"


def test_the_same_in_json(layout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--layout", layout, "--event", "lose:rank=5", "--json")
    assert (code, out.count("\n")) == (0, 1)
    figures = json.loads(out)
    assert figures["missing"] is None
    steps = figures["step_ms"]
    assert steps["before"] < steps["after"] < steps["interim"]
    layouts = {name: Layout.from_json(json.dumps(value)) for name, value in figures["layouts"].items()}
    assert [layouts[name].epoch for name in ("before", "interim", "after")] == [0, 1, 2]
    assert layouts["interim"].lost == layouts["after"].lost == (5,)
    assert figures["transfers"]
    for move in figures["transfers"]:
        assert move["bytes"] == (6_000_000 if move["unit"].startswith("layer.") else 6_000)
        assert 5 not in (move["src"], move["dst"])


def test_costs_come_from_a_profile(layout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = make(1, 4, 2, 12).units
    profile = Costs.assumed(names, {"layer.0": 9_000_000}).to_json(names)
    (tmp_path / "P.json").write_text(profile)
    _, given, _ = run(capsys, "--layout", layout, "--event", "lose:rank=5", "--json", "--profile", tmp_path / "P.json")
    _, assumed, _ = run(capsys, "--layout", layout, "--event", "lose:rank=5", "--json")
    assert json.loads(given)["step_ms"]["before"] > json.loads(assumed)["step_ms"]["before"]
    (tmp_path / "profile.json").write_text(profile)
    _, beside, _ = run(capsys, "--layout", layout, "--event", "lose:rank=5", "--json")
    assert beside == given, "a run's own profile is found beside its layouts"


def test_a_picture_is_written(layout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--layout", layout, "--event", "lose:rank=5", "--svg", tmp_path / "o.svg")[0] == 0
    root = ElementTree.fromstring((tmp_path / "o.svg").read_text())
    titles = [title.text or "" for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum(title.startswith(("F", "B")) for title in titles) == 16 * 2 * 4 * 3
    assert titles[0].startswith("F0 from 0.00 to")


def test_ranks_join() -> None:
    layout = make(2, 2, 2, 4)
    outcome = plan(layout, "join:ranks=5", Costs.assumed(layout.units))
    assert outcome.interim is not None
    assert outcome.interim.spares == (12,)
    assert outcome.interim.hosts[-1] == (8, 9, 10, 11, 12)
    assert [sum(cell.shadow for cell in stage.cells) for stage in outcome.interim.stages] == [1, 1]
    assert [stage.width for stage in outcome.after.stages] == [3, 3]
    assert {move.dst for move in outcome.moves} <= {8, 9, 10, 11}


def test_the_pipeline_gets_another_degree(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    layout = make(1, 4, 2, 12)
    costs = Costs.assumed(layout.units)
    two = plan(layout, "pp:2", costs).after
    assert [stage.width for stage in two.stages] == [4, 4]
    assert plan(two, "pp:4", costs).after.pipeline_size == 4
    single = make(1, 1, 4, 4)
    assert plan(single, "pp:2", costs=Costs.assumed(single.units), tied=True).after.stages[1].units[0] == 0
    (tmp_path / "L.json").write_text(single.to_json())
    arguments = ("--layout", tmp_path / "L.json", "--event", "pp:2", "--json")
    for untied, units in (((), 0), (("--untied",), 2)):
        figures = json.loads(run(capsys, *arguments, *untied)[1])
        first = figures["layouts"]["after"]["stages"][1]["units"][0]
        assert (first == 0) == (units == 0)


def test_a_stage_that_lost_all_its_cells(layout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--layout", layout, "--event", "lose:rank=4,5")
    assert code == 0
    assert "no interim layout" in out
    assert "has to be loaded from the newest checkpoint" in out


def test_spares_form_a_new_cell() -> None:
    """Each at the place that it had."""
    layout = make(2, 2, 3, 4)
    outcome = plan(layout, "lose:rank=0,3", Costs.assumed(layout.units))
    assert outcome.interim is not None
    assert outcome.interim.spares == ()
    assert (2, 1) in [cell.ranks for stage in outcome.interim.stages for cell in stage.cells if cell.shadow]


def test_a_large_layout_is_estimated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    units, stage_units = gpt_units(64, 64, tied=True, positions=False)
    large = Layout.grid(
        tp=1, pp=64, dp=32, stage_units=stage_units, units=units, num_grains=2048, num_slices=2, replicas=1
    )
    (tmp_path / "L.json").write_text(large.to_json())
    arguments = ("--layout", tmp_path / "L.json", "--event", "lose:rank=0")
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert "cell " not in out
    code, _, err = run(capsys, *arguments, "--svg", tmp_path / "o.svg")
    assert code == 2
    assert "too large to draw" in err


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ("lose:5", "is none of 'lose:rank=R[,R...]', 'join:ranks=N', 'pp:N'"),
        ("join:ranks=0", "is none of"),
        ("lose:rank=99", "ranks [99] are not in the layout of epoch 0"),
        ("pp:13", "13 pipeline stages cannot be made of 8 cells and 14 blocks"),
        ("lose:rank=0,1,2,3,4,5,6,7", "no rank of the layout of epoch 0 would be left"),
    ],
)
def test_a_bad_event_is_refused(layout: Path, event: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--layout", layout, "--event", event)
    assert (code, out) == (2, "")
    assert err.startswith("megatron-elastic plan: error: ")
    assert message in err


def test_bad_files_are_refused(layout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.json").write_text("{}")
    code, _, err = run(capsys, "--layout", tmp_path / "bad.json", "--event", "pp:2")
    assert code == 2 and "no layout in JSON" in err
    code, _, err = run(capsys, "--layout", tmp_path / "none.json", "--event", "pp:2")
    assert code == 2 and "none.json" in err
    code, _, err = run(capsys, "--layout", layout, "--event", "pp:2", "--profile", tmp_path / "bad.json")
    assert code == 2 and 'object "units"' in err
    (tmp_path / "other.json").write_text(Costs.assumed(["embedding", "layer.0", "head"]).to_json(
        ["embedding", "layer", "head"]))
    code, _, err = run(capsys, "--layout", layout, "--event", "pp:2", "--profile", tmp_path / "other.json")
    assert code == 2 and f"{tmp_path / 'other.json'}: the profile has no entry for unit 'positions'" in err
    assert "or give a profile of this model" in err


def test_what_cannot_be_read_is_named(layout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad, none = tmp_path / "bad.json", tmp_path / "none.json"
    bad.write_text("{}")
    for flags, said in (
        (("--layout", bad), f"--layout {bad}: "),
        (("--layout", none), f"--layout {none}: No such file or directory"),
        (("--layout", layout, "--profile", bad), f"--profile {bad}: "),
        (("--layout", layout, "--profile", none), f"--profile {none}: No such file or directory"),
        (("--layout", layout, "--svg", none / "x.svg"), f"cannot write {none / 'x.svg'}: No such file or directory"),
        (("--layout", layout, "--svg", "/dev/full"), "error: cannot write /dev/full: No space left on device"),
        (("--layout", layout, "--dag", "/dev/full"), "error: cannot write /dev/full: No space left on device"),
    ):
        code, _, err = run(capsys, *flags, "--event", "lose:rank=5")
        assert (code, said in err, err.count("\n")) == (2, True, 1), err


@pytest.mark.parametrize("flag", ["--dvfs=energy", "--power=90,150,450", "--clocks=1", "--tokens=8"])
def test_flags_of_policies_are_of_use_with_one_only(
    flag: str, layout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "--layout", layout, "--event", "lose:rank=5", flag)
    assert code == 2
    assert f"{flag.partition('=')[0]} is about what policies would make of a loss: add --policy" in err


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--power=nan,150,450", "'nan,150,450' is not three numbers of watts"),
        ("--power=-90,150,450", "'-90,150,450' is not three numbers of watts"),
        ("--clocks=1,nan", "'1,nan' is not a list of clocks"),
        ("--clocks=1,inf", "'1,inf' is not a list of clocks"),
        ("--tokens=-5", "-5 is not a number from 1 on"),
        ("--tokens=0", "0 is not a number from 1 on"),
        ("--clocks=0.9,1", "--clocks is about which clocks are planned: add --dvfs, or leave it out"),
        ("--untied", "it takes --event lose:rank=R[,R...], and no --svg, --dag, --untied or --schedule search"),
    ],
)
def test_figures_of_policies_that_cannot_be(
    flag: str, said: str, layout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code, _, err = run(capsys, "--layout", layout, "--event", "lose:rank=5", "--policy", "elastic", flag)
    except SystemExit:  # argparse ends so
        code, err = 2, capsys.readouterr().err
    assert code == 2
    assert said in err
