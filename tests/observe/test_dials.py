"""What ranks count of bytes, copies and memory, and how that becomes events and figures."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as changed
from rich.console import Console

from megatron_elastic.cluster.messages import RankExited, Settled
from megatron_elastic.cluster.node.instruments import Instruments
from megatron_elastic.cluster.protocol.effects import Say, Show, WriteEvent
from megatron_elastic.cluster.protocol.events import Metered
from megatron_elastic.comm.tag import Channel
from megatron_elastic.faults.odometer import Odometer, Odometers
from megatron_elastic.layout import Layout
from megatron_elastic.observe.dials import DATA, LOAD, SAVE, SHARED_MEMORY, UCX, Chore, Figures
from megatron_elastic.observe.progress import Progress
from megatron_elastic.observe.records import RunRecords
from megatron_elastic.observe.run import Run
from megatron_elastic.observe.status import picture, status
from tests import world
from tests.observe.test_observe import line, make
from tests.play import Play
from tests.world import Peer

IDLE = Figures(
    sent=(0, 0, 0), received=(0, 0, 0), epoch=0, unit=None, source=None, copied=0, copies=0, behind=0, states=0,
    device=0, resident=0,
)  # fmt: skip


@pytest.mark.job
@pytest.mark.parametrize("apart", [False, True])
def test_bytes_are_counted_by_what_carries_them(apart: bool) -> None:
    """Small and large messages, by who sends and by who receives."""

    def body(peer: Peer) -> None:
        transport, dials = peer.transport, peer.transport.dials
        channel, other = (UCX, SHARED_MEMORY) if apart else (SHARED_MEMORY, UCX)
        for number, size in enumerate((10, 3_000_000)):
            buffer = torch.empty(size, dtype=torch.uint8)
            before = dials.sent[channel], dials.received[channel]
            if peer.rank == 0:
                transport.wait(transport.send(1, Channel.POINT_TO_POINT, number, buffer))
            else:
                transport.wait(transport.recv(0, Channel.POINT_TO_POINT, number, buffer))
            more = dials.sent[channel] - before[0], dials.received[channel] - before[1]
            assert more == ((size, 0) if peer.rank == 0 else (0, size))
            peer.meet()
        assert transport.bytes_sent == sum(dials.sent)
        assert dials.sent[other] == dials.received[other] == 0
        peer.leave()

    world.run(body, size=2, apart=apart)


def test_an_agent_tells_every_few_seconds_and_of_copies_at_once() -> None:
    odometers = Odometers(1)
    dials = Odometer.of(odometers.environment(0)).dials
    instruments, now = Instruments(odometers), 0.0

    def told(after: float) -> Figures | None:
        nonlocal now
        now += after
        metered = instruments.look({7: os.getpid()}, {7: 0}, now)
        return None if metered is None else metered.figures[7]

    dials.sent[SHARED_MEMORY] += 5
    first = told(0.0)
    assert first is not None and first.sent == (5, 0, 0) and first.resident > 1_000_000
    dials.sent[SHARED_MEMORY] += 5
    assert [each and each.sent[0] for each in (told(1.0), told(4.1), told(0.1))] == [None, 10, None]
    dials.expect(3, 1000)
    dials.fetch(1, 4)
    begun = told(0.1)
    assert begun is not None and (begun.epoch, begun.unit, begun.source, begun.copied) == (3, 1, 4, 0)
    for more, after, copied in ((30, 1.1, None), (30, 0.5, 60), (200, 0.5, None), (0, 0.6, 260), (740, 0.1, 1000)):
        dials.copied(more)
        now_there = told(after)
        assert (now_there and now_there.copied) == copied
    assert now_there is not None and now_there.unit is None
    assert told(0.1) is None
    instruments.forget()
    assert told(0.1) == now_there, "to somebody else"
    assert instruments.look({}, {}, now + 1) is None


def test_an_agent_tells_of_chores_that_take_long() -> None:
    """Not of what is over soon; then when it begins, when more is done, and at once when it is over."""
    odometers = Odometers(1)
    dials = Odometer.of(odometers.environment(0)).dials
    instruments, now = Instruments(odometers), 0.0

    def told(after: float) -> Chore | str | None:
        nonlocal now
        now += after
        metered = instruments.look({7: os.getpid()}, {7: 0}, now)
        return "nothing" if metered is None else metered.figures[7].chore

    assert told(0.0) is None
    with dials.at(SAVE, 1000):
        assert told(0.5) == "nothing"
    assert told(0.5) == "nothing"
    with dials.at(LOAD, 1000):
        dials.finish(SAVE, 7)  # what was given up comes late
        assert [told(0.5), told(1.9)] == ["nothing", "nothing"]
        assert told(0.2) == Chore("load", 0, 1000)
        for more, after, expected in ((40, 1.1, None), (40, 0.1, 80), (400, 0.5, None), (0, 0.6, 480)):
            dials.finish(LOAD, more)
            assert told(after) == ("nothing" if expected is None else Chore("load", expected, 1000))
        with dials.at(DATA):
            assert told(0.1) is None, "of the newer one nothing yet"
            assert told(2.1) == Chore("data", 0, 0)
        assert told(0.1) is None
    assert told(0.1) == "nothing"


def test_ranks_that_are_at_the_same_are_told_of_as_one() -> None:
    play = Play()

    def shows(now: float, chores: dict[int, Chore | None], node: int = 1) -> list[tuple[object, ...]]:
        figures = {rank: changed(IDLE, chore=chore) for rank, chore in chores.items()}
        play.happens(Metered(now=now, node=node, figures=figures))
        told = [effect.fields for effect in play.effects if isinstance(effect, WriteEvent)]
        assert len(told) == len([effect for effect in play.effects if isinstance(effect, Say)])
        return [tuple(fields.values()) for fields in told]

    def saved(done: int) -> Chore:
        return Chore("save", done, 100)

    assert shows(10.0, {0: saved(0), 1: None}) == [("save", 1, 0, 100, 0.0)]
    assert shows(10.5, {0: saved(50), 1: saved(10)}) == [], "not so often"
    assert shows(11.5, {0: saved(50), 1: saved(10)}) == [("save", 2, 60, 200, 1.5)]
    assert shows(13.0, {0: saved(60), 1: saved(15)}) == [], "less than a tenth"
    assert shows(72.0, {0: saved(60), 1: saved(15)}) == [("save", 2, 75, 200, 62.0)]
    assert shows(74.0, {0: None, 1: saved(15)}) == [("save", 1, 115, 200, 64.0)], "who is done has done all"
    play.news(RankExited(rank=1, returncode=-9, time=75.0))
    assert shows(76.0, {0: None}) == [("save", 0, 100, 100, 66.0)], "nobody who lives is at it"
    assert shows(80.0, {0: Chore("data", 0, 0)}) == [("data", 1, 0, 0, 0.0)]
    assert shows(80.1, {0: None}) == [("data", 0, 0, 0, pytest.approx(0.1))]
    assert play.job.progress == Progress()


def test_status_shows_what_takes_long(tmp_path: Path) -> None:
    records = RunRecords(tmp_path)
    records.layout(make())
    run = Run.of_folder(tmp_path)

    def shown(**fields: Any) -> tuple[list[Any], list[str]]:
        records.event("progress", 0, **fields)
        run.refresh()
        console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
        console.print(picture(run))
        lines = [" ".join(text.split()) for text in console.export_text().splitlines()]
        return status(run)["progress"], [text for text in lines if "data sets" in text or "a checkpoint" in text]

    now, told = shown(what="data", busy=2, done_bytes=0, all_bytes=0, seconds=61.0)
    assert told == ["preparing data sets: 1.0 min so far (2 ranks)"]
    assert now == [{"what": "data", "busy": 2, "done_bytes": 0, "bytes": 0, "seconds": 61.0}]
    _, told = shown(what="load", busy=1, done_bytes=3_000_000, all_bytes=10_000_000, seconds=5.0)
    assert told[1] == "███░░░░░░░ loading a checkpoint: 3.0 MB of 10 MB, 5.0 s so far (1 rank)"
    shown(what="data", busy=0, done_bytes=0, all_bytes=0, seconds=70.0)
    now, told = shown(what="load", busy=0, done_bytes=10_000_000, all_bytes=10_000_000, seconds=9.0)
    assert (now, told) == ([], [])


def test_dials_of_the_rank_before_are_forgotten() -> None:
    odometers = Odometers(2)
    for slot in (0, 1):
        Odometer.of(odometers.environment(slot)).dials.sent[UCX] += 9
    odometers.begin(0)
    assert [odometers.figures(slot, 3).sent[UCX] for slot in (0, 1)] == [0, 9]
    assert odometers.read(0).patient and odometers.figures(0, 3) == changed(IDLE, resident=3)


def test_news_of_copies_is_written_down_once() -> None:
    """Of ranks of the node that tells, for the present layout; the rest is for who watches."""
    play = Play()

    def copying(figures: dict[int, Figures], node: int = 1) -> list[dict[str, object]]:
        play.happens(Metered(now=1.0, node=node, figures=figures))
        return [dict(effect.fields) for effect in play.effects if isinstance(effect, WriteEvent)]

    some = changed(IDLE, copied=10, copies=40, unit=1, source=0)
    assert copying({0: IDLE, 1: some}) == [
        {"ranks": [1], "done": [10], "bytes": [40], "units": [1], "sources": [0]}]
    (shown,) = (effect for effect in play.effects if isinstance(effect, Show))
    assert shown.figures == {0: IDLE, 1: some}
    assert copying({0: IDLE, 1: some}) == [], "nothing new"
    assert copying({1: changed(some, copied=20)}, node=2) == [], "another node's rank"
    assert not play.effects
    assert copying({1: changed(some, epoch=7, copied=20)}) == [], "another layout's"
    play.say(Settled(rank=1, epoch=0))
    (over,) = (effect.fields for effect in play.effects if isinstance(effect, WriteEvent))
    assert (over["done"], over["bytes"], over["units"], over["sources"]) == ([40], [40], [-1], [-1])
    for copied in (20, 40):
        assert copying({1: changed(some, copied=copied)}) == [], "it has said itself that all is there"
    assert copying({0: changed(IDLE, copied=40, copies=40)}) == [], "complete before anybody heard of it"
    play.news(RankExited(rank=1, returncode=-9, time=1.0))
    assert play.job.epoch == 1
    assert copying({0: changed(some, copied=5), 1: some})[0]["ranks"] == [0], "who is lost gets nothing"
    assert [effect.epoch for effect in play.effects if isinstance(effect, WriteEvent)] == [0], "the layout's that asks"


def test_status_shows_copies_until_they_are_there(tmp_path: Path) -> None:
    records = RunRecords(tmp_path)
    layout = replace(make(), epoch=2)
    records.metrics(line(1, 2.0))
    records.layout(layout)
    run = Run.of_folder(tmp_path)

    def tell(epoch: int, at: float, **fields: list[int]) -> list[dict[str, object]]:
        records.event("copying", epoch, at=at, **fields)
        run.refresh()
        copies: list[dict[str, object]] = status(run)["copies"]
        return copies

    both: dict[str, list[int]] = {"ranks": [0, 3], "bytes": [100, 60]}
    tell(1, 5.0, **both, done=[90, 50], units=[0, 0], sources=[1, 1])
    begun = tell(2, 10.0, **both, done=[0, 0], units=[0, -1], sources=[1, -1])
    assert begun == [
        {"rank": 0, "source": 1, "unit": layout.units[0], "done_bytes": 0, "bytes": 100, "bytes_per_s": None,
         "left_s": None},
        {"rank": 3, "source": None, "unit": None, "done_bytes": 0, "bytes": 60, "bytes_per_s": None, "left_s": None},
    ]  # fmt: skip
    now = tell(2, 14.0, ranks=[0], bytes=[100], done=[40], units=[1], sources=[2])
    assert (now[0]["bytes_per_s"], now[0]["left_s"], now[0]["source"], now[1]["done_bytes"]) == (10.0, 6.0, 2, 0)
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(picture(run))
    shown = [" ".join(text.split()) for text in console.export_text().splitlines() if text.startswith("rank ")]
    assert shown == [
        "rank 0 from 2: layer.0 ████░░░░░░ 40 B of 100 B 10 B/s, 6.0 s left", "rank 3 ░░░░░░░░░░ 0 B of 60 B"]
    (last,) = tell(2, 16.0, ranks=[3], bytes=[60], done=[60], units=[-1], sources=[-1])
    assert last["rank"] == 0
    records.layout(replace(layout, epoch=3))
    run.refresh()
    assert status(run)["copies"] == [], "of a layout before"
    records.layout(Layout.from_json(replace(layout, epoch=4).to_json()))
    assert tell(4, 20.0, **both, done=[0, 0], units=[0, 0], sources=[1, 1])
    records.event("finished", 4, reason="done")
    run.refresh()
    assert status(run)["copies"] == []
