"""Launch: a process that runs one command and keeps how it ended: ``python -m megatron_elastic.fleet.managers.launch``.

It and its command outlive who started it. ``FOLDER/lock`` is held by both as long as one of them lives, so that nobody
mistakes another process of the same number for them; ``process.json`` says that the command was started, and is never
there twice; ``exit.json`` has the exit code. What the command leaves behind is killed. ``env.json``, if it
is there, has additions to its environment.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_elastic.fleet.managers.lock import hold

LOCK, PROCESS, EXIT, OUTPUT, ENV = "lock", "process.json", "exit.json", "output", "env.json"
_AGAIN_S = 1.0
"""Until it is looked again whether there is room."""
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def keeper(folder: Path, ends_its_own: bool) -> list[str]:
    """What runs a command, which is to follow. Modules of the working directory are nothing to it (``-P``)."""
    return [sys.executable, "-P", "-m", __name__, str(folder), "one" if ends_its_own else "all"]


def main(argv: Sequence[str]) -> int:
    """``FOLDER one|all COMMAND ...``: signals go to the command, or to all that it has started.

    Returns 0 where it was started before; else it ends with its whole process group, of which it is the first.
    """
    folder, all_of_it, command = Path(argv[0]), argv[1] == "all", list(argv[2:])
    with (folder / LOCK).open("ab") as lock:
        if not hold(lock) or (folder / PROCESS).exists():
            return 0
        write(folder / PROCESS, {"pid": os.getpid()})
        code = _run(command, folder, lock.fileno(), all_of_it)
        try:
            keep_code(folder, code)
        finally:
            os.killpg(0, signal.SIGKILL)
    return code


def keep_code(folder: Path, code: int, wait: Callable[[float], None] = time.sleep) -> None:
    """Write how it ended, as soon as there is room for that. Raises OSError where it is for another reason."""
    while True:
        try:
            return write(folder / EXIT, {"code": code})
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        wait(_AGAIN_S)


def exit_code(folder: Path) -> int | None:
    """Of a command that has ended by itself; None if it has not, or that cannot be read."""
    try:
        return int(json.loads((folder / EXIT).read_text())["code"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(path: Path, record: object, mode: int = 0o666) -> None:
    """Write a record, whole or not at all, so that it is there after a loss of power; ``mode`` as umask leaves it.

    Raises OSError.
    """
    partial = path.with_name(f".{path.name}.part")
    partial.unlink(missing_ok=True)  # its rights may be others
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        json.dump(record, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _run(command: Sequence[str], folder: Path, lock: int, all_of_it: bool) -> int:
    received: list[int] = []
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: received.append(number))
    env = {**os.environ, **(json.loads((folder / ENV).read_text()) if (folder / ENV).exists() else {})}
    with (folder / OUTPUT).open("ab") as output:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, pass_fds=[lock], env=env
            )
        except OSError as error:
            output.write(f"cannot start {command[0]}: {error.strerror}\n".encode())
            return 127

    def pass_on(number: int, _: object = None) -> None:
        if all_of_it:
            signal.signal(number, signal.SIG_IGN)  # it comes back to this process
            os.killpg(0, number)
        else:
            process.send_signal(number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    for early in received:
        pass_on(early)
    code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
