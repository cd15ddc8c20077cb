"""Kernels: what is compiled has the bits of the reference, whatever the numbers, the types and the places."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import logging
import math
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.numerics import kernels
from megatron_elastic.numerics.kernels import BLOCK, SCALE, AdamNumbers, compiled, reference
from megatron_elastic.state.optimizer import Adam, Rates
from tests.tiers.examples import examples

ROOT = Path(__file__).parents[2]
TYPES = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
MANY = settings(deadline=None, max_examples=examples(800))
LIMIT = 2.0**23 / 64


@pytest.fixture(scope="session")
def fast() -> compiled.Kernels:
    found = compiled.kernels()
    if found is None:
        pytest.skip("there is no C++ compiler")
    return found


@st.composite
def floats(draw: st.DrawFn, wild: bool = True) -> torch.Tensor:
    """Numbers of any size and type, often among the others something that is none, beyond the limit or denormal."""
    dtype = draw(st.sampled_from(list(TYPES)))
    n = draw(st.integers(1, 70) | st.integers(4090, 4100))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sizes = torch.randint(-30, draw(st.sampled_from([-4, 4, 16])), (n,), generator=generator)
    values = torch.ldexp(torch.randn(n, generator=generator), sizes).to(dtype)
    if wild:
        bits = TYPES[dtype]
        info = torch.iinfo(bits)
        for _ in range(draw(st.integers(0, 3))):
            some = draw(
                st.integers(info.min, info.max).map(lambda each: torch.tensor(each, dtype=bits).view(dtype))
                | st.sampled_from([math.inf, -math.inf, math.nan, LIMIT, -LIMIT, 1e-44, -6e-8, -0.0]).map(torch.tensor)
            )
            values[draw(st.integers(0, n - 1))] = some
    return values


FACTORS = st.floats(2.0**-30, 2.0**20) | st.integers(-20, 20).map(lambda exponent: 2.0**exponent)


@MANY
@given(floats(), FACTORS, st.integers(0, 2**31))
def test_quantise_add(fast: compiled.Kernels, value: torch.Tensor, factor: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    before = torch.randint(-(2**62), 2**62, (value.numel(),), generator=generator)
    expected, actual = before.clone(), before.clone()
    within = reference.quantise_add(expected, value, factor, LIMIT)
    assert fast.quantise_add(actual, value, factor, LIMIT) == within
    assert torch.equal(actual, expected)
    assert within or torch.equal(expected, before)


@pytest.mark.parametrize("dtype", list(TYPES))
def test_every_number_of_16_bits_is_added_as_the_reference_adds_it(fast: compiled.Kernels, dtype: torch.dtype) -> None:
    """And as many of 32 bits."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16 if dtype == torch.float32 else dtype)
    every = every[every.abs().float() < LIMIT].to(dtype)
    expected, actual = (torch.zeros(every.numel(), dtype=torch.int64) for _ in range(2))
    assert reference.quantise_add(expected, every, 1.0, LIMIT) and fast.quantise_add(actual, every, 1.0, LIMIT)
    assert torch.equal(actual, expected) and len(actual.unique()) > 13_000


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("bad", [None, 0, 600_000, 2_100_000])
def test_threads_do_not_show(fast: compiled.Kernels, threads: int, bad: int | None) -> None:
    n = 2_100_001
    generator = torch.Generator().manual_seed(5)
    value = torch.randn(n, generator=generator)
    before = torch.randint(-(2**62), 2**62, (n,), generator=generator)
    expected, actual = before.clone(), before.clone()
    if bad is not None:
        value[bad] = math.inf
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert fast.quantise_add(actual, value, 0.3, LIMIT) == (bad is None)
        mean = fast.mean([before, actual], 1e-9)
        weights, grad, first, second = state = _state(value)
        fast.adam(weights, grad, first, second, ADAM)
    finally:
        torch.set_num_threads(usual)
    assert reference.quantise_add(expected, value, 0.3, LIMIT) == (bad is None)
    assert torch.equal(actual, expected)
    assert torch.equal(mean, reference.mean([before, expected], 1e-9))
    weights, grad, first, second = other = _state(value)
    reference.adam(weights, grad, first, second, ADAM)
    assert all(same(ours, theirs) for ours, theirs in zip(state, other, strict=True))


def _state(value: torch.Tensor) -> list[torch.Tensor]:
    return [value.clone(), value.flip(0), value * 2, value * value]


