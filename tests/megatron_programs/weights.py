"""Prints what a GPT is as Megatron builds it on one rank: the weights of each unit, and the operations of matrix
products in the forward of a micro-batch as torch counts them. A line of JSON.

    python -m tests.megatron_programs.weights FLAGS OF examples/pretrain_gpt.py
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


def main() -> None:
    """Build and count."""
    from megatron_elastic.device import stand_in

    stand_in.install()
    from gpt_arguments import parse_args
    from megatron.core import parallel_state, tensor_parallel
    from pretrain_gpt import model_provider

    from megatron_elastic.adaptor.model.units import unit_parameters
    from megatron_elastic.adaptor.without_cuda import stand_ins

    stand_ins.apply()
    args = parse_args(world_size=1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    model = model_provider(args)
    weights = {name: sum(p.numel() for _, p in members) for name, members in unit_parameters(model).items()}
    tokens = torch.arange(args.seq_length).repeat(args.micro_batch_size, 1)
    # Plain Megatron-core 0.16.1 has no backward on CPUs for experts with biases.
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens, tokens, None, labels=tokens, loss_mask=torch.ones_like(tokens))
    print(json.dumps({"weights": weights, "flops": counter.get_total_flops()}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
