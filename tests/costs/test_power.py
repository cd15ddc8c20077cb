"""Clocks: planned exactly, set by actuators, and set back however a job ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic import cli
from megatron_elastic.emulation.clocks import Clocks
from megatron_elastic.pipeline.prediction import predict
from megatron_elastic.plan.costs.cost import Costs, UnitCost
from megatron_elastic.plan.costs.power import Clocking, PowerModel
from megatron_elastic.plan.policies import POLICIES
from megatron_elastic.plan.work.clock import Budget, Load, balance, clocks, loads
from megatron_elastic.plan.work.clocking import plan_clocks
from megatron_elastic.power import regulator
from megatron_elastic.power.actuator import Actuator
from megatron_elastic.power.cpufreq import Cpufreq
from megatron_elastic.power.devices import Place, devices
from megatron_elastic.power.emulated import Emulated
from megatron_elastic.power.keeper import Keeper, restore_left
from megatron_elastic.power.quota import Quota, Quotas
from megatron_elastic.power.regulator import Regulator, restore_left_behind
from tests.plan.test_policies import LAYOUT, alike
from tests.tiers.examples import examples

POWER = PowerModel(idle_w=90, static_w=150, dynamic_w=250)
STEPS = (0.6, 0.7, 0.8, 0.9, 1.0, 1.1)


# ---- planning -----------------------------------------------------------------------------------


def clocked(
    mode: str, costs: Costs, power: PowerModel = POWER, highest: Mapping[int, float] | None = None
) -> Costs:
    """Costs of a job that sets clocks."""
    return replace(costs, power=power, clock_steps=STEPS, clocking=Clocking(mode, highest or {}))


@settings(max_examples=examples(1500), deadline=None)
@given(st.data())
def test_the_slowest_is_as_fast_as_it_can_be_and_nobody_faster_than_needed(data: st.DataObject) -> None:
    """Against all ways to choose clocks, of up to five cells on two hosts."""
    count = data.draw(st.integers(1, 5))
    steps = tuple(sorted(data.draw(st.sets(st.sampled_from((0.5, 0.6, 0.75, 0.8, 1.0, 1.2)), min_size=1, max_size=4))))
    works = st.builds(lambda ms, share: Load(ms * share, ms * (1 - share)),
                      st.sampled_from((0.0, 5.0, 7.5, 8.0, 10.0, 12.0)), st.sampled_from((1.0, 1.0, 0.75, 0.25, 0.0)))
    work = {leader: data.draw(works) for leader in range(count)}
    allowed = {leader: steps[: data.draw(st.integers(1, len(steps)))] for leader in work}
    host_w = data.draw(st.sampled_from((None, 500.0, 800.0, 1200.0)))
    budget = Budget(allowed, {leader: {leader % 2: 1} for leader in work}, replace(POWER, host_w=host_w))
    found = balance(work, budget)
    possible = [
        dict(zip(work, chosen, strict=True)) for chosen in product(*allowed.values())
        if budget.affords(dict(zip(work, chosen, strict=True)))
    ]  # fmt: skip
    if not possible:
        assert found == {leader: steps[0] for leader in work}
        return
    times = [max(work[leader].at(clock) for leader, clock in chosen.items()) for chosen in possible]
    slowest = max(work[leader].at(clock) for leader, clock in found.items())
    assert budget.affords(found)
    assert slowest == pytest.approx(min(times))
    for leader, clock in found.items():
        lower = [step for step in allowed[leader] if step < clock]
        assert all(work[leader].at(step) > slowest * (1 + 1e-9) for step in lower)


def test_ten_thousand_cases_of_four_stages_six_clocks_and_three_cells() -> None:
    """Against brute force, of stages that clocks divide by more or less. Each host has a cell of each stage, and watts
    of its own, so that hosts are tried apart.
    """
    rng = np.random.default_rng(40)
    chosen = np.array(list(product(range(6), repeat=4)))
    cases = examples(10_000)
    drawn = (rng.choice((0.0, 5.0, 7.5, 8.0, 10.0, 12.0), (cases, 3, 4)), rng.choice((1.0, 0.9, 0.5, 0.0), (cases, 4)),
             rng.choice((900.0, 1300.0, 1700.0), cases))  # fmt: skip
    steps = np.array(STEPS)
    watts = np.array([POWER.watts(step) for step in STEPS])[chosen].sum(axis=1)
    devices = {4 * host + stage: {host: 1} for host in range(3) for stage in range(4)}
    allowed = dict.fromkeys(devices, STEPS)
    for work, shares, host_w in zip(*drawn, strict=True):
        possible = watts <= host_w * (1 + 1e-9)
        times = (work[:, None, :] * (shares / steps[chosen] + 1 - shares)).max(axis=2)
        least = times[:, possible].min(axis=1).max()
        loads_of = {4 * host + stage: Load(float(work[host, stage] * shares[stage]),
                                           float(work[host, stage] * (1 - shares[stage])))
                    for host in range(3) for stage in range(4)}  # fmt: skip
        found = balance(loads_of, Budget(allowed, devices, replace(POWER, host_w=float(host_w))))
        slowest = max(loads_of[leader].at(clock) for leader, clock in found.items())
        assert slowest == pytest.approx(least), (work, shares, host_w)
        for leader, clock in found.items():
            assert clock == STEPS[0] or loads_of[leader].at(STEPS[STEPS.index(clock) - 1]) > slowest * (1 + 1e-9)


def test_the_bottleneck_is_boosted_within_limits() -> None:
    layout = POLICIES["recycle"].lose(LAYOUT, [5], held_without(5), 1, None)
    narrow = {cell.leader for cell in layout.stages[1].cells}

    def planned(power: PowerModel = POWER, highest: Mapping[int, float] | None = None) -> dict[int, float]:
        return clocks(layout, clocked("performance", alike(LAYOUT), power, highest), lambda _: 0.0)

    costs, fast = alike(LAYOUT), planned()
    work = {leader: load.at(1.0) for leader, load in loads(layout, costs).items()}
    most = max(work.values())
    assert {leader for leader, clock in fast.items() if clock == 1.1} == {each for each in work if work[each] == most}
    assert set(fast.values()) == {1.0, 1.1}
    assert predict(layout, costs, fast).step_ms < predict(layout, costs).step_ms
    limited = replace(POWER, device_w=400)
    assert max(planned(limited).values()) == 1.0, "250 W more at the base clock is the limit"
    hot = min(narrow & {leader for leader, clock in fast.items() if clock == 1.1})
    assert planned(highest={hot: 0.8})[hot] == 0.8


def test_a_slow_cell_gets_the_watts_of_those_who_wait_for_it() -> None:
    costs = clocked("performance", alike(LAYOUT), replace(POWER, host_w=16 * POWER.watts(1.0)))
    costs = replace(costs, clock_steps=(*STEPS, 1.2))
    slow = LAYOUT.stages[1].cells[2].leader
    undisturbed = plan_clocks(LAYOUT, costs, "1f1b")
    assert undisturbed.clocks == {}, "nobody waits, and there is not enough for all"
    found = plan_clocks(LAYOUT, replace(costs, slow={slow: 1.5}), "1f1b")
    assert found.clocks[slow] == 1.2
    assert all(clock < 1.0 for leader, clock in found.clocks.items() if leader != slow)
    assert undisturbed.step_ms < found.step_ms < found.base_ms


def test_who_waits_saves_energy_at_the_same_speed() -> None:
    """The last stage has a head as heavy as two of its layers."""
    usual = alike(LAYOUT)
    head = UnitCost(2.0, 4.0, 6, 12, 1)
    costs = replace(usual, units=(*usual.units[:-1], head))
    saving = clocks(LAYOUT, clocked("energy", costs), lambda each: predict(LAYOUT, costs, each).step_ms)
    before, after = (predict(LAYOUT, costs, each, power=POWER) for each in (None, saving))
    assert after.step_ms <= before.step_ms * (1 + 1e-9)
    assert after.joules is not None and before.joules is not None
    assert after.joules < 0.98 * before.joules
    assert min(saving.values()) < 1.0


def test_a_host_gives_its_watts_to_the_bottleneck() -> None:
    """All of a host together: with too little for all to be boosted, who waits is slowed down instead."""
    costs = alike(LAYOUT)
    layout = POLICIES["recycle"].lose(LAYOUT, [5], held_without(5), 1, None)
    host_w = 15 * POWER.watts(1.0)
    found = clocks(layout, clocked("performance", costs, replace(POWER, host_w=host_w)), lambda _: 0.0)
    work = loads(layout, costs)
    assert found[max(work, key=lambda leader: work[leader].at(1.0))] == 1.1
    assert sum(map(POWER.watts, found.values())) <= host_w * (1 + 1e-9)


def held_without(rank: int) -> Any:
    from megatron_elastic.layout import Holdings

    return Holdings.of(LAYOUT).without([rank])


# ---- actuators ----------------------------------------------------------------------------------


@pytest.fixture
def cpus(tmp_path: Path) -> Path:
    """Files like those of a machine with two processors."""
    for cpu in (0, 1):
        folder = tmp_path / f"cpu{cpu}" / "cpufreq"
        folder.mkdir(parents=True)
        for name, value in (("cpuinfo_min_freq", 1000000), ("cpuinfo_max_freq", 3000000), ("base_frequency", 2000000),
                            ("scaling_max_freq", 2900000 + cpu)):  # fmt: skip
            (folder / name).write_text(f"{value}\n")
    return tmp_path


def limits(cpus: Path) -> list[int]:
    return [int((cpus / f"cpu{cpu}" / "cpufreq" / "scaling_max_freq").read_text()) for cpu in (0, 1)]


def test_frequencies_of_processors(cpus: Path) -> None:
    actuator = Cpufreq(cpus)
    steps = actuator.steps("0,1")
    assert (steps[0], steps[-1]) == (0.5, 1.5) and 1.0 in steps
    before = actuator.read("0,1")
    actuator.write("0,1", 0.75)
    assert limits(cpus) == [1500000, 1500000]
    actuator.restore("0,1", before)
    assert limits(cpus) == [2900000, 2900001]
    (cpus / "cpu0" / "cpufreq" / "scaling_available_frequencies").write_text("3000000 2000000 1000000 \n")
    assert actuator.steps("0") == (0.5, 1.0, 1.5)


def test_clocks_are_set_back(cpus: Path, tmp_path: Path) -> None:
    said: list[str] = []
    keeper = Keeper(Cpufreq(cpus), tmp_path / "run" / "clocks.json", said.append)
    keeper.set({"0": 0.5, "1": 1.0})
    keeper.set({"0": 0.75, "1": 1.0})
    assert limits(cpus) == [1500000, 2000000]
    keeper.set({"0": 0.75})
    assert limits(cpus) == [1500000, 2900001], "who is not named runs as before"
    keeper.set({"0": 0.75, "1": 0.5})
    assert json.loads((tmp_path / "run" / "clocks.json").read_text())["before"] == {"0": "2900000", "1": "2900001"}
    keeper.restore()
    assert limits(cpus) == [2900000, 2900001] and not said
    assert not (tmp_path / "run" / "clocks.json").exists()


def test_what_a_crash_has_left_is_set_back(cpus: Path, tmp_path: Path) -> None:
    """A process that is killed has noted what it changed."""
    file = tmp_path / "clocks.json"
    program = (
        "import os, sys; from pathlib import Path; from megatron_elastic.power.cpufreq import Cpufreq; "
        "from megatron_elastic.power.keeper import Keeper; "
        f"Keeper(Cpufreq(Path({str(cpus)!r})), Path({str(file)!r}), print).set({{'0': 0.5, '1': 0.5}}); "
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert limits(cpus) == [1000000, 1000000]
    said: list[str] = []
    restore_left(file, [Quota(), Cpufreq(cpus)], said.append)
    assert limits(cpus) == [2900000, 2900001] and not said and not file.exists()
    restore_left(file, [], said.append)
    assert not said, "nothing was left"
    file.write_text('{"actuator": "other", "before": {"3": "x"}}')
    restore_left(file, [Cpufreq(cpus)], said.append)
    assert "set them by hand" in said[0] and file.exists()


class Forbidden(Cpufreq):
    """A machine where one device cannot be set."""

    def write(self, device: str, clock: float) -> None:
        if device == "1":
            raise PermissionError(13, "Permission denied", "scaling_max_freq")
        super().write(device, clock)


def test_a_missing_permission_is_one_warning(
    cpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(regulator, "actuators", lambda: (Forbidden(cpus),))
    monkeypatch.setattr(regulator, "devices", lambda name, run_dir, places: {0: "0", 1: "1"})
    control = Regulator("cpufreq", tmp_path, said.append, tmp_path / "notes")
    for clock in (0.5, 0.75, 1.0):
        control.set({0: clock, 1: clock}, [])
    control.close(60)
    assert len(said) == 1 and "Permission denied" in said[0]
    assert "this grants it: sudo chown $USER scaling_max_freq" in said[0]
    assert limits(cpus) == [2900000, 2900001], "the other one is as it was"
    assert not list((tmp_path / "notes").iterdir())


class Odd(Cpufreq):
    """A machine where one device says what is not understood, and a package that lacks what another one needs."""

    def write(self, device: str, clock: float) -> None:
        super().write(device, clock)
        if device == "1":
            raise ValueError("invalid literal for int() with base 10: '<unknown>'")

    def restore(self, device: str, before: str) -> None:
        if device == "0":
            raise AttributeError("module 'pynvml' has no attribute 'nvmlDeviceResetGpuLockedClocks'")
        super().restore(device, before)


def test_whatever_an_actuator_trips_over_is_told(cpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(regulator, "actuators", lambda: (Odd(cpus),))
    monkeypatch.setattr(regulator, "devices", lambda name, run_dir, places: {0: "0", 1: "1"})
    control = Regulator("cpufreq", tmp_path, said.append, tmp_path / "notes")
    control.set({0: 0.5, 1: 0.5}, [])
    control.close(60)
    assert any("clocks stay as they are (cpufreq): invalid literal" in line for line in said)
    assert any("0 is not set back to '2900000': module 'pynvml'" in line for line in said)
    assert limits(cpus) == [1000000, 2900001], "the other one is as it was"
    (note,) = (tmp_path / "notes").glob("*.json")
    assert json.loads(note.read_text())["before"] == {"0": "2900000"}


class Silent(Cpufreq):
    """A machine with a device that does not answer for a while."""

    answers = threading.Event()

    def write(self, device: str, clock: float) -> None:
        super().write(device, clock)
        self.answers.wait(60)


def test_a_device_that_does_not_answer_is_not_waited_for_without_end(
    cpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(regulator, "actuators", lambda: (Silent(cpus),))
    monkeypatch.setattr(regulator, "devices", lambda name, run_dir, places: {0: "0"})
    control = Regulator("cpufreq", tmp_path, said.append, tmp_path / "notes")
    control.set({0: 0.5}, [])
    control.close(0.1)
    assert said == ["clocks are not set back (cpufreq): the devices did not answer within 0.1 s; when they do, "
                    "megatron-elastic clocks restore sets them back"]
    assert len(list((tmp_path / "notes").glob("*.json"))) == 1, "it is noted what they were"
    Silent.answers.set()
    control.close(60)
    assert limits(cpus) == [2900000, 2900001]
    assert not list((tmp_path / "notes").iterdir())


def test_what_is_left_of_a_device_that_does_not_answer_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, answers = list[str](), threading.Event()
    monkeypatch.setattr(regulator, "actuators", lambda: answers.wait(60) and ())
    monkeypatch.setattr(regulator, "_ANSWER", 0.1)
    (tmp_path / "dead.json").write_text("{}")
    restore_left_behind(said.append, tmp_path)
    (line,) = said
    answers.set()
    assert "their devices did not answer within 0.1 s" in line and str(tmp_path) in line


def test_devices_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me, other = Place(4, 0, os.getpid()), Place(5, 1, os.getppid())
    assert devices("emulated", tmp_path, [me, other]) == {n: str(tmp_path / "clocks" / str(n)) for n in (4, 5)}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices("nvidia", tmp_path, [me, other]) == {4: "0", 5: "1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,6")
    assert devices("nvidia", tmp_path, [me, other]) == {4: "3", 5: "6"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937, GPU-b2c9d1a0")
    assert devices("nvidia", tmp_path, [me, other]) == {4: "GPU-8932f937", 5: "GPU-b2c9d1a0"}
    for named in ("3,MIG-8932f937", "3", "3,-1,4", ""):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        with pytest.raises(OSError, match="which GPU is local rank"):
            devices("nvidia", tmp_path, [me, other])
    mine = sorted(os.sched_getaffinity(0))
    assert devices("cpufreq", tmp_path, [me]) == {4: ",".join(map(str, mine))}
    with pytest.raises(OSError, match="ranks 4 and 6 share"):
        devices("cpufreq", tmp_path, [me, Place(6, 1, os.getpid())])


@pytest.mark.parametrize("name", ["cpufreq", "quota"])
def test_a_rank_that_has_just_died_has_no_device(name: str, tmp_path: Path) -> None:
    """Its node has not heard of that yet; clocks of the others are set all the same."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    assert set(devices(name, tmp_path, [Place(4, 0, os.getpid()), Place(5, 1, dead.pid)])) == {4}


