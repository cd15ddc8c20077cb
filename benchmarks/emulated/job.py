"""Job: one emulated job that loses cells, and its figures before and after."""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import JobFailed, prepare_data, run_job

from emulated.cases import Case
from megatron_elastic.config import UsageError
from megatron_elastic.emulation import command
from megatron_elastic.emulation.accelerator import FOLDER
from megatron_elastic.emulation.derive import layout_of
from megatron_elastic.emulation.forecast import forecast
from megatron_elastic.emulation.models import MODELS
from megatron_elastic.emulation.profile import Profile
from megatron_elastic.layout import Holdings, Layout
from megatron_elastic.observe.records import read_events, read_metrics
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.policies import POLICIES, Policy

SCRIPT = "benchmarks/programs/emulated_gpt.py"
KILLED_AT = 4
"""Step of the loss. The first also warms things up, and the two after it are the undisturbed ones."""
_FEWEST = 3
"""Steps of the last layout, without its first, that a rate is taken of."""


EXECUTABLE: Mapping[str, Policy] = {name: policy for name, policy in POLICIES.items() if policy.refusal is None}
"""Policies under which jobs run; what the others do is foreseen only."""


def foresee(policy: Policy, layout: Layout, lost: Collection[int], costs: Costs, schedule: str) -> Layout:
    """The layout that a job reaches: the coordinator is told of one death after the other, and then goes on as long as
    it gets better. Raises NoLayout.
    """
    for rank in lost:
        layout = policy.lose(layout, [rank], Holdings.of(layout).without([rank]), layout.epoch + 1, costs,
                             [schedule])
    return policy.settle(layout, costs, [schedule])


def asked_for(options: argparse.Namespace) -> tuple[Profile, Layout]:
    """The profile and the first layout that the flags of ``emulate`` ask for. Raises JobFailed if they cannot be."""
    try:
        profile = command.make(options)
    except UsageError as error:
        raise JobFailed(str(error)) from None
    return profile, layout_of(MODELS[options.emulate], options.layout, command.batch_of(options))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What is emulated, and the policies of the jobs."""
    parser.add_argument("--emulate", choices=tuple(MODELS), default="llama2-13b", help="default: %(default)s")
    command.add_flags(parser)
    # Not all policies look after memory: on smaller devices the layouts that some go on with do not fit.
    parser.set_defaults(device="h200")
    parser.add_argument("--policy", default="all", metavar="NAMES",
                        help=f"of {', '.join(EXECUTABLE)} (default: %(default)s)")
    parser.add_argument("--schedule", choices=("1f1b", "split"), default="split",
                        help="--elastic-schedule of all jobs, so that policies are compared on equal ground (default: "
                        "%(default)s, which recycle needs)")


def check_flags(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program where they cannot be meant; ``options.policies`` are the names of those that are asked for."""
    options.model = options.emulate
    options.policies = list(EXECUTABLE) if options.policy == "all" else options.policy.split(",")
    if unknown := [name for name in options.policies if name not in EXECUTABLE]:
        parser.error(f"no job runs under {', '.join(unknown)}; known: {', '.join(EXECUTABLE)}")
    if unfit := [name for name in options.policies if EXECUTABLE[name].schedule not in (None, options.schedule)]:
        parser.error(f"--schedule {options.schedule}: {', '.join(unfit)} needs {EXECUTABLE[unfit[0]].schedule}")


def flags_of_job(options: argparse.Namespace, steps: int) -> list[str]:
    """Of ranks that compute next to nothing in the place of the model, cut as it would be."""
    shape, grid, batch = MODELS[options.emulate], options.layout, command.batch_of(options)
    teams = max(grid.cp, grid.ep)
    values: dict[str, Any] = {
        "data-path": prepare_data(), "tensor-model-parallel-size": grid.tp, "pipeline-model-parallel-size": grid.pp,
        "context-parallel-size": grid.cp, "num-layers": shape.layers, "hidden-size": 8 * grid.tp,
        "ffn-hidden-size": 8 * grid.tp, "num-attention-heads": grid.tp, "seq-length": 4 * grid.cp,
        "micro-batch-size": batch.samples, "global-batch-size": batch.grains * batch.samples * teams // grid.cp,
        "elastic-replicas": batch.replicas, "train-iters": steps, "lr": 1e-3, "attention-dropout": 0.0,
        "hidden-dropout": 0.0, "eval-iters": 0, "position-embedding-type": "none",
    }  # fmt: skip
    if shape.experts:
        values |= {"num-experts": max(2, grid.ep), "expert-model-parallel-size": grid.ep, "moe-router-topk": 2,
                   "moe-ffn-hidden-size": 8}
    switches = ["--disable-bias-linear", "--untie-embeddings-and-output-weights", "--elastic"]
    if shape.experts and grid.tp > 1:
        switches.append("--sequence-parallel")
    return [*(text for name, value in values.items() for text in (f"--{name}", str(value))), *switches]


def flags_under(policy: str, options: argparse.Namespace, profile: Path) -> list[str]:
    """Of a job that emulates ``profile`` under a policy."""
    return ["--elastic-emulate", str(profile), "--elastic-profile", str(profile), "--elastic-schedule",
            options.schedule, "--elastic-policy", policy]


