"""Kernels in Triton: the bits of the reference in Triton's interpreter, and nothing fused in what is made for a GPU."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.numerics.kernels import AdamNumbers, reference

if importlib.util.find_spec("triton") is None:  # to import it would be to settle how its functions run
    pytest.skip("Triton is not installed: pip install megatron-elastic[triton]", allow_module_level=True)

ROOT = Path(__file__).parents[2]
ADAM = AdamNumbers(0.999, 0.0, 0.9, 0.1, 0.95, 0.05, 1.7, 1e-8, -1e-3)
FEW = settings(deadline=None, max_examples=50)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[ModuleType]:
    """The kernels, run by the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # is read as Triton is imported, as kernels are defined, and as they run
        from megatron_elastic.numerics.kernels import on_device

        yield on_device


@st.composite
def numbers(draw: st.DrawFn, low: int = -40, high: int = 10) -> torch.Tensor:
    """Of any size within the range of exact sums, and type."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    n = draw(st.integers(1, 40) | st.sampled_from([1023, 1024, 1025, 5000]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sizes = torch.randint(low, high, (n,), generator=generator)
    return torch.ldexp(torch.randn(n, generator=generator), sizes).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, but that any nan is like any other."""
    bits = torch.int32 if a.dtype == torch.float32 else torch.int64
    return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())


@FEW
@given(numbers(), st.lists(st.floats(2.0**-30, 2.0**10), min_size=1, max_size=3), st.integers(0, 2**31))
def test_quantise_add(interpreted: ModuleType, value: torch.Tensor, factors: list[float], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    expected = torch.randint(-(2**61), 2**61, (value.numel(),), generator=generator)
    actual = expected.clone()
    largest, largest_expected = (torch.zeros(1, dtype=torch.float64) for _ in range(2))
    for factor in factors:
        interpreted.quantise_add_noting(actual, value, factor, largest)
        reference.quantise_add_noting(expected, value, factor, largest_expected)
    assert torch.equal(actual, expected) and same(largest, largest_expected)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 3e38, -3e38])
@pytest.mark.parametrize("at", [0, 1500])
def test_what_cannot_be_added_is_noted(interpreted: ModuleType, bad: float, at: int) -> None:
    value = torch.randn(2000, generator=torch.Generator().manual_seed(1))
    value[at] = bad
    largest, expected = (torch.tensor([7.0], dtype=torch.float64) for _ in range(2))
    for _ in range(2):
        interpreted.quantise_add_noting(torch.zeros(2000, dtype=torch.int64), value, 0.5, largest)
        reference.quantise_add_noting(torch.zeros(2000, dtype=torch.int64), value, 0.5, expected)
    assert same(largest, expected) and not largest.item() < 1e38


@FEW
@given(numbers(-60, 60), st.data())
def test_adam(interpreted: ModuleType, grad: torch.Tensor, data: st.DataObject) -> None:
    grad, n = grad.float(), grad.numel()
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    state = [torch.randn(n, generator=generator), torch.randn(n, generator=generator),
             torch.rand(n, generator=generator) ** 8]  # fmt: skip
    given = ADAM._replace(decay=data.draw(st.just(0.0) | st.floats(0.01, 1)), shrink=data.draw(st.floats(0.5, 1)),
                          unbias=data.draw(st.floats(1, 100)), move=data.draw(st.floats(-1, 1)))  # fmt: skip
    expected, actual = [each.clone() for each in state], [each.clone() for each in state]
    for adam, (weights, first, second) in ((reference.adam, expected), (interpreted.adam, actual)):
        adam(weights, grad, first, second, given)
    assert all(same(ours, theirs) for ours, theirs in zip(actual, expected, strict=True))


_COMPILE = """
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from megatron_elastic.numerics.kernels import on_device

def operations(kernel, signature, constants, capability, fused):
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": fused})
    names = r"\\b(?:fma|mad|mul|add|sub|div|sqrt|rcp|rsqrt)[.\\w]*f(?:32|64)"
    return sorted(set(re.findall(names, made.asm["ptx"])))

tensors, floats = "weights grad exp_avg exp_avg_sq", "shrink decay keep take keep_sq take_sq unbias eps move"
adam = dict.fromkeys(tensors.split(), "*fp32") | {"n": "i32"} | dict.fromkeys(floats.split(), "fp32")
add = {"total": "*i64", "value": "*bf16", "largest": "*i64", "n": "i32", "scale": "fp32", "factor_bits": "i64"}
found = {}
for capability in (80, 90):
    for fused in (False, True):
        found[f"adam {capability} {fused}"] = operations(
            on_device.adam_kernel, dict(adam), {"DECAYS": True, "SIZE": 1024}, capability, fused)
    found[f"add {capability}"] = operations(on_device.quantise_add_kernel, dict(add), {"SIZE": 1024}, capability, False)
print(json.dumps(found))
"""


def test_every_operation_is_rounded_in_what_runs_on_a_gpu(tmp_path: Path) -> None:
    """Triton makes PTX without a GPU. Where it may fuse it does: so it is asked not to."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", _COMPILE], cwd=ROOT, env=env | {"TRITON_CACHE_DIR": str(tmp_path)},
                          check=True, text=True, stdout=subprocess.PIPE)  # fmt: skip
    found = json.loads(done.stdout)
    for capability in (80, 90):
        assert found[f"adam {capability} False"] == ["add.rn.f32", "div.rn.f32", "mul.rn.f32", "sqrt.rn.f32"]
        assert "fma.rn.f32" in found[f"adam {capability} True"]
        assert found[f"add {capability}"] == ["mul.rn.f32", "mul.rn.f64"]
