"""What tests wait for: limits count since a launcher has last said something."""

from __future__ import annotations

import subprocess

import pytest

from tests.nursery import output_until, rest_of


def _started(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_who_says_nothing_is_killed() -> None:
    silent = _started("echo one; echo two; echo three; read line")
    assert output_until(silent, "two", 60) == ("one\ntwo\n", "two\n")
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        rest_of(silent, 0.2)
    assert silent.returncode == -9 and caught.value.output in ("three\n", "")
    silent = _started("read line")
    with pytest.raises(AssertionError, match=r"printed nothing for 0.1 s, and not 'two' before"):
        output_until(silent, "two", 0.1)
    silent.wait()


def test_who_ends_has_said_all() -> None:
    whole = _started("echo one; echo two")
    assert rest_of(whole, 60) == "one\ntwo\n" and whole.returncode == 0
    whole = _started("echo one")
    with pytest.raises(AssertionError, match=r"ended without printing 'two':\none\n"):
        output_until(whole, "two", 60)
    whole.wait()
