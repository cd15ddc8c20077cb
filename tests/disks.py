"""Small file systems that fill."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(path: Path, kib: int) -> Iterator[Path]:
    """A file system of so many KiB. Skips the test where none can be mounted."""
    with _mounted(path, "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs"):
        yield path


class Freezer:
    """A disk that can be made to stand still: whoever writes to it waits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._frozen = False

    def freeze(self) -> None:
        """Let all writing wait."""
        subprocess.run(["fsfreeze", "--freeze", str(self.path)], check=True)
        self._frozen = True

    def thaw(self) -> None:
        """Let it go on."""
        if self._frozen:
            subprocess.run(["fsfreeze", "--unfreeze", str(self.path)], check=True)
        self._frozen = False


@contextlib.contextmanager
def freezer(path: Path) -> Iterator[Freezer]:
    """A file system in a file beside ``path``, which is made. Skips the test where none can be mounted."""
    if missing := [tool for tool in ("mkfs.ext4", "fsfreeze") if shutil.which(tool) is None]:
        pytest.skip(f"{' and '.join(missing)} not installed")
    image = path.with_name(f"{path.name}.img")
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    with _mounted(path, "-o", "loop", str(image)):
        freezer = Freezer(path)
        try:
            yield freezer
        finally:
            freezer.thaw()


@contextlib.contextmanager
def _mounted(path: Path, *what: str) -> Iterator[None]:
    path.mkdir()
    done = subprocess.run(["mount", *what, str(path)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a file system here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(path: Path) -> None:
    """Take all room that is left."""
    for size in (1 << 16, 64):
        with path.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(size)) == size:
                pass
