"""Recovery: what a fault (and those that follow before a step commits) did to the job, and how long each part took."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from megatron_elastic.cluster.messages import Recovered, Report, VoteResult

Part = tuple[int, int, int]
"""(unit, slice, tensor-parallel index)"""


@dataclass(frozen=True, slots=True)
class Decision:
    """``forward``: everybody finishes ``step`` with ``vote``. ``back``: everybody redoes ``step``."""

    decision: str
    step: int
    vote: VoteResult | None


def decide(reports: Collection[Report], known_vote: Callable[[int], VoteResult | None]) -> Decision:
    """Say how the ranks of the interrupted layout go on, from their reports and the votes that the ledger knows.

    Raises ValueError if the reports contradict each other.
    """
    step = min(report.step for report in reports)
    ahead = [report.rank for report in reports if report.step > step + 1]
    if ahead:
        raise ValueError(f"ranks {ahead} report more than one step past step {step} of the slowest rank")
    vote = known_vote(step)
    for report in reports:
        for told in (report.vote, report.last):
            if vote is None and told is not None and told.step == step:
                vote = told
    if vote is None and any(report.step > step for report in reports):
        raise ValueError(f"a rank has committed step {step} but nobody reports its vote")
    return Decision("back" if vote is None else "forward", step, vote)


def newest_complete(
    decision: Decision, parts: Collection[Part], versions: Mapping[int, Mapping[int, Collection[Part]]]
) -> tuple[Decision, int]:
    """What to do where replicas may be behind their owners (``state.replay``), and after how many steps state is taken.

    ``decision`` is what would be done if no state were missing. Of its number of steps and of one less, the larger one
    counts after which each of ``parts`` is held by somebody. ``versions``: rank -> number of steps -> what it has.
    """
    done = decision.step if decision.decision == "forward" else decision.step - 1
    for steps in (done, done - 1):
        if set(parts) <= {part for each in versions.values() for part in each.get(steps, ())}:
            return (decision if steps == done else Decision("back", steps + 1, None)), steps
    return decision, done


def cause_of(returncode: int) -> str:
    """Name what ended a process: ``kill -9``, ``SIGSEGV``, ``exit code 1`` and so on."""
    if returncode >= 0:
        return f"exit code {returncode}"
    if returncode == -signal.SIGKILL:
        return "kill -9"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


@dataclass(slots=True)
class Recovery:
    """From the first fault until a step commits again. Times are ``time.time()`` seconds."""

    noticed: float
    """When the coordinator learnt of the first loss."""
    exits: dict[int, float] = field(default_factory=dict)
    """Time at which each lost rank was seen to end."""
    causes: dict[int, str | None] = field(default_factory=dict)
    """What ended each, in the order of the losses; None while that is not known."""
    back_at: float | None = None
    """When a step committed again."""
    epochs: list[int] = field(default_factory=list)
    decision: Decision | None = None
    gather: bool = False
    """Whether parameters have to be sent to everybody again."""
    reported: float = 0.0
    plan_ms: float = 0.0
    edit_ms: float = 0.0
    state_ms: float = 0.0

    def committed(self, decision: Decision, reported: float, plan_ms: float) -> None:
        """The newest epoch's layout was sent to the ranks."""
        self.decision, self.reported = decision, reported
        self.plan_ms += plan_ms
        self.edit_ms = self.state_ms = 0.0

    def recovered(self, message: Recovered) -> None:
        """A rank made the newest layout true; the slowest one counts."""
        self.edit_ms = max(self.edit_ms, message.edit_ms)
        self.state_ms = max(self.state_ms, message.state_ms)

    @property
    def named(self) -> bool:
        """Whether it is known what ended every lost rank."""
        return None not in self.causes.values()

    def event(self, injected: Mapping[int, float]) -> dict[str, object]:
        """Fields of the ``recovered`` event, once a step has committed again.

        ``injected`` has the time at which a rank announced its own end; other faults count from the exit.
        """
        assert self.decision is not None and self.back_at is not None
        fault = min(min(injected.get(rank, time), time) for rank, time in self.exits.items())
        parts = {
            "detect_ms": (self.noticed - fault) * 1e3,
            "interrupt_ms": (self.reported - self.noticed) * 1e3,
            "plan_ms": self.plan_ms,
            "edit_ms": self.edit_ms,
            "state_ms": self.state_ms,
        }
        total = (self.back_at - fault) * 1e3
        parts["redo_ms"] = max(total - sum(parts.values()), 0.0)
        return {
            "cause": next(iter(self.causes.values())) or "killed",
            "ranks": sorted(self.exits),
            "step": self.decision.step,
            "decision": self.decision.decision,
            **{name: round(value, 3) for name, value in parts.items()},
            "mttr_ms": round(total, 3),
            "epochs": list(self.epochs),
        }
