"""What does a killed rank cost here, and with torchft? ``megatron-elastic bench peers --torchft-python PATH``.

Jobs take turns: ours (``--elastic``, PP1 x DP8, the defaults), torchft's (``programs/data_parallel_gpt.py``, tuned),
and the same program with torch's own data parallelism, in which nobody is killed and which tells what torchft costs.
All train the same GPT, a sample a rank and step. In ours and in torchft's the same rank kills itself in the same step,
as it begins the backward pass. The time runs from right before that to when the first survivor has committed a step.
Our jobs are also compared bit for bit with one that nothing disturbed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import (
    CHECKOUT,
    JobFailed,
    emit,
    load_average,
    prepare_data,
    progress,
    run_job,
    run_root,
    spread,
    watch,
)
from undisturbed.overhead import plan_jobs, ratio

from megatron_elastic.observe.compare import compare
from megatron_elastic.observe.records import read_events, read_metrics

PROGRAM = CHECKOUT / "benchmarks" / "programs" / "data_parallel_gpt.py"
VARIANTS = ("megatron_elastic", "torchft", "ddp")
RANKS = 8
STEPS, KILL_STEP = 12, 8
"""Steps of a job, and the one in which the victim dies."""
WARM_UP = 2
"""First steps of a job, which are not counted."""
INSTALL = """torchft is no dependency. It goes with the project into an environment of its own:
    python3.11 -m venv PEERS
    PEERS/bin/pip install torch==2.13.0
    PEERS/bin/pip install --editable .
    PEERS/bin/pip install torchft-nightly==2026.10.26"""
MODEL = {"num-layers": 4, "hidden-size": 128, "num-attention-heads": 4, "seq-length": 32}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one job. ``step_ms``: of undisturbed steps. ``loss``: what the killed rank cost, by name."""

    step_ms: list[float]
    loss: dict[str, float]


def victim_of(turn: int) -> int:
    """The rank that dies in a round; each round another."""
    return (1 + 3 * turn) % RANKS


def training_flags(data: Path) -> list[str]:
    """Flags of model and training, the same in all variants."""
    values = {**MODEL, "data-path": data, "micro-batch-size": 1, "global-batch-size": RANKS, "train-iters": STEPS,
              "lr": 1e-3, "eval-iters": 0}
    return [text for name, value in values.items() for text in (f"--{name}", str(value))]


def run_ours(run_dir: Path, flags: Sequence[str], victim: int) -> Outcome:
    """Run our job, in which the victim dies. Raises JobFailed."""
    kill = f"kill:rank={victim},step={KILL_STEP},at=backward"
    run_job(run_dir, RANKS, ["--elastic", *flags, "--elastic-inject", kill])
    recovered = [event for event in read_events(run_dir) if event["kind"] == "recovered"]
    if [(event["ranks"], event["step"]) for event in recovered] != [([victim], KILL_STEP)]:
        raise JobFailed(f"{run_dir}: rank {victim} was to be lost in step {KILL_STEP}, but it was {recovered}")
    (event,) = recovered
    metrics = read_metrics(run_dir)
    return Outcome([metrics[step]["step_ms"] for step in range(WARM_UP + 1, KILL_STEP)], {
        "back_ms": event["mttr_ms"],
        "pause_ms": event["mttr_ms"] - event["redo_ms"],
        "passes_taken_over": event.get("redone_ops", 2 * RANKS),  # all, if the step could not be resumed
    })


