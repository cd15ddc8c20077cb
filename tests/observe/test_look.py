"""Status over the network: what the node that coordinates lets see, and to whom."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from megatron_elastic import cli
from megatron_elastic.cluster.asking.ask import address_of, run_of
from megatron_elastic.cluster.coordination.server import Server
from megatron_elastic.cluster.wire.address import Address, leave_address
from megatron_elastic.observe import place
from megatron_elastic.observe.records import RecordsError, RunRecords
from megatron_elastic.observe.run import Run
from megatron_elastic.observe.status import status
from tests.node.test_uplink import CONFIG, CREDENTIALS, Heard
from tests.observe.test_observe import bytes_read, line, write_run

TOKEN = "MEGATRON_ELASTIC_TOKEN"
T = TypeVar("T")


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN, CREDENTIALS.token)


def served(run_dir: Path, look: Callable[[str], T], coordinates: bool = True) -> T:
    """What somebody sees who is told where the node is that has these records."""

    async def main() -> T:
        server = Server(CONFIG, CREDENTIALS, run_dir, lambda line: None)
        server.coordinator = Heard(1) if coordinates else None
        port = server.listen("127.0.0.1", 0)
        try:
            return await asyncio.to_thread(look, f"127.0.0.1:{port}")
        finally:
            await server.close(5.0)

    return asyncio.run(main())


def seen(run: Run) -> dict[str, Any]:
    """What of a status does not depend on where it is seen from, and when."""
    return {name: value for name, value in status(run).items() if name not in ("run_dir", "since_last_record_s")}


@pytest.mark.usefixtures("token")
def test_the_same_is_seen_as_in_the_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in pieces, and what is written later; a rank's log, too."""
    monkeypatch.setattr(place, "_MOST", 1000)
    run_dir = write_run(tmp_path / "run", [3.0 - 0.01 * step for step in range(50)])
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "rank1.log").write_text("hello from rank 1\n")

    def look(where: str) -> None:
        run, here = run_of(where), Run.of_folder(run_dir)
        assert run.place.name == where and run.metrics[-1]["step"] == 50
        assert seen(run) == seen(here)
        assert (run.age() or 0.0) == pytest.approx(here.age(), abs=5)
        records = RunRecords(run_dir)
        records.metrics(line(51, 1.0))
        records.close()
        run.refresh()
        here.refresh()
        assert run.metrics[-1]["step"] == 51 and seen(run) == seen(here)
        assert run.place.log(1) == "hello from rank 1\n"
        assert "No such file" in run.place.log(7)

    served(run_dir, look)


def test_of_a_log_the_end_is_read_however_long_it_is(tmp_path: Path) -> None:
    """Who coordinates reads it for others."""
    log = tmp_path / "logs" / "rank1.log"
    log.parent.mkdir()
    log.write_bytes(b"".join(b"step %d \xff\r\n" % step for step in range(1_000_000)))
    before = bytes_read()
    shown = place.Folder(tmp_path).log(1)
    assert bytes_read() - before < 2_000_000 < log.stat().st_size
    assert shown == "".join(f"step {step} \ufffd\n" for step in range(999_800, 1_000_000))
    log.write_text(5_000_000 * "x")
    assert len(place.Folder(tmp_path).log(1)) < 2_000_000
    log.write_text("")
    assert place.Folder(tmp_path).log(1) == f"{log} is empty"


@pytest.mark.usefixtures("token")
def test_a_job_that_has_no_step_yet_is_beginning(tmp_path: Path) -> None:
    assert served(tmp_path, lambda where: status(run_of(where))["state"]) == "beginning"


def test_the_file_with_the_address_is_enough(tmp_path: Path) -> None:
    """A copy of it, where the job's run directory is not."""
    run_dir, copy = write_run(tmp_path / "run", [3.0, 2.0]), tmp_path / "copy"
    copy.mkdir()

    def look(where: str) -> int:
        host, _, port = where.rpartition(":")
        leave_address(copy, Address(host, int(port), CREDENTIALS))
        return len(run_of(str(copy)).metrics)

    assert served(run_dir, look) == 2


@pytest.mark.usefixtures("token")
def test_damaged_records_are_said_to_be(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", [3.0])
    (run_dir / "metrics.jsonl").write_text("no JSON\n")

    def look(where: str) -> None:
        with pytest.raises(RecordsError, match=rf"{where}/metrics.jsonl:1 is not a JSON object"):
            run_of(where)

    served(run_dir, look)


def test_who_may_not_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the token, with another one or a short one; and where nobody coordinates, or nobody is."""
    run_dir = write_run(tmp_path / "run", [3.0])

    def look(where: str) -> str:
        assert cli.main(["status", where]) == 2
        return capsys.readouterr().err

    assert f"to ask the job at 127.0.0.1:1, set {TOKEN}" in look("127.0.0.1:1")
    monkeypatch.setenv(TOKEN, "short")
    assert "which can be guessed" in look("127.0.0.1:1")
    monkeypatch.setenv(TOKEN, "another token, which has more than 32 characters as well")
    told = served(run_dir, look)
    assert "does not answer" in told and "token" in told
    monkeypatch.setenv(TOKEN, CREDENTIALS.token)
    assert "as a node does that coordinates no longer" in served(run_dir, look, coordinates=False)
    assert "Connection refused" in look("127.0.0.1:1")


def test_names_of_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory comes before an address."""
    monkeypatch.setenv(TOKEN, CREDENTIALS.token)
    assert address_of("host0:29500") == Address("host0", 29500, CREDENTIALS)
    assert address_of("[::1]:29500").host == "::1"
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "host0:29500", [3.0])
    leave_address(tmp_path / "host0:29500", Address("there", 1, CREDENTIALS))
    assert address_of("host0:29500").host == "there"
    assert len(run_of("host0:29500").metrics) == 1
    assert msgspec.json.decode(json.dumps(status(run_of("host0:29500"))))["run_dir"] == "host0:29500"


@pytest.mark.parametrize("command", [
    ["status"], ["report"], ["drain", "--node", "1"], ["scale", "--pp", "1"], ["compare", 300 * "x"],
])  # fmt: skip
@pytest.mark.usefixtures("token")
def test_a_directory_that_cannot_be_looked_into_is_said_to_be(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """As another user's. Root may look into all of them; but a name can be too long."""
    name = 300 * "x"
    assert cli.main([*command, name]) == 2
    assert f"error: cannot look into {name}: File name too long" in capsys.readouterr().err


@pytest.mark.usefixtures("token")
def test_a_name_that_no_host_can_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "host..0:29500"]) == 2
    assert "the job of host..0:29500 does not answer: encoding with 'idna' codec failed" in capsys.readouterr().err
