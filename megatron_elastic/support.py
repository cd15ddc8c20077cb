"""Support: which of Megatron-LM's flags work with ``--elastic``, and what to do about the others.

One table, which the launcher reads before any process starts, every rank after Megatron's own parser has filled in the
defaults, and ``docs/megatron.md`` shows. Nothing here imports torch or Megatron.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_elastic import argument_file
from megatron_elastic.config import UsageError
from megatron_elastic.layout import LayoutError
from megatron_elastic.plan.split import split

_OFF = (None, False, 0)
_LEAVE = "leave it out"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A flag that cannot work with ``--elastic``, other than with the values in ``but``.

    Attributes:
        dest: the flag's name in the parsed arguments.
        reads: how many values the flag takes on the command line: None for a switch, or argparse's ``nargs``.
    """

    flag: str
    why: str
    fix: str = _LEAVE
    but: tuple[Any, ...] = _OFF
    reads: int | str | None = 1
    dest: str = ""

    @property
    def name(self) -> str:
        """The attribute of the parsed arguments that holds the flag's value."""
        return self.dest or self.flag.removeprefix("--").replace("-", "_")

    def applies(self, value: Any) -> bool:
        """Whether the job asks for what cannot work."""
        if value is None:
            return False
        return not all(map(self._allows, value if isinstance(value, list | tuple) else [value]))

    def _allows(self, value: Any) -> bool:
        text = str(getattr(value, "value", value))  # enumerations and command lines both compare as text
        return any(value is allowed or text == str(allowed) for allowed in self.but)


def _switch(flag: str, why: str, fix: str = _LEAVE, dest: str = "") -> Refusal:
    return Refusal(flag, why, fix, reads=None, dest=dest)


_GRAINS = "the number of micro-batches in a global batch is fixed at the start"
_PRECISION = "the state of a slice is fp32 weights and fp32 moments, and gradients are summed exactly"
_LOOP = "it belongs to Megatron's own training loop, which --elastic replaces"
_SAVED = "checkpoints are written from slices, as torch_dist"

