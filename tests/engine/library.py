"""``transformer_engine_torch`` in torch's operators: what Transformer Engine calls in float32, bfloat16 and float16.

Products, norms and softmaxes compute as the kernels are documented to: in float32, rounded once to the type of the
result. A function that is not here raises NotImplementedError when it is called; there are no 8-bit types, no fused
attention and no userbuffers.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

import torch

from . import host

Tensor = torch.Tensor


class DType(enum.IntEnum):
    kByte = 0
    kInt16 = 1
    kInt32 = 2
    kInt64 = 3
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat8E8M0 = 9
    kFloat4E2M1 = 10


_TORCH = {DType.kFloat32: torch.float32, DType.kFloat16: torch.float16, DType.kBFloat16: torch.bfloat16}

_GEMMS = [f"GEMM{number}_{what}" for number in (1, 2, 3) for what in ("INPUT", "WEIGHT", "OUTPUT")]
_GRADS = [f"GRAD_{what}{number}" for number in (1, 2, 3) for what in ("OUTPUT", "INPUT")]
_LAYOUTS = [
    f"NVTE_{name}"
    for name in (
        "SB3HD", "SBH3D", "SBHD_SB2HD", "SBHD_SBH2D", "SBHD_SBHD_SBHD", "BS3HD", "BSH3D", "BSHD_BS2HD", "BSHD_BSH2D",
        "BSHD_BSHD_BSHD", "T3HD", "TH3D", "THD_T2HD", "THD_TH2D", "THD_THD_THD", "SBHD_BSHD_BSHD", "BSHD_SBHD_SBHD",
        "THD_BSHD_BSHD", "THD_SBHD_SBHD", "Paged_KV_BSHD_BSHD_BSHD", "Paged_KV_BSHD_SBHD_SBHD",
        "Paged_KV_SBHD_BSHD_BSHD", "Paged_KV_SBHD_SBHD_SBHD", "Paged_KV_THD_BSHD_BSHD", "Paged_KV_THD_SBHD_SBHD",
    )
]  # fmt: skip
_ENUMS = {
    "FP8FwdTensors": _GEMMS,
    "FP8BwdTensors": _GRADS,
    "CommOverlapType": ["RS", "AG"],
    "CommOverlapAlgo": ["BULK_OVERLAP_AG", "BULK_OVERLAP_RS"],
    "Float8BlockScaleTensorFormat": ["GEMM_READY", "COMPACT"],
    "NVTE_QKV_Layout": _LAYOUTS,
    "NVTE_QKV_Format": [f"NVTE_{name}" for name in ("SBHD", "BSHD", "THD", "BSHD_2SBHD", "SBHD_2BSHD", "THD_2BSHD",
                                                    "THD_2SBHD")],
    "NVTE_Bias_Type": [f"NVTE_{name}" for name in ("NO_BIAS", "PRE_SCALE_BIAS", "POST_SCALE_BIAS", "ALIBI")],
    "NVTE_Mask_Type": [f"NVTE_{name}" for name in ("NO_MASK", "PADDING_MASK", "CAUSAL_MASK", "PADDING_CAUSAL_MASK",
                                                   "CAUSAL_BOTTOM_RIGHT_MASK", "PADDING_CAUSAL_BOTTOM_RIGHT_MASK")],
    "NVTE_Softmax_Type": [f"NVTE_{name}_SOFTMAX" for name in ("VANILLA", "OFF_BY_ONE", "LEARNABLE")],
    "NVTE_Fused_Attn_Backend": [f"NVTE_{name}" for name in ("No_Backend", "F16_max512_seqlen", "F16_arbitrary_seqlen",
                                                            "FP8")],
}  # fmt: skip
"""Enumerations, of whose members nobody looks at the values."""


def generic_gemm(
    A: Tensor, transa: bool, B: Tensor, transb: bool, out: Tensor | None, quantizer: object, out_dtype: DType | None,
    bias: Tensor | None, bias_dtype: DType, gelu: bool, gelu_in: Tensor | None, grad: bool, workspace: Tensor,
    workspace_size: int, accumulate: bool, use_split_accumulator: bool, comm_overlap: object = None,
    comm_type: object = None, extra_output: object = None, bulk_overlap: bool = False, alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """B' A', each transposed or not; with ``grad``, the sum over B's rows as the gradient of a bias."""
    if gelu or quantizer is not None or comm_overlap is not None or alpha != 1.0:
        raise NotImplementedError("the software generic_gemm has no GELU, no quantizer, no userbuffers and no alpha")
    rows, right = B.reshape(-1, B.shape[-1]), A.reshape(-1, A.shape[-1])
    left, right = rows.t() if transb else B, right.t() if transa else right
    dtype = out.dtype if out is not None else B.dtype if out_dtype is None else _TORCH[out_dtype]
    product = torch.matmul(left.to(dtype), right.to(dtype))
    if bias is not None and not grad:
        product += bias
    if out is not None:
        product = out.add_(product) if accumulate else out.copy_(product)
    sums = rows.sum(dim=0) if bias is not None and grad else None
    return product, sums, None, None


