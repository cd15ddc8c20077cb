"""Recovery: from an interrupt to the layout that training goes on with, and to the step that commits again.

Everybody who trains is interrupted, reports what they have, and is sent one decision with one layout. Another fault at
any point begins it again under the next epoch, with all the reports anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from immutables import Map
from msgspec.structs import replace

from megatron_elastic.cluster.messages import (
    Back,
    Committed,
    Damaged,
    Forward,
    Interrupt,
    Recovered,
    Reload,
    Report,
    Resume,
)
from megatron_elastic.cluster.protocol import ledger, salvage
from megatron_elastic.cluster.protocol.adoption import use
from megatron_elastic.cluster.protocol.changes import change, ordering
from megatron_elastic.cluster.protocol.events import Sent
from megatron_elastic.cluster.protocol.faults import damage, suspicion
from megatron_elastic.cluster.protocol.faults.decision import decide, newest_complete, reloading, units_move, working
from megatron_elastic.cluster.protocol.job import Decided, Job, Recovery, without
from megatron_elastic.cluster.protocol.moves import send_moves
from megatron_elastic.cluster.protocol.turn import Turn
from megatron_elastic.layout import Holdings, Layout, SlicePart, encode, transfers
from megatron_elastic.plan import NoLayout, StateLost, at_home, everything, readable
from megatron_elastic.plan.errors import ADVICE, without_advice
from megatron_elastic.plan.work.order import foreseen

LOST, STUCK = "message lost", "device collective"
"""Causes for which nobody has to go."""
Held = Mapping[int, Collection[SlicePart] | None]
"""What each rank has; None: just what the newest layout asks for."""


def concerns(job: Job, rank: int) -> bool:
    """Whether what happened to ``rank`` is being recovered from."""
    return job.recovery is not None and any(rank == each for each, _ in job.recovery.causes)


def named(job: Job) -> bool:
    """Whether all is known that is being recovered from."""
    return job.recovery is None or all(cause is not None for _, cause in job.recovery.causes)


# ---- faults --------------------------------------------------------------------------------


def interrupt(turn: Turn, ranks: Collection[int], cause: str | None, when: float) -> None:
    """Begin the next epoch, because of what happened to ``ranks`` at ``when``; a ``cause`` of None comes later."""
    epoch = turn.new_epoch()
    turn.set(epoch=epoch, interrupted=epoch)
    change.overtaken(turn)
    alive, layout = turn.job.alive, turn.job.layout
    assert layout is not None
    # First of all: everybody waits for this.
    turn.send(Interrupt(epoch=epoch, layout=layout.epoch, lost=list(turn.job.lost)), alive)
    if turn.job.recovery is not None and turn.job.recovery.back_at is not None and named(turn.job):
        _close(turn)
    before = turn.job.recovery or Recovery(noticed=turn.now)
    if before.back_at is not None:
        # What killed who was recovered from is not known yet: both losses are told as one.
        before = Recovery(noticed=before.noticed, epochs=before.epochs, exits=before.exits, causes=before.causes)
    causes = dict(before.causes) | dict.fromkeys(ranks, cause)
    turn.set(
        recovery=replace(
            before, epochs=(*before.epochs, epoch), exits=before.exits.update(dict.fromkeys(ranks, when)),
            causes=tuple(causes.items()), collecting=True, reports=Map(), awaited=Map(dict.fromkeys(alive)),
        ),
        finished=Map(), unfinished=Map(),
    )  # fmt: skip
    turn.cancel_timer("finish")
    turn.set_timer("report", turn.job.settings.report_timeout)


def damaged(turn: Turn, message: Damaged) -> None:
    """Verification has found damage: it is healed from good copies, and the step is redone."""
    damage.noted(turn, message)
    if not turn.job.collecting:
        interrupt(turn, {each.rank for each in message.found}, "damaged memory", turn.now)


def name(turn: Turn, ranks: Collection[int], cause: str) -> None:
    """What happened to ``ranks`` is known."""
    recovery = turn.job.recovery
    if recovery is not None and any(rank in ranks for rank, _ in recovery.causes):
        causes = dict(recovery.causes) | dict.fromkeys(ranks, cause)
        turn.set(recovery=replace(recovery, causes=tuple(causes.items())))
        _close_if_over(turn)


# ---- reports -------------------------------------------------------------------------------


def reported(turn: Turn, message: Report, ranks: Collection[int]) -> None:
    """Ranks tell what they have. Raises Diverged."""
    job, recovery = turn.job, turn.job.recovery
    if message.epoch != job.epoch or recovery is None or not recovery.collecting or job.layout is None:
        return
    for rank in ranks:
        suspicion.reported(turn, rank)
    if message.damaged is not None:
        damage.noted(turn, message.damaged)
    damage.known(turn, message.saved)
    if message.last is not None:
        # The dead rank may have been the one whose word about that step we waited for.
        ledger.commit(turn, message.last, message.layout, len(job.layout.ranks), message.interrupted_at)
    if message.vote is not None:
        ledger.note(turn, message.vote, message.layout)
    awaited: Map[int, None] = without(recovery.awaited, ranks)
    reports = recovery.reports.update({rank: replace(message, rank=rank) for rank in ranks})
    turn.set(recovery=replace(recovery, reports=reports, awaited=awaited))
    decide_if_complete(turn)


def decide_if_complete(turn: Turn) -> None:
    """Decide once everybody alive has reported, and no later coordinator can begin this epoch again."""
    job, recovery = turn.job, turn.job.recovery
    if recovery is None or not recovery.collecting or recovery.awaited:
        return
    if job.recorded >= job.epoch:
        turn.cancel_timer("store")
        _decide(turn)
    elif "store" not in job.timers:
        turn.set_timer("store", job.settings.heartbeat_timeout)


def store_late(turn: Turn) -> None:
    """All have reported, and it is not certain that nobody else coordinates by now."""
    if turn.job.collecting and turn.job.recorded < turn.job.epoch:
        turn.say("WARNING: training waits for the store that says who coordinates (--elastic-store): too many of its "
                 "members are gone, or it cannot be reached")


def reports_late(turn: Turn) -> None:
    """Who has not reported in time is killed."""
    recovery, limit = turn.job.recovery, turn.job.settings.report_timeout
    assert recovery is not None
    for rank in sorted(recovery.awaited):
        suspicion.fence(turn, rank, "fenced", f"it did not answer the interrupt of epoch {turn.job.epoch} within "
                                              f"{limit:g} s (--elastic-report-timeout)")


# ---- decision ------------------------------------------------------------------------------


def _decide(turn: Turn) -> None:
    """Everybody alive has reported."""
    job, recovery = turn.job, turn.job.recovery
    assert job.layout is not None and recovery is not None
    old = job.layout
    at_work = working(job.since, recovery.reports.values())
    if not at_work:
        turn.end(False, f"every rank of the layout is dead: {ADVICE}")
        return
    try:
        decided, held, layout = _plan(turn, old, at_work)
    except NoLayout as error:
        turn.end(False, f"training cannot go on: {error}")
        return
    except ValueError as error:
        turn.end(False, f"the reports of epoch {job.epoch} contradict each other: {error}")
        return
    # Who has switched already may have dropped units that it is to have again.
    ahead = any(report.layout > old.epoch for report in at_work)
    # A coordinator that has taken over does not know what weights a layout moved that they have not made true.
    behind = recovery.decided is None and any(report.layout < old.epoch for report in at_work)
    decided = _resumed(turn, decided, layout)
    recovery, moves = turn.job.recovery, units_move(old, layout)
    assert recovery is not None
    gather = (recovery.gather or turn.job.trust.healing or ahead or behind or any(report.stale for report in at_work)
              or moves)
    turn.cancel_timer("report")
    turn.set(recovery=replace(recovery, gather=gather, decided=decided, collecting=False, reported=turn.now,
                              edit_ms=0.0, state_ms=0.0))
    if decided.vote is not None:
        ledger.finishing(turn, decided.vote, layout.epoch)
    layout = ordering.recovered(turn, layout, moves)
    _send(turn, decided, held, layout)
    use(turn, layout)


def _send(turn: Turn, decided: Decided, held: Held, layout: Layout) -> None:
    job = turn.job
    assert job.recovery is not None and job.layout is not None
    # After a reload all is there but copies that stages keep for each other.
    source = everything(layout) if decided.decision == "reload" else Holdings.reported(job.layout, held)
    send_moves(turn, transfers(layout, source), layout.epoch, _kept(job, held))
    common: dict[str, Any] = {"epoch": layout.epoch, "layout": encode(layout), "step": decided.step,
                              "shapes": dict(job.shapes), "saved": job.trust.newest_save,
                              "program": ordering.in_force(job, layout)}
    message: Forward | Back | Resume | Reload
    if decided.decision == "reload":
        message = Reload(**common)
    elif decided.vote is not None:
        message = Forward(vote=decided.vote, gather=job.recovery.gather, **common)
    elif decided.kept:
        message = Resume(gather=job.recovery.gather, kept=list(decided.kept), **common)
    else:
        message = Back(gather=job.recovery.gather, **common)
    turn.send(message, job.alive)


def _kept(job: Job, held: Held) -> dict[int, list[SlicePart]]:
    """Of ranks that must not count on all that they have reported: what they may count on."""
    assert job.recovery is not None and job.layout is not None
    asked = Holdings.of(job.layout)
    kept = {}
    for rank, report in job.recovery.reports.items():
        parts = held.get(rank, ())
        if parts is not None and set(parts) != set(asked.of_rank(rank) if report.held is None else report.held):
            kept[rank] = sorted(parts)
    return kept


def _plan(turn: Turn, old: Layout, at_work: Collection[Report]) -> tuple[Decided, Held, Layout]:
    """How to go on, what each rank holds then, and the layout. Raises NoLayout, and ValueError for odd reports."""
    job = turn.job
    decided, held = _with_state(turn, _first_choice(job, at_work), at_work)
    known = {*old.ranks, *old.spares, *old.lost}
    lost, costs = [rank for rank in job.lost if rank in known], job.costs
    if job.policy.restarts and job.trust.newest_save and decided.decision != "reload" and set(lost) - set(old.lost):
        decided = _fall_back(turn, decided, f"policy {job.policy.name} begins again from the newest checkpoint")
    if decided.decision != "reload":
        try:
            left = Holdings.reported(old, held)
            return decided, held, job.policy.lose(old, lost, left, job.epoch, costs, foreseen(job.settings.schedule))
        except StateLost as lost_state:
            decided = _fall_back(turn, decided, damage.undecided(job.trust) or str(lost_state))
    layout = job.policy.lose(old, lost, readable(old), job.epoch, costs, foreseen(job.settings.schedule))
    if not all(report.built for report in at_work) or len(job.shapes) < len(old.units):
        layout = at_home(layout)  # who is to keep slices of another stage's unit has to know what it is like
    return decided, held, layout


def _first_choice(job: Job, at_work: Collection[Report]) -> Decided:
    assert job.recovery is not None and job.ledger is not None
    begun = job.recovery.decided
    if begun is not None and begun.decision == "reload" and job.recovery.back_at is None:
        return begun  # some have gone back to the checkpoint and some have not
    if not all(report.built for report in at_work):
        # Training has not begun: all have, or make, what a checkpoint or the seed says.
        return Decided("reload", min(report.step for report in at_work))
    return reloading(at_work) or decide(at_work, job.ledger.votes)


def _with_state(turn: Turn, decided: Decided, at_work: Collection[Report]) -> tuple[Decided, Held]:
    """A decision that the state which is left allows, if there is one, and what each rank holds then."""
    job, recovery = turn.job, turn.job.recovery
    assert job.layout is not None and job.ledger is not None and recovery is not None
    if job.settings.replay == "state" and decided.decision != "reload":
        versions = {rank: {steps: damage.sound(job.trust, rank, parts) for steps, parts in report.versions.items()}
                    for rank, report in recovery.reports.items()}
        possible, steps = newest_complete(decided, job.layout.parts, versions)
        if possible is not decided:
            turn.record("behind", step=possible.step)
            turn.set(recovery=replace(recovery, gather=True))
        return possible, {rank: each.get(steps, []) for rank, each in versions.items()}
    # Others follow the job no more, or not yet: what they hold is outdated once a step was voted without them. Who was
    # to leave as the others finish that step, and has not heard of it, had a part in the vote.
    done = decided.step if decided.decision == "forward" else decided.step - 1
    voted = job.ledger.votes.get(done)
    asked, current = Holdings.of(job.layout), {report.rank for report in at_work}
    damaged = {rank for rank, _ in job.trust.damaged}
    held: dict[int, Collection[SlicePart] | None] = {}
    for rank, report in recovery.reports.items():
        had_part = report.member and report.step == done and voted is not None and voted.cast == report.layout
        if rank not in current and report.step <= done and not had_part:
            held[rank] = []
        elif rank in damaged:
            parts = asked.of_rank(rank) if report.held is None else report.held
            held[rank] = damage.sound(job.trust, rank, parts)
        else:
            held[rank] = report.held
    return decided, held


def _resumed(turn: Turn, decided: Decided, layout: Layout) -> Decided:
    """If a step is to be done again: what of it need not be, under ``layout``, and how much that is."""
    job, recovery = turn.job, turn.job.recovery
    assert job.layout is not None and recovery is not None
    if decided.decision != "back" or job.settings.redo != "lost":
        return decided
    begun = recovery.decided
    before = begun.kept if begun is not None and begun.step == decided.step else ()
    kept = salvage.kept(job.layout, layout, decided.step, recovery.reports, before, damage.wrong(job.trust, job.layout))
    something = tuple(each for each in kept if each.numbers)
    if not something:
        return decided
    told = (report.work for report in recovery.reports.values())
    grains = next(each.grains for each in told if each is not None and each.step == decided.step)
    return Decided("resume", decided.step, kept=something, counted=salvage.count(job.layout, kept, grains))


def _fall_back(turn: Turn, decided: Decided, reason: str) -> Decided:
    """Some state is gone for good: everybody goes back to the newest checkpoint. Raises NoLayout without one."""
    saved = turn.job.trust.newest_save
    if not saved:
        raise NoLayout(reason)
    done = decided.step if decided.decision == "forward" else decided.step - 1
    turn.record("fallback", reason=reason, step=saved, lost_steps=list(range(saved + 1, done + 1)))
    turn.say(f"WARNING: {without_advice(reason)}. Going back to the checkpoint of step {saved}: "
             f"{done - saved} steps are done again", "fallback")
    return Decided("reload", saved + 1)


def sent(turn: Turn, event: Sent) -> None:
    """The decision is on its way: planning it took until now."""
    recovery = turn.job.recovery
    if recovery is not None and event.epoch == turn.job.epoch:
        turn.set(recovery=replace(recovery, plan_ms=recovery.plan_ms + (event.now - recovery.reported) * 1e3))


# ---- the way back --------------------------------------------------------------------------


def recovered(turn: Turn, message: Recovered, ranks: Collection[int]) -> None:
    """Ranks have made the new layout true; the slowest one counts."""
    recovery = turn.job.recovery
    if message.epoch != turn.job.epoch:
        return
    damage.adopted(turn, ranks)
    if recovery is not None and not recovery.collecting:
        turn.set(recovery=replace(recovery, edit_ms=max(recovery.edit_ms, message.edit_ms),
                                  state_ms=max(recovery.state_ms, message.state_ms)))


def committed(turn: Turn, message: Committed) -> None:
    """A rank has finished a step: the recovery is over if that was the step it is about. Raises Diverged.

    A word of an older epoch may arrive late, from a rank that is dead by now: the step is committed all the same.
    """
    layout = turn.job.layout
    assert layout is not None
    ledger.commit(turn, message.vote, message.epoch, len(layout.ranks), message.time)
    recovery = turn.job.recovery
    if (recovery is not None and recovery.decided is not None and not recovery.collecting
            and message.epoch == turn.job.epoch and message.vote.step >= recovery.decided.step):
        if recovery.back_at is None:
            turn.set(recovery=replace(recovery, back_at=message.time))
            damage.healed(turn)
        _close_if_over(turn)


def over(turn: Turn) -> None:
    """Everybody has finished: nothing was left to redo."""
    recovery = turn.job.recovery
    if recovery is not None:
        turn.set(recovery=replace(recovery, back_at=turn.now if recovery.back_at is None else recovery.back_at))
        _close(turn)


def _close_if_over(turn: Turn) -> None:
    recovery = turn.job.recovery
    if recovery is not None and recovery.back_at is not None and named(turn.job):
        _close(turn)
        change.consider(turn)


def _close(turn: Turn) -> None:
    job, recovery = turn.job, turn.job.recovery
    assert recovery is not None and job.layout is not None
    turn.set(recovery=None, injected=without(job.injected, recovery.exits))
    fields = _event(recovery, job.injected)
    turn.record("recovered", **fields)
    what = "the loss of ranks" if set(_fallen(recovery)) <= set(job.lost) else "damage at ranks"
    turn.say(f"recovered from {what} {fields['ranks']} in {fields['mttr_ms']:.0f} ms "
             f"(step {fields['step']}, {fields['decision']}); {len(job.layout.ranks)} ranks train, "
             f"{len(job.layout.spares)} spare", "recovered")


def _fallen(recovery: Recovery) -> dict[int, str | None]:
    """Whose faults these were, and what. Who was only waited for most, was not it if somebody else is found then."""
    causes = dict(recovery.causes)
    return {rank: cause for rank, cause in causes.items() if cause not in (LOST, STUCK)} or causes


def _event(recovery: Recovery, injected: Mapping[int, float]) -> dict[str, object]:
    """Fields of the ``recovered`` event. Injected faults count from when a rank announced its own end, others from the
    exit.
    """
    assert recovery.decided is not None and recovery.back_at is not None
    faults = (min(injected.get(rank, time), time) for rank, time in recovery.exits.items())
    fault = min(faults, default=recovery.noticed)
    parts = {
        "detect_ms": (recovery.noticed - fault) * 1e3,
        "interrupt_ms": (recovery.reported - recovery.noticed) * 1e3,
        "plan_ms": recovery.plan_ms,
        "edit_ms": recovery.edit_ms,
        "state_ms": recovery.state_ms,
    }
    total, counted = (recovery.back_at - fault) * 1e3, recovery.decided.counted
    parts["redo_ms"] = max(total - sum(parts.values()), 0.0)
    return {
        "cause": next(iter(_fallen(recovery).values()), "coordinator lost"),
        "ranks": sorted(_fallen(recovery)),
        "step": recovery.decided.step,
        "decision": recovery.decided.decision,
        **{name: round(value, 3) for name, value in parts.items()},
        "mttr_ms": round(total, 3),
        "epochs": list(recovery.epochs),
        **({} if counted is None else {"kept_ops": counted.kept, "redone_ops": counted.redone}),
    }
