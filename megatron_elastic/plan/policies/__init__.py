"""Policies: what to make of a loss, as several systems do it, behind one interface and chosen by name.

All are made of the same parts: dataflow, graph, growth. ``docs/policies.md`` says what was taken from which paper.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_elastic.plan.policies.bamboo import Bamboo
from megatron_elastic.plan.policies.chameleon import Chameleon
from megatron_elastic.plan.policies.column import Column, ShrinkingColumn
from megatron_elastic.plan.policies.elastic import Elastic
from megatron_elastic.plan.policies.oobleck import MixedOobleck, Oobleck
from megatron_elastic.plan.policies.paused import Paused
from megatron_elastic.plan.policies.policy import Outcome, Policy
from megatron_elastic.plan.policies.recycle import Recycle
from megatron_elastic.plan.policies.resihp import Resihp
from megatron_elastic.plan.policies.restart import Restart
from megatron_elastic.plan.policies.varuna import Varuna

POLICIES: Mapping[str, Policy] = {
    policy.name: policy
    for policy in (
        Elastic(), Paused(), Recycle(), Column(), ShrinkingColumn(), Oobleck(), MixedOobleck(), Bamboo(), Varuna(),
        Restart(), Resihp(), Chameleon(),
    )
}  # fmt: skip
"""All there are, by their names."""

__all__ = ["POLICIES", "Outcome", "Policy"]
