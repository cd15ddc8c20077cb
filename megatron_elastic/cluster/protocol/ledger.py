"""Ledger: the committed steps of a job, one metrics line each, exactly once and in order."""

from __future__ import annotations

from msgspec.structs import replace

from megatron_elastic.cluster.messages import UNSCALED, Recall, VoteResult
from megatron_elastic.cluster.protocol.effects import WriteMetrics
from megatron_elastic.cluster.protocol.job import Entry, Ledger, Told
from megatron_elastic.cluster.protocol.turn import Turn

_REMEMBERED = 64
"""Steps whose votes stay at hand. Ranks are at most one step apart; late reports of the dead are hardly older."""


class Diverged(Exception):
    """Two ranks of one layout reported different results for the same step."""


def finishing(turn: Turn, vote: VoteResult, epoch: int) -> None:
    """The layout of ``epoch`` finishes the step of ``vote``: whoever tells of it there must tell the same."""
    known = _of(turn).votes.get(vote.step)
    _remember(turn, Told(vote, epoch, epoch if known is None else known.cast))


def note(turn: Turn, vote: VoteResult, epoch: int) -> None:
    """Remember a vote that a rank of the layout of ``epoch`` tells; of a step that was done again, the newer one.

    Raises Diverged if another rank of that layout has told another. (A step that is done again may have another result
    with ``fast`` sums, and when what it was computed with turned out to be damaged.)
    """
    known = _of(turn).votes.get(vote.step)
    if known is None:
        _remember(turn, Told(vote, epoch, epoch))
    elif (name := _differing(known.vote, vote)) is None:
        # Who has switched to a later layout since tells of it from there, perhaps before the others do.
        _remember(turn, Told(known.vote, max(known.epoch, epoch), min(known.cast, epoch)))
    elif known.epoch < epoch:
        _remember(turn, Told(vote, epoch, epoch))
    elif known.epoch == epoch:
        ours, theirs = getattr(known.vote, name), getattr(vote, name)
        raise Diverged(f"step {vote.step} was reported twice with different {name.replace('_', ' ')}: "
                       f"{ours!r} ({ours.hex()}) and {theirs!r} ({theirs.hex()})")


def _differing(one: VoteResult, other: VoteResult) -> str | None:
    """What two results of a step differ in, bit for bit, if in anything."""
    for name in ("loss", "grad_norm"):
        if getattr(one, name).hex() != getattr(other, name).hex():
            return name
    return None


def commit(turn: Turn, vote: VoteResult, epoch: int, world_size: int, time: float) -> None:
    """A rank finished the step of ``vote`` at ``time``; write its line unless it was. A step that is told before its
    predecessor waits for it, and its predecessor is asked for when it does not come. Raises Diverged.
    """
    if vote.step <= _of(turn).written - _REMEMBERED:
        return
    note(turn, vote, epoch)
    ledger = _of(turn)
    if vote.step <= ledger.written or vote.step in ledger.pending:
        return
    turn.set(ledger=replace(ledger, pending=ledger.pending.set(vote.step, Entry(vote, epoch, world_size, time))))
    while (entry := _of(turn).pending.get(_of(turn).written + 1)) is not None:
        _write(turn, entry)
    if not _of(turn).pending:
        turn.cancel_timer("steps")
    elif "steps" not in turn.job.timers:
        turn.set_timer("steps", turn.job.settings.suspect_timeout)


def late(turn: Turn) -> None:
    """A step is missing whose successor is here: whoever kept it is to tell it again. Nobody does if it is lost."""
    ledger = _of(turn)
    if ledger.recalled == ledger.written:
        close(turn)
        return
    turn.set(ledger=replace(ledger, recalled=ledger.written))
    recall(turn)
    turn.set_timer("steps", turn.job.settings.suspect_timeout)


def close(turn: Turn) -> None:
    """Write what is here without what is missing: who coordinated before had not written it, and is lost with all who
    kept it.
    """
    while pending := _of(turn).pending:
        ledger, first = _of(turn), min(pending)
        if first > ledger.written + 1:
            lost = list(range(ledger.written + 1, first))
            turn.record("unrecorded", steps=lost)
            turn.say(f"WARNING: steps {lost[0]} to {lost[-1]} were done, and their losses are lost with the nodes that "
                     "knew them", "unrecorded")
            turn.set(ledger=replace(ledger, written=first - 1))
        _write(turn, pending[first])
    turn.cancel_timer("steps")


def recall(turn: Turn) -> None:
    """All agents are to tell again what they keep of the steps that are not on record."""
    for node in turn.job.nodes:
        turn.tell(node, Recall(after=_of(turn).written))


def _write(turn: Turn, entry: Entry) -> None:
    ledger, vote = _of(turn), entry.vote
    # Clocks of hosts differ a little, are set at times, and a line filled in after a death has an estimated time.
    seconds = entry.time - ledger.previous_time
    if seconds <= 0:
        seconds = ledger.previous_seconds
    votes = ledger.votes
    if (old := vote.step - _REMEMBERED) in votes:
        votes = votes.delete(old)
    turn.set(ledger=replace(
        ledger, written=vote.step, previous_time=entry.time, previous_seconds=seconds, votes=votes,
        pending=ledger.pending.delete(vote.step),
    ))  # fmt: skip
    turn.do(WriteMetrics({
        "step": vote.step,
        "loss": vote.loss,
        "loss_hex": vote.loss.hex(),
        "grad_norm": vote.grad_norm,
        "grad_norm_hex": vote.grad_norm.hex(),
        "lr": vote.lr,
        "consumed_samples": vote.consumed_samples,
        "step_ms": round(seconds * 1e3, 3),
        "epoch": entry.epoch,
        "world_size": entry.world_size,
        "tokens_per_s": round(vote.tokens / seconds, 1),
    }))
    before = ledger.votes.get(vote.step - 1)
    if vote.scaling.scale != (UNSCALED if before is None else before.vote.scaling).scale:
        turn.record("loss_scale", step=vote.step, scale=vote.scaling.scale)
    if vote.skipped:
        turn.record("skipped", step=vote.step)
    width = len(str(ledger.total))
    turn.say(f"step {vote.step:{width + 2}d}/{ledger.total}  loss {vote.loss:.4f}  grad norm {vote.grad_norm:.3f}  "
             f"{seconds * 1e3:.0f} ms  {entry.world_size} ranks"
             + ("  skipped" if vote.skipped else ""), "step")


def _remember(turn: Turn, told: Told) -> None:
    ledger = _of(turn)
    turn.set(ledger=replace(ledger, votes=ledger.votes.set(told.vote.step, told)))


def _of(turn: Turn) -> Ledger:
    assert turn.job.ledger is not None
    return turn.job.ledger