def test_quotas_are_those_of_a_ranks_own_group(group: Path, tmp_path: Path) -> None:
    sleep = subprocess.Popen(["sleep", "60"])
    try:
        (group / "cgroup.procs").write_text(str(sleep.pid))
        (found,) = devices("quota", tmp_path, [Place(1, 0, sleep.pid)]).values()
        assert Path(found).name == group.name
        with pytest.raises(OSError, match="share"):
            devices("quota", tmp_path, [Place(1, 0, sleep.pid), Place(2, 1, sleep.pid)])
    finally:
        sleep.kill()
        sleep.wait()


def settled(control: Regulator) -> None:
    """All that it was told is done."""
    done = threading.Event()
    control._work.put(done.set)
    assert done.wait(60)


def test_only_what_is_left_by_the_dead_is_set_back(tmp_path: Path) -> None:
    """By a lock, that others see, too, to whom the process has another number or none."""
    places, said = [Place(1, 0, 0)], list[str]()
    living = Regulator("emulated", tmp_path, said.append, tmp_path / "notes")
    living.set({1: 0.5}, places)
    settled(living)
    left = tmp_path / "clocks" / "2"
    Emulated().write(str(left), 0.5)
    (tmp_path / "notes" / "dead.json").write_text(json.dumps({"actuator": "emulated", "before": {str(left): ""}}))
    restore_left_behind(said.append, tmp_path / "notes")
    assert (tmp_path / "clocks" / "1").exists() and not left.exists() and not said
    living.close(60)
    assert not (tmp_path / "clocks" / "1").exists() and not list((tmp_path / "notes").iterdir())
    restore_left_behind(said.append, tmp_path / "nowhere")


