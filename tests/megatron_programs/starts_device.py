"""A module that starts a device while it is imported, after which no process must fork."""

import torch

from megatron_elastic.device import soft

soft.load()
torch.ones(1, device="soft")
