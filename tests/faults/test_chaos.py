"""``megatron-elastic chaos``: what it draws. That jobs stay as they were it shows itself, in ``scripts/long.sh``."""

from __future__ import annotations

import itertools

import pytest
from disturbed import chaos
from disturbed.under_fire.draw import KINDS, KINDS_OF_DEVICES, KINDS_OF_HOSTS, Round

from megatron_elastic import cli
from megatron_elastic.faults.injection import Injection
from tests.jobs import ROOT


@pytest.mark.parametrize(("nodes", "device"), [(1, "cpu"), (3, "cpu"), (1, "soft")])
@pytest.mark.parametrize("variant", ["fp32", "virtual", "verify"])
def test_a_seed_draws_the_same_faults_and_they_can_be_written(variant: str, nodes: int, device: str) -> None:
    for seed in range(20):
        rounds = [Round(seed, (1, 2, 3), variant, nodes, device) for _ in range(2)]
        for each in rounds:
            each.draw(KINDS | KINDS_OF_HOSTS | KINDS_OF_DEVICES, 20)
        one, other = rounds
        assert one.faults == other.faults and len(one.faults) == 20
        kinds = {fault.kind for fault in one.faults}
        assert "flip" not in kinds or variant == "verify"
        assert kinds.isdisjoint(KINDS_OF_HOSTS) or nodes > 1
        assert kinds.isdisjoint(KINDS_OF_DEVICES) or device == "soft"
        assert [fault.kind for fault in one.faults].count("device fails") <= 1, "nothing comes in its place"
        raised = [fault.step for fault in one.faults if fault.kind in ("raise", "memory short")]
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
    assert became[0][1:] == [str(ROOT / "benchmarks"), "chaos", "--seed", "3"]
