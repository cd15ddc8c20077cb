"""Clocks and power limits of NVIDIA GPUs, with a stand-in for their library (``nvml.py``): none is needed."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from megatron_elastic.cluster.messages import SetClocks
from megatron_elastic.cluster.protocol.effects import Tell
from megatron_elastic.cluster.protocol.events import Clocked
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.costs.power import Clocking, PowerModel
from megatron_elastic.power import regulator
from megatron_elastic.power.devices import Place
from megatron_elastic.power.keeper import Keeper, restore_left
from megatron_elastic.power.nvidia import Nvidia
from megatron_elastic.power.regulator import Regulator
from tests.costs.test_power import settled
from tests.devices.nvml import Nvml
from tests.play import SETTINGS, Play


def test_the_stand_in_has_the_names_and_parameters_of_the_real_library() -> None:
    pynvml = pytest.importorskip("pynvml")
    for name, function in inspect.getmembers(Nvml, inspect.isfunction):
        if name.startswith("nvml"):
            _, *ours = inspect.signature(function).parameters
            assert list(inspect.signature(getattr(pynvml, name)).parameters)[: len(ours)] == ours, name
    assert pynvml.NVML_CLOCK_GRAPHICS == Nvml.NVML_CLOCK_GRAPHICS
    texts = {str(pynvml.NVMLError(code)) for code in (
        pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.NVML_ERROR_GPU_IS_LOST,
        pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_NOT_FOUND)}  # fmt: skip
    assert texts == {"Insufficient Permissions", "Invalid Argument", "GPU is lost", "Not Supported", "Uninitialized",
                     "Not Found"}  # fmt: skip


def keeper(nvml: Nvml, tmp_path: Path, said: list[str]) -> Keeper:
    return Keeper(Nvidia(nvml), tmp_path / "clocks.json", said.append)


def test_locked_clocks_and_power_limits(tmp_path: Path) -> None:
    nvml, said = Nvml(2), list[str]()
    (first, second), kept = nvml.gpus, keeper(nvml, tmp_path, said)
    first.limit = 650_000
    assert Nvidia(nvml).steps("0") == (0.5, 1.0, 1.32)
    kept.set({"0": 0.5}, {"0": 400.0, "1": 500.0})
    assert (first.locked, first.limit) == ((750, 750), 400_000)
    assert (second.locked, second.limit) == (None, 500_000), "at its own clock"
    kept.set({"0": 0.5, "1": 1.32}, {"0": 5000.0, "1": 5.0})
    assert (first.limit, second.limit) == (700_000, 200_000), "as far as they can be limited"
    assert second.locked == (1980, 1980)
    kept.set({"1": 1.32}, {"0": 300.0})
    assert (first.locked, first.limit) == (None, 300_000), "unlocked, and still limited"
    assert (second.locked, second.limit) == ((1980, 1980), 700_000), "locked, with the limit that it had"
    kept.restore()
    assert [(gpu.locked, gpu.limit) for gpu in nvml.gpus] == [(None, 650_000), (None, 700_000)] and not said


def test_gpus_that_are_named_by_their_uuid(tmp_path: Path) -> None:
    """As Slurm and Kubernetes do."""
    nvml, said = Nvml(2), list[str]()
    kept = keeper(nvml, tmp_path, said)
    kept.set({"GPU-1": 0.5}, {"GPU-0": 400.0})
    assert (nvml.gpus[0].limit, nvml.gpus[1].locked) == (400_000, (750, 750))
    kept.restore()
    assert [(gpu.locked, gpu.limit) for gpu in nvml.gpus] == [(None, 700_000), (None, 700_000)] and not said


def test_what_a_crash_has_left_is_set_back(tmp_path: Path) -> None:
    """By another process, that has only the note; also one that was written before there were limits."""
    nvml, said = Nvml(2), list[str]()
    keeper(nvml, tmp_path, said).set({"0": 0.5}, {"0": 300.0})
    restore_left(tmp_path / "clocks.json", [Nvidia(nvml)], said.append)
    assert (nvml.gpus[0].locked, nvml.gpus[0].limit) == (None, 700_000)
    nvml.gpus[1].locked = (750, 750)
    (tmp_path / "clocks.json").write_text(json.dumps({"actuator": "nvidia", "before": {"1": "unlocked"}}))
    restore_left(tmp_path / "clocks.json", [Nvidia(nvml)], said.append)
    assert nvml.gpus[1].locked is None and not said and not (tmp_path / "clocks.json").exists()


def test_what_the_library_refuses(tmp_path: Path) -> None:
    nvml, said = Nvml(2, root=False), list[str]()
    with pytest.raises(PermissionError, match="Insufficient Permissions; root may: sudo"):
        keeper(nvml, tmp_path, said).set({"0": 0.5})
    nvml.root = True
    for wrong in ({"7": 0.5}, {"0": 3.0}):
        with pytest.raises(OSError, match="Invalid Argument"):
            keeper(nvml, tmp_path, said).set(wrong)
    nvml.gpus[0].has_limit = False
    kept = keeper(nvml, tmp_path, said)
    kept.set({"0": 0.5})
    with pytest.raises(OSError, match="PowerManagementLimitConstraints: Not Supported"):
        kept.set({"0": 0.5}, {"0": 300.0})
    kept.restore()
    assert nvml.gpus[0].locked is None and not said


def test_who_is_not_root_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And that what was not changed cannot be set back is no news."""
    nvml, said = Nvml(2, root=False), list[str]()
    monkeypatch.setattr(regulator, "actuators", lambda: (Nvidia(nvml),))
    control = Regulator("nvidia", tmp_path, said.append, tmp_path / "notes")
    for clock in (0.5, 1.0):
        control.set({0: clock, 1: clock}, [Place(rank, rank, 0) for rank in (0, 1)], {0: 300.0})
    control.close(60)
    assert len(said) == 1 and "root may: sudo -E megatron-elastic run" in said[0]
    assert not list((tmp_path / "notes").iterdir())


