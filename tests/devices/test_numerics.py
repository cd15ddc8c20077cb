"""Numbers that do not depend on placement: exact sums and keyed random numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.numerics import keyed
from megatron_elastic.numerics.exact import (
    ExactAccumulator,
    FloatAccumulator,
    GradientOverflow,
    make_accumulator,
)
from megatron_elastic.numerics.exact_sum import SIZE, float_of, write_sum
from megatron_elastic.numerics.kernels import BLOCK, SCALE, block_squares

FLOATS = st.floats(-1000, 1000, width=32)

# ---- exact sums ---------------------------------------------------------------------------


def _sum(values: list[torch.Tensor], contributions: int = 64) -> torch.Tensor:
    accumulator = ExactAccumulator(contributions)
    total = torch.zeros(values[0].numel(), dtype=torch.int64)
    for value in values:
        accumulator.add(total, value)
    return total


@given(st.lists(st.lists(FLOATS, min_size=5, max_size=5), min_size=2, max_size=12), st.data())
@settings(deadline=None)
def test_sums_have_no_order_and_no_grouping(rows: list[list[float]], data: st.DataObject) -> None:
    values = [torch.tensor(row) for row in rows]
    shuffled = data.draw(st.permutations(values))
    cut = data.draw(st.integers(1, len(values) - 1))
    whole = _sum(values)
    assert torch.equal(whole, _sum(shuffled))
    assert torch.equal(whole, _sum(shuffled[:cut]) + _sum(shuffled[cut:]))  # two ranks, added by the owner


def limbs_of(values: Iterable[float]) -> npt.NDArray[np.int64]:
    """A sum."""
    limbs = np.zeros(SIZE, dtype=np.int64)
    write_sum(list(values), limbs)
    return limbs


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, max_value=1e305, min_value=-1e305)), st.data())
def test_exact_sums_are_rounded_once(values: list[float], data: st.DataObject) -> None:
    """Whoever adds what: subnormals, cancellation and everything between included."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), max_size=3)))
    parts = [values[a:b] for a, b in itertools.pairwise([0, *cuts, len(values)])]
    total = sum((limbs_of(part) for part in parts), start=limbs_of(()))
    assert float_of(total).hex() == math.fsum(values).hex()


@given(st.lists(st.integers(0, 4000), min_size=1, max_size=4), st.integers(0), st.sampled_from(["float", "half"]))
def test_norms_do_not_depend_on_where_tensors_are_cut(blocks: list[int], seed: int, dtype: str) -> None:
    generator = torch.Generator().manual_seed(seed % 2**31)
    whole = (torch.randn(BLOCK * sum(blocks), generator=generator) * 1e-3).to(getattr(torch, dtype))
    pieces = whole.split([BLOCK * count for count in blocks])
    parts = [block_squares([piece]) for piece in pieces]
    sums = block_squares([whole])
    assert np.array_equal(np.concatenate(parts), sums) and np.array_equal(block_squares(pieces), sums)
    assert float_of(sum(map(limbs_of, parts), start=limbs_of(()))) == math.fsum(sums)
    assert sums.sum() == pytest.approx(float(whole.double().square().sum()), rel=1e-12)


def test_exact_sums_of_what_is_no_number() -> None:
    inf, nan = math.inf, math.nan
    assert float_of(limbs_of([1.0, inf]) + limbs_of([inf])) == inf
    assert float_of(limbs_of([1.0, -inf]) + limbs_of([1e308])) == -inf
    assert math.isnan(float_of(limbs_of([inf]) + limbs_of([-inf])))
    assert math.isnan(float_of(limbs_of([nan]) + limbs_of([inf])))
    largest = 1.7976931348623157e308
    assert float_of(limbs_of([largest]) + limbs_of([largest])) == inf
    assert float_of(limbs_of([-largest] * 3)) == -inf
    many = limbs_of([largest] * 1000) * 1000  # beyond every float, on the way
    assert float_of(many + limbs_of([-largest] * 999) + limbs_of([-largest] * 1000) * 999) == largest


def test_float_sums_have_an_order() -> None:
    """Why the exact ones are needed."""
    values = [torch.tensor([x]) for x in (1e8, 1.0, -1e8, 3e-5)]
    sums = set()
    for order in itertools.permutations(values):
        total = torch.zeros(1)
        for value in order:
            FloatAccumulator().add(total, value)
        sums.add(total.item())
    assert len(sums) > 1


@given(st.lists(FLOATS, min_size=1, max_size=8))
@settings(deadline=None)
def test_mean_is_rounded_once(numbers: list[float]) -> None:
    """Each contribution is truncated to 2**-40; from there the mean is the true one, rounded to float64 and float32."""
    accumulator = ExactAccumulator(8)
    total = _sum([torch.tensor([number]) for number in numbers], 8)
    true = sum((Fraction(math.trunc(Fraction(number) * int(SCALE))) for number in numbers), Fraction(0))
    assert total.item() == true
    mean = accumulator.mean([total], len(numbers))
    assert mean.dtype == torch.float32
    exact = float(true / int(SCALE) / len(numbers))
    assert mean.item() == pytest.approx(exact, rel=2**-24 * 1.01, abs=2**-149)
    assert abs(exact - math.fsum(numbers) / len(numbers)) <= 2**-40 * 1.01


