"""Decision: how the ranks of an interrupted layout go on, from their reports alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from megatron_elastic.cluster.messages import Report
from megatron_elastic.cluster.protocol.job import Decided, Told
from megatron_elastic.layout import Layout, SlicePart


def working(since: Mapping[int, int], reports: Iterable[Report]) -> list[Report]:
    """Of the reports, those of ranks that have a part in the step in progress.

    ``since``: rank of the interrupted layout -> epoch of the first of the layouts that it has been in without a gap.
    Who has not made one of those true may not know that it is in, and tells of what it was before; and who has switched
    already to one that leaves it out is out.
    """
    return sorted(
        (each for each in reports if each.rank in since and each.member and each.layout >= since[each.rank]),
        key=lambda report: report.rank,
    )


def reloading(reports: Collection[Report]) -> Decided | None:
    """To go back to a checkpoint, if the decision was to and nobody is known to have all of it behind them.

    A coordinator may be lost when some know of that and some do not; the next one learns of it here.
    """
    newest = max((report.layout for report in reports if report.reloading), default=-1)
    there = [report for report in reports if report.layout >= newest]
    if newest < 0 or not all(report.reloading and report.vote is None for report in there):
        return None
    return Decided("reload", min(report.step for report in there))


def decide(reports: Collection[Report], votes: Mapping[int, Told]) -> Decided:
    """Forward or back, from the reports of those who train and the votes that are known besides.

    A vote told by somebody who is dead counts if nobody has gone on to a newer layout since: who has, and knows of no
    vote, may be doing the step again. (Who goes on to a layout to finish a step has its vote from then on.)
    Raises ValueError if the reports contradict each other.
    """
    step = min(report.step for report in reports)
    ahead = [report.rank for report in reports if report.step > step + 1]
    if ahead:
        raise ValueError(f"ranks {ahead} report more than one step past step {step} of the slowest rank")
    told = votes.get(step)
    vote = told.vote if told is not None and told.epoch >= max(report.layout for report in reports) else None
    for report in reports:
        for known in (report.vote, report.last):
            if vote is None and known is not None and known.step == step:
                vote = known
    if vote is None and any(report.step > step for report in reports):
        raise ValueError(f"a rank has committed step {step} but nobody reports its vote")
    return Decided("back" if vote is None else "forward", step, vote)


def newest_complete(
    decided: Decided, parts: Collection[SlicePart], versions: Mapping[int, Mapping[int, Collection[SlicePart]]]
) -> tuple[Decided, int]:
    """What to do where replicas may be behind their owners (``state.replay``), and after how many steps state is taken.

    ``decided`` is what would be done if no state were missing. Of its number of steps and of one less, the larger one
    counts after which each of ``parts`` is held by somebody. ``versions``: rank -> number of steps -> what it has.
    """
    done = decided.step if decided.decision == "forward" else decided.step - 1
    for steps in (done, done - 1):
        if set(parts) <= {part for each in versions.values() for part in each.get(steps, ())}:
            return (decided if steps == done else Decided("back", steps + 1)), steps
    return decided, done


def units_move(old: Layout, new: Layout) -> bool:
    """Whether some rank is to compute units whose parameters it may not have."""
    there = set(old.ranks)
    return any(
        rank in there and not set(new.held_by(rank)) <= set(old.stages[old.stage_of(rank)].units) for rank in new.ranks
    )
