"""Control connections: what each kind of stranger can do to a job (nothing), and what those who belong to it can."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import os
import re
import resource
import select
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from megatron_elastic.cluster import wire
from megatron_elastic.cluster.messages import Answer, Failed, Heartbeat, Scale
from megatron_elastic.cluster.wire import address, connection, proof, tally
from megatron_elastic.cluster.wire.certificate import self_signed
from megatron_elastic.cluster.wire.door import Door
from megatron_elastic.cluster.wire.tls import Certificates, certificates_of, client_context, server_side_of
from megatron_elastic.cluster.wire.token import make_token, token_of
from megatron_elastic.config import ElasticConfig, UsageError
from tests.control.any_message import AnyMessage, any_message
from tests.control.fuzz_frames import read_all
from tests.launches import PROGRAMS, TOKEN, Launch, free_port, launches

HOST = "127.0.0.1"
LIMIT = 30.0
"""Seconds that a client tries to connect."""
OURS = wire.Credentials(TOKEN)
CHALLENGE = 4 + 32
"""Bytes of the only thing that a stranger is ever told."""


class DoorProcess:
    """A process with a door, and what it says."""

    def __init__(self, files: int = 0, certificates: Certificates | None = None, patience: float = 5.0) -> None:
        tls = () if certificates is None else flags(certificates)
        command = [sys.executable, str(PROGRAMS / "door.py"), str(files), str(patience), *tls]
        env = {**os.environ, wire.TOKEN_VARIABLE: TOKEN, "PYTHONPATH": str(PROGRAMS.parents[1])}
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=subprocess.STDOUT, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def connect(self, credentials: wire.Credentials = OURS, port: int | None = None,
                limit: float = LIMIT) -> ssl.SSLSocket:
        return wire.connect(HOST, port or self.port, credentials, limit, silence=10)

    def stranger(self) -> socket.socket:
        return socket.create_connection((HOST, self.port), timeout=LIMIT)

    def end(self) -> str:
        """Close the door; returns what it said."""
        output, _ = self._process.communicate("over", timeout=LIMIT)
        assert self._process.returncode == 0, output
        assert "ERROR" not in output
        assert "Traceback" not in output
        return output

    def stop(self) -> None:
        """Have it stand still."""
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def open_door(
    files: int = 0, certificates: Certificates | None = None, patience: float = 5.0
) -> Iterator[DoorProcess]:
    process = DoorProcess(files, certificates, patience)
    try:
        yield process
    finally:
        process.kill()


@pytest.fixture
def door() -> Iterator[DoorProcess]:
    with open_door() as process:
        yield process


@pytest.fixture
def hasty() -> Iterator[DoorProcess]:
    """A door that soon sends away who does not come to the point."""
    with open_door(patience=2.0) as process:
        yield process


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    with launches(tmp_path) as launch:
        yield launch


def ask(sock: socket.socket, number: int) -> str:
    """Say something as a guest, and return the answer."""
    sock.sendall(wire.encode(Scale(stages=number)))
    payload = wire.receive_frame(sock)
    assert payload is not None
    answer = wire.decode(payload, any_message)
    assert isinstance(answer, Answer)
    return answer.text


def drain(sock: socket.socket) -> bytes:
    """All that comes until the other end closes, however it does."""
    found = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while piece := sock.recv(4096):
            found += piece
    return found


def encrypted(sock: socket.socket) -> ssl.SSLSocket:
    """TLS with the door, as anybody can have it."""
    return client_context(None).wrap_socket(sock)


class Between:
    """A proxy in front of a door. ``record`` has the bytes of each connection, from the client and from the door."""

    def __init__(self, port: int, handle: Callable[[socket.socket, socket.socket], None]) -> None:
        self._listener = socket.create_server((HOST, 0))
        self.port = int(self._listener.getsockname()[1])
        self._behind = port
        self._handle = handle
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        client, _ = self._listener.accept()
        with client, socket.create_connection((HOST, self._behind)) as server:
            with contextlib.suppress(OSError):
                self._handle(client, server)

    def close(self) -> None:
        self._thread.join()
        self._listener.close()


def relay(client: socket.socket, server: socket.socket, record: tuple[bytearray, bytearray] | None = None) -> None:
    """Pass on what both say until one of them closes."""
    while True:
        ready = [end for end in (client, server) if isinstance(end, ssl.SSLSocket) and end.pending()]
        for source in ready or select.select([client, server], [], [])[0]:
            data = source.recv(65536)
            if not data:
                return
            if record is not None:
                record[source is server].extend(data)
            (server if source is client else client).sendall(data)


# ---- who belongs to the job ----------------------------------------------------------------


def test_guests_are_served_and_nothing_is_readable(door: DoorProcess) -> None:
    record = (bytearray(), bytearray())
    proxy = Between(door.port, lambda client, server: relay(client, server, record))
    with door.connect() as direct, door.connect(port=proxy.port) as through:
        assert ask(direct, 3) == "3"
        assert ask(through, 4) == "4"
        for sock in (direct, through):
            assert sock.version() == "TLSv1.3"
            session = sock.session
            assert session is not None
            assert not session.has_ticket  # nothing to resume
    proxy.close()
    for said in record:
        assert len(said) > 200
        for secret in (TOKEN.encode(), b"Scale", b"Answer", b"stages"):
            assert secret not in said
    assert "2 guests" in door.end()


def test_many_clients_at_once_are_all_let_in(door: DoorProcess) -> None:
    """Twenty times as many as may be strangers at a time."""
    async def client(number: int) -> str:
        line = await wire.AsyncWire.connect(HOST, door.port, OURS, 10, any_message, LIMIT)
        assert line.send(Scale(stages=number)) is None
        answer = await line.receive()
        line.close()
        await line.closed()
        assert isinstance(answer, Answer)
        return answer.text

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(client(number) for number in range(640)))

    assert asyncio.run(all_of_them()) == [str(number) for number in range(640)]
    assert "640 guests" in door.end()


def test_a_client_waits_for_a_door_that_opens_later() -> None:
    async def serve(line: wire.AsyncWire[AnyMessage]) -> None:
        line.send(Answer(ok=True, text=str(await line.receive())))

    async def both() -> None:
        port = free_port()
        connecting = asyncio.create_task(wire.AsyncWire.connect(HOST, port, OURS, 10, any_message, LIMIT))
        done, _ = await asyncio.wait([connecting], timeout=0.5)
        assert not done  # refused some times by now
        late = Door(OURS, any_message, serve, 10, print)
        late.open(HOST, port)
        line = await connecting
        line.send(Heartbeat())
        assert await line.receive() == Answer(ok=True, text="Heartbeat(recorded=0)")
        line.close()
        await line.closed()
        await late.close(timeout=2)
        with pytest.raises(TimeoutError, match=r"no coordinator at .* within 0.3 s: .*Connect call failed"):
            await wire.AsyncWire.connect(HOST, port, OURS, 10, any_message, 0.3)

    asyncio.run(both())


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6")
def test_a_name_with_several_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them is enough; and where nobody listens at any, that can be told from a host that is away."""
    resolve = socket.getaddrinfo

    def found(host: str, *rest: Any, **more: Any) -> list[Any]:
        hosts = ("::1", HOST) if host == "several" else (host,)
        return [each for one in hosts for each in resolve(one, *rest, **more)]

    async def serve(line: wire.AsyncWire[AnyMessage]) -> None:
        await line.receive()

    async def test() -> None:
        door = Door(OURS, any_message, serve, 10, print)
        port = door.open(HOST, 0)
        line = await wire.AsyncWire.connect("several", port, OURS, 10, any_message, LIMIT)
        line.close()
        await line.closed()
        await door.close(timeout=2)
        with pytest.raises(TimeoutError) as caught:
            await wire.AsyncWire.connect("several", port, OURS, 10, any_message, 0.3)
        assert isinstance(caught.value.__cause__, ConnectionRefusedError)

    monkeypatch.setattr(socket, "getaddrinfo", found)
    asyncio.run(test())


