"""Job: one emulated job in which something happens, and its figures before and after."""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
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
from megatron_elastic.plan import NoLayout
from megatron_elastic.plan.choice import SCHEDULES, SEARCH, splits
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.costs.fit import overflow
from megatron_elastic.plan.costs.power import MODES, Clocking
from megatron_elastic.plan.policies import POLICIES, Policy
from megatron_elastic.plan.work.clocking import plan_clocks
from megatron_elastic.plan.work.order import Order, foreseen, search

SCRIPT = "benchmarks/programs/emulated_gpt.py"
KILLED_AT = 6
"""Step in which it happens. The first also warms things up, and an order that is searched is there some steps later."""
_FEWEST = 3
"""Steps of the last layout, without its first, that a rate is taken of."""
_DVFS = "--elastic-dvfs"
OWN = "own"
"""Value of ``--schedule``: each policy's own."""
_SEARCHING = ("elastic", "elastic-paused")
"""Policies to which it belongs that the order of work is searched. All others have ``split``, which is faster than what
they were published with, but for recycle, to which it belongs."""
EXECUTABLE: Mapping[str, Policy] = {name: policy for name, policy in POLICIES.items() if policy.refusal is None}
"""Policies under which jobs run; what the others do is foreseen only."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Jobs of one kind: ``schedule`` is their ``--elastic-schedule``, ``flags`` are besides those of all jobs."""

    name: str
    policy: str
    flags: tuple[str, ...] = ()
    schedule: str = "split"

    @property
    def dvfs(self) -> str | None:
        """The mode in which its jobs set clocks, if they do."""
        return self.flags[self.flags.index(_DVFS) + 1] if _DVFS in self.flags else None


def foresee(policy: Policy, layout: Layout, lost: Collection[int], costs: Costs, schedule: str) -> Layout:
    """The layout that a job reaches: it is in the best one that there is for all ranks when the coordinator is told of
    one death after the other, and then goes on as long as it gets better. Raises NoLayout, also where the memory of
    devices is not enough for a step on the way, as that ends the job.
    """
    schedules = foreseen(schedule)

    def fitting(layout: Layout) -> Layout:
        if problem := overflow(layout, layout.ranks, costs, splits(schedules)):
            raise NoLayout(problem)
        return layout

    layout = policy.settle(layout, costs, schedules)
    for rank in lost:
        held = Holdings.of(layout).without([rank])
        layout = policy.lose(layout, [rank], held, layout.epoch + 1, costs, schedules)
    return fitting(policy.settle(fitting(layout), costs, schedules))


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
    parser.add_argument("--schedule", choices=(*SCHEDULES, SEARCH, OWN), default=OWN,
                        help="--elastic-schedule of all jobs; own: search for elastic, split for the others (default: "
                        "%(default)s)")
    parser.add_argument("--elastic-dvfs", choices=MODES, metavar="MODE",
                        help="%(choices)s: besides, elastic with clocks that are planned so")


