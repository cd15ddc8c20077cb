"""Regulator: sets the clocks of a node's ranks as they are planned, in a thread of its own, as devices may be slow.

What to restore is noted in a folder of this machine, and as long as the process lives it holds a lock beside that: the
next job here restores what one that was killed has left. Numbers of processes would not do, as containers have their
own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from megatron_elastic.power.actuator import Actuator
from megatron_elastic.power.devices import Place, actuators, devices
from megatron_elastic.power.keeper import UNREADABLE, Keeper, read_note, restore_left

_ANSWER = 30.0
"""Seconds that are waited for devices whose clocks a job has left."""


class Regulator:
    """Of one node.

    Args:
        name: of the actuator.
        run_dir: of the job.
        hot: told, in another thread, at which clocks ranks' devices run that are held down, whenever that is news.
        warn: told once, in another thread, if clocks cannot be set; and if one cannot be set back.
        folder: where it is noted what to restore.
    """

    def __init__(
        self, name: str, run_dir: Path, warn: Callable[[str], None], folder: Path | None = None,
        hot: Callable[[dict[int, float]], None] = lambda _: None,
    ) -> None:
        self._run_dir = run_dir
        self._warn, self._hot = warn, hot
        self._of_ranks: dict[str, int] = {}
        """Device -> the rank whose it is, of those that are set."""
        self._held_down: dict[int, float] = {}
        """What was told last."""
        self._actuator: Actuator = next(each for each in actuators() if each.name == name)
        folder = folder or notes()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = folder / f"{uuid.uuid4().hex}.json"
        self._lock = file.with_suffix(".lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._keeper = Keeper(self._actuator, file, warn)
        self._refused = False
        self._work = SimpleQueue[Callable[[], None] | None]()
        self._thread = Thread(target=self._run, name="clocks", daemon=True)  # a device may never answer
        self._thread.start()

    def set(self, clocks: Mapping[int, float], places: list[Place], watts: Mapping[int, float] | None = None) -> None:
        """Let these ranks run at these clocks, and draw no more than these watts, and all others as they did before.
        Does not wait.
        """
        limits = watts or {}
        concerned = [each for each in places if each.rank in {*clocks, *limits}]
        self._work.put(partial(self._set, clocks, limits, concerned))

    def look(self) -> None:
        """See whether devices run at the clocks that were set. Does not wait."""
        self._work.put(self._look)

    def close(self, limit: float) -> None:
        """Set all back; returns when that is done, or after so many seconds."""
        self._work.put(None)
        self._thread.join(limit)
        if self._thread.is_alive():
            self._warn(f"clocks are not set back ({self._actuator.name}): the devices did not answer within {limit:g} "
                       "s; when they do, megatron-elastic clocks restore sets them back")

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
        self._keeper.restore()
        with self._lock:
            Path(self._lock.name).unlink(missing_ok=True)

    def _set(self, clocks: Mapping[int, float], watts: Mapping[int, float], places: list[Place]) -> None:
        if self._refused:
            return
        try:
            found = devices(self._actuator.name, self._run_dir, places)
            self._of_ranks = {device: rank for rank, device in found.items()}
            self._keeper.set(
                {device: self._nearest(device, clocks[rank]) for rank, device in found.items() if rank in clocks},
                {device: watts[rank] for rank, device in found.items() if rank in watts},
            )
        except Exception as error:  # whatever an actuator trips over: nobody waits for this thread
            self._refused = True
            self._keeper.restore()
            file = error.filename if isinstance(error, PermissionError) else None
            grants = f"; this grants it: sudo chown $USER {file}" if file else ""
            self._warn(f"clocks stay as they are ({self._actuator.name}): {error}{grants}")

    def _look(self) -> None:
        with contextlib.suppress(Exception):  # that it cannot be seen is no reason to leave clocks alone
            found = {self._of_ranks[device]: round(now, 2) for device, now in self._keeper.throttled().items()}
            if found and found != self._held_down:
                self._hot(found)
            self._held_down = found

    def _nearest(self, device: str, clock: float) -> float:
        steps = self._actuator.steps(device)
        return min(steps, key=lambda step: abs(step - clock)) if steps else clock


def notes() -> Path:
    """The folder of this machine and person where it is noted what to restore."""
    return Path(tempfile.gettempdir()) / f"megatron_elastic-clocks-{os.getuid()}"


@dataclass(frozen=True, slots=True)
class Note:
    """What ``file`` says to restore: by device. ``held``: the job that has set it still runs."""

    file: Path
    actuator: str
    before: Mapping[str, str]
    held: bool


def noted(folder: Path) -> list[Note]:
    """All that is noted in a folder and can be read."""
    found = []
    for file in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        with contextlib.suppress(*UNREADABLE):
            found.append(Note(file, *read_note(file), _held(file)))
    return found


def _held(file: Path) -> bool:
    locked = file.with_suffix(".lock")
    if not locked.exists():
        return False
    with locked.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def restore_left_behind(warn: Callable[[str], None], folder: Path | None = None) -> None:
    """Set back what jobs have left here whose agents are gone; devices that do not answer keep nobody waiting."""
    folder = folder or notes()
    try:
        files = sorted(folder.glob("*.json"))
        mine = not files or folder.stat().st_uid == os.getuid()
    except OSError:
        return
    if not files or not mine:
        return
    thread = Thread(target=_restore, args=(files, warn), name="clocks", daemon=True)
    thread.start()
    thread.join(_ANSWER)
    if thread.is_alive():
        warn(f"clocks that jobs have left are not set back: their devices did not answer within {_ANSWER:g} s "
             f"({folder})")


def _restore(files: Iterable[Path], warn: Callable[[str], None]) -> None:
    for file in files:
        with file.with_suffix(".lock").open("a") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            restore_left(file, actuators(), warn)
            Path(lock.name).unlink(missing_ok=True)
