"""Memory: bytes that each rank of a GPT job needs, known before it starts. And how much there is.

Parameters, gradient sums and optimizer state are counted exactly, up to the padding of slices; activations are an
estimate, of plain attention kernels without dropout masks. On a device, ``Memory.device`` is there and ``Memory.host``
in the memory of its machine; on the CPU it is all the machine's.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_elastic.layout import EXPERTS, MTP, Layout, gpt_units
from megatron_elastic.plan.costs.keeping import Keeping
from megatron_elastic.plan.split import mtp_layers, split, through

ARENA = 64 << 20
"""Shared memory through which a rank sends to others of its host."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        parameters: the model's weights.
        sums: of gradients, by unit; with ``bitwise`` in 64 bits.
        totals: sums over all ranks of slices owned, of the two units that are added up at a time; on devices only.
        gradients: means, of slices owned and replicated, from the reduction to the update.
        owned, replicas: optimizer state, master weights among it.
        activations: of the grains in flight, an estimate.
        log: what was sent to other stages in a step, until it commits.
    """

    parameters: int
    sums: int
    totals: int
    gradients: int
    owned: int
    replicas: int
    activations: int
    log: int

    @property
    def device(self) -> int:
        """What computing needs, and what it has made for other stages."""
        summing = self.sums + self.totals + self.gradients
        return self.parameters + summing + self.owned + self.activations + self.log

    @property
    def host(self) -> int:
        """What lies in host memory in any case."""
        return self.replicas + ARENA

    @property
    def total(self) -> int:
        """On a machine without devices."""
        return self.device - self.totals + self.host


@dataclass(frozen=True, slots=True)
class Job:
    """What the flags say that matters for memory. Made by ``Job.of``."""

    args: Any
    """The flags, by Megatron-LM's names and ``elastic_*``."""
    weight: int
    """Bytes of a weight and of an activation."""
    sum: int
    gradient: int
    state: int
    """Bytes of optimizer state for a weight: master weight, moments, and what is kept of the step before."""

    @classmethod
    def of(cls, args: Any) -> Job:
        """From flags: a namespace with Megatron-LM's names."""
        moments = 2 if args.optimizer == "adam" else int(args.sgd_momentum != 0)
        return cls(
            args=args,
            weight=2 if args.fp16 or args.bf16 else 4,
            sum=8 if args.elastic_consistency == "bitwise" else 4,
            gradient=2 if "bf16" in str(args.main_grads_dtype) or "bfloat16" in str(args.main_grads_dtype) else 4,
            state=4 * (1 + moments) * (2 if args.elastic_replay == "state" else 1),
        )

    def weights(self, unit: str) -> int:
        """Weights of a unit on one rank."""
        a = self.args
        tp, hidden, ffn = a.tensor_model_parallel_size, a.hidden_size, a.ffn_hidden_size
        norm = hidden if a.normalization == "RMSNorm" else 2 * hidden
        if unit == "embedding":
            return int(a.padded_vocab_size // tp * hidden)
        if unit.startswith("bias."):
            return self._experts(unit)
        if unit == "positions":
            return int(a.max_position_embeddings * hidden)
        if unit == "head":
            output = a.padded_vocab_size // tp * hidden if a.untie_embeddings_and_output_weights else 0
            return int(norm + output)
        if unit.startswith(MTP):  # a layer, and before it two norms and a projection of both, and a norm after it
            return self.weights(self._layer_of(unit)) + 3 * norm + 2 * hidden * hidden // tp
        gates, experts = 2 if a.swiglu else 1, self._experts(unit)
        if unit.startswith(EXPERTS):
            each = a.moe_ffn_hidden_size or ffn
            biases = hidden + each * gates // tp if a.add_bias_linear else 0
            return int(experts // _expert_parallel(a) * (hidden * each * (gates + 1) // tp + biases))
        attention, biases = self._attention(norm // hidden)
        wide, networks, router = ffn, 1, 0
        if experts:
            wide, networks = a.moe_shared_expert_intermediate_size or 0, 0
            router = experts * (hidden + 1 if a.add_bias_linear else hidden)
        biases += (1 + networks) * hidden + wide * gates // tp if a.add_bias_linear else 0
        return int(attention + hidden * wide * (gates + 1) // tp + router + biases + 2 * norm)

    def _attention(self, vectors: int) -> tuple[int, int]:
        """Weights of a layer's attention on one rank, and biases but that of its output; of a norm's ``vectors``."""
        a = self.args
        tp, heads, hidden, norms = a.tensor_model_parallel_size, a.num_attention_heads, a.hidden_size, 0
        if getattr(a, "multi_latent_attention", False):
            keys, short = a.qk_head_dim + a.qk_pos_emb_head_dim, a.q_lora_rank or 0
            queries = short * (hidden + heads * keys) if short else hidden * heads * keys
            others = hidden * (a.kv_lora_rank + a.qk_pos_emb_head_dim)
            others += a.kv_lora_rank * heads * (a.qk_head_dim + a.v_head_dim)
            if a.qk_layernorm:
                norms = vectors * (short + a.kv_lora_rank)
            return (queries + others + heads * a.v_head_dim * hidden) // tp + norms, 0
        wide = heads * a.kv_channels
        qkv = wide + 2 * (a.num_query_groups if a.group_query_attention else heads) * a.kv_channels
        if getattr(a, "qk_layernorm", False):
            norms = 2 * vectors * a.kv_channels
        return hidden * (qkv + wide) // tp + norms, qkv // tp if a.add_bias_linear or a.add_qkv_bias else 0

    def activations(self, unit: str) -> int:
        """Bytes that a grain leaves from a unit's forward for its backward, on one rank. An estimate."""
        a = self.args
        tp, tokens = a.tensor_model_parallel_size, a.seq_length * a.micro_batch_size // _context_parallel(a)
        shared = tokens // tp if a.sequence_parallel else tokens  # tokens between the tensor-parallel layers
        if unit.startswith(("bias.", EXPERTS)):  # they count with their layer
            return 0
        if unit in ("embedding", "positions"):
            return int(shared * a.hidden_size * self.weight)
        if unit == "head":  # logits, and what the loss keeps of them in fp32, for each token that is predicted
            logits = tokens * (a.padded_vocab_size // tp) * (self.weight + 4) * (1 + mtp_layers(a))
            return int(shared * 2 * a.hidden_size * self.weight + logits)
        if unit.startswith(MTP):
            return self.activations(self._layer_of(unit)) + int(6 * shared * a.hidden_size * self.weight)
        if a.recompute_granularity == "full":
            return int(shared * a.hidden_size * self.weight // a.recompute_num_layers)
        scores = 0 if a.recompute_granularity == "selective" else 3 * a.num_attention_heads * a.seq_length
        ffn, between = a.ffn_hidden_size, 6 * a.hidden_size
        if self._experts(unit):  # every token is there once for each expert that it goes to
            each = a.moe_ffn_hidden_size or ffn
            ffn = a.moe_router_topk * each + (a.moe_shared_expert_intermediate_size or 0)
            between += 3 * a.moe_router_topk * a.hidden_size
        inside = a.num_attention_heads * self._channels + 2 * ffn * (2 if a.swiglu else 1)
        return int((shared * between + tokens * ((scores + inside) // tp)) * self.weight)

    @property
    def _channels(self) -> int:
        """Of a head: of its queries, keys, values and what it makes of them."""
        a = self.args
        if getattr(a, "multi_latent_attention", False):
            return int(2 * (a.qk_head_dim + a.qk_pos_emb_head_dim + a.v_head_dim))
        return int(4 * a.kv_channels)

    def _layer_of(self, unit: str) -> str:
        """The layer in what predicts further tokens, as if it were one of the model's."""
        return f"layer.{self.args.num_layers + int(unit.partition('.')[2])}"

    def _experts(self, unit: str) -> int:
        """How many experts a layer has."""
        return (self.args.num_experts or 0) if int(unit.partition(".")[2]) in routed(self.args) else 0

    @property
    def boundary(self) -> int:
        """Bytes that a rank sends to the next stage, and to the one before, for each grain."""
        a = self.args
        pieces = _context_parallel(a) * (a.tensor_model_parallel_size if a.sequence_parallel else 1)
        tokens = a.seq_length * a.micro_batch_size // pieces
        return int(tokens * a.hidden_size * self.weight)

    def log(self, results: int) -> int:
        """Bytes of the log of so many results that are sent; nothing if it would be too large and is not kept."""
        wanted = results * self.boundary
        return wanted if self.args.elastic_redo == "lost" and wanted <= self.args.elastic_log_mb * 1e6 else 0


def estimate(layout: Layout, job: Job) -> dict[int, Memory]:
    """What each rank of the layout needs."""
    weights = [job.weights(name) for name in layout.units]
    slices = [-(-count // layout.num_slices) for count in weights]
    result = {}
    split, way = job.args.elastic_schedule in ("split", "search"), layout.way
    keeping = Keeping(way, layout.units)
    for index, stage in enumerate(layout.stages):
        activations = [sum(job.activations(layout.units[unit]) for unit in chunk) for chunk in layout.chunks(index)]
        left = [
            min(size, job.boundary if layout.position(index, chunk) else 0) if layout.recomputes(index, chunk) else size
            for chunk, size in enumerate(activations)
        ]
        results = 2 * len(activations) - (index == way[0].stage) - (index == way[-1].stage)
        for cell in stage.cells:
            for rank in cell.ranks:
                held = sum(weights[unit] for unit in layout.held_by(rank))
                owned = sum(slices[unit] for unit, _ in layout.owned(rank))
                copied = sum(slices[unit] for unit, _ in layout.replicated(rank))
                result[rank] = Memory(
                    parameters=held * job.weight,
                    sums=held * job.sum,
                    totals=_totals(layout, rank, slices) * job.sum,
                    gradients=(owned + copied) * job.gradient,
                    owned=owned * job.state,
                    replicas=copied * job.state,
                    activations=int(keeping.most(index, len(cell.share), split, activations, left)),
                    log=job.log(len(cell.share) * results),
                )
    return result


def _totals(layout: Layout, rank: int, slices: Sequence[int]) -> int:
    """How much of two units a rank owns at most whose sums have parts elsewhere; those of others are added in place."""
    owned = Counter(unit for unit, _ in layout.owned(rank) if len(layout.contributors(unit)) > 1)
    return sum(sorted(count * slices[unit] for unit, count in owned.items())[-2:])


def first_layout(args: Any, world_size: int, ranks_per_host: int | None = None) -> Layout:
    """The fault-free layout for a GPT's flags (Megatron-LM's names); on one host if nothing else is said."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    cp, ep = _context_parallel(args), _expert_parallel(args)
    units, stages = gpt_units(
        args.num_layers, pp, tied=tied(args), positions=args.position_embedding_type == "learned_absolute",
        split=split(args), routed=routed(args), biased=getattr(args, "moe_router_enable_expert_bias", False),
        mtp=mtp_layers(args), through=through(args),
    )  # fmt: skip
    teams = max(cp, ep)
    dp = world_size // (tp * pp * teams)
    layout = Layout.grid(
        tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, stage_units=stages, units=units,
        num_grains=args.global_batch_size // (args.micro_batch_size * (teams // cp)),
        num_slices=args.elastic_slices or dp * teams, replicas=args.elastic_replicas, ranks_per_host=ranks_per_host,
        samples=args.micro_batch_size if args.elastic_dataflow == "resize" else 1,
    )  # fmt: skip
    return replace(layout, tied=tied(args), most_cells=pp * dp if args.elastic_spares else None)


def tied(args: Any) -> bool:
    """Whether the end of the model needs the embedding, too: as its output weight, or to predict further tokens."""
    return not args.untie_embeddings_and_output_weights or mtp_layers(args) > 0


def _context_parallel(args: Any) -> int:
    return getattr(args, "context_parallel_size", 1)


def _expert_parallel(args: Any) -> int:
    return getattr(args, "expert_model_parallel_size", 1)


def routed(args: Any) -> list[int]:
    """Layers that have experts. Further predictions are made by layers like the last one, whose numbers follow."""
    if not getattr(args, "num_experts", None):
        return []
    often = getattr(args, "moe_layer_freq", 1)
    pattern = often if isinstance(often, list) else [int(layer % often == 0) for layer in range(args.num_layers)]
    return [layer for layer, routed in enumerate([*pattern, *pattern[-1:] * mtp_layers(args)]) if routed]


def available() -> int:
    """Bytes of memory of this machine, or of the control group that this process is in, if that is less."""
    kib = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    limits = [int(kib.split()[1]) * 1024]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):
            continue  # no such group, or no limit
    return min(limits)


def shortage(needs: Sequence[Memory], there: int, devices: bool = False) -> str | None:
    """Why the ranks of one machine cannot run in ``there`` bytes of host memory; None if they may.

    ``devices``: they compute elsewhere. Activations do not count: they are estimated, and refusing a job that would fit
    is worse than not.
    """
    parts = {} if devices else _computing(needs)
    parts["replicas"] = sum(need.replicas for need in needs)
    if (total := sum(parts.values())) <= there:
        return None
    return (
        f"the {len(needs)} ranks of this machine need {_gib(total)} of memory{'' if devices else ' and activations'}, "
        f"but it has {_gib(there)} ({_listed(parts)}): use more machines, a smaller model, --elastic-replicas 0, "
        "--elastic-consistency fast or a lower --elastic-log-mb"
    )


def shortage_of_device(needs: Sequence[Memory], there: int) -> str | None:
    """Why the ranks that share a device cannot run in its ``there`` bytes; None if they may."""
    parts = _computing(needs)
    parts["gradient sums"] += sum(need.totals for need in needs)
    if (total := sum(parts.values())) <= there:
        return None
    return (
        f"the {len(needs)} ranks on a device need {_gib(total)} of its memory and activations, but it has "
        f"{_gib(there)} ({_listed(parts)}): use more devices, a smaller model, --elastic-consistency fast or a lower "
        "--elastic-log-mb"
    )


def _computing(needs: Sequence[Memory]) -> dict[str, int]:
    return {
        "parameters": sum(need.parameters for need in needs),
        "gradient sums": sum(need.sums + need.gradients for need in needs),
        "optimizer state": sum(need.owned for need in needs),
        "log of a step": sum(need.log for need in needs),
    }


def _listed(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_gib(size)}" for name, size in parts.items())


def main(args: argparse.Namespace, world_size: int) -> None:
    """Print a table: what the ranks of each stage need, for flags that have been checked."""
    layout, job = first_layout(args, world_size), Job.of(args)
    needs = estimate(layout, job)
    names = ("parameters", "sums", "totals", "gradients", "owned", "replicas", "activations", "log", "device", "host",
             "total")  # fmt: skip
    print(f"{'rank':>6}" + "".join(f"{name:>13}" for name in names))
    for stage in layout.stages:
        for cell in stage.cells:
            for rank in cell.ranks:
                print(f"{rank:>6}" + "".join(f"{_gib(getattr(needs[rank], name)):>13}" for name in names))
    total = sum(need.total for need in needs.values())
    print(f"all {len(needs)} ranks together: {_gib(total)}; this machine has {_gib(available())}")


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 1 << 28 else f"{size / 2**20:.1f} MiB"
