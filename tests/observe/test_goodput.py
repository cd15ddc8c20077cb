"""Goodput on paper: the formulas against their limits, a scan and chance, and the command."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import goodput as bench
from planned.on_paper import policies as paper

_CHECKOUT = Path(__file__).resolve().parents[2]
_LONG = 1e13
"""MTBF in s of a job to which nothing happens."""
FIVE = {policy.name: policy for policy in paper.policies(paper.Constants())}
MTBFS = (3 * 3600.0, 1800.0, 180.0)
STEPS = (5.0, 20.0, 60.0)

spans = st.floats(0.1, 200)
mtbfs = st.floats(30, 1e6)


@pytest.mark.parametrize("name", FIVE)
def test_without_failures_only_the_overhead_is_left(name: str) -> None:
    policy = FIVE[name]
    assert policy.goodput(20, _LONG, absence=True) == pytest.approx(1, abs=1e-5)
    assert policy.goodput(20, _LONG, absence=True, overhead=True) == pytest.approx(1 / policy.overhead, abs=1e-5)


@pytest.mark.parametrize("mtbf", MTBFS)
@pytest.mark.parametrize("step", STEPS)
def test_each_policy_is_better_than_the_one_before_it(mtbf: float, step: float) -> None:
    """If lost cells are replaced at once. A step of a third of the MTBF is too long to lose: NVRx is better then."""
    share = {name: policy.goodput(step, mtbf) for name, policy in FIVE.items()}
    if (mtbf, step) == (180, 60):
        assert share["restart"] < share["torchft"] < share["nvrx"] < share["back"] < share["resume"]
    else:
        assert share["restart"] < share["nvrx"] < share["torchft"] < share["back"] < share["resume"]


def test_who_is_absent_for_long_may_lose_more_than_who_restarts() -> None:
    """Steps of 60 s and a failure every 3 minutes: a cell takes part again after three steps, if ever."""
    assert FIVE["resume"].goodput(60, 180) > FIVE["nvrx"].goodput(60, 180)
    assert FIVE["resume"].goodput(60, 180, absence=True) < FIVE["nvrx"].goodput(60, 180, absence=True)


@settings(max_examples=40)
@given(step=spans, mtbf=mtbfs, more=st.floats(1, 100), absence=st.booleans(), overhead=st.booleans())
def test_more_failures_leave_less(step: float, mtbf: float, more: float, absence: bool, overhead: bool) -> None:
    for policy in FIVE.values():
        often, seldom = (policy.goodput(step, m, absence=absence, overhead=overhead) for m in (mtbf, mtbf * more))
        assert 0 <= often <= seldom + 1e-12 <= 1 + 2e-12


@pytest.mark.parametrize("policy", FIVE.values(), ids=FIVE)
def test_a_job_that_gets_nothing_done(policy: Any) -> None:
    assert policy.goodput(60, 0.01, absence=True) == 0


@pytest.mark.parametrize(("hours", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_the_interval_is_that_of_the_paper(hours: float, minutes: float) -> None:
    """Daly's figures 3 to 5: checkpoints of 5 minutes."""
    assert paper.daly_interval(300, hours * 3600) / 60 == pytest.approx(minutes, rel=0.01)


@settings(max_examples=40)
@given(checkpoint=st.floats(0.1, 60), mtbf=mtbfs)
def test_no_other_interval_is_better(checkpoint: float, mtbf: float) -> None:
    chosen = paper.daly_interval(checkpoint, mtbf)
    best = max(paper.from_checkpoints(chosen * 1.02**i, mtbf, 10, checkpoint) for i in range(-100, 101))
    assert paper.from_checkpoints(chosen, mtbf, 10, checkpoint) >= 0.995 * best


@settings(max_examples=40)
@given(step=spans, checkpoint=st.floats(0.1, 60), mtbf=mtbfs)
def test_nor_another_number_of_steps(step: float, checkpoint: float, mtbf: float) -> None:
    best = max(paper.from_checkpoints(n * step, mtbf, 10, checkpoint) for n in range(1, 200))
    assert paper.restarting(step, mtbf, 10, checkpoint) >= 0.99 * best


class _Chance:
    """Failures of a job, as its time goes on."""

    def __init__(self, mtbf: float) -> None:
        self._random, self._mtbf = random.Random(7), mtbf
        self.now = self._failure = 0.0
        self._draw()

    def _draw(self) -> None:
        self._failure += self._random.expovariate(1 / self._mtbf)

    def pass_time(self, span: float) -> bool:
        """Whether nothing fails in that span. If something does it is then the time of the failure."""
        if self.now + span < self._failure:
            self.now += span
            return True
        self.now = self._failure
        self._draw()
        return False

    def recover(self, stall: float) -> None:
        while not self.pass_time(stall):
            pass


