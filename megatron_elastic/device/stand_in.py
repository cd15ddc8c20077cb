"""Stand-in: what Megatron's core takes from ``torch.cuda``, answered by a device that is none of CUDA's.

Megatron-core names its device "cuda" throughout. ``install`` gives those names a meaning on a machine without a GPU:
the "current device" is the CPU, waiting for it is over at once, and its generator is torch's CPU generator. Another
device answers after ``answer_with``.
Nothing here imports Megatron; what has to change inside its modules is in ``adaptor.without_cuda.stand_ins``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from megatron_elastic.device.cpu import Cpu
from megatron_elastic.device.device import Device

_CAPABILITY = (0, 0)
"""Older than any GPU, so that nothing that asks for a new one is switched on."""
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "ones_like", "empty_like")
"""Functions that Megatron calls with ``device="cuda"`` on the paths that a GPT on a CPU takes."""

_installed = False
_there: Device = Cpu()
"""What answers."""


def needed() -> bool:
    """Whether this process has to run Megatron without a CUDA device."""
    return _installed or not torch.cuda.is_available()


def answer_with(device: Device) -> None:
    """From now on "cuda" means this device. Raises RuntimeError without ``install``: there is a CUDA device."""
    global _there
    if not _installed:
        raise RuntimeError(f"this machine has a CUDA device, which Megatron uses, and {device.name} cannot stand in "
                           "for it: hide it (CUDA_VISIBLE_DEVICES=)")
    _there = device


@contextlib.contextmanager
def answering_with(device: Device) -> Iterator[None]:
    """Meanwhile "cuda" means this device."""
    before = _there
    answer_with(device)
    try:
        yield
    finally:
        answer_with(before)


def there() -> Device:
    """What "cuda" means."""
    return _there


def install() -> None:
    """Make megatron-core run without CUDA in this process, on the CPU. Call it before Megatron is imported.

    Does nothing when a CUDA device is there, or when called again. Raises RuntimeError if Megatron was imported first.
    """
    global _installed
    if _installed or torch.cuda.is_available():
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("device.stand_in.install() was called after megatron.core had been imported; call it first, "
                           "because Megatron decorates functions with torch.compile while it is imported")
    _installed = True
    # Megatron insists on this for tensor parallelism; it orders CUDA streams and means nothing here.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _answer_device_calls()
    _show_a_device_to_training()
    _answer_generator_calls()
    _accept_cuda_in_factories()
    _name_types_as_cuda()
    _leave_megatron_uncompiled()
    _silence_known_warnings()


def _answer_device_calls() -> None:
    """The current device is what answers. A CPU has finished what it was given, and keeps no account of memory."""
    torch.cuda.current_device = _current_device  # type: ignore[assignment]
    torch.cuda.get_device_capability = _answer(_CAPABILITY)
    torch.cuda.get_device_properties = _answer(
        SimpleNamespace(name="cpu", major=_CAPABILITY[0], minor=_CAPABILITY[1], multi_processor_count=1, total_memory=0)
    )
    torch.cuda.synchronize = _synchronise
    for name in ("empty_cache", "set_device"):
        setattr(torch.cuda, name, _answer(None))
    for name in ("range_push", "range_pop"):
        setattr(torch.cuda.nvtx, name, _answer(None))
    for name in ("memory_allocated", "memory_reserved", "device_memory_used"):
        setattr(torch.cuda, name, lambda *_, **__: _there.memory().used)
    for name in ("max_memory_allocated", "max_memory_reserved"):
        setattr(torch.cuda, name, lambda *_, **__: _there.memory().peak)
    torch.cuda.memory_stats = _memory_stats
    torch.cuda.Stream = _Stream  # type: ignore[assignment, misc]
    torch.cuda.Event = _Event  # type: ignore[assignment, misc]
    torch.cuda.current_stream = _answer(_Stream())
    torch.cuda.stream = _in_stream  # type: ignore[assignment]


def _answer(value: Any) -> Callable[..., Any]:
    """A function that says ``value``; a new one each time, because torch._dynamo wants one object for each name."""

    def answer(*args: object, **kwargs: object) -> Any:
        return value

    return answer


def _current_device() -> torch.device:
    return _there.torch


def _memory_stats(*_: object, **__: object) -> dict[str, int]:
    """As far as what answers knows; all else is 0."""
    memory = _there.memory()
    found = {f"{what}_bytes.all.{when}": size for what in ("allocated", "reserved")
             for when, size in (("current", memory.used), ("peak", memory.peak))}  # fmt: skip
    return defaultdict(int, found)


def _synchronise(*_: object, **__: object) -> None:
    _there.synchronise()


class _Stream:
    """Any stream is the one in which the device does everything in order."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    wait_stream = wait_event = _answer(None)
    synchronize = _synchronise
    query = _answer(True)

    def record_event(self, event: _Event | None = None) -> _Event:
        """A point in the stream."""
        event = event or _Event()
        event.record(self)
        return event


class _Event:
    """A point in such a stream."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        self._time = 0.0

    wait = _answer(None)
    synchronize = _synchronise
    query = _answer(True)

    def record(self, stream: object = None) -> None:
        """Note the time."""
        self._time = time.perf_counter()

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds from here to ``end``."""
        return (end._time - self._time) * 1e3


def _in_stream(stream: object) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _show_a_device_to_training() -> None:
    """``megatron.training`` starts only with a CUDA device, and makes its groups only if it can count one.

    It alone is told that there is one; torch itself and everybody else get the true answer, and act on it.
    """
    available, count = torch.cuda.is_available, torch.cuda.device_count

    def is_available() -> bool:
        return _asked_by_training() or available()

    def device_count() -> int:
        return 1 if _asked_by_training() else count()

    torch.cuda.is_available = is_available
    torch.cuda.device_count = device_count


def _asked_by_training() -> bool:
    """Whether a function of ``megatron.training`` is what called our caller."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("megatron.training.")


def _answer_generator_calls() -> None:
    """The device's generator is that of what answers, which torch has already.

    Without an answer ``torch.cuda.manual_seed`` queues the seed for a CUDA start that never comes, and Megatron's
    seeds and its separate streams for tensor-parallel regions silently have no effect.
    """
    torch.cuda.manual_seed = _seed
    for module in (torch.cuda, torch.cuda.random):
        module.get_rng_state = _get_rng_state  # type: ignore[attr-defined]
        module.set_rng_state = _set_rng_state  # type: ignore[attr-defined]


def _seed(seed: int) -> None:
    _there.generator.manual_seed(seed)


def _get_rng_state(device: object = None) -> torch.Tensor:
    return _there.generator.get_state()


def _set_rng_state(new_state: torch.Tensor, device: object = None) -> None:
    _there.generator.set_state(new_state)


def _accept_cuda_in_factories() -> None:
    """``device="cuda"`` means what answers, in factories and in ``.cuda()``.

    Wrapping them costs less than a ``TorchFunctionMode``, which in addition holds for one thread only (autograd
    runs Megatron's backward functions in others).
    """
    for name in _FACTORIES:
        setattr(torch, name, _there_for_cuda(getattr(torch, name)))
    torch.Tensor.cuda = _to_there  # type: ignore[method-assign, assignment]


def _there_for_cuda(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = _there.torch
        if _there.is_host:
            kwargs.pop("pin_memory", None)  # which speeds up copies to a device
        return factory(*args, **kwargs)

    return make


def _to_there(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    return _there.from_host(tensor) if tensor.is_cpu else tensor


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
