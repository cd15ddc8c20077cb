"""``megatron-elastic chaos``: what it draws. That jobs stay as they were it shows itself, in ``scripts/long.sh``."""

from __future__ import annotations

import itertools

import chaos
import pytest
from under_fire.draw import KINDS, KINDS_OF_HOSTS, Round

from megatron_elastic import cli
from megatron_elastic.faults.injection import Injection
from tests.jobs import ROOT


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("variant", ["fp32", "virtual", "verify"])
def test_a_seed_draws_the_same_faults_and_they_can_be_written(variant: str, nodes: int) -> None:
    for seed in range(20):
        rounds = [Round(seed, (1, 2, 3), variant, nodes) for _ in range(2)]
        for each in rounds:
            each.draw(KINDS | KINDS_OF_HOSTS, 20)
        one, other = rounds
        assert one.faults == other.faults and len(one.faults) == 20
        kinds = {fault.kind for fault in one.faults}
        assert "flip" not in kinds or variant == "verify"
        assert kinds.isdisjoint(KINDS_OF_HOSTS) or nodes > 1
        raised = [fault.step for fault in one.faults if fault.kind == "raise"]
        assert all(later - sooner >= 8 for sooner, later in itertools.pairwise(raised)), "else it ends"
        for spec, fault in one.injected.items():
            assert Injection.parse(spec).rank == fault.rank


def test_it_says_what_it_does(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as ended:
        chaos.main(["--help"])
    assert ended.value.code == 0 and "--minutes" in capfd.readouterr().out
    became: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda path, arguments: became.append(arguments))
    cli.main(["chaos", "--seed", "3"])
    assert became[0][1:] == [str(ROOT / "benchmarks" / "chaos.py"), "--seed", "3"]
