"""Mutants: defects put back into the protocol or the ranks' decisions, to see that histories find them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from immutables import Map
from msgspec.structs import replace

from megatron_elastic.cluster.messages import Interrupt, Report
from megatron_elastic.cluster.node.relay import Post
from megatron_elastic.cluster.protocol import ledger, salvage
from megatron_elastic.cluster.protocol.changes import arrangement, change
from megatron_elastic.cluster.protocol.faults import damage, decision, loss, recovery, suspicion, takeover
from megatron_elastic.cluster.protocol.turn import Turn
from megatron_elastic.cluster.rank import standing
from megatron_elastic.plan import everything
from tests.simulation.shell.disk import Recorder

LIMIT = 20_000
"""Seeds after which a mutant counts as not found."""
FOUND = Path(__file__).parent / "found.json"
"""Mutants, and a seed each at which it is found."""

Patch = Any
MUTANTS: dict[str, Callable[[], list[Patch]]] = {}


def _mutant(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    MUTANTS[make.__name__.replace("_", "-")] = make
    return make


@contextmanager
def put_back(name: str) -> Iterator[None]:
    """The protocol with this defect."""
    with ExitStack() as stack:
        for each in MUTANTS[name]():
            stack.enter_context(each)
        yield


# ---- defects that there were ---------------------------------------------------------------------


@_mutant
def newcomers_death_is_forgotten() -> list[Patch]:
    """Ranks are told only of the dead that were in the layout: a newcomer that died as they switched is not."""
    real = Turn.send

    def send(turn: Turn, message: Any, ranks: Any) -> None:
        if isinstance(message, Interrupt) and turn.job.layout is not None:
            known = {*turn.job.layout.ranks, *turn.job.layout.spares, *turn.job.layout.lost}
            message = replace(message, lost=[rank for rank in message.lost if rank in known])
        real(turn, message, ranks)

    return [patch.object(Turn, "send", send)]


@_mutant
def healed_when_decided() -> list[Patch]:
    """Damage counts as healed when the decision is sent, and nobody tells of it again, as it once was."""
    real, report = recovery._send, standing.report

    def send(turn: Turn, *args: Any) -> None:
        real(turn, *args)
        damage.healed(turn)

    def tell(*args: Any, **kwargs: Any) -> Report:
        return replace(report(*args, **kwargs), damaged=None)

    return [patch.object(recovery, "_send", send), patch.object(standing, "report", tell)]


@_mutant
def both_ends_of_a_link_are_killed() -> list[Patch]:
    """Two ends of a bad link suspect each other, and neither is cleared."""
    return [patch.object(suspicion, "_cleared", lambda job, rank, accusers: False)]


@_mutant
def suspicions_of_the_epoch_before_are_dropped() -> list[Patch]:
    """A suspicion counts only in the present epoch."""
    real = loss.accused

    def accused(turn: Turn, message: Any) -> None:
        if message.epoch == turn.job.epoch:
            real(turn, message)

    return [patch.object(loss, "accused", accused)]


@_mutant
def lost_steps_are_not_recalled() -> list[Patch]:
    """A message about a committed step that is lost with its connection stops the ledger for good."""
    real = Turn.tell

    def tell(turn: Turn, node: int, message: Any) -> None:
        if type(message).__name__ != "Recall":
            real(turn, node, message)

    return [patch.object(Turn, "tell", tell)]


@_mutant
def stale_outlives_its_layout() -> list[Patch]:
    """A spare remembers that its weights were stale, and waits for itself when it enters."""
    real = standing.edited

    def edited(now: standing.Standing, *decided: Any) -> standing.Standing:
        after = real(now, *decided)
        return replace(after, stale=after.stale or now.stale or now.gathering)

    return [patch.object(standing, "edited", edited)]


@_mutant
def who_becomes_a_member_tells_of_an_old_step() -> list[Patch]:
    """Until its state is what was decided, its step is not either."""
    real = standing.edited

    def edited(now: standing.Standing, epoch: int, step: int, *decided: Any) -> standing.Standing:
        return real(now, epoch, now.step, *decided)

    return [patch.object(standing, "edited", edited)]


# ---- what would be easy to get wrong -----------------------------------------------------------------


@_mutant
def decides_before_all_have_reported() -> list[Patch]:
    """One report that is missing is not waited for."""
    real = recovery.reported

    def reported(turn: Turn, message: Any, ranks: Any) -> None:
        real(turn, message, ranks)
        now = turn.job.recovery
        if now is not None and now.collecting and len(now.awaited) == 1 and len(now.reports) > 1:
            turn.set(recovery=replace(now, awaited=Map()))
            recovery._decide(turn)

    return [patch.object(recovery, "reported", reported)]


@_mutant
def kept_is_ignored() -> list[Patch]:
    """Ranks count on all that they have reported, outdated or damaged."""
    return [patch.object(recovery, "_kept", lambda job, held: {})]


@_mutant
def who_is_entering_is_not_needed() -> list[Patch]:
    """The death of a newcomer is nobody's business until it has entered, though everybody may be switching already."""

    def unneeded(job: Any, rank: int) -> bool:
        return bool(job.ranks[rank].standby and rank not in job.layout.spares)

    return [patch.object(change, "unneeded", unneeded)]


