"""One release of Megatron and the next: what has which shape where, what is lacking, and checkpoints of both.

    MEGATRON_LM_PATH=CORE_V0.16.1 MEGATRON_LM_NEXT_PATH=CORE_V0.19.0 bash scripts/test.sh tests/launch/test_versions.py

``MEGATRON_CORE_PATH`` names a folder with another megatron-core than the one that is installed, for all tests; the part
``cores`` of ``scripts/long.sh`` runs some of them with each.
"""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_elastic.adaptor import doctor, lacking, releases, targets
from megatron_elastic.adaptor.releases import RELEASES
from megatron_elastic.adaptor.targets import TARGETS, Since, Target
from megatron_elastic.comm import torch_release
from megatron_elastic.config import UsageError
from megatron_elastic.observe.records import read_digest
from megatron_elastic.patching import Checkout, apply, main, revert
from tests.jobs import ROOT, Jobs
from tests.models.test_checkout import CheckoutJobs, grid, inject, needs_checkout

NEXT = os.environ.get("MEGATRON_LM_NEXT_PATH", "")
TREES = [pytest.param(os.environ.get("MEGATRON_LM_PATH", ""), id="this"), pytest.param(NEXT, id="next")]
needs_next = pytest.mark.skipif(not NEXT, reason="a later Megatron-LM checkout: MEGATRON_LM_NEXT_PATH names none "
                                                 "(core_v0.19.0)")  # fmt: skip


def there(source: str) -> Path:
    if not source:
        pytest.skip("a Megatron-LM checkout: MEGATRON_LM_PATH or MEGATRON_LM_NEXT_PATH names none")
    return Path(source)


# ---- data ------------------------------------------------------------------------------------


def test_changes_are_in_order_and_of_known_releases() -> None:
    for target in TARGETS:
        order = [RELEASES.index(release) for release in (target.first, *(since.release for since in target.later))]
        assert order == sorted(set(order)), target.name


def test_a_target_has_the_shape_of_its_release() -> None:
    target = Target("one", "old", "called", ("a",), "always", "", (
        Since("0.17", name="new"), Since("0.18", module="two", parameters=("a", "b")), Since("0.19", gone=True),
    ))  # fmt: skip
    shapes = [target.in_release(release, lambda _: "is not asked") for release in RELEASES]
    assert [shape and (shape.module, shape.name, shape.parameters) for shape in shapes] == [
        ("one", "old", ("a",)), ("one", "new", ("a",)), ("two", "new", ("a", "b")), None,
    ]
    late = Target("one", "late", "called", (), "always", "", first="0.18")
    assert [late.in_release(release, lambda _: "") is None for release in RELEASES] == [True, True, False, False]


def test_a_release_that_is_not_known_has_the_newest_shape_that_fits() -> None:
    target = Target("one", "thing", "called", ("a",), "always", "", (Since("0.19", parameters=("b",)),))
    found = target.in_release("0.20", lambda shape: "" if shape.parameters == ("a",) else "no")
    assert found is not None
    assert found.parameters == ("a",)
    newest = target.in_release("0.20", lambda _: "no")
    assert newest is not None
    assert newest.parameters == ("b",)


@pytest.mark.parametrize(("tag", "release"), [
    ("core_v0.16.1", "0.16"), ("core_v0.19.0rc1", "0.19"), ("core_v0.20.3", "0.20"), ("0.19.2", "0.19"),
])
def test_releases_are_two_numbers(tag: str, release: str) -> None:
    assert releases.release_of(tag) == release


