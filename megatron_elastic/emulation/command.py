"""Command: ``megatron-elastic emulate``. Computes the profile of a model on an accelerator."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from math import inf

from megatron_elastic import usage
from megatron_elastic.config import UsageError
from megatron_elastic.emulation.accelerators import ACCELERATORS
from megatron_elastic.emulation.derive import Batch, Grid, derive, layout_of
from megatron_elastic.emulation.forecast import forecast
from megatron_elastic.emulation.models import MODELS
from megatron_elastic.emulation.profile import Profile
from megatron_elastic.layout import LayoutError
from megatron_elastic.plan.costs.cost import ProfileError
from megatron_elastic.plan.costs.fit import overflow

_DESCRIPTION = """\
Compute the profile of a published model on an accelerator, for --elastic-emulate and --elastic-profile: from the
model's shape, the accelerator's stated figures, and the share of its operations that it is assumed to do.
docs/emulation.md says how, and what is published and what assumed."""
_EXAMPLES = """\
examples:
  megatron-elastic emulate --model llama2-13b --device a100 \\
      --layout tp1,pp4,dp4 > profile.json
  megatron-elastic emulate --model llama2-34b --device h100 \\
      --layout tp2,pp6,dp8 --grains 128 --step-seconds 10"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the profile, and what it is of to stderr; 2 for what cannot be."""
    options = make_parser().parse_args(argv)
    try:
        profile = make(options)
    except UsageError as error:
        print(f"megatron-elastic emulate: error: {error}", file=sys.stderr)
        return 2
    print(profile.text, end="")
    layout = layout_of(MODELS[options.model], options.layout, batch_of(options))
    step, scale = forecast(layout, profile, "1f1b"), profile.emulation.time_scale
    tokens = profile.emulation.tokens * layout.num_grains
    print(
        f"{options.model} on {options.layout.ranks} {options.device}: a step of {tokens} tokens takes "
        f"{step.step_ms / scale / 1e3:.3g} s, {step.step_ms / 1e3:.3g} s emulated; {step.joules / tokens:.3g} J a "
        "token",
        file=sys.stderr,
    )
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The flags of ``megatron-elastic emulate``; ``layout`` is a Grid."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic emulate", description=_DESCRIPTION, epilog=_EXAMPLES,
        formatter_class=usage.Formatter,
    )  # fmt: skip
    parser.add_argument("--model", choices=tuple(MODELS), required=True, metavar="NAME", help="%(choices)s")
    add_flags(parser)
    return parser


def add_flags(parser: argparse.ArgumentParser) -> None:
    """All but ``--model``."""
    parser.add_argument("--device", choices=tuple(ACCELERATORS), default="a100", help="default: %(default)s")
    parser.add_argument("--layout", type=grid, default="tp1,pp4,dp4", metavar="tpT,ppP,dpD[,cpC][,epE]",
                        help="parallel sizes; D cells a stage (default: %(default)s)")
    parser.add_argument("--grains", type=usage.count, metavar="N",
                        help="micro-batches of a step (default: 8 for each cell of a stage)")
    parser.add_argument("--samples", type=usage.count, default=1, metavar="N",
                        help="of a micro-batch on a rank (default: %(default)s)")
    parser.add_argument("--replicas", type=usage.count, default=1, metavar="N",
                        help="of optimizer state, as with --elastic-replicas (default: %(default)s)")
    parser.add_argument("--seq-length", type=usage.count, metavar="N", help="default: what the model was trained with")
    parser.add_argument("--efficiency", type=float, default=0.5, metavar="X",
                        help="share of its stated operations that a device does (default: %(default)s)")
    parser.add_argument("--ranks-per-host", type=usage.count, metavar="N", help="default: the device's")
    parser.add_argument("--noise", type=float, default=0.0, metavar="X",
                        help="standard deviation of what an operation takes, as a share (default: %(default)s)")
    scale = parser.add_mutually_exclusive_group()
    scale.add_argument("--step-seconds", type=float, default=2.0, metavar="S",
                       help="scale time so that an undisturbed step takes so long (default: %(default)s)")
    scale.add_argument("--time-scale", type=float, metavar="X", help="emulated seconds for each real one")


def make(options: argparse.Namespace) -> Profile:
    """The profile that the flags ask for. Raises UsageError."""
    if not 0 < options.efficiency <= 1:
        raise UsageError(f"--efficiency must be above 0 and at most 1, got {options.efficiency:g}")
    if not 0 <= options.noise < 1:
        raise UsageError(f"--noise must be at least 0 and below 1, got {options.noise:g}")
    for name in ("step_seconds", "time_scale"):
        if (value := getattr(options, name)) is not None and not 0 < value < inf:
            raise UsageError(f"--{name.replace('_', '-')} must be above 0 and finite, got {value:g}")
    shape, size, batch = MODELS[options.model], options.layout, batch_of(options)
    if not shape.experts and size.ep > 1:
        raise UsageError(f"--layout with ep{size.ep}: {options.model} has no experts")
    if size.pp > shape.layers:
        raise UsageError(f"--layout with pp{size.pp}: {options.model} has {shape.layers} layers")
    for name, parts, whole, what in (("tp", size.tp, shape.heads, "heads"), ("ep", size.ep, shape.experts, "experts"),
                                     ("cp", size.cp, batch.sequence, "tokens in a sample")):
        if whole % parts:
            raise UsageError(f"--layout with {name}{parts}: {options.model} has {whole} {what}, which cannot be shared "
                             "out evenly")
    try:
        layout = layout_of(shape, size, batch)
        profile = derive(
            options.model, shape, options.device, ACCELERATORS[options.device], size, batch,
            efficiency=options.efficiency, time_scale=options.time_scale, step_seconds=options.step_seconds,
            ranks_per_host=options.ranks_per_host, noise=options.noise,
        )  # fmt: skip
        costs = profile.costs(layout.units)
    except LayoutError as error:
        raise UsageError(f"--layout: {error}") from None
    except ProfileError as error:
        raise UsageError(f"{options.model} on {options.device}: {error}") from None
    problem = overflow(layout, layout.ranks, costs)
    if problem is not None:
        raise UsageError(f"{options.model} on {options.device}: {problem}")
    return profile


def batch_of(options: argparse.Namespace) -> Batch:
    """What a step computes."""
    sequence = options.seq_length or MODELS[options.model].sequence
    return Batch(options.samples, sequence, options.grains or 8 * options.layout.dp, options.replicas)


def grid(text: str) -> Grid:
    """Parallel sizes, as in ``tp1,pp4,dp4``."""
    found = dict(re.findall(r"(tp|pp|dp|cp|ep)([1-9]\d*)(?:,|$)", text))
    if ",".join(f"{name}{size}" for name, size in found.items()) != text or not {"tp", "pp", "dp"} <= set(found):
        raise argparse.ArgumentTypeError(f"{text} is not like tp1,pp4,dp4 (and cp2, ep2)")
    return Grid(**{name: int(size) for name, size in found.items()})