@_mutant
def votes_are_forgotten() -> list[Patch]:
    """Only reports tell of votes: a step that only the dead were past, and told, is done again."""
    real = decision.decide
    return [patch.object(recovery, "decide", lambda reports, votes: real(reports, {}))]


@_mutant
def votes_count_for_ever() -> list[Patch]:
    """A vote of before a step was done again decides that the step is finished."""
    real = decision.decide

    def decide(reports: Any, votes: Any) -> Any:
        newest = max(report.layout for report in reports)
        return real(reports, {step: replace(told, epoch=newest) for step, told in votes.items()})

    return [patch.object(recovery, "decide", decide)]


@_mutant
def who_finishes_a_step_has_its_vote_only_then() -> list[Patch]:
    """If all are interrupted with new states and no vote, the step is done again from them."""
    real = standing.edited

    def edited(now: standing.Standing, *decided: Any) -> standing.Standing:
        return real(now, *decided[:6])

    return [patch.object(standing, "edited", edited)]


@_mutant
def weights_are_not_sent_again() -> list[Patch]:
    """Who was interrupted while weights were on their way does not say so."""
    real = standing.report

    def report(*args: Any) -> Any:
        return replace(real(*args), stale=False)

    return [patch.object(standing, "report", report)]


@_mutant
def a_spares_old_state_counts() -> list[Patch]:
    """What a spare holds counts although steps were voted without it."""

    def with_state(turn: Turn, decided: Any, at_work: Any) -> Any:
        now = turn.job.recovery
        assert now is not None
        return decided, {rank: report.held for rank, report in now.reports.items()}

    real = recovery._with_state

    def choose(turn: Turn, decided: Any, at_work: Any) -> Any:
        return (real if turn.job.settings.replay == "state" else with_state)(turn, decided, at_work)

    return [patch.object(recovery, "_with_state", choose)]


@_mutant
def late_reports_are_not_fenced() -> list[Patch]:
    """Who does not report is waited for without a limit."""
    return [patch.object(recovery, "reports_late", lambda turn: None)]


@_mutant
def the_planned_layout_survives_a_loss() -> list[Patch]:
    """A loss does not overtake what is planned."""
    return [patch.object(change, "overtaken", lambda turn: None)]


@_mutant
def steps_are_recorded_as_they_are_told() -> list[Patch]:
    """A step that is told before its predecessor is not held back."""
    real = ledger.commit

    def commit(turn: Turn, vote: Any, epoch: int, world_size: int, time: float) -> None:
        now = turn.job.ledger
        assert now is not None
        if vote.step > now.written + 1:
            turn.set(ledger=replace(now, written=vote.step - 1))
        real(turn, vote, epoch, world_size, time)

    return [patch.object(ledger, "commit", commit)]


@_mutant
def nodes_loss_names_only_its_first_rank() -> list[Patch]:
    """Of a node that is gone one rank is not taken for lost."""
    real = loss._lose

    def lose(turn: Turn, deaths: Any) -> None:
        real(turn, [each._replace(ranks=each.ranks[:1]) if each.cause in ("lost", "silent") else each
                    for each in deaths])

    return [patch.object(loss, "_lose", lose)]


@_mutant
def who_has_not_built_counts_as_holding_its_part() -> list[Patch]:
    """What a slice is to be can be derived: so all that the layout asks for is there, before anybody has built."""
    real = standing.report

    def report(now: standing.Standing, epoch: int, layout: Any, held: Any, *args: Any) -> Any:
        parts = sorted(everything(layout).of_rank(now.rank)) if held is None else held
        return real(now, epoch, layout, parts, *args)

    return [patch.object(standing, "report", report)]


@_mutant
def stages_keep_copies_for_each_other_at_once() -> list[Patch]:
    """Also those that are to keep them and do not know what the units are like."""
    return [patch.object(recovery, "at_home", lambda layout: layout)]


