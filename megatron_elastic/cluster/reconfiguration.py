"""Reconfiguration: from an interrupt to the layout that training goes on with, and to the step that commits again.

Everybody who trains is interrupted, reports what they have, and is sent one decision and one layout. Another fault at
any point begins it again under the next epoch, with all the reports anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from megatron_elastic.cluster.arrangement import Arrangement
from megatron_elastic.cluster.changes import Changes
from megatron_elastic.cluster.course import Course
from megatron_elastic.cluster.messages import Commit, Committed, Interrupt, Recovered, Report
from megatron_elastic.cluster.recovery import Decision, Part, Recovery, decide, newest_complete
from megatron_elastic.cluster.roster import Roster
from megatron_elastic.cluster.suspicion import Record, Suspicion
from megatron_elastic.cluster.timers import Timers
from megatron_elastic.cluster.trust import Trust
from megatron_elastic.config import ElasticConfig
from megatron_elastic.layout import Holdings, Layout
from megatron_elastic.plan import NoLayout, StateLost, lose, readable


class Reconfiguration:
    """Leads one recovery at a time.

    Args:
        course, roster, timers, suspicion, arrangement, changes, trust: the coordinator's.
        config: limits, and how replicas are kept.
        use: makes a layout the present one.
        fail: ends the job, with the reason.
        event: writes an event down.
        say: prints one line for people.
    """

    def __init__(
        self,
        course: Course,
        roster: Roster,
        timers: Timers,
        suspicion: Suspicion,
        arrangement: Arrangement,
        changes: Changes,
        trust: Trust,
        config: ElasticConfig,
        *,
        use: Callable[[Layout], None],
        fail: Callable[[str], None],
        event: Record,
        say: Callable[[str], None],
    ) -> None:
        self.collecting = False
        """Whether reports are awaited."""
        self._course = course
        self._ranks = roster
        self._timers = timers
        self._suspicion = suspicion
        self._arrangement = arrangement
        self._changes = changes
        self._trust = trust
        self._config = config
        self._use = use
        self._fail = fail
        self._event = event
        self._say = say
        self._recovery: Recovery | None = None
        self._reports: dict[int, Report] = {}
        self._injected: dict[int, float] = {}

    @property
    def idle(self) -> bool:
        """Whether nothing is being recovered from."""
        return not self.collecting and self._recovery is None

    def concerns(self, rank: int) -> bool:
        """Whether what happened to ``rank`` is being recovered from."""
        return self._recovery is not None and rank in self._recovery.causes

    # ---- faults ------------------------------------------------------------------------------

    def injected(self, rank: int, when: float) -> None:
        """A rank has announced its own end: faults count from there."""
        self._injected[rank] = when

    def interrupt(self, ranks: Collection[int], cause: str | None, when: float) -> None:
        """Begin the next epoch, because of what happened to ``ranks`` at ``when``; a ``cause`` of None comes later."""
        self._course.epoch = self._course.new_epoch()
        self._changes.overtaken()
        self._arrangement.disturbed()
        lost = [rank for rank, state in self._ranks.items() if state.lost]
        # First of all: everybody waits for this.
        self._ranks.send(Interrupt(epoch=self._course.epoch, lost=lost), self._ranks.alive)
        if self._recovery is not None and self._recovery.back_at is not None:
            self._close()
        if self._recovery is None:
            self._recovery = Recovery(noticed=time.time())
        self._recovery.epochs.append(self._course.epoch)
        self._recovery.exits.update(dict.fromkeys(ranks, when))
        self._recovery.causes.update(dict.fromkeys(ranks, cause))
        self.collecting = True
        self._reports.clear()
        self._timers.cancel("finish")
        for state in self._ranks.values():
            state.finished = None
        self._timers.set("report", self._config.report_timeout, self._reports_late)

    def name(self, ranks: Collection[int], cause: str) -> None:
        """What happened to ``ranks`` is known."""
        if self._recovery is not None and not self._recovery.causes.keys().isdisjoint(ranks):
            self._recovery.causes.update(dict.fromkeys(ranks, cause))
            self._close_if_named()

    # ---- reports -----------------------------------------------------------------------------

    def report(self, message: Report) -> None:
        """A rank tells what it has. Raises Diverged."""
        layout, ledger = self._course.layout, self._course.ledger
        if message.epoch != self._course.epoch or ledger is None or layout is None:
            return
        self._suspicion.reported(message.rank)
        self._reports[message.rank] = message
        if message.last is not None:
            # The dead rank may have been the one whose word about that step we waited for.
            ledger.commit(message.last, epoch=layout.epoch, world_size=len(layout.ranks), time=message.interrupted_at)
        if message.vote is not None:
            ledger.note(message.vote)
        self.decide_if_complete()

    def _reports_late(self) -> None:
        silent = [rank for rank in self._ranks.alive if rank not in self._reports]
        for rank in silent:
            self._suspicion.fence(rank, "fenced", f"it did not answer the interrupt of epoch {self._course.epoch} "
                                  f"within {self._config.report_timeout:g} s (--elastic-report-timeout)")

    def decide_if_complete(self) -> None:
        """Send the decision once everybody alive has reported."""
        # What a dead rank said before it died must be read first: it may have committed the step.
        unread = any(state.lost and state.wire is not None for state in self._ranks.values())
        if self.collecting and not unread and all(rank in self._reports for rank in self._ranks.alive):
            self._decide()

    # ---- decision ----------------------------------------------------------------------------

    def _decide(self) -> None:
        old = self._course.layout
        assert old is not None and self._recovery is not None
        reported = time.time()
        # Who has just been let in may not know it yet, and has no part in the step.
        reports = (self._reports.get(rank) for rank in old.ranks)
        working = [report for report in reports if report is not None and report.member]
        if not working:
            self._fail("every rank of the layout is dead; restart the job from its newest checkpoint")
            return
        try:
            decision, held, layout = self._plan(old, working)
        except NoLayout as error:
            self._fail(f"training cannot go on: {error}")
            return
        except ValueError as error:
            self._fail(f"the reports of epoch {self._course.epoch} contradict each other: {error}")
            return
        # Who has switched already may have dropped units that it is to have again.
        ahead = any(report.layout > old.epoch for report in working)
        self._recovery.gather |= (self._trust.healing or ahead or any(report.stale for report in working)
                                  or _units_move(old, layout))
        plan_ms = (time.time() - reported) * 1e3
        commit = Commit(epoch=self._course.epoch, layout=layout.to_json(), decision=decision.decision,
                        step=decision.step, vote=decision.vote, held=held, shapes=self._course.shapes,
                        gather=self._recovery.gather, saved=self._trust.newest_save)
        self._ranks.send(commit, self._ranks.alive)
        self.collecting = False
        self._trust.healed()
        self._timers.cancel("report")
        self._recovery.committed(decision, reported, plan_ms)
        self._use(layout)

    def _plan(
        self, old: Layout, working: Collection[Report]
    ) -> tuple[Decision, dict[int, list[Part]], Layout]:
        """How to go on, what each rank holds then, and the layout. Raises NoLayout, and ValueError for odd reports."""
        assert self._course.ledger is not None
        decision, held = self._with_state(self._decision(working))
        known = {*old.ranks, *old.spares, *old.lost}
        lost = [rank for rank, state in self._ranks.items() if state.lost and rank in known]
        if decision.decision != "reload":
            try:
                return decision, held, lose(old, lost, Holdings.reported(old, held), self._course.epoch)
            except StateLost as lost_state:
                decision = self._fall_back(decision, self._trust.undecided or str(lost_state))
        # Those who have not gone back yet have told of votes that are not cast any more.
        self._course.ledger.rewind(decision.step - 1)
        return decision, held, lose(old, lost, readable(old), self._course.epoch)

    def _decision(self, working: Collection[Report]) -> Decision:
        assert self._course.ledger is not None and self._recovery is not None
        begun = self._recovery.decision
        if begun is not None and begun.decision == "reload" and self._recovery.back_at is None:
            return begun  # some have gone back to the checkpoint and some have not
        return decide(working, self._course.ledger.vote)

    def _with_state(self, decision: Decision) -> tuple[Decision, dict[int, list[Part]]]:
        """A decision that the state which is left allows, if there is one, and what each rank holds then."""
        layout, ledger = self._course.layout, self._course.ledger
        assert layout is not None and ledger is not None and self._recovery is not None
        if self._config.replay == "state" and decision.decision != "reload":
            versions = {rank: {steps: self._trust.sound(rank, parts) for steps, parts in report.versions.items()}
                        for rank, report in self._reports.items()}
            possible, steps = newest_complete(decision, layout.parts, versions)
            if possible is not decision:
                self._event("behind", step=possible.step)
                ledger.rewind(steps)
                self._recovery.gather = True
            return possible, {rank: each.get(steps, []) for rank, each in versions.items()}
        # A spare follows the job no more: what it holds is outdated once a step was voted without it.
        done = decision.step if decision.decision == "forward" else decision.step - 1
        return decision, {rank: self._trust.sound(rank, report.held)
                          if rank in layout.ranks or report.step > done else []
                          for rank, report in self._reports.items()}

    def _fall_back(self, decision: Decision, reason: str) -> Decision:
        """Some state is gone for good: everybody goes back to the newest checkpoint. Raises NoLayout without one."""
        saved = self._trust.go_back()
        if saved is None:
            raise NoLayout(reason)
        done = decision.step if decision.decision == "forward" else decision.step - 1
        self._event("fallback", reason=reason, step=saved, lost_steps=list(range(saved + 1, done + 1)))
        self._say(f"WARNING: {reason}. Going back to the checkpoint of step {saved}: "
                  f"{done - saved} steps are done again")
        return Decision("reload", saved + 1, None)

    # ---- the way back ------------------------------------------------------------------------

    def recovered(self, message: Recovered) -> None:
        """A rank has made the new layout true."""
        if self._recovery is not None and message.epoch == self._course.epoch:
            self._recovery.recovered(message)

    def committed(self, message: Committed) -> None:
        """A step has committed: the recovery is over if that was the step it is about."""
        recovery = self._recovery
        if (recovery is not None and recovery.decision is not None and not self.collecting
                and message.epoch == self._course.epoch and message.vote.step >= recovery.decision.step):
            recovery.back_at = recovery.back_at or message.time
            self._close_if_named()

    def finished(self) -> None:
        """Everybody has finished: nothing was left to redo."""
        if self._recovery is not None:
            self._recovery.back_at = self._recovery.back_at or time.time()
            self._close()

    def _close_if_named(self) -> None:
        if self._recovery is not None and self._recovery.back_at is not None and self._recovery.named:
            self._close()

    def _close(self) -> None:
        recovery, self._recovery = self._recovery, None
        layout = self._course.layout
        assert recovery is not None and layout is not None
        fields = recovery.event(self._injected)
        self._event("recovered", **fields)
        what = "the loss of ranks" if set(recovery.exits) <= set(layout.lost) else "damage at ranks"
        self._say(f"recovered from {what} {fields['ranks']} in {fields['mttr_ms']:.0f} ms "
                  f"(step {fields['step']}, {fields['decision']}); {len(layout.ranks)} ranks train, "
                  f"{len(layout.spares)} spare")
        self._changes.consider()


def _units_move(old: Layout, new: Layout) -> bool:
    """Whether some rank is to compute units whose parameters it may not have."""
    return any(
        rank in old.ranks and not set(new.held_by(rank)) <= set(old.stages[old.stage_of(rank)].units)
        for rank in new.ranks
    )