# ---- strangers -----------------------------------------------------------------------------


def test_who_says_nothing_is_told_nothing_but_a_challenge(hasty: DoorProcess) -> None:
    with hasty.stranger() as plain, hasty.stranger() as silent:
        with encrypted(plain) as sock:
            assert len(drain(sock)) == CHALLENGE
        assert drain(silent) == b""
    assert hasty.end().rstrip().endswith("0 guests")


def test_a_wrong_token_is_refused(door: DoorProcess) -> None:
    with pytest.raises(wire.WireError, match="refuses the job token"):
        door.connect(wire.Credentials(make_token()))

    async def connect() -> None:
        await wire.AsyncWire.connect(HOST, door.port, wire.Credentials(make_token()), 10, any_message, LIMIT)

    with pytest.raises(wire.WireError, match="refuses the job token"):
        asyncio.run(connect())
    for answer in (b"", bytes(32), bytes(64), bytes(65)):
        with door.stranger() as plain, encrypted(plain) as sock:
            sock.sendall(wire.frame(answer))
            assert len(drain(sock)) in (CHALLENGE, CHALLENGE + len(wire.frame(proof.REFUSED)))
    output = door.end()
    assert "does not know the job token" in output
    assert "0 guests" in output


def test_a_recorded_session_opens_nothing(door: DoorProcess) -> None:
    record = (bytearray(), bytearray())
    proxy = Between(door.port, lambda client, server: relay(client, server, record))
    with door.connect(port=proxy.port) as sock:
        assert ask(sock, 5) == "5"
    proxy.close()
    with door.stranger() as stranger:
        stranger.sendall(record[0])
        drain(stranger)  # it begins a handshake with new keys, which the recorded bytes do not fit
    assert "1 guests" in door.end()


