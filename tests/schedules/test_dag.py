"""The graph of a step: what the slides say it has, for programs of all kinds, and the file that Perfetto opens."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic import planner
from megatron_elastic.layout import Layout, gpt_units
from megatron_elastic.pipeline.dag import Dag
from megatron_elastic.pipeline.search.found import programs
from megatron_elastic.plan.costs.cost import Costs, UnitCost

KINDS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


def job(pp: int, chunks: int, grains: int, dp: int = 1) -> tuple[Layout, Costs]:
    units, stages = gpt_units(pp * chunks, pp, False, False, split=[[1] * chunks] * pp)
    layout = Layout.grid(tp=1, pp=pp, dp=dp, stage_units=stages, units=units, num_grains=grains, num_slices=1,
                         replicas=0)  # fmt: skip
    costs = Costs(tuple(UnitCost(1.0, 2.0, 10, 20, 100 + i, 40 + i) for i, _ in enumerate(units)), boundary_bytes=1000,
                  bandwidth=1e6, latency_ms=0.5)  # fmt: skip
    return layout, costs


@settings(max_examples=60, deadline=None)
@given(pp=st.integers(1, 4), chunks=st.integers(1, 2), each=st.integers(1, 3), dp=st.integers(1, 2), data=st.data())
def test_nodes_and_edges(pp: int, chunks: int, each: int, dp: int, data: st.DataObject) -> None:
    """Each operation is a node, each result that crosses stages two; every edge goes from earlier to later; whoever has
    freed all has allocated all; and the longest path is the step.
    """
    layout, costs = job(pp, chunks, pp * each * dp, dp)
    program = data.draw(st.sampled_from(list(programs(layout).values())))
    dag = Dag.of(program, layout, costs)
    kinds = Counter(node.kind for node in dag.nodes)
    chunks = layout.num_chunks  # one, if there is one stage
    boundaries = (pp * chunks - 1) * layout.num_grains if pp > 1 else 0
    assert kinds["forward"] == layout.num_grains * pp * chunks == kinds["backward"] + kinds["backward_weight"]
    for kind in ("send_forward", "receive_forward", "send_backward", "receive_backward"):
        assert kinds[kind] == boundaries
    for before, after in (*dag.data, *dag.order):
        assert dag.nodes[before].end_ms <= dag.nodes[after].start_ms + 1e-9 or (
            dag.nodes[before].kind.startswith("send"))  # fmt: skip
    assert max(node.end_ms for node in dag.nodes) == pytest.approx(dag.timeline.makespan)
    assert sum(node.allocated_bytes for node in dag.nodes) == sum(node.freed_bytes for node in dag.nodes) > 0
    # Without what waits, nodes begin as soon as all is there.
    earliest = [0.0] * len(dag.nodes)
    needs: dict[int, list[int]] = {}
    for before, after in (*dag.data, *dag.order):
        needs.setdefault(after, []).append(before)
    for index in sorted(range(len(dag.nodes)), key=lambda index: (dag.nodes[index].start_ms, dag.nodes[index].end_ms)):
        there = [dag.nodes[before].end_ms for before in needs.get(index, ())]
        earliest[index] = max(there, default=0.0)
    assert earliest == pytest.approx([node.start_ms for node in dag.nodes])


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_peaks_are_those_of_1f1b(pp: int) -> None:
    """P - s grains at stage s of P, with what its units keep of each."""
    layout, costs = job(pp, 1, 2 * pp)
    peaks = Dag.of(programs(layout)["1f1b"], layout, costs).peaks
    kept = [sum(costs.units[unit].activation_bytes for unit in stage.units) for stage in layout.stages]
    assert list(peaks.values()) == [(pp - stage) * kept[stage] for stage in range(pp)]


def test_the_file_is_one_that_perfetto_opens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout, costs = job(2, 1, 4)
    (tmp_path / "layout.json").write_text(layout.to_json())
    (tmp_path / "profile.json").write_text(costs.to_json(layout.units))
    argv = ["--layout", str(tmp_path / "layout.json"), "--profile", str(tmp_path / "profile.json"), "--event", "pp:2",
            "--untied", "--dag", str(tmp_path / "dag.json")]  # fmt: skip
    spans = {}
    for schedule in ("1f1b", "search"):
        assert planner.main([*argv, "--schedule", schedule, "--svg", str(tmp_path / f"{schedule}.svg")]) == 0
        trace = json.loads((tmp_path / "dag.json").read_text())
        events = trace["traceEvents"]
        complete = [event for event in events if event["ph"] == "X"]
        assert len(complete) == len(trace["dag"]["nodes"])
        assert {event["tid"] for event in complete} == {0, 1}
        assert {node["kind"] for node in trace["dag"]["nodes"]} >= {"forward", "send_forward", "receive_backward"}
        arrows = Counter(event["ph"] for event in events if event["ph"] in "sf")
        assert arrows["s"] == arrows["f"] == 8
        memory = [event["args"]["bytes"] for event in events if event["ph"] == "C"]
        assert min(memory) == 0 < max(memory)
        spans[schedule] = max(event["ts"] + event["dur"] for event in complete) / 1e3
    assert spans["search"] < spans["1f1b"]
    assert (tmp_path / "search.svg").read_text() != (tmp_path / "1f1b.svg").read_text()
    assert f"{spans['search']:.1f} ms" in (tmp_path / "search.svg").read_text()
    assert planner.main([*argv[:6], "--policy", "all", "--schedule", "search"]) == 2
    assert "--schedule search" in capsys.readouterr().err
