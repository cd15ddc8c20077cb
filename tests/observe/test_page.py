"""The report as a page: complete, alone, small, and drawn by a real browser where there is one."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_elastic import cli
from megatron_elastic.layout import Holdings, transfers
from megatron_elastic.observe import page
from megatron_elastic.observe.plot import thinned
from megatron_elastic.observe.records import RunRecords
from megatron_elastic.observe.run import Run
from megatron_elastic.plan.loss import lose
from megatron_elastic.top import Top
from tests.observe.test_observe import RECOVERY, line, make, write_run

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


class Page(HTMLParser):
    """What a page consists of."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_stands_alone_and_is_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path / "run <1>", [3.0, 2.5, 2.0])
    records = RunRecords(run_dir)
    records.layout(replace(make(), epoch=1))
    records.event("error", 1, rank=2, traceback="Traceback:\nValueError: <b>&")
    reference = write_run(tmp_path / "reference", [3.0, 2.5, 2.0])
    path = tmp_path / "page.html"
    assert cli.main(["report", str(run_dir), "--reference", str(reference), "--html", str(path)]) == 0
    assert f"{path}: " in capsys.readouterr().out
    page = Page(path)
    assert not page.open, "a tag is not closed"
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "img", "iframe")
        assert not any((value or "").startswith(("http:", "https:", "//")) for name, value in attributes.items()
                       if name in ("src", "href", "xlink:href")), (tag, attributes)  # fmt: skip
    for text in ("run <1>", "3.0000 → 2.0000", "Equal bit for bit", "kill -9", "before (epoch 0)", "after (epoch 1)",
                 "rank 2 raised ValueError: <b>&", "goodput"):  # fmt: skip
        assert text in page.text, text
    assert sum(tag == "svg" for tag, _ in page.tags) == 3


def test_a_page_says_what_moved_where(tmp_path: Path) -> None:
    """By the layouts, which are asked without the page: a rank is lost, and the others get copies of what it had."""
    run_dir = write_run(tmp_path / "run", [3.0, 2.0])
    old = make(dp=3)
    records = RunRecords(run_dir)
    records.layout(old)
    new = lose(old, [1], Holdings.of(old), epoch=1)
    records.layout(new)
    moves = transfers(new, Holdings.of(old))
    got = sorted({move.dst for move in moves})
    assert got
    records.event("copying", 1, ranks=got[:1], done=[0], bytes=[123_000_000], units=[0], sources=[0])
    page.write(run_dir, path := tmp_path / "page.html")
    table = path.read_text().partition("What moved where")[2].partition("</table>")[0]
    rows = [re.findall(r"<td.*?>(.*?)</td>", row) for row in table.split("</tr>")[1:-1]]
    assert {int(row[1]): int(row[2]) for row in rows} == Counter(move.dst for move in moves)
    assert [row[5] for row in rows] == ["123 MB", *("-" for _ in got[1:])]
    records.layout(replace(make(dp=3, slices=3), epoch=1))  # all is cut anew
    page.write(run_dir, path)
    assert "What moved where" not in Page(path).text


def test_a_page_is_utf8_whatever_the_locale(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [3.0, 2.0])
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # so that text is ASCII
    done = subprocess.run([sys.executable, "-m", "megatron_elastic.cli", "report", run, "--html", tmp_path / "p.html"],
                          env=env, capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "3.0000 → 2.0000" in (tmp_path / "p.html").read_text(encoding="utf-8")


def test_what_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path / "run", [3.0])
    assert cli.main(["report", str(run_dir), "--html", str(tmp_path / "no" / "page.html")]) == 2
    assert "No such file or directory" in capsys.readouterr().err
    RunRecords(tmp_path / "empty").close()
    assert cli.main(["report", str(tmp_path / "empty"), "--html", str(tmp_path / "page.html")]) == 2
    assert "there is no step in the records" in capsys.readouterr().err


