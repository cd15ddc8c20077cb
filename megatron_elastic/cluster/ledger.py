"""Ledger: the committed steps of a job, one metrics line each, exactly once and in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_elastic.cluster.messages import VoteResult
from megatron_elastic.observe.records import RunRecords

_REMEMBERED = 64
"""Steps whose votes stay at hand. Ranks are at most one step apart; late reports of the dead are hardly older."""


class Diverged(Exception):
    """Two ranks reported different results for the same step."""


@dataclass(frozen=True, slots=True)
class _Entry:
    vote: VoteResult
    epoch: int
    world_size: int
    time: float


class Ledger:
    """Writes ``metrics.jsonl`` from whatever reports arrive, and knows the votes of the latest steps.

    A step that arrives before its predecessor waits for it, so the file has no gap and no step twice.
    """

    def __init__(self, records: RunRecords, *, start_step: int, total: int, started: float,
                 say: Callable[[str], None]) -> None:
        self.written = start_step
        """Number of the last step in the file."""
        self._records = records
        self._total = total
        self._previous_time = started
        self._say = say
        self._votes: dict[int, VoteResult] = {}
        self._pending: dict[int, _Entry] = {}

    def vote(self, step: int) -> VoteResult | None:
        """What the vote of ``step`` decided, if any rank ever told."""
        return self._votes.get(step)

    def note(self, vote: VoteResult) -> None:
        """Remember the vote of a step that is not committed yet. Raises Diverged if another was told before."""
        known = self._votes.setdefault(vote.step, vote)
        for name in ("loss", "grad_norm"):
            ours, theirs = getattr(known, name), getattr(vote, name)
            if ours.hex() != theirs.hex():
                raise Diverged(f"step {vote.step} was reported twice with different {name.replace('_', ' ')}: "
                               f"{ours!r} ({ours.hex()}) and {theirs!r} ({theirs.hex()})")
        for step in [s for s in self._votes if s <= self.written - _REMEMBERED]:
            del self._votes[step]

    def rewind(self, step: int) -> None:
        """Steps after ``step`` are done anew; their lines stay as they are."""
        self._votes = {s: vote for s, vote in self._votes.items() if s <= step}

    def commit(self, vote: VoteResult, *, epoch: int, world_size: int, time: float) -> None:
        """A rank finished the step of ``vote`` at ``time``; write its line unless it is there already."""
        if vote.step <= self.written - _REMEMBERED:
            return
        self.note(vote)
        if vote.step > self.written:
            self._pending.setdefault(vote.step, _Entry(vote, epoch, world_size, time))
        while (entry := self._pending.pop(self.written + 1, None)) is not None:
            self._write(entry)

    def _write(self, entry: _Entry) -> None:
        vote = entry.vote
        # Clocks of hosts differ a little, and a line filled in after a death has an estimated time.
        seconds = max(entry.time - self._previous_time, 1e-6)
        self._previous_time = max(entry.time, self._previous_time)
        self.written = vote.step
        self._records.metrics({
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
        })
        width = len(str(self._total))
        self._say(f"step {vote.step:{width + 2}d}/{self._total}  loss {vote.loss:.4f}  grad norm {vote.grad_norm:.3f}  "
                  f"{seconds * 1e3:.0f} ms  {entry.world_size} ranks")
