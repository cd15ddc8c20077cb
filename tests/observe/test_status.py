"""Status, goodput and top: what a job is doing, from its records."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from textual.widgets import Input, Static

from megatron_elastic import cli
from megatron_elastic.cluster.asking.ask import run_of
from megatron_elastic.cluster.wire.address import read_address
from megatron_elastic.observe.goodput import PARTS, goodput
from megatron_elastic.observe.records import RecordsError, RunRecords
from megatron_elastic.observe.run import Copy, Run
from megatron_elastic.observe.status import picture, status
from megatron_elastic.observe.telling import duration, ranks, tell
from megatron_elastic.top import Top, answer
from tests.jobs import ROOT, Jobs, inject
from tests.observe.test_observe import RECOVERY, add_line, line, make, write_run


def steps(times: Sequence[float], width: int = 8) -> list[dict[str, Any]]:
    return [{**line(step, 1.0), "step_ms": ms, "world_size": width} for step, ms in enumerate(times, start=1)]


def recovered(step: int, **parts: float) -> dict[str, Any]:
    return {"kind": "recovered", **RECOVERY, **dict.fromkeys(PARTS, 0.0), "step": step, **parts}


@pytest.mark.parametrize(("event", "said"), [
    ({"kind": "recovered", "step": 2}, "lacks cause, ranks, decision, "), ({"kind": "fallback"}, "lacks lost_steps"),
    ({"kind": "hello", "rank": 0}, "lacks pid, host"), ({"kind": "slow", "times": 2.0}, "lacks ranks"),
    ({"kind": "started"}, "lacks train_iters"), ({"kind": "progress", "what": "load"}, "lacks busy, "),
    ({"kind": "copying", "ranks": [0]}, "lacks done, "),
])  # fmt: skip
@pytest.mark.parametrize("command", [["status"], ["status", "--json"], ["report", "--html", "page.html"]])
def test_events_that_lack_what_is_read_of_them_are_damaged(
    command: list[str], event: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    run_dir = write_run(tmp_path / "run", [3.0, 2.0])
    add_line(run_dir / "events.jsonl", json.dumps({"time": 1e9, "epoch": 0, **event}))
    assert cli.main([command[0], str(run_dir), *command[1:]]) == 2
    assert f"{run_dir}/events.jsonl:2 is damaged: it {said}" in capsys.readouterr().err


@pytest.mark.parametrize(("file", "damage", "said"), [
    ("metrics.jsonl", {"step_ms": None}, "step_ms is null, where a number belongs"),
    ("metrics.jsonl", {"tokens_per_s": "x"}, 'tokens_per_s is "x", where a number belongs'),
    ("metrics.jsonl", {"loss_hex": None}, "loss_hex is null, where text belongs"),
    ("metrics.jsonl", {"world_size": []}, "world_size is [], where a whole number belongs"),
    ("events.jsonl", {"time": "x"}, 'time is "x", where a number belongs'),
    ("events.jsonl", {"time": None}, "time is null, where a number belongs"),
    ("events.jsonl", {"kind": 3}, "kind is 3, where text belongs"),
    ("events.jsonl", {"mttr_ms": None}, "mttr_ms is null, where a number belongs"),
    ("events.jsonl", {"ranks": 3}, "ranks is 3, where a list belongs"),
])  # fmt: skip
def test_what_is_of_another_type_is_damaged(
    file: str, damage: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path / "run", [3.0])
    record = json.loads((run_dir / file).read_text())
    (run_dir / file).write_text(json.dumps(record | damage) + "\n")
    for command in (["status"], ["status", "--json"], ["report", "--html", str(tmp_path / "page.html")]):
        assert cli.main([command[0], str(run_dir), *command[1:]]) == 2
        assert f"{run_dir}/{file}:1 is damaged: {said}" in capsys.readouterr().err
    if not {"time", "kind"} & set(damage):  # a report reads neither
        assert cli.main(["report", str(run_dir)]) == 2
        assert f"{file} is damaged: {said}" in capsys.readouterr().err


@pytest.mark.parametrize("event", [
    {"kind": "fault", "rank": 1}, {"kind": "error", "rank": 1, "traceback": ""}, {"kind": "switched", "step": 2},
    {"kind": "finished"}, {"kind": "clocks", "clocks": {"x": 1.0}}, {"kind": "spawned", "ranks": None},
])  # fmt: skip
def test_of_an_event_that_is_not_as_it_should_be_is_told_what_there_is(event: dict[str, Any]) -> None:
    """It is told in the coordinator, too, which it must not end."""
    told = tell({"time": 1e9, "epoch": 0, **event})
    assert all(f"{name} " in told for name in event if name != "kind")


# ---- goodput -------------------------------------------------------------------------------------


def test_all_time_is_useful_where_nothing_happens() -> None:
    good = goodput(steps([100, 120, 80]), [])
    assert (good.elapsed_ms, good.useful_ms, good.share) == (300, 300, 1.0)
    assert goodput([], []).share == 1.0


def test_what_a_recovery_takes_is_lost() -> None:
    """Of 180 ms a step of 100 ms was of use; what no part accounts for was done again."""
    good = goodput(steps([100, 100, 180, 100]), [recovered(3, detect_ms=10.0, plan_ms=5.0, edit_ms=25.0)])
    assert good.useful_ms == 400
    assert {name: ms for name, ms in good.lost.items() if ms} == {
        "detect_ms": 10, "plan_ms": 5, "edit_ms": 25, "redo_ms": 40}


def test_steps_that_are_done_again_are_lost_with_the_next_one() -> None:
    events = [recovered(5), {"kind": "fallback", "step": 2, "lost_steps": [3, 4, 5]}]
    good = goodput(steps([100, 100, 100, 100, 100, 450]), events)
    assert (good.useful_ms, good.lost["redo_ms"]) == (600, 350)


def test_fewer_ranks_are_no_loss() -> None:
    metrics = [*steps([100, 100, 100]), *steps([250, 200, 200, 200], 4)]
    for step, record in enumerate(metrics, start=1):
        record["step"] = step
    good = goodput(metrics, [recovered(4)])
    assert (good.elapsed_ms, good.useful_ms) == (1150, 1100)


def test_one_slow_step_of_fewer_ranks_hides_no_loss() -> None:
    """A rank is lost, and while another one starts, which makes the only undisturbed step without it slow, it is 7."""
    metrics = steps([100, 100, 100, 100, 250, 300, 110, 100, 100])
    metrics[4]["world_size"] = metrics[5]["world_size"] = 7
    good = goodput(metrics, [recovered(5, detect_ms=50.0)])
    assert (good.lost["detect_ms"], good.lost["redo_ms"]) == (50, 100)


@given(st.lists(st.floats(1, 1e4), min_size=1, max_size=40), st.data())
def test_time_is_either_useful_or_lost(times: list[float], data: st.DataObject) -> None:
    some = st.builds(recovered, st.integers(1, len(times) + 1), detect_ms=st.floats(0, 1e4), state_ms=st.floats(0, 1e4))
    good = goodput(steps(times), data.draw(st.lists(some, max_size=5)))
    assert good.useful_ms + sum(good.lost.values()) == pytest.approx(good.elapsed_ms)
    assert min(good.lost.values()) >= 0 and 0 < good.share <= 1


# ---- a run that grows ----------------------------------------------------------------------------


def test_records_are_read_on_as_they_grow(tmp_path: Path) -> None:
    records = RunRecords(tmp_path)
    run = Run.of_folder(tmp_path)
    assert (run.metrics, run.layout, run.total, status(run)["state"]) == ([], None, None, "beginning")
    records.event("started", 0, world_size=4, step=0, train_iters=9)
    records.metrics(line(1, 2.0))
    records.layout(make())
    (tmp_path / "layouts" / "mine.json").write_text("not a job's")
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, ')  # half a line
    run.refresh()
    assert ([record["step"] for record in run.metrics], run.total, run.layout) == ([1], 9, make())
    run.refresh()
    assert len(run.metrics) == 1
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(json.dumps(line(2, 1.0))[len('{"step": 2, ') - 12 :].encode() + b"\n")
    with pytest.raises(RecordsError, match=r"metrics.jsonl:2 is not a JSON object"):
        run.refresh()


@pytest.mark.parametrize(
    ("file", "damaged", "lacks"),
    [("metrics.jsonl", '{"step": 2}', "loss, loss_hex, "), ("events.jsonl", '{"time": 1.0}', "kind, epoch")],
)
def test_what_a_record_lacks_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, damaged: str, lacks: str
) -> None:
    run_dir = write_run(tmp_path / "run", [3.0])
    add_line(run_dir / file, damaged)
    assert cli.main(["status", str(run_dir)]) == 2
    said = f"megatron-elastic status: error: {run_dir / file}:2 is damaged: it lacks {lacks}"
    assert said in capsys.readouterr().err


def test_no_more_steps_are_kept_than_are_shown(tmp_path: Path) -> None:
    records = RunRecords(tmp_path)
    run, whole = Run.of_folder(tmp_path, 10), Run.of_folder(tmp_path)
    for step in range(1, 101):
        records.metrics({**line(step, 1.0), "step_ms": 300.0 if step == 50 else 100.0})
        if step == 50:
            records.event("recovered", 1, **{**RECOVERY, "step": 50})
        if step % 20 == 0:
            run.refresh()
            assert [record["step"] for record in run.metrics] == [*range(step - 9, step + 1)]
    whole.refresh()
    assert run.account.goodput() == whole.account.goodput() == goodput(whole.metrics, whole.events)
    assert run.account.goodput().elapsed_ms - run.account.goodput().useful_ms == 200


def test_states(tmp_path: Path) -> None:
    records = RunRecords(tmp_path)
    records.metrics(line(1, 2.0))
    run = Run.of_folder(tmp_path)
    seen = [status(run)["state"], status(run, now=os.stat(tmp_path / "metrics.jsonl").st_mtime + 100)["state"]]
    then: list[tuple[str, dict[str, Any]]] = [
        ("fault", {"rank": 1, "signal": "kill -9"}), ("recovered", RECOVERY), ("finished", {"reason": "done"}),
        ("started", {"world_size": 4, "step": 1, "train_iters": 2}), ("failed", {"reason": "no\nway"}),
    ]  # fmt: skip
    for kind, fields in then:
        records.event(kind, 0, **fields)
        run.refresh()
        seen.append(status(run)["state"])
    assert seen == ["training", "silent", "recovering", "training", "finished", "training", "failed"]


def test_every_kind_of_event_is_told_in_a_line() -> None:
    """The kinds that docs/records.md lists, with the fields that it lists."""
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*) \|$", (ROOT / "docs" / "records.md").read_text(), re.MULTILINE)
    kinds = [kind for names, _ in rows for kind in re.findall(r"`(\w+)`", names)]
    assert {"started", "fault", "recovered", "hello", "finished"} <= set(kinds)
    event = {
        **RECOVERY, "time": 0.0, "epoch": 1, "world_size": 8, "train_iters": 9, "rank": 3, "signal": "kill -9",
        "spec": "kill:rank=3", "entered": [4, 5], "shadows": [4], "term": 2, "stages": 2, "cells": None, "stage": 1,
        "times": 2.5, "directory": "x", "traceback": "Traceback:\n  in f\nValueError: no", "reason": "well\nmore",
        "clocks": {"3": 1.2, "4": 1.2, "5": 0.9}, "step_ms": 90.0, "base_ms": 100.0, "node": 1,
        "device": "soft:0", "name": "search", "ms": 90.0, "present_ms": 100.0, "done": [2000], "bytes": [3_500_000],
        "data": "test", "computes_on": "one", "instead_of": "another", "what": "torch 2.15.0",
        "busy": 2, "done_bytes": 1, "all_bytes": 3, "seconds": 4.0, "chosen": "cells",
        "ways": [{"way": "deal", "cells": [3, 4], "step_ms": 120.0, "moves_ms": 0.0, "gain": 1.0},
                 {"way": "cells", "cells": [4, 3], "step_ms": 90.0, "moves_ms": None, "gain": 1.2}],
        "waits": {"3": 4, "4": 3}, "shares": {"layer.0": 0.75},
    }  # fmt: skip
    for kind in kinds:
        text = tell({**event, "kind": kind})  # as in a report
        assert text and "\n" not in text, kind
        if kind in ("considered", "tangle", "clock_shares"):
            assert "{" not in text, text


def test_who_is_less_slow_than_before_is_still_slow(tmp_path: Path) -> None:
    records = RunRecords(tmp_path)
    told = []
    for kind, times in (("slow", 3.0), ("well", 2.0), ("well", 1.0), ("well", 0.5), ("slow", 1.0)):
        records.event(kind, 0, ranks=[1], stage=0, step=1, times=times)
        run = Run.of_folder(tmp_path)
        told.append((run.slow, tell(run.events[-1])))
    assert told == [
        ({1: 3.0}, "rank 1 of stage 0: 3.0 times as slow as the others"),
        ({1: 2.0}, "rank 1 of stage 0: 2.0 times as slow as the others"),
        ({}, "rank 1 of stage 0 as fast as the others again"),
        ({}, "rank 1 of stage 0: 2.0 times as fast as the others"),
        ({}, "rank 1 of stage 0 as fast as the others again"),
    ]


def test_of_the_ways_that_are_considered_the_chosen_one_is_told() -> None:
    ways = [{"way": "deal", "cells": [3, 4], "step_ms": 120.0, "moves_ms": 0.0, "gain": 1.0},
            {"way": "cells", "cells": [4, 3], "step_ms": 95.25, "moves_ms": 5.0, "gain": 1.2}]  # fmt: skip
    event = {"kind": "considered", "time": 0.0, "epoch": 1, "chosen": "cells", "horizon_s": 3600.0}
    assert tell({**event, "ways": ways}) == "the best of 2 ways to go on is cells"
    assert tell({**event, "ways": ways[1:]}) == "the way to go on is cells"


def test_words() -> None:
    assert [ranks(these) for these in ([], [3], [7, 1, 2, 3])] == ["nobody", "rank 3", "ranks 1-3, 7"]
    assert [duration(s) for s in (0.0451, 3.46, 45, 210, 7560, 103680)] == [
        "45 ms", "3.5 s", "45 s", "3.5 min", "2.1 h", "1.2 d"]


def test_no_run_is_said_to_be_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "demo" / "undisturbed", [3.0])
    for command, none in (("status", "there is no directory"), ("report", "there is no directory")):
        for path, said in (
            (tmp_path, f"{tmp_path} has no metrics.jsonl: it is no run directory; in it are {run}\n"),
            (run / "logs", none),
        ):
            assert cli.main([command, str(path)]) == 2
            assert f"megatron-elastic {command}: error: {said}" in capsys.readouterr().err


def test_top_needs_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", str(write_run(tmp_path / "run", [3.0]))]) == 2
    assert "no terminal to show it on; megatron-elastic status prints" in capsys.readouterr().err


def test_a_command_that_there_is_not_may_be_meant_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, said in (("stauts", "did you mean status?"), ("jump", "one of run, data")):
        assert cli.main([wrong]) == 2
        assert f"there is no command {wrong!r}; {said}" in capsys.readouterr().err


def test_pictures_fit_the_terminal(tmp_path: Path) -> None:
    run = Run.of_folder(write_run(tmp_path / "run", [3.0, 2.0, 1.0]))
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(picture(run))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("0: 4   1: 4" in text for text in lines), lines
    assert any("from loss of rank 1 (kill -9) in 710 ms" in text for text in lines)


def test_a_loss_that_is_not_finite_is_json_all_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path / "run", [3.0, float("nan")])
    assert cli.main(["status", str(run_dir), "--json"]) == 0

    def refused(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    assert json.loads(capsys.readouterr().out, parse_constant=refused)["loss"] is None
    assert cli.main(["status", str(run_dir)]) == 0
    assert re.search(r"^loss +nan +gradient norm 1.000", capsys.readouterr().out, re.MULTILINE)


def test_brackets_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of exceptions, paths and names: they are no markup."""
    run_dir = write_run(tmp_path / "[bold] x[/y] z", [3.0, 2.0])
    records = RunRecords(run_dir)
    records.event("error", 1, rank=1, traceback="KeyError: [bold] list[int] [/x]")
    records.event("recovered", 1, **{**RECOVERY, "cause": "[red] [/x]"})
    records.close()
    assert cli.main(["status", str(run_dir)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "rank 1 raised KeyError: [bold] list[int] [/x]" in said and "2 1 x kill -9, 1 x [red] [/x]" in said
    assert cli.main(["report", str(run_dir), "--reference", str(run_dir)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"Run {run_dir}" in said and f"Equal bit for bit to {run_dir}:" in said and "[red] [/x]" in said
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(picture(Run.of_folder(run_dir)))  # as in top, where brackets are markup
    assert "list[int] [/x]" in console.export_text()


# ---- top -----------------------------------------------------------------------------------------


def test_top_shows_the_job_and_takes_commands(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", [3.0, 2.0])
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "rank0.log").write_text("hello from rank 0\n")

    async def look() -> None:
        app = Top(Run.of_folder(run_dir))
        async with app.run_test(size=(100, 40)) as pilot:
            await pilot.press("l", "0", "enter")
            await pilot.pause()
            assert "hello from rank 0" in str(app.query_one("#page", Static).content)
            await pilot.press("l", "quotation_mark", "enter")
            await pilot.pause()
            assert "cannot be read: No closing quotation; log RANK" in str(app.query_one("#page", Static).content)
            await pilot.press("c")
            assert app.query_one(Input).value == "scale "
            await pilot.press("escape")
            assert not app.query_one(Input).has_class("asked")
            await pilot.press("q")
        assert app.return_code == 0

    asyncio.run(look())


def test_answers(tmp_path: Path) -> None:
    records = RunRecords(tmp_path)
    records.event("hello", 0, rank=0, pid=1, host="elsewhere")
    run = Run.of_folder(tmp_path)

    def said(*words: str) -> str:
        return asyncio.run(answer(run, words))

    assert "process 1 of elsewhere" in said("stack", "0")
    assert "do not say which process rank 5 is" in said("stack", "5")
    assert said("log", "7").startswith("cannot read")
    assert "there is no command 'jump'" in said("jump")
    assert "no elastic job runs in" in said("scale", "--pp", "2")


# ---- with a job ----------------------------------------------------------------------------------


def test_copies_are_seen_while_training_goes_on(jobs: Jobs) -> None:
    """After a loss replicas are made for several steps: who gets them from whom, and how much of it is there."""
    job = jobs.start("--train-iters", "5000", "--elastic-background-mbps", "0.5", *inject("1@3:backward"), ranks=4)
    job.read_until("recovered from the loss of rank")
    run = Run.of_folder(job.run_dir)
    seen: dict[tuple[int, int], list[tuple[int, Copy]]] = {}
    told = ""
    while "slices and grains are even over 3 ranks" not in told:
        told += job.read_until("")
        run.refresh()
        for copy in run.copies:
            assert run.layout is not None
            seen.setdefault((run.layout.epoch, copy.rank), []).append((run.metrics[-1]["step"], copy))
    assert run.copies == []
    first = {rank: seen[1, rank] for rank in (0, 2, 3)}  # under the layout without rank 1
    for rank, sightings in first.items():
        assert all(copy.source in {0, 2, 3, None} - {rank} and copy.unit for _, copy in sightings if copy.source)
        assert all(copy.rate is None or 0 <= copy.rate < 2 * 62.5e3 for _, copy in sightings)
    most = max(first.values(), key=lambda sightings: sightings[0][1].size)
    assert most[-1][0] - most[0][0] > 2, "it took some steps"
    assert [copy for _, copy in most if 0 < copy.done < copy.size and copy.rate]
    for sightings in seen.values():
        assert [copy.done for _, copy in sightings] == sorted(copy.done for _, copy in sightings)
        assert len({copy.size for _, copy in sightings}) == 1
    last = {(event["epoch"], rank): (done, size) for event in job.events("copying")
            for rank, done, size in zip(event["ranks"], event["done"], event["bytes"], strict=True)}  # fmt: skip
    assert job.events("copying")[0]["time"] > job.events("fault")[0]["time"], "there was nothing to tell before"
    assert last.keys() >= seen.keys() and all(done == size for done, size in last.values())
    job.process.send_signal(signal.SIGTERM)
    job.finish(143)


def test_a_job_while_it_runs_and_afterwards(jobs: Jobs, capsys: pytest.CaptureFixture[str],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is who is in the records, and in the names of the processes; what a rank does can be seen."""
    job = jobs.start("--train-iters", "200", "--pipeline-model-parallel-size", "2", "--elastic-respawn",
                     *inject("1@3:backward"), ranks=4)  # fmt: skip
    job.read_until("slices and grains are even over 4 ranks")

    def told(where: object) -> dict[str, Any]:
        capsys.readouterr()
        assert cli.main(["status", str(where), "--json"]) == 0
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answer

    # Over the network, as somebody sees it who does not see the run directory.
    address = read_address(job.run_dir)
    monkeypatch.setenv("MEGATRON_ELASTIC_TOKEN", address.credentials.token)
    remote = f"{address.host}:{address.port}"
    assert told(remote)["layout"] == told(job.run_dir)["layout"]
    with (job.run_dir / "logs" / "rank0.log").open("a") as log:
        log.write("seen from elsewhere\n")
    assert "seen from elsewhere" in asyncio.run(answer(run_of(remote), ["log", "0"]))
    assert "refused: " in asyncio.run(answer(run_of(remote), ["scale", "--pp", "9"]))
    now = told(remote)
    assert (now["state"], now["recoveries"], now["layout"]["lost"]) == ("training", 1, [1])
    assert sorted(now["ranks"]) == ["0", "2", "3", "4"]
    assert now["tflops_per_device"] > 0 and now["mfu"] is None
    for rank, process in now["ranks"].items():
        assert process["device"] == "cpu"
        assert process["pid"] == job.pid(int(rank))
        title = Path(f"/proc/{process['pid']}/cmdline").read_text().rstrip("\0 ")
        stage = 0 if rank in ("0", "4") else 1
        assert re.fullmatch(rf"megatron-elastic rank {rank} \(stage {stage}, cell [01]\): \w+\.py", title), title
    stack = asyncio.run(answer(Run.of_folder(job.run_dir), ["stack", "0"]))
    assert "live (megatron_elastic/adaptor/training/life.py" in stack, stack
    job.process.send_signal(signal.SIGTERM)
    job.finish(143)
    assert told(job.run_dir)["state"] == "failed"


def test_a_node_without_records_names_who_has_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    assert cli.main(["status", str(tmp_path)]) == 2
    assert "records are on the node that coordinates, which is node 0 unless" in capsys.readouterr().err


def test_a_job_that_is_over_is_not_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", [3.0])
    (run / "events.jsonl").write_text('{"time": 1.0, "kind": "finished", "epoch": 0, "reason": "done"}\n')
    for command in (["scale", str(run), "--pp", "2"], ["drain", str(run), "--node", "1"]):
        assert cli.main(command) == 2
        assert f"the job in {run} has finished: there is nobody to ask" in capsys.readouterr().err


def test_answers_are_sentences(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from megatron_elastic.cluster.asking import ask
    from megatron_elastic.cluster.messages import Answer

    for ok, said in ((True, "it will"), (False, "refused: it will")):
        monkeypatch.setattr(ask, "answer_to", lambda *_, ok=ok: Answer(ok=ok, text="it will"))
        assert cli.main(["scale", "x", "--pp", "2"]) == int(not ok)
        assert cli.main(["drain", "x", "--node", "2", "--json"]) == int(not ok)
        assert capsys.readouterr().out == f'{said}\n{{"ok": {str(ok).lower()}, "text": "it will"}}\n'


def test_both_runs_are_looked_at_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", str(write_run(tmp_path / "run", [3.0])), "--reference", str(tmp_path / "no")]) == 2
    assert capsys.readouterr() == ("", f"megatron-elastic report: error: there is no directory {tmp_path / 'no'}\n")
