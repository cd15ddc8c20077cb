"""Records, digests, comparisons and reports of runs."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_elastic.layout import Layout, gpt_units
from megatron_elastic.observe import compare, digest, records, report
from megatron_elastic.observe.records import RecordsError, RunRecords


def make(pp: int = 2, dp: int = 2, slices: int = 2) -> Layout:
    units, stage_units = gpt_units(4, pp, True, False)
    return Layout.grid(
        tp=1, pp=pp, dp=dp, stage_units=stage_units, units=units, num_grains=8, num_slices=slices, replicas=1
    )


def line(step: int, loss: float, norm: float = 1.0, epoch: int = 0) -> dict[str, Any]:
    return {
        "tokens_per_s": 1000.0, "world_size": 8, "epoch": epoch, "step_ms": 800.0, "consumed_samples": 8 * step,
        "lr": 1e-3, "grad_norm_hex": norm.hex(), "grad_norm": norm, "loss_hex": loss.hex(), "loss": loss, "step": step,
    }  # fmt: skip


RECOVERY: dict[str, Any] = {
    "ranks": [1], "cause": "kill -9", "step": 2, "decision": "back", "detect_ms": 1.0, "interrupt_ms": 2.0,
    "plan_ms": 0.5, "edit_ms": 3.0, "state_ms": 4.0, "redo_ms": 700.0, "mttr_ms": 710.5,
}  # fmt: skip


def add_line(file: Path, line: str) -> None:
    """As a job would that writes on."""
    with file.open("a") as lines:
        lines.write(line + "\n")


def write_run(path: Path, losses: list[float], norms: list[float] | None = None, sha: str = "ab") -> Path:
    run = RunRecords(path)
    for step, loss in enumerate(losses, start=1):
        run.metrics(line(step, loss, norms[step - 1] if norms else 1.0, epoch=int(step > 1)))
    run.layout(make())
    run.event("recovered", 1, **RECOVERY, epochs=[1])
    run.digest({"step": len(losses), "slices": 2, "units": {"embedding": sha, "head": "cd"}, "sha256": sha})
    run.close()
    return path


# ---- records -------------------------------------------------------------------------------


def test_metrics_lines_have_the_designs_fields_in_order_and_are_flushed_at_once(tmp_path: Path) -> None:
    run = RunRecords(tmp_path / "run")
    run.metrics(line(1, 0.1))
    written = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert list(written) == [
        "step", "loss", "loss_hex", "grad_norm", "grad_norm_hex", "lr", "consumed_samples", "step_ms", "epoch",
        "world_size", "tokens_per_s",
    ]  # fmt: skip
    assert float.fromhex(written["loss_hex"]) == 0.1
    run.close()


def test_metrics_refuse_missing_and_unknown_fields(tmp_path: Path) -> None:
    run = RunRecords(tmp_path)
    wrong = line(1, 0.1) | {"los": 1}
    del wrong["lr"]
    with pytest.raises(RecordsError, match=r"lacks fields \['lr'\] and has unknown fields \['los'\]"):
        run.metrics(wrong)
    run.close()
    assert records.read_metrics(tmp_path) == {}


def test_a_loss_that_is_not_finite_is_null_but_keeps_its_hex(tmp_path: Path) -> None:
    run = RunRecords(tmp_path)
    run.metrics(line(1, math.nan, math.inf))
    run.close()
    read = records.read_metrics(tmp_path)[1]
    assert (read["loss"], read["loss_hex"], read["grad_norm_hex"]) == (None, "nan", "inf")


def test_a_recovery_has_the_designs_fields_in_order(tmp_path: Path) -> None:
    run = RunRecords(tmp_path)
    run.event("recovered", 3, epochs=2, **RECOVERY)
    run.event("fault", 3, rank=1, signal="SIGKILL")
    with pytest.raises(RecordsError, match="mttr_ms"):
        run.event("recovered", 3, **{key: value for key, value in RECOVERY.items() if key != "mttr_ms"})
    run.close()
    first, second = records.read_events(tmp_path)
    assert list(first) == [
        "time", "kind", "epoch", "cause", "ranks", "step", "decision", "detect_ms", "interrupt_ms", "plan_ms",
        "edit_ms", "state_ms", "redo_ms", "mttr_ms", "epochs",
    ]  # fmt: skip
    assert list(second) == ["time", "kind", "epoch", "rank", "signal"]


def test_layouts_are_files_by_epoch(tmp_path: Path) -> None:
    run = RunRecords(tmp_path)
    run.layout(make())
    run.close()
    assert [path.name for path in (tmp_path / "layouts").iterdir()] == ["0.json"]
    assert Layout.from_json((tmp_path / "layouts" / "0.json").read_text()) == make()


def test_recent_metrics_are_whole_lines_from_the_end(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step}) for step in range(1, 101)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 10']))
    assert [line["step"] for line in records.recent_metrics(tmp_path)] == list(range(1, 101))
    assert [line["step"] for line in records.recent_metrics(tmp_path, most=60)] == [98, 99, 100]
    (tmp_path / "metrics.jsonl").write_text("")
    assert records.recent_metrics(tmp_path) == []


def test_a_second_writer_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        run = RunRecords(tmp_path)
        run.metrics(line(step, 0.5))
        run.close()
    assert list(records.read_metrics(tmp_path)) == [1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 1}\n{"step": 1}\n', "metrics.jsonl:2 records step 1 a second time"),
        ('{"step": 1}\n{"st\n', "metrics.jsonl:2 is not JSON"),
        ('{"st\n{"step": 1}\n', "metrics.jsonl:1 is not JSON"),
        ("[]\n", "metrics.jsonl:1 is not a JSON object"),
        ("{}\n", "metrics.jsonl:1 has no step"),
    ],
)
def test_damaged_metrics_are_named_by_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(RecordsError, match=message):
        records.read_metrics(tmp_path)


@pytest.mark.parametrize("half", ["{", '{"step": 3, "loss": 1.', json.dumps(line(3, 0.5))])
def test_half_a_line_at_the_end_is_none_yet(half: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The job goes on writing, or was killed as it wrote."""
    a, b = write_run(tmp_path / "a", [2.5, 2.25]), write_run(tmp_path / "b", [2.5, 2.25])
    for name in ("metrics.jsonl", "events.jsonl"):
        with (a / name).open("a") as lines:
            lines.write(half)
    assert list(records.read_metrics(a)) == [1, 2] and len(records.read_events(a)) == 1
    assert report.main([str(a)]) == 0
    assert "1 to 2, 2 committed" in capsys.readouterr().out
    assert compare.compare(a, b) is None


