"""How long does a job pause when its cells get another size? ``megatron-elastic bench reshape --of tp``.

The expert-, context- or tensor-parallel size of a running job of four ranks changes from 2 to 1 and back, again and
again. States are cut anew while training goes on: how much longer the steps of that time take together is one price.
The pause is the event ``reshaped``, of the rank that was slowest to tell it: groups and models are made anew. The first
step afterwards has the pause in it, and the sending of all weights. What it is longer than a usual step is the other
price.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import (
    JobFailed,
    ask_while_it_trains,
    emit,
    load_average,
    prepare_data,
    progress,
    run_job,
    run_root,
    spread,
)

from megatron_elastic.observe.compare import compare
from megatron_elastic.observe.records import read_events, read_metrics

RANKS, LAYERS, SEQUENCE = 4, 4, 64
SIZES = (2, 1)
"""Of the dimension, in turn."""
DIMENSIONS = {
    "ep": ("--expert-model-parallel-size 2 --num-experts 8 --swiglu --disable-bias-linear "
           "--moe-token-dispatcher-type alltoall"),
    "cp": "--context-parallel-size 2 --attention-dropout 0 --hidden-dropout 0",
    "tp": "--tensor-model-parallel-size 2 --attention-dropout 0 --hidden-dropout 0",
}  # fmt: skip
EXACT = ("ep",)
"""Dimensions whose size changes no bit of the result."""
BETWEEN = 6
"""Steps after each change, before the next one."""
_AROUND = 2
"""Steps after a change that are not like the others."""


def read_changes(run_dir: Path) -> dict[str, list[float]]:
    """Each change's pause, what the first and the second step afterwards took, and how much longer than usual ones the
    steps before took together in which states were cut anew, in ms; and how many these were.
    """
    steps = {step: line["step_ms"] for step, line in read_metrics(run_dir).items()}
    pauses: dict[int, float] = {}
    followed: dict[int, int] = {}
    for event in read_events(run_dir):
        if event["kind"] == "reshaped":
            pauses[event["step"]] = max(event["ms"], pauses.get(event["step"], 0.0))
            followed[event["step"]] = event["steps"]
    before = {at: range(at - count, at) for at, count in followed.items()}
    near = {step for at in pauses for step in (*before[at], *range(at, at + _AROUND))}
    usual = statistics.median(took for step, took in steps.items() if step > 2 and step not in near)
    return {"pause": list(pauses.values()), "first_step": [steps[step] for step in pauses],
            "second_step": [steps[step + 1] for step in pauses], "usual_step": [usual],
            "copying_longer": [sum(steps[step] - usual for step in some) for some in before.values()],
            "copying_steps": [float(count) for count in followed.values()]}  # fmt: skip


def flags_of_job(options: argparse.Namespace, data: Path) -> list[str]:
    """Flags of the GPT and of its training."""
    values = {
        "data-path": data, "num-layers": LAYERS, "hidden-size": options.hidden_size, "num-attention-heads": 4,
        "seq-length": SEQUENCE, "micro-batch-size": 1, "global-batch-size": 8, "elastic-slices": RANKS,
        "train-iters": 2 + (options.changes + 1) * (2 * BETWEEN + _AROUND), "lr": 1e-4, "eval-iters": 0,
    }  # fmt: skip
    experts = ["--moe-ffn-hidden-size", str(2 * options.hidden_size)] if options.of == "ep" else []
    return ["--elastic", *(text for name, value in values.items() for text in (f"--{name}", str(value))),
            *DIMENSIONS[options.of].split(), *experts]  # fmt: skip


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic bench reshape",
        description=f"Change the parallel size of the cells of a job of {RANKS} ranks from {SIZES[0]} to {SIZES[1]} "
        "and back while it trains; measure the pauses.",
    )
    parser.add_argument("--of", choices=tuple(DIMENSIONS), default="tp",
                        help="expert, context or tensor parallelism; default: %(default)s")
    parser.add_argument("--hidden-size", type=int, default=256, metavar="N", help="default: %(default)s")
    parser.add_argument("--changes", type=int, default=6, metavar="N", help="default: %(default)s")
    options = parser.parse_args(argv)
    if options.changes < 1:
        parser.error("--changes must be at least 1")
    return options


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 if the job ended well, and bit for bit like an undisturbed one where that is promised."""
    options = parse_args(argv)
    load = load_average()
    flags = flags_of_job(options, prepare_data())
    with run_root() as root:
        progress(f"a job whose --{options.of} changes {options.changes} times")
        requests = [(f"--{options.of}", str(SIZES[number % 2])) for number in range(1, options.changes + 1)]
        ask_while_it_trains(root / "changing", RANKS, flags, requests, done="cells are", first=1 + BETWEEN,
                            between=BETWEEN + _AROUND)  # fmt: skip
        figures: dict[str, Any] = {name: spread(times) for name, times in read_changes(root / "changing").items()}
        different = None
        if options.of in EXACT:
            progress("the same job, undisturbed")
            run_job(root / "fixed", RANKS, flags)
            different = compare(root / "fixed", root / "changing")
            figures["identical"] = different is None
    emit("reshape", argv, {
        "of": options.of, "changes": options.changes, "ms": figures, "load_before": load,
        "model": {"num_layers": LAYERS, "hidden_size": options.hidden_size, "seq_length": SEQUENCE},
    })  # fmt: skip
    if different is not None:
        raise JobFailed(f"the job that was reshaped differs from the undisturbed one: {different}")
    return 0
