"""Stand-ins: what ``device.stand_in`` cannot answer from outside Megatron's modules.

- ``megatron.core.tensor_parallel.random``: its state functions reach into the CUDA generators directly, and its tracker
  warns whenever the CPU's generator moves, which here *is* the generator.
- Apex's norms need CUDA, so torch's stand in for them with sequence parallelism as well (``adaptor.layers.sequence``).
- Attention over contexts and latent attention are Transformer Engine's; ours stands in (``adaptor.layers.attention``).
- ``megatron.legacy.fused_kernels`` wants a CUDA compiler, and ``megatron.training.initialize`` warms kernels up (which
  draws random numbers besides): there are none.
- ``megatron.core.transformer``'s ``moe.moe_utils`` and ``multi_latent_attention``: routers and latent attention need
  names that only Transformer Engine gives them. What ``moe.token_dispatcher`` must know on the host it moves only from
  devices that are called CUDA.
- The C++ helpers of ``megatron.core.datasets`` (``helpers``), the distributed optimizer with torch's Adam
  (``torch_adam``) and the writing of checkpoints (``adaptor.checkpoints.writer``), for plain training.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_elastic.adaptor import targets
from megatron_elastic.adaptor.checkpoints import common, writer
from megatron_elastic.adaptor.layers import attention, sequence
from megatron_elastic.adaptor.without_cuda import helpers, torch_adam
from megatron_elastic.config import UsageError
from megatron_elastic.device import stand_in


def install() -> None:
    """Prepare whatever Megatron is there for training on the CPU, elastic or not. Idempotent; nothing with CUDA.

    The launcher calls it in the process from which it forks the ranks, so that a script needs no change.
    """
    if not stand_in.needed() or not _has("megatron.core"):
        return
    apply()
    common.allow_enums()
    torch_adam.apply()
    writer.apply()
    if _has("megatron.training"):
        if not _has("triton"):
            _stand_in_for_triton_kernels()
        helpers.borrow()  # Megatron has them compiled by the first rank alone
        targets.HELPERS.replace(helpers.provide)
        targets.KERNELS.replace(_nothing)
        targets.WARM_UP.replace(_nothing)


def apply() -> None:
    """Make Megatron's random streams act on the CPU's generator, and its norms be torch's in any model.

    Idempotent; does nothing where CUDA is in use.
    """
    if not stand_in.needed():
        return
    targets.GET_STATE.replace(_get_state)
    targets.SET_STATE.replace(_set_state)
    targets.FORK.replace(_fork)
    sequence.allow_torch_norms()
    attention.install()
    targets.GATING.wrap(_without_transformer_engine)
    targets.TO_HOST.replace(_to_host)
    targets.LATENT.replace(_has("transformer_engine"))
    targets.RECOMPUTE.wrap(_without_fp8)


def _stand_in_for_triton_kernels() -> None:
    """Let ``megatron.training`` import the one function that it takes from a module which needs triton."""
    module = types.ModuleType(targets.BATCH_INVARIANT.module)
    setattr(module, targets.BATCH_INVARIANT.name, _no_triton)
    sys.modules.setdefault(module.__name__, module)


def _no_triton() -> None:
    raise UsageError("--batch-invariant-mode needs triton, and so a GPU: leave it out")


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _without_transformer_engine(gating: Callable[..., Any]) -> Callable[..., Any]:
    gating.__globals__.setdefault("te_general_gemm", None)
    return gating


def _without_fp8(initialize: Callable[..., None]) -> Callable[..., None]:
    def construct(self: Any, fp8: Any = None) -> None:
        initialize(self, fp8 or None)

    return construct


def _to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """What is on a device, in host memory when this returns; anything else as it is."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_cpu:
        return tensor
    return tensor.cpu().numpy() if as_numpy else tensor.cpu()


def _get_state(device: object = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return stand_in.there().generator.get_state()


def _set_state(new_state: torch.Tensor, device: object = None, graph_safe: bool = False) -> None:
    stand_in.there().generator.set_state(new_state)


@contextmanager
def _fork(tracker: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """Draw from the stream ``name`` inside the block. Raises KeyError if the tracker has no such stream."""
    if name not in tracker.states_:
        raise KeyError(f"random stream {name!r} does not exist: call model_parallel_cuda_manual_seed(seed) first")
    outer = torch.default_generator.get_state()
    torch.default_generator.set_state(tracker.states_[name])
    try:
        yield
    finally:
        tracker.states_[name] = torch.default_generator.get_state()
        torch.default_generator.set_state(outer)
