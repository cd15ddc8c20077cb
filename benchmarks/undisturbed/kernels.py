"""How long do kernels take? ``megatron-elastic bench kernels``.

Each is run as compiled code and as torch computes it, in alternation, on one thread. What an exact sum is worth
comparing with runs beside it: the float32 sum that it takes the place of, and a copy of as many bytes as it moves.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from common import JobFailed, emit, load_average

from megatron_elastic.numerics.kernels import BLOCK, AdamNumbers, compiled, reference

Calls = Mapping[str, Callable[[], Any]]
_MOVED = 4 + 8 + 8
"""Bytes that an exact sum reads and writes of an element: a float32 number, and the total before and after."""


def calls(n: int, fast: compiled.Kernels) -> dict[str, Calls]:
    """Kernel -> way -> one call of it on ``n`` elements."""
    generator = torch.Generator().manual_seed(1)
    value = torch.randn(n, generator=generator) * 1e-3
    whole = value[: n // BLOCK * BLOCK]
    total, floats = torch.zeros(n, dtype=torch.int64), torch.zeros(n)
    source, target = torch.ones(2, n * _MOVED // 2, dtype=torch.int8)
    parts = [torch.randint(-(2**50), 2**50, (n,), generator=generator) for _ in range(4)]
    weights, grad, first = (torch.randn(n, generator=generator) for _ in range(3))
    second = torch.rand(n, generator=generator)
    numbers = AdamNumbers(0.999, 0.0, 0.9, 0.1, 0.95, 0.05, 1.7, 1e-8, -1e-3)

    def fused() -> None:
        torch._fused_adamw_(
            [weights], [grad], [first], [second], [], [torch.tensor(3.0)], lr=1e-3, beta1=0.9, beta2=0.95,
            weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    return {
        "quantise_add": {
            "torch": lambda: reference.quantise_add(total, value, 0.37, 1e5),
            "compiled": lambda: fast.quantise_add(total, value, 0.37, 1e5),
            "float32 add": lambda: floats.add_(value),
            "copy": lambda: target.copy_(source),
        },
        "mean": {"torch": lambda: reference.mean(parts, 1e-12), "compiled": lambda: fast.mean(parts, 1e-12)},
        "block_squares": {
            "torch": lambda: reference.block_squares([whole]), "compiled": lambda: fast.block_squares([whole]),
        },
        "adam": {
            "torch": lambda: reference.adam(weights, grad, first, second, numbers),
            "compiled": lambda: fast.adam(weights, grad, first, second, numbers),
            "torch_fused": fused,
        },
    }  # fmt: skip


def measure(ways: Calls, repeat: int) -> dict[str, float]:
    """Way -> the shortest of ``repeat`` calls, in ms of the processor: others may use the machine."""
    best = dict.fromkeys(ways, float("inf"))
    for turn in range(repeat + 1):
        for way, call in ways.items():
            begun = time.process_time()
            call()
            if turn:
                best[way] = min(best[way], time.process_time() - begun)
    return {way: round(seconds * 1e3, 4) for way, seconds in best.items()}


def table(found: Mapping[int, Mapping[str, Mapping[str, float]]]) -> str:
    """In Markdown."""
    names = [f"{kernel}: {' / '.join(ways)}" for kernel, ways in next(iter(found.values())).items()]
    lines = [f"| elements | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for n, kernels in found.items():
        cells = (" / ".join(f"{ms:.2g}" for ms in ways.values()) for ways in kernels.values())
        lines.append(f"| {n:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic bench kernels",
        description="Times of exact sums, norms and Adam, compiled and in torch.")
    parser.add_argument("--elements", type=int, nargs="+", default=[1024, 65536, 1 << 20, 1 << 24], metavar="N",
                        help="sizes of tensors (default: 1024 65536 1048576 16777216)")
    parser.add_argument("--repeat", type=int, default=20, metavar="N", help="calls of each (default: %(default)s)")
    options = parser.parse_args(argv)
    load = load_average()
    fast = compiled.kernels()
    if fast is None:
        raise JobFailed("there is nothing to compare: the line above says why")
    torch.set_num_threads(1)
    found = {n: {name: measure(ways, options.repeat) for name, ways in calls(n, fast).items()}
             for n in options.elements}
    print(table(found), file=sys.stderr)
    emit("kernels", argv, {"ms": found, "load_before": load})
    return 0
