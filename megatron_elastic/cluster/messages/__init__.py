"""Messages: everything that ranks, agents and the coordinator say to each other, by direction.

Typed ``msgspec`` structs, encoded as MessagePack and framed by ``cluster.wire``; never pickle.
A message that speaks about a layout carries the layout's epoch.
"""

from megatron_elastic.cluster.messages.common import Kept, Message, Part, Stop, VoteResult
from megatron_elastic.cluster.messages.from_rank import (
    Built,
    Committed,
    Damage,
    Damaged,
    Event,
    Failed,
    Finished,
    FromRank,
    Hello,
    Injected,
    Profile,
    Progress,
    Reachable,
    Ready,
    Recovered,
    Report,
    Settled,
    SliceDigest,
    Suspect,
    Switched,
    Where,
)
from megatron_elastic.cluster.messages.node import (
    AgentHello,
    Fence,
    FromAgent,
    Heartbeat,
    Inspect,
    Inspected,
    Launch,
    Leaving,
    Members,
    Order,
    Paced,
    Past,
    RankClosed,
    RankDying,
    RankExited,
    RankNews,
    RankReading,
    RankResumed,
    RankStopped,
    Recall,
    Relay,
    Resigned,
    Running,
    Said,
    Seat,
    ToAgent,
    Welcome,
)
from megatron_elastic.cluster.messages.person import Answer, Drain, Scale
from megatron_elastic.cluster.messages.to_rank import (
    Addresses,
    Back,
    Decision,
    Enter,
    Forward,
    Interrupt,
    Invite,
    Moves,
    Plan,
    Reload,
    Resume,
    Start,
    ToRank,
)

__all__ = [
    "Addresses", "AgentHello", "Answer", "Back", "Built", "Committed", "Damage", "Damaged", "Decision", "Drain",
    "Enter", "Event", "Failed", "Fence", "Finished", "Forward", "FromAgent", "FromRank", "Heartbeat", "Hello",
    "Injected", "Inspect", "Inspected", "Interrupt", "Invite", "Kept", "Launch", "Leaving", "Members", "Message",
    "Moves", "Order", "Paced", "Part", "Past", "Plan", "Profile", "Progress", "RankClosed", "RankDying", "RankExited",
    "RankNews", "RankReading", "RankResumed", "RankStopped", "Reachable", "Ready", "Recall", "Recovered", "Relay",
    "Reload", "Report", "Resigned", "Resume", "Running", "Said", "Scale", "Seat", "Settled", "SliceDigest", "Start",
    "Stop", "Suspect", "Switched", "ToAgent", "ToRank", "VoteResult", "Welcome", "Where",
]  # fmt: skip
