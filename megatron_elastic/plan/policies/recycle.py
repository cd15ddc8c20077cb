"""ReCycle (SOSP'24): a lost cell's grains go to the other cells of its stage, into their bubbles. Nothing moves."""

from __future__ import annotations

from megatron_elastic.plan.policies.policy import Policy


class Recycle(Policy):
    """Adaptive pipelining: whole micro-batches are re-routed to peers of the same stage.

    Backwards are split, so that weights' gradients fill what bubbles are left; the optimizer needs no staggering here,
    because stages do not wait for each other's updates. Where a stage has lost all its cells ReCycle restarts from a
    checkpoint; here its units go to the others, as ``plan.lose`` does it.
    """

    name = "recycle"
    idea = "micro-batches are re-routed within the stage, backwards split, no unit moves (ReCycle, SOSP'24)"
    schedule = "split"