@MANY
@given(st.integers(1, 11), st.integers(1, 5000), st.integers(0, 62), st.floats(1e-16, 1e-9), st.integers(0, 2**31))
def test_mean(fast: compiled.Kernels, count: int, n: int, bits: int, by: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randint(-(2**bits), 2**bits, (n,), generator=generator) for _ in range(count)]
    copies = [part.clone() for part in parts]
    assert same(fast.mean(parts, by), reference.mean(parts, by))
    assert all(torch.equal(part, copy) for part, copy in zip(parts, copies, strict=True))


@MANY
@given(st.lists(floats(), max_size=4))
def test_block_squares(fast: compiled.Kernels, pieces: list[torch.Tensor]) -> None:
    whole = [piece[: piece.numel() // BLOCK * BLOCK] for piece in pieces]
    assert np.array_equal(fast.block_squares(whole), reference.block_squares(whole), equal_nan=True)


ADAM = AdamNumbers(0.999, 0.0, 0.9, 0.1, 0.95, 0.05, 1.7, 1e-8, -1e-3)


@MANY
@given(floats(), st.data())
def test_adam(fast: compiled.Kernels, grad: torch.Tensor, data: st.DataObject) -> None:
    """With whatever a gradient may be."""
    grad, n = grad.float(), grad.numel()
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    state = [torch.randn(n, generator=generator), torch.randn(n, generator=generator),
             torch.rand(n, generator=generator) ** 8]  # fmt: skip
    if data.draw(st.booleans()):
        state = [each.zero_() for each in state]
    numbers = AdamNumbers(
        shrink=data.draw(st.floats(0.5, 1)), decay=data.draw(st.just(0.0) | st.floats(0, 1)),
        keep=data.draw(st.floats(0, 1)), take=data.draw(st.floats(0, 1)),
        keep_sq=data.draw(st.floats(0, 1)), take_sq=data.draw(st.floats(0, 1)),
        unbias=data.draw(st.floats(1, 100)), eps=data.draw(st.floats(1e-12, 1e-2)),
        move=data.draw(st.floats(-1, 1)),
    )  # fmt: skip
    expected, actual = [each.clone() for each in state], [each.clone() for each in state]
    before = grad.clone()
    for adam, (weights, first, second) in ((reference.adam, expected), (fast.adam, actual)):
        adam(weights, grad, first, second, numbers)
    assert all(same(ours, theirs) for ours, theirs in zip(actual, expected, strict=True))
    assert same(grad, before)


@given(st.integers(1, 200), st.lists(st.integers(0, 200), max_size=4), st.booleans())
@settings(deadline=None)
def test_adam_does_not_show_how_its_elements_were_cut(n: int, cuts: list[int], decoupled: bool) -> None:
    """torch's fused one does: the last elements of a tensor are rounded in another way."""
    generator = torch.Generator().manual_seed(n)
    whole = [torch.rand(n, generator=generator) for _ in range(4)]
    pieces = [each.clone() for each in whole]
    adam, rates = Adam(0.9, 0.95, 1e-8, decoupled), Rates(1e-3, 0.1)
    adam.update(3, whole[0], whole[1], whole[2:], rates)
    edges = [0, *sorted(min(cut, n) for cut in cuts), n]
    for start, end in itertools.pairwise(edges):
        weights, grad, *moments = (each[start:end] for each in pieces)
        adam.update(3, weights, grad, moments, rates)
    assert all(same(ours, theirs) for ours, theirs in zip(whole, pieces, strict=True))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, but that any nan is like any other."""
    return bool(((a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())).all())


def test_what_compiled_kernels_do_not_know_goes_to_the_reference() -> None:
    """float64, and what does not lie in one piece."""
    for value in (torch.randn(64, dtype=torch.float64), torch.randn(128)[::2]):
        total = torch.zeros(64, dtype=torch.int64)
        assert kernels.quantise_add(total, value, 1.0, LIMIT)
        assert torch.equal(total, (value.float() * SCALE).to(torch.int64))
        assert kernels.block_squares([value]).sum() == pytest.approx(value.double().square().sum().item())


# ---- the library --------------------------------------------------------------------------

_MANY_RANKS = """
import sys
from pathlib import Path
from megatron_elastic.numerics.kernels import compiled
path = compiled.library(Path(sys.argv[1]))
compiled.Kernels(path)
print(path)
"""


@pytest.mark.job
def test_many_ranks_compile_once(fast: compiled.Kernels, tmp_path: Path) -> None:
    """The compiler is wrapped by a script that counts its calls, and each process gets a whole library."""
    wrapper, calls = tmp_path / "cxx", tmp_path / "calls"
    wrapper.write_text(f'#!/bin/sh\necho >> "{calls}"\nexec c++ "$@"\n')
    wrapper.chmod(0o755)
    folder = tmp_path / "cache"

    def rank(_: int) -> str:
        command = [sys.executable, "-c", _MANY_RANKS, str(folder)]
        return subprocess.run(command, cwd=ROOT, env={**os.environ, "CXX": str(wrapper)}, check=True, text=True,
                              stdout=subprocess.PIPE).stdout.strip()  # fmt: skip

    with ThreadPoolExecutor(3) as pool:
        paths = set(pool.map(rank, range(3)))
    assert calls.read_text() == "\n" and len(paths) == 1
    assert {each.name for each in folder.iterdir()} == {"lock", Path(paths.pop()).name}


def test_another_compiler_or_source_makes_another_library(
    fast: compiled.Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compiled.library(compiled.cache_folder())
    source = tmp_path / "other.cpp"
    source.write_text(compiled.SOURCE.read_text() + "// other\n")
    monkeypatch.setattr(compiled, "SOURCE", source)
    second = compiled.library(tmp_path)
    assert first.name != second.name and first.exists() and second.exists()
    assert second == compiled.library(tmp_path)


@pytest.fixture
def afresh(fast: compiled.Kernels) -> Iterator[None]:
    """The library is looked for again, before and after."""
    compiled.kernels.cache_clear()
    yield
    compiled.kernels.cache_clear()


@pytest.mark.parametrize("why", ["no compiler", "the compiler fails", "no place", "no home", "no library"])
def test_without_a_library_torch_computes_the_same(
    why: str, afresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    match why:
        case "no compiler":
            monkeypatch.setenv("CXX", str(tmp_path / "none"))
        case "the compiler fails":
            monkeypatch.setenv("CXX", "false")
        case "no place":
            cache.write_text("a file")
        case "no home":
            for name in ("XDG_CACHE_HOME", "HOME"):
                monkeypatch.delenv(name, raising=False)
            monkeypatch.setattr(os, "getuid", lambda: (1 << 31) - 7)  # nobody's, as in containers
        case "no library":
            path = compiled.library(cache / "megatron_elastic")
            path.write_text("not one")
    value, total = torch.randn(100), torch.zeros(100, dtype=torch.int64)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert kernels.quantise_add(total, value, 1.0, LIMIT)
    assert torch.equal(total, 2 * (value * SCALE).to(torch.int64))
    assert kernels.which(torch.device("cpu")) == "torch"
    (record,) = caplog.records
    assert "are computed by torch" in record.getMessage()


@pytest.mark.parametrize("who", ["the compiler", "another process"])
def test_a_compiler_that_stands_still_is_not_waited_for_without_end(
    who: str, afresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor who has the lock: it may compile, or have been stopped."""
    never, compiler, folder = tmp_path / "never", tmp_path / "cxx", tmp_path / "megatron_elastic"
    os.mkfifo(never)
    compiler.write_text(f'#!/bin/sh\nexec cat "{never}"\n')
    compiler.chmod(0o755)
    folder.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(compiled, "_LIMIT", 0.3)
    with (folder / "lock").open("w") as lock, caplog.at_level(logging.WARNING):
        if who == "another process":
            fcntl.flock(lock, fcntl.LOCK_EX)
        assert compiled.kernels() is None
    (record,) = caplog.records
    told = {"the compiler": "the compiler was not done within 0.3 s", "another process": str(folder / "lock")}
    assert told[who] in record.getMessage()
    assert [each.name for each in folder.iterdir()] == ["lock"], "nothing of it is left"


def test_which_kernels_there_are_is_known(fast: compiled.Kernels) -> None:
    assert [kernels.which(torch.device(kind)) for kind in ("cpu", "meta")] == ["compiled", "torch"]


def test_the_source_is_in_the_wheel(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "setup.py", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("patches", "megatron_elastic"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "."]
    subprocess.run(command, cwd=tmp_path, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert "megatron_elastic/numerics/kernels/exact.cpp" in zipfile.ZipFile(wheel).namelist()


def test_nothing_is_fused(fast: compiled.Kernels) -> None:
    """A product and a sum that differ when they are rounded once: as weights and first moment of Adam."""
    exact = 1 + 2.0**-12
    weights, grad = torch.tensor([exact]), torch.tensor([1.0])
    exp_avg, exp_avg_sq = torch.tensor([exact]), torch.tensor([1.0])
    rounded = ctypes.c_float(exact * exact).value
    assert rounded != exact * exact
    fast.adam(weights, grad, exp_avg, exp_avg_sq, AdamNumbers(exact, 0.0, exact, -1.0, 1.0, 0.0, 1.0, 0.0, -0.0))
    assert exp_avg.item() == rounded - 1 and weights.item() == rounded
