"""Leadership: one leader a term, terms that grow, and what is recorded outlives whoever recorded it."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import importlib
import ipaddress
import os
import pickle
import random
import socket
import struct
import threading
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import namespaces
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from hypothesis import given
from hypothesis import strategies as st
from pysyncobj.encryptor import getEncryptor

from megatron_elastic.cluster.leadership import (
    Choice,
    Deposed,
    Durable,
    Leader,
    Place,
    Store,
    StoreError,
    make,
    parse,
    reserve,
    seats,
)
from megatron_elastic.cluster.leadership.leased import Leased, Unreachable
from megatron_elastic.cluster.leadership.raft import Book, Raft, password
from megatron_elastic.cluster.leadership.store import pack
from megatron_elastic.config import UsageError
from tests.fleet.kubernetes_api import Leases
from tests.schedules.candidates import TOKEN, Candidate, EtcdServer, Group, group

LIMIT = 1.0
"""Seconds without the leader until others stand for election, where Raft is embedded."""
LEASE = 2.0
"""The same where there is a lease; etcd has no shorter ones."""


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path)
    try:
        server.start()
        yield server
    finally:
        server.kill()


# ---- the contract, for every store ----------------------------------------------------------


class Setting:
    """A store, and all who use it in this process."""

    def __init__(self, make_all: Callable[[], list[Store]]) -> None:
        self.make_all = make_all

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[list[Store]]:
        stores = self.make_all()
        try:
            await asyncio.gather(*(store.open() for store in stores))
            yield stores
        finally:
            await asyncio.gather(*(store.close() for store in stores))


def embedded_stores(members: int = 3) -> list[Store]:
    sockets = [reserve() for _ in range(members)]
    addresses = tuple(f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets)
    return [make(Choice("embedded"), "test", LIMIT, place=Place(addresses, TOKEN, me, sock))
            for me, sock in zip(addresses, sockets, strict=True)]


SHARED = ("embedded", "etcd", "kubernetes")


@pytest.fixture(params=("alone", *SHARED))
def setting(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Setting]:
    # What must not be asked about machines that are near.
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    match request.param:
        case "alone":
            yield Setting(lambda: [make(Choice("alone"), "test", LIMIT)])
        case "embedded":
            yield Setting(embedded_stores)
        case "etcd":
            server = request.getfixturevalue("etcd")
            yield Setting(lambda: [make(parse(server.url, 3), "test", LEASE) for _ in range(3)])
        case "kubernetes":
            api = Leases(tmp_path)
            monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig))
            try:
                yield Setting(lambda: [make(parse("kubernetes://there/job", 3), "test", 1.0) for _ in range(3)])
            finally:
                api.close()


@contextlib.asynccontextmanager
async def campaigning(stores: list[Store]) -> AsyncIterator[list[asyncio.Task[int]]]:
    """All ``stores`` campaign."""
    campaigns = [asyncio.create_task(store.lead(f"node{i}:1")) for i, store in enumerate(stores)]
    try:
        yield campaigns
    finally:
        for task in campaigns:
            task.cancel()
        await asyncio.gather(*campaigns, return_exceptions=True)


async def won(campaigns: list[asyncio.Task[int]]) -> tuple[int, int]:
    """(place, term) of the first of ``campaigns`` that is won."""
    done, _ = await asyncio.wait(campaigns, return_when=asyncio.FIRST_COMPLETED)
    (task,) = done
    return campaigns.index(task), task.result()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await test()

    asyncio.run(limited())


@pytest.mark.job
def test_one_leads_and_all_learn_it(setting: Setting) -> None:
    async def test() -> None:
        async with setting.opened() as stores, campaigning(stores) as campaigns:
            place, term = await won(campaigns)
            for store in stores:
                assert await store.followed(0) == store.leader() == Leader(term, f"node{place}:1")
            assert sum(task.done() for task in campaigns) == 1
            for i, store in enumerate(stores):
                if i != place:
                    await store.deposed(term)  # whoever does not lead is not sure to lead
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stores[place].deposed(term), 0.1)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stores[place].followed(term), 0.1)

    run(test)


@pytest.mark.job
def test_what_is_recorded_is_seen_by_all(setting: Setting) -> None:
    async def test() -> None:
        async with setting.opened() as stores, campaigning(stores) as campaigns:
            place, term = await won(campaigns)
            assert await stores[place].recall() is None
            for step in range(3):
                durable = Durable(term, 7, step)
                await stores[place].record(durable)
                for store in stores:
                    assert await store.recall() == durable

    run(test)


@pytest.mark.job
def test_only_the_newest_term_records(setting: Setting) -> None:
    async def test() -> None:
        async with setting.opened() as stores, campaigning(stores) as campaigns:
            place, term = await won(campaigns)
            durable = Durable(term, 1, 1)
            await stores[place].record(durable)
            for i, store in enumerate(stores):
                for wrong in {term - 1, term + 1, term if i != place else 0}:
                    with pytest.raises(Deposed):
                        await store.record(Durable(wrong, 9, 9))
            assert await stores[place].recall() == durable

    run(test)


@pytest.mark.job
@pytest.mark.parametrize("setting", SHARED, indirect=True)
def test_a_leader_that_leaves_is_followed_by_another(setting: Setting) -> None:
    async def test() -> None:
        async with setting.opened() as stores, campaigning(stores) as campaigns:
            place, term = await won(campaigns)
            durable = Durable(term, 3, 4)
            await stores[place].record(durable)
            await stores[place].close()
            others = [campaign for i, campaign in enumerate(campaigns) if i != place]
            _, later = await won(others)
            assert later > term
            new = next(store for store, campaign in zip(stores, campaigns, strict=True)
                       if campaign.done() and campaign.result() == later)
            assert await new.recall() == durable
            await new.record(Durable(later, 5, 6))
            assert (await new.recall()) == Durable(later, 5, 6)

    run(test)


@pytest.mark.job
def test_waits_can_be_cancelled(setting: Setting) -> None:
    async def test() -> None:
        async with setting.opened() as stores:
            for wait in (stores[0].followed(10**9), stores[0].followed(0)):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(wait, 0.05)
            async with campaigning(stores) as campaigns:
                place, term = await won(campaigns)
                task = asyncio.create_task(stores[place].record(Durable(term, 1, 1)))
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await stores[place].record(Durable(term, 2, 2))
                found = await stores[place].recall()
                assert found is not None and found.epoch == 2

    run(test)


@pytest.mark.job
@pytest.mark.parametrize("setting", ["etcd", "kubernetes"], indirect=True)
def test_a_record_that_was_given_up_never_comes_after_a_later_one(setting: Setting) -> None:
    """It goes on in its thread; here until the later one would long have been written."""
    begun, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

    def late(write: Callable[[Durable], bool], durable: Durable) -> bool:
        if durable.epoch == 1:
            begun.set()
            goes_on.wait(20)
        try:
            return write(durable)
        finally:
            if durable.epoch == 1:
                ended.set()

    async def test() -> None:
        async with setting.opened() as stores, campaigning(stores) as campaigns:
            place, term = await won(campaigns)
            leader: Leased = stores[place]  # type: ignore[assignment]
            leader._backend.write = functools.partial(late, leader._backend.write)  # type: ignore[method-assign]
            first = asyncio.create_task(leader.record(Durable(term, 1, 1)))
            await asyncio.to_thread(begun.wait, 20)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            second = asyncio.create_task(leader.record(Durable(term, 2, 2)))
            await asyncio.wait({second}, timeout=0.5)
            goes_on.set()
            await second
            await asyncio.to_thread(ended.wait, 20)
            assert await leader.recall() == Durable(term, 2, 2)

    run(test)


class Refusing:
    """A store in memory, which refuses one operation as often as it is told to."""

    def __init__(self, operation: str, times: float) -> None:
        self.limit = 1.0
        self._operation, self._times = operation, times
        self._leader: Leader | None = None
        self._durable: Durable | None = None
        self.resigned: list[int] = []

    def _may(self, operation: str) -> None:
        if operation == self._operation and self._times > 0:
            self._times -= 1
            raise StoreError("it has no room")

    def claim(self, address: str) -> int | None:
        self._may("claim")
        self._leader = Leader(1, address)
        return 1

    def renew(self, term: int) -> bool:
        self._may("renew")
        return True

    def resign(self, term: int) -> None:
        self.resigned.append(term)

    def write(self, durable: Durable) -> bool:
        self._may("write")
        self._durable = durable
        return True

    def read(self) -> Durable | None:
        self._may("read")
        return self._durable

    def holder(self) -> Leader | None:
        self._may("holder")
        return self._leader

    def close(self) -> None:
        pass


@pytest.mark.parametrize("operation", ["write", "read", "holder"])
def test_what_a_store_refuses_once_is_asked_again_and_ends_nothing(operation: str) -> None:
    notes: list[str] = []

    async def test() -> None:
        backend = Refusing("none", 0)
        store = Leased(backend, notes.append)
        await store.open()
        term = await store.lead("a:1")
        backend._operation, backend._times = operation, 2
        await store.record(Durable(term, 3, 4))
        assert await store.recall() == Durable(term, 3, 4)
        assert await store.followed(0) == Leader(term, "a:1")
        await store.close()

    asyncio.run(test())
    assert notes == ["--elastic-store: it has no room; it is asked again, and training goes on meanwhile"]


def test_who_is_refused_the_lease_for_too_long_leads_no_more_and_no_sooner() -> None:
    async def test() -> None:
        backend = Refusing("renew", float("inf"))
        store = Leased(backend)
        await store.open()
        term = await store.lead("a:1")
        await store.deposed(term)
        with pytest.raises(Deposed):
            await store.record(Durable(term, 1, 1))
        await store.close()
        assert backend.resigned == [term]

    asyncio.run(test())


def test_who_leads_once_a_store_is_back_that_was_away_for_long_leads() -> None:
    """A lease counts from when it was asked for with success, not from the first attempt."""

    class Away(Refusing):
        def __init__(self) -> None:
            super().__init__("none", 0)
            self.back = time.monotonic() + self.limit

        def claim(self, address: str) -> int | None:
            if time.monotonic() < self.back:
                raise Unreachable("it is away")
            return super().claim(address)

    async def test() -> None:
        backend = Away()
        store = Leased(backend)
        await store.open()
        term = await store.lead("a:1")
        await store.record(Durable(term, 1, 1))
        await store.close()

    asyncio.run(test())


def test_a_lease_is_given_back_though_the_store_is_busy_when_this_process_ends() -> None:
    """What is still to be asked of it when all closes is asked."""

    class Busy(Refusing):
        def __init__(self) -> None:
            super().__init__("none", 0)
            self.answers = threading.Event()

        def read(self) -> Durable | None:
            self.answers.wait(60)
            return super().read()

    async def test() -> None:
        backend = Busy()
        store = Leased(backend)
        await store.open()
        term = await store.lead("a:1")
        asking = [asyncio.create_task(store.recall()) for _ in range(8)]
        await store.deposed(term)  # no renewal gets through
        closing = asyncio.create_task(store.close())
        for _ in range(10):  # turns of the loop, in which whoever renews the lease ends
            await asyncio.sleep(0)
        backend.answers.set()
        await closing
        await asyncio.gather(*asking)
        assert backend.resigned == [term]

    asyncio.run(test())


@pytest.mark.parametrize("operation", ["holder", "claim"])
def test_a_store_that_nobody_may_use_is_named_before_anybody_leads(operation: str) -> None:
    async def test() -> None:
        store = Leased(Refusing(operation, 1))

        async def begin() -> None:
            await store.open()
            await store.lead("a:1")

        with pytest.raises(StoreError, match="it has no room"):
            await begin()
        await store.close()

    asyncio.run(test())


def test_a_record_is_small_whatever_the_job() -> None:
    """Kubernetes takes 256 KiB, etcd 1.5 MiB, and keeps what was before."""
    assert len(pack(Durable(1 << 62, 1 << 40, 1 << 40))) < 100


def test_those_who_follow_one_alone_know_it_from_the_start() -> None:
    async def test() -> None:
        store = make(Choice("alone"), "test", LIMIT, leads_at="first:29500")
        await store.open()
        assert await store.followed(0) == Leader(1, "first:29500")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(store.lead("second:1"), 0.05)
        with pytest.raises(Deposed):
            await store.record(Durable(1, 1, 1))
        await store.close()

    run(test)


@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 6), st.binary(max_size=4))), max_size=40))
def test_the_replicated_book_takes_records_of_the_newest_term_alone(operations: list[tuple[int, bytes] | None]) -> None:
    book, term, newest = Book(lambda: None), 0, b""
    for operation in operations:
        if operation is None:
            term += 1
            assert book.claim("a:1", _doApply=True) == term
        else:
            writer, data = operation
            assert book.record(writer, data, _doApply=True) == (writer == term)
            newest = data if writer == term else newest
        assert book.recall(_doApply=True) == newest
    copy = Book(lambda: None)
    copy._deserialize(book._serialize())
    assert (copy.leader(), copy.durable) == (book.leader(), newest)


# ---- processes that are killed and stopped --------------------------------------------------


def record(candidate: Candidate, term: int, epoch: int) -> None:
    assert "refused" not in candidate.ask("record", term=term, epoch=epoch, step=10 * epoch)


def assert_recalls(candidate: Candidate, term: int, epoch: int) -> None:
    assert candidate.ask("recall")["found"] == [term, epoch, 10 * epoch]


def assert_terms_grow(terms: list[int]) -> None:
    assert terms == sorted(set(terms))


@contextlib.contextmanager
def embedded(nodes: int) -> Iterator[Group]:
    with group("embedded", nodes, LIMIT, members=seats(nodes)) as candidates:
        yield candidates


@pytest.mark.job
def test_embedded_survives_the_leaders_death() -> None:
    with embedded(3) as agents:
        term, leader = agents.followed(by=agents.all[0])
        record(leader, term, 1)
        leader.kill()
        left = [agent for agent in agents.all if agent is not leader]
        later, new = agents.followed(by=left[0], after=term)
        assert later > term and new is not leader
        assert_recalls(left[1], term, 1)
        record(new, later, 2)
        assert_recalls(left[0], later, 2)
        assert_terms_grow(agents.terms())


@pytest.mark.job
def test_five_survive_two_deaths_in_a_row_and_a_third_ends_all_decisions() -> None:
    with embedded(5) as agents:
        term, leader = agents.followed(by=agents.all[0])
        left = list(agents.all)
        for epoch in (1, 2):
            record(leader, term, epoch)
            leader.kill()
            left.remove(leader)
            term, leader = agents.followed(by=left[0], after=term)
            assert leader in left
            assert leader.ask("recall")["found"][1] == epoch
        record(leader, term, 3)
        others = [agent for agent in left if agent is not leader]
        others[0].kill()
        # Two of five: it cannot lead any more, nor record.
        leader.hear(lambda told: told.get("deposed") == term)
        assert "refused" in leader.ask("record", term=term, epoch=4, step=0)
        told = len(others[1].drain())
        assert_terms_grow(agents.terms())
        time.sleep(3 * LIMIT)  # time enough for an election, of which there must be none
        assert not [what for what in others[1].drain()[told:] if "led" in what]
        assert not [what for what in leader.drain() if what.get("led", 0) > term]


@pytest.mark.job
def test_a_stopped_leader_that_comes_back_can_decide_nothing() -> None:
    with embedded(3) as agents:
        term, leader = agents.followed(by=agents.all[0])
        record(leader, term, 1)
        leader.stop()
        left = [agent for agent in agents.all if agent is not leader]
        later, new = agents.followed(by=left[0], after=term)
        # The order is there before it wakes, so that it acts before it has heard anything.
        leader.order({"do": "record", "term": term, "epoch": 99, "step": 99})
        leader.go_on()
        leader.hear(lambda told: "refused" in told)
        leader.hear(lambda told: told.get("deposed") == term)
        assert_recalls(new, term, 1)
        leader.hear(lambda told: told.get("follows", 0) >= later)
        assert_terms_grow(agents.terms())


@pytest.mark.job
@pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not())
def test_a_member_that_was_cut_off_disturbs_nobody() -> None:
    """It has heard of no leader, but the others have."""
    with namespaces.hosts() as hosts, group("embedded", 3, LIMIT, hosts=hosts) as agents:
        term, leader = agents.followed(by=agents.all[0])
        back, other = (agent for agent in agents.all if agent is not leader)
        assert back.host is not None
        hosts.cut(back.host.address)
        threading.Event().wait(5 * LIMIT)  # the fault itself: time enough for some elections
        hosts.cut(back.host.address, off=False)
        assert back.ask("recall")["found"] is None
        record(leader, term, 1)
        # It has a voice again: without it none could lead.
        leader.kill()
        later, _ = agents.followed(by=other, after=term)
        assert_recalls(back, term, 1)
        assert agents.terms() == [term, later]


@pytest.mark.job
def test_a_member_that_comes_again_takes_the_lost_place() -> None:
    with embedded(3) as agents:
        term, leader = agents.followed(by=agents.all[0])
        lost, other = (agent for agent in agents.all if agent is not leader)
        for epoch in range(1, 101):  # more than Raft keeps in its log, so that the new one gets a snapshot
            record(leader, term, epoch)
        lost.kill()
        new = agents.candidate()
        leader.ask("replace", lost=lost.raft, by=new.raft)
        new.order([leader.raft, other.raft, new.raft])
        new.hear(lambda told: told.get("follows") == term)
        assert_recalls(new, term, 100)
        # A majority of those three is needed and there: it counts.
        leader.kill()
        later, _ = agents.followed(by=other, after=term)
        assert_recalls(new, term, 100)
        assert_terms_grow(agents.terms())
        assert later == agents.terms()[-1]


@pytest.mark.job
def test_nodes_that_are_no_members_learn_the_leader_and_what_is_recorded() -> None:
    with group("embedded", 4, LIMIT, members=3) as agents:
        observer = agents.all[3]
        term, leader = agents.followed(by=observer)
        record(leader, term, 1)
        assert_recalls(observer, term, 1)
        leader.kill()
        later, _ = agents.followed(by=observer, after=term)
        assert later > term
        assert observer.end() == 0


@pytest.mark.job
def test_etcd_survives_the_leaders_death(etcd: EtcdServer) -> None:
    with group(etcd.url, 3, LEASE) as agents:
        term, leader = agents.followed(by=agents.all[0])
        record(leader, term, 1)
        leader.kill()
        left = [agent for agent in agents.all if agent is not leader]
        later, new = agents.followed(by=left[0], after=term)
        assert_recalls(left[1], term, 1)
        record(new, later, 2)
        # A stopped one cannot renew; what it writes when it comes back is refused.
        new.stop()
        last, newest = agents.followed(by=next(agent for agent in left if agent is not new), after=later)
        new.order({"do": "record", "term": later, "epoch": 99, "step": 99})
        new.go_on()
        new.hear(lambda told: "refused" in told)
        new.hear(lambda told: told.get("deposed") == later)
        assert_recalls(newest, later, 2)
        assert last > later
        assert_terms_grow(agents.terms())
        assert newest.end() == 0
        assert agents.followed(by=new, after=last)[0] > last  # and at once, because the lease was given back


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Files of a certificate for 127.0.0.1, which is its own authority, and of its key."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "etcd")])
    begins = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(begins)
        .not_valid_after(begins + datetime.timedelta(days=9))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    files = folder / "etcd.pem", folder / "etcd.key"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                                           serialization.NoEncryption()))
    return files


@pytest.mark.job
def test_etcd_is_asked_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = self_signed(tmp_path)
    server = EtcdServer(tmp_path, certificate, key)
    monkeypatch.setenv("ETCDCTL_CACERT", str(certificate))

    async def lead() -> Durable | None:
        store = make(parse(server.url, 3), "test", LEASE)
        await store.open()
        try:
            term = await store.lead("h:1")
            await store.record(Durable(term, 7, 1))
            return await store.recall()
        finally:
            await store.close()

    server.start()
    try:
        recalled = asyncio.run(lead())
    finally:
        server.kill()
    assert recalled is not None and recalled.epoch == 7


@pytest.mark.job
def test_etcd_that_is_away_is_asked_over_one_session_a_member() -> None:
    """However long it is away: each attempt asks another member."""
    etcd = importlib.import_module("megatron_elastic.cluster.leadership.etcd")
    with contextlib.ExitStack() as stack:
        closed = [stack.enter_context(socket.socket()) for _ in range(2)]  # who connects is refused
        for sock in closed:
            sock.bind(("127.0.0.1", 0))
        backend = etcd.Etcd([f"127.0.0.1:{sock.getsockname()[1]}" for sock in closed], "job", 2.0)
        stack.callback(backend.close)
        for _ in range(6):
            with pytest.raises(etcd.Unreachable):
                backend.holder()
        assert len(backend._sessions) == 2


def test_etcd_that_is_killed_and_started_again_is_waited_for(etcd: EtcdServer) -> None:
    with group(etcd.url, 3, LEASE) as agents:
        term, leader = agents.followed(by=agents.all[0])
        record(leader, term, 1)
        etcd.kill()
        # Nothing can be recorded, and the leader knows in time that it cannot be sure to lead.
        leader.order({"do": "record", "term": term, "epoch": 2, "step": 20})
        leader.hear(lambda told: told.get("deposed") == term)
        leader.hear(lambda told: "refused" in told)
        etcd.start()
        later, new = agents.followed(by=agents.all[1], after=term)
        assert_recalls(new, term, 1)
        record(new, later, 3)
        # Away for less than the lease: the record waits, and is made.
        told = len(new.told)
        etcd.kill()
        etcd.start()
        new.order({"do": "record", "term": later, "epoch": 4, "step": 40})
        answer = new.hear(lambda told: told.get("did") == "record", since=told)
        if "refused" in answer:  # a slow start; then it leads no more
            new.hear(lambda told: told.get("deposed") == later)
        else:
            assert_recalls(agents.all[0], later, 4)
        assert_terms_grow(agents.terms())


# ---- strangers at a member's port -----------------------------------------------------------


def connect(address: str) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=5)


def closed(stranger: socket.socket) -> bool:
    """Whether the other end closes the connection, after whatever it still says."""
    try:
        while stranger.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def send(stranger: socket.socket, data: bytes) -> None:
    with contextlib.suppress(ConnectionError, TimeoutError):
        stranger.sendall(data)


def framed(data: bytes) -> bytes:
    return struct.pack("i", len(data)) + data


def test_strangers_change_nothing() -> None:
    draw = random.Random(1)
    garbage = [
        framed(b"x" * 100),  # no Fernet token
        struct.pack("i", -5) + b"y" * 200,  # a negative length
        struct.pack("i", 1 << 30) + bytes(1 << 22),  # much, and never all
        *(draw.randbytes(draw.randrange(1, 9000)) + b"\xff" * 9000 for _ in range(200)),
    ]

    async def test() -> None:
        stores = embedded_stores()
        await asyncio.gather(*(store.open() for store in stores))
        addresses = [store._me for store in stores]  # type: ignore[attr-defined]
        async with campaigning(stores) as campaigns:
            place, term = await won(campaigns)

            def bother() -> None:
                idle = []
                for address in addresses:
                    for data in garbage:
                        with connect(address) as stranger:
                            send(stranger, data)
                            assert closed(stranger)
                    idle += [connect(address) for _ in range(100)]
                    assert closed(idle[-100])  # the oldest of too many
                for stranger in idle:
                    stranger.close()

            await asyncio.to_thread(bother)
            await stores[place].record(Durable(term, 1, 1))
            for store in stores:
                found = await store.recall()
                assert found is not None and found.epoch == 1
        assert [thread.name for thread in threading.enumerate()].count("leadership") == 3  # none has ended of it
        await asyncio.gather(*(store.close() for store in stores))
        assert "leadership" not in [thread.name for thread in threading.enumerate()]

    run(test)


class Mark:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def test_nothing_is_unpickled_that_is_not_proven(tmp_path: Path) -> None:
    mark = tmp_path / "unpickled"
    pickled = zlib.compress(pickle.dumps([Mark(mark)]))

    async def test() -> None:
        (store,) = stores = embedded_stores(1)
        await store.open()
        for data in (pickled, getEncryptor("another password").encrypt(pickled), pickle.dumps(Mark(mark))):
            with connect(store._me) as stranger:  # type: ignore[attr-defined]
                send(stranger, framed(data))
                assert await asyncio.to_thread(closed, stranger)
        assert not mark.exists()
        # The test itself: with the right key it is.
        with connect(store._me) as friend:  # type: ignore[attr-defined]
            send(friend, framed(getEncryptor(password(TOKEN)).encrypt_at_time(pickled, 1)))
            await asyncio.to_thread(friend.recv, 1)
        assert mark.exists()
        for each in stores:
            await each.close()

    run(test)


def test_a_member_with_another_token_is_not_let_in() -> None:
    sockets = [reserve() for _ in range(3)]
    addresses = tuple(f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets)

    async def test() -> None:
        tokens = (TOKEN, TOKEN, "another token")
        stores = [make(Choice("embedded"), "test", LIMIT, place=Place(addresses, token, me, sock))
                  for me, sock, token in zip(addresses, sockets, tokens, strict=True)]
        await asyncio.gather(*(store.open() for store in stores))
        async with campaigning(stores) as campaigns:
            place, term = await won(campaigns)
            assert place != 2
            await stores[place].record(Durable(term, 1, 1))
            raft: Raft = stores[2]._opened  # type: ignore[attr-defined]
            assert (raft.book.term, raft.leading) == (0, False)
        # Nor is one who asks without knowing it.
        observer = make(Choice("embedded"), "test", LIMIT, place=Place(addresses, "a third token"))
        await observer.open()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(observer.followed(0), 1.0)
        await observer.close()
        await asyncio.gather(*(store.close() for store in stores))

    run(test)


# ---- the flag -------------------------------------------------------------------------------


def test_the_flag_names_a_store() -> None:
    assert parse("auto", 1).kind == parse("auto", 2).kind == parse("alone", 9).kind == "alone"
    assert parse("auto", 3).kind == parse("embedded", 3).kind == "embedded"
    assert parse("etcds://a:2379", 1) == Choice("etcd", endpoints=("a:2379",), encrypted=True)
    assert parse("etcd://a:2379,[::1]:2", 1) == Choice("etcd", endpoints=("a:2379", "[::1]:2"))
    assert parse("kubernetes://train/gpt-7b", 1) == Choice("kubernetes", namespace="train", name="gpt-7b")
    assert (seats(3), seats(4), seats(5), seats(1000)) == (3, 3, 5, 5)


@pytest.mark.parametrize(("flag", "nodes", "says"), [
    ("embedded", 2, "at least 3 nodes"),
    ("redis://a:1", 3, "choose auto"),
    ("", 3, "choose auto"),
    ("etcd", 3, "choose auto"),
    ("etcd://", 3, "no HOST:PORT"),
    ("etcd://a", 3, "no HOST:PORT"),
    ("etcd://a:0", 3, "no HOST:PORT"),
    ("etcd://a:1,", 3, "no HOST:PORT"),
    ("etcd://user@a:1", 3, "no HOST:PORT"),
    ("kubernetes://a", 3, "NAMESPACE/NAME"),
    ("kubernetes://A/b", 3, "NAMESPACE/NAME"),
    ("alone://a", 3, "choose auto"),
])
def test_a_flag_that_cannot_work_says_what_can(flag: str, nodes: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse(flag, nodes)


def test_a_store_that_is_not_there_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("megatron_elastic.cluster.leadership.leased._OPEN_LIMIT", 0.2)

    async def test() -> None:
        store = make(parse("etcd://127.0.0.1:1", 3), "test", LEASE)
        with pytest.raises(StoreError, match=r"127\.0\.0\.1:1 does not answer.*is it running"):
            await store.open()
        await store.close()

    run(test)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(StoreError, match="set KUBECONFIG"):
        make(parse("kubernetes://a/b", 3), "test", LEASE)


@pytest.mark.parametrize("spec", [{"holderIdentity": "somebody"}, {"holderIdentity": "somebody", "leaseTransitions": 3},
                                  {}, None])  # fmt: skip
def test_a_lease_of_others_is_left_to_them_and_one_of_nobody_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spec: dict[str, Any] | None
) -> None:
    api = Leases(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig))
    lease = {"metadata": {"name": "b", "namespace": "there", "resourceVersion": "7"}, "spec": spec}
    api._leases["/apis/coordination.k8s.io/v1/namespaces/there/leases/b"] = lease

    async def test() -> None:
        store = make(parse("kubernetes://there/b", 3), "test", LEASE)
        with pytest.raises(StoreError, match="there/b is held by somebody") if spec else contextlib.nullcontext():
            await store.open()
            assert await store.lead("h:1") == 1
            assert await store.followed(0) == Leader(1, "h:1")
        await store.close()

    try:
        run(test)
    finally:
        api.close()


def test_a_lease_where_one_may_not_write_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    api = Leases(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig))

    async def test() -> None:
        store = make(parse("kubernetes://elsewhere/b", 3), "test", LEASE)
        with pytest.raises(StoreError, match="may this pod's service account"):
            await store.open()
        await store.close()

    try:
        run(test)
    finally:
        api.close()
