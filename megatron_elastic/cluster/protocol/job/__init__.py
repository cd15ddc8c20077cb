"""All that the coordinator knows, as one immutable value (``Job``), and the tables of which it is made."""

from megatron_elastic.cluster.protocol.job.changes import Arrangement, Change, Ordering, Pace
from megatron_elastic.cluster.protocol.job.faults import Decided, Gathering, Recovery, Suspicion, Watch
from megatron_elastic.cluster.protocol.job.job import Job, Outcome
from megatron_elastic.cluster.protocol.job.members import Node, Raised, Rank
from megatron_elastic.cluster.protocol.job.settings import Settings
from megatron_elastic.cluster.protocol.job.steps import Entry, Ledger, Told, Trust
from megatron_elastic.cluster.protocol.job.tables import without

__all__ = [
    "Arrangement", "Change", "Decided", "Entry", "Gathering", "Job", "Ledger", "Node", "Ordering", "Outcome", "Pace",
    "Raised", "Rank", "Recovery", "Settings", "Suspicion", "Told", "Trust", "Watch", "without",
]  # fmt: skip
