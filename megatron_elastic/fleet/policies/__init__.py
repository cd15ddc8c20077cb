"""Policies by name, each in a module of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_elastic.fleet.observation import Overhead, Policy
from megatron_elastic.fleet.policies.easyscale import easyscale
from megatron_elastic.fleet.policies.elastic import elastic
from megatron_elastic.fleet.policies.elasticflow import elasticflow
from megatron_elastic.fleet.policies.fifo import fifo
from megatron_elastic.fleet.policies.flextrain import flextrain_dp_pp, flextrain_pp
from megatron_elastic.fleet.policies.pollux import pollux
from megatron_elastic.fleet.policies.rubick import rubick
from megatron_elastic.fleet.policies.torchelastic import torchelastic

RESTART = Overhead(60.0)
"""Assumed of all that save a checkpoint and start again from it."""
LIVE = Overhead(0.1, 30.0)
"""Ours: the pause is measured (README.md); that new ranks take half a minute to start and to be filled is assumed."""

_RESTARTING: dict[str, Callable[[Overhead], Policy[Any]]] = {
    "torchelastic": torchelastic,
    "elasticflow": elasticflow,
    "pollux": pollux,
    "rubick": rubick,
    "easyscale": easyscale,
    "flextrain-pp": flextrain_pp,
    "flextrain-dp-pp": flextrain_dp_pp,
}
NAMES = ("fifo", *_RESTARTING, "elastic")


def policy(name: str, pause_s: float | None = None) -> Policy[Any]:
    """The policy of that name; ``pause_s`` replaces the pause of its overhead."""
    if name == "fifo":
        return fifo()
    if name == "elastic":
        return elastic(LIVE if pause_s is None else LIVE._replace(pause_s=pause_s))
    return _RESTARTING[name](RESTART if pause_s is None else Overhead(pause_s))
