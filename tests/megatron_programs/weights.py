"""Prints the weights of each unit of a GPT as Megatron builds it on one rank: a line of JSON.

    python -m tests.megatron_programs.weights FLAGS OF examples/pretrain_gpt.py
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


def main() -> None:
    """Build and count."""
    from megatron_elastic.device import cpu

    cpu.install()
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
    units = unit_parameters(model_provider(args))
    print(json.dumps({name: sum(p.numel() for _, p in members) for name, members in units.items()}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
