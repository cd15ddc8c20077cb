"""Stage: a rank's part of the model, and what it becomes from one layout to the next.

Parameters are views of flat buffers, unit by unit, so that a stage can be put together anew around what stays: layers
that are in the stage before and after are the same modules, and only those that come are built. Hooks on them tell
where a pass is: they seed what the unit draws, time it, let an interrupt through, and wait for late parameters.
"""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module, float16_to_fp32, fp32_to_float16

from megatron_elastic.adaptor.layers import engine, mtp, router, transformer
from megatron_elastic.adaptor.layers.random import GrainKey
from megatron_elastic.adaptor.model import groups
from megatron_elastic.adaptor.model.optimizer import ParameterGroups
from megatron_elastic.adaptor.model.scale import LossFactor
from megatron_elastic.adaptor.model.units import Use, bind_stage, uses
from megatron_elastic.device.device import Device
from megatron_elastic.layout import MTP, Layout, UnitShape
from megatron_elastic.numerics import keyed
from megatron_elastic.numerics.exact import Accumulator
from megatron_elastic.pipeline.meter import Meter
from megatron_elastic.state.buffer import UnitBuffer
from megatron_elastic.state.partition import Partition


class ModelProvider(Protocol):
    """Builds this rank's stage of the model, or one chunk of it (a virtual stage), with weights initialised."""

    def __call__(
        self, args: argparse.Namespace, config_kwargs: Mapping[str, Any] | None, pre_process: bool, post_process: bool,
        vp_stage: int | None,
    ) -> GPTModel: ...  # fmt: skip


_Built = tuple[tuple[tuple[int, ...], ...], int, bool, bool]
"""What models are built for: units by chunk, place in the cell, whether the model begins here, and ends here."""


class _Cast(Float16Module):
    """Casts what goes into the beginning of the model and what comes out of its end, wherever these are.

    Megatron takes them to be in the first stage and the last.
    """

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.module.pre_process:
            inputs = fp32_to_float16(inputs, self.float16_convertor)
        outputs = self.module(*inputs, **kwargs)
        return float16_to_fp32(outputs) if self.module.post_process else outputs


def partition_of(shape: UnitShape, layout: Layout, unit: int, rank: int) -> Partition:
    """Of the part of a unit that a rank has in a layout."""
    return Partition(shape, layout.num_slices, layout.part_of(unit, rank), layout.tp, layout.ep)


