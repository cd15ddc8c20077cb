"""torch finds the backend by itself where this package is installed, and importing torch costs no more for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.jobs import ROOT

GROUP = """
import torch
import torch.distributed as dist
dist.init_process_group("elastic", store=dist.FileStore({store!r}, 2), rank={rank}, world_size=2)
tensor = torch.ones(3)
dist.all_reduce(tensor)
assert tensor.tolist() == [2.0] * 3
assert dist.get_backend() == "elastic"
dist.destroy_process_group()
"""
IMPORTED = """
import json, sys, time
import megatron_elastic.comm.registration as registration
before = "torch" in sys.modules
import torch
begun = time.perf_counter()
registration.register()
took = time.perf_counter() - begun
named = "ELASTIC" in torch.distributed.Backend._plugins
ours = [name for name in sys.modules if name.startswith("megatron_elastic")]
print(json.dumps({"before": before, "took": took, "named": named, "ours": ours, "ucx": "ucxx" in sys.modules}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as ``pip install`` leaves it."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in ("megatron_elastic", "patches"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "LICENSE"):
        shutil.copy(ROOT / name, source)
    flags = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    subprocess.run([sys.executable, "-m", "pip", "install", *flags, "--target", target, source], check=True)
    return target


def run(code: str, where: Path, **env: str) -> subprocess.Popen[str]:
    """A program in the environment that has the package there."""
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=where,
        env={**os.environ, "PYTHONPATH": str(where), **env},
    )  # fmt: skip


def test_a_group_needs_no_import(installed: Path, tmp_path: Path) -> None:
    ranks = [run(GROUP.format(store=str(tmp_path / "store"), rank=rank), installed) for rank in range(2)]
    for rank in ranks:
        rank.communicate(timeout=60)
    assert [rank.returncode for rank in ranks] == [0, 0]


def test_importing_torch_imports_nothing_else_of_ours(installed: Path) -> None:
    process = run(IMPORTED, installed, TORCH_DEVICE_BACKEND_AUTOLOAD="0")  # so that it can be timed
    told = json.loads(process.communicate(timeout=60)[0])
    assert told["named"] and not told["before"] and not told["ucx"]
    assert sorted(told["ours"]) == ["megatron_elastic", "megatron_elastic.comm", "megatron_elastic.comm.registration"]
    assert told["took"] < 0.05  # it takes less than a millisecond


def test_the_entry_point_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["torch.backends"] == {"elastic": "megatron_elastic.comm.registration:register"}
