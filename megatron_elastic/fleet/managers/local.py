"""Local: slots of this machine, the manager that is built in. A slot stands for a device; the fleet counts them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections.abc import Collection, Sequence

from megatron_elastic.fleet.managers.launch import LOCK, OUTPUT, PROCESS, exit_code, keeper
from megatron_elastic.fleet.managers.lock import is_held
from megatron_elastic.fleet.managers.manager import HERE, Launch, ManagerError, Pool, Standing

SLOTS_VARIABLE = "MEGATRON_ELASTIC_SLOTS"
"""Environment variable that tells a command which slots it has, with commas between: counted from 0."""
_HOST = "127.0.0.1"


class Local:
    """``total`` slots of this machine (see ``Manager``)."""

    kind = "slots of this machine"

    def __init__(self, total: int) -> None:
        self._total = total
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        """By this process; those of an earlier one are known by their folders alone."""

    def look(self, launches: Sequence[Launch]) -> Pool:
        """What there is, by the launches' folders."""
        for name, process in list(self._started.items()):
            if process.poll() is not None and all(launch.name != name for launch in launches):
                del self._started[name]
        return Pool(self._total, self._total, {launch.name: self._standing(launch) for launch in launches})

    def choose(self, devices: int, held: Collection[int]) -> list[int]:
        """The lowest."""
        return [slot for slot in range(self._total) if slot not in held][:devices]

    def port(self) -> int:
        """One that nobody listens on now."""
        with socket.socket() as sock:
            sock.bind((_HOST, 0))
            return int(sock.getsockname()[1])

    def start(self, launch: Launch) -> None:
        """Start it, in a session of its own: it does not end with this process."""
        command = [word.replace(HERE, _HOST) for word in launch.command]
        env = {**os.environ, **launch.env, SLOTS_VARIABLE: ",".join(map(str, launch.slots))}
        try:
            launch.folder.mkdir(parents=True, exist_ok=True)
            with (launch.folder / OUTPUT).open("ab") as output:
                self._started[launch.name] = subprocess.Popen(
                    [*keeper(launch.folder, launch.ends_its_own), *command],
                    cwd=launch.cwd, env=env, start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                )  # fmt: skip
        except OSError as error:
            raise ManagerError(f"cannot start {launch.name}: {error}") from None

    def stop(self, launch: Launch, at_once: bool) -> None:
        """SIGTERM to its keeper, which passes it on, or SIGKILL to its process group."""
        if self._standing(launch).state != "running":
            return
        try:
            pid = int(json.loads((launch.folder / PROCESS).read_text())["pid"])
        except (OSError, ValueError, KeyError):
            raise ManagerError(f"{launch.name} is only just being started") from None
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            if at_once:
                os.killpg(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGTERM)

    def _standing(self, launch: Launch) -> Standing:
        if (code := exit_code(launch.folder)) is not None:
            return Standing("ended", code)
        process = self._started.get(launch.name)
        if is_held(launch.folder / LOCK) or (process is not None and process.poll() is None):
            return Standing("running", host=_HOST)
        if (code := exit_code(launch.folder)) is not None:  # it has ended since
            return Standing("ended", code)
        if (launch.folder / PROCESS).exists():
            return Standing("ended")  # killed, and who would have kept the code as well
        return Standing("absent") if process is None else Standing("ended", process.returncode)