def layernorm_fwd(
    input: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor | None, quantizer: object, dtype: DType,
    sm_margin: int, zero_centered_gamma: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Result, means and 1 / deviations of the rows."""
    _unquantized(quantizer)
    x = input.float()
    mean = x.mean(dim=-1)
    centred = x - mean[:, None]
    scale = torch.rsqrt(centred.square().mean(dim=-1) + eps)
    result = centred * scale[:, None] * _gamma(weight, zero_centered_gamma) + bias.float()
    return _into(out, result.to(_TORCH[dtype])), mean, scale


def layernorm_bwd(
    grad: Tensor, input: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, weight and bias."""
    dy = grad.float()
    normal = (input.float() - mean[:, None]) * scale[:, None]
    dn = dy * _gamma(weight, zero_centered_gamma)
    along = dn - dn.mean(dim=-1, keepdim=True) - normal * (dn * normal).mean(dim=-1, keepdim=True)
    dx = (along * scale[:, None]).to(input.dtype)
    return dx, (dy * normal).sum(dim=0).to(weight.dtype), dy.sum(dim=0).to(weight.dtype)


def rmsnorm_fwd(
    input: Tensor, weight: Tensor, eps: float, out: Tensor | None, quantizer: object, dtype: DType, sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Tensor, None, Tensor]:  # fmt: skip
    """Result, nothing, and 1 / root mean squares of the rows."""
    _unquantized(quantizer)
    x = input.float()
    scale = torch.rsqrt(x.square().mean(dim=-1) + eps)
    result = x * scale[:, None] * _gamma(weight, zero_centered_gamma)
    return _into(out, result.to(_TORCH[dtype])), None, scale


def rmsnorm_bwd(
    grad: Tensor, input: Tensor, scale: Tensor, weight: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of input and weight."""
    dy = grad.float()
    normal = input.float() * scale[:, None]
    dn = dy * _gamma(weight, zero_centered_gamma)
    dx = ((dn - normal * (dn * normal).mean(dim=-1, keepdim=True)) * scale[:, None]).to(input.dtype)
    return dx, (dy * normal).sum(dim=0).to(weight.dtype)


def scaled_softmax_forward(input: Tensor, scale: Tensor | float) -> Tensor:
    return _softmax(input, scale, None)


def scaled_masked_softmax_forward(input: Tensor, mask: Tensor, scale: Tensor | float) -> Tensor:
    return _softmax(input, scale, mask)


def scaled_upper_triang_masked_softmax_forward(input: Tensor, scale: Tensor | float) -> Tensor:
    return _softmax(input, scale, _ahead(input))


def scaled_softmax_backward(grad: Tensor, result: Tensor, scale: Tensor | float) -> Tensor:
    dy, y = grad.float(), result.float()
    return (y * (dy - (dy * y).sum(dim=-1, keepdim=True)) * float(scale)).to(grad.dtype)


def get_fused_attn_backend(*_: object) -> Any:
    """None: so attention is made of products and a softmax."""
    return _enums["NVTE_Fused_Attn_Backend"].NVTE_No_Backend


def _softmax(input: Tensor, scale: Tensor | float, mask: Tensor | None) -> Tensor:
    scores = input.float() * float(scale)
    if mask is not None:
        scores = scores.masked_fill(mask, -math.inf if mask.dim() == 2 else -10000.0)
    return torch.softmax(scores, dim=-1).to(input.dtype)


def _ahead(scores: Tensor) -> Tensor:
    rows, columns = scores.shape[-2:]
    return torch.ones(rows, columns, dtype=torch.bool, device=scores.device).triu(columns - rows + 1)


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.copy_(result)


def _unquantized(quantizer: object) -> None:
    if quantizer is not None:
        raise NotImplementedError("the software library has no 8-bit types")


_enums: dict[str, Any] = {name: enum.IntEnum(name, members, start=0) for name, members in _ENUMS.items()}
_FUNCTIONS: tuple[Callable[..., Any], ...] = (
    generic_gemm, layernorm_fwd, layernorm_bwd, rmsnorm_fwd, rmsnorm_bwd, scaled_softmax_forward,
    scaled_masked_softmax_forward, scaled_upper_triang_masked_softmax_forward, scaled_softmax_backward,
    get_fused_attn_backend,
)  # fmt: skip
_SIZES = {"get_cudnn_version": 91500, "get_cublasLt_version": 120800, "get_num_cublas_streams": 4}
"""Functions of no arguments, and what they say."""


def fill(module: ModuleType) -> None:
    """Give the library its names. Transformer Engine's Python, which is being imported, gets what it needs besides."""
    names: dict[str, Any] = {function.__name__: function for function in _FUNCTIONS}
    names |= {"DType": DType, **_enums}
    names |= {name: type(name, (), {}) for name in ("CommOverlap", "CommOverlapP2P", "CommOverlapHelper",
                                                    "FP8TensorMeta")}  # fmt: skip
    names |= {name: lambda value=value: value for name, value in _SIZES.items()}
    for kind in ("scaled_masked", "scaled_upper_triang_masked", "scaled_aligned_causal_masked"):
        names[f"{kind}_softmax_backward"] = scaled_softmax_backward
    names["scaled_aligned_causal_masked_softmax_forward"] = scaled_upper_triang_masked_softmax_forward
    vars(module).update(names, __getattr__=_absent)
    host.prepare()


def _absent(name: str) -> Callable[..., NoReturn]:
    """In place of a function that is not here."""
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"the software transformer_engine_torch has no {name}")

    return refuse
