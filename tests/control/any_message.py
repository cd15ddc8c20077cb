"""All control messages as one type, for tests of what carries them."""

from __future__ import annotations

import msgspec

from megatron_elastic.cluster.messages import Answer, FromAgent, FromRank, Scale, ToAgent

AnyMessage = FromAgent | ToAgent | FromRank | Scale | Answer
any_message: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
