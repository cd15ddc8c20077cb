"""Telling: events, times and sizes in words, for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from megatron_elastic.layout.lookup import spans

Event = Mapping[str, Any]


def tell(event: Event) -> str:
    """One line about an event, without its time and kind. Of one that is not as it should be: what there is of it."""
    known = _TOLD.get(event["kind"])
    if known is not None:
        with suppress(LookupError, TypeError, ValueError, AttributeError):
            return known(event)
    fields = ((name, value) for name, value in event.items() if name not in ("time", "kind", "epoch"))
    return ", ".join(f"{name.replace('_', ' ')} {_shown(value)}" for name, value in fields)


def level_of(kind: str) -> str:
    """How much a kind of event matters: ``debug``, ``info``, ``warning`` or ``error``."""
    return next((level for level, kinds in _LEVELS.items() if kind in kinds), "info")


def ranks(numbers: Iterable[int]) -> str:
    """``rank 3``, ``ranks 3, 5-8``, or ``nobody``."""
    numbers = sorted(numbers)
    told = ", ".join(spans(numbers))
    return "nobody" if not numbers else f"rank{'s' if len(numbers) > 1 else ''} {told}"


def duration(seconds: float) -> str:
    """``45 ms``, ``3.5 s``, ``45 s``, ``3.5 min``, ``2.1 h`` or ``1.2 d``."""
    for name, size in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.1f} {name}"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def size(number: float) -> str:
    """``512 B``, ``1.5 kB``, ``45 MB``, ``2.0 GB`` or ``1.2 TB``."""
    for name, unit in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= unit:
            return f"{number / unit:.1f} {name}" if number < 10 * unit else f"{number / unit:.0f} {name}"
    return f"{number:.0f} B"


def utilisation(flops: float, mfu: float | None, devices: Iterable[str]) -> str:
    """``412.3 TFLOP/s a device (MFU 41.7 % of NVIDIA H100 80GB HBM3 in bf16)``.

    Args:
        flops: of the model, a second and device.
        mfu: from 0 to 1; None if it is not known.
        devices: by their names.
    """
    names = ", ".join(sorted(devices))
    why_not = f"the peak of {names} is not known" if "," not in names else "devices differ"
    share = f"no MFU: {why_not}" if mfu is None else f"MFU {100 * mfu:.1f} % of {names} in bf16"
    rate = f"{flops / 1e12:,.1f} TFLOP/s" if flops >= 1e11 else f"{flops / 1e9:,.3g} GFLOP/s"
    return f"{rate} a device ({share})"


QUIET = ("hello", "traffic", "copying", "progress", "replicated", "led", "waited", "loss_scale")
"""Kinds of events that say little to whoever looks at a job."""
_LEVELS = {
    "debug": QUIET,
    "warning": (
        "refused_message", "suspected", "hang", "standstill", "slow", "evicted", "tangle", "waits", "fault", "fenced",
        "damaged", "fallback", "restarted", "left_out", "device_out", "refused", "save_failed", "save_late", "skipped",
        "unrecorded", "not_evaluated", "unlike", "untried",
    ),
    "error": ("error", "diverged", "failed"),
}  # fmt: skip


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    if isinstance(value, list):
        return ",".join(map(_shown, value)) or "none"
    if isinstance(value, dict):
        return ",".join(f"{name}: {_shown(each)}" for name, each in value.items()) or "none"
    return str(value).partition("\n")[0]


_WAYS = {
    "forward": "the step was finished", "resume": "what was missing of the step was done",
    "back": "the step was done again", "reload": "back to a checkpoint",
}  # fmt: skip


def _recovered(event: Event) -> str:
    lost = f"loss of {ranks(event['ranks'])} " if event["ranks"] else ""
    return (f"from {lost}({event['cause']}) in {duration(event['mttr_ms'] / 1e3)}: "
            f"{_WAYS.get(event['decision'], event['decision'])}, step {event['step']}")  # fmt: skip


def _switched(event: Event) -> str:
    text = f"a planned layout from step {event['step']} on, {event['world_size']} ranks train"
    if event["entered"]:
        text += f"; {ranks(event['entered'])} came in"
    if event["shadows"]:
        text += f"; following for now: {ranks(event['shadows'])}"
    if event.get("ordered"):
        text += "; work is done in the order that was found"
    return text


def _ordered(event: Event) -> str:
    if "through" in event:
        return (f"chunks of layers on stages {' '.join(map(str, event['through']))} in turn, whose passes take "
                f"{event['placed_ms']:.1f} ms instead of {event['ms']:.1f}")  # fmt: skip
    if event["ms"] >= event["present_ms"]:
        return f"no better order of work than the present one ({event['present_ms']:.1f} ms of passes)"
    return (f"an order of work ({event['name']}) whose passes take {event['ms']:.1f} ms instead of "
            f"{event['present_ms']:.1f}")  # fmt: skip


def _considered(event: Event) -> str:
    ways = len(event["ways"])
    which = f"the best of {ways} ways" if ways > 1 else "the way"
    return f"{which} to go on is {event['chosen']}"


def _asked(event: Event) -> str:
    wanted = [f"{event[name]} {name}" for name in ("stages", "cells") if event.get(name) is not None]
    return f"somebody wants {' and '.join(wanted) or 'another shape'}"


def _clocks(clocks: dict[str, float]) -> str:
    if not clocks:
        return "all at the base clock"
    each = (f"{ranks([int(rank) for rank in clocks if clocks[rank] == clock])} at {clock:g}"
            for clock in sorted({*clocks.values()}))  # fmt: skip
    return "; ".join(each)


def _copying(event: Event) -> str:
    return f"{ranks(event['ranks'])}: {size(sum(event['done']))} of {size(sum(event['bytes']))} are there"


def _paced(event: Event) -> str:
    whom, times = f"{ranks(event['ranks'])} of stage {event['stage']}", event["times"]
    if times == 1:
        return f"{whom} as fast as the others again"
    return f"{whom}: {times:.1f} times as slow as the others" if times > 1 else (
        f"{whom}: {1 / times:.1f} times as fast as the others")  # fmt: skip


_CHORES = {"load": "loading a checkpoint", "save": "saving a checkpoint", "data": "preparing data sets"}


def _progress(event: Event) -> str:
    since, whole = duration(event["seconds"]), event["all_bytes"]
    what = _CHORES.get(event["what"], event["what"])
    if not event["busy"]:
        return f"{what}: done after {since}" + (f", {size(whole)}" if whole else "")
    far = f"{size(event['done_bytes'])} of {size(whole)}, " if whole else ""
    return f"{what}: {far}{since} so far ({event['busy']} rank{'s' if event['busy'] > 1 else ''})"


def _error(event: Event) -> str:
    return f"rank {event['rank']} raised {str(event['traceback']).strip().splitlines()[-1]}"


_TOLD: dict[str, Callable[[Event], str]] = {
    "started": lambda e: f"{e['world_size']} ranks, from step {e['step']} to {e['train_iters']}",
    "took_over": lambda e: f"another node coordinates (term {e['term']})",
    "fault": lambda e: f"rank {e['rank']}: {e['signal']}",
    "injected": lambda e: f"{e['spec']}",
    "recovered": _recovered,
    "switched": _switched,
    "ordered": _ordered,
    "considered": _considered,
    "spawned": lambda e: f"{ranks(e['ranks'])} started to join",
    "asked": _asked,
    "saved": lambda e: f"a checkpoint of step {e['step']} in {e['directory']}",
    "untried": lambda e: _shown(e["what"]),
    "not_evaluated": lambda e: f"there are no {e['data']} data, and no evaluation on them",
    "slow": _paced,
    "well": _paced,
    "copying": _copying,
    "progress": _progress,
    "clocks": lambda e: _clocks(e["clocks"]) + f": a step of {e['step_ms']:.0f} ms instead of {e['base_ms']:.0f}",
    "throttled": lambda e: "devices are held down: " + ", ".join(
        f"rank {rank} at {clock:g} of the base clock" for rank, clock in e["clocks"].items()),
    "clocks_refused": lambda e: f"node {e['node']}: {_shown(e['reason'])}",
    "device_out": lambda e: f"rank {e['rank']} had {e['device']}, which is out of use: {_shown(e['reason'])}",
    "unlike": lambda e: f"{ranks(e['ranks'])}: {e['computes_on']} instead of {e['instead_of']}",
    "error": _error,
    "finished": lambda e: _shown(e["reason"]),
    "failed": lambda e: _shown(e["reason"]),
}
