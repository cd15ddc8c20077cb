"""Address: the file in a run directory that says where a running job can be asked, and with which secret."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import msgspec

from megatron_elastic.cluster.wire.tls import Credentials

FILE = "coordinator.json"


class Address(msgspec.Struct, frozen=True):
    """Where the coordinator listens, and what to show it."""

    host: str
    port: int
    credentials: Credentials


def leave_address(run_dir: Path, address: Address) -> None:
    """Write the file, for its owner alone to read. Raises OSError.

    Whatever is there, be it a dead job's file or a link that somebody has put there, is replaced and never opened.
    """
    with _opened(run_dir) as folder:
        fresh = f".{FILE}.{secrets.token_hex(8)}"
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(address))
            os.rename(fresh, FILE, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(fresh, dir_fd=folder)
            raise


def read_address(run_dir: Path) -> Address:
    """Read the file, but no link in its place. Raises OSError, or ValueError if it is no address."""
    descriptor = os.open(run_dir / FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe must not hold us
    with os.fdopen(descriptor, "rb") as file:
        return msgspec.json.decode(file.read(), type=Address)


def address_of_own(run_dir: Path, token: str) -> Address | None:
    """Where the job with this token can be asked, if the file of the directory says so."""
    try:
        address = read_address(run_dir)
    except (OSError, ValueError):
        return None
    return address if secrets.compare_digest(address.credentials.token.encode(), token.encode()) else None


def remove_address(run_dir: Path) -> None:
    """The job cannot be asked any more."""
    (run_dir / FILE).unlink(missing_ok=True)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
