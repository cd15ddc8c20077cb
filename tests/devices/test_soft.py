"""soft, the software accelerator: as the CPU bit for bit, and found what a program does wrong on a device."""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron_elastic.device import soft
from megatron_elastic.device.soft import build
from tests import world
from tests.world import Peer

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler (g++, or what CXX names)")

_LATER = 60.0
"""Seconds after its launch at which a kernel starts that nobody waits for: never, in a test."""


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    # Only built here. With a device loaded, torch's autograd starts threads, and this process forks others.
    build.library()


def _on_soft(body: Callable[[Any], None], killed: bool = False, **environment: str) -> None:
    """Run ``body`` with ``torch.soft`` in a process of its own."""

    def alone(peer: Peer) -> None:
        os.environ.update(environment)
        if killed:
            faulthandler.disable()  # it is to die, and need not tell how
        soft.load()
        body(torch.soft)  # type: ignore[attr-defined]
        peer.leave()

    world.run(alone, size=1, killed=[0] if killed else [])


def _raised(call: Callable[[], object], *words: str) -> Exception:
    with pytest.raises(Exception) as caught:  # of what type callers look
        call()
    assert all(word in str(caught.value) for word in words), caught.value
    return caught.value


def _garbage(tensor: torch.Tensor) -> bool:
    return bool(tensor.isnan().all())


# ---- as the CPU -----------------------------------------------------------------------------