def check_flags(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program where they cannot be meant; ``options.variants`` are the jobs that are asked for."""
    options.model = options.emulate
    names = list(EXECUTABLE) if options.policy == "all" else options.policy.split(",")
    if unknown := [name for name in names if name not in EXECUTABLE]:
        why = f": {POLICIES[unknown[0]].refusal}" if unknown[0] in POLICIES else ""
        parser.error(f"no job runs under {', '.join(unknown)}{why}; --policy is all, or of {', '.join(EXECUTABLE)}")
    options.variants = [Variant(name, name, (), _schedule(name, options.schedule)) for name in names]
    for each in options.variants:
        if (needs := EXECUTABLE[each.policy].schedule) is not None and each.schedule not in (needs, SEARCH):
            parser.error(f"--schedule {options.schedule}: {each.name} needs {needs}, or search")
    if options.elastic_dvfs is not None:
        schedule = _schedule("elastic", options.schedule)
        flags = (_DVFS, options.elastic_dvfs)
        options.variants.append(Variant(f"elastic+{options.elastic_dvfs}", "elastic", flags, schedule))


def _schedule(policy: str, asked: str) -> str:
    if asked != OWN:
        return asked
    return SEARCH if policy in _SEARCHING else "split"


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


def flags_under(variant: Variant, profile: Path) -> list[str]:
    """Of a job that emulates ``profile``."""
    return ["--elastic-emulate", str(profile), "--elastic-profile", str(profile), "--elastic-schedule",
            variant.schedule, "--elastic-policy", variant.policy, *variant.flags]


def measure(
    run_dir: Path, options: argparse.Namespace, profile: Path, layout: Layout, variant: Variant, case: Case
) -> dict[str, Any]:
    """Run a job in which ``case`` happens, and tell how it went. Raises JobFailed."""
    emulated = Profile.read(profile)
    if problem := overflow(layout, layout.ranks, emulated.costs(layout.units), variant.schedule == "split"):
        raise JobFailed(problem)
    flags = [*flags_of_job(options, options.steps), *flags_under(variant, profile)]
    for rank in case.ranks:
        flags += ["--elastic-inject", f"kill:rank={rank},step={KILLED_AT},at=forward"]
    run_job(run_dir, len(layout.ranks), flags, SCRIPT)
    return figures(run_dir, emulated, variant, layout, case)


def reason_of(output: str) -> str:
    """Why a job ended, by the last of the lines that say so."""
    lines = output.splitlines()
    return next((line for line in reversed(lines) if ": error: " in line or "OutOfMemory" in line), lines[-1])


def figures(
    run_dir: Path, profile: Profile, variant: Variant, layout: Layout, case: Case
) -> dict[str, Any]:
    """Of a job that has ended: its rate and energy when all that it did about the loss was done, and before it."""
    metrics, last = read_metrics(run_dir), max(line["epoch"] for line in read_metrics(run_dir).values())
    after = [step for step, line in metrics.items() if line["epoch"] == last and step > KILLED_AT][1:]
    before = undisturbed_steps(metrics)
    if len(after) < _FEWEST:
        raise JobFailed(f"{run_dir}: only {len(after)} whole steps in the last layout; give more --steps")
    reached = Layout.from_json((run_dir / "layouts" / f"{last}.json").read_text())
    step_ms = statistics.median(metrics[step]["step_ms"] for step in after)
    order = None if variant.dvfs is None else _searched(reached, _costs(profile, layout, variant), variant)
    expected = forecast(reached, profile, variant.schedule, clocks_of(run_dir, reached, profile), order)
    noted, scale = drawn(run_dir), profile.emulation.time_scale
    lost = min(event["time"] for event in read_events(run_dir) if event["kind"] == "injected")
    longest = max(metrics[step]["step_ms"] for step in metrics if step >= KILLED_AT)
    return {
        "tokens_per_s": round(rate(metrics, profile, after), 1),
        "tokens_per_s_since": round(rate_since(metrics, profile, noted, KILLED_AT), 1),
        "undisturbed_tokens_per_s": round(rate(metrics, profile, before), 1),
        "predicted_share": predicted_share(profile, variant, layout, case),
        "joules_per_token": round(joules(metrics, profile, noted, after), 5),
        "undisturbed_joules_per_token": round(joules(metrics, profile, noted, before), 5),
        "step_ms": round(step_ms, 1),
        "forecast_step_ms": round(expected.step_ms, 1),
        "forecast_error": round(expected.step_ms / step_ms - 1, 4),
        "late_ms": round(statistics.median(noted.late_ms[step] for step in after), 1),
        "ranks": len(reached.ranks),
        "widths": [stage.width for stage in reached.stages],
        "pause_s": round(max(longest - step_ms, 0.0) / 1e3 / scale, 2),
        "seconds_until": round((noted.ended[after[0] - 1] - lost) / scale, 2),
    }


def predicted_share(profile: Profile, variant: Variant, layout: Layout, case: Case) -> float:
    """What planners and simulation say of ``share_of_limit``, that of the base clock. Raises NoLayout."""
    costs, clocks, order = _costs(profile, layout, variant), None, None
    reached = foresee(EXECUTABLE[variant.policy], layout, case.ranks, costs, variant.schedule)
    if variant.dvfs is not None:
        order = _searched(reached, costs, variant)
        found = plan_clocks(reached, costs, variant.schedule, None if order is None else order.program).clocks
        clocks = {rank: clock for leader, clock in found.items() for rank in reached.cells[leader].ranks}
    undisturbed = forecast(layout, profile, variant.schedule).step_ms
    after = forecast(reached, profile, variant.schedule, clocks, order).step_ms
    return round(undisturbed / after / case.limit_share(layout), 4)


def _costs(profile: Profile, layout: Layout, variant: Variant) -> Costs:
    """As planners have them."""
    return replace(profile.costs(layout.units), clocking=None if variant.dvfs is None else Clocking(variant.dvfs))


def _searched(layout: Layout, costs: Costs, variant: Variant) -> Order | None:
    """The order that a job finds, if it looks for one: for clocks that it expects, which are planned for it then."""
    return search(layout, costs, None) if variant.schedule == SEARCH else None


def undisturbed_steps(metrics: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """The last two before it happens, or the one if the order of work has just changed."""
    epoch = metrics[KILLED_AT - 1]["epoch"]
    same = [step for step in range(2, KILLED_AT) if metrics[step]["epoch"] == epoch]
    return same[1:][-2:] or same


def usual_rate(variants: Sequence[Variant], cases: Sequence[Mapping[str, Mapping[str, Any]]]) -> float:
    """The median of what jobs did before anything happened, in all cases. All are alike until then, if no clocks are
    set; but where orders are searched, the usual one is there at first.
    """
    alike = [(each.schedule, found[each.name]["undisturbed_tokens_per_s"]) for found in cases for each in variants
             if not each.flags and "failed" not in found.get(each.name, {"failed": ""})]  # fmt: skip
    known = [rate for schedule, rate in alike if schedule != SEARCH] or [rate for _, rate in alike]
    return statistics.median(known) if known else 0.0


def joules(
    metrics: Mapping[int, Mapping[str, Any]], profile: Profile, noted: Noted, steps: Sequence[int]
) -> float:
    """Of a token."""
    return sum(noted.joules[step] for step in steps) / sum(_tokens(metrics, profile, step) for step in steps)


def clocks_of(run_dir: Path, layout: Layout, profile: Profile) -> dict[int, float]:
    """At which the ranks of a layout run: as planned for it, or as the profile says."""
    planned = [event for event in read_events(run_dir) if event["kind"] == "clocks" and event["epoch"] == layout.epoch]
    set_ = {int(leader): clock for leader, clock in planned[-1]["clocks"].items()} if planned else {}
    return profile.clocks() | {rank: clock for leader, clock in set_.items() for rank in layout.cells[leader].ranks}


def _tokens(metrics: Mapping[int, Mapping[str, Any]], profile: Profile, step: int) -> float:
    """The model's tokens in a step: a grain's for each grain that was really computed."""
    samples = metrics[step]["consumed_samples"] - metrics[step - 1]["consumed_samples"]
    return float(samples * profile.emulation.tokens / profile.emulation.samples)


def rate(metrics: Mapping[int, Mapping[str, Any]], profile: Profile, steps: Sequence[int]) -> float:
    """Tokens a second of the real devices. The median over steps: others use this machine, too."""
    scale = 1e3 * profile.emulation.time_scale
    rates = [_tokens(metrics, profile, step) * scale / metrics[step]["step_ms"] for step in steps]
    return float(statistics.median(rates))


def rate_since(
    metrics: Mapping[int, Mapping[str, Any]], profile: Profile, noted: Noted, first: int
) -> float:
    """Tokens a second of the real devices from the begin of a step to the end of the job, whatever it waited for."""
    steps = [step for step in metrics if step >= first]
    tokens = sum(_tokens(metrics, profile, step) for step in steps)
    return tokens * profile.emulation.time_scale / (noted.ended[max(steps)] - noted.ended[first - 1])


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
