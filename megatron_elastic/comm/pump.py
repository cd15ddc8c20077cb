"""Pump: what is under way goes on, in the thread that waits, and in one of its own while nobody does.

The thread sleeps unless there is work that was started and not yet waited for, or it is to take in what comes.
"""

from __future__ import annotations

import select
import threading
from collections import deque

from megatron_elastic.comm.fabric import Fabric
from megatron_elastic.comm.operation import Steps, Task


class Pump:
    """One transport's. Every call but ``close`` needs the transport's lock.

    Args:
        rank: this rank.
        fabric: brings what tasks wait for.
        events: tell when there is something to do.
        lock: the transport's.
    """

    def __init__(self, rank: int, fabric: Fabric, events: select.epoll, lock: threading.RLock) -> None:
        self.failure: Exception | None = None
        """What went wrong in the background, until somebody waits."""
        self._rank = rank
        self._fabric = fabric
        self._outbox = fabric.outbox
        self._events = events
        self._lock = lock
        self._tasks: dict[Task, None] = {}
        """Under way, in the order of their start."""
        self._ready: deque[Task] = deque()
        """Those that can go on."""
        self._looking: dict[Task, None] = {}
        """Those that wait for what does not tell."""
        self._background: threading.Thread | None = None
        self._work = threading.Event()
        """Set while there is work and nobody waits: then the background thread makes it progress."""
        self._waiting = 0
        self._attentive = False
        """Whether what comes is taken in although there is no work."""
        self._closing = False

    def start(self, steps: Steps) -> Task:
        """Start a task."""
        task = Task(steps, self._rank, self._ready)
        if not self._go_on(task):
            self._tasks[task] = None
            self.wake()
        return task

    def turn(self) -> None:
        """Let everything go on as far as it can now."""
        self._fabric.take_in()
        if self._outbox.busy:
            self._outbox.progress()
        if self._looking:
            self._ready.extend(self._looking)
            self._looking.clear()
        while self._ready:
            task = self._ready.popleft()
            if task in self._tasks and self._go_on(task):
                del self._tasks[task]
        if not self._tasks and self._work.is_set():
            self.rest()

    def abandon(self, error: Exception) -> None:
        """End all tasks; who waits for one gets the error."""
        for task in self._tasks:
            task.abandon(error)
        for tasks in (self._tasks, self._ready, self._looking):
            tasks.clear()

    # ---- who works --------------------------------------------------------------------------

    def attend(self) -> None:
        """Somebody waits, and makes everything progress meanwhile."""
        self._waiting += 1
        if self._work.is_set():  # to ask costs less than to clear
            self._suspend()

    def leave(self) -> None:
        """That one waits no more."""
        self._waiting -= 1
        if self._tasks or self._outbox.busy or self._attentive:
            self.wake()

    def wake(self) -> None:
        """There is work: the background thread does it while nobody waits."""
        if self._waiting:
            return
        if self._background is None:
            self._background = threading.Thread(target=self._run, daemon=True, name="links")
            self._background.start()
        self._work.set()

    def rest(self) -> None:
        """Let the background thread sleep, unless there is work, or it is to take in what comes."""
        if not (self._tasks or self._outbox.busy or self._attentive):
            self._suspend()

    def take_in(self, attentive: bool) -> None:
        """From now on take in what comes while nobody waits, or only if there is work."""
        self._attentive = attentive
        if attentive:
            self.wake()
        else:
            self.rest()

    def _suspend(self) -> None:
        """Let the background thread sleep."""
        if not self._closing:
            self._work.clear()

    def _go_on(self, task: Task) -> bool:
        """Returns whether the task has ended."""
        ended = task.advance()
        if not ended and task.looks:
            self._looking[task] = None
        return ended

    def _run(self) -> None:
        while True:
            self._work.wait()
            if self._closing:
                return
            try:
                self._work_while_nobody_waits()
            except Exception as error:
                with self._lock:
                    if self.failure is not None:
                        self._suspend()  # it fails again and again: leave it to who waits
                    self.failure = error

    def _work_while_nobody_waits(self) -> None:
        with self._lock:
            if self._waiting:
                return  # who waits makes everything progress, and would miss events taken from under it
            self.turn()
            idle = self._fabric.arm()
        if idle and self._work.is_set():
            events = self._events.poll(0.1)
            with self._lock:
                self._fabric.peers.see(events)

    def close(self) -> None:
        """End the thread."""
        if self._background is not None:
            with self._lock:
                self._closing = True
                self._work.set()
            self._background.join()