def test_a_recorded_proof_opens_nothing(door: DoorProcess) -> None:
    """Even one that was taken out of the encryption."""
    with door.stranger() as plain, encrypted(plain) as sock:
        certificate = sock.getpeercert(binary_form=True)
        assert certificate is not None
        recorded = proof.ClientProof(wire.receive_frame(sock), proof.fingerprint(certificate), TOKEN).frame
        sock.sendall(wire.frame(recorded))
        assert len(wire.receive_frame(sock) or b"") == 32  # that one was right
    with door.stranger() as plain, encrypted(plain) as sock:
        sock.sendall(wire.frame(recorded))
        assert len(drain(sock)) == CHALLENGE + len(wire.frame(proof.REFUSED))
    assert "1 guests" in door.end()


def man_in_the_middle(answer: Callable[[ssl.SSLSocket, ssl.SSLSocket], None]) -> Callable[..., None]:
    """What to do with two connections, each of which ends here: one with a certificate of ours, one as a client."""
    def handle(client: socket.socket, server: socket.socket) -> None:
        with server_side_of(self_signed()).context.wrap_socket(client, server_side=True) as near:
            with encrypted(server) as far:
                answer(near, far)

    return handle


def forge(near: ssl.SSLSocket, far: ssl.SSLSocket) -> None:
    """Let the client prove itself, and make an answer up."""
    near.sendall(far.recv(CHALLENGE))
    near.recv(4096)
    near.sendall(wire.frame(bytes(32)))
    drain(near)


def reflect(near: ssl.SSLSocket, far: ssl.SSLSocket) -> None:
    """Let the client prove itself, and give its own proof back as the server's."""
    near.sendall(far.recv(CHALLENGE))
    near.sendall(wire.frame(near.recv(4096)[-32:]))
    drain(near)