# ---- another coordinates -----------------------------------------------------------------------------


@_mutant
def decides_before_its_epoch_is_recorded() -> list[Patch]:
    """A coordinator that leads no more decides, and is obeyed."""
    real = recovery.decide_if_complete

    def decide_if_complete(turn: Turn) -> None:
        turn.set(recorded=turn.job.newest_epoch)
        real(turn)

    return [patch.object(recovery, "decide_if_complete", decide_if_complete)]


def _learns(**fields: Any) -> list[Patch]:
    """A new coordinator does not learn what agents know besides."""
    real = Post.past
    return [patch.object(Post, "past", lambda *args: replace(real(*args), **fields))]


@_mutant
def what_is_on_record_is_not_told_to_the_next() -> list[Patch]:
    """A new coordinator writes all steps down again that agents still have."""
    real = takeover.took_over
    return [*_learns(recorded=0), patch.object(takeover, "took_over",
                                               lambda turn, event: real(turn, replace(event, written=-1)))]


@_mutant
def what_is_not_on_record_is_not_told_to_the_next() -> list[Patch]:
    """Steps that the coordinator before could not write down any more are missing."""
    return _learns(committed=[])


@_mutant
def epochs_that_were_only_begun_are_not_told_to_the_next() -> list[Patch]:
    """A new coordinator interrupts ranks for an epoch for which they have been interrupted."""
    return _learns(epoch=0)


@_mutant
def ids_of_the_dead_are_given_again() -> list[Patch]:
    """A new coordinator does not hear of ranks that died before they were in a layout."""
    return _learns(newest=-1)


@_mutant
def shapes_are_not_told_to_the_next() -> list[Patch]:
    """A new coordinator does not know what units are like that only the lost have built."""
    return _learns(shapes={})


@_mutant
def checkpoints_are_not_told_to_the_next() -> list[Patch]:
    """Who takes over knows of no checkpoint until the next one."""
    return [patch.object(damage, "known", lambda turn, step: None)]


@_mutant
def nodes_that_came_share_a_host() -> list[Patch]:
    """Nodes that are in no layout yet are no failure domains of their own for a new coordinator."""
    real = takeover._hosts

    def hosts(turn: Turn, known: Any, layout: Any) -> Any:
        return {node: min(host, len(layout.hosts) - 1) for node, host in real(turn, known, layout).items()}

    return [patch.object(takeover, "_hosts", hosts)]


@_mutant
def who_stepped_down_goes_on_writing() -> list[Patch]:
    """What a coordinator could not write before it stepped down is written when another writes already."""
    return [patch.object(Recorder, "drop", lambda recorder: None)]


@_mutant
def who_was_cut_off_is_not_fenced() -> list[Patch]:
    """Ranks that were lost for the coordinator before come to the next one, and live on."""
    return [patch.object(takeover, "_send_away", lambda turn, layout: None)]


@_mutant
def what_was_asked_for_is_forgotten() -> list[Patch]:
    """Whoever takes over begins without what somebody has asked for."""
    return [patch.object(arrangement, "recall", lambda turn, told, layout: None)]


# ---- cells of another shape ----------------------------------------------------------------------------


@_mutant
def cells_have_another_shape_before_all_have_their_states() -> list[Patch]:
    """The first rank that has what it needs in new cells speaks for all."""
    real = change.recut

    def recut(turn: Turn, message: Any, ranks: Any) -> None:
        planned = turn.job.change
        real(turn, message, ranks if planned is None else planned.missing)

    return [patch.object(change, "recut", recut)]


@_mutant
def cells_have_another_shape_while_states_are_on_their_way() -> list[Patch]:
    """A rank says that it has what it needs as soon as it has begun to get it."""
    return [patch.object(standing, "lacks", lambda standing, lacking: standing)]


# ---- steps that are resumed --------------------------------------------------------------------------


@_mutant
def ranks_of_a_cell_need_not_agree() -> list[Patch]:
    """What the first rank of a cell has done counts for all of them."""
    real = salvage._agreed
    return [patch.object(salvage, "_agreed", lambda leader, told, step: real(leader, told[:1] * len(told), step))]


@_mutant
def work_of_another_step_counts() -> list[Patch]:
    """What is reported counts for the step that is decided, whichever it was done for."""
    real = salvage._agreed

    def agreed(leader: int, told: Any, step: int) -> Any:
        return real(leader, [each and replace(each, step=step) for each in told], step)

    return [patch.object(salvage, "_agreed", agreed)]