@given(st.lists(st.one_of(st.floats(-1e3, 1e3), st.just(float("nan"))), max_size=5000), st.integers(0, 9))
def test_thin_curves_keep_their_ends_and_peaks(values: list[float], seed: int) -> None:
    values = values * (1 + 400 * seed // max(1, len(values)))
    at, kept = thinned(np.arange(len(values)), np.asarray(values, dtype=float))
    finite = [value for value in values if value == value]
    assert len(kept) <= 1200 and list(at) == sorted(set(at))
    if finite:
        assert (min(kept), max(kept)) == (min(finite), max(finite))
        assert all(values[where] == value for where, value in zip(at, kept, strict=True))


def long_run(path: Path, steps: int, recoveries: int) -> Path:
    """The records of a long run that was often disturbed: each time a rank is lost and started again, and a layout is
    made that lasts until the copies are there, and another one.
    """
    records = RunRecords(path)
    every = steps // recoveries
    layout = make()
    for epoch in range(2 * recoveries + 1):
        records.layout(replace(layout, epoch=epoch))
    records.close()
    events: list[dict[str, Any]] = [
        {"kind": "hello", "epoch": 0, "time": 1e9, "rank": rank, "pid": rank, "host": "h"} for rank in layout.ranks
    ]
    metrics = []
    for step in range(1, steps + 1):
        disturbed, epoch, at = step % every == 0, 2 * (step // every), 1e9 + step
        metrics.append({**line(step, 10 / step**0.3), "step_ms": 800.0 + 700 * disturbed, "epoch": epoch})
        if disturbed:
            around: list[dict[str, Any]] = [
                {"kind": "fault", "rank": 1, "signal": "kill -9", "exited_at": at},
                {"kind": "spawned", "ranks": [1]},
                {"kind": "recovered", **RECOVERY, "step": step},
                *({"kind": "replicated", "rank": rank, "step": step} for rank in layout.ranks),
                {"kind": "switched", "step": step, "entered": [1], "shadows": [], "world_size": 8},
                *({"kind": "replicated", "rank": rank, "step": step} for rank in layout.ranks),
            ]
            events += ({"time": at, "epoch": epoch, **event} for event in around)
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in metrics))
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def test_long_runs_make_small_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """100,000 steps, 1,000 recoveries: 5 MB at most."""
    run_dir = long_run(tmp_path / "run", 100_000, 1_000)
    for flags in ([], ["--html", str(tmp_path / "page.html")]):
        assert cli.main(["report", str(run_dir), *flags]) == 0
    assert (tmp_path / "page.html").stat().st_size < 5e6
    assert len(capsys.readouterr().out) < 5e6

    async def begin() -> None:
        async with Top(Run.of_folder(run_dir)).run_test() as pilot:
            await pilot.pause()

    asyncio.run(begin())
    assert cli.main(["status", str(run_dir), "--json"]) == 0
    now = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert now["recoveries"] == 1000
    assert now["goodput"] == pytest.approx(800 / 807, rel=1e-3)


@pytest.mark.skipif(BROWSER is None, reason="neither chromium nor google-chrome is installed")
def test_a_browser_draws_it(tmp_path: Path) -> None:
    """On a desk and on a phone nothing is wider than the window, and the curves have a size."""
    run_dir = write_run(tmp_path / "run", [3.0, 2.5, 2.0])
    path = tmp_path / "page.html"
    assert cli.main(["report", str(run_dir), "--html", str(path)]) == 0
    probe = tmp_path / "probe.html"
    ask = ("<script>addEventListener('load', () => { const svg = document.querySelector('svg').getBoundingClientRect();"
           "document.title = [document.documentElement.scrollWidth, innerWidth, svg.width, svg.height].join(' ') })"
           "</script></html>")  # fmt: skip
    probe.write_text(path.read_text().replace("</html>", ask))
    for width in (1200, 500):
        assert BROWSER is not None
        done = subprocess.run(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
             f"--window-size={width},900", "--dump-dom", f"file://{probe}"],
            capture_output=True, text=True, timeout=120, check=True)  # fmt: skip
        match = re.search(r"<title>([\d. ]+)</title>", done.stdout)
        assert match, done.stdout[:500]
        whole, window, wide, high = map(float, match[1].split())
        assert whole <= window and wide > 0.7 * window and high > 50, match[1]
