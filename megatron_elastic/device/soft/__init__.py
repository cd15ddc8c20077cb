"""soft: a software accelerator, for tests: an extension of torch in C++ with the CPU's kernels, and a device's manners.

Memory that the host cannot touch, streams that run later in threads of their own, a generator with seed and offset,
collectives that block their stream (``softccl``), faults on demand, and counts of launches, synchronisations and bytes.
What passes on it has a fair chance on a real accelerator; what reads too early or through a raw pointer fails.

``SOFT_DEVICES`` (1) is the number of devices of a process, ``SOFT_MEMORY`` (1 GiB) what each has, in bytes;
``SOFT_EXCLUSIVE`` names a directory in which each device is lent to one process at a time.
"""

from __future__ import annotations

import functools

import torch

NAME = "soft"
"""Type of device."""


@functools.cache
def load() -> None:
    """Build the extension if this machine has not yet, load it, and make ``soft`` a device of this process.

    Idempotent. Starts no thread, so a process may fork afterwards; the device is to be used only after that. Raises
    RuntimeError if there is no C++ compiler, with its output if it fails.
    """
    from megatron_elastic.device.soft.build import library

    torch.ops.load_library(str(library()))
    torch.utils.rename_privateuse1_backend(NAME)
    from megatron_elastic.device.soft import ccl, module

    torch._register_device_module(NAME, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    ccl.register()
