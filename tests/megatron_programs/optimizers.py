"""Trains a model twice on one rank, with Megatron's optimizer and with ours over slices, and compares the trajectories.

    python -m tests.megatron_programs.optimizers FLAGS OF examples/pretrain_gpt.py

Prints one line of JSON: for each step the difference of all weights relative to how far they have moved (both as norms:
one weight of a bf16 model that is rounded the other way may be as far off as it has moved), and the relative difference
of the gradient norms.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

SLICES = 3


def main() -> None:
    """Train and compare."""
    from megatron_elastic.device import stand_in

    stand_in.install()
    from gpt_arguments import parse_args
    from megatron.core import parallel_state

    args = parse_args(world_size=1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    theirs, ours = _Megatron(args), _Slices(args)
    start = ours.weights()
    generator = torch.Generator().manual_seed(args.seed)
    report = []
    for step in range(1, args.train_iters + 1):
        shape = (args.num_grains, args.micro_batch_size, args.seq_length + 1)
        tokens = torch.randint(args.vocab_size, shape, generator=generator)
        norms = theirs.step(step, tokens), ours.step(step, tokens)
        expected, found = theirs.weights(), ours.weights()
        moved, apart = _distance(expected, start), _distance(expected, found)
        report.append((apart / moved, abs(norms[0] - norms[1]) / norms[0]))
    print(json.dumps(report))
    torch.distributed.destroy_process_group()


def _distance(some: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float((some[name] - others[name]).square().sum()) for name in some))


def _model(args: Any) -> Any:
    from megatron.core import tensor_parallel
    from pretrain_gpt import model_provider

    torch.manual_seed(args.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    return model_provider(args)


def _losses(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(tokens.size(1) - 1).expand(tokens.size(0), -1)
    losses: torch.Tensor = model(tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous())
    return losses.float().mean()


class _Megatron:
    def __init__(self, args: Any) -> None:
        from megatron.core.optimizer import get_megatron_optimizer
        from plain_training import _wrap

        from megatron_elastic.adaptor.settings import build_optimizer_config, build_scheduler
        from megatron_elastic.adaptor.without_cuda import stand_ins, torch_adam

        stand_ins.apply()
        torch_adam.apply()
        self.args = args
        self.bare = _model(args)
        self.model = _wrap(args, self.bare)
        self.optimizer = get_megatron_optimizer(build_optimizer_config(args), [self.model],
                                                use_gloo_process_groups=False)
        self.ratesr = build_scheduler(args, self.optimizer)

    def step(self, step: int, tokens: torch.Tensor) -> float:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        for grain in tokens:
            (_losses(self.model, grain) / len(tokens)).backward()
        self.model.finish_grad_sync()
        _, norm, _ = self.optimizer.step()
        self.ratesr.step(increment=self.args.global_batch_size)
        return float(norm)

    def weights(self) -> Mapping[str, torch.Tensor]:
        return {name: p.detach().float().clone() for name, p in self.bare.named_parameters()}


class _Slices:
    def __init__(self, args: Any) -> None:
        from megatron.core.transformer.module import Float16Module

        from megatron_elastic.adaptor.model.optimizer import ParameterGroups, make_optimizer
        from megatron_elastic.adaptor.model.units import bind_stage
        from megatron_elastic.adaptor.settings import build_optimizer_config, build_scheduler, main_grads_dtype
        from megatron_elastic.adaptor.training.schedules.rates import RatesByStep
        from megatron_elastic.layout import Layout, gpt_units
        from megatron_elastic.numerics.exact import ExactAccumulator
        from megatron_elastic.state.buffer import UnitBuffer
        from megatron_elastic.state.partition import Partition
        from megatron_elastic.state.slice import SliceState

        self.args = args
        self.bare = _model(args)
        units, stages = gpt_units(args.num_layers, 1, tied=not args.untie_embeddings_and_output_weights, positions=True)
        layout = Layout.grid(tp=1, pp=1, dp=1, stage_units=stages, units=units, num_grains=args.num_grains,
                             num_slices=SLICES, replicas=0)
        self.accumulator = ExactAccumulator(args.num_grains, main_grads_dtype(args))
        config = build_optimizer_config(args)
        groups = ParameterGroups(config)
        self.rates = RatesByStep(args, partial(build_scheduler, args), groups)
        self.model = Float16Module(self.bare.config, self.bare) if args.bf16 else self.bare
        self.units: dict[int, UnitBuffer] = {}
        bind_stage([self.bare], layout, 0, groups, {}, self.units, lambda _, shape: Partition(shape, SLICES, 0, 1),
                   self.accumulator)
        optimizer = make_optimizer(config)
        self.states = {
            (unit, k): SliceState(buffer.slice_of(buffer.params, k).to(torch.float32, copy=True), optimizer)
            for unit, buffer in self.units.items()
            for k in range(SLICES)
        }

    def step(self, step: int, tokens: torch.Tensor) -> float:
        from megatron_elastic.numerics.kernels import block_squares
        from megatron_elastic.state.optimizer import Update

        for buffer in self.units.values():
            buffer.zero()
        for grain in tokens:
            _losses(self.model, grain).backward()
        squares = []
        for (unit, k), state in self.states.items():
            buffer = self.units[unit]
            state.grad = self.accumulator.mean([buffer.slice_of(buffer.sums, k)], len(tokens))
            squares.append(block_squares(state.counted(buffer.partition.segments(k))).sum())
        norm = math.sqrt(sum(squares))
        clip = min(1.0, self.args.clip_grad / (norm + 1e-6)) if self.args.clip_grad else 1.0
        rates = self.rates.at((step - 1) * self.args.global_batch_size)
        for (unit, k), state in self.states.items():
            buffer = self.units[unit]
            state.apply(Update(step, clip, rates), buffer.partition.segments(k))
            buffer.slice_of(buffer.params, k).copy_(state.master)
        return norm

    def weights(self) -> Mapping[str, torch.Tensor]:
        return {name: p.detach().float().clone() for name, p in self.bare.named_parameters()}


if __name__ == "__main__":
    main()
