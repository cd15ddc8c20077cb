"""Manager: who has the devices of a cluster, starts processes on them and ends these: one interface for all kinds.

The fleet's jobs are made of *launches*: a rigid job is one, an elastic job one launcher for each of its nodes. Growing
is one more launch, which joins the running job; to shrink, a launch's node is asked to leave (``drain``), and then
the launch ends. So a manager only has to start and stop launches, and to tell what became of them.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

HERE = "{here}"
"""In a launch's command: the host that it runs on, as other hosts can reach it."""


class ManagerError(Exception):
    """The manager does not answer, or says what cannot be. Nothing is known of its devices then."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Something to be started once on ``devices`` devices of one host."""

    name: str
    """Of the job, and the number of the node."""
    folder: Path
    """For what is known of it; ``output`` there has what it prints."""
    command: Sequence[str]
    devices: int
    slots: Sequence[int]
    """Which devices, where the manager numbers them."""
    cwd: Path
    ends_its_own: bool = False
    """Whether the command, when it gets SIGTERM, ends what it has started."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Additions to the environment, secrets among them."""


State = Literal["absent", "waiting", "running", "ended"]


class Standing(NamedTuple):
    """What became of a launch: never started (``absent``), in the manager's queue, running, or ended."""

    state: State
    code: int | None = None
    """Exit code, where it has ended and that is known."""
    host: str | None = None
    """Where it runs, as other hosts can reach it."""


class Other(NamedTuple):
    """A job that somebody has given to the manager itself."""

    name: str
    devices: int
    submitted: float
    started: float | None
    """None: it waits."""
    ends: float
    """At the latest, as far as the manager knows."""


class Pool(NamedTuple):
    """Devices and launches at one moment. Times are in seconds since 1970."""

    total: int
    """Devices that are there, whoever holds them."""
    most: int
    """Those that are away for now as well: who asks for more will never have them."""
    standings: Mapping[str, Standing]
    """Of each launch that was asked for, by name."""
    others: Sequence[Other] = ()


class Scheduler:
    """The part of ``Manager`` that is the same for all that choose themselves where a launch runs."""

    def choose(self, devices: int, held: Collection[int]) -> list[int]:
        """It does."""
        return []

    def port(self) -> int:
        """One that is seldom in use: on which host is not known yet, and others may use its network, too."""
        return random.randrange(20000, 30000)


class Manager(Protocol):
    """A kind of cluster. Every method returns within some seconds, or raises ManagerError."""

    @property
    def kind(self) -> str:
        """For people."""

    def look(self, launches: Sequence[Launch]) -> Pool:
        """What there is, and what became of these launches."""

    def choose(self, devices: int, held: Collection[int]) -> list[int]:
        """Which free devices a launch is to have; empty where the manager chooses itself."""

    def port(self) -> int:
        """A port on which an elastic job that is to start can coordinate."""

    def start(self, launch: Launch) -> None:
        """Start it, if that was never done: at most once, however often it is asked for."""

    def stop(self, launch: Launch, at_once: bool) -> None:
        """Have it end: politely (SIGTERM), or at once. Nothing happens if it has ended."""