def test_a_device_that_is_lost_is_named_and_noted(tmp_path: Path) -> None:
    """Others are set back, and what is left to do is in the note."""
    nvml, said = Nvml(2), list[str]()
    kept = keeper(nvml, tmp_path, said)
    kept.set({"0": 0.5, "1": 0.5}, {"1": 300.0})
    nvml.gpus[0].lost = True
    with pytest.raises(OSError, match="GPU is lost"):
        kept.throttled()
    kept.restore()
    assert nvml.gpus[1].locked is None and nvml.gpus[1].limit == 700_000
    assert len(said) == 1 and "the clock of nvidia 0 is not set back" in said[0] and "GPU is lost" in said[0]
    assert json.loads((tmp_path / "clocks.json").read_text())["before"] == {"0": "unlocked, 700000 mW"}
    nvml.gpus[0].lost = False
    restore_left(tmp_path / "clocks.json", [Nvidia(nvml)], said.append)
    assert nvml.gpus[0].locked is None and not (tmp_path / "clocks.json").exists()


def test_idle_devices_are_not_held_down(tmp_path: Path) -> None:
    nvml = Nvml(2)
    kept = keeper(nvml, tmp_path, [])
    kept.set({"0": 1.32}, {"1": 300.0})
    assert kept.throttled() == {}, "idle"
    for gpu in nvml.gpus:
        gpu.reasons, gpu.now = 0x40, 1200
    assert kept.throttled() == {"0": 0.8}, "the other one runs at no clock that was set"


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(OSError, match="pip install nvidia-ml-py"):
        Keeper(Nvidia(), tmp_path / "clocks.json", print).set({"0": 0.5})


def test_a_nodes_clocks_and_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the nearest clock that there is. One refusal is one warning, and all is as it was."""
    nvml, said = Nvml(2), list[str]()
    monkeypatch.setattr(regulator, "actuators", lambda: (Nvidia(nvml),))
    control = Regulator("nvidia", tmp_path, said.append, tmp_path / "notes")
    places = [Place(rank, rank - 4, 0) for rank in (4, 5)]
    control.set({4: 0.9}, places, {4: 400.0, 5: 500.0})
    settled(control)
    assert [(gpu.locked, gpu.limit) for gpu in nvml.gpus] == [((1500, 1500), 400_000), (None, 500_000)]
    nvml.root = False
    for watts in (300.0, 350.0):
        control.set({4: 0.4}, places, {4: watts})
    settled(control)
    nvml.root = True
    assert said[-1].startswith("clocks stay as they are (nvidia)") and "Insufficient Permissions" in said[-1]
    control.close(60)
    assert sum("clocks stay" in each for each in said) == 1
    assert [(gpu.locked, gpu.limit) for gpu in nvml.gpus] == [(None, 700_000), (None, 700_000)]


@pytest.mark.parametrize(("device_w", "host_w", "watts"), [
    (None, None, {}), (600.0, None, {0: 600.0, 1: 600.0}), (600.0, 900.0, {0: 400.0, 1: 250 * 1.5**3 + 150.0}),
])  # fmt: skip
def test_devices_are_held_to_the_limits_that_were_planned_with(
    device_w: float | None, host_w: float | None, watts: dict[int, float]
) -> None:
    play = Play(settings=replace(SETTINGS, dvfs="performance"))
    costs = Costs.assumed(play.first.units)
    power = PowerModel(90, 150, 250, device_w=device_w, host_w=host_w)
    costs = type(costs)(costs.units, power=power, clock_steps=(1.0, 1.5), clocking=Clocking("performance"))
    play.job = replace(play.job, arrangement=replace(play.job.arrangement, costs=costs))
    play.happens(Clocked(now=1.0, epoch=0, clocks={1: 1.5}, step_ms=1.0, base_ms=1.0))
    told = {each.node: each.message for each in play.effects if isinstance(each, Tell)}
    assert told[1] == SetClocks(clocks={1: 1.5}, watts=watts)