class Stage:
    """The models of one rank's stage, one for each chunk, over the buffers of its units. Empty until ``hold``.

    Args:
        groups: the optimizer's parameter groups, which get to know the parameters.
        loss_factor: what losses are multiplied by.
        look: raises when the rank is to stop what it computes; called between any two matrix products.
        before_use: called with the units whose parameters a forward pass is about to use.
        device: where the models compute.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        rank: int,
        provider: ModelProvider,
        groups: ParameterGroups,
        accumulator: Accumulator,
        loss_factor: LossFactor,
        look: Callable[[], None],
        before_use: Callable[[Sequence[str]], None],
        device: Device,
    ) -> None:
        self.models: list[GPTModel] = []
        self.wrapped: list[torch.nn.Module] = []
        """The models as they are called: with inputs and outputs cast, where that is wanted."""
        self.units: dict[int, UnitBuffer] = {}
        """Parameters of the units that this rank holds, by unit: its stage's, and those that are coming or going."""
        self.partitions: dict[int, Partition] = {}
        """Of all units that this rank has heard of."""
        self.key: GrainKey
        """What the units draw from."""
        self.meter = Meter({})
        """What times the passes under the present layout."""
        self._args = args
        self._rank = rank
        self._provider = provider
        self._groups = groups
        self._accumulator = accumulator
        self._loss_factor = loss_factor
        self._look = look
        self._before_use = before_use
        self._device = device
        self._built: _Built | None = None

    def learn(self, shapes: Mapping[int, UnitShape], layout: Layout) -> None:
        """Know of units, so that they and slices of them can be kept."""
        for unit, shape in shapes.items():
            self.partitions.setdefault(unit, self._partition(unit, shape, layout))

    def fits(self, layout: Layout) -> bool:
        """Whether the models are what the rank computes under a layout."""
        return self._built == self._part_in(layout)

    def hold(self, layout: Layout) -> None:
        """Have the units that the layout wants here, and the models of this rank's stage over them.

        Units that are new are filled when their owners next send parameters. Nobody is waited for.
        """
        held = layout.held_by(self._rank)
        for unit in held:
            if unit in self.partitions and unit not in self.units:
                self.units[unit] = UnitBuffer(self.partitions[unit], self._accumulator, self._device.torch)
                if unit not in layout.stages[layout.stage_of(self._rank)].units:
                    self.units[unit].make_room()  # it is coming, and computed later
        if not self.fits(layout):
            self._build(layout)
        for unit in set(self.units).difference(held):
            del self.units[unit]

    def forget(self) -> None:
        """Be empty again."""
        self._built = None
        self.models, self.wrapped = [], []
        self.units.clear()
        self.partitions.clear()

    def _part_in(self, layout: Layout) -> _Built:
        stage, first, last = layout.stage_of(self._rank), layout.way[0].stage, layout.way[-1].stage
        return layout.chunks(stage), layout.place_of(self._rank), stage == first, stage == last

    def _partition(self, unit: int, shape: UnitShape, layout: Layout) -> Partition:
        return partition_of(shape, layout, unit, self._rank)

    def _build(self, layout: Layout) -> None:
        """The models, chunk by chunk, around the layers that are there already."""
        args, stage = self._args, layout.stage_of(self._rank)
        _, _, first, last = part = self._part_in(layout)
        if self._built is None:
            pieces, piece = layout.cp, layout.cp_index(self._rank)
            if args.sequence_parallel:
                pieces, piece = pieces * layout.tp, piece * layout.tp + layout.tp_index(self._rank)
            self.key = GrainKey(args.seed, layout.samples, layout.batches, layout.batch_of(self._rank),
                                piece if args.sequence_parallel or pieces > 1 else None)
        layers = ("layer.", MTP)
        kept = {use.unit: use.module for model in self.models for use in uses(model) if use.unit.startswith(layers)}
        chunks = layout.chunks(stage)
        transformer.hold([[layout.units[unit] for unit in chunk] for chunk in chunks])
        # As many as there are now, whatever the job began with.
        fresh: dict[str, Any] = {"virtual_pipeline_model_parallel_size": len(chunks) if len(chunks) > 1 else None,
                                 **self._device.settings(args.elastic_consistency == "bitwise")}
        if self.partitions:  # values that are there already, or will be sent, need not be drawn first
            fresh["perform_initialization"] = False
        host = self._device.building(), keyed.drawing_from(torch.default_generator)
        with groups.alone(), transformer.reused(kept), host[0], host[1]:
            self.models = [
                self._provider(
                    args, fresh, first and chunk == 0, last and chunk == len(chunks) - 1,
                    chunk if len(chunks) > 1 else None,
                )
                for chunk in range(len(chunks))
            ]  # fmt: skip
        for model in self.models:
            mtp.leave_out_output(model)
        # First of all: the cast gives parameters other memory, and they would not be the buffers' views any more.
        with router.biases_aside(self.models):
            half = args.fp16 or args.bf16
            self.wrapped = [_Cast(model.config, model) if half else model for model in self.models]
        if not self._device.is_host:
            _bring(self.models, self._device)
        known = set(kept.values())
        for model in self.models:
            self._loss_factor.install(model.config)
            for use in uses(model):
                if use.module not in known:
                    self._attach(use)
        bind_stage(
            self.models, layout, stage, self._groups, self.partitions, self.units,
            lambda unit, shape: self._partition(unit, shape, layout), self._accumulator, self._device.torch,
        )  # fmt: skip
        self._built = part

    def _attach(self, use: Use) -> None:
        # The collector does not see what a parameter's hook leads to: a way back to it would keep for ever what leaves.
        stage, unit, needs = weakref.proxy(self), use.unit, use.needs
        use.module.register_forward_pre_hook(lambda *_: stage._begin(unit, needs))
        for module in use.module.modules():
            engine.know(module)
            parameters = list(module.parameters(recurse=False))
            if parameters:
                module.register_forward_pre_hook(lambda *_: stage._look())
            for parameter in parameters:
                parameter.register_post_accumulate_grad_hook(lambda _: stage._reach(unit))

    def _begin(self, unit: str, needs: Sequence[str]) -> None:
        """A unit's forward begins, or one that uses other units, too: those that it ``needs``."""
        if unit != "head":  # it draws nothing
            self.key.seed(unit)
        self.meter.enter(unit)
        with self.meter.waiting():
            self._before_use(needs)

    def _reach(self, unit: str) -> None:
        """A backward has got to a parameter. To the next there is one matrix product at most, or attention."""
        self.meter.leave(unit)
        self._look()


def _bring(models: Sequence[torch.nn.Module], device: Device) -> None:
    """Bring models to a device. Parameters are others there, with all that Megatron has marked them with."""
    brought: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in (module for model in models for module in model.modules()):
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_cpu:
                continue
            if parameter not in brought:
                there = device.from_host(parameter.detach())
                brought[parameter] = torch.nn.Parameter(there, requires_grad=parameter.requires_grad)
                vars(brought[parameter]).update(vars(parameter))
            module._parameters[name] = brought[parameter]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else device.from_host(buffer)