class _Layer(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, hidden = x.shape
        qkv = self.qkv(self.before(x)).view(samples, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        future = torch.ones(length, length, device=x.device, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-1, -2) / (hidden // self.heads) ** 0.5).masked_fill(future, float("-inf"))
        attended = F.dropout(scores.softmax(-1), 0.1) @ v
        x = x + self.out(attended.transpose(1, 2).reshape(samples, length, hidden))
        return x + F.dropout(self.down(F.gelu(self.up(self.between(x)))), 0.1)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(64, 32), nn.Embedding(16, 32)
        self.layers = nn.Sequential(_Layer(32, 4), _Layer(32, 4))
        self.norm = nn.LayerNorm(32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.norm(self.layers(x)) @ self.words.weight.t()


def _trained(device: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Weights, and the losses and gradient norms on the way, after a few steps."""
    torch.manual_seed(5)
    model = _Model().to(dtype).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = torch.randint(64, (4, 4, 17), generator=torch.Generator().manual_seed(3)).to(device)
    figures = []
    torch.manual_seed(11)
    if device == "soft":
        torch.soft.reset_counters()  # type: ignore[attr-defined]
    for batch in batches:
        logits = model(batch[:, :-1]).flatten(0, 1).float()
        loss = F.cross_entropy(logits, batch[:, 1:].flatten())
        loss.backward()
        figures += [loss.detach(), nn.utils.clip_grad_norm_(model.parameters(), 1.0)]
        optimizer.step()
        optimizer.zero_grad()
    if device == "soft":
        # Not one wait of the host in any step: what a program adds to that is its own.
        assert torch.soft.synchronised_by() == {}  # type: ignore[attr-defined]
        assert torch.soft.counters().launches > 1000  # type: ignore[attr-defined]
    for tensor in [*model.parameters(), *figures]:
        yield tensor.detach().cpu()


@pytest.mark.job
def test_training_is_that_of_the_cpu_bit_for_bit() -> None:
    """In a process that began with nothing: torch's autograd has room for the devices that it found first."""
    subprocess.run([sys.executable, "-m", "tests.devices.test_soft"], check=True)


def _compare_training() -> None:
    soft.load()
    for dtype in (torch.float32, torch.bfloat16):
        for mine, cpus in zip(_trained("soft", dtype), _trained("cpu", dtype), strict=True):
            assert torch.equal(mine, cpus)


_OPERATORS: dict[str, tuple[Callable[[torch.Tensor], Any], bool]] = {
    "add with a number": (lambda x: x + 2, False),
    "number on the CPU": (lambda x: x * torch.tensor(3.0), False),
    "sum": (lambda x: x.sum(0), False),
    "in place": (lambda x: x.clone().mul_(x).clamp_(-1, 1), False),
    "view": (lambda x: x.t()[1:, ::2].unsqueeze(0).expand(3, -1, -1) + 1, False),
    "reshape": (lambda x: x.t().reshape(-1).view(6, 8), False),
    "unfold": (lambda x: x.unfold(0, 2, 1).sum(-1), False),
    "cat and split": (lambda x: torch.cat(x.split(2)[::-1]), False),
    "matmul": (lambda x: x @ x.t(), False),
    "addmm": (lambda x: torch.addmm(x[0], x, x.t() @ x), False),
    "einsum": (lambda x: torch.einsum("ij,kj->ik", x, x), False),
    "sort": (lambda x: x.sort(1), False),
    "topk": (lambda x: x.topk(3), False),
    "max with indices": (lambda x: x.max(1), False),
    "cumsum": (lambda x: x.cumsum(0), False),
    "where": (lambda x: torch.where(x > 0, x, -x), False),
    "gather": (lambda x: x.gather(1, x.argsort(1)), False),
    "scatter": (lambda x: torch.zeros_like(x).scatter_add_(0, x.argsort(0), x), False),
    "index": (lambda x: x[x.argsort(0)[:, 0]], False),
    "index by numbers of the CPU": (lambda x: x[torch.tensor([2, 0])], True),
    "index_put": (lambda x: x.clone().index_put_((x.argsort(0)[:, 0],), x[0]), False),
    "index_add": (lambda x: torch.zeros_like(x).index_add_(0, x.argsort(0)[:, 0], x), False),
    "out": (lambda x: torch.add(x, x, out=torch.empty(0, device=x.device)), False),
    "int64": (lambda x: (x * 2**40).round().long().bitwise_xor(77).sum(0), False),
    "conversion": (lambda x: x.double().half().bfloat16(), False),
    "norms": (lambda x: torch.linalg.vector_norm(x, 2, dim=1), False),
    "foreach": (lambda x: torch._foreach_add(torch._foreach_mul([x, x[0]], 2.0), 1.0), False),
    "foreach norm": (lambda x: torch._foreach_norm([x, x[0]]), False),
    "rms norm": (lambda x: F.rms_norm(x, (8,)), False),
    "log_softmax": (lambda x: x.log_softmax(-1), False),
    "silu backward": (lambda x: torch.ops.aten.silu_backward(x.bfloat16(), x.bfloat16()), False),
    "mish backward": (lambda x: torch.ops.aten.mish_backward(x.bfloat16(), x.bfloat16()), False),
    "complex": (lambda x: torch.view_as_real(torch.fft.rfft(x).cpu()), True),
    "nonzero": (lambda x: (x > 0).nonzero(), True),
    "masked_select": (lambda x: x[x > 0], True),
    "unique": (lambda x: torch.unique(x.round(), return_counts=True), True),
    "item": (lambda x: torch.tensor(x.sum().item()), True),
    "equal": (lambda x: torch.tensor(torch.equal(x, x.clone())), True),
}


@pytest.mark.job
def test_operators_are_those_of_the_cpu_and_wait_only_where_they_must() -> None:
    def body(device: Any) -> None:
        values = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
        for name, (function, waits) in _OPERATORS.items():
            on_device = values.to("soft")
            device.reset_counters()
            found, expected = function(on_device), function(values)
            assert bool(device.synchronised_by()) == waits, (name, device.synchronised_by())
            for mine, cpus in zip(_flat(found), _flat(expected), strict=True):
                assert mine.shape == cpus.shape and mine.dtype == cpus.dtype, name
                assert torch.equal(mine.cpu(), cpus), name
        _raised(lambda: values.to("soft") @ torch.ones(3, device="soft"), "size mismatch")
        _raised(lambda: values.to("soft") + values, "same device")

    _on_soft(body)


def _flat(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [each for item in value for each in _flat(item)]


@pytest.mark.job
def test_random_numbers_are_those_of_the_cpu_and_states_need_no_wait() -> None:
    def draws(device: str, generator: torch.Generator | None) -> list[torch.Tensor]:
        return [
            torch.randn(33, device=device, generator=generator),
            torch.randint(9, (5,), device=device, generator=generator),
            torch.empty(65, device=device).bernoulli_(0.3, generator=generator),
            torch.randperm(20, device=device, generator=generator),
        ]

    def body(device: Any) -> None:
        torch.manual_seed(7)
        expected = [*draws("cpu", None), *draws("cpu", None)]
        torch.manual_seed(7)
        found = draws("soft", None)
        state = device.get_rng_state()
        found += draws("soft", None)
        device.set_rng_state(state)
        again = draws("soft", None)
        assert state.tolist() == [7, *[0] * 7, 4, *[0] * 7]  # seed, offset
        assert device.counters().synchronisations == 0
        assert all(torch.equal(mine.cpu(), cpus) for mine, cpus in zip([*found, *again], [*expected, *expected[4:]],
                                                                      strict=True))
        own = torch.Generator("soft")
        own.manual_seed(7)
        assert all(torch.equal(mine.cpu(), cpus) for mine, cpus in zip(draws("soft", own), expected, strict=False))
        unknown = state.clone()
        unknown[8] = 99
        _raised(lambda: device.set_rng_state(unknown), "states that get_state has told")

    _on_soft(body)


# ---- memory ---------------------------------------------------------------------------------


@pytest.mark.job
def test_a_raw_pointer_given_to_the_host_ends_the_process_and_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    def body(device: Any) -> None:
        tensor = torch.ones(4, device="soft")
        device.synchronize()
        _, write_end = os.pipe()
        assert ctypes.CDLL(None).write(write_end, ctypes.c_void_p(tensor.data_ptr()), 4) == -1  # nor the system
        ctypes.string_at(tensor.data_ptr(), 4)

    _on_soft(body, killed=True)
    assert "host access to memory of device soft:0" in capfd.readouterr().err


@pytest.mark.job
def test_memory_is_limited_and_counted() -> None:
    def body(device: Any) -> None:
        mebibyte = 1 << 20
        device.set_memory_limit(16 * mebibyte)
        kept = torch.zeros(4 * mebibyte, dtype=torch.uint8, device="soft")
        assert device.memory_allocated() == 4 * mebibyte
        error = _raised(lambda: torch.empty(13 * mebibyte, dtype=torch.uint8, device="soft"),
                        "soft out of memory. Tried to allocate 13.00 MiB", "total capacity of 16.00 MiB")
        assert isinstance(error, torch.OutOfMemoryError)
        other = device.Stream()
        with other:
            torch.empty(12 * mebibyte, dtype=torch.uint8, device="soft")
        assert (device.memory_allocated(), device.memory_reserved()) == (4 * mebibyte, 16 * mebibyte)
        assert device.max_memory_allocated() == 16 * mebibyte
        # What another stream keeps is given back when memory is short.
        more = torch.empty(12 * mebibyte, dtype=torch.uint8, device="soft")
        del more
        device.empty_cache()
        device.reset_peak_memory_stats()
        assert device.memory_reserved() == 4 * mebibyte == device.max_memory_allocated()
        assert device.mem_get_info() == (12 * mebibyte, 16 * mebibyte)
        assert int(kept.sum()) == 0
        freed = torch.empty(100, device="soft")
        del freed
        device.inject("memory")
        _raised(lambda: torch.empty(100, device="soft"), "soft out of memory")
        device.set_memory_limit(16 * mebibyte)
        torch.empty(100, device="soft")

    _on_soft(body)


@pytest.mark.job
def test_fresh_memory_is_garbage() -> None:
    def body(_: Any) -> None:
        assert _garbage(torch.empty(100, device="soft").cpu())
        used = torch.ones(100, device="soft")
        del used
        assert _garbage(torch.empty(100, device="soft").cpu())
        assert _garbage(torch.empty(100, dtype=torch.bfloat16, device="soft").cpu())
        assert int(torch.empty(10, dtype=torch.int64, device="soft").max()) < -(2**40)

    _on_soft(body)


# ---- streams --------------------------------------------------------------------------------


@pytest.mark.job
def test_reads_before_a_synchronisation_find_garbage() -> None:
    def body(device: Any) -> None:
        host = torch.zeros(1000).pin_memory()
        ones = torch.ones(1000, device="soft")
        with device.delayed(_LATER):
            host.copy_(ones, non_blocking=True)
            assert _garbage(host)
            device.synchronize()
            assert torch.equal(host, torch.ones(1000))
            # Towards the device pinned memory must stay as it is, other memory is staged.
            pageable, there = torch.ones(1000), torch.empty(1000, device="soft")
            there.copy_(pageable, non_blocking=True)
            pageable.zero_()
            assert torch.equal(there.cpu(), torch.ones(1000))
            there.copy_(host, non_blocking=True)
            host.zero_()
            assert torch.equal(there.cpu(), torch.zeros(1000))

    _on_soft(body)


def _come_to(device: Any) -> None:
    """Until the current stream has come here, without asking the device, which would hurry other streams."""
    come = threading.Event()
    device.launch(come.set)
    assert come.wait(60)


@pytest.mark.job
def test_streams_that_do_not_wait_for_each_other_find_garbage() -> None:
    def body(device: Any) -> None:
        first, second = device.Stream(), device.Stream()
        with device.delayed(_LATER):
            for waits in (False, True):
                with first:
                    made = torch.empty(1000, device="soft").fill_(1.0)
                with device.delayed(0.0), second:
                    if waits:
                        second.wait_stream(first)
                    read = made + 1
                    if not waits:
                        _come_to(device)  # the other stream is delayed much longer
                device.synchronize()
                assert torch.equal(read.cpu(), torch.full((1000,), 2.0)) == waits

    _on_soft(body)


@pytest.mark.job
def test_memory_that_another_stream_uses_must_be_recorded_there() -> None:
    def body(device: Any) -> None:
        side = device.Stream()
        for recorded in (False, True):
            made = torch.ones(1000, device="soft")
            side.wait_stream(device.current_stream())
            device.synchronize()
            with device.delayed(_LATER), side:
                if recorded:
                    made.record_stream(side)
                read = made + 1
            del made  # the default stream poisons it while the other has not come to it yet
            if not recorded:
                _come_to(device)
            device.synchronize()
            assert torch.equal(read.cpu(), torch.full((1000,), 2.0)) == recorded

    _on_soft(body)


@pytest.mark.job
def test_events() -> None:
    def body(device: Any) -> None:
        begin, end = device.Event(enable_timing=True), device.Event(enable_timing=True)
        begin.record()
        device.launch(lambda: time.sleep(0.02))
        end.record()
        end.synchronize()
        assert begin.query() and begin.elapsed_time(end) > 15
        device.inject("hang")
        end.record()
        assert not end.query() and not device.current_stream().query()
        device.abort_kernels()
        end.synchronize()
        assert end.query()

    _on_soft(body)


# ---- devices --------------------------------------------------------------------------------


@pytest.mark.job
def test_a_missing_device_guard_is_found() -> None:
    def body(device: Any) -> None:
        tensor = torch.zeros(10, device="soft:1")
        assert (tensor + 1).device == torch.device("soft:1")  # torch's own operators guard themselves
        with device.device(1):
            device.launch(lambda x: x.add_(1), tensor)
        assert torch.equal(tensor.cpu(), torch.ones(10))
        assert torch.equal(tensor.to("soft:0").cpu(), torch.ones(10))
        _raised(lambda: tensor + torch.ones(10, device="soft:0"), "same device", "soft:0", "soft:1")
        device.launch(lambda x: x.add_(1), tensor)
        error = _raised(device.synchronize, "illegal memory access", "memory of soft:1", "device guard")
        assert isinstance(error, torch.AcceleratorError)

    _on_soft(body, SOFT_DEVICES="2")


@pytest.mark.job
def test_two_processes_on_one_device_are_found(tmp_path: Path) -> None:
    def body(peer: Peer) -> None:
        os.environ.update({"SOFT_DEVICES": "2", "SOFT_EXCLUSIVE": str(tmp_path)})
        soft.load()
        torch.accelerator.set_device_index(peer.rank)
        torch.ones(1, device="soft")
        peer.meet()
        _raised(lambda: torch.ones(1, device=f"soft:{1 - peer.rank}"), "in use by another process")
        peer.leave()

    world.run(body, size=2)


@pytest.mark.job
def test_a_process_forked_after_the_first_use_is_refused() -> None:
    def body(device: Any) -> None:
        tensor = torch.ones(3, device="soft")
        child = os.fork()
        if child == 0:
            _raised(lambda: tensor + 1, "forked")
            _raised(lambda: torch.ones(3, device="soft"), "forked")
            assert not device.is_available()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert torch.equal((tensor + 1).cpu(), torch.full((3,), 2.0))

    _on_soft(body)


# ---- faults ---------------------------------------------------------------------------------


@pytest.mark.job
@pytest.mark.parametrize(("fault", "text"), [("error", "an injected fault"), ("lost", "the device is lost")])
def test_an_error_of_the_device_stays(fault: str, text: str) -> None:
    def body(device: Any) -> None:
        tensor = torch.ones(3, device="soft")
        device.inject(fault)
        for _ in range(3):
            for call in (device.synchronize, tensor.cpu, lambda: torch.ones(2, device="soft"), device.Event().record):
                if fault == "error" and call is not device.synchronize:
                    continue  # it comes to light at the first wait
                assert isinstance(_raised(call, text), torch.AcceleratorError)
        assert isinstance(_raised(tensor.cpu, text), torch.AcceleratorError)

    _on_soft(body)


@pytest.mark.job
def test_a_kernel_that_fails_is_an_error_of_the_device() -> None:
    def body(device: Any) -> None:
        table = torch.ones(3, 2, device="soft")
        F.embedding(torch.tensor([5], device="soft"), table)
        assert isinstance(_raised(device.synchronize, "a kernel failed", "index out of range"), torch.AcceleratorError)

    _on_soft(body)


@pytest.mark.job
def test_a_kernel_that_never_ends_blocks_until_the_process_is_killed() -> None:
    def body(device: Any) -> None:
        device.inject("hang")
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        device.synchronize()

    _on_soft(body, killed=True)


def test_the_build_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build.library()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert build.library() == made
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler"):
        build.library()


def test_another_that_builds_is_not_waited_for_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(build, "_LIMIT", 0.1)
    folder = tmp_path / "megatron_elastic_soft"
    folder.mkdir()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match=r"another process makes the extension .* for more than 0.1 s"):
            build.library()


if __name__ == "__main__":
    _compare_training()
