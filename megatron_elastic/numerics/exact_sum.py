"""Exact sum: floats added up without rounding, in pieces that can be added anywhere and in any order.

Every float64 is a whole multiple of 2^-1074, so a sum of floats is a whole number of them. It travels as limbs of 32
bits, each in an int64: limbs are added like any tensor, and what carries over stays in the upper half until the end,
for up to 2^31 summands. The float is rounded once, so it does not depend on who added what to what, and is that of
``math.fsum``.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_UNIT = 1074
"""A float64 is a multiple of 2 to the power of minus this."""
_ONE = 1 << _UNIT
_BITS = 32
_MASK = (1 << _BITS) - 1
_LIMBS = -(-(_UNIT + 1024) // _BITS)
SIZE = _LIMBS + 4
"""int64 numbers that a sum takes: limbs, one more for what is beyond every float, and how many summands were inf, -inf
and nan."""


def write_sum(values: npt.ArrayLike, limbs: npt.NDArray[np.int64]) -> None:
    """Make ``limbs``, which are zeros, the sum of up to 2^30 floats, to be added to others of its kind."""
    floats = np.asarray(values, dtype=np.float64).ravel()
    finite = np.isfinite(floats)
    mantissas, exponents = np.frexp(floats[finite])
    whole, shift = (mantissas * 2.0**53).astype(np.int64), exponents.astype(np.int64) - 53 + _UNIT
    whole >>= np.maximum(-shift, 0)  # subnormals end in zeros
    at, by = np.divmod(np.maximum(shift, 0), _BITS)
    # A shifted mantissa reaches into three limbs.
    sign, size = np.sign(whole), np.abs(whole)
    lower, upper = (size & _MASK) << by, (size >> _BITS) << by
    sums = np.zeros(_LIMBS + 3, dtype=np.int64)
    for offset, part in enumerate((lower & _MASK, (lower >> _BITS) + (upper & _MASK), upper >> _BITS)):
        np.add.at(sums, at + offset, sign * part)
    total = _total(sums)
    if total:
        limbs[: _LIMBS + 1] = np.frombuffer(abs(total).to_bytes(4 * _LIMBS + 4, "little"), dtype="<u4")
        if total < 0:
            np.negative(limbs, out=limbs)
    if not finite.all():
        odd = floats[~finite]
        limbs[-3:] = np.count_nonzero(odd == np.inf), np.count_nonzero(odd == -np.inf), np.count_nonzero(np.isnan(odd))


def float_of(limbs: npt.NDArray[np.int64]) -> float:
    """A sum of limbs as the nearest float: inf if it is too large for one, nan where infinities cancel."""
    inf, minus_inf, nan = limbs[-3:].tolist()
    if nan or (inf and minus_inf):
        return math.nan
    if inf or minus_inf:
        return math.inf if inf else -math.inf
    total = _total(limbs[:-3])
    try:
        return total / _ONE
    except OverflowError:
        return math.inf if total > 0 else -math.inf


def _total(limbs: npt.NDArray[np.int64]) -> int:
    return sum(int(limbs[i]) << (_BITS * i) for i in np.flatnonzero(limbs).tolist())
