"""Running a compiler: what it says, and its limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_elastic.compiler import run_compiler


def test_what_it_says_where_it_fails_is_told() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)the compiler failed: sh -c .*\nno such type$"):
        run_compiler(["sh", "-c", "echo begins >&2; echo no such type >&2; exit 3"], limit=60.0)


def test_it_has_a_limit(tmp_path: Path) -> None:
    never = tmp_path / "never"
    os.mkfifo(never)
    with pytest.raises(RuntimeError, match=r"the compiler was not done within 0\.1 s: cat "):
        run_compiler(["cat", str(never)], limit=0.1)


def test_it_may_say_what_is_no_text() -> None:
    with pytest.raises(RuntimeError, match="the compiler failed"):
        run_compiler(["sh", "-c", r"printf '\377' >&2; exit 1"], limit=60.0)