REFUSALS: tuple[Refusal, ...] = (
    _switch("--hybrid-context-parallel", "every sequence is divided among the same ranks"),
    Refusal("--hierarchical-context-parallel-sizes", "context-parallel ranks are one group", reads="*"),
    Refusal("--moe-token-dispatcher-type", "it goes around the elastic groups", "use alltoall",
            but=("allgather", "alltoall")),
    _switch("--moe-enable-deepep", "it goes around the elastic groups"),
    _switch("--overlap-moe-expert-parallel-comm", "a grain's forward and its backward are passes apart"),
    Refusal("--moe-router-load-balancing-type", "a router may look at one micro-batch, and not at what was before",
            "use aux_loss or seq_aux_loss", but=("aux_loss", "seq_aux_loss", "sinkhorn", "none"), reads="*"),
    _switch("--moe-router-force-load-balancing", "it draws random numbers apart from the keyed generators"),
    _switch("--moe-per-layer-logging", "routers' losses are added up over the layers before they are logged"),
    _switch("--moe-use-upcycling", "a job begins with the weights that are there"),
    _switch("--use-tp-pp-dp-mapping", "ranks are ordered tensor, data, pipeline"),
    Refusal("--num-distributed-optimizer-instances", "owners and replicas of slices take their place", "use 1",
            but=(1,)),
    _switch("--use-megatron-fsdp", "parameters are sharded as slices"),
    _switch("--use-torch-fsdp2", "parameters are sharded as slices"),
    _switch("--fake-process-group", "the groups are real"),
    Refusal("--optimizer", "slices are updated by Adam or SGD", "use adam or sgd", but=("adam", "sgd")),
    _switch("--optimizer-cpu-offload", "replicas are in host memory already"),
    _switch("--use-precision-aware-optimizer", _PRECISION),
    Refusal("--main-grads-dtype", _PRECISION, "use fp32", but=("fp32", "torch.float32")),
    Refusal("--main-params-dtype", _PRECISION, "use fp32", but=("fp32", "torch.float32")),
    Refusal("--exp-avg-dtype", _PRECISION, "use fp32", but=("fp32", "torch.float32")),
    Refusal("--exp-avg-sq-dtype", _PRECISION, "use fp32", but=("fp32", "torch.float32")),
    _switch("--grad-reduce-in-bf16", _PRECISION),
    Refusal("--head-lr-mult", "only --decoupled-lr makes parameters learn at another rate", but=(1.0, 1)),
    Refusal("--no-weight-decay-cond-type", "weight decay spares biases and one-dimensional parameters, nothing else"),
    _switch("--apply-wd-to-qk-layernorm", "weight decay spares biases and one-dimensional parameters, nothing else"),
    _switch("--fp16", "it needs a loss scale, which is not supported yet", "use --bf16 or neither"),
    Refusal("--fp8-format", "8-bit scales belong to a place, not to a grain", dest="fp8"),
    Refusal("--fp4-format", "4-bit scales belong to a place, not to a grain", dest="fp4"),
    Refusal("--cuda-graph-impl", "a recorded step cannot be interrupted", but=("none",)),
    _switch("--enable-cuda-graph", "a recorded step cannot be interrupted"),
    _switch("--external-cuda-graph", "a recorded step cannot be interrupted"),
    _switch("--tp-comm-overlap", "it goes around the elastic groups"),
    _switch("--te-rng-tracker", "random numbers come from keyed generators"),
    _switch("--inference-rng-tracker", "random numbers come from keyed generators"),
    _switch("--data-parallel-random-init", "every column must begin with the same weights"),
    _switch("--init-model-with-meta-device", "weights are initialised unit by unit on the device"),
    _switch("--distribute-saved-activations", "recomputation must not depend on other ranks"),
    _switch("--fine-grained-activation-offloading", "not supported yet"),
    Refusal("--rampup-batch-size", _GRAINS, "use a constant --global-batch-size", reads="*"),
    _switch("--decrease-batch-size-if-needed", _GRAINS),
    Refusal("--mtp-num-layers", "multi-token prediction is not supported yet"),
    Refusal("--heterogeneous-layers-config-path", "all layers are alike"),
    Refusal("--hybrid-override-pattern", "all layers are alike"),
    _switch("--use-legacy-models", "only megatron.core's GPTModel is supported"),
    Refusal("--spec", "its parameters may belong to no unit that is known", reads="*"),
    Refusal("--experimental-attention-variant", "not supported yet"),
    _switch("--sft", "packed sequences are not supported yet"),
    _switch("--perform-rl-step", _LOOP),
    Refusal("--dataloader-type", "samples are taken in order", "use single", but=("single",)),
    Refusal("--phase-transition-iterations", "samples are taken in order"),
    Refusal("--iterations-to-skip", "every step is taken", reads="*"),
    _switch("--full-validation", _LOOP),
    _switch("--multiple-validation-sets", _LOOP),
    _switch("--skip-train", "without training there is nothing to keep going"),
    Refusal("--ckpt-format", _SAVED, "use torch_dist", but=("torch_dist",)),
    Refusal("--non-persistent-save-interval", "replicas in memory take their place"),
    Refusal("--ckpt-convert-format", _SAVED),
    _switch("--use-checkpoint-args", "flags are checked before anything is loaded", "give the flags"),
    _switch("--no-save-optim", "optimizer states belong to a checkpoint"),
    _switch("--no-load-optim", "optimizer states belong to a checkpoint"),
    _switch("--load-main-params-from-ckpt", "optimizer states belong to a checkpoint"),
    Refusal("--save-retain-interval", "old checkpoints are not deleted", "delete them yourself"),
    Refusal("--save-wgrads-interval", _LOOP),
    Refusal("--save-dgrads-interval", _LOOP),
    _switch("--use-checkpoint-opt_param-scheduler", "learning rates follow from the flags and the step"),
    _switch("--inprocess-restart", "--elastic recovers in its place"),
    _switch("--enable-ft-package", "--elastic watches the ranks in its place"),
    _switch("--adlr-autoresume", _LOOP),
    Refusal("--rerun-mode", "steps are not repeated to compare them", "use disabled or validate_results",
            but=("disabled", "validate_results")),
    Refusal("--error-injection-rate", "faults are injected with --elastic-inject", but=(0, 0.0)),
    _switch("--check-for-spiky-loss", _LOOP),
    _switch("--check-for-large-grads", _LOOP),
    Refusal("--check-weight-hash-across-dp-replicas-interval", _LOOP),
    _switch("--log-straggler", _LOOP),
    _switch("--run-workload-inspector-server", _LOOP),
    _switch("--profile", _LOOP),
    _switch("--record-memory-history", _LOOP),
    _switch("--log-progress", _LOOP),
    _switch("--log-params-norm", _LOOP),
    _switch("--log-num-zeros-in-grad", _LOOP),
    _switch("--log-max-attention-logit", _LOOP),
    _switch("--log-energy", _LOOP),
)
"""What is refused. Whatever is not here works, or has no effect (``WITHOUT_EFFECT``)."""

