"""Traces: what ranks write, one clock for all hosts, the file for the viewer, and what determined a step's length."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import resource
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_elastic import cli
from megatron_elastic.comm.tag import Channel, at_grain, at_group, at_slice, describe, make_tag
from megatron_elastic.config import ElasticConfig, UsageError
from megatron_elastic.observe.compare import compare
from megatron_elastic.observe.tracing import perfetto
from megatron_elastic.observe.tracing.clocks import align
from megatron_elastic.observe.tracing.entries import MAIN, Commit, Entry, Message, Origin, Phase, Sent, Stopped, Wait
from megatron_elastic.observe.tracing.graph import Edge, Graph, Node, shares
from megatron_elastic.observe.tracing.path import graph_of
from megatron_elastic.observe.tracing.reading import RankTrace, Traces, answer
from megatron_elastic.observe.tracing.tracer import FOLDER, Tracer, Window
from tests import perfetto_engine
from tests.jobs import Job, Jobs

KINDS = ("forward", "backward", "vote")
TOLERANCE = 0.02

# ---- the longest chain ---------------------------------------------------------------------------


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    nodes: list[Node] = [Node("start", 0)]
    for index in range(1, draw(st.integers(2, 9))):
        sources = draw(st.sets(st.integers(0, index - 1), min_size=1, max_size=3))
        edges = [Edge(source, draw(st.integers(0, 9)), draw(st.sampled_from(("fast", "slow")))) for source in sources]
        nodes.append(Node(draw(st.sampled_from(KINDS)), draw(st.integers(0, 9)), tuple(edges), draw(st.integers(0, 2))))
    return Graph(nodes)


def chains(graph: Graph, end: int) -> list[list[tuple[Node, Edge | None]]]:
    """All ways to a node, each with the edges that it goes over."""
    node = graph.nodes[end]
    if not node.after:
        return [[(node, None)]]
    return [[*chain, (node, edge)] for edge in node.after for chain in chains(graph, edge.source)]


@given(graphs(), st.dictionaries(st.sampled_from((*KINDS, "fast", "slow")), st.integers(0, 3)))
def test_the_longest_chain_is_the_longest_of_all(graph: Graph, factors: dict[str, int]) -> None:
    end = len(graph.nodes) - 1

    def length(chain: Sequence[tuple[Node, Edge | None]], rank: int | None) -> float:
        own = sum(n.took * (factors.get(n.kind, 1) if rank in (None, n.rank) else 1) for n, _ in chain)
        return own + sum(e.lag * (factors.get(e.kind, 1) if rank is None else 1) for _, e in chain if e is not None)

    ways = chains(graph, end)
    for rank in (None, 0, 1):
        assert graph.length(end, factors, rank) == max(length(chain, rank) for chain in ways)
    links = graph.critical(end)
    assert sum(link.took for link in links) == graph.length(end) == sum(shares(links).values())
    chain = [link.node for link in links if not link.lag]
    taken = [[n.took for n, _ in way if n.took] for way in ways]
    assert [graph.nodes[node].took for node in chain] in taken


# ---- a step as a graph ---------------------------------------------------------------------------


class Action(NamedTuple):
    """A rank computes something of a kind, or sends something to another, who waits for it at once."""

    rank: int
    kind: str
    took: int
    to: int | None = None


@st.composite
def steps(draw: st.DrawFn) -> list[Action]:
    ranks = draw(st.integers(2, 4))
    actions = []
    for _ in range(draw(st.integers(1, 25))):
        rank, kind = draw(st.integers(0, ranks - 1)), draw(st.sampled_from(KINDS))
        to = draw(st.none() | st.sampled_from([other for other in range(ranks) if other != rank]))
        actions.append(Action(rank, kind, draw(st.integers(1, 50)), to))
    return actions


def played(actions: Sequence[Action], flight: int, factors: Mapping[str, int]) -> tuple[Traces, dict[int, int], bool]:
    """What a step leaves, if messages take so long; when each rank commits it; and whether anybody had to wait."""
    ranks = {each for action in actions for each in (action.rank, action.to) if each is not None} | {0}
    now, waited = {rank: 1000 + 3 * rank for rank in ranks}, False
    traces = {rank: RankTrace(Origin(rank, "host", 1, 0, 0)) for rank in ranks}
    for rank in ranks:
        traces[rank].add(Commit(now[rank], 1))
        traces[rank].add(Phase(now[rank], "between", 2))
    for tag, action in enumerate(actions):
        trace = traces[action.rank]
        trace.add(Phase(now[action.rank], action.kind, 2, tag))
        now[action.rank] += action.took * factors.get(action.kind, 1) + 1  # what sends takes time itself
        trace.add(Phase(now[action.rank] - 1, "rest", 2))
        if action.to is None:
            continue
        sent, begun = now[action.rank], now[action.to]
        trace.add(Sent(sent, MAIN, action.to, tag))
        ended = max(begun, sent + flight)
        last = [tag] if ended > begun else []
        waited |= bool(last)
        traces[action.to].add(Wait(begun, ended, MAIN, [tag], [], [action.rank] if last else [], last, []))
        traces[action.to].add(Message(tag, "activation", f"activation {tag}"))
        now[action.rank] += 1
        now[action.to] = ended + 1
    for rank in ranks:
        now[rank] += 1
        traces[rank].add(Commit(now[rank], 2))
        traces[rank].add(Phase(now[rank], "between", 3))
        traces[rank].sort()
    return Traces(traces), now, waited


@given(steps(), st.integers(1, 40), st.dictionaries(st.sampled_from(KINDS), st.integers(0, 3)))
def test_a_step_takes_as_long_as_its_graph_and_so_does_a_faster_one(
    actions: list[Action], flight: int, factors: dict[str, int]
) -> None:
    traces, now, waited = played(actions, flight, {})
    graph = graph_of(traces, 2)
    assert graph.rank == 0 and graph.elapsed == now[0] - 1000
    assert graph.graph.length(graph.end) == graph.elapsed == sum(link.took for link in graph.links)
    assume(waited)  # else nobody knows how long a message takes
    assert graph.graph.length(graph.end, factors) == played(actions, flight, factors)[1][0] - 1000


def test_a_wait_for_several_of_whom_the_last_was_killed_and_told_nothing() -> None:
    """What came from others, and is not what was waited for longest, is no reason to take longer than that."""
    traces, _, _ = played([Action(1, KINDS[0], 30, 0)], 40, {})  # so that it is known how long a message takes
    one, zero = traces.ranks[1], traces.ranks[0]
    commit = zero.commits.pop()
    begun, sent = commit.at, commit.at + 10
    for tag in (101, 102):
        zero.add(Message(tag, "activation", f"activation {tag}"))
    one.add(Sent(sent, MAIN, 0, 101))
    zero.add(Wait(begun, sent + 50, MAIN, [101, 102], [], [2], [102], []))
    zero.add(Commit(sent + 60, 2))
    one.commits.pop()
    one.add(Commit(sent + 60, 2))
    for trace in (zero, one):
        trace.sort()
    graph = graph_of(traces, 2)
    assert graph.graph.length(graph.end) == graph.elapsed == sum(link.took for link in graph.links)


@given(steps(), st.integers(1, 40))
def test_the_viewer_gets_slices_that_are_nested_and_arrows_that_go_forward(actions: list[Action], flight: int) -> None:
    traces, _, _ = played(actions, flight, {})
    assert_viewable(list(perfetto.merged(traces, [], [])))


# ---- clocks --------------------------------------------------------------------------------------


@st.composite
def letters(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int, int, int]]]:
    """How far the clock of each host is off, and messages: from, to, when by a true clock, how long under way."""
    hosts = draw(st.integers(2, 4))
    off = [draw(st.integers(-10_000, 10_000)) for _ in range(hosts)]
    pairs = draw(st.lists(st.sampled_from(list(itertools.permutations(range(hosts), 2))), min_size=1, max_size=20))
    return off, [(a, b, draw(st.integers(0, 1000)), draw(st.integers(0, 500))) for a, b in pairs]


@given(letters(), st.integers(-10, 10))
def test_no_message_arrives_before_it_was_sent(
    sent: tuple[list[int], list[tuple[int, int, int, int]]], guess: int
) -> None:
    off, messages = sent
    hosts = [str(number) for number in range(len(off))]
    shortest: dict[tuple[str, str], int] = {}
    for source, target, at, took in messages:
        seen, pair = (at + took - off[target]) - (at - off[source]), (str(source), str(target))
        shortest[pair] = min(shortest.get(pair, seen), seen)
    offsets = align(hosts, shortest, dict.fromkeys(hosts, guess))
    assert offsets["0"] == guess
    reach = _reach(hosts, shortest)
    for (a, b), seen in shortest.items():
        if {a, b} <= reach:  # both ways from the first host
            assert seen + offsets[b] - offsets[a] >= -1  # of rounding
    for host in set(hosts) - reach:
        assert offsets[host] == guess
    for other in reach - {"0"}:
        there, back = shortest.get(("0", other)), shortest.get((other, "0"))
        if there is not None and back is not None:
            error = (offsets[other] - offsets["0"]) - (off[int(other)] - off[0])
            assert abs(error) <= (there + back) / 2 + 1


def _reach(hosts: Sequence[str], pairs: Mapping[tuple[str, str], int]) -> set[str]:
    def from_first(edges: set[tuple[str, str]]) -> set[str]:
        found = {hosts[0]}
        while more := {b for a, b in edges if a in found} - found:
            found |= more
        return found

    return from_first(set(pairs)) & from_first({(b, a) for a, b in pairs})


def test_clocks_that_contradict_themselves_are_not_believed() -> None:
    guess = {"a": 5, "b": 7}
    assert align(["a", "b"], {("a", "b"): -3, ("b", "a"): 2}, guess) == guess


def test_two_hosts_get_one_clock_by_their_votes(tmp_path: Path) -> None:
    """The clock of the second is an hour ahead; what it says of the time of day is wrong, too."""
    ahead = 3600 * 10**9

    def write(rank: int, host: str, entries: Sequence[Entry]) -> None:
        origin = Origin(rank, host, 1, 0, rank)
        (tmp_path / FOLDER).mkdir(exist_ok=True)
        (tmp_path / FOLDER / f"rank{rank}.jsonl").write_bytes(
            msgspec.json.Encoder().encode_lines([origin, *entries])
        )

    phases = [Phase(0, "vote", 1), Phase(5000, "apply", 1), Phase(6000, "commit", 1)]
    here: list[Entry] = [*phases, Sent(100, MAIN, 1, 7), Wait(200, 1300, MAIN, [8], [], [1], [8], [])]
    there: list[Entry] = [msgspec.structs.replace(phase, at=phase.at + ahead) for phase in phases]
    there += [Wait(ahead + 50, ahead + 700, MAIN, [7], [], [0], [7], []), Sent(ahead + 800, MAIN, 0, 8)]
    write(0, "here", here)
    write(1, "there", there)
    traces = Traces.read([tmp_path])
    # 600 from the first to the second at most, 500 back.
    assert traces.ranks[1].sent[0].at - traces.ranks[0].sent[0].at == 650


@pytest.mark.parametrize("drift", [0.0, 3e-5, -8e-5])
def test_clocks_that_run_at_different_rates(tmp_path: Path, drift: float) -> None:
    """The clocks of the second host and the third are hours ahead, and gain or lose. Steps of a minute, and one a day
    later, are traced: no message of the first arrives before it was sent, nor one to it, and clocks are wrong by less
    than one takes.
    """
    day, ahead = 86_400 * 10**9, 5 * 3600 * 10**9
    folder = tmp_path / FOLDER
    folder.mkdir()
    draw = random.Random(7)
    true = [second * 10**9 for second in range(60)] + [day]
    flights = [(a, b, draw.randrange(100_000, 300_000)) for _ in true for a in range(3) for b in range(3) if a != b]

    def shown(rank: int, at: int) -> int:
        return at if rank == 0 else rank * ahead + round(at * (1 + rank * drift))

    for me in range(3):
        entries: list[Entry] = []
        for step, at in enumerate(true, start=1):
            own: list[Entry] = [Phase(shown(me, at), "vote", step), Phase(shown(me, at + 10**6), "commit", step)]
            for number, (a, b, took) in enumerate(flights[6 * step - 6 : 6 * step]):
                tag = 10 * step + number
                if a == me:
                    own.append(Sent(shown(me, at + 1000), MAIN, b, tag))
                elif b == me:
                    own.append(Wait(shown(me, at + 2000), shown(me, at + 1000 + took), MAIN, [tag], [], [a], [tag], []))
            entries += own
        entries.append(Stopped(shown(me, true[-1] + 2 * 10**6)))
        lines = [Origin(me, f"host {me}", 1, 0, 0), *entries]
        (folder / f"rank{me}.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(lines))
    traces = Traces.read([tmp_path])
    for me, trace in traces.ranks.items():
        assert [phase.at for phase in trace.phases if phase.name == "vote"] == [
            pytest.approx(at, abs=300_000) for at in true], me
    senders = traces.senders()
    for trace in traces.ranks.values():
        for wait in trace.waits:
            if 0 in (trace.rank, wait.whom[0]):
                assert answer(senders, trace.rank, wait.tags[0], wait.ended) is not None


# ---- what a rank writes --------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "steps"), [("10", [10]), ("3-5", [3, 4, 5]), ("9,2-3,3-4", [2, 3, 4, 9])])
def test_windows(text: str, steps: list[int]) -> None:
    assert [step for step in range(20) if Window.parse(text).has(step)] == steps


@pytest.mark.parametrize("text", ["", "x", "0", "5-", "-5", "5-4", "1-2-3", "1.5", "1,", "1, 2"])
def test_bad_windows(text: str) -> None:
    with pytest.raises(UsageError, match="--elastic-trace: "):
        ElasticConfig(trace=text)


def test_a_tracer_is_off_outside_its_window_and_writes_after_it(tmp_path: Path) -> None:
    tracer = Tracer(3, Window.parse("5-6"), tmp_path / FOLDER, describe)
    tracer.enter(4)
    assert not tracer.on
    tracer.commit(4)
    assert tracer.on
    for step in (5, 6):
        tracer.enter(step)
        tracer.at("vote", step, None)
        tracer.operation("forward", step, 2, 1, 0)
        tracer.at("forward", step, 2)  # told already
        tracer.sent(1, make_tag(0, Channel.ACTIVATION, at_grain(2, 4), 3))
        assert not (tmp_path / FOLDER).exists()  # not while it costs the step
        tracer.commit(step)
    assert not tracer.on
    tracer.enter(7)
    (trace,) = Traces.read([tmp_path]).ranks.values()
    assert [(section.step, section.whole) for section in trace.sections()] == [(5, True), (6, True)]
    assert [piece.phase.name for piece in trace.pieces()] == ["between", "vote", "forward"] * 2
    assert trace.text(trace.sent[0].tag) == "activation of grain 2, made at position 4"


def test_a_disk_that_takes_nothing_costs_the_trace_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    tracer = Tracer(0, Window.parse("1"), tmp_path / FOLDER, describe)
    tracer.enter(1)
    tracer.write()
    assert "rank 0: cannot write" in capsys.readouterr().out
    assert not tracer.on


def test_a_disk_that_fills_costs_what_did_not_fit_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has taken the beginning; and a rank that was killed while it wrote has left half a line."""
    tracer = Tracer(0, Window.parse("1-9"), tmp_path / FOLDER, describe)
    path, tag = tmp_path / FOLDER / "rank0.jsonl", make_tag(0, Channel.ACTIVATION, at_grain(2, 4), 3)

    def step(number: int, *tags: int) -> None:
        tracer.enter(number)
        tracer.at("vote", number, None)
        for each in tags:
            tracer.sent(1, each)
        tracer.write()

    step(1)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 30, most))
    try:
        step(2, tag)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert "rank 0: cannot write" in capsys.readouterr().out
    step(3, tag)
    with path.open("ab") as file:
        file.write(b'["phase",1')
    path.with_name("rank1.jsonl").write_text('["rank",1')
    (trace,) = Traces.read([tmp_path]).ranks.values()
    assert [phase.step for phase in trace.phases if phase.name == "vote"] == [1, 3]
    assert trace.text(tag) == "activation of grain 2, made at position 4"
    step(4)
    (trace,) = Traces.read([tmp_path]).ranks.values()
    assert [phase.step for phase in trace.phases if phase.name == "vote"] == [1, 3, 4]


