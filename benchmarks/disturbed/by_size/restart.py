"""Restart: what a lost rank costs a plain job that torchrun restarts from a checkpoint of every step."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import uuid
from contextlib import closing
from pathlib import Path

from common import JobFailed, progress, watch

from disturbed.by_size.models import RANKS, Model, flags_of

_MARK = "MEGATRON_ELASTIC_BENCH_JOB"
_STEP = re.compile(r"^ iteration +(\d+)/")
_SAVED = re.compile(r"^saved iteration (\d+) ")
_VICTIM = 3
_STAGES = 2
"""Eight whole models with their gradients and what is being saved of them would not fit a small machine."""
_BEGIN, _KILL, _END = 1, 3, 5
"""Last step of the job that makes the first checkpoint; the step after which a rank is killed; the last step."""


def restart_ms(model: Model, data: Path, root: Path) -> float:
    """From ``kill -9`` of a rank to the end of the next step that had not been taken before, in ms."""
    saved = root / f"{model.name}-checkpoints"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS),
               "--max-restarts", "1", "examples/pretrain_gpt.py", "--use-distributed-optimizer",
               "--save", str(saved), "--save-interval", "1", "--log-interval", "1"]
    mark = uuid.uuid4().hex
    env = {_MARK: mark, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1",
           # Else restarted ranks find the addresses of the dead ones in the store (torch 2.13).
           "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    for _ in watch([*command, *flags_of(model, data, _STAGES, _BEGIN)], root / f"{model.name}-first.out", env):
        pass
    killed_at = 0.0
    flags = [*flags_of(model, data, _STAGES, _END), "--load", str(saved)]
    with closing(watch([*command, *flags], root / f"{model.name}-restart.out", env)) as lines:
        for line in lines:
            if not killed_at and (match := _SAVED.match(line)) and int(match[1]) == _KILL:
                os.kill(_find(mark), signal.SIGKILL)
                killed_at = time.time()
            elif killed_at and (match := _STEP.match(line)) and int(match[1]) > _KILL:
                took = (time.time() - killed_at) * 1e3
                break
        else:
            raise JobFailed(f"the restarted job of {model.name} did not reach step {_KILL + 1}")
    progress(f"{model.name}: back after a restart in {took:.0f} ms")
    return took


def _find(mark: str) -> int:
    """The process of the victim in the job with this mark."""
    wanted = {f"{_MARK}={mark}".encode(), f"RANK={_VICTIM}".encode()}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                return int(entry.name)
        except OSError:
            continue
    raise JobFailed(f"rank {_VICTIM} of the plain job is not to be found")