WITHOUT_EFFECT: dict[str, str] = {
    "`--use-distributed-optimizer`": "the optimizer is always sharded",
    "`--accumulate-allreduce-grads-in-fp32`": "always",
    "`--ddp-*`": "there is no DDP wrapper",
    "`--no-ckpt-fully-parallel-save`, `--dist-ckpt-*`": "checkpoints are written by all ranks, each its own slices",
    "`--distributed-backend`, `--distributed-timeout-minutes`": "the groups are elastic; see `--elastic-*-timeout`",
    "`--cp-comm-type`": "keys and values of all context-parallel ranks are gathered",
    "`--microbatch-group-size-per-virtual-pipeline-stage`": "groups have as many micro-batches as there are stages",
    "`--num-workers`": "a rank reads its samples itself",
    "`--no-save-rng`, `--no-load-rng`": "random numbers are keyed, and no state",
    "`--override-opt_param-scheduler`": "always",
    "`--manual-gc`, `--empty-unused-memory-level`, `--train-sync-interval`": "of Megatron's own loop",
    "`--loss-scale` and what goes with it": "for fp16 only",
}
"""Flags that are accepted and change nothing, with the reason."""


def check_arguments(argv: Sequence[str]) -> None:
    """Raise UsageError if flags of a Megatron-LM script cannot work with ``--elastic``.

    ``argv`` is the script's command line, with or without ``--yaml-cfg``.
    """
    path = argument_file.split(argv)[0]
    file = {} if path is None else argument_file.read(path)
    parser = _Parser(add_help=False, allow_abbrev=False)
    for refusal in REFUSALS:
        if refusal.reads is None:
            parser.add_argument(refusal.flag, dest=refusal.name, action="store_true")
        elif refusal.reads == 1:
            parser.add_argument(refusal.flag, dest=refusal.name)
        else:
            parser.add_argument(refusal.flag, dest=refusal.name, nargs=refusal.reads)
    given = parser.parse_known_args(list(argv), argparse.Namespace(**file))[0]
    for refusal, value in _values(given):
        if value not in (None, False) and refusal.applies(value):
            _refuse(refusal, value)


def check_namespace(args: argparse.Namespace) -> None:
    """The same for arguments that Megatron has parsed, with its defaults."""
    for refusal, value in _values(args):
        if refusal.applies(value):
            _refuse(refusal, value)


def check_split(args: argparse.Namespace) -> None:
    """Raise UsageError if layers cannot be split over the stages as flags say; virtual stages are counted here."""
    try:
        chunks = len(split(args)[0])
    except LayoutError as error:
        raise UsageError(str(error)) from None
    args.virtual_pipeline_model_parallel_size = None if chunks == 1 else chunks


def check_cells(args: argparse.Namespace) -> None:
    """Raise UsageError if experts and contexts cannot be divided as flags say that Megatron has parsed."""
    if not getattr(args, "num_experts", None):
        return
    cp, ep = args.context_parallel_size, args.expert_model_parallel_size
    if max(cp, ep) % min(cp, ep):
        raise UsageError(f"--context-parallel-size {cp} with --expert-model-parallel-size {ep} does not work with "
                         "--elastic: one must divide the other; change one of them")
    if args.expert_tensor_parallel_size not in (None, args.tensor_model_parallel_size):
        raise UsageError(f"--expert-tensor-parallel-size {args.expert_tensor_parallel_size} does not work with "
                         "--elastic: experts are cut as other layers are; leave it out")
    if args.elastic_dataflow == "resize":
        raise UsageError("--elastic-dataflow resize does not work with --num-experts: a router looks at whole "
                         "micro-batches, so they cannot be cut; use --elastic-dataflow reroute")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UsageError(message)


def _values(args: argparse.Namespace) -> Iterator[tuple[Refusal, Any]]:
    for refusal in REFUSALS:
        yield refusal, getattr(args, refusal.name, None)


def _refuse(refusal: Refusal, value: Any) -> None:
    values = value if isinstance(value, list | tuple) else [getattr(value, "value", value)]
    shown = refusal.flag if refusal.reads is None else " ".join(map(str, (refusal.flag, *values)))
    raise UsageError(f"{shown} does not work with --elastic: {refusal.why}; {refusal.fix}")