def test_a_person_sets_back_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``megatron-elastic clocks``: what a job that runs has set stays."""
    notes, living = tmp_path / "notes", tmp_path / "clocks" / "1"
    flags = ["--folder", str(notes)]
    assert cli.main(["clocks", "restore", *flags]) == 0
    assert "no clocks are set" in capsys.readouterr().out
    job = Regulator("emulated", tmp_path, print, notes)
    job.set({1: 0.5}, [Place(1, 0, 0)])
    settled(job)
    left = tmp_path / "clocks" / "2"
    Emulated().write(str(left), 0.5)
    (notes / "dead.json").write_text(json.dumps({"actuator": "emulated", "before": {str(left): ""}}))
    assert cli.main(["clocks", "show", *flags]) == 0
    out = capsys.readouterr().out
    assert f"emulated {left}: left by a job that is gone" in out and f"emulated {living}: of a job that runs" in out
    assert left.exists()
    assert cli.main(["clocks", "restore", *flags]) == 0
    assert "1 set back" in capsys.readouterr().out and living.exists() and not left.exists()
    (notes / "odd.json").write_text(json.dumps({"actuator": "other", "before": {"3": "x"}}))
    assert cli.main(["clocks", "restore", *flags]) == 1
    assert "set them by hand" in capsys.readouterr().err
    job.close(60)


def test_emulated_devices_read_their_clock(tmp_path: Path) -> None:
    actuator: Actuator = Emulated()
    device, clocks = str(tmp_path / "clocks" / "3"), Clocks(tmp_path, {3: 0.5})
    assert (actuator.read(device), clocks.slowest([3, 4])) == ("", 0.5)
    actuator.write(device, 0.8)
    before = actuator.read(device)
    actuator.write(device, 1.2)
    assert clocks.slowest([3]) == 1.2
    actuator.restore(device, before)
    assert clocks.slowest([3]) == 0.8
    actuator.restore(device, "")
    assert clocks.slowest([3]) == 0.5, "as it begins"


def test_devices_that_are_held_down_are_told_once(tmp_path: Path, cpus: Path) -> None:
    limited = Keeper(Cpufreq(cpus), tmp_path / "limited.json", print)
    limited.set({"0,1": 1.2})
    assert limited.throttled() == {}
    (cpus / "cpu1" / "cpufreq" / "scaling_max_freq").write_text("1000000\n")
    assert limited.throttled() == {"0,1": 0.5}
    told: list[dict[int, float]] = []
    control = Regulator("emulated", tmp_path, print, tmp_path / "notes", hot=told.append)
    control.set({1: 1.2, 2: 1.0}, [Place(1, 0, 0), Place(2, 1, 0)])
    control.look()
    settled(control)
    (tmp_path / "clocks" / "1.most").write_text("0.9")
    control.look()
    control.look()
    control.close(60)
    assert told == [{1: 0.9}]
    assert Clocks(tmp_path, {}).slowest([1]) == 0.9, "and the device does not run faster"


@pytest.fixture
def group() -> Iterator[Path]:
    """A real control group with a processor quota; of either version."""
    for root in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/cpu")):
        folder = root / f"megatron_elastic_test_{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        if any((folder / name).exists() for name in ("cpu.max", "cpu.cfs_quota_us")):
            yield folder
            folder.rmdir()
            return
        folder.rmdir()
    pytest.skip("no control group with a processor quota can be made here")


def test_a_quota_slows_a_real_process(group: Path, tmp_path: Path) -> None:
    """Counted in the processor time that it gets, which other load can make less, but not more."""
    actuator, said = Quota(), list[str]()
    keeper = Keeper(actuator, tmp_path / "clocks.json", said.append)
    before = actuator.read(str(group))
    spin = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        (group / "cgroup.procs").write_text(str(spin.pid))
        keeper.set({str(group): 0.2})
        begun, used = time.monotonic(), cpu_seconds(spin.pid)
        while cpu_seconds(spin.pid) - used < 0.3:
            assert time.monotonic() - begun < 60
        assert time.monotonic() - begun > 0.3 / 0.2 * 0.6
        keeper.restore()
        assert actuator.read(str(group)) == before and not said
    finally:
        spin.kill()
        spin.wait()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_quotas_of_the_newer_version(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("max 100000\n")
    actuator = Quota()
    before = actuator.read(str(tmp_path))
    actuator.write(str(tmp_path), 0.75)
    assert (tmp_path / "cpu.max").read_text() == "75000 100000\n"
    actuator.restore(str(tmp_path), before)
    assert (tmp_path / "cpu.max").read_text() == "max 100000\n"


def test_quotas_of_the_older_version(tmp_path: Path) -> None:
    """Which has two files: a quota is nothing without its period."""
    files = [tmp_path / name for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    for file, text in zip(files, ("50000", "250000"), strict=True):
        file.write_text(f"{text}\n")
    actuator = Quota()
    before = actuator.read(str(tmp_path))
    actuator.write(str(tmp_path), 0.5)
    assert [file.read_text() for file in files] == ["10000\n", "100000\n"]
    actuator.restore(str(tmp_path), before)
    assert [file.read_text() for file in files] == ["50000\n", "250000\n"]


def test_a_quota_is_a_multiple_of_what_the_group_had(tmp_path: Path) -> None:
    """Whatever has been set since."""
    (tmp_path / "cpu.max").write_text("10000 50000\n")
    actuator = Quota()
    for clock, quota in ((1.5, 30000), (0.5, 10000), (1.0, 20000)):
        actuator.write(str(tmp_path), clock)
        assert (tmp_path / "cpu.max").read_text() == f"{quota} 100000\n"


@pytest.mark.parametrize("second", [False, True])
def test_quotas_of_ranks(tmp_path: Path, second: bool) -> None:
    """In a folder like the kernel's, of either version, in which a group has its files at once."""
    if second:
        (tmp_path / "cgroup.controllers").write_text("cpu\n")
    else:
        (tmp_path / "cpu").mkdir()
    quotas = Quotas("job", tmp_path)
    assert quotas.folder == (tmp_path / "job" if second else tmp_path / "cpu" / "job")
    assert not second or (quotas.folder / "cgroup.subtree_control").read_text() == "+cpu"
    for rank in range(2):
        (quotas.folder / str(rank)).mkdir()
        for name, text in (("cpu.max", "max 100000"),) if second else (
            ("cpu.cfs_quota_us", "-1"), ("cpu.cfs_period_us", "100000")
        ):
            (quotas.folder / str(rank) / name).write_text(f"{text}\n")
    quotas.scale([0, 1], 0.5)
    quotas.scale([1], 0.5)
    name = "cpu.max" if second else "cpu.cfs_quota_us"
    found = [(quotas.folder / str(rank) / name).read_text().split()[0] for rank in range(2)]
    assert found == ["50000", "25000"]
    with pytest.raises(FileExistsError):
        Quotas("job", tmp_path)


def test_quotas_of_real_groups(group: Path) -> None:
    """``make`` and ``remove``, where there can be groups (``group`` skips elsewhere)."""
    quotas = Quotas(f"{group.name}_ranks")
    try:
        quotas.make(2, 0.25)
        (tells,) = {Quota().read(str(quotas.folder / str(rank))).split()[0] for rank in range(2)}
        assert tells == "25000"
    finally:
        quotas.remove()
    assert not quotas.folder.exists()


def test_costs_of_nothing() -> None:
    assert set(loads(LAYOUT, Costs(alike(LAYOUT, 0.0).units)).values()) == {Load(0.0)}