def test_messages_are_told_in_words() -> None:
    assert describe(make_tag(5, Channel.GRADIENT, at_slice(3, 2), 9)) == ("gradient", "gradient of unit 3, slice 2")
    assert describe(make_tag(5, Channel.COLLECTIVE, at_group(7, 40), 9)) == ("collective", "collective 40 of group 7")
    assert describe(make_tag(5, Channel.STOP, 1, 9)) == ("stop", "stop 1")


def test_what_cannot_be_read_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*command: str) -> str:
        assert cli.main(command) == 2
        return capsys.readouterr().err

    output = ("-o", str(tmp_path / "out.json"))
    assert "has no traces: give the job --elastic-trace" in error("trace", str(tmp_path), *output)
    (tmp_path / FOLDER).mkdir()
    path = tmp_path / FOLDER / "rank0.jsonl"
    path.write_text('["phase",1,"vote",1]\n')
    assert "does not say whose it is" in error("trace", str(tmp_path), *output)
    path.write_text('["phase",1\n')
    assert "is damaged" in error("trace", str(tmp_path), *output)
    for text in ("", '["rank",0', '["rank",0,"host",1,1,1,"clock"]\n'):
        path.write_text(text)
        assert "nothing was traced" in error("trace", str(tmp_path), *output)
    path.write_text('["rank",0,"host",1,0,0]\n["phase",1,"vote",1]\n["stopped",5]\n')
    (tmp_path / "metrics.jsonl").touch()
    assert "no step is traced from one commit to the next" in error("report", str(tmp_path), "--critical-path")
    assert "step 7 is not traced" in error("report", str(tmp_path), "--critical-path", "7")
    path.unlink()
    path.mkdir()
    for command in (("trace", str(tmp_path), *output), ("report", str(tmp_path), "--critical-path")):
        assert f"cannot read {path}: Is a directory" in error(*command)


