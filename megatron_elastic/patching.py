"""Patching: ``megatron-elastic patch`` adds our few lines to a Megatron-LM checkout, and takes them out again.

``patches/<tag>/*.patch`` are unified diffs without context that only add lines, so they carry none of Megatron's text;
``git apply --unidiff-zero`` does the same with them. Each names the blobs of the file before and after, in full. A file
is touched only if it is the one or the other, so a patch never lands in the wrong place and comes out exactly.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_elastic import usage
from megatron_elastic.config import UsageError

_EXAMPLES = """\
examples:
  megatron-elastic patch status ~/Megatron-LM  what is there, what would apply
  megatron-elastic patch apply ~/Megatron-LM   add our lines; does nothing if
                                               they are there
  megatron-elastic patch revert ~/Megatron-LM  take them out; the files are as
                                               they were, byte for byte

status exits with 0 if the checkout is patched or can be, apply and revert if the checkout is as asked for.
"""
_HEADER = re.compile(r"^@@ -(\d+),0 \+\d+(?:,(\d+))? @@$")


@dataclass(frozen=True, slots=True)
class Patch:
    """What one patch does to one file: lines put in after given lines, and the blobs before and after."""

    path: str
    before: str
    after: str
    insertions: tuple[tuple[int, tuple[bytes, ...]], ...]
    """(line after which to insert, 1-based; lines with their ends), in the order of the file."""

    @classmethod
    def parse(cls, text: str) -> Patch:
        """Read one file's unified diff. Raises ValueError if it does anything but add lines without context."""
        path = before = after = ""
        insertions: list[tuple[int, tuple[bytes, ...]]] = []
        lines = iter(text.splitlines())
        for line in lines:
            if line.startswith("+++ b/"):
                path = line.removeprefix("+++ b/")
            elif line.startswith("index "):
                before, _, after = line.split()[1].partition("..")
            elif line.startswith("@@"):
                header = _HEADER.match(line)
                if header is None:
                    raise ValueError(f"{line!r} does more than add lines; make the patch with git diff -U0")
                added = [next(lines) for _ in range(int(header[2] or 1))]
                if not all(one.startswith("+") for one in added):
                    raise ValueError(f"the lines below {line!r} are not all added ones")
                insertions.append((int(header[1]), tuple(one[1:].encode() + b"\n" for one in added)))
        if not (path and insertions and len(before) == len(after) == 40):
            raise ValueError("not a diff of one file with full blob names; make it with git diff -U0 --full-index")
        return cls(path, before, after, tuple(insertions))

    def apply(self, content: bytes) -> bytes:
        """The file with our lines; ``content`` is the file without them."""
        lines = content.splitlines(keepends=True)
        for position, added in reversed(self.insertions):
            lines[position:position] = added
        return b"".join(lines)

    def revert(self, content: bytes) -> bytes:
        """The file without our lines; ``content`` is the file with them."""
        lines = content.splitlines(keepends=True)
        for position, added in self.insertions:
            del lines[position : position + len(added)]
        return b"".join(lines)


