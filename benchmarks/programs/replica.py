"""Replica: one process of ``data_parallel_gpt.py``, its model, its optimizer and its loop."""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from pretrain_gpt import forward_step, model_provider

from megatron_elastic.adaptor.samples.sample import collate

_GLOO_TIMEOUT = timedelta(seconds=0.5)
"""Tuned: as short as an undisturbed job of eight replicas on two cores bears; torchft's default is a minute."""


@dataclass(frozen=True, slots=True)
class Kill:
    """Which replica kills itself, and in which step, as it begins the backward pass."""

    replica: int
    step: int


@dataclass(slots=True)
class Replica:
    """What the loop needs of a way to be data parallel."""

    model: Any
    optimizer: Any
    step: Callable[[], int]
    """Steps committed so far."""
    replicas: Callable[[], int]
    """How many took part in the attempt that has ended."""


def with_torchft(args: argparse.Namespace, me: int, lighthouse: str) -> Replica:
    """Be a replica group of one process."""
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=0, world_size=1)
    model = _model(args)
    optimizer = _optimizer(args, model)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_GLOO_TIMEOUT), min_replica_size=1, replica_id=f"replica{me}", rank=0, world_size=1,
        store_addr="localhost", store_port=store.port, lighthouse_addr=lighthouse, hostname="localhost",
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        load_state_dict=lambda state: (model.load_state_dict(state["model"]),
                                       optimizer.load_state_dict(state["optimizer"])),
    )
    return Replica(DistributedDataParallel(manager, model), Optimizer(manager, optimizer), manager.current_step,
                   manager.num_participants)


def with_ddp(args: argparse.Namespace, me: int, folder: Path) -> Replica:
    """Be a rank of torch's own data parallelism, over gloo."""
    store = dist.FileStore(str(folder / "store"), args.world_size)
    dist.init_process_group("gloo", store=store, rank=me, world_size=args.world_size)
    model = torch.nn.parallel.DistributedDataParallel(_model(args))
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    optimizer = _optimizer(args, model)
    optimizer.register_step_post_hook(count)
    return Replica(model, optimizer, lambda: steps, lambda: args.world_size)


def _model(args: argparse.Namespace) -> GPTModel:
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    torch.manual_seed(args.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    return model_provider(args)


def _optimizer(args: argparse.Namespace, model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(args.adam_beta1, args.adam_beta2),
                             eps=args.adam_eps, weight_decay=args.weight_decay)


def train(args: argparse.Namespace, me: int, replica: Replica, data: Any, records: Path, kill: Kill | None) -> None:
    """Train until all steps are committed, on one micro-batch in each."""
    size, samples = args.micro_batch_size, args.train_iters * args.global_batch_size
    first = me * size
    with (records / f"{me}.jsonl").open("w", buffering=1) as file:
        while (step := replica.step() + 1) <= args.train_iters:
            began = time.monotonic()
            replica.optimizer.zero_grad()
            batch = collate([data[i % samples] for i in range(first, first + size)])
            output, loss_func = forward_step(iter([batch]), replica.model)
            loss, tokens, _ = loss_func(output)
            if kill == Kill(me, step):
                file.write(json.dumps({"killed": time.monotonic()}) + "\n")
                os.kill(os.getpid(), signal.SIGKILL)
            (loss / tokens).backward()
            torch.nn.utils.clip_grad_norm_(replica.model.parameters(), args.clip_grad)
            replica.optimizer.step()
            file.write(json.dumps({"step": step, "began": began, "ended": time.monotonic(),
                                   "committed": replica.step() == step, "replicas": replica.replicas()}) + "\n")
            first += args.global_batch_size
