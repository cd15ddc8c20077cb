"""Benefit: what it is expected to bring that a job uses idle devices until somebody else needs them.

The idle window T is exponential with rate l, as arrivals are taken to be Poisson. The job runs at speed r (work a
second), would run at r' with the devices, and would then be done after H = remaining / r'. To grow costs ``lead``
seconds in which nothing changes, and a pause p; to shrink when the window ends costs a pause p, in which the newcomer
waits. With c = lead + p:

    E[min(T, H) - c | positive part] = (exp(-l c) - exp(-l H)) / l       for H > c, else 0
    gain = (r' - r) (that) - r p - (1 - exp(-l H)) p (r + n / g)

The last term has the newcomer's n devices idle for p seconds; a second of work is worth g device-seconds, g being the
devices that the job was submitted with. docs/fleet.md derives it.
"""

from __future__ import annotations

from math import exp, expm1

from megatron_elastic.fleet.observation import Overhead


def used_window(rate: float, overhead_s: float, horizon_s: float) -> float:
    """Expected seconds at the new speed: min(T, ``horizon_s``) - ``overhead_s`` where positive, T ~ Exp(``rate``)."""
    if horizon_s <= overhead_s:
        return 0.0
    beyond = horizon_s - overhead_s
    if rate * beyond < 1e-300:
        return beyond
    return -exp(-rate * overhead_s) * expm1(-rate * beyond) / rate  # without cancellation where the rate is small


def gain(
    speed: float, faster: float, remaining: float, rate: float, overhead: Overhead, newcomer: float, given: int
) -> float:
    """Expected work that is gained, in seconds of running as submitted, others' waiting taken off.

    ``remaining``: work left; ``rate``: of the end of the window, in 1/s; ``newcomer``: devices of who ends it, in the
    mean; ``given``: devices that the job was submitted with.
    """
    horizon = remaining / faster
    ended = -expm1(-rate * horizon)
    used = used_window(rate, overhead.lead_s + overhead.pause_s, horizon)
    return (faster - speed) * used - overhead.pause_s * (speed + ended * (speed + newcomer / given))
