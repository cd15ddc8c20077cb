"""The documents: every link leads somewhere, and every page is in the site."""

from __future__ import annotations

import pkgutil
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.jobs import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|<(https?://[^>]+)>|!\[[^\]]*\]\(([^)\s]+)\)")


def prose(page: Path) -> Iterator[str]:
    """The lines of a page that are no code, without what is marked as code in them."""
    fenced = False
    for line in page.read_text().splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith("    "):
            yield re.sub(r"`[^`]*`", "``", line)


def anchors(page: Path) -> set[str]:
    """What links can lead to in a page, as the site and hosting services make them of headings."""
    found: set[str] = set()
    for line in page.read_text().splitlines():
        if match := re.match(r"#+ +(.*)", line):
            text = unicodedata.normalize("NFKD", match[1]).encode("ascii", "ignore").decode()
            found.add(re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for line in prose(page):
        for match in LINK.finditer(line):
            target = next(group for group in match.groups() if group)
            if target.startswith(("http://", "https://", "mailto:")):
                continue
            path, _, anchor = target.partition("#")
            found = (page.parent / path).resolve() if path else page
            assert found.exists(), f"{page.name}: {target}"
            if anchor:
                assert anchor in anchors(found), f"{page.name}: {target}"


def test_every_page_is_in_the_site() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = [page for section in site["nav"] for pages in section.values() for each in pages for page in each.values()]
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_modules_of_communication_are_those_that_there_are() -> None:
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", (ROOT / "docs/communication.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named <= {path.stem for path in (ROOT / "megatron_elastic/comm").rglob("*.py")} and "transport" in named


def test_the_api_page_shows_what_there_is() -> None:
    names = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert "megatron_elastic.adaptor.training.entry.pretrain" in names
    for name in names:
        assert pkgutil.resolve_name(name).__doc__, name
