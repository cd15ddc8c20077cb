"""Likeness: a model of a job that runs: its sizes, by its flags, and a device that is as fast as its own were measured.

What costs say of other layouts and what the model says are then two opinions: costs know each unit's time, and take
what is not the pipeline to stay as it is; the model knows what has to be reduced among how many ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron_elastic.layout import Layout
from megatron_elastic.plan.costs.cost import Costs
from megatron_elastic.plan.predict.case import Case, Columns
from megatron_elastic.plan.predict.constants import FITTED
from megatron_elastic.plan.predict.device import DEVICES
from megatron_elastic.plan.predict.foresight import placed
from megatron_elastic.plan.predict.predictor import Predictor
from megatron_elastic.plan.predict.step import predict

_LIKE = DEVICES["a100-80g"]
"""What ``FITTED`` was fitted on."""
_LAYER = "layer."
_UNKNOWN = ("num_experts", "multi_latent_attention", "mtp_num_layers")
"""Flags of models that the model does not know."""
_ABSENT = ("None", "False", "0")


def case_of(layout: Layout, flags: Mapping[str, str]) -> Case | None:
    """The present layout of a job whose script has these flags, Megatron's by name; None where the model knows no such.

    Experts, context parallelism and further predictions are not known to it, nor flags that are not there.
    """
    if layout.cp > 1 or layout.ep > 1 or any(flags.get(name, "None") not in _ABSENT for name in _UNKNOWN):
        return None
    try:
        heads = int(flags["num_attention_heads"])
        grouped = flags.get("group_query_attention") == "True"
        sizes = Case(
            layers=int(flags["num_layers"]), hidden=int(flags["hidden_size"]), heads=heads,
            seq_length=int(flags["seq_length"]), vocab_size=int(flags["padded_vocab_size"]),
            ffn=int(flags["ffn_hidden_size"]), groups=int(flags["num_query_groups"]) if grouped else heads,
            gated=flags.get("swiglu") == "True", tp=1, pp=1, dp=1, micro_batch=int(flags["micro_batch_size"]),
            global_batch=1, recompute=flags.get("recompute_granularity") == "full",
            overlap=flags.get("overlap_grad_reduce") == "True", sharded=True,
        )  # fmt: skip
    except (KeyError, ValueError):
        return None
    return resized(sizes, layout)


def resized(case: Case, layout: Layout) -> Case:
    """A case of the same model in a layout. Where stages differ in width, the narrowest counts; chunks that are placed
    otherwise than as a loop, or as a V, count as one.
    """
    return replace(
        case, tp=layout.tp, pp=layout.pipeline_size, dp=min(stage.width for stage in layout.stages),
        global_batch=layout.num_grains * case.micro_batch, **placed(layout),
    )  # fmt: skip


def likened(case: Case, layout: Layout, costs: Costs) -> Predictor | None:
    """The model with a device on which a layer of the case takes as long as measured, behind links as measured.

    None where no layer was measured. All that a device computes is scaled alike; what a step takes besides is what was
    measured, less what the model knows of it.
    """
    layers = [
        cost.forward_ms + cost.backward_ms
        for name, cost in zip(layout.units, costs.units, strict=True)
        if name.startswith(_LAYER)
    ]
    if not layers or sum(layers) <= 0:
        return None
    links = replace(
        _LIKE, name="as measured", per_node=1, node_bandwidth=costs.bandwidth / FITTED.network,
        node_latency=1e-3 * costs.latency_ms,
    )  # fmt: skip
    column = Columns.of([case])
    step = predict(column, links, FITTED)
    sent = float(step.layer_collectives[0])
    computed = float((step.layer_forward + step.layer_backward)[0]) - sent
    slower = max(1e-3 * sum(layers) / len(layers) - sent, 1e-9) / computed
    device = replace(links, flops=links.flops / slower, memory_bandwidth=links.memory_bandwidth / slower)
    constants = replace(
        FITTED, fill_us=FITTED.fill_us * slower, launch_ms=FITTED.launch_ms * slower, grain_ms=FITTED.grain_ms * slower,
        step_ms=0.0,
    )  # fmt: skip
    end = predict(column, device, constants)
    besides = costs.overhead_ms - 1e3 * float((end.reduction + end.update)[0])
    return Predictor(device, replace(constants, step_ms=max(0.0, besides)))