def measure(
    run_dir: Path, options: argparse.Namespace, profile: Path, layout: Layout, policy: str, case: Case | None,
    axes: Sequence[str] = (),
) -> dict[str, Any]:
    """Run a job in which ``case`` happens, and tell how it went; ``axes``: further flags. Raises JobFailed."""
    flags = [*flags_of_job(options, options.steps), *flags_under(policy, options, profile), *axes]
    for rank in () if case is None else case.ranks:
        flags += ["--elastic-inject", f"kill:rank={rank},step={KILLED_AT},at=forward"]
    run_job(run_dir, len(layout.ranks), flags, SCRIPT)
    return figures(run_dir, Profile.read(profile), EXECUTABLE[policy], options.schedule, layout, case)


def reason_of(output: str) -> str:
    """Why a job ended, by the last of the lines that say so."""
    lines = output.splitlines()
    return next((line for line in reversed(lines) if ": error: " in line or "OutOfMemory" in line), lines[-1])


def figures(
    run_dir: Path, profile: Profile, policy: Policy, schedule: str, layout: Layout, case: Case | None
) -> dict[str, Any]:
    """Of a job that has ended: its rate and energy when all that it did about the loss was done, and before it."""
    metrics, last = read_metrics(run_dir), max(line["epoch"] for line in read_metrics(run_dir).values())
    after = [step for step, line in metrics.items() if line["epoch"] == last and step > 1]
    if case is not None:
        after = [step for step in after if step > KILLED_AT][1:]
        before = _rate(metrics, profile, range(2, KILLED_AT))
    else:
        before = _rate(metrics, profile, after)
    if len(after) < _FEWEST:
        raise JobFailed(f"{run_dir}: only {len(after)} whole steps in the last layout; give more --steps")
    reached = Layout.from_json((run_dir / "layouts" / f"{last}.json").read_text())
    step_ms = statistics.median(metrics[step]["step_ms"] for step in after)
    expected = forecast(reached, profile, schedule, clocks_of(run_dir, reached, profile))
    noted = drawn(run_dir)
    tokens = sum(_tokens(metrics, profile, step) for step in after)
    found: dict[str, Any] = {
        "tokens_per_s": round(_rate(metrics, profile, after), 1),
        "undisturbed_tokens_per_s": round(before, 1),
        "joules_per_token": round(sum(noted.joules[step] for step in after) / tokens, 5),
        "undisturbed_joules_per_token": round(
            sum(noted.joules[step] for step in range(2, KILLED_AT))
            / sum(_tokens(metrics, profile, step) for step in range(2, KILLED_AT)), 5),
        "step_ms": round(step_ms, 1),
        "forecast_step_ms": round(expected.step_ms, 1),
        "forecast_error": round(expected.step_ms / step_ms - 1, 4),
        "late_ms": round(statistics.median(noted.late_ms[step] for step in after), 1),
        "ranks": len(reached.ranks),
    }  # fmt: skip
    if case is not None:
        costs = profile.costs(layout.units)
        foreseen = forecast(foresee(policy, layout, case.ranks, costs, schedule), profile, schedule).step_ms
        undisturbed = forecast(layout, profile, schedule).step_ms
        lost = min(event["time"] for event in read_events(run_dir) if event["kind"] == "injected")
        found["predicted_share"] = round(undisturbed / foreseen / case.limit_share(layout), 4)
        longest = max(metrics[step]["step_ms"] for step in metrics if step >= KILLED_AT)
        found["pause_s"] = round(max(longest - step_ms, 0.0) / 1e3 / profile.emulation.time_scale, 2)
        found["seconds_until"] = round((noted.ended[after[0] - 1] - lost) / profile.emulation.time_scale, 2)
    return found


def clocks_of(run_dir: Path, layout: Layout, profile: Profile) -> dict[int, float]:
    """At which the ranks of a layout run: as planned for it, or as the profile says."""
    planned = [event for event in read_events(run_dir) if event["kind"] == "clocks" and event["epoch"] == layout.epoch]
    set_ = {int(leader): clock for leader, clock in planned[-1]["clocks"].items()} if planned else {}
    return profile.clocks() | {rank: clock for leader, clock in set_.items() for rank in layout.cells[leader].ranks}


def _tokens(metrics: Mapping[int, Mapping[str, Any]], profile: Profile, step: int) -> float:
    """The model's tokens in a step: a grain's for each grain that was really computed."""
    samples = metrics[step]["consumed_samples"] - metrics[step - 1]["consumed_samples"]
    return float(samples * profile.emulation.tokens / profile.emulation.samples)


def _rate(metrics: Mapping[int, Mapping[str, Any]], profile: Profile, steps: Sequence[int]) -> float:
    """Tokens a second of the real devices. The median over steps: others use this machine, too."""
    scale = 1e3 * profile.emulation.time_scale
    rates = [_tokens(metrics, profile, step) * scale / metrics[step]["step_ms"] for step in steps]
    return float(statistics.median(rates))


class Noted(NamedTuple):
    """By step: joules of all ranks, when the last had done it, and the most that one was behind its device."""

    joules: dict[int, float]
    ended: dict[int, float]
    late_ms: dict[int, float]


def drawn(run_dir: Path) -> Noted:
    """What emulated ranks have noted."""
    joules: dict[int, float] = defaultdict(float)
    ended: dict[int, float] = {}
    late: dict[int, float] = {}
    for path in (run_dir / FOLDER).iterdir():
        for line in map(json.loads, path.read_text().splitlines()):
            step = line["step"]
            joules[step] += line["joules"]
            ended[step] = max(ended.get(step, 0.0), line["time"])
            late[step] = max(late.get(step, 0.0), line["late_ms"])
    return Noted(joules, ended, late)
