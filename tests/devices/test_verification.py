"""Damaged memory: found by checksum, healed, and without a trace in the result."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from immutables import Map

from megatron_elastic import cli
from megatron_elastic.cluster.protocol.faults.damage import undecided
from megatron_elastic.cluster.protocol.job.steps import Trust
from megatron_elastic.faults.injection import Injection
from megatron_elastic.state.verification import checksums, outvoted
from tests.jobs import ROOT, Grid, Job, Jobs, assert_exactly_once, inject

DAMAGED = ROOT / "tests" / "megatron_programs" / "damaged.py"
GRID = Grid(tp=1, pp=2, steps=8)


def flip(what: str, step: int, rank: int = 5, at: str = "backward") -> list[str]:
    return ["--elastic-inject", f"flip:rank={rank},step={step},at={at},what={what}"]


def assert_healed(job: Job, reference: Job, damages: list[tuple[int, str]]) -> None:
    assert cli.main(["compare", str(job.run_dir), str(reference.run_dir)]) == 0, job.output
    assert_exactly_once(job)
    assert [(event["rank"], event["what"]) for event in job.events("damaged")] == damages
    assert [event["cause"] for event in job.events("recovered")] == ["damaged memory"] * len(damages)
    assert all(layout.lost == () for layout in job.layouts())


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40), st.data())
def test_no_flipped_bit_keeps_a_checksum(words: list[int], data: st.DataObject) -> None:
    tensor = torch.tensor(words, dtype=torch.int32)
    before = checksums({(0, 0): [tensor]})
    bit = data.draw(st.integers(0, 31))
    tensor[data.draw(st.integers(0, len(words) - 1))] ^= -(2**31) if bit == 31 else 1 << bit
    assert checksums({(0, 0): [tensor]}) != before


@pytest.mark.parametrize(
    ("copies", "bad"),
    [
        ({0: 7, 1: 7}, []),
        ({0: 7, 1: 8}, [0, 1]),  # nothing tells which is right
        ({0: 7, 1: 8, 2: 7}, [1]),
        ({0: 7, 1: 8, 2: 9}, [0, 1, 2]),
        ({0: 7, 1: 8, 2: 7, 3: 8}, [0, 1, 2, 3]),
        ({0: 7, 1: 0, 2: 8}, [0, 2]),  # 0 is not live yet and has no vote
        ({0: 7, 1: 0}, []),
    ],
)
def test_the_minority_is_outvoted(copies: dict[int, int], bad: list[int]) -> None:
    assert outvoted(copies) == bad


def test_damage_to_what_is_left_of_a_slice_is_no_difference() -> None:
    """Its other copy may have been lost with its rank."""
    one, both = ({(rank, (3, 1, 0)): None for rank in ranks} for ranks in ([5], [4, 5]))
    left, differ = (undecided(Trust(damaged=Map(copies), verified=2)) for copies in (one, both))
    assert left == ("what is left of a slice is damaged (ranks [5]); the state of step 2 was sound. With "
                    "--elastic-replicas 2 there would be another copy")
    assert differ is not None and "(ranks [4, 5]) and nothing tells which is right" in differ
    assert undecided(Trust()) is None


def test_flips_name_what_they_damage() -> None:
    text = "flip:rank=5,step=4,at=backward,what=moments"
    assert str(Injection.parse(text)) == text
    for wrong, why in {
        "flip:rank=5,at=vote": "lacks what",
        "flip:rank=5,at=vote,what=disk": "what=disk in .*: one of weights, moments, replica",
        "kill:rank=5,at=vote,what=weights": "kill takes no what",
        "disk:rank=5,at=vote,what=weights": "what=weights in .*: one of full, slow",
        "slow:rank=5,at=vote": "lacks factor",
        "hang:rank=5,at=vote,for=soon": "for=soon in .* is no number",
        "disconnect:rank=5,at=vote,peers=1,for=0": "more than 0 seconds",
        "hang:rank=5,at=vote,for=inf": "without it: for ever",
        "hang:rank=5,at=vote,for=nan": "without it: for ever",
        "slow:rank=5,at=vote,factor=inf": "factor= is at least 1",
        "slow:rank=5,at=vote,factor=nan": "factor= is at least 1",
        "kill:rank=5,rank=6,at=vote": "has rank twice",
    }.items():
        with pytest.raises(ValueError, match=why):
            Injection.parse(wrong)


@pytest.mark.parametrize(("what", "decision"), [("weights", "resume"), ("moments", "back"), ("replica", "resume")])
def test_damage_at_rest_is_healed(jobs: Jobs, what: str, decision: str) -> None:
    """The rank itself finds it, so one replica is enough. What an owner has, all may have weights from."""
    job = jobs.run(*GRID.flags, "--elastic-verify-every", "1", *flip(what, 4))
    assert_healed(job, jobs.undisturbed(*GRID.flags), [(5, "weights" if what == "weights" else "state")])
    assert [event["decision"] for event in job.events("recovered")] == [decision]


def test_a_rank_dies_while_damage_is_healed(jobs: Jobs) -> None:
    kill = ["--elastic-inject", "kill:rank=6,step=4,at=interrupt"]
    job = jobs.run(*GRID.flags, "--elastic-verify-every", "1", "--elastic-replicas", "2", *flip("moments", 4), *kill)
    assert cli.main(["compare", str(job.run_dir), str(jobs.undisturbed(*GRID.flags).run_dir)]) == 0, job.output
    assert job.layouts()[-1].lost == (6,)
    assert len(job.events("damaged")) == 1


@pytest.mark.parametrize(("what", "kills"), [("weights", ["7@4:grad_sync"]), ("moments", ["7@4:grad_sync"]),
                                             ("moments", ["7@4:grad_sync", "2@interrupt"])],
                         ids=["weights", "moments", "moments, and another dies before its report"])
def test_a_rank_dies_before_anybody_looks_for_damage(jobs: Jobs, what: str, kills: list[str]) -> None:
    """Who has it looks before it leaves the layout under which it was noted, once however often it is interrupted."""
    job = jobs.run(*GRID.flags, "--elastic-verify-every", "1", *flip(what, 4), *inject(*kills))
    assert cli.main(["compare", str(job.run_dir), str(jobs.undisturbed(*GRID.flags).run_dir)]) == 0, job.output
    found = [(event["rank"], event["what"]) for event in job.events("damaged")]
    assert found == [(5, "weights" if what == "weights" else "state")]


def test_damage_before_a_planned_layout_is_healed(jobs: Jobs) -> None:
    """What was noted after the step is looked at before the layout that it is of is left."""
    grid = Grid(tp=1, pp=2, steps=16)
    kill = ["--elastic-inject", "kill:rank=6,step=3,at=forward"]  # what it owned is spread afterwards
    job = jobs.start(*grid.flags, "--elastic-verify-every", "1", *kill, script=DAMAGED)
    job.finish()
    assert cli.main(["compare", str(job.run_dir), str(jobs.undisturbed(*grid.flags).run_dir)]) == 0, job.output
    assert [(event["rank"], event["what"]) for event in job.events("damaged")] == [(5, "state")]


def test_replicas_in_another_stage_are_looked_at_too(jobs: Jobs) -> None:
    """The only cell of a stage has its replicas there."""
    grid = Grid(tp=1, pp=4, steps=8)
    kill = ["--elastic-inject", "kill:rank=2,step=3,at=grad_sync"]
    job = jobs.run(*grid.flags, "--elastic-verify-every", "1", *kill, *flip("replica", 6, rank=4))
    assert cli.main(["compare", str(job.run_dir), str(jobs.undisturbed(*grid.flags).run_dir)]) == 0, job.output
    assert [(event["rank"], event["unit"]) for event in job.events("damaged")] == [(4, "layer.1")]
    assert not job.events("tangle")


def test_the_majority_is_right(jobs: Jobs) -> None:
    """Damage to a replica between its turns does no harm to the others, who outvote it."""
    flags = ["--elastic-verify-every", "3", "--elastic-replicas", "2"]
    job = jobs.run(*GRID.flags, *flags, *flip("replica", 3, at="data"))
    assert_healed(job, jobs.undisturbed(*GRID.flags), [(5, "state")])


def test_two_copies_that_differ_end_the_job(jobs: Jobs) -> None:
    job = jobs.start(*GRID.flags, "--elastic-verify-every", "3", *flip("replica", 3, at="data"))
    assert "nothing tells which is right" in job.finish(code=1)
    assert {event["rank"] for event in job.events("damaged")} >= {5}
