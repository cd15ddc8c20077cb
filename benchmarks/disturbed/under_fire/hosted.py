"""Hosted: a job on hosts that are network namespaces of this machine. They are lost, cut off, and others come."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common import newest_layout
from launcher import Launcher
from namespaces import Host, Hosts

from disturbed.under_fire.draw import KINDS_OF_HOSTS, Fault, Round
from disturbed.under_fire.job import Job
from megatron_elastic.cluster import wire
from megatron_elastic.cluster.wire.address import read_address
from megatron_elastic.cluster.wire.token import make_token

_PORT = 29500
_SEATED = "this node has a lost member's seat"
_EVEN = "slices and grains are even over"


class HostedJob(Job):
    """One job on so many hosts as its round says.

    What happens to a host waits until the job is as wide as it began, and the store could lose a member. One that is
    gone is replaced by another as soon as the others have shared its work.
    """

    def __init__(self, round_: Round, run_dir: Path, flags: Sequence[str], hosts: Hosts) -> None:
        # Nobody is slow: all hosts share this machine's processors.
        super().__init__(round_, run_dir, [*flags, "--elastic-slow", "off"])
        self._hosts = hosts
        self._token = make_token()
        self._in: set[Launcher] = set()
        """Who has been a part of the job."""
        self._gone: set[Launcher] = set()
        """Who has been killed, or asked to leave."""
        self._killed: set[Launcher] = set()
        self._missing = 0
        """Hosts that are to come."""
        self._troubled = False
        """Whether something is wrong with a link."""

    def begin(self) -> None:
        """Start a launcher on each host."""
        places = [self._hosts.add() for _ in range(self.round.nodes)]
        for number, place in enumerate(places):
            self._come(number, places[0].address, _PORT, place)
        self._in = set(self.launchers)

    def well(self) -> Sequence[Launcher]:
        """All that have been a part of it and were not killed."""
        return [launcher for launcher in self.launchers if launcher in self._in - self._killed]

    def hear(self, launcher: Launcher, line: str) -> None:
        """Besides: hosts come, and those that come too late are ended."""
        super().hear(launcher, line)
        if _EVEN in line and self._missing:
            self._missing -= 1
            where = read_address(self.run_dir)
            self._come(len(self.launchers), where.host, where.port, self._hosts.add())
        if not line:
            if launcher not in self._in:
                self._missing += 1  # whom it was to join has been lost meanwhile
            if all(each.process.poll() is not None for each in self._in):
                for each in self.launchers:
                    each.kill()

    def may_happen(self, fault: Fault) -> bool:
        """What happens to a host must be survivable: the job is whole, and so is the store that three hosts have."""
        if fault.kind not in KINDS_OF_HOSTS:
            return super().may_happen(fault)
        there = self._there()
        nodes = self.round.nodes
        seated = nodes < 3 or all(_SEATED in each.output or each in self.launchers[:nodes] for each in there)
        whole = (not self._troubled and not self._missing and seated and len(there) == nodes
                 and len(newest_layout(self.run_dir).ranks) == self.round.ranks)
        if whole:
            self._in |= set(there)
        return whole

    def happen(self, fault: Fault) -> None:
        """Besides: what happens to a host or its link."""
        if fault.kind not in KINDS_OF_HOSTS:
            super().happen(fault)
            return
        there = self._there()
        victim = there[int(fault.number * len(there))]
        match fault.kind:
            case "host killed":
                # Without a third one nobody follows who coordinates.
                if len(there) > 2 or victim.address != read_address(self.run_dir).host:
                    self.done[fault.kind, "any moment"] += 1
                    victim.kill()
                    self._killed.add(victim)
                    self._leaves(victim)
            case "host leaves":
                if self.ask(fault, "drain", str(self.run_dir), "--node", str(self.launchers.index(victim))):
                    self._leaves(victim)
            case _:
                self._trouble(fault, victim, there)

    def ask(self, fault: Fault, *command: str, host: Host | None = None) -> bool:
        """From a host, as others do not reach it."""
        return super().ask(fault, *command, host=host or self._there()[0].host)

    def _leaves(self, launcher: Launcher) -> None:
        self._gone.add(launcher)
        self._missing += 1

    def _come(self, number: int, address: str, port: int, host: Host) -> None:
        self.launch(("--nproc-per-node", str(self.round.ranks // self.round.nodes), "--nnodes", str(self.round.nodes),
                     "--node-rank", str(number), "--master-addr", address, "--master-port", str(port)),
                    host, **{wire.TOKEN_VARIABLE: self._token})  # fmt: skip

    def _there(self) -> list[Launcher]:
        return [each for each in self.launchers if each not in self._gone and each.process.poll() is None]

    def _trouble(self, fault: Fault, victim: Launcher, there: Sequence[Launcher]) -> None:
        """Something is wrong with a link: for a moment, or long enough that it is noticed."""
        address, hosts = victim.address, self._hosts
        match fault.kind:
            case "host cut off":
                hosts.cut(address)
            case "host deaf":
                hosts.deafen(address)
            case "host mute":
                hosts.mute(address)
            case "hosts apart":
                others = [each.address for each in there if each is not victim]
                hosts.part(address, self.choose.choice(others))
            case "link lossy":
                hosts.lose_packets(address, self.choose.randint(5, 30))
            case "link slow":
                hosts.slow_down(address, self.choose.uniform(1.0, 8.0))
        self._troubled = True
        self.done[fault.kind, "any moment"] += 1
        seconds = self.choose.uniform(*self.choose.choice(((0.2, 1.0), (3.0, 6.0))))
        self.later(seconds, self._mend, address)

    def _mend(self, address: str) -> None:
        self._hosts.mend(address)
        self._troubled = False
