"""Exact sum: floats added up without rounding, in pieces that can be added anywhere and in any order.

Every float64 is a whole multiple of 2^-1074, so a sum of floats is a whole number of them. It travels as limbs of 32
bits, each in an int64: limbs are added like any tensor, and what carries over stays in the upper half until the end,
for up to 2^31 summands. The float is rounded once, so it does not depend on who added what to what, and is that of
``math.fsum``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

_UNIT = 1074
"""A float64 is a multiple of 2 to the power of minus this."""
_ONE = 1 << _UNIT
_BITS = 32
_LIMBS = -(-(_UNIT + 1024) // _BITS)
SIZE = _LIMBS + 4
"""int64 numbers that a sum takes: limbs, one more for what is beyond every float, and how many summands were inf, -inf
and nan."""


def write_sum(values: Iterable[float], limbs: npt.NDArray[np.int64]) -> None:
    """Make ``limbs``, which are zeros, the sum of some floats, to be added to others of its kind."""
    total = 0
    odd = [0, 0, 0]
    for value in values:
        if math.isfinite(value):
            mantissa, exponent = math.frexp(value)
            shift = exponent - 53 + _UNIT
            whole = int(mantissa * 2.0**53)
            total += whole << shift if shift >= 0 else whole >> -shift  # subnormals end in zeros
        else:
            odd[2 if math.isnan(value) else int(value < 0)] += 1
    if total:
        limbs[: _LIMBS + 1] = np.frombuffer(abs(total).to_bytes(4 * _LIMBS + 4, "little"), dtype="<u4")
        if total < 0:
            np.negative(limbs, out=limbs)
    if any(odd):
        limbs[-3:] = odd


def float_of(limbs: npt.NDArray[np.int64]) -> float:
    """A sum of limbs as the nearest float: inf if it is too large for one, nan where infinities cancel."""
    inf, minus_inf, nan = limbs[-3:].tolist()
    if nan or (inf and minus_inf):
        return math.nan
    if inf or minus_inf:
        return math.inf if inf else -math.inf
    total = 0
    for i in np.flatnonzero(limbs[:-3]).tolist():
        total += int(limbs[i]) << (_BITS * i)
    try:
        return total / _ONE
    except OverflowError:
        return math.inf if total > 0 else -math.inf