@pytest.mark.parametrize("answer", [relay, forge, reflect])
def test_a_man_in_the_middle_is_found(door: DoorProcess, answer: Callable[..., None]) -> None:
    proxy = Between(door.port, man_in_the_middle(answer))
    with pytest.raises(wire.WireError, match="job token"):
        door.connect(port=proxy.port)
    proxy.close()
    assert door.end().rstrip().endswith("0 guests")


def test_older_versions_are_refused(door: DoorProcess) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with door.stranger() as plain, pytest.raises(ssl.SSLError):
        context.wrap_socket(plain)
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_server((HOST, 0)) as listener:
        thread = threading.Thread(target=answer_once, args=(listener, old))
        thread.start()
        with pytest.raises(wire.WireError, match="no TLS connection"):
            door.connect(port=listener.getsockname()[1])
        thread.join()
    assert "UNSUPPORTED_PROTOCOL" in door.end()


def answer_once(listener: socket.socket, context: ssl.SSLContext) -> None:
    sock, _ = listener.accept()
    with sock, contextlib.suppress(OSError):
        context.wrap_socket(sock, server_side=True)


def hello() -> bytes:
    """What a TLS client says first."""
    said = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        client_context(None).wrap_bio(ssl.MemoryBIO(), said).do_handshake()
    return said.read()


@pytest.mark.parametrize(
    "said",
    [b"\xff" * 100, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(1 << 20), b"\x16\x03\x01\xff\xff" + bytes(1 << 16),
     hello()[:60] + b"\xff" * 600, b"\n"],
    ids=["garbage", "http", "zeros", "longest", "almost", "newline"],
)
@pytest.mark.parametrize("in_tls", [False, True], ids=["plain", "tls"])
def test_garbage(hasty: DoorProcess, said: bytes, in_tls: bool) -> None:
    with hasty.connect() as guest:
        with hasty.stranger() as plain, encrypted(plain) if in_tls else plain as sock:
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                sock.sendall(said)
            assert len(drain(sock)) < 60
        assert ask(guest, 1) == "1"
    assert "1 guests" in hasty.end()


@pytest.mark.parametrize("pieces", [[hello()[:60]], [hello()], [hello()[i : i + 1] for i in range(200)]],
                         ids=["half a greeting", "half a handshake", "byte by byte"])
def test_who_does_not_come_to_the_point_is_sent_away(hasty: DoorProcess, pieces: Sequence[bytes]) -> None:
    with hasty.connect() as guest, hasty.stranger() as stranger:
        sent = 0
        for piece in pieces:
            if select.select([stranger], [], [], 0.1)[0]:  # the fault itself: it takes its time
                break
            stranger.sendall(piece)
            sent += 1
        assert sent < 60
        drain(stranger)  # ends when the door has closed
        assert ask(guest, 1) == "1"
    output = hasty.end()
    assert "had not proven that it knows the job token within 2 s" in output
    assert "1 guests" in output