def _from_checkpoints(chance: _Chance, work: float, stall: float, checkpoint: float) -> None:
    while not chance.pass_time(work + checkpoint):
        chance.recover(stall)


def _losing(chance: _Chance, step: float, stall: float) -> None:
    while True:
        end = chance.now + step
        failed = False
        while chance.now < end:
            failed |= not chance.pass_time(end - chance.now)
        if not failed:
            return
        chance.recover(stall)


def _resuming(chance: _Chance, step: float, stall: float, width: int) -> None:
    left = step
    while True:
        begun = chance.now
        if chance.pass_time(left):
            return
        left -= chance.now - begun
        left += max(0.0, step - left) / (width - 1)  # what the lost cell had done
        chance.recover(stall)


_STEP, _MTBF = 20.0, 180.0
_PLAYED: dict[str, tuple[Callable[[_Chance], None], float, float]] = {
    "restart": (lambda c: _from_checkpoints(c, 40, 15, 6), 40, paper.from_checkpoints(40, _MTBF, 15, 6)),
    "torchft": (lambda c: _losing(c, _STEP, 0.5), _STEP, paper.losing_step(_STEP, _MTBF, 0.5)),
    "back": (lambda c: _from_checkpoints(c, _STEP, 0.1, 0), _STEP, paper.redoing(_STEP, _MTBF, 0.1)),
    "resume": (lambda c: _resuming(c, _STEP, 0.1, 8), _STEP, paper.resuming(_STEP, _MTBF, 0.1, 8)),
}
"""How a stretch of work is got through by chance, how long it is, and the goodput by formula."""


@pytest.mark.parametrize("name", _PLAYED)
def test_chance_agrees(name: str) -> None:
    play, work, expected = _PLAYED[name]
    chance, rounds = _Chance(_MTBF), 20_000
    for _ in range(rounds):
        play(chance)
    assert rounds * work / chance.now == pytest.approx(expected, rel=0.005)


def test_as_many_are_absent_by_chance() -> None:
    """All that are away come back at the end of a while in which nothing failed."""
    rejoin = paper.Rejoin(start=0, steps=3)
    chance, away, total = _Chance(_MTBF), 0, 0.0
    for _ in range(30_000):
        begun = chance.now
        quiet = chance.pass_time(3.5 * _STEP if away else math.inf)
        total += away * (chance.now - begun)
        away = 0 if quiet else away + 1
    assert total / chance.now / 8 == pytest.approx(paper.absent(_STEP, _MTBF, rejoin, 8), rel=0.03)


def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    svg = tmp_path / "plot.svg"
    command = [sys.executable, "-m", "megatron_elastic.cli", "bench", "goodput"]
    arguments = ["--mtbf", "3h,3m", "--step", "5,60s", "--restart", "5m", "--svg", str(svg)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert (record["benchmark"], record["constants"]["restart"]) == ("goodput", 300)
    assert [(row["mtbf_s"], row["step_s"]) for row in record["rows"]] == [(10800, 5), (10800, 60), (180, 5), (180, 60)]
    assert FIVE.keys() < record["rows"][0].keys()
    assert "| 3 h | 5 s |" in done.stderr
    drawn = svg.read_text()
    assert all(f">{text}<" in drawn for text in ("3 min", "steps of 60 s", *(p.title for p in FIVE.values())))


@pytest.mark.parametrize(("arguments", "why"), [
    (["--mtbf", "3d"], "give times like 20, 3m or 3h"),
    (["--step", "0"], "a time must be above 0"),
    (["--width", "1"], "--width must be at least 2"),
])  # fmt: skip
def test_what_it_refuses(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(arguments)
    assert why in capsys.readouterr().err


def test_without_matplotlib_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "planned.on_paper.plot", None)
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--svg", str(tmp_path / "plot.svg")])
    assert "pip install 'megatron-elastic[plot]'" in capsys.readouterr().err


def test_the_table_of_the_page_is_up_to_date() -> None:
    constants = paper.Constants()
    page = (_CHECKOUT / "docs" / "recovery.md").read_text()
    table = bench.table(constants, bench.rows(constants, MTBFS, STEPS))
    assert table in page, f"docs/recovery.md should have this table:\n{table}"
