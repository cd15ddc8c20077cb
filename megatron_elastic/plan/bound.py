"""Bound: what no layout of so many cells is below, whatever its stages, its widths and the order of its work."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from itertools import accumulate

from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.costs.exchange import Phases

_PRECISION = 1e-6
"""Relative, of the bound."""


def least_step_ms(costs: Costs, cells: int, grains: int, samples: int = 1, replicas: int = 0) -> float:
    """Milliseconds that no step of ``grains``, each of so many samples, is below on ``cells`` cells at the base clock.

    Stages hold units that follow each other, one chunk each, and whole samples are dealt out within them. A cell begins
    when its weights are there and its first grain has come through the stages before, and then has all its work to do;
    or it does all of it but the weights' gradients, and its last grain goes back to the beginning of the model. Its
    gradients leave after that. Exchanges use all of a device's links, and memory and activations on their way are no
    hindrance, so layouts may all be slower. Exact under these rules: for each time it is looked for the fewest cells
    that keep it, by a dynamic program over the units at which stages begin.
    """
    problem = _Problem(costs, cells, grains, samples, replicas)
    low, high = 0.0, problem.alone_ms
    while high - low > _PRECISION * high:
        middle = (low + high) / 2
        if problem.fewest_cells(middle) <= cells:
            high = middle
        else:
            low = middle
    return high + costs.overhead_ms


class _Problem:
    """The arguments of ``least_step_ms``."""

    def __init__(self, costs: Costs, cells: int, grains: int, samples: int, replicas: int) -> None:
        self._costs, self._cells, self._replicas = costs, cells, replicas
        self._grains, self._samples = grains, samples
        self._forward = list(accumulate((unit.forward_ms for unit in costs.units), initial=0.0))
        """Of all units before each; so are the next ones."""
        self._backward = list(accumulate((unit.backward_ms for unit in costs.units), initial=0.0))
        self._weights = list(accumulate((unit.parameter_bytes for unit in costs.units), initial=0))
        self._state = list(accumulate((unit.optimizer_bytes for unit in costs.units), initial=0))

    @property
    def alone_ms(self) -> float:
        """What one cell takes, which has nobody to exchange anything with but holders of replicas."""
        phases = self._phases(0, len(self._costs.units))(1)
        return phases.spread_ms + self._grains * (self._forward[-1] + self._backward[-1]) + phases.reduce_ms

    def fewest_cells(self, limit: float) -> float:
        """With which a step may take ``limit`` ms."""
        fewest = [0.0, *[math.inf] * len(self._costs.units)]
        for first in range(len(self._costs.units)):
            for end in range(first + 1, len(fewest)):
                width = self._width(first, end, limit)
                if width is None:
                    break
                fewest[end] = min(fewest[end], fewest[first] + width)
        return fewest[-1]

    def _width(self, first: int, end: int, limit: float) -> int | None:
        """The fewest cells of a stage of these units that are done by then; None: not even all."""
        forward, backward = self._forward[end] - self._forward[first], self._backward[end] - self._backward[first]
        phases = self._phases(first, end)
        for width in range(1, self._cells + 1):
            grains = -(-self._grains * self._samples // width) / self._samples
            exchange = phases(width)
            begin = max(self._forward[first], exchange.spread_ms)
            work = grains * (forward + backward) + exchange.reduce_ms
            back = grains * (forward + backward / 2) + self._backward[first] / 2
            if begin + max(work, back) <= limit * (1 + _PRECISION):
                return width
        return None

    def _phases(self, first: int, end: int) -> Callable[[int], Phases]:
        """The exchange of a cell, by the width of a stage of these units."""
        exchange = self._costs.exchange
        if exchange is None:
            return lambda _: Phases(0.0, 0.0)
        count = exchange.parameters(self._weights[end] - self._weights[first])
        state, memory = self._state[end] - self._state[first], exchange.memory_bandwidth
        copied = self._replicas * exchange.gradient_bytes * count

        def of(width: int) -> Phases:
            shared = (1 - 1 / width) * count
            update = 2e3 * state / width / memory if memory else 0.0
            return Phases(
                self._bytes_ms * (shared * exchange.sum_bytes + copied / width),
                update + self._bytes_ms * shared * exchange.weight_bytes,
            )

        return of

    @cached_property
    def _bytes_ms(self) -> float:
        """Of one byte, over all links of a device."""
        assert self._costs.exchange is not None
        far = self._costs.far
        return 1e3 / (far.bandwidth + self._costs.exchange.near(far).bandwidth)