def idle_connections(port: int, count: int) -> list[socket.socket]:
    """Connections that say nothing; as many as the kernel takes stay in the backlog."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    found = []
    for _ in range(count):
        sock = socket.socket()
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            sock.connect((HOST, port))
        found.append(sock)
    return found


@pytest.mark.parametrize(("files", "flood"), [(256, 1500), (40, 400)])
def test_a_flood_of_idle_connections(files: int, flood: int) -> None:
    """Many more than the process may open."""
    with open_door(files) as door, door.connect() as guest, contextlib.ExitStack() as stack:
        for sock in idle_connections(door.port, flood):
            stack.enter_context(sock)
        assert ask(guest, 1) == "1"
        with door.connect() as late:
            assert ask(late, 2) == "2"
        assert ask(guest, 3) == "3"
        output = door.end()
    assert "2 guests" in output
    assert output.count("\n") < 10


def test_a_house_that_is_full() -> None:
    """No file is left for one more client: those who are there are served, and it gets in when one of them leaves."""
    with open_door(40) as door:
        with door.connect() as first, contextlib.ExitStack() as others:
            with contextlib.suppress(OSError):
                for number in range(40):
                    ask(others.enter_context(door.connect(limit=1.0)), number)
            late = LateClient(door)
            assert ask(first, 2) == "2"
            others.close()
            assert late.answer() == "9"
        assert "cannot accept a connection: [Errno 24]" in door.end()


class LateClient:
    """A client that connects on a thread of its own."""

    def __init__(self, door: DoorProcess) -> None:
        self._answer = ""
        self._door = door
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._door.connect() as sock:
            self._answer = ask(sock, 9)

    def answer(self) -> str:
        self._thread.join()
        return self._answer


def test_a_flood_does_not_end_a_job(launch: Launch) -> None:
    """A real job, whose launcher may open 256 files; another node gets in meanwhile."""
    launch.env[wire.TOKEN_VARIABLE] = TOKEN
    port = free_port()
    nodes = [("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1", "--master-addr", HOST,
              "--master-port", str(port)) for node in (0, 1)]
    first = launch.start("member.py", "--elastic", *launch.member_flags(), name="first", flags=nodes[0])
    resource.prlimit(first.process.pid, resource.RLIMIT_NOFILE, (256, 256))
    first.read_until("2 ranks of")
    with contextlib.ExitStack() as stack:
        for sock in idle_connections(port, 1500):
            stack.enter_context(sock)
        second = launch.start("member.py", "--elastic", *launch.member_flags(), name="second", flags=nodes[1])
        first.finish()
        second.finish()
    assert first.steps() == [1, 2, 3, 4]
    assert first.output.count("stranger") + first.output.count("closed a connection") < 10


def test_a_guest_that_says_no_message_is_sent_away_alone(door: DoorProcess) -> None:
    with door.connect() as guest, door.connect() as other:
        other.sendall(wire.frame(b"\xc1"))
        assert drain(other) == b""
        assert ask(guest, 1) == "1"
    with door.connect() as other:
        other.sendall(b"\xff" * 4)
        assert drain(other) == b""
    output = door.end()
    assert "no message" in output
    assert "received a frame of 4294967295 bytes" in output


def test_strangers_get_few_lines() -> None:
    said: list[str] = []

    async def note() -> None:
        lines = tally.Tally(said.append, "connections of strangers were closed")
        for number in range(1000):
            lines.note(f"closed {number}")
        lines.close()

    asyncio.run(note())
    assert said == ["closed 0", "999 more connections of strangers were closed; the last one: closed 999"]


# ---- frames --------------------------------------------------------------------------------


def test_mutated_frames_are_messages_or_refused() -> None:
    """A hundred thousand; ``python -m tests.control.fuzz_frames 1000000 SEED`` reads more."""
    found = read_all(any_message, 100_000, seed=10)
    assert found.total() == 100_000
    assert all(found[kind] > 1000 for kind in ("messages", "ends", "refused"))


@pytest.mark.parametrize(
    "payload",
    [b"\x82\xa4type\xa9Heartbeat\xa1x" + b"\x91" * 5000 + b"\xc0",
     b"\x83\xa4type\xa6Failed\xa4rank\x01\xa9traceback\xa1\xff"],
    ids=["deep", "no text"],
)
def test_what_is_no_message_is_refused_whatever_is_wrong(payload: bytes) -> None:
    with pytest.raises(wire.WireError, match="no message"):
        wire.decode(payload, any_message)


def test_a_message_that_cannot_be_sent_is_not_the_receivers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[AnyMessage | None] = []

    async def serve(line: wire.AsyncWire[AnyMessage]) -> None:
        received.append(await line.receive())
        line.abort()

    async def both() -> None:
        door = Door(OURS, any_message, serve, 10, print)
        line = await wire.AsyncWire.connect(HOST, door.open(HOST, 0), OURS, 10, any_message, LIMIT)
        problem = line.send(Failed(rank=1, traceback="x" * (64 << 20)))
        assert isinstance(problem, wire.Unsendable)
        longer = r"a Failed of 671089\d\d bytes is longer than a message may be \(67108864 bytes\)"
        assert re.fullmatch(longer, str(problem))
        assert isinstance(line.send(Failed(rank=1, traceback="\udcff")), wire.Unsendable)
        assert line.send_encoded(wire.encode(Heartbeat())) is None
        assert await line.receive() is None
        assert received == [Heartbeat()]
        await line.closed()
        assert isinstance(line.send(Heartbeat()), wire.Broken)
        await door.close(timeout=2)

    asyncio.run(both())


def test_a_reader_that_does_not_read_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "UNSENT_LIMIT", 1 << 20)

    async def serve(line: wire.AsyncWire[AnyMessage]) -> None:
        await asyncio.Event().wait()

    async def both() -> None:
        door = Door(OURS, any_message, serve, 10, print)
        line = await wire.AsyncWire.connect(HOST, door.open(HOST, 0), OURS, 10, any_message, LIMIT)
        big = wire.encode(Failed(rank=1, traceback="x" * (1 << 20)))
        problem = None
        for _ in range(100):
            problem = problem or line.send_encoded(big)
        assert isinstance(problem, wire.Broken)
        assert "does not read" in str(problem)
        assert await line.receive() is None
        await door.close(timeout=0)

    asyncio.run(both())


@pytest.mark.parametrize("unread", [False, True], ids=["closed", "reset"])
def test_what_the_other_end_said_last_is_read_whatever_is_said_to_it_meanwhile(
    door: DoorProcess, unread: bool
) -> None:
    """Who stood still has much to say, and says it before it has looked what has come."""

    async def stand_still() -> None:
        line = await wire.AsyncWire.connect(HOST, door.port, OURS, 10, any_message, LIMIT)
        assert line.send(Scale(stages=7)) is None
        # The answer is here, and the event loop has not looked.
        assert select.select([line._writer.get_extra_info("socket")], [], [], LIMIT)[0]
        if unread:
            door.stop()
            line.send(Scale(stages=8))
        door.kill()
        problems = [line.send(Scale(stages=number)) for number in range(3)]
        assert all(isinstance(problem, wire.Broken) for problem in problems)
        answer = await line.receive()
        assert isinstance(answer, Answer)
        assert "7" in answer.text
        assert await line.receive() is None
        line.close()

    asyncio.run(stand_still())


# ---- the token and its file ----------------------------------------------------------------


def test_short_tokens_are_refused(launch: Launch) -> None:
    assert token_of({}) is None
    assert token_of({wire.TOKEN_VARIABLE: make_token()}) is not None
    launch.env[wire.TOKEN_VARIABLE] = "x" * 31
    output = launch.start("plain.py").finish(code=2)
    assert "has 31 characters, which can be guessed; give at least 32" in output
    assert "openssl rand -hex 32" in output
    del launch.env[wire.TOKEN_VARIABLE]
    several = ("--nnodes", "2", "--master-addr", HOST)
    assert "several nodes need" in launch.start("plain.py", flags=several).finish(code=2)


HERE = address.Address("h", 1, OURS)


def test_tokens_that_are_no_text_are_refused() -> None:
    """They could not be written down for those who ask."""
    with pytest.raises(UsageError, match="MEGATRON_ELASTIC_TOKEN has bytes that are no UTF-8"):
        token_of({wire.TOKEN_VARIABLE: f"{TOKEN}\udcff"})


def test_the_address_is_the_owners_alone(tmp_path: Path) -> None:
    leftover = tmp_path / address.FILE
    leftover.write_text("of a dead job")
    leftover.chmod(0o644)
    with leftover.open() as held:
        address.leave_address(tmp_path, HERE)
        assert held.read() == "of a dead job"  # who had that file open does not get the token
    assert stat.S_IMODE(leftover.stat().st_mode) == 0o600
    assert address.read_address(tmp_path) == HERE
    address.remove_address(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_links_in_place_of_the_address_are_not_followed(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / address.FILE
    victim.write_text("precious")
    link.symlink_to(victim)
    with pytest.raises(OSError):
        address.read_address(tmp_path)
    address.leave_address(tmp_path, HERE)
    assert not link.is_symlink()
    assert victim.read_text() == "precious"
    address.remove_address(tmp_path)
    os.mkfifo(link)
    with pytest.raises(ValueError):
        address.read_address(tmp_path)
    link.unlink()
    link.mkdir()
    with pytest.raises(OSError):
        address.leave_address(tmp_path, HERE)
    assert sorted(path.name for path in tmp_path.iterdir()) == [address.FILE, "victim"]  # no token is left behind


# ---- the user's certificates ---------------------------------------------------------------


class Authority:
    """Signs certificates; files are in ``path``."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.file = path / f"{name}.pem"
        self.file.write_bytes(self._certificate(name, self._key, days=1).public_bytes(serialization.Encoding.PEM))

    def _certificate(self, name: str, key: ec.EllipticCurvePrivateKey, days: int) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        called, by = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each)]) for each in (name, self._name))
        return (
            x509.CertificateBuilder().subject_name(called).issuer_name(by).public_key(key.public_key())
            .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(days=9))
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=name == self._name, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def sign(self, name: str, days: int = 1, passphrase: bytes | None = None) -> Certificates:
        key = ec.generate_private_key(ec.SECP256R1())
        cert, secret = self._path / f"{name}.cert", self._path / f"{name}.key"
        cert.write_bytes(self._certificate(name, key, days).public_bytes(serialization.Encoding.PEM))
        lock = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
        secret.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock))
        return Certificates(str(cert), str(secret), str(self.file))