def test_a_release_that_is_not_known_is_tried_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its sources, before anything is done to it."""
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR, MINOR, PATCH = 0, 20, 0\nMAJOR = 0\nMINOR = 20\nPATCH = 0\n")
    fits = Target("megatron.core.thing", "do", "called", ("a",), "always", "why")
    gpus = Target("megatron.core.thing", "gone", "called", ("a",), "cpu", "why")
    (core / "thing.py").write_text("def do(a): ...\n")
    monkeypatch.setattr(doctor, "TARGETS", (fits, gpus))
    monkeypatch.setattr(releases, "installed", lambda: Checkout.at(tmp_path))
    monkeypatch.setattr(releases, "running", lambda: "0.20")
    assert "Megatron 0.20.0" in doctor.admit(checkout=False, cpu=False)
    with pytest.raises(UsageError, match=r"(?s)does not fit.*NO  called   megatron.core.thing: gone.*does not exist"):
        doctor.admit(checkout=False, cpu=True)
    monkeypatch.setattr(releases, "running", lambda: "0.19")
    assert doctor.admit(checkout=False, cpu=True) == ""


def test_which_torch_is_taken() -> None:
    """By its number, and what the backend needs of the one that is here."""
    assert [torch_release.admit(version) for version in ("2.11.0", "2.13.0+cpu", "2.14.1")] == ["", "", ""]
    assert "2.15.0 is newer than 2.14: it is tried" in torch_release.admit("2.15.0")
    with pytest.raises(UsageError, match=r"torch 2.10.1 is older than 2.11: install one from that to 2.14"):
        torch_release.admit("2.10.1")


def test_what_is_lacking_is_put_in_for_those_who_lack_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels_of_a_gpu.py").write_text(
        "import absent_thing\nimport absent_thing.language as al\nimport os.path\n\n"
        "@absent_thing.jit\ndef kernel(): ...\n"
    )
    (tmp_path / "others_of_a_gpu.py").write_text("import absent_thing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    language = type(sys)("absent_thing.language")
    thing = type(sys)("absent_thing")
    vars(thing).update(jit=lambda kernel: kernel, language=language)
    finder = lacking._Finder({"kernels_of_a_gpu": {"absent_thing": thing, "absent_thing.language": language}})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    found = importlib.import_module("kernels_of_a_gpu")
    assert found.al is language
    assert found.os.path is os.path
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("others_of_a_gpu")
    assert "absent_thing" not in sys.modules


# ---- trees -----------------------------------------------------------------------------------


@pytest.mark.parametrize("source", TREES)
def test_everything_fits(source: str) -> None:
    assert [finding for finding in doctor.examine(there(source)) if finding.problem] == []


@pytest.mark.parametrize("source", TREES)
def test_what_is_imported_of_megatron_is_there(source: str) -> None:
    """Names that our modules import of it, which no target says."""
    sources = doctor._Sources(there(source))
    missing = [
        f"{path.name}: {node.module}: {alias.name}"
        for folder in ("megatron_elastic", "examples") for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron.")
        if (node.module or "").startswith("megatron.core.")
        for alias in node.names
        if sources._module(f"{node.module}.{alias.name}") is None
        if doctor._definition(sources._module(str(node.module)), alias.name) is None
    ]
    assert missing == []


@pytest.mark.parametrize("source", TREES)
def test_a_patch_leaves_no_trace(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the number is another than the tag's that the patch is kept under, as in what core_v0.19.0 names."""
    for name in ("pretrain_gpt.py", "megatron/core/package_info.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(there(source) / name, tmp_path / name)
    checkout = Checkout.at(tmp_path)
    revert(checkout)
    before = (tmp_path / "pretrain_gpt.py").read_bytes()
    assert apply(checkout) == ["pretrain_gpt.py"]
    compile((tmp_path / "pretrain_gpt.py").read_bytes(), "pretrain_gpt.py", "exec")
    assert main(["status", str(tmp_path)]) == 0
    assert "pretrain_gpt.py: patched" in capsys.readouterr().out
    assert revert(checkout) == ["pretrain_gpt.py"]
    assert (tmp_path / "pretrain_gpt.py").read_bytes() == before


# ---- jobs ------------------------------------------------------------------------------------


@needs_checkout
@needs_next
@pytest.mark.job
@pytest.mark.timeout(900)
def test_from_one_release_to_the_next_and_back(jobs: Jobs, tmp_path: Path) -> None:
    """Two steps under one, two under the next with a kill, two under the first: as if it had been one from the
    beginning, bit for bit."""
    releases_here = []
    for name, source in (("this", os.environ["MEGATRON_LM_PATH"]), ("next", NEXT)):
        shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns(".git"))
        revert(Checkout.at(tmp_path / name))
        apply(Checkout.at(tmp_path / name))
        (tmp_path / f"jobs-{name}").mkdir()
        releases_here.append(CheckoutJobs(tmp_path / f"jobs-{name}", jobs.data, tmp_path / name))
    this, following = releases_here
    flags = grid(1, 2, 6)
    reference = this.run(*flags, ranks=4)
    saved = ("--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved"), "--save-interval", "2")
    begun = this.run(*flags, *saved, "--exit-interval", "2", ranks=4)
    killed = inject("kill:rank=3,step=3,at=backward")
    gone_on = following.run(*flags, *saved, "--exit-interval", "2", *killed, ranks=4)
    back = this.run(*flags, *saved, ranks=4)
    expected = reference.metrics()
    for job, steps in ((begun, (1, 2)), (gone_on, (3, 4)), (back, (5, 6))):
        found = {step: line["loss_hex"] for step, line in job.metrics().items()}
        assert found == {step: expected[step]["loss_hex"] for step in steps}
    assert read_digest(back.run_dir)["units"] == read_digest(reference.run_dir)["units"]


@pytest.mark.job
def test_the_core_that_jobs_find_is_the_one_that_is_named() -> None:
    core = os.environ.get("MEGATRON_CORE_PATH")
    if core is None:
        pytest.skip("another megatron-core: MEGATRON_CORE_PATH names none")
    found = subprocess.run([sys.executable, "-c", "import megatron_elastic.adaptor, megatron.core as core; "
                            "print(core.__file__)"], env={**os.environ, "PYTHONPATH": f"{ROOT}:{core}"},
                           capture_output=True, text=True, check=True).stdout  # fmt: skip
    assert found.startswith(core)
    assert targets.BACKWARD.find() is not None
