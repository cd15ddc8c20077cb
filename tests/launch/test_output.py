"""What ranks print, on its way to the console."""

from __future__ import annotations

import queue
import sys
from pathlib import Path

import pytest

from megatron_elastic.cluster.launch.output import BOTH, Console, Echo, _Tail

PATIENCE = 60.0


class Terminal:
    """Has the lines that were written."""

    name = "<stdout>"

    def __init__(self) -> None:
        self.lines: queue.Queue[str] = queue.Queue()

    def write(self, text: str) -> None:
        self.lines.put(text)

    def flush(self) -> None:
        pass


def test_what_a_rank_has_printed_last_is_shown_as_it_ends_and_its_log_is_read_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others take its place, as often as ranks are lost."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    echo = Echo(Console({0: BOTH}))
    try:
        for rank in (3, 4):
            log = tmp_path / f"rank{rank}.log"
            echo.follow(0, rank, log, log)
            log.write_text(f"half a line of rank {rank}")
            echo.ended(rank)
            assert terminal.lines.get(timeout=PATIENCE) == f"[default0]:half a line of rank {rank}\n"
    finally:
        echo.close(PATIENCE)
    assert echo._tails == []


def test_a_bar_that_moves_is_a_line_each_time(tmp_path: Path) -> None:
    """As torchrun shows it, which reads with universal newlines: it may move for days before its line ends."""
    log = tmp_path / "log"
    tail = _Tail(log, sys.stdout, 0, 3, "both")
    seen = []
    for text in ("\r 1%", "\r 2%\r", "\n", "done\r\n3", "\n"):
        with log.open("ab") as file:
            file.write(text.encode())
        seen.append(tail.lines(False))
    assert seen == [[""], [" 1%"], [" 2%"], ["done"], ["3"]]
    assert tail._rest == b""
