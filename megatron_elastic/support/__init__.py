"""Support: which of Megatron-LM's flags work with ``--elastic``, and what to do about the others.

One table (``refusals``), which the launcher reads before any process starts, every rank after Megatron's own parser has
filled in the defaults, and ``docs/megatron.md`` shows; and what flags must fulfil together. Nothing here imports torch
or Megatron.
"""

from megatron_elastic.support.batches import (
    check_at_least,
    check_batch,
    check_faults,
    check_length,
    check_ramp,
    check_rates,
    check_schedule,
    check_trace,
)
from megatron_elastic.support.model import (
    check_cells,
    check_documents,
    check_engine,
    check_expert_parallel,
    check_grouped,
    check_norms,
    check_split,
    check_whole,
    engine_installed,
)
from megatron_elastic.support.places import check_data, check_uncut
from megatron_elastic.support.refusals import (
    REFUSALS,
    WITHOUT_EFFECT,
    Refusal,
    check_arguments,
    check_namespace,
    not_named,
)

__all__ = [
    "REFUSALS",
    "WITHOUT_EFFECT",
    "Refusal",
    "check_arguments",
    "check_at_least",
    "check_batch",
    "check_cells",
    "check_data",
    "check_documents",
    "check_engine",
    "check_expert_parallel",
    "check_faults",
    "check_grouped",
    "check_length",
    "check_namespace",
    "check_norms",
    "check_ramp",
    "check_rates",
    "check_schedule",
    "check_split",
    "check_trace",
    "check_uncut",
    "check_whole",
    "engine_installed",
    "not_named",
]
