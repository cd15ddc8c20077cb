"""Control: a rank's line to its agent, and through it to the coordinator; and the flag that unwinds the rank when the
layout must change.

Plain sockets and one daemon thread: an interrupt is noticed while the main thread computes or waits elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from megatron_elastic.cluster import wire
from megatron_elastic.cluster.messages import (
    Addresses,
    Decision,
    Failed,
    Interrupt,
    Message,
    Moves,
    Stop,
    ToRank,
    Where,
)
from megatron_elastic.cluster.node.line import AGENT_VARIABLE, peer
from megatron_elastic.faults.odometer import COORDINATOR, Odometer

_CONNECT_LIMIT = 30.0
_SEND_LIMIT = 60

M = TypeVar("M", bound=Message)
_told = False
"""Whether this process has told that its program raised."""
_decoder: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)


class Interrupted(Exception):
    """The layout must change: unwind to the step loop and report.

    Attributes:
        epoch: the epoch that begins; 0 when the rank itself noticed and the coordinator does not know yet.
        suspects: ranks whose links broke, when the rank itself noticed.
    """

    def __init__(self, epoch: int = 0, suspects: tuple[int, ...] = ()) -> None:
        super().__init__(f"epoch {epoch} begins" if epoch else f"links to rank(s) {list(suspects)} broke")
        self.epoch = epoch
        self.suspects = suspects


class JobStopped(Exception):
    """The job is over although this rank is not done; the message says why. The rank must end."""


class InterruptFlag:
    """Raised while an interrupt waits to be acknowledged, or the job has been stopped.

    Raised by the thread that listens to the coordinator, looked at by every wait of the training thread. ``raised`` is
    cheap to read; ``epoch`` is the highest interrupt epoch so far (0: none), ``lost`` the ranks it names as dead and
    ``layout`` the epoch of the layout that it names, not an older one if it is read after ``epoch``;
    ``fd`` is readable while raised, so that epoll loops wake.
    """

    def __init__(self) -> None:
        self.raised = False
        self.epoch = 0
        self.lost: frozenset[int] = frozenset()
        self.layout = 0
        self.since = 0.0
        """When it was raised last, by ``time.monotonic()``."""
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._acknowledged = 0
        self._stopped: str | None = None
        self._lock = threading.Lock()  # the listening thread raises while the training thread acknowledges

    def raise_for(self, epoch: int, lost: frozenset[int], layout: int = 0) -> None:
        """Begin ``epoch``; an older epoch than the newest known one is ignored."""
        with self._lock:
            if epoch > self.epoch:
                self.lost, self.layout = lost, layout
                self.epoch = epoch
                self._update()

    def stop(self, reason: str) -> None:
        """Make every check raise JobStopped from now on. The first reason stays."""
        with self._lock:
            if self._stopped is None:
                self._stopped = reason
                self._update()

    def check(self) -> None:
        """Raise JobStopped or Interrupted if there is a reason to unwind."""
        if self.raised:
            if self._stopped is not None:
                raise JobStopped(self._stopped)
            raise Interrupted(self.epoch)

    @property
    def over(self) -> bool:
        """Whether the job has been stopped."""
        return self._stopped is not None

    def acknowledge(self, epoch: int) -> None:
        """This rank has unwound for ``epoch``; stays raised if a newer one came meanwhile, or the job stopped."""
        with self._lock:
            self._acknowledged = max(self._acknowledged, epoch)
            self._update()

    def close(self) -> None:
        """Release the file descriptor; the flag works on without it. Closing twice is fine."""
        with self._lock:
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1

    def _update(self) -> None:
        raised = self._stopped is not None or self.epoch > self._acknowledged
        if raised and not self.raised:
            self.since = time.monotonic()
        before, self.raised = self.raised, raised
        # Only after ``raised`` has changed: who is woken by the descriptor looks at ``raised`` next.
        if self.fd >= 0 and self.raised != before:
            if self.raised:
                os.eventfd_write(self.fd, 1)
            else:
                os.eventfd_read(self.fd)


class Control:
    """A rank's connection to its agent. ``send`` may be called from any thread.

    Args:
        sock: connected to the agent.
        rank: this rank.
        odometer: what the agent sees of it; None for one that nobody reads.
    """

    def __init__(self, sock: socket.socket, rank: int, odometer: Odometer | None = None) -> None:
        self.rank = rank
        self.odometer = odometer or Odometer.alone()
        self.interrupt = InterruptFlag()
        self._sock = sock
        self._send_lock = threading.Lock()
        self._inbox: deque[ToRank] = deque()
        self._arrived = threading.Condition()
        self._over: str | None = None
        self._closing = False
        self._asked = 0
        self._reader = threading.Thread(target=self._read, name="megatron-elastic-control", daemon=True)
        self._reader.start()

    @classmethod
    def connect(cls, env: Mapping[str, str] = os.environ) -> Control:
        """Connect as the environment of ``megatron-elastic run`` says.

        Raises JobStopped if the environment lacks what the launcher sets, or the agent cannot be reached.
        """
        return cls(_connect(env), int(env["RANK"]), Odometer.of(env))

    def send(self, message: Message) -> None:
        """Send ``message``. Raises JobStopped when the agent is gone."""
        try:
            with self._send_lock:
                self._sock.sendall(wire.encode(message))
        except OSError as error:
            self._end(f"the agent of this node is gone ({error})")
            raise JobStopped(self._over) from None

    def fail(
        self, traceback: str, epoch: int = 0, step: int | None = None, device: str = "", short: str = "", code: int = 0
    ) -> None:
        """Tell that the program has raised, as in ``Failed``; nothing that this process tells of it later counts."""
        global _told
        self.send(Failed(rank=self.rank, traceback=_unicode(traceback), epoch=epoch, step=step, device=device,
                         short=short, code=code))
        _told = True

    def wait(self, types: tuple[type[M], ...], timeout: float) -> M:
        """Return the next message of one of ``types``; others stay queued. A decision of an old epoch is dropped.

        Raises Interrupted when the interrupt flag is raised and no such message came before the interrupt,
        JobStopped when the job failed, is over or the agent is gone, TimeoutError after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        with self.odometer.waiting(COORDINATOR), self._arrived:
            while True:
                found = self._take(types)
                if found is not None:
                    return found
                self.interrupt.check()
                if self._over is not None:
                    raise JobStopped(self._over)
                left = deadline - time.monotonic()
                if left <= 0:
                    names = " or ".join(t.__name__ for t in types)
                    raise TimeoutError(f"rank {self.rank} got no {names} from the coordinator within {timeout:g} s")
                self._arrived.wait(min(left, threading.TIMEOUT_MAX))

    def take(self, types: tuple[type[M], ...]) -> M | None:
        """The next message of one of ``types`` if it is here already."""
        with self._arrived:
            return self._take(types)

    def moves(self, epoch: int) -> Moves:
        """What this rank has to do with states under the layout of ``epoch``, once the message with the layout is here.

        That of older epochs is forgotten.
        """
        mine = Moves(epoch=epoch, moves=[], kept=None)
        with self._arrived:
            for message in [each for each in self._inbox if isinstance(each, Moves) and each.epoch <= epoch]:
                self._inbox.remove(message)
                mine = message if message.epoch == epoch else mine
        return mine

    def find(self, ranks: Sequence[int], timeout: float) -> Mapping[int, bytes]:
        """Where the links of ranks start; those that are dead are left out. Raises as ``wait``."""
        self._asked += 1
        self.send(Where(rank=self.rank, ask=self._asked, ranks=list(ranks)))
        while (answer := self.wait((Addresses,), timeout)).ask != self._asked:
            pass  # to a question whose asker was interrupted
        return answer.addresses

    def close(self) -> None:
        """Close the connection and end the reader thread."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._sock.close()
        self.interrupt.close()

    def _take(self, types: tuple[type[M], ...]) -> M | None:
        for message in list(self._inbox):
            if isinstance(message, Decision) and message.epoch < self.interrupt.epoch:
                self._inbox.remove(message)
            elif isinstance(message, types):
                self._inbox.remove(message)
                return message
        return None

    def _read(self) -> None:
        try:
            while (payload := wire.receive_frame(self._sock)) is not None:
                self._handle(_decoder.decode(payload))
            reason = "it closed the connection"
        except (OSError, wire.WireError, msgspec.MsgspecError) as error:
            reason = str(error)
        self._end(f"the agent of this node is gone ({reason})")

    def _handle(self, message: ToRank) -> None:
        if isinstance(message, Stop) and not message.ok:
            self._end(message.reason)
            return
        with self._arrived:
            if isinstance(message, Interrupt):
                self.interrupt.raise_for(message.epoch, frozenset(message.lost), message.layout)
            else:
                self._inbox.append(message)
                if isinstance(message, Stop):
                    self._over = "the job is over"
            self._arrived.notify_all()

    def _end(self, reason: str) -> None:
        with self._arrived:
            if self._over is None:
                self._over = reason
                if not self._closing:
                    self.interrupt.stop(reason)
            self._arrived.notify_all()


def report_failure(traceback: str, code: int = 0, env: Mapping[str, str] = os.environ) -> None:
    """Tell the coordinator that this rank's program raised, or ended itself with ``code``.

    Nothing happens if the agent cannot be reached.

    Uses a connection of its own, so it works before, after and without ``Control.connect``. The agent reads what a rank
    has written before it takes note of its end.
    """
    if _told:
        return
    with contextlib.suppress(OSError, JobStopped), _connect(env) as sock:
        sock.sendall(wire.encode(Failed(rank=int(env["RANK"]), traceback=_unicode(traceback), code=code)))


def _unicode(text: str) -> str:
    """A text that may quote what is none, as names of files, written as Python writes it to stderr."""
    return text.encode(errors="backslashreplace").decode()


def _connect(env: Mapping[str, str]) -> socket.socket:
    missing = [name for name in ("RANK", AGENT_VARIABLE) if name not in env]
    if missing:
        raise JobStopped(f"{', '.join(missing)} not set: start this program with `megatron-elastic run`")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(_CONNECT_LIMIT)
        sock.connect(f"\0{env[AGENT_VARIABLE]}")
        sock.settimeout(None)
    except OSError as error:
        sock.close()
        raise JobStopped(f"rank {env['RANK']} cannot reach the agent of its node: {error}") from None
    if peer(sock)[1] != os.geteuid():
        sock.close()
        raise JobStopped(f"rank {env['RANK']} cannot reach the agent of its node: it has ended, and another user's "
                         "program is in its place")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_LIMIT, 0))
    return sock
