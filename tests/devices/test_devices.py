"""Devices behind one interface: the CPU, and soft; and the sums and norms that are computed without waiting for one."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_elastic.comm.operation import Steps
from megatron_elastic.comm.tag import Channel
from megatron_elastic.device import choice, stand_in, visible
from megatron_elastic.device.copies import HostCopy
from megatron_elastic.device.cpu import Cpu
from megatron_elastic.device.device import Device
from megatron_elastic.device.names import NAMES
from megatron_elastic.device.soft import build
from megatron_elastic.numerics import deferred, keyed
from megatron_elastic.numerics.deferred import DeferredAccumulator
from megatron_elastic.numerics.exact import ExactAccumulator, GradientOverflow
from megatron_elastic.numerics.kernels import block_squares
from tests import world
from tests.world import Peer

needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler (g++, or what CXX names)")


def _on_soft(body: Callable[[Device, Peer], None], size: int = 1) -> None:
    """Run ``body`` with a soft device in processes of their own."""
    build.library()

    def chosen(peer: Peer) -> None:
        sys.modules.pop("megatron.core", None)  # modules of other tests import it, and it must not be there before
        stand_in.install()
        device = choice.choose("soft", 0)
        device.use()
        body(device, peer)
        peer.leave()

    world.run(chosen, size=size)


def _waits() -> dict[str, int]:
    return dict(torch.get_device_module("soft").synchronised_by())


def test_names_are_those_that_can_be_chosen() -> None:
    assert set(choice._TYPES) == set(NAMES)
    assert choice.choose("cpu", 3).torch == torch.device("cpu")
    assert choice.choose(None, 0).is_host
    with pytest.raises(RuntimeError, match="no device of type cuda"):
        choice.choose("cuda", 0)


def test_the_cpu_is_its_own_host() -> None:
    cpu, tensor = Cpu(), torch.arange(3.0)
    assert cpu.from_host(tensor) is tensor
    first, second = cpu.read([tensor, torch.tensor([7])])
    assert first.tolist() == [0, 1, 2] and second.tolist() == [7]
    assert not cpu.is_fault(torch.AcceleratorError())
    with pytest.raises(RuntimeError, match="only to soft"):
        cpu.harm("lost")
    with cpu.building():
        assert cpu.generator is torch.default_generator


@pytest.mark.parametrize(("there", "shown", "count"), [
    (["dev/nvidia0", "dev/nvidia1", "dev/nvidiactl"], {}, 2),
    (["dev/nvidia0", "dev/nvidia1"], {"CUDA_VISIBLE_DEVICES": "1"}, 1),
    (["dev/nvidia0", "dev/nvidia1"], {"CUDA_VISIBLE_DEVICES": "0,-1,1"}, 1),
    (["dev/nvidia0"], {"CUDA_VISIBLE_DEVICES": ""}, 0),
    (["dev/nvidia0"], {"CUDA_VISIBLE_DEVICES": "MIG-a, MIG-b,MIG-c"}, 3),
    (["cpu0", "gpu1", "gpu2", "gpu3"], {}, 3),
    (["cpu0", "gpu1", "gpu2", "gpu3"], {"ROCR_VISIBLE_DEVICES": "0,2"}, 2),
    (["cpu0", "gpu1", "gpu2", "gpu3"], {"ROCR_VISIBLE_DEVICES": "0,2", "HIP_VISIBLE_DEVICES": "1"}, 1),
    (["dev/davinci0", "dev/davinci1", "dev/davinci_manager"], {}, 2),
    (["dev/davinci0", "dev/davinci1"], {"ASCEND_RT_VISIBLE_DEVICES": "1"}, 1),
    ([], {}, 0),
])  # fmt: skip
def test_what_is_visible(there: list[str], shown: dict[str, str], count: int, tmp_path: Path) -> None:
    for number, name in enumerate(there):
        nodes = "sys/class/kfd/kfd/topology/nodes"
        path = tmp_path / (name if name.startswith("dev") else f"{nodes}/{number}/properties")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"cpu_cores_count 8\nsimd_count {304 if name.startswith('gpu') else 0}\nname \n")
    assert visible.count(shown, tmp_path) == count


def test_a_gpu_that_is_not_a_containers_is_not_counted(tmp_path: Path) -> None:
    """Its driver shows the node, and nobody may read what it is; as nobody can read a folder."""
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for number in range(3):
        (nodes / str(number)).mkdir(parents=True)
    (nodes / "0/properties").write_text("simd_count 0\n")
    (nodes / "1/properties").write_text("simd_count 304\n")
    (nodes / "2/properties").mkdir()
    assert visible.count({}, tmp_path) == 1


def test_parts_of_a_gpu_are_shared_out() -> None:
    parts = {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}
    assert [visible.own(parts, rank)["CUDA_VISIBLE_DEVICES"] for rank in range(3)] == ["MIG-a", "MIG-b", "MIG-a"]
    assert visible.own({"CUDA_VISIBLE_DEVICES": "0,1"}, 1) == visible.own({}, 1) == {}


@pytest.mark.job
@needs_compiler
def test_soft_as_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFT_DEVICES", "2")

    def body(device: Device, _: Peer) -> None:
        assert choice.choose("soft", 5).torch == torch.device("soft", 1), "ranks take turns"
        module = torch.get_device_module("soft")
        few = torch.tensor([3], device=device.torch)
        module.reset_counters()
        host = torch.arange(6.0)
        there = device.from_host(host)
        host.zero_()  # it may change at once
        keyed.draw_from(device.generator)
        keyed.seed_default_generator(1, 2)
        drawn = torch.rand(3, device=device.torch)
        assert _waits() == {}
        read = device.read([there, torch.tensor([2.0**-60]), few, drawn[:0], drawn])
        assert _waits() == {"Event.synchronize": 1}
        assert read[0].tolist() == [0, 1, 2, 3, 4, 5] and read[1].tolist() == [2.0**-60] and read[2].tolist() == [3]
        keyed.draw_from(torch.default_generator)
        keyed.seed_default_generator(1, 2)
        assert read[3].size == 0 and np.array_equal(read[4], torch.rand(3).double().numpy())
        assert device.read([]) == []
        assert device.memory().used > 0 and device.memory().total == 1 << 30

        # What Megatron calls CUDA.
        assert str(torch.cuda.current_device()) == str(device.torch)
        stats = torch.cuda.memory_stats()
        assert stats["allocated_bytes.all.current"] == torch.cuda.memory_allocated() > 0
        assert stats["allocated_bytes.all.peak"] >= stats["allocated_bytes.all.current"]
        assert stats["allocation.all.current"] == 0, "it keeps no account of that"
        assert torch.zeros(2, device="cuda").device == torch.ones(2).cuda().device == device.torch
        with device.building():
            assert torch.zeros(2, device="cuda").is_cpu and torch.ones(2).cuda().is_cpu
        assert str(torch.cuda.current_device()) == str(device.torch)
        torch.cuda.manual_seed(5)
        state = torch.cuda.get_rng_state()
        first = torch.rand(3, device=device.torch)
        torch.cuda.set_rng_state(state)
        assert torch.equal(first, torch.rand(3, device=device.torch))

        device.harm("error")
        with pytest.raises(torch.AcceleratorError) as caught:
            HostCopy(there).wait()
        assert device.is_fault(caught.value) and not device.is_fault(torch.OutOfMemoryError())

    _on_soft(body)


@pytest.mark.job
@needs_compiler
def test_messages_of_a_device_go_through_host_memory() -> None:
    """What is sent is what the tensor is in its stream's order, and whoever sends waits for nothing."""

    def body(device: Device, peer: Peer) -> None:
        transport, module = peer.transport, torch.get_device_module("soft")
        other = 1 - peer.rank
        with module.delayed(0.2):
            there = torch.full((300_000,), 1.0 + peer.rank, device=device.torch)
            module.reset_counters()
            sends = [transport.send(other, Channel.POINT_TO_POINT, 1, there),
                     *transport.send_all([other], Channel.POINT_TO_POINT, 2, there[:10])]
            assert _waits().keys() <= {"Event.synchronize, in another thread"}
        large, small = torch.zeros(300_000), torch.zeros(10)
        transport.wait(transport.recv(other, Channel.POINT_TO_POINT, 1, large),
                       transport.recv(other, Channel.POINT_TO_POINT, 2, small), *sends)
        assert bool((large == 1.0 + other).all()) and bool((small == 1.0 + other).all())
        with pytest.raises(ValueError, match="has no address here"):
            transport.recv(other, Channel.POINT_TO_POINT, 3, there)

    _on_soft(body, size=2)


