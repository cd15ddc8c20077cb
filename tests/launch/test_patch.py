"""Patches for Megatron-LM checkouts: they add our lines exactly, come out exactly, and refuse what they do not know."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

from megatron_elastic import patching
from megatron_elastic.adaptor import doctor, targets
from megatron_elastic.adaptor.targets import TARGETS, Target
from megatron_elastic.config import UsageError
from megatron_elastic.patching import Checkout, Patch

ROOT = Path(__file__).parents[2]
SCRIPT = "one\ntwo\nthree\n"
ADDED = "one\nours\ntwo\nours, too\nand this\nthree\n"


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.com")
    command = ["git", "-C", str(root), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Something that looks like a checkout of release 9.8.7."""
    root = tmp_path / "Megatron-LM"
    (root / "megatron" / "core").mkdir(parents=True)
    (root / "megatron" / "core" / "package_info.py").write_text('MAJOR = 9\nMINOR = 8\nPATCH = 7\nPRE_RELEASE = ""\n')
    (root / "pretrain.py").write_text(SCRIPT)
    (root / "other.py").write_text("other\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "release")
    return root


@pytest.fixture
def patch(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a patch for that release, which becomes the only one that is known."""
    (tree / "pretrain.py").write_text(ADDED)
    text = git(tree, "diff", "-U0", "--full-index")
    git(tree, "checkout", "-q", "pretrain.py")
    path = tmp_path / "pretrain.patch"
    path.write_text(re.sub(r"^(@@ .* @@).*$", r"\1", text, flags=re.MULTILINE))
    parsed = Patch.parse(path.read_text())
    monkeypatch.setattr(patching, "find_patches", lambda: {"core_v9.8.7": [parsed]})
    return path


def test_patches_carry_only_our_lines() -> None:
    """None of Megatron's text: no context, no removed line, no function name in a header."""
    paths = sorted((ROOT / "patches").rglob("*.patch"))
    assert paths
    for path in paths:
        lines = path.read_text().splitlines()
        body = lines[next(i for i, line in enumerate(lines) if line.startswith("@@")) :]
        assert all(line.startswith("+") or (line.startswith("@@") and line.endswith(" @@")) for line in body), path
        assert all("megatron_elastic" in line for line in body if line.startswith("+") and line.strip("+ ")), path
        assert Patch.parse(path.read_text()).path.endswith(".py")
    assert list(patching.find_patches()) == sorted({path.parent.name for path in paths})


@pytest.mark.usefixtures("patch")
def test_apply_and_revert(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both may be repeated, and after revert git sees no difference."""
    assert patching.main(["status", str(tree)]) == 0
    assert "would apply (not patched)" in capsys.readouterr().out
    for expected in ("patched pretrain.py", "nothing to do"):
        assert patching.main(["apply", str(tree)]) == 0
        assert expected in capsys.readouterr().out
        assert (tree / "pretrain.py").read_text() == ADDED
    assert patching.main(["status", str(tree)]) == 0
    assert "pretrain.py: patched" in capsys.readouterr().out
    for expected in ("reverted pretrain.py", "nothing to do"):
        assert patching.main(["revert", str(tree)]) == 0
        assert expected in capsys.readouterr().out
        assert git(tree, "status", "--porcelain") == ""


def test_git_does_the_same(tree: Path, patch: Path) -> None:
    git(tree, "apply", "--unidiff-zero", str(patch))
    assert (tree / "pretrain.py").read_text() == ADDED
    assert patching.revert(Checkout.at(tree)) == ["pretrain.py"]
    patching.apply(Checkout.at(tree))
    git(tree, "apply", "--unidiff-zero", "--reverse", str(patch))
    assert git(tree, "status", "--porcelain") == ""


@pytest.mark.usefixtures("patch")
def test_a_tree_without_git(tree: Path, tmp_path: Path) -> None:
    """A release unpacked from an archive."""
    (tree / ".git").rename(tmp_path / "elsewhere")
    assert patching.apply(Checkout.at(tree)) == ["pretrain.py"]
    assert patching.revert(Checkout.at(tree)) == ["pretrain.py"]
    assert (tree / "pretrain.py").read_text() == SCRIPT


@pytest.mark.usefixtures("patch")
def test_refusals(tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is not as released is left as it is, with the reason."""

    def refused(action: str, reason: str, root: Path = tree) -> None:
        before = git(tree, "status", "--porcelain")
        assert patching.main([action, str(root)]) == 1
        assert reason in capsys.readouterr().err
        assert git(tree, "status", "--porcelain") == before

    refused("apply", "is no Megatron-LM checkout", tmp_path)
    (tree / "other.py").write_text("changed\n")
    refused("apply", "uncommitted changes (other.py): commit or stash them")
    git(tree, "checkout", "-q", "other.py")
    (tree / "pretrain.py").write_text(SCRIPT + "four\n")
    refused("apply", "is neither the file of core_v9.8.7 nor that with our lines")
    refused("revert", "is neither the file of core_v9.8.7 nor that with our lines")
    (tree / "pretrain.py").unlink()
    refused("apply", "does not exist, although this is core_v9.8.7")
    git(tree, "checkout", "-q", "pretrain.py")
    info = tree / "megatron" / "core" / "package_info.py"
    info.write_text(info.read_text().replace("8", "9"))
    refused("apply", "there are patches for core_v9.8.7 only: check one of these out\n")
    released = info.read_text()
    info.write_text(released.replace("MINOR = 9", "MINOR = 8").replace("PATCH = 7", "PATCH = 8"))
    (tree / "pretrain.py").write_text(SCRIPT + "four\n")
    refused("apply", "If it is core_v9.8.7, whose number is another one, somebody edited pretrain.py")
    git(tree, "checkout", "-q", "pretrain.py")
    info.write_text(released)
    assert patching.main(["status", str(tree)]) == 1
    assert "core_v9.9.7, for which there are no patches" in capsys.readouterr().out
    info.write_text("")
    refused("status", "names no version")
    for text in ("MAJOR = ", "\0"):
        info.write_text(text)
        refused("status", f"{info} is no Python (")


@pytest.mark.usefixtures("patch")
def test_other_changes_do_not_keep_it_in(tree: Path) -> None:
    """Our lines come out whatever else was edited meanwhile."""
    patching.apply(Checkout.at(tree))
    (tree / "other.py").write_text("changed\n")
    assert patching.apply(Checkout.at(tree)) == []
    assert patching.revert(Checkout.at(tree)) == ["pretrain.py"]


def test_the_tag_comes_before_the_number(tree: Path) -> None:
    """Megatron-LM has releases whose number is another than their tag's."""
    assert Checkout.at(tree).tag == "core_v9.8.7"
    git(tree, "tag", "core_v9.8.6")
    assert Checkout.at(tree).tag == "core_v9.8.6"


@pytest.mark.parametrize("text", ["", "@@ -1,2 +1 @@\n-gone\n", "index 1..2\n+++ b/x\n@@ -1,0 +2 @@\n+y\n"])
def test_other_diffs_are_no_patches(text: str) -> None:
    with pytest.raises(ValueError):
        Patch.parse(text)


# ---- targets and doctor ---------------------------------------------------------------------


def test_the_installed_core_fits() -> None:
    """Everything that the adaptors change or call in megatron.core is as they expect it."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    findings = doctor.examine(Path(spec.origin).parents[2])
    misfits = [f for f in findings if f.problem and f.target.module.startswith("megatron.core")]
    assert misfits == []
    here = [target for target in TARGETS if target.when != "engine" and target._here() is not None]
    assert len(findings) == len(here)


def test_doctor_finds_what_does_not_fit(tmp_path: Path) -> None:
    """Also what is imported from elsewhere, or defined under a condition."""
    package = tmp_path / "megatron"
    package.mkdir()
    (package / "one.py").write_text(
        "from .two import there as here, deep\n"
        "class Thing:\n    def method(self, a, *, b): ...\n"
        "try:\n    value = 1\nexcept ImportError:\n    value = 2\n"
    )
    (package / "two.py").write_text("from megatron.three import deep\ndef there(x, **kwargs): ...\n")
    (package / "three.py").write_text("def deep(): ...\n")

    def problem(name: str, parameters: tuple[str, ...] | None, use: str = "replaced", module: str = "one") -> str:
        target = Target(f"megatron.{module}", name, use, parameters, "always", "")  # type: ignore[arg-type]
        return doctor._Sources(tmp_path).problem(target)

    assert problem("here", ("x", "kwargs")) == ""
    assert problem("deep", ()) == ""
    assert problem("value", None) == ""
    assert problem("Thing.method", ("self", "a", "b")) == ""
    assert problem("Thing.method", ("a",), use="called") == ""
    assert problem("here", ("anything",), use="called") == ""
    assert problem("Thing.method", ("self", "a")) == "takes (self, a, b), expected (self, a)"
    assert problem("Thing.gone", ()) == "it does not exist"
    assert problem("Gone.method", ()) == "it does not exist"
    assert problem("gone", ()) == "it does not exist"
    assert problem("value", ()) == "it is no function"
    assert problem("here", (), module="four") == "there is no such module"


def test_a_change_checks_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """At run time, too: the change is made only where it fits, once, and may be repeated."""
    monkeypatch.setattr(targets, "_originals", {})
    monkeypatch.setattr(patching, "_some", patching._some)  # puts back what the test replaces
    fits = Target("megatron_elastic.patching", "_some", "replaced", ("names",), "always", "")
    fits.replace(lambda names: "first")
    fits.replace(lambda names: "second")
    assert patching._some([]) == "second"
    fits.wrap(lambda original: lambda names: f"wrapped {original(names)}")
    fits.wrap(lambda original: lambda names: f"wrapped {original(names)}")
    assert patching._some(["a"]) == "wrapped a"
    for module, name, problem in (
        ("megatron_elastic.patching", "_blob", "takes (content), expected (names)"),
        ("megatron_elastic.patching", "gone", "it does not exist"),
        ("megatron_elastic.gone", "gone", "there is no such module"),
    ):
        with pytest.raises(targets.AdaptorError, match="megatron-elastic doctor CHECKOUT") as caught:
            Target(module, name, "replaced", ("names",), "always", "").replace(None)
        assert problem in str(caught.value)


def test_find_patches_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching, "__file__", str(tmp_path / "package" / "patching.py"))
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(UsageError, match="install megatron_elastic again"):
        patching.find_patches()