def test_precision_of_small_gradients() -> None:
    small = torch.tensor([1e-9, -1e-9, 2.0**-40, 2.0**-41])
    mean = ExactAccumulator(1).mean([_sum([small], 1)], 1)
    assert mean[:3].tolist() == pytest.approx(small[:3].tolist(), rel=1e-3)
    assert mean[3] == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2.0**23 / 4, -(2.0**23)])
def test_what_cannot_be_summed_is_refused(bad: float) -> None:
    value = torch.zeros(300_000)
    value[299_999] = bad
    total = torch.zeros(300_000, dtype=torch.int64)
    with pytest.raises(GradientOverflow, match=r"the gradient of the head lies.*or needs --elastic-consistency fast"):
        ExactAccumulator(4).add(total, value, of="the head")
    assert not total.any()


def test_the_largest_contributions_do_not_overflow() -> None:
    largest = 2.0**21 * (1 - 2.0**-24)  # the float32 below the limit
    total = _sum([torch.tensor([largest, -largest])] * 4, 4)
    assert total.tolist() == [int(4 * largest * SCALE), -int(4 * largest * SCALE)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_long_tensors_of_any_float_type(dtype: torch.dtype) -> None:
    value = torch.randn(300_001, generator=torch.Generator().manual_seed(1)).to(dtype)
    total = _sum([value, value], 2)
    assert torch.equal(total, 2 * (value.to(torch.float64).to(torch.float32).to(torch.float64) * SCALE).to(torch.int64))


def test_make_accumulator() -> None:
    assert isinstance(make_accumulator("bitwise", 4), ExactAccumulator)
    assert isinstance(make_accumulator("fast", 4), FloatAccumulator)


# ---- keyed random numbers -----------------------------------------------------------------


def _draw(*coordinates: int | str) -> list[float]:
    keyed.seed_default_generator(*coordinates)
    return torch.rand(3).tolist()


def test_draws_are_a_function_of_their_coordinates() -> None:
    first = _draw(1, 2, 3, "layer.0")
    torch.rand(100)
    assert _draw(1, 2, 3, "layer.0") == first
    others = [_draw(*c) for c in ((2, 2, 3, "layer.0"), (1, 3, 3, "layer.0"), (1, 2, 4, "layer.0"), (1, 2, 3, "x"))]
    assert len({tuple(draws) for draws in [first, *others]}) == 5


@given(st.lists(st.integers(-(2**62), 2**62) | st.text(), max_size=4),
       st.lists(st.integers(-(2**62), 2**62) | st.text(), max_size=4))  # fmt: skip
def test_keys(first: list[int | str], second: list[int | str]) -> None:
    """Other coordinates have another key, also where their text runs together."""
    assert 0 <= keyed.key(*first) < 2**63
    assert (keyed.key(*first) == keyed.key(*second)) == (first == second)


def test_keys_stay_the_same() -> None:
    """A checkpoint continues the draws of the job that wrote it, so keys must not change between versions."""
    assert keyed.key(1234, 1, 0, "embedding") == 2129581158515847477
    assert keyed.key("a", "b") != keyed.key("ab")


def test_forks() -> None:
    """They differ by index; what follows outside does not."""

    def step(index: int) -> tuple[list[float], list[float]]:
        keyed.seed_default_generator(7)
        with keyed.forked(7, 0, "dropout", index):
            inside = torch.rand(3).tolist()
            torch.rand(10 * index)
        return inside, torch.rand(3).tolist()

    (inside0, after0), (inside1, after1) = step(0), step(1)
    assert inside0 != inside1
    assert after0 == after1
    assert step(0) == (inside0, after0)


def test_another_generator_draws() -> None:
    """A device's; that of the CPU does not move."""
    keyed.seed_default_generator(7)
    expected = torch.rand(6)
    keyed.seed_default_generator(8)
    other, state = torch.Generator(), torch.get_rng_state()
    with keyed.drawing_from(other):
        keyed.seed_default_generator(7)
        first = torch.rand(3, generator=other)
        with keyed.forked("a"):
            inside = torch.rand(3, generator=other)
        assert torch.equal(torch.cat((first, torch.rand(3, generator=other))), expected)
    assert torch.equal(torch.get_rng_state(), state)
    with keyed.forked("a"):
        assert torch.equal(torch.rand(3), inside)


def test_a_fork_that_raises_restores_the_generator() -> None:
    keyed.seed_default_generator(7)
    expected = torch.rand(3)
    keyed.seed_default_generator(7)
    with pytest.raises(KeyError), keyed.forked(7, 0, "dropout", 1):
        raise KeyError
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "dim"), [((5, 6, 7), 1), ((6, 2, 5, 5), 0)])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("p", [0.3, 1.0])
def test_dropout_of_some_samples_is_that_of_the_whole(
    shape: tuple[int, ...], dim: int, dtype: torch.dtype, inplace: bool, p: float
) -> None:
    whole = torch.randn(shape).to(dtype)
    keyed.seed_default_generator(7)
    expected = torch.nn.functional.dropout(whole, p, training=True)
    after = torch.rand(3)
    for start, size in ((0, 6), (0, 2), (2, 1), (3, 3)):
        part = whole.narrow(dim, start, size).clone()
        keyed.seed_default_generator(7)
        actual = keyed.dropout(part, p, dim, start, 6, inplace)
        assert torch.equal(torch.rand(3), after)
        assert torch.equal(actual, expected.narrow(dim, start, size))
        assert (actual is part) == inplace
