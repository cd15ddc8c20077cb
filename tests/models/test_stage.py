"""Stage: what becomes of a rank's part of the model from one layout to the next."""

from __future__ import annotations

import gc
import weakref
from argparse import Namespace
from contextlib import nullcontext

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from megatron_elastic.adaptor.layers import experts
from megatron_elastic.adaptor.model.optimizer import ParameterGroups
from megatron_elastic.adaptor.model.scale import LossFactor
from megatron_elastic.adaptor.model.stage import Stage
from megatron_elastic.adaptor.model.units import Use
from megatron_elastic.adaptor.settings import activations_dtype
from megatron_elastic.device.cpu import Cpu
from megatron_elastic.layout import Layout
from megatron_elastic.numerics.exact import ExactAccumulator


def _no_model(*_: object, **__: object) -> None:
    raise AssertionError("nothing is built here")


@pytest.mark.parametrize(("said", "sent"), [
    (None, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32),
])  # fmt: skip
def test_what_stages_send_each_other_is_as_the_model_has_it(said: torch.dtype | None, sent: torch.dtype) -> None:
    """Megatron says float32 of bf16 models whose residual connections are (0.19)."""
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, pipeline_dtype=said)
    assert activations_dtype(Namespace(bf16=True, fp16=False), config) == sent


def test_a_layer_that_leaves_is_let_go_of_at_once() -> None:
    """With its weights: none of the hooks that tell where a pass is may keep it, nor the stage that they tell."""
    looks: list[str] = []
    args, accumulator = Namespace(seed=1), ExactAccumulator(1)
    layout = Layout.grid(
        tp=1, pp=1, dp=1, stage_units=((0,),), units=("layer.0",), num_grains=1, num_slices=1, replicas=0
    )
    stage = Stage(
        args, 0, _no_model, ParameterGroups(OptimizerConfig()), accumulator,
        LossFactor(args, layout, accumulator, scaled=False), lambda: looks.append("look"), looks.extend, Cpu(),
    )
    stage.key = Namespace(seed=looks.append)  # type: ignore[assignment]
    stage.meter = Namespace(enter=looks.append, leave=looks.append, waiting=nullcontext)  # type: ignore[assignment]
    layer = torch.nn.Linear(2, 2)
    stage._attach(Use("layer.0", layer, ("layer.0", "experts.0")))
    layer(torch.ones(2)).sum().backward()
    assert looks == ["layer.0", "layer.0", "layer.0", "experts.0", "look", *["layer.0", "look"] * 2]
    left = [weakref.ref(each) for each in (layer, layer.weight, layer.bias)]
    del layer
    assert [each() for each in left] == [None, None, None]
    layer = torch.nn.Linear(2, 2)
    stage._attach(Use("layer.0", layer, ("layer.0",)))
    former = weakref.ref(stage)
    del stage
    assert former() is None


def test_experts_that_leave_are_let_go_of_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that compute the tokens of each rank by themselves, without a word of the collector."""
    monkeypatch.setattr(parallel_state, "get_expert_model_parallel_world_size", lambda: 2)
    layer, own = MoELayer.__new__(MoELayer), SequentialMLP.__new__(SequentialMLP)
    for module in (layer, own):
        torch.nn.Module.__init__(module)
    own.weight = torch.nn.Parameter(torch.ones(2))
    layer.experts, layer.token_dispatcher = own, MoEAlltoAllTokenDispatcher.__new__(MoEAlltoAllTokenDispatcher)
    layer.token_dispatcher.drop_and_pad = False
    leaves: list[weakref.ref[torch.nn.Parameter]] = []

    def leaf(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        made = torch.nn.Parameter(parameter.detach())
        leaves.append(weakref.ref(made))
        return made

    experts.tell_apart(layer, leaf)
    left = [weakref.ref(own), weakref.ref(own.weight), *leaves]
    assert len(left) == 3
    gc.disable()
    try:
        del layer, own, module
        assert [each() for each in left] == [None, None, None]
    finally:
        gc.enable()