@pytest.mark.parametrize(("event", "said"), [
    ({"time": 1.0, "epoch": 0}, "it lacks kind"), ({"kind": "led", "epoch": 0}, "it lacks time"),
    ({"time": 1.0, "kind": "recovered", "epoch": 0}, "it lacks cause, "),
    ({"time": "x", "kind": "led", "epoch": 0}, 'time is "x", where a number belongs'),
])  # fmt: skip
def test_damaged_events_are_told(
    event: Mapping[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "rank0.jsonl").write_text('["rank",0,"host",1,0,0]\n["phase",1,"vote",1]\n["stopped",5]\n')
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert cli.main(["trace", str(tmp_path), "-o", str(tmp_path / "out.json")]) == 2
    assert f"{tmp_path / 'events.jsonl'}:1 is damaged: {said}" in capsys.readouterr().err


# ---- a job ---------------------------------------------------------------------------------------

FLAGS = ("--pipeline-model-parallel-size", "2", "--train-iters", "12")


@pytest.fixture(scope="module")
def job(jobs: Jobs) -> Job:
    """A job that loses a rank in a traced step."""
    return jobs.run(*FLAGS, "--elastic-trace", "6-9", "--elastic-inject", "kill:rank=3,step=8,at=backward", ranks=4)


def test_tracing_changes_nothing(jobs: Jobs, job: Job) -> None:
    assert compare(job.run_dir, jobs.undisturbed(*FLAGS, ranks=4).run_dir) is None


@pytest.mark.job
def test_parts_add_up_to_steps_and_to_a_recovery(job: Job) -> None:
    """Also the step that a rank was killed in."""
    traces, metrics = Traces.read([job.run_dir]), job.metrics()
    assert sorted(traces.ranks) == [0, 1, 2]  # who was killed has written nothing
    assert traces.steps == [6, 7, 8, 9]
    for rank, trace in traces.ranks.items():
        for section in trace.sections():
            within = [piece for piece in trace.pieces() if section.begun <= piece.begun < section.ended]
            assert sum(each.ended - each.begun for each in within) == section.ended - section.begun
            waits = [each for each in trace.waits if each.lane == MAIN and section.begun <= each.begun < section.ended]
            assert all(wait.whom for wait in waits if wait.ended > wait.begun)
            assert {rank} != {each for wait in waits for each in wait.whom}
            if rank == 0:  # it tells of steps
                elapsed = (section.ended - section.begun) / 1e6
                assert elapsed == pytest.approx(metrics[section.step]["step_ms"], rel=TOLERANCE)
    (recovered,), (fault,) = job.events("recovered"), job.events("injected")
    parts = sum(recovered[part] for part in perfetto.PARTS)
    commit = next(each.at for each in traces.ranks[0].commits if each.step == 8)
    assert parts == pytest.approx(recovered["mttr_ms"], rel=TOLERANCE)
    # The coordinator has heard of it a moment later.
    assert commit / 1e6 - fault["injected_at"] * 1e3 == pytest.approx(parts, rel=TOLERANCE, abs=5.0)
    for trace in traces.ranks.values():
        names = [piece.phase.name for piece in trace.pieces()]
        assert {"interrupt", "report", "edit", "promote", "replicate", "resume"} <= set(names)
        assert [-1] in [wait.whom for wait in trace.waits]  # for the coordinator's decision


@pytest.mark.job
def test_one_file_for_the_viewer(job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json.gz"
    assert cli.main(["trace", str(job.run_dir), "-o", str(path)]) == 0
    assert str(path) in capsys.readouterr().out
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    slices = assert_viewable(events)
    (recovered,) = job.events("recovered")
    (whole,) = [each for each in slices if each["cat"] == "recovered"]
    parts = [each for each in slices if each["cat"] == "part"]
    assert whole["dur"] == pytest.approx(recovered["mttr_ms"] * 1e3, rel=TOLERANCE)
    assert sum(each["dur"] for each in parts) == pytest.approx(whole["dur"], rel=TOLERANCE)
    operations = {(each["pid"] - 1, each["name"]) for each in slices if each["cat"] == "phase"}
    assert {(0, "forward 0"), (2, "forward 0"), (1, "backward 1"), (0, "vote"), (0, "apply")} <= operations
    assert [each for each in slices if each["cat"] == "wait" and each["name"] == "wait for the coordinator"]
    assert {each["name"] for each in events if each["ph"] == "i"} >= {"fault", "injected"}
    assert {each["name"].split()[0] for each in events if each["ph"] == "b"} >= {"reduce", "gather"}


@pytest.mark.skipif(bool(perfetto_engine.why_not()), reason=perfetto_engine.why_not())
def test_the_viewers_own_engine_reads_it(job: Job, tmp_path: Path) -> None:
    """What it has made of the file adds up, too, and nothing in it was left out."""
    path = tmp_path / "trace.json.gz"
    assert cli.main(["trace", str(job.run_dir), "-o", str(path)]) == 0
    events = Counter(event["ph"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
    metrics, (recovered,) = job.metrics(), job.events("recovered")
    with perfetto_engine.opened(path) as engine:
        assert engine.ask("select name, value from stats where severity in ('error', 'data_loss') and value > 0") == []
        (counted,) = engine.ask("select (select count(*) from slice) as slices, (select count(*) from flow) as arrows")
        assert counted == {"slices": events["X"] + events["b"] + events["i"], "arrows": events["s"]}
        steps = engine.ask("""
            select process.name as who, step.name, step.dur as took, sum(part.dur) as parts
            from slice step join slice part on part.parent_id = step.id
            join thread_track on step.track_id = thread_track.id join thread using (utid) join process using (upid)
            where step.category = 'step' and part.category = 'phase' group by step.id
        """)
        assert sorted({each["who"].split()[1] for each in steps}) == ["0", "1", "2"]
        assert {each["name"] for each in steps} >= {"step 6", "step 7", "step 8", "step 9"}
        for each in steps:
            assert each["parts"] == pytest.approx(each["took"], rel=TOLERANCE)
        told = {f"step {step}": line["step_ms"] for step, line in metrics.items() if 6 <= step <= 9}
        took = {each["name"]: each["took"] / 1e6 for each in steps if each["who"].startswith("rank 0 ")}
        assert {name: took[name] for name in told} == pytest.approx(told, rel=TOLERANCE)
        (whole,) = engine.ask("""
            select recovery.dur as took, sum(part.dur) as parts
            from slice recovery join slice part on part.parent_id = recovery.id
            where recovery.category = 'recovered' and part.category = 'part' group by recovery.id
        """)
        assert whole["parts"] == pytest.approx(whole["took"], rel=TOLERANCE)
        assert whole["took"] / 1e6 == pytest.approx(recovered["mttr_ms"], rel=TOLERANCE)


@pytest.mark.job
def test_the_critical_path_of_a_job(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    traces = Traces.read([job.run_dir])
    for step in traces.steps:
        graph = graph_of(traces, step)
        assert graph.graph.length(graph.end) == graph.elapsed
        assert sum(link.took for link in graph.links) == graph.elapsed
        assert graph.graph.length(graph.end, {"forward": 0.0, "backward": 0.0}) < graph.elapsed
    assert {link.kind for link in graph_of(traces, 8).links} & {"coordinator", "interrupt", "edit"}
    for arguments in ([], ["8"]):
        assert cli.main(["report", str(job.run_dir), "--critical-path", *arguments]) == 0
        told = capsys.readouterr().out
        assert "What determined it:" in told and "forward" in told
    assert "Step 8: " in told


def assert_viewable(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Slices of a track lie in each other or apart, tracks are named, arrows and what goes on beside begin and end."""
    named = {(e["pid"], e.get("tid")) for e in events if e["ph"] == "M"}
    slices = [event for event in events if event["ph"] == "X"]
    tracks: dict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    for event in slices:
        assert (event["pid"], event["tid"]) in named and (event["pid"], None) in named
        assert event["dur"] >= 0
        tracks[event["pid"], event["tid"]].append(event)
    for track in tracks.values():
        around: list[int] = []
        for event in sorted(track, key=lambda each: (_ns(each["ts"]), -_ns(each["dur"]))):
            begun, ended = _ns(event["ts"]), _ns(event["ts"]) + _ns(event["dur"])
            while around and around[-1] <= begun:
                around.pop()
            assert not around or ended <= around[-1], event
            around.append(ended)
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    assert ends.keys() == begins.keys()
    assert all(begins[each]["ts"] <= ends[each]["ts"] for each in ends)
    beside = {mark: sorted(e["id2"]["local"] for e in events if e["ph"] == mark) for mark in "be"}
    assert beside["b"] == beside["e"]
    return slices


def _ns(us: float) -> int:
    return round(us * 1e3)
