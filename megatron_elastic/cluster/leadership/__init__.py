"""Leadership: who coordinates, when any node may be lost. One interface, ``Store``, and what can stand behind it."""

from megatron_elastic.cluster.leadership.choice import Choice, Place, make, parse
from megatron_elastic.cluster.leadership.door import reserve
from megatron_elastic.cluster.leadership.embedded import Member, seats
from megatron_elastic.cluster.leadership.store import Deposed, Durable, Leader, Store, StoreError

__all__ = [
    "Choice",
    "Deposed",
    "Durable",
    "Leader",
    "Member",
    "Place",
    "Store",
    "StoreError",
    "make",
    "parse",
    "reserve",
    "seats",
]