def run_peer(python: str, wrapper: str, records: Path, flags: Sequence[str], kill: Sequence[int] = ()) -> Outcome:
    """Run the program with torchft or DDP. ``kill``: replica and step, or nothing. Raises JobFailed."""
    command = [python, str(PROGRAM), "--wrapper", wrapper, "--replicas", str(RANKS), "--records", str(records), *flags,
               *(["--kill", *map(str, kill)] if kill else [])]
    # The first two are what our launcher sets; without the third torchft logs every step.
    env = {"OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "RUST_LOG": "warn"}
    for _ in watch(command, records.with_suffix(".out"), env):
        pass
    return outcome([read_lines(records / f"{replica}.jsonl") for replica in range(RANKS)])


def read_lines(path: Path) -> list[dict[str, Any]]:
    """What a replica wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def outcome(replicas: Sequence[Sequence[Mapping[str, Any]]]) -> Outcome:
    """What the lines of all replicas come to. Raises JobFailed if no survivor trained on after a kill."""
    killed = min((line["killed"] for lines in replicas for line in lines if "killed" in line), default=None)
    attempts = [line for lines in replicas for line in lines if "step" in line]
    before = [line for line in attempts if killed is None or line["ended"] < killed]
    step_ms = [(line["ended"] - line["began"]) * 1e3 for line in before if line["committed"] and line["step"] > WARM_UP]
    if killed is None:
        return Outcome(step_ms, {})
    after = [line for line in attempts if line["ended"] > killed]
    committed = [line for line in after if line["committed"]]
    if not committed:
        raise JobFailed("no survivor committed a step after the kill")
    return Outcome(step_ms, {
        "back_ms": (min(line["ended"] for line in committed) - killed) * 1e3,
        "passes_discarded": 2 * (len(after) - len(committed)),
        "batch_after": statistics.median(line["replicas"] for line in committed),
        "failed_before": len(before) - sum(line["committed"] for line in before),
    })


def figures(outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    """Medians and ranges by variant; times in ms."""
    times = {name: [each.step_ms for each in found] for name, found in outcomes.items()}
    return {
        **{name: {"step_ms": spread(ms for each in found for ms in each.step_ms),
                  **{part: spread(each.loss[part] for each in found) for part in found[0].loss}}
           for name, found in outcomes.items()},
        **ratio(times, "torchft", "ddp", "torchft_to_ddp"),
    }


def versions_of(python: str) -> dict[str, str]:
    """What that interpreter has. Raises JobFailed without torchft."""
    code = ("import json, torchft, importlib.metadata as m; "
            "print(json.dumps({n: m.version(n) for n in ('torchft-nightly', 'torch', 'megatron-core')}))")
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        cause = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
        raise JobFailed(f"--torchft-python {python} cannot import torchft: {cause}\n{INSTALL}") from None
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the flags."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic bench peers", formatter_class=argparse.RawDescriptionHelpFormatter,
        description=f"From a kill to the next committed step, next to torchft.\n\n{INSTALL}")
    parser.add_argument("--torchft-python", default=sys.executable, metavar="PATH",
                        help="interpreter with the project and torchft (default: this one)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="jobs of each kind (default: %(default)s)")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; 0 if all jobs finished and ours were identical to the undisturbed one."""
    options = parse_args(argv)
    python, load = options.torchft_python, load_average()
    peer = versions_of(python)
    flags = training_flags(prepare_data())
    outcomes: dict[str, list[Outcome]] = {name: [] for name in VARIANTS}
    with run_root() as root:
        progress("our undisturbed job, to compare with")
        run_job(root / "undisturbed", RANKS, ["--elastic", *flags])
        for turn, name in plan_jobs(options.rounds, VARIANTS):
            run_dir, victim = root / f"round{turn + 1}-{name}", victim_of(turn)
            if name == "megatron_elastic":
                found = run_ours(run_dir, flags, victim)
                if difference := compare(root / "undisturbed", run_dir):
                    raise JobFailed(f"{run_dir} differs from the undisturbed job: {difference}")
            else:
                found = run_peer(python, name, run_dir, flags,
                                 (victim, KILL_STEP) if name == "torchft" else ())
            outcomes[name].append(found)
            progress(f"round {turn + 1}/{options.rounds}: {name} {statistics.median(found.step_ms):.0f} ms a step"
                     + "".join(f", {part} {value:.0f}" for part, value in found.loss.items()))
        emit("peers", argv, {
            **figures(outcomes),
            "identical": True,
            "rounds": options.rounds,
            "model": {**MODEL, "global-batch-size": RANKS},
            "peer_versions": peer,
            "load_before": load,
        })
    return 0