@dataclass(frozen=True, slots=True)
class Checkout:
    """A Megatron-LM source tree; ``tag`` is its release's name in Megatron-LM's repository."""

    root: Path
    tag: str

    @classmethod
    def at(cls, root: Path) -> Checkout:
        """Raises UsageError if there is no Megatron-LM source tree at ``root``."""
        info = root / "megatron" / "core" / "package_info.py"
        if not info.is_file():
            raise UsageError(f"{root} is no Megatron-LM checkout: there is no {info}")
        values: dict[str, object] = {}
        try:
            statements = ast.parse(info.read_bytes()).body
        except (SyntaxError, ValueError) as error:
            raise UsageError(f"{info} is no Python ({error}); is this a Megatron-LM checkout?") from None
        for node in statements:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                    values[name] = value
        try:
            numbers = ".".join(str(values[name]) for name in ("MAJOR", "MINOR", "PATCH"))
        except KeyError as missing:
            raise UsageError(f"{info} names no version ({missing}); is this a Megatron-LM checkout?") from None
        # The tag comes first: some releases carry the number of the one before, or after.
        return cls(root, _tag(root) or f"core_v{numbers}{values.get('PRE_RELEASE', '')}")

    def state(self, patch: Patch) -> str:
        """``clean``, ``applied``, ``missing`` (no such file) or ``other`` (not the release's text)."""
        path = self.root / patch.path
        if not path.is_file():
            return "missing"
        return {patch.before: "clean", patch.after: "applied"}.get(_blob(path.read_bytes()), "other")

    def changed_files(self, but: Sequence[str]) -> list[str]:
        """Files that git tracks and that differ from its last commit, without those named. None outside of git."""
        listed = _git(self.root, "status", "--porcelain", "--untracked-files=no", "--no-renames", "-z") or ""
        return sorted({entry[3:] for entry in listed.split("\0") if entry} - set(but))


def find_patches() -> dict[str, list[Patch]]:
    """Our patches by the tag of the release that they are for. Raises UsageError if they are not installed."""
    beside = Path(__file__).parent.parent / "patches"
    installed = Path(sysconfig.get_path("data")) / "share" / "megatron_elastic" / "patches"
    for root in (beside, installed):
        if root.is_dir():
            return {
                folder.name: [Patch.parse(path.read_text()) for path in sorted(folder.glob("*.patch"))]
                for folder in sorted(root.iterdir())
            }
    raise UsageError(f"the patches are neither in {beside} nor in {installed}; install megatron_elastic again")


def apply(checkout: Checkout) -> list[str]:
    """Add our lines; returns the files changed, none if all have them. Raises UsageError and changes nothing if it
    cannot be done to all."""
    patches = _patches_for(checkout)
    states = _states(checkout, patches)
    todo = [patch for patch in patches if states[patch.path] == "clean"]
    changed = checkout.changed_files(but=[path for path, state in states.items() if state == "applied"])
    if todo and changed:
        raise UsageError(f"{checkout.root} has uncommitted changes ({_some(changed)}): commit or stash them first, so "
                         "that git shows our lines alone")
    _write(checkout, [(patch.path, patch.apply, patch.after) for patch in todo])
    return [patch.path for patch in todo]


def revert(checkout: Checkout) -> list[str]:
    """Take our lines out; returns the files changed, none if none has them. Raises UsageError and changes nothing if
    a file was edited since."""
    patches = _patches_for(checkout)
    states = _states(checkout, patches)
    todo = [patch for patch in patches if states[patch.path] == "applied"]
    _write(checkout, [(patch.path, patch.revert, patch.before) for patch in todo])
    return [patch.path for patch in todo]


