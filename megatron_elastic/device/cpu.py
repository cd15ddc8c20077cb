"""CPU: what Megatron's core takes from ``torch.cuda``, answered by the CPU.

Megatron-core names its device "cuda" throughout. ``install`` gives those names a meaning on a machine without a GPU:
the "current device" is the CPU, waiting for it is over at once, and its generator is torch's CPU generator.
Nothing here imports Megatron; what has to change inside its modules is in ``megatron_elastic.adaptor.cpu``.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

_CPU = torch.device("cpu")
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "ones_like", "empty_like")
"""Functions that Megatron calls with ``device="cuda"`` on the paths that a GPT on a CPU takes."""

_installed = False


def needed() -> bool:
    """Whether this process has to run Megatron without a CUDA device."""
    return _installed or not torch.cuda.is_available()


def install() -> None:
    """Make megatron-core run on the CPU in this process. Call it before Megatron is imported.

    Does nothing when a CUDA device is there, or when called again. Raises RuntimeError if Megatron was imported first.
    """
    global _installed
    if _installed or torch.cuda.is_available():
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("device.cpu.install() was called after megatron.core had been imported; call it first, "
                           "because Megatron decorates functions with torch.compile while it is imported")
    _installed = True
    # Megatron insists on this for tensor parallelism; it orders CUDA streams and means nothing here.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _answer_device_calls()
    _answer_generator_calls()
    _accept_cuda_in_factories()
    _name_types_as_cuda()
    _leave_megatron_uncompiled()
    _silence_known_warnings()


def _answer_device_calls() -> None:
    """The current device is the CPU, which has always finished what it was given."""
    torch.cuda.current_device = _current_device  # type: ignore[assignment]
    torch.cuda.synchronize = _do_nothing
    torch.cuda.empty_cache = _do_nothing
    torch.cuda.nvtx.range_push = _do_nothing
    torch.cuda.nvtx.range_pop = _do_nothing


def _current_device() -> torch.device:
    return _CPU


def _do_nothing(*args: object, **kwargs: object) -> None:
    pass


def _answer_generator_calls() -> None:
    """The device's generator is torch's own.

    Without an answer ``torch.cuda.manual_seed`` queues the seed for a CUDA start that never comes, and Megatron's
    seeds and its separate streams for tensor-parallel regions silently have no effect.
    """
    torch.cuda.manual_seed = _seed
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = _get_rng_state  # type: ignore[attr-defined]
        module.set_rng_state = _set_rng_state  # type: ignore[attr-defined]


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _get_rng_state(device: object = None) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, device: object = None) -> None:
    torch.default_generator.set_state(new_state)


def _accept_cuda_in_factories() -> None:
    """``device="cuda"`` means the CPU, in factories and in ``.cuda()``.

    Wrapping them costs less than a ``TorchFunctionMode``, which in addition holds for one thread only (autograd
    runs Megatron's backward functions in others).
    """
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = _stay  # type: ignore[method-assign, assignment]


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return on_cpu


def _stay(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    return tensor


def _name_types_as_cuda() -> None:
    """``Tensor.type()`` says ``torch.cuda.FloatTensor``: the optimizers compare with such names and refuse others."""
    original = torch.Tensor.type

    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = original(self, *args, **kwargs)
        return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) else name

    torch.Tensor.type = type_name  # type: ignore[method-assign, assignment]


def _leave_megatron_uncompiled() -> None:
    """``torch.compile`` leaves Megatron's functions as they are: compiling small ones for a CPU takes seconds on
    every rank, needs a C++ compiler, and could change results between layouts. Other code is compiled as ever."""
    original = torch.compile

    @functools.wraps(original)
    def compile(model: Any = None, **kwargs: Any) -> Any:
        if model is None:
            return functools.partial(compile, **kwargs)
        if getattr(model, "__module__", "").startswith("megatron."):
            return model
        return original(model, **kwargs)

    torch.compile = compile


def _silence_known_warnings() -> None:
    """Hide what Megatron causes by itself on every rank and nobody who trains can change."""
    for message in (
        "(Transformer Engine and )?Apex (is|are) not installed",
        "full scope is deprecated. Use empty cuda_graph_scope",
        "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed",
        "`torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
        "`load_state_dict` is deprecated and will be removed in future versions",
        "Please use DTensor instead and we are deprecating ShardedTensor",
    ):
        warnings.filterwarnings("ignore", message=message)
