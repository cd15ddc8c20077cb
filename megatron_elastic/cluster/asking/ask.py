"""Ask: what a person wants of a running job, and the answer. The job is named by its run directory, or by HOST:PORT of
the node that coordinates, with its token in the environment.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TypeVar

import msgspec

from megatron_elastic.cluster import wire
from megatron_elastic.cluster.messages import Answer, Drain, ReadLog, ReadRecords, Scale, Shown
from megatron_elastic.cluster.wire.address import FILE, Address, read_address
from megatron_elastic.cluster.wire.token import TOKEN_VARIABLE, token_of
from megatron_elastic.config import UsageError
from megatron_elastic.observe.place import Folder, Growth
from megatron_elastic.observe.records import RecordsError, is_run, read_events
from megatron_elastic.observe.run import OVER, RECENT, Run

WHERE = f"the job's run directory, or HOST:PORT of the node that coordinates, with {TOKEN_VARIABLE} set"
_LIMIT = 10.0
_HOST_PORT = re.compile(r"\[?(?P<host>[^/\[\]]+)\]?:(?P<port>\d{1,5})")
_answers = msgspec.msgpack.Decoder(Answer)
_shown = msgspec.msgpack.Decoder(Shown | Answer)

T = TypeVar("T")


class NoJob(Exception):
    """Nothing says that an elastic job runs there, or how it can be asked."""


class NoAnswer(Exception):
    """A job does not answer."""


def address_of(where: Path | str) -> Address:
    """How a job can be asked that somebody has named. Raises NoJob."""
    text, run_dir = str(where), Path(where)
    try:
        is_there, is_folder = run_dir.exists(), run_dir.is_dir()
    except OSError as error:
        raise NoJob(f"cannot look into {where}: {error.strerror}") from None
    if not is_there and (match := _HOST_PORT.fullmatch(text)) is not None:
        try:
            token = token_of(os.environ)
        except UsageError as error:
            raise NoJob(str(error)) from None
        if token is None:
            raise NoJob(f"to ask the job at {text}, set {TOKEN_VARIABLE} to what it has on the job's nodes")
        return Address(match["host"], int(match["port"]), wire.Credentials(token))
    if not is_folder:
        raise NoJob(f"there is no directory {where}; a job elsewhere is named as HOST:PORT")
    try:
        return read_address(run_dir)
    except (OSError, ValueError):
        raise NoJob(_ended(run_dir) or f"no elastic job runs in {where} (there is no readable {FILE})") from None


def _ended(run_dir: Path) -> str | None:
    """That the job of a run directory is over, if its records say so."""
    try:
        last = next((event for event in reversed(read_events(run_dir)) if event.get("kind") in OVER), None)
    except RecordsError:
        return None
    return None if last is None else f"the job in {run_dir} has {last['kind']}: there is nobody to ask"


def answer_to(request: Scale | Drain, where: Path | str) -> Answer:
    """Ask a job, within some seconds. Raises NoJob and NoAnswer."""
    return _exchange(request, address_of(where), str(where), _answers)


def ask(where: str, request: Scale | Drain, as_json: bool) -> int:
    """Ask, and print the answer; return the exit code: 0 it will be done, 1 it will not, 2 there is no job."""
    try:
        answer = answer_to(request, where)
    except (NoJob, NoAnswer) as error:
        print(f"megatron-elastic: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, NoJob) else 1
    if as_json:
        print(json.dumps({"ok": answer.ok, "text": answer.text}))
    else:
        print(answer.text if answer.ok else f"refused: {answer.text}")
    return 0 if answer.ok else 1


def run_of(where: str) -> Run:
    """The newest records of a job: those in its run directory, or what the node that coordinates lets see of them.

    Raises RecordsError.
    """
    run_dir = Path(where)
    if not is_run(run_dir):
        try:
            return Run(Elsewhere(where, address_of(where)), RECENT)
        except NoJob as error:
            if not run_dir.is_dir():
                raise RecordsError(str(error)) from None
    return Run(Folder.of_run(run_dir), RECENT)


class Elsewhere:
    """The records of a job that is asked for them. A ``Place``."""

    def __init__(self, name: str, address: Address) -> None:
        self.name = name
        self._address = address

    def grown(self, metrics: int, events: int, epoch: int) -> Growth:
        """See ``Place``."""
        request = ReadRecords(metrics=metrics, events=events, epoch=epoch)
        try:
            answer = _exchange(request, self._address, self.name, _shown)
        except NoAnswer as error:
            raise RecordsError(str(error)) from None
        if isinstance(answer, Answer):
            raise RecordsError(answer.text)
        return answer.growth

    def log(self, rank: int) -> str:
        """See ``Place``."""
        try:
            return _exchange(ReadLog(rank=rank), self._address, self.name, _answers).text
        except NoAnswer as error:
            return str(error)


def _exchange(
    request: Scale | Drain | ReadRecords | ReadLog, address: Address, name: str, decoder: msgspec.msgpack.Decoder[T]
) -> T:
    """Raises NoAnswer."""
    try:
        with wire.connect(address.host, address.port, address.credentials, _LIMIT, _LIMIT) as sock:
            sock.settimeout(_LIMIT)
            sock.sendall(wire.encode(request))
            payload = wire.receive_frame(sock)
        if payload is None:
            raise wire.WireError("it closed the connection, as a node does that coordinates no longer")
        return wire.decode(payload, decoder)
    except (OSError, UnicodeError, UsageError, wire.WireError) as error:  # UnicodeError: of a name no host has
        raise NoAnswer(f"the job of {name} does not answer: {error}") from None