def bytes_read() -> int:
    """By this process, so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_who_goes_on_with_records_reads_their_end_however_long_they_are(tmp_path: Path) -> None:
    """A node that takes over has a lease to renew meanwhile. A writer that was killed has left half a line."""
    path = tmp_path / "metrics.jsonl"
    whole = "".join(json.dumps(line(step, 0.5)) + "\n" for step in range(1, 101)) * 1000
    path.write_text(whole + json.dumps(line(101, 0.5))[:-9])
    before = bytes_read()
    assert records.newest_step(tmp_path) == 100
    run = RunRecords(tmp_path)
    assert bytes_read() - before < 1_000_000 < len(whole)
    run.metrics(line(101, 0.5))
    run.close()
    assert path.read_text() == whole + json.dumps({name: line(101, 0.5)[name] for name in records.METRICS}) + "\n"


@pytest.mark.parametrize(
    ("text", "step"),
    [("", -1), ('{"st', -1), ('{"step": 3}\n', 3), ("\n", -1), ('{"step": 4}\nno line\n', -1), ("[]\n", -1),
     ('{"step": 5, "what": "' + 9_000 * "x" + '"}\n', 5)],
)  # fmt: skip
def test_the_newest_step_of_short_and_of_damaged_records(tmp_path: Path, text: str, step: int) -> None:
    assert records.newest_step(tmp_path) == -1, "there are none"
    (tmp_path / "metrics.jsonl").write_text(text)
    assert records.newest_step(tmp_path) == step


# ---- digest --------------------------------------------------------------------------------


@dataclass
class Digest:
    unit: int
    slice: int
    part: int
    sha256: str


def digests(layout: Layout) -> list[Digest]:
    return [
        Digest(unit, k, 0, hashlib.sha256(f"{layout.units[unit]} {k}".encode()).hexdigest())
        for unit in range(len(layout.units))
        for k in range(layout.num_slices)
    ]


def test_the_digest_does_not_depend_on_placement_or_order() -> None:
    wide, deep = make(pp=1, dp=4), make(pp=4, dp=2)
    a = digest.combine(wide, digests(wide), step=7)
    b = digest.combine(deep, [*reversed(digests(deep)), digests(deep)[0]], step=7)
    assert a == b
    assert (a["step"], a["slices"], list(a["units"])) == (7, 2, list(wide.units))


def test_the_digest_changes_with_any_slice() -> None:
    layout = make()
    base = digest.combine(layout, digests(layout), 1)
    changed = digests(layout)
    changed[3].sha256 = "0" * 64
    other = digest.combine(layout, changed, 1)
    assert other["sha256"] != base["sha256"]
    assert [name for name in layout.units if other["units"][name] != base["units"][name]] == ["layer.0"]


def test_incomplete_or_contradicting_digests_are_refused() -> None:
    layout = make()
    with pytest.raises(RecordsError, match="slice 1 of head, part 0, is missing"):
        digest.combine(layout, digests(layout)[:-1], 1)
    with pytest.raises(RecordsError, match="slice 0 of embedding, part 0, has two different digests"):
        digest.combine(layout, [*digests(layout), Digest(0, 0, 0, "ff")], 1)
    with pytest.raises(RecordsError, match="1 slices that do not exist"):
        digest.combine(layout, [*digests(layout), Digest(0, 9, 0, "ff")], 1)


# ---- compare -------------------------------------------------------------------------------


def test_equal_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_run(tmp_path / "a", [2.5, 2.25]), write_run(tmp_path / "b", [2.5, 2.25])
    assert compare.compare(a, b) is None
    assert compare.main([str(a), str(b)]) == 0
    assert "identical: 2 steps" in capsys.readouterr().out


def test_the_first_difference_is_shown_in_decimal_and_hex(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    near = math.nextafter(2.25, 3)
    a, b = write_run(tmp_path / "a", [2.5, 2.25, 1.0]), write_run(tmp_path / "b", [2.5, near, 3.0])
    assert compare.main([str(a), str(b)]) == 1
    out = capsys.readouterr().out
    assert "step 2: loss differs" in out
    assert f"2.25  {(2.25).hex()}" in out
    assert f"{near!r}  {near.hex()}" in out


def test_gradient_norms_and_digests_count(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", [2.5, 2.25])
    norms = compare.compare(a, write_run(tmp_path / "norm", [2.5, 2.25], [1.0, 1.5]))
    assert norms is not None
    assert (norms.where, norms.what) == ("step 2", "gradient norm differs")
    weights = compare.compare(a, write_run(tmp_path / "sha", [2.5, 2.25], sha="ff"))
    assert weights is not None
    assert (weights.where, weights.what, weights.a, weights.b) == ("digest", "unit embedding differs", "ab", "ff")


def test_missing_steps_and_files_are_differences(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", [2.5, 2.25]), write_run(tmp_path / "b", [2.5])
    short = compare.compare(a, b)
    assert short is not None
    assert (short.where, short.what, short.a, short.b) == ("step 2", "recorded in only one run", "present", "missing")
    (a / "digest.json").unlink()
    missing = compare.compare(a, write_run(tmp_path / "c", [2.5, 2.25]))
    assert missing is not None
    assert (missing.where, missing.what, missing.a, missing.b) == (
        "digest.json",
        "there in only one run",
        "missing",
        "present",
    )


def test_two_runs_without_a_digest_are_not_called_identical(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a", [2.5]), write_run(tmp_path / "b", [2.5])
    (a / "digest.json").unlink()
    (b / "digest.json").unlink()
    difference = compare.compare(a, b)
    assert difference is not None
    assert difference.what == "missing in both runs: nothing shows that their weights agree"


def test_bad_directories_are_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_run(tmp_path / "a", [2.5])
    assert compare.main([str(a), str(tmp_path / "nowhere")]) == 2
    assert "no such directory" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert compare.main([str(tmp_path / "empty"), str(a)]) == 2
    assert "no records of a run" in capsys.readouterr().err
    (tmp_path / "empty" / "metrics.jsonl").write_text("nonsense\n")
    assert compare.main([str(tmp_path / "empty"), str(a)]) == 2
    assert "is not JSON" in capsys.readouterr().err
    for damaged in ('{"units": null}', '{"sha256": 5}', '{"units": {"head": 5}}'):
        (a / "digest.json").write_text(damaged)
        assert compare.main([str(a), str(a)]) == 2
        assert "digest.json is damaged: what is in place of a hash" in capsys.readouterr().err


# ---- report --------------------------------------------------------------------------------


def test_the_report_shows_recoveries_losses_and_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = [8.0 - 0.1 * step for step in range(40)]
    a, b = write_run(tmp_path / "a", losses), write_run(tmp_path / "b", losses)
    assert report.main([str(a), "--reference", str(b)]) == 0
    out = capsys.readouterr().out
    for expected in ("kill -9", "710.5", "700.0", "8.0000", "7.9000", "4.1000", "bit for bit", "40", "█"):
        assert expected in out, expected


def test_the_report_names_the_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_run(tmp_path / "a", [2.5, 2.25]), write_run(tmp_path / "b", [2.5, 2.0])
    report.main([str(a), "--reference", str(b)])
    assert "step 2: loss differs" in capsys.readouterr().out


def test_the_report_of_a_run_that_has_only_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunRecords(tmp_path / "run").close()
    assert report.main([str(tmp_path / "run")]) == 0
    assert "no step" in capsys.readouterr().out
    assert report.main([str(tmp_path / "nowhere")]) == 2


@pytest.mark.parametrize("other", ["--html", "--reference"])
def test_a_critical_path_is_reported_alone(other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        report.main([str(tmp_path), "--critical-path", other, str(tmp_path / "other")])
    assert end.value.code == 2 and "leave out --html and --reference" in capsys.readouterr().err


def test_the_report_of_a_plain_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", [2.5, 2.25])
    (run / "events.jsonl").unlink()
    assert report.main([str(run)]) == 0
    assert "recoveries     none" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "damaged", "said"),
    [
        ("metrics.jsonl", '{"step": 2}', "step 2 in RUN/metrics.jsonl is damaged: it lacks loss, "),
        ("events.jsonl", '{"kind": "recovered"}', "a recovery in RUN/events.jsonl is damaged: it lacks cause, "),
    ],
)
def test_the_report_says_what_records_lack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, damaged: str, said: str
) -> None:
    run_dir = write_run(tmp_path / "run", [3.0])
    add_line(run_dir / file, damaged)
    assert report.main([str(run_dir)]) == 2
    assert said.replace("RUN", str(run_dir)) in capsys.readouterr().err


def test_the_plot_marks_recoveries_and_fits_the_width() -> None:
    lines = report.plot({step: 10 - step / 10 for step in range(1, 91)}, marks=[45], width=30)
    assert max(map(len, lines)) <= 30
    assert any("▲" in text for text in lines)
    assert report.plot({1: math.nan}, marks=[], width=30) == []