def make_parser() -> argparse.ArgumentParser:
    """The flags of ``megatron-elastic patch``."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic patch", formatter_class=usage.Formatter, epilog=_EXAMPLES,
        description="Add a few lines to a Megatron-LM checkout, so that its scripts know --elastic.",
    )
    parser.add_argument("action", choices=("status", "apply", "revert"))
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="folder of a Megatron-LM source tree")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """``megatron-elastic patch``. Returns the exit code: 0 as asked for, 1 not so, 2 bad usage."""
    options = make_parser().parse_args(argv)
    try:
        checkout = Checkout.at(options.checkout)
        if options.action == "status":
            return _status(checkout)
        done = (apply if options.action == "apply" else revert)(checkout)
    except (UsageError, OSError) as error:
        print(f"megatron-elastic: error: {error}", file=sys.stderr)
        return 1
    verb = {"apply": "patched", "revert": "reverted"}[options.action]
    print(f"{checkout.root}: {verb} {', '.join(done)}" if done else f"{checkout.root}: nothing to do")
    return 0


def _status(checkout: Checkout) -> int:
    known = find_patches()
    tag = _fitting(checkout, known)
    print(f"{checkout.root}: Megatron-LM {checkout.tag}" + ("" if tag else ", for which there are no patches"))
    states = []
    for name in [tag] if tag else known:
        for patch in known[name]:
            states.append(checkout.state(patch))
            print(f"  {name}/{patch.path}: {_explain(states[-1], name)}")
    if not tag:
        print("  It was released for another version, so nothing is applied here. What the adaptors change and call:")
        print(f"  megatron-elastic doctor {checkout.root}")
        return 1
    changed = checkout.changed_files(but=[patch.path for patch in known[tag]])
    if changed:
        print(f"  uncommitted changes, with which apply refuses to work: {_some(changed)}")
    return 0 if set(states) <= {"clean", "applied"} else 1


def _explain(state: str, tag: str) -> str:
    return {
        "clean": "would apply (not patched)",
        "applied": "patched",
        "missing": "would not apply: there is no such file",
        "other": f"would not apply: its text is not that of {tag}",
    }[state]


def _patches_for(checkout: Checkout) -> list[Patch]:
    known = find_patches()
    tag = _fitting(checkout, known)
    if tag is None:
        maybe = "".join(f". If it is {alike}, whose number is another one, somebody edited "
                        f"{', '.join(patch.path for patch in known[alike])}: get the released one back"
                        for alike in _alike(checkout, known))  # fmt: skip
        raise UsageError(f"{checkout.root} is Megatron-LM {checkout.tag}; there are patches for "
                         f"{', '.join(known)} only: check one of these out{maybe}")
    return known[tag]


def _fitting(checkout: Checkout, known: Mapping[str, Sequence[Patch]]) -> str | None:
    """The tag whose patches are for a checkout: its own, or one of the same two numbers whose files it has."""
    if checkout.tag in known:
        return checkout.tag
    return next((tag for tag in _alike(checkout, known)
                 if {checkout.state(patch) for patch in known[tag]} <= {"clean", "applied"}), None)  # fmt: skip


def _alike(checkout: Checkout, known: Iterable[str]) -> list[str]:
    """The tags of the same two numbers: not all releases have the number that their tag says."""
    return [tag for tag in known if tag.split(".")[:2] == checkout.tag.split(".")[:2]]


def _states(checkout: Checkout, patches: Sequence[Patch]) -> dict[str, str]:
    """Which files have our lines: ``clean`` or ``applied``, by path. Raises UsageError if one is neither."""
    states = {patch.path: checkout.state(patch) for patch in patches}
    for path, state in states.items():
        if state in ("missing", "other"):
            raise UsageError(_refusal(checkout, path, state))
    return states


def _refusal(checkout: Checkout, path: str, state: str) -> str:
    if state == "missing":
        return f"{checkout.root / path} does not exist, although this is {checkout.tag}: get it back with git checkout"
    return (f"{checkout.root / path} is neither the file of {checkout.tag} nor that with our lines: somebody edited "
            f"it. See git diff; git checkout {path} gets the released one back, or add the lines of "
            f"patches/{checkout.tag} by hand")


_Edit = tuple[str, Callable[[bytes], bytes], str]
"""Path, how its content changes, and the blob that must come out."""


def _write(checkout: Checkout, edits: Sequence[_Edit]) -> None:
    """Compute every new content before the first file is written, so that all change or none."""
    contents: list[tuple[Path, bytes]] = []
    for name, edit, expected in edits:
        path = checkout.root / name
        content = edit(path.read_bytes())
        if _blob(content) != expected:
            raise UsageError(f"the patch for {path} does not give the file that it promises: install megatron_elastic "
                             "again")
        contents.append((path, content))
    for path, content in contents:
        path.write_bytes(content)


def _tag(root: Path) -> str | None:
    tag = _git(root, "describe", "--tags", "--exact-match", "--match", "core_v*")
    return tag.strip() if tag else None


def _git(root: Path, *arguments: str) -> str | None:
    """What git says about the tree at ``root``; None if that is no git checkout of its own."""
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _blob(content: bytes) -> str:
    """Git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
