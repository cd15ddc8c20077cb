"""Members: ranks and nodes, and what was raised there."""

from __future__ import annotations

import msgspec

from megatron_elastic.cluster.messages import Hello


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, alive or not."""

    node: int | None = None
    """Whose agent runs it; None until one has come."""
    local_rank: int = 0
    host: int = 0
    """Its failure domain: the node's number, counting nodes that came later on."""
    joined: bool = True
    """It has had a part in training, if only as a spare."""
    starts: int = 1
    """How often it was started, all but the last time to no avail, before training began."""
    spawned: float | None = None
    """When it was started, if training had begun by then."""
    standby: bool = False
    """It has no part in training and holds nothing that others need: it is not interrupted when somebody dies."""
    hello: Hello | None = None
    returncode: int | None = None
    lost: bool = False
    dying: float | None = None
    """Since when it is being taken down by the kernel, while what killed it is not known yet."""
    stopped: float | None = None
    """Since when its process is there but does not run."""
    how: str = ""
    """What stopped it, for people."""
    fenced: str | None = None
    """Why it was killed, in a word, if it was."""
    accused: bool = False
    """Whether some rank could not reach it, and waits for the interrupt that follows."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """An agent that is there."""

    node_rank: int
    host: str
    slots: int
    address: str = ""
    """Where it listens when it coordinates."""
    member: str = ""
    """Where it listens as a member of an embedded store."""
    ranks: tuple[int, ...] = ()
    """What it has been asked to start, ever."""
    launched: bool = False
    """Whether it was asked to start ranks of the beginning."""
    absent: float | None = None
    """Since when there is no connection."""
    strikes: int = 0
    """How many ranks in a row died here soon after they were started to join."""
    broken: tuple[int, ...] = ()
    """Local ranks whose devices have failed, and are out of use."""


class Raised(msgspec.Struct, frozen=True):
    """What the program raised on a rank, in a step, in the layout of ``epoch``; or that it hung there."""

    rank: int
    step: int
    epoch: int
    traceback: str
    hung_at: tuple[str, int | None] | None = None
    """Hook point and grain where it hung; None if it raised."""
    short: str = ""
    """The device whose memory was short, if that is why."""
    unheard: bool = False
    """It raised nothing: what it said could not be worked into the job."""

    @property
    def summary(self) -> str:
        """Its last line."""
        return self.traceback.rstrip().rpartition("\n")[2]

    def __str__(self) -> str:
        text = self.traceback.rstrip()
        if self.unheard:
            return f"what rank {self.rank} said could not be heard: {text}"
        separator = "\n" if "\n" in text else " "
        how = "raised" if self.hung_at is None else "hung"
        what = f"memory of {self.short} was short" if self.short else f"the program {how}"
        return f"{what} on rank {self.rank}:{separator}{text}"