@pytest.mark.job
@needs_compiler
def test_what_a_given_up_collective_may_have_touched_is_not_sent() -> None:
    from megatron_elastic.cluster.rank.control import Interrupted

    def body(device: Device, peer: Peer) -> None:
        transport = peer.transport
        here: list[torch.Tensor] = []

        def steps() -> Steps:
            here.append((yield from transport.to_host(torch.ones(3, device=device.torch))))

        transport.wait(transport.start(steps()))
        assert here.pop().tolist() == [1, 1, 1]
        transport.doubt()
        assert transport.doubted
        with pytest.raises(Interrupted):
            transport.check_devices()
        with pytest.raises(Interrupted):
            transport.wait(transport.start(steps()))
        transport.advance(1)
        assert not transport.doubted
        transport.wait(transport.start(steps()))
        assert here.pop().tolist() == [1, 1, 1]

    _on_soft(body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deferred_sums_are_the_exact_ones(dtype: torch.dtype) -> None:
    exact, later = ExactAccumulator(16), DeferredAccumulator(16)
    exact.factor = later.factor = 1 / 3
    totals = torch.zeros(2, 300_000, dtype=torch.int64)
    largest = 0.0
    for seed in range(3):
        value = torch.randn(300_000, generator=torch.Generator().manual_seed(seed)).to(dtype)
        for accumulator, total in zip((exact, later), totals, strict=True):
            assert accumulator.add(total, value, plain=seed == 1)
        largest = max(largest, value.double().abs().max().item() * (1.0 if seed == 1 else 1 / 3))
    assert torch.equal(totals[0], totals[1])
    assert later.largest.item() == pytest.approx(largest, rel=1e-15)
    assert later.judge(largest)


@pytest.mark.parametrize("bad", [2.0**23, -(2.0**23), math.inf, math.nan])
def test_a_gradient_out_of_range_is_found_at_the_vote(bad: float) -> None:
    strict, passing = DeferredAccumulator(1), DeferredAccumulator(1, passes=True)
    for accumulator in (strict, passing):
        total = torch.zeros(3, dtype=torch.int64)
        for grain in range(2000):  # more than have room at first; none hides another
            accumulator.grain = grain
            accumulator.add(total, torch.tensor([1.0, bad if grain > 1500 else 3.0, 2.0]), of="the bias")
    with pytest.raises(GradientOverflow, match=r"the gradient of the bias .* the run has diverged") as found:
        strict.judge(strict.largest.item())
    assert found.value.grain == 1501, "the first one is told"
    if math.isfinite(bad):
        with pytest.raises(GradientOverflow):
            passing.judge(passing.largest.item())
    else:
        assert not passing.judge(passing.largest.item())
    strict.begin()
    assert strict.judge(strict.largest.item())


def test_norms_of_a_device_are_those_of_the_host() -> None:
    pieces = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (32, 64, 32 * 5000)]
    found = deferred.block_squares(pieces, torch.device("cpu"))
    assert np.array_equal(found.numpy(), block_squares(pieces))
    assert deferred.block_squares([], torch.device("cpu")).numel() == 0