def flags(certificates: Certificates) -> tuple[str, ...]:
    return ("--elastic-tls-cert", certificates.cert, "--elastic-tls-key", certificates.key,
            "--elastic-tls-ca", certificates.ca)


def test_with_certificates_clients_need_one_as_well(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    with open_door(certificates=ours.sign("server")) as door:
        with door.connect(wire.Credentials(TOKEN, ours.sign("client"))) as guest:
            assert ask(guest, 1) == "1"
            with pytest.raises(wire.WireError, match="no TLS connection"):  # this client does not trust the door either
                door.connect(wire.Credentials(TOKEN, theirs.sign("stranger")))
            for wrong in (None, Certificates(*_mixed(ours, theirs))):
                with pytest.raises(ConnectionError, match="--elastic-tls flags"):
                    door.connect(wire.Credentials(TOKEN, wrong), limit=0.1)

            async def connect() -> None:
                await wire.AsyncWire.connect(HOST, door.port, OURS, 10, any_message, 1.0)

            with pytest.raises(TimeoutError, match="--elastic-tls flags"):
                asyncio.run(connect())
            with pytest.raises(wire.WireError, match="refuses the job token"):
                door.connect(wire.Credentials(make_token(), ours.sign("client")))
            assert ask(guest, 2) == "2"
        assert "1 guests" in door.end()


def test_certificates_may_be_replaced_while_a_door_is_open(tmp_path: Path) -> None:
    """By other links, as Kubernetes does, or by other contents. Halves are not taken for the whole."""
    authority = Authority(tmp_path, "authority")
    old, new, client = (authority.sign(name) for name in ("old", "new", "client"))
    links = Certificates(str(tmp_path / "link.cert"), str(tmp_path / "link.key"), old.ca)

    def link(file: str, target: str) -> None:
        os.symlink(target, tmp_path / "fresh")
        os.replace(tmp_path / "fresh", file)

    link(links.cert, old.cert)
    link(links.key, old.key)
    with open_door(certificates=links) as door:
        def shown() -> bytes | None:
            with door.connect(wire.Credentials(TOKEN, client)) as guest:
                assert ask(guest, 1) == "1"
                return guest.getpeercert(binary_form=True)

        def certificate(file: str) -> bytes:
            return ssl.PEM_cert_to_DER_cert(Path(file).read_text())

        before = certificate(old.cert)
        assert shown() == before
        link(links.cert, new.cert)
        assert shown() == before, "its key is not there yet"
        link(links.key, new.key)
        assert shown() == certificate(new.cert)
        authority.sign("new")
        assert shown() == certificate(new.cert)
        door.end()


def test_a_client_waits_for_its_certificates_to_be_replaced(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    certificates = authority.sign("client")

    async def connect(port: int) -> None:
        os.replace(certificates.key, tmp_path / "hidden")
        connecting = asyncio.create_task(wire.AsyncWire.connect(
            HOST, port, wire.Credentials(TOKEN, certificates), 10, any_message, LIMIT))
        done, _ = await asyncio.wait([connecting], timeout=0.5)
        assert not done
        authority.sign("client")
        line = await connecting
        line.close()
        await line.closed()

    with open_door(certificates=authority.sign("server")) as door:
        asyncio.run(connect(door.port))
        Path(certificates.key).write_text("no key")
        with pytest.raises(UsageError, match="no certificate and its key"):
            door.connect(wire.Credentials(TOKEN, certificates), limit=0.1)
        door.end()


def _mixed(ours: Authority, theirs: Authority) -> tuple[str, str, str]:
    """A certificate of the wrong authority, by one who trusts the right one."""
    stranger = theirs.sign("stranger")
    return stranger.cert, stranger.key, str(ours.file)


def test_a_job_with_certificates(launch: Launch, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    launch.env[wire.TOKEN_VARIABLE] = TOKEN
    port = str(free_port())
    first, second = (
        launch.start("member.py", "--elastic", *launch.member_flags(), *flags(authority.sign(f"node{node}")),
                     name=f"run{node}",
                     flags=("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1", "--master-addr", HOST,
                            "--master-port", port))
        for node in (0, 1)
    )
    first.finish()
    second.finish()
    assert first.steps() == [1, 2, 3, 4]


def test_certificates_that_cannot_work_are_refused_at_the_start(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path, "authority"), Authority(tmp_path, "other")
    good = authority.sign("good")

    def refused(message: str, cert: str = good.cert, key: str = good.key, ca: str = good.ca) -> None:
        with pytest.raises(UsageError, match=message):
            certificates_of(ElasticConfig(tls_cert=Path(cert), tls_key=Path(key), tls_ca=Path(ca)))

    assert certificates_of(ElasticConfig()) is None
    assert certificates_of(ElasticConfig(tls_cert=Path(good.cert), tls_key=Path(good.key),
                                         tls_ca=Path(good.ca))) == good
    named = tmp_path / "named"
    named.write_bytes("Name: Zürich\n".encode("latin-1") + Path(good.cert).read_bytes())
    assert certificates_of(ElasticConfig(tls_cert=named, tls_key=Path(good.key), tls_ca=Path(good.ca))) is not None
    refused("cannot read", cert=str(tmp_path / "nowhere"))
    refused("cannot read", ca=str(tmp_path))
    refused("no certificate and its key", key=authority.sign("another").key)
    refused("no certificate and its key", cert=good.key)
    refused("has no certificate", ca=good.key)
    refused("would not be accepted", ca=str(other.file))
    late, locked = authority.sign("late", days=-1), authority.sign("locked", passphrase=b"x")
    refused("certificate has expired", cert=late.cert, key=late.key)
    refused("asks for a passphrase", cert=locked.cert, key=locked.key)
    with pytest.raises(UsageError, match="--elastic-tls-ca must be given"):
        ElasticConfig(tls_cert=Path(good.cert), tls_key=Path(good.key))
