"""Traces of all formats, and the command that simulates them."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from megatron_elastic.cli import main
from megatron_elastic.fleet.capacity import ample, fifo_use, used_by_fifo
from megatron_elastic.fleet.policies import NAMES, policy
from megatron_elastic.fleet.simulated.models import MEDIUM, SMALL
from megatron_elastic.fleet.simulated.simulation import Simulation
from megatron_elastic.fleet.simulated.trace import Entry, Trace, TraceError, read

HEADER = "job_id,submission_time,duration,num_gpu\n"
FLOW = HEADER + "b,500,100,64\na,20,50.5,1\nc,500,10,8\n"
ENTRIES = [Entry("a", 20, 50.5, 1), Entry("b", 500, 100, 64), Entry("c", 500, 10, 8)]
FIGURES = {
    "mean_jct_s", "mean_elastic_jct_s", "mean_other_queue_s", "utilisation", "makespan_s", "scale_operations",
    "deadlines_met",
}  # fmt: skip


def write(folder: Path, text: str, name: str = "cluster.csv", encoding: str = "utf-8") -> Path:
    path = folder / name
    path.write_text(text, encoding=encoding)
    return path


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (FLOW, "utf-8"),
        (FLOW, "utf-8-sig"),
        (FLOW.replace("\n", "\r\n"), "utf-8"),
        (
            "Num_GPU , model,duration, Submission_Time,job_id\n64,x,100,500,b\n1,,50.5,20,a\n\n8,y,10,500,c,more\n",
            "utf-8",
        ),
        (
            '"job_id","submission_time","duration","num_gpu","note"\nb,500,100,64,"1,2"\na,20,50.5,1,\nc,500,10,8,\n',
            "utf-8",
        ),
    ],
    ids=["plain", "byte order mark", "crlf", "another order, more columns", "quoted"],
)
def test_elasticflow(tmp_path: Path, text: str, encoding: str) -> None:
    (trace,) = read(write(tmp_path, text, encoding=encoding))
    assert (trace.name, trace.entries, dict(trace.left_out)) == ("cluster", ENTRIES, {})


@pytest.mark.parametrize("comma", [";", "\t", "|"])
def test_other_commas_other_letters_and_packed_whatever_its_name(tmp_path: Path, comma: str) -> None:
    text = FLOW.replace(",", comma).replace("num_gpu", f"num_gpu{comma}user", 1)
    (trace,) = read(write(tmp_path, text, encoding="utf-16"))
    assert (trace.entries, trace.unknown) == (ENTRIES, ("user",))
    packed = tmp_path / "trace"
    packed.write_bytes(gzip.compress(text.encode()))
    assert read(packed)[0].entries == ENTRIES


def test_deadlines_of_a_trace_are_kept(tmp_path: Path) -> None:
    text = "job_id,submission_time,num_iteration,model_name,deadline,batch_size,num_gpu,duration\n" + (
        "x,16566,40285,bert,21347,64,4,3890\ny,16666,1,bert,,64,4,100\n"
    )
    (trace,) = read(write(tmp_path, text))
    first, second = trace.jobs(32, seed=1)
    assert (first.submitted, first.deadline) == (0, 21347 - 16566)
    assert 100 + 50 <= second.deadline <= 100 + 150
    assert trace.jobs(32, seed=1) == [first, second]
    assert trace.jobs(32, seed=2)[1].deadline != second.deadline


def test_helios_and_acme(tmp_path: Path) -> None:
    text = (
        "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
        "7,u,v,16,64,2,COMPLETED,2020-04-01 00:01:00,2020-04-01 00:02:00,2020-04-01 00:12:00,600,60\n"
        "8,u,v,0,64,2,COMPLETED,2020-04-01 00:01:00,2020-04-01 00:02:00,2020-04-01 00:12:00,600,60\n"
        "9,u,v,8,64,1,FAILED,2020-04-01 00:00:00+00:00,,,0,\n"
        "6,u,v,8,64,1,COMPLETED,2020-04-01T02:00:30+02:00,x,y,5,0\n"
    )
    (trace,) = read(write(tmp_path, text, "cluster_log.csv"))
    begin = 1585699200.0
    assert trace.entries == [Entry("6", begin + 30, 5, 8), Entry("7", begin + 60, 600, 16)]
    assert dict(trace.left_out) == {"without devices": 1, "without duration": 1}


def test_philly(tmp_path: Path) -> None:
    def attempt(begin: str | None, end: str | None, *gpus: int) -> dict[str, Any]:
        servers = [{"ip": f"m{n}", "gpus": [f"gpu{i}" for i in range(count)]} for n, count in enumerate(gpus)]
        return {"start_time": begin, "end_time": end, "detail": servers}

    day = "2017-10-07 "
    log = [
        {
            "status": "Pass", "vc": "v", "jobid": "one", "submitted_time": day + "01:00:00", "user": "u",
            "attempts": [
                attempt(day + "01:10:00", day + "01:11:00", 8),
                attempt(day + "02:00:00", day + "03:00:00", 8, 8),
                attempt(day + "04:00:00", None, 8),
            ],
        },
        {"jobid": "none", "submitted_time": day + "01:00:00", "attempts": []},
        {"jobid": "lost", "submitted_time": "None", "attempts": [attempt(day + "01:10:00", day + "01:11:00", 1)]},
    ]  # fmt: skip
    (trace,) = read(write(tmp_path, json.dumps(log), "cluster_job_log"))
    assert [(entry.name, entry.duration, entry.devices) for entry in trace.entries] == [("one", 60 + 3600, 16)]
    assert dict(trace.left_out) == {"without devices": 1, "without submitted_time": 1}


@pytest.mark.parametrize("header", [True, False])
def test_alibaba_2020(tmp_path: Path, header: bool) -> None:
    names = "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type\n"
    tasks = (
        "j1,worker,4,Terminated,1000,1600,600,29,50,MISC\n"
        "j1,ps,1,Terminated,1010,1700,600,29,,CPU\n"
        "j1,chief,1,Terminated,990,1500,600,29,100,V100\n"
        "j2,tensorflow,1,Running,1000,,600,29,100,V100\n"
        "j3,tensorflow,1.0,Failed,2000,2060,600,29,25.0,T4\n"
    )
    (trace,) = read(write(tmp_path, (names if header else "") + tasks, "pai_task_table.csv"))
    assert trace.entries == [Entry("j1", 990, 610, 3), Entry("j3", 2000, 60, 1)]
    assert dict(trace.left_out) == {"without devices": 1, "without end_time": 1}


def test_alibaba_2023(tmp_path: Path) -> None:
    text = (
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
        "p1,1,1,8,1000,,LS,Succeeded,100,260,160\np2,1,1,0,0,,LS,Succeeded,100,260,160\np3,1,1,1,500,,BE,Pending,100,200,\n"
    )
    (trace,) = read(write(tmp_path, text))
    assert trace.entries == [Entry("p1", 100, 100, 8)]
    assert dict(trace.left_out) == {"without devices": 1, "without scheduled_time": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("job_id,submission_time,duration\na,1,2\n", r"closest is ElasticFlow.*: num_gpu is missing.*Helios: .*Philly"),
        ("job_id,submit_time,gpu_num\na,1,2\n", r"closest is Helios.*: duration is missing"),
        ("", r"its columns \(none\)"),
        (HEADER, r"no job in it .* \(it has no lines\)"),
        (HEADER + "a,1,0,8\nb,1,5,0\n", r"\(1 without duration, 1 without devices\)"),
        (HEADER + "a,1,5,8\nb,1,five,8\n", r"line 3: duration is 'five', which is no number"),
        (HEADER + "a,1,5,\n", r"line 2: num_gpu is empty"),
        (HEADER + "a,1\n", r"line 2: num_gpu is empty"),
        (HEADER + "a,soon,5,1\n", r"line 2: submission_time is 'soon', which is neither"),
        (HEADER + "a,nan,5,1\n", r"line 2: a time is not finite"),
        (HEADER + "a,1,inf,1\n", r"line 2: a time is not finite"),
        (HEADER + "a,1,5,inf\n", r"line 2: num_gpu is 'inf', which is no number of devices"),
        (HEADER + '"a,1,5,8\n' + "b,1,5,8\n" * 20_000, r"line \d+ cannot be read .*; does a quotation end"),
        ("[1]", r"job 0: .*Philly's jobs have jobid"),
        ("[{]", r"it is no JSON"),
        ("{}", r"it is no list of jobs"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(TraceError, match=f"(?i)^{path}.*{said}"):
        read(path)


def test_what_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="no text in UTF-8"):
        read(path)
    for name in ("trace.csv.gz", "trace.tar.gz"):
        (tmp_path / name).write_bytes(b"not packed")
        with pytest.raises(TraceError, match="cannot be unpacked"):
            read(tmp_path / name)


def archive(folder: Path) -> Path:
    write(folder, FLOW, "first.csv")
    write(folder, FLOW.replace("500", "400"), "second.csv")
    write(folder, "no trace", "README")
    path = folder / "clusters.tar.gz"
    with tarfile.open(path, "w:gz") as packed:
        for name in ("second.csv", "README", "first.csv"):
            packed.add(folder / name, f"data/{name}")
        packed.add(folder / "README", "data/._first.csv")
    return path


def test_archives(tmp_path: Path) -> None:
    first, second = read(archive(tmp_path))
    assert (first.name, first.entries) == ("first", ENTRIES)
    assert (second.name, second.entries[1].submitted) == ("second", 400)
    (tmp_path / "one.csv.gz").write_bytes(gzip.compress(FLOW.encode()))
    assert read(tmp_path / "one.csv.gz")[0].entries == ENTRIES
    with tarfile.open(tmp_path / "empty.tar", "w") as packed:
        packed.add(tmp_path / "README", "README")
    with pytest.raises(TraceError, match=r"no \.csv or \.json in it"):
        read(tmp_path / "empty.tar")


def test_every_cluster_of_an_archive_has_a_name_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, FLOW)
    names = ("helios.venus.csv", "helios.earth.csv", "a/c.csv", "b/c.CSV", "at 12:00.csv")
    with tarfile.open(tmp_path / "some.tar", "w") as packed:
        for name in names:
            packed.add(tmp_path / "cluster.csv", name)
    assert run("--trace", tmp_path / "some.tar", "--policy", "fifo", "--devices", 64) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(figures["clusters"]) == {"helios.venus", "helios.earth", "a/c", "b/c", "at 12:00"}
    assert (figures["jobs"], figures["devices"]) == (3 * 5, 64 * 5)


def test_large_jobs_are_elastic() -> None:
    trace = Trace("t", [Entry("a", 0, 1, 8), Entry("b", 0, 1, 32), Entry("c", 0, 1, 64), Entry("d", 0, 1, 16)])
    assert [job.model for job in trace.jobs(32, 0)] == [None, SMALL, MEDIUM, None]
    assert [job.model for job in trace.jobs(64, 0)] == [None, None, MEDIUM, None]
    assert [job.model for job in trace.jobs(10, 0)] == [None, SMALL, MEDIUM, SMALL]


def test_ample() -> None:
    # 20 devices for 90 s, 60 for 7 s and 100 for 3 s: 60 are enough for 95 %, in whole nodes.
    spikes = [Entry("a", 0, 100, 20), Entry("b", 90, 10, 40), Entry("c", 97, 3, 40)]
    def size(*entries: Entry) -> int:
        return ample(Trace("t", list(entries)).jobs(32, 0))

    assert size(*spikes) == 64
    assert size(*spikes, Entry("d", 1e6, 0.1, 80)) == 80
    # Gaps between jobs count as well as any time.
    assert size(Entry("a", 1e9, 10, 20), Entry("b", 1e9 + 990, 10, 4)) == 24


@pytest.mark.parametrize("total", [64, 72, 200])
def test_use_is_that_of_the_simulation(total: int) -> None:
    draw = random.Random(total)
    sizes = [1, 2, 8, 16, 64]
    entries = [Entry(str(i), draw.randrange(900), draw.randrange(1, 300), draw.choice(sizes)) for i in range(200)]
    jobs = Trace("t", sorted(entries, key=lambda entry: entry.submitted)).jobs(999, 0)
    outcome = Simulation(jobs, total, policy("fifo")).run()
    assert fifo_use(jobs, total) == pytest.approx(outcome.held / outcome.capacity)


def test_as_many_as_fifo_uses() -> None:
    # Ten jobs of a node for 100 s at once: ten nodes are in use, fourteen to 10 / 14, sixteen to 10 / 16.
    together = Trace("t", [Entry(str(index), 0, 100, 8) for index in range(10)]).jobs(32, 0)
    assert [used_by_fifo(together, share) for share in (1.0, 0.7, 0.6)] == [80, 112, 128]
    # One after the other: half of two nodes is in use, so 50 % ask for two, and no cluster is smaller than a job.
    lonely = Trace("t", [Entry("a", 0, 100, 8), Entry("b", 100, 100, 8)]).jobs(32, 0)
    assert [used_by_fifo(lonely, share) for share in (1.0, 0.51, 0.5)] == [8, 8, 16]
    # Nothing is in use to 90 % here: as good as it gets.
    rare = Trace("t", [Entry("a", 0, 100, 16), Entry("b", 900, 100, 8)]).jobs(32, 0)
    assert used_by_fifo(rare, 0.9) == 16


def run(*flags: object) -> int:
    return main(["fleet", "simulate", *map(str, flags)])


def test_simulate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--trace", archive(tmp_path), "--policy", "all", "--svg", tmp_path / "p.svg", "--devices", 128) == 0
    *tables, last = capsys.readouterr().out.splitlines()
    figures = json.loads(last)
    assert (figures["jobs"], figures["devices"]) == (6, 256)
    assert set(figures["policies"]) == set(NAMES) == set(figures["clusters"]["first"]["policies"])
    assert all(set(own) >= FIGURES for own in figures["policies"].values())
    assert figures["clusters"]["second"]["devices"] == 128
    assert figures["clusters"]["second"]["elastic_jobs"] == 1
    fifo, ours = figures["policies"]["fifo"], figures["policies"]["elastic"]
    assert fifo["mean_elastic_jct_s"] == 100 > ours["mean_elastic_jct_s"]
    assert fifo["mean_jct_s"] == round((100 + 50.5 + 10) / 3, 1)
    assert next(line for line in tables if line.startswith("elastic ")).split()[1:3] == ["0.01", "h"]
    single = [own["policies"]["fifo"]["makespan_s"] for own in figures["clusters"].values()]
    assert fifo["makespan_s"] == max(single) > min(single)
    drawn = (tmp_path / "p.svg").read_text()
    assert drawn.startswith("<svg") and drawn.count("second, ") == len(NAMES)


def test_the_command_is_deterministic_and_quiet(tmp_path: Path) -> None:
    """As a process: figures on stdout, nothing that is not asked for on stderr, and no torch."""
    flags = ["fleet", "simulate", "--trace", str(write(tmp_path, FLOW)), "--policy", "elastic,fifo", "--failures", "9"]
    program = (
        "import sys; from megatron_elastic.cli import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    outs = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", program, *flags], capture_output=True, text=True, timeout=100)
        assert (done.returncode, done.stderr.strip()) == (0, "")
        outs.append(json.loads(done.stdout.splitlines()[-1]))
    for out in outs:
        del out["elapsed_s"]
        for own in [*out["policies"].values(), *out["clusters"]["cluster"]["policies"].values()]:
            del own["simulated_in_s"]
    assert outs[0] == outs[1]
    assert list(outs[0]["policies"]) == ["elastic", "fifo"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--trace", "none.csv"], "none.csv"),
        (["--trace", "TRACE", "--devices", "8"], "job b asks for 64 devices, and there are 8: set --devices higher"),
        (["--trace", "TRACE", "--policy", "best"], "there is no policy best: all, or of fifo, "),
        (["--trace", "TRACE", "--policy", ""], "there is no policy ''"),
        (["--trace", "TRACE", "--devices", "0"], "0 is not a number from 1 on"),
        (["--trace", "TRACE", "--devices", "0%"], "0% is not between 1% and 100%"),
        (["--trace", "TRACE", "--devices", "many"], "many is not a number from 1 on"),
        (["--trace", "TRACE", "--failures", "-1"], "--failures -1: it is neither a number from 0 on nor a file"),
        (["--trace", "TRACE", "--failures", "none.json"], "none.json"),
        (["--trace", "TRACE", "--failures", "TRACE"], "a trace of faults is a JSON list"),
        (["--trace", "TRACE", "--overhead", "-1"], "-1 is not a number from 0 on"),
        (["--trace", "TRACE", "--overhead", "nan"], "nan is not a number from 0 on"),
        (["--trace", "TRACE", "--cluster", "x"], "has no x, but cluster"),
        (["--trace", "TRACE", "--svg", "none/p.svg"], "none/p.svg"),
        ([], "--trace"),
    ],
)
def test_bad_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, flags: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, FLOW)
    with contextlib.suppress(SystemExit):  # argparse ends so
        assert run(*(str(path) if flag == "TRACE" else flag for flag in flags)) == 2
    printed = capsys.readouterr()
    assert "error: " in printed.err and said in printed.err
    assert printed.out == ""


def test_what_cannot_be_simulated_leaves_no_picture(tmp_path: Path) -> None:
    assert run("--trace", tmp_path / "none.csv", "--svg", tmp_path / "p.svg") == 2
    assert not (tmp_path / "p.svg").exists()


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--help")
    text = capsys.readouterr().out
    assert all(name in text for name in NAMES)
    assert "examples:" in text


def test_shared_traces(measured: Any) -> None:
    """ElasticFlow's clusters: as many jobs as were published."""
    path = os.environ.get("MEGATRON_ELASTIC_TRACES")
    if path is None:
        pytest.skip("MEGATRON_ELASTIC_TRACES names no folder with ElasticFlow's clusters")
    for trace in read(Path(path) / "elasticflow-clusters-01-to-06.tar.gz"):
        jobs = trace.jobs(32, 0)
        assert len(jobs) > 1000
        elastic = sum(job.elastic for job in jobs)
        measured(f"{trace.name}: {len(jobs)} jobs, {elastic} elastic, {ample(jobs)} devices")
