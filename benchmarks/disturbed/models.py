"""Do large models of today stay as they were? ``megatron-elastic bench models``.

The three models of FlexTrain's evaluation at 1/64 of their width, with all their layers: experts, contexts, two further
tokens predicted. Of each a job loses three ranks, which are replaced, and changes its number of pipeline stages three
times; it is compared bit for bit with one that nothing disturbed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import (
    CHECKOUT,
    JobFailed,
    cli,
    emit,
    even_over,
    load_average,
    newest_layout,
    pid_of,
    prepare_data,
    progress,
    run_job,
    run_root,
    step_times,
    summary,
    watch_job,
)

from megatron_elastic.observe.compare import compare
from megatron_elastic.observe.records import read_events, read_metrics

FIRST, _BEGIN = 5, 3
"""The rank that is killed first, and in which step."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model and how it is divided. ``stages``: of the pipeline, one after the other, back to the first in the end."""

    layers: int
    hidden: int
    heads: int
    ranks: int
    tp: int
    cp: int
    ep: int
    stages: tuple[int, ...]

    def flags(self, data: Path, steps: int) -> list[str]:
        """Of the job without faults."""
        values = {
            "data-path": data, "num-layers": self.layers, "hidden-size": self.hidden,
            "num-attention-heads": self.heads, "kv-channels": 8, "ffn-hidden-size": 2 * self.hidden,
            "num-experts": 16, "moe-router-topk": 4, "moe-ffn-hidden-size": 32,
            "moe-shared-expert-intermediate-size": 32, "moe-router-score-function": "sigmoid",
            "moe-router-load-balancing-type": "seq_aux_loss", "moe-aux-loss-coeff": 1e-3, "mtp-num-layers": 2,
            "normalization": "RMSNorm", "position-embedding-type": "rope", "seq-length": 64, "micro-batch-size": 1,
            "global-batch-size": 8, "train-iters": steps, "lr": 1e-3, "attention-dropout": 0.0,
            "hidden-dropout": 0.0, "eval-iters": 0, "log-interval": 1, "tensor-model-parallel-size": self.tp,
            "context-parallel-size": self.cp, "expert-model-parallel-size": self.ep,
            "pipeline-model-parallel-size": self.stages[0],
        }  # fmt: skip
        switches = ("--elastic", "--elastic-slow", "off", "--bf16", "--swiglu", "--disable-bias-linear",
                    "--untie-embeddings-and-output-weights", "--moe-router-enable-expert-bias",
                    *(["--sequence-parallel"] if self.tp > 1 else []))  # fmt: skip
        return [*(text for name, value in values.items() for text in (f"--{name}", str(value))), *switches]

    def __str__(self) -> str:
        sizes = {"PP": self.stages[0], "TP": self.tp, "CP": self.cp, "EP": self.ep}
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)


MODELS = {
    "small": Model(15, 32, 8, ranks=8, tp=1, cp=2, ep=2, stages=(2, 4, 3, 2)),
    "medium": Model(29, 64, 16, ranks=16, tp=1, cp=1, ep=2, stages=(4, 3, 2, 4)),
    "large": Model(61, 112, 16, ranks=16, tp=2, cp=1, ep=2, stages=(2, 4, 3, 2)),
}


def disturb(lines: Iterator[str], run_dir: Path, model: Model) -> list[int]:
    """Read a job's output to its end; kill ranks and change the number of stages meanwhile. Returns who was killed.

    The first one dies by itself. Whatever comes next is done when the job is whole again. Raises JobFailed if the job
    ends too soon.
    """
    victims = [FIRST]
    left: list[int | str] = [*model.stages[1:], "kill", "kill"]
    stages = model.stages[0]
    for line in lines:
        if (even_over(line) or 0) < model.ranks:
            continue
        layout = newest_layout(run_dir)
        if layout.pipeline_size != stages:
            continue
        if not left:
            for _ in lines:
                pass
            return victims
        action = left.pop(0)
        progress(f"{stages} stages, whole again; next: {action if action == 'kill' else f'{action} stages'}")
        if isinstance(action, int):
            stages = action
            subprocess.run([*cli(), "scale", str(run_dir), "--pp", str(stages)], cwd=CHECKOUT, check=True,
                           stdout=subprocess.DEVNULL)  # fmt: skip
        else:
            victims.append(layout.stages[len(victims) % stages].cells[-1].ranks[-1])
            os.kill(pid_of(run_dir, victims[-1]), signal.SIGKILL)
    raise JobFailed(f"the job ended before all was done; left: {left}; give it more --steps")


def measure(name: str, model: Model, data: Path, steps: int, root: Path) -> dict[str, Any]:
    """The figures of one model. Raises JobFailed if the two jobs differ."""
    flags, run_dir, reference = model.flags(data, steps), root / name, root / f"{name}-undisturbed"
    progress(f"{name}: {model.layers} layers, {model} on {model.ranks} ranks, {steps} steps that are disturbed")
    begin = f"kill:rank={FIRST},step={_BEGIN},at=backward"
    with closing(watch_job(run_dir, model.ranks, [*flags, "--elastic-respawn", "--elastic-inject", begin])) as lines:
        victims = disturb(lines, run_dir, model)
    progress(f"{name}: the same without faults")
    run_job(reference, model.ranks, flags)
    difference = compare(reference, run_dir)
    if difference is not None:
        raise JobFailed(f"{name}: the job differs from the undisturbed one: {difference}")
    recoveries = [event for event in read_events(run_dir) if event["kind"] == "recovered"]
    return {
        "model": name, "layers": model.layers, "hidden": model.hidden, "layout": str(model), "ranks": model.ranks,
        "steps": steps, "stages": list(model.stages), "killed": victims, "identical": True,
        "step_ms": summary(step_times(read_metrics(reference))),
        "recoveries": [{name: event[name] for name in ("step", "decision", "redo_ms", "mttr_ms")}
                       for event in recoveries],
    }  # fmt: skip


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic bench models",
        description="Train FlexTrain's three models, narrowed, under faults and changes of the pipeline; compare.")
    parser.add_argument("--models", default=",".join(MODELS), metavar="NAMES", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="of each job (default: %(default)s)")
    options = parser.parse_args(argv)
    options.models = options.models.split(",")
    if unknown := [name for name in options.models if name not in MODELS]:
        parser.error(f"unknown {', '.join(unknown)}; known: {', '.join(MODELS)}")
    return options


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 if all jobs were identical to the undisturbed ones."""
    options, load = parse_args(argv), load_average()
    data = prepare_data()
    with run_root() as root:
        cases = [measure(name, MODELS[name], data, options.steps, root) for name in options.models]
    emit("models", argv, {"cases": cases, "load_before": load})
    return 0
