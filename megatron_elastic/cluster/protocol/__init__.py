"""Protocol: the coordinator's decisions as one pure function, ``advance(job, event) -> (job, effects)``.

No clock, no I/O, no callbacks: what happens comes in as an event (``protocol.events``), what is to be done goes out as
effects (``protocol.effects``), and all that the coordinator knows in between is one immutable value (``protocol.job``).
"""

from megatron_elastic.cluster.protocol.advance import advance
from megatron_elastic.cluster.protocol.job import Job, Outcome, Settings

__all__ = ["Job", "Outcome", "Settings", "advance"]
