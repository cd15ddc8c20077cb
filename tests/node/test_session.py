"""Tests of sessions: what cannot be sent is said, and leaves the session as it was."""

from __future__ import annotations

from megatron_elastic.cluster import wire
from megatron_elastic.cluster.coordination.session import Session
from megatron_elastic.cluster.messages import Failed, Stop


def test_a_message_that_is_no_unicode_is_told_and_takes_no_number() -> None:
    session = Session()
    sent: list[bytes] = []
    session.transmit = sent.append
    problem = session.send(Failed(rank=1, traceback="\udcff"))
    assert isinstance(problem, wire.Unsendable)
    assert "a Failed cannot be encoded" in str(problem)
    assert not sent
    session.resume(0, sent.append)
    assert not sent
    assert session.send(Stop(ok=True, reason="over")) is None
    assert len(sent) == 1
