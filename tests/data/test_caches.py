"""Indices of data on two nodes: built where they are missing, once a cache, whoever dies or is busy meanwhile.

A node with a cache of its own is a mount namespace with a file system of its own over the cache's path.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_elastic.cluster import wire
from tests.jobs import Job, environment
from tests.launches import TOKEN, free_port
from tests.models.test_checkout import CheckoutJobs, assert_same, checkout, inject, needs_checkout, patched, search_path

__all__ = ["checkout", "patched"]
pytestmark = [needs_checkout, pytest.mark.timeout(900)]

PER_NODE = 2
PP2 = ("--pipeline-model-parallel-size", "2", "--train-iters", "3", "--eval-iters", "0")
NOTING = """
import signal, sys, threading, time
from megatron.core.datasets import gpt_dataset
_shuffle = gpt_dataset._build_shuffle_index
def noting(*sizes):
    with open({notes!r}, "a") as file:
        print(os.environ["RANK"], file=file)
    {act}
    return _shuffle(*sizes)
gpt_dataset._build_shuffle_index = noting
"""
KILLED = """if not os.path.exists({once!r}):
        open({once!r}, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)"""
BUSY = """if not os.path.exists({once!r}):
        open({once!r}, "w").close()
        begun = time.thread_time()
        sys.setswitchinterval(1e6)  # seconds for which no other thread of this process gets the interpreter
        while time.thread_time() - begun < {seconds}:
            pass
        sys.setswitchinterval(0.005)"""


@dataclass(frozen=True)
class Two:
    """Jobs of two nodes whose script notes who builds an index, and then acts."""

    patched: CheckoutJobs
    folder: Path

    def run(self, name: str, *flags: str, own: bool, act: str = "pass") -> Job:
        """A job with caches of its nodes' own, or one that both share, which are empty."""
        cache, run_dir = self.folder / f"cache-{name}", self.folder / name
        cache.mkdir()
        script = self.patched.checkout / f"pretrain_gpt_{name}.py"
        main = 'if __name__ == "__main__":'
        noting = NOTING.format(notes=str(self.folder / f"{name}.notes"), act=act)
        script.write_text((self.patched.checkout / "pretrain_gpt.py").read_text().replace(main, noting + main))
        env = {**environment(), "PYTHONPATH": search_path(), wire.TOKEN_VARIABLE: TOKEN}
        mount = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"', str(cache)]
        port, nodes = str(free_port()), []
        for node in range(2):
            launcher = ("--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", port)
            command = self.patched.command("--elastic", *PP2, *flags, "--data-cache-path", str(cache), script=script,
                                           run_dir=run_dir, ranks=PER_NODE, launcher=launcher)  # fmt: skip
            process = subprocess.Popen([*(mount if own else ()), *command], cwd=self.folder, env=env, text=True,
                                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
            nodes.append(Job(process, run_dir))
        try:
            for job in nodes:
                job.finish()
        finally:
            for job in nodes:
                job.process.kill()
                job.process.wait()
        return nodes[0]

    def builders(self, name: str) -> Counter[int]:
        """How many indices each node has built."""
        notes = (self.folder / f"{name}.notes").read_text().split()
        return Counter(int(rank) // PER_NODE for rank in notes)


@pytest.fixture
def two(patched: CheckoutJobs, tmp_path: Path) -> Two:
    if shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("mount namespaces: needs root, and unshare of util-linux")
    return Two(patched, tmp_path)


def test_indices_are_built_once_a_cache(two: Two) -> None:
    shared, own = two.run("shared", own=False), two.run("own", own=True)
    assert_same(own, shared)
    parts = sum(two.builders("shared").values())
    assert parts and len(two.builders("shared")) == 1, "by one rank in all"
    assert two.builders("own") == {0: parts, 1: parts}, "by one rank a node"


def test_a_builder_is_killed(two: Two) -> None:
    act = KILLED.format(once=str(two.folder / "once"))
    job, whole = two.run("killed", own=False, act=act), two.run("whole", own=False)
    assert_same(job, whole)
    assert len(job.events("recovered")) == 1


def test_a_builder_keeps_the_interpreter_for_long(two: Two) -> None:
    """Far longer than the time after which a rank counts as hanging; and a fault afterwards is one."""
    seconds = float(os.environ.get("MEGATRON_ELASTIC_TEST_BUSY", "15"))
    limits = ("--elastic-hang-timeout", "5", "--elastic-suspect-timeout", "5")
    job = two.run("busy", *limits, *inject("kill:rank=1,step=2,at=data"), own=False,
                  act=BUSY.format(once=str(two.folder / "once"), seconds=seconds))  # fmt: skip
    assert len(job.events("recovered")) == 1, "from the kill alone"
    assert_same(job, two.run("calm", own=False))
