"""Observation: what a policy sees of a cluster, and what it can decide. The daemon's and the simulation's alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from megatron_elastic.fleet.job import Job

State = TypeVar("State")


@dataclass(slots=True)
class Running:
    """An elastic job that runs."""

    job: Job
    devices: int
    remaining: float
    """Work left, in seconds of running as submitted."""
    started: float
    changes: int = 0
    """How often its number of devices has been changed."""


@dataclass(frozen=True, slots=True)
class Observation:
    """A cluster at one moment. Times are in seconds."""

    now: float
    total: int
    """Devices of the cluster."""
    free: int
    """Devices that nobody holds."""
    rigid: Mapping[int, tuple[float, int]]
    """Of each running job that is not elastic: when it ends if nothing happens to it, and its devices."""
    rigid_devices: int
    """Sum of those devices."""
    running: Mapping[int, Running]
    """Elastic jobs, by their index."""
    queue: Sequence[Job]
    """Waiting jobs, in the order of submission."""
    arrived: Sequence[int] = ()
    """Devices asked for by each job submitted since the last observation."""
    ended: int = 0
    """Jobs that have ended since the last observation."""


class Start(NamedTuple):
    """Let a waiting job run on so many devices."""

    job: int
    devices: int


class Resize(NamedTuple):
    """Let a running job go on with another number of devices."""

    job: int
    devices: int


class Decisions(NamedTuple):
    """What is to be done now, in this order, and in how many seconds to ask again if nothing happens."""

    changes: Sequence[Start | Resize]
    again_s: float | None = None


class Overhead(NamedTuple):
    """What another number of devices costs a running job."""

    pause_s: float
    """The job stands still. Devices that it gives back are free after that."""
    lead_s: float = 0.0
    """Before the pause of a growth: new devices are held and not used yet, the job goes on as before."""


class Policy(Protocol[State]):
    """Decides who runs on how many devices. Pure: equal arguments give equal results; the state is all that is kept."""

    @property
    def name(self) -> str:
        """As people call it."""

    @property
    def overhead(self) -> Overhead:
        """Of a change."""

    @property
    def buddy(self) -> bool:
        """Whether devices are placed in blocks of powers of two, for which running jobs migrate."""

    @property
    def keeps_work(self) -> bool:
        """Whether an elastic job that loses a device goes on without having lost any work."""

    def begin(self) -> State:
        """The state before anything was seen."""

    def speed(self, job: Job, devices: int) -> float:
        """Of an elastic job on so many devices, times its speed as submitted."""

    def decide(self, state: State, seen: Observation) -> tuple[State, Decisions]:
        """The next state, and what to do."""
