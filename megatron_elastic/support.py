"""Support: which of Megatron-LM's flags work with ``--elastic``, and what to do about the others.

One table, which the launcher reads before any process starts, every rank after Megatron's own parser has filled in the
defaults, and ``docs/megatron.md`` shows. Nothing here imports torch or Megatron.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from megatron_elastic import argument_file, usage
from megatron_elastic.config import ElasticConfig, UsageError
from megatron_elastic.device import visible
from megatron_elastic.layout import LayoutError
from megatron_elastic.plan.split import split
from megatron_elastic.plan.work.ramp import Ramp

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


_PRECISION = "the state of a slice is fp32 weights and fp32 moments, and gradients are summed exactly"
_LOOP = "it belongs to Megatron's own training loop, which --elastic replaces"
_SOURCES = "whether an index is of the present data is told by the sizes and times of their files"
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
    Refusal("--main-params-dtype", _PRECISION, "use fp32", but=("fp32", "torch.float32")),
    Refusal("--exp-avg-dtype", _PRECISION, "use fp32", but=("fp32", "torch.float32")),
    Refusal("--exp-avg-sq-dtype", _PRECISION, "use fp32", but=("fp32", "torch.float32")),
    Refusal("--transformer-impl", "its layers are for inference", "use transformer_engine or local",
            but=("transformer_engine", "local")),
    _switch("--fp8-param-gather", "owners send weights as they are used before they are made 8 bits"),
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
    _switch("--decrease-batch-size-if-needed", "batches stay as large as the flags say, whatever ranks there are"),
    Refusal("--heterogeneous-layers-config-path", "all layers are alike"),
    Refusal("--hybrid-override-pattern", "all layers are alike"),
    _switch("--use-legacy-models", "only megatron.core's GPTModel is supported"),
    Refusal("--spec", "its parameters may belong to no unit that is known", reads="*"),
    Refusal("--experimental-attention-variant", "not supported yet"),
    _switch("--perform-rl-step", _LOOP),
    Refusal("--dataloader-type", "who takes over a micro-batch must be able to ask for its samples by number",
            "use single or cyclic", but=("single", "cyclic")),
    Refusal("--phase-transition-iterations", "samples are taken in order"),
    Refusal("--object-storage-cache-path", _SOURCES, "copy them to a folder"),
    Refusal("--ckpt-format", _SAVED, "use torch_dist", but=("torch_dist",)),
    *(Refusal(flag, "replicas in memory take their place, and are never behind", "use --elastic-replicas")
      for flag in ("--non-persistent-save-interval", "--non-persistent-ckpt-type")),
    Refusal("--ckpt-convert-format", _SAVED),
    _switch("--load-main-params-from-ckpt", "optimizer states belong to a checkpoint"),
    Refusal("--save-wgrads-interval", "gradients are in slices, and not in Megatron's buffers"),
    Refusal("--save-dgrads-interval", "gradients are in slices, and not in Megatron's buffers"),
    _switch("--inprocess-restart", "--elastic recovers in its place"),
    _switch("--enable-ft-package", "--elastic watches the ranks in its place"),
    _switch("--adlr-autoresume", _LOOP, "use --exit-signal-handler"),
    Refusal("--rerun-mode", "steps are not repeated to compare them", "use disabled or validate_results",
            but=("disabled", "validate_results")),
    Refusal("--error-injection-rate", "faults are injected with --elastic-inject", but=(0, 0.0)),
    _switch("--check-for-large-grads", "steps are not repeated to find out where a large gradient comes from"),
    _switch("--log-straggler", "the coordinator finds ranks that are slow", "see --elastic-slow"),
    _switch("--run-workload-inspector-server", "the coordinator finds ranks that are slow", "see --elastic-slow"),
    _switch("--profile", _LOOP),
    _switch("--record-memory-history", _LOOP),
    _switch("--log-max-attention-logit", "Transformer Engine's attention tells it, and local attention does not"),
    _switch("--log-energy", _LOOP),
    # Of 0.19, or of releases between.
    Refusal("--tensor-parallel-num-weight-shards", "parameters are sharded as slices"),
    Refusal("--expert-tensor-parallel-num-weight-shards", "parameters are sharded as slices"),
    _switch("--overlap-dispatch-backward-with-experts-wgrad", "experts' gradients are not put off",
            "use --elastic-schedule split"),
    _switch("--use-mup", "learning rates are those of the flags for all parameters"),
    _switch("--mtp-use-repeated-layer", "each further prediction is a unit"),
    _switch("--mtp-detach-heads", "each use of the embedding has a gradient"),
    Refusal("--mtp-hybrid-override-pattern", "all layers are alike"),
    Refusal("--hybrid-layer-pattern", "all layers are alike"),
    _switch("--use-transformer-engine-op-fuser", "not supported yet"),
    _switch("--use-grouped-gemm-for-dense-mlp", "not supported yet"),
    _switch("--use-grouped-gemm-for-shared-expert", "not supported yet"),
    _switch("--moe-single-grouped-weight", "an expert is a unit's part by its number"),
    _switch("--moe-single-grouped-bias", "an expert is a unit's part by its number"),
    Refusal("--moe-router-force-biased", "what is drawn follows from a place, not from a grain",
            "use --moe-router-force-load-balancing"),
    Refusal("--moe-expert-rank-capacity-factor", "how many ranks share experts changes no number",
            "use --moe-expert-capacity-factor"),
    _switch("--moe-paged-stash", "not supported yet"),
    _switch("--mla-down-proj-fusion", "not supported yet"),
    Refusal("--step-batch-size-schedule", "batches grow evenly", "use --rampup-batch-size"),
    _switch("--optimizer-cuda-graph", "a recorded step cannot be interrupted"),
    _switch("--freeze-all-layers", "each unit has a gradient"),
    Refusal("--save-params-interval", "weights are in slices, and not in Megatron's buffers", "use --save-interval"),
    Refusal("--save-activations-interval", _LOOP),
    Refusal("--save-tokens-per-expert-interval", _LOOP),
    _switch("--verify-integrity", "checkpoints have no list of hashes", "see --elastic-verify-every"),
    Refusal("--override-ckpt-iteration", "a step has the samples that follow from its number", "use --finetune"),
    Refusal("--start-eval-at-iter", "each evaluation has its own stretch of the data", "use --eval-interval"),
    Refusal("--eval-global-batch-size", "evaluations have the batches of training"),
    Refusal("--eval-micro-batch-size", "evaluations have the batches of training"),
    _switch("--dataloader-inter-document-masking", "local attention knows documents by the masks of the data",
            "use --reset-attention-mask"),
    Refusal("--gpu-sniff-test-interval", "the coordinator finds ranks that are slow", "see --elastic-slow"),
    Refusal("--moe-routing-trace-path", _LOOP),
    Refusal("--logits-save-dir", _LOOP),
    Refusal("--logits-load-dir", "a teacher's logits are read in the order of Megatron's own loop"),
    Refusal("--fault-injector-ranks", "faults are injected with --elastic-inject"),
    Refusal("--fault-injector-num-ranks", "faults are injected with --elastic-inject"),
)
"""What is refused. Whatever is not here works, or has no effect (``WITHOUT_EFFECT``)."""

WITHOUT_EFFECT: dict[str, str] = {
    "`--use-distributed-optimizer`": "the optimizer is always sharded",
    "`--accumulate-allreduce-grads-in-fp32`": "always",
    "`--grad-reduce-in-bf16`": "gradients are summed up exactly, and nothing is rounded on the way",
    "`--ddp-*`": "there is no DDP wrapper",
    "`--head-lr-mult`": "nothing in Megatron-LM reads it",
    "`--check-weight-hash-across-dp-replicas-interval`": "`--elastic-verify-every` compares copies, and heals them",
    "`--no-ckpt-fully-parallel-save`, `--dist-ckpt-*`": "checkpoints are written by all ranks, each its own slices",
    "`--ckpt-fully-parallel-*`, `--ckpt-assume-constant-structure`, `--use-persistent-ckpt-worker`, "
    "`--distrib-optim-fully-reshardable-mem-efficient`": "ranks write what they own, and read what they compute with",
    "`--async-strategy`, `--async-ckpt-*`": "a thread of each rank writes",
    "`--no-ckpt-load-validate-sharding-integrity`, `--no-stream-ckpt-dequant`": "each rank reads what it computes with",
    "`--flight-recorder-*`, `--no-flight-recorder-*`": "the groups are elastic, and not NCCL's",
    "`--no-use-layer-wise-param-layout`": "the optimizer is always sharded by slices",
    "`--auto-detect-ckpt-format`, `--use-dist-ckpt`": "what lies in a folder says what it is",
    "`--no-strict-fsdp-dtensor-load`, `--ckpt-convert-*`, `--non-persistent-global-ckpt-dir`, "
    "`--non-persistent-local-*`, `--replication*`": "they say more about checkpoints that are refused",
    "`--distributed-backend`, `--distributed-timeout-minutes`": "the groups are elastic; see `--elastic-*-timeout`",
    "`--cp-comm-type`": "keys and values of all context-parallel ranks are gathered",
    "`--microbatch-group-size-per-virtual-pipeline-stage`": "groups have as many micro-batches as there are stages",
    "`--no-save-rng`, `--no-load-rng`": "random numbers are keyed, and no state",
    "`--override-opt_param-scheduler`, `--override-opt-param-scheduler`": "always, without "
    "`--use-checkpoint-opt_param-scheduler`",
    "`--validation-set-names`": "several sets are numbered",
    "`--exit-signal-handler-for-training`": "signals go to the launcher; see `--exit-signal-handler`",
    "`--manual-gc`, `--empty-unused-memory-level`, `--train-sync-interval`": "of Megatron's own loop",
}
"""Flags that are accepted and change nothing, with the reason."""


def not_named(words: Sequence[str]) -> list[str]:
    """Of a command line what neither of the two tables names."""
    patterns = [refusal.flag for refusal in REFUSALS]
    for names in WITHOUT_EFFECT:
        patterns += re.findall(r"--[\w*-]+", names)
    found: list[str] = []
    named = False
    for word in words:
        if word.startswith("--"):
            named = any(fnmatch(word.partition("=")[0], pattern) for pattern in patterns)
        if not named:
            found.append(word)
    return found


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
    parser.add_argument("--moe-grouped-gemm", action="store_true")
    parser.add_argument("--elastic-device")
    for flag in _PLACES:
        parser.add_argument(flag, nargs="*")
    given = parser.parse_known_args(list(argv), argparse.Namespace(**file))[0]
    check_grouped(given)
    _check_places(given)
    _refuse((refusal, value) for refusal, value in _values(given) if value not in (None, False))


def check_namespace(args: argparse.Namespace) -> None:
    """The same for arguments that Megatron has parsed, with its defaults."""
    _check_places(args)
    _refuse(_values(args))


def check_split(args: argparse.Namespace) -> None:
    """Raise UsageError if layers cannot be split over the stages as flags say; virtual stages are counted here."""
    try:
        chunks = max(map(len, split(args)))
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


def check_grouped(args: argparse.Namespace) -> None:
    """Raise UsageError if experts' products cannot be computed at once, as flags say."""
    if not getattr(args, "moe_grouped_gemm", False):
        return
    on = args.elastic_device or ("cuda" if visible.count(os.environ) else "cpu")
    engine = args.transformer_impl in (None, "transformer_engine") and engine_installed()
    if on in ("cpu", "soft") or not (engine or importlib.util.find_spec("grouped_gemm")):
        raise UsageError("--moe-grouped-gemm needs a GPU, and Transformer Engine or the package grouped_gemm: leave it "
                         "out, and each expert's products are computed by themselves")


def check_expert_parallel(args: argparse.Namespace) -> None:
    """Raise UsageError if ranks would be left over that share no experts, which Megatron does not check."""
    cp, ep = args.context_parallel_size, args.expert_model_parallel_size
    if args.data_parallel_size * cp % ep:
        contexts = f" x --context-parallel-size {cp}" if cp > 1 else ""
        whole = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * max(cp, ep)
        raise UsageError(f"--expert-model-parallel-size {ep} does not divide the data-parallel size "
                         f"{args.data_parallel_size}{contexts}: start a multiple of {whole} processes, or change the "
                         "sizes")


def check_whole(args: argparse.Namespace) -> None:
    """Raise UsageError if micro-batches may be cut of which something looks at the whole."""
    if args.elastic_dataflow != "resize":
        return
    for flag, who in (("--num-experts", "a router looks"), ("--mtp-num-layers", "the mean of further losses looks")):
        if getattr(args, flag.removeprefix("--").replace("-", "_"), None):
            raise UsageError(f"--elastic-dataflow resize does not work with {flag}: {who} at whole micro-batches, so "
                             "they cannot be cut; use --elastic-dataflow reroute")


def check_at_least(limit: int, **values: float | None) -> None:
    """Raise UsageError if the value of a flag is below a limit; ``values``: by name, None where nothing is said."""
    for name, value in values.items():
        if value is not None and value < limit:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {limit}, got {value:g}")


def check_batch(args: argparse.Namespace) -> None:
    """Raise UsageError if the global batch cannot be divided among the data-parallel ranks."""
    at_once = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size % at_once:
        raise UsageError(
            f"--global-batch-size {args.global_batch_size} is no multiple of --micro-batch-size "
            f"{args.micro_batch_size} x data-parallel size {args.data_parallel_size} = {at_once}: "
            f"use {-(-args.global_batch_size // at_once) * at_once}"
        )


def check_length(args: argparse.Namespace) -> None:
    """Raise UsageError if there would be no step to do."""
    if args.train_iters is None and args.train_samples is None:
        raise UsageError("--train-iters or --train-samples is needed")
    if args.train_samples is None:
        check_at_least(1, train_iters=args.train_iters)
    elif Ramp.of(args).steps(args.train_samples) < 1:
        raise UsageError(f"--train-samples {args.train_samples} are too few for a step: its batch has "
                         f"{Ramp.of(args).before(2)}; raise it")


def check_ramp(args: argparse.Namespace) -> None:
    """Raise UsageError if the global batch cannot grow as ``--rampup-batch-size`` says, at any step of it.

    Megatron finds out about some of that when a step comes whose batch cannot be divided.
    """
    if args.rampup_batch_size is None:
        return
    shown = f"--rampup-batch-size {' '.join(map(str, args.rampup_batch_size))}"
    for flag in ("--no-load-optim", "--iterations-to-skip"):
        if getattr(args, flag.removeprefix("--").replace("-", "_"), None):
            raise UsageError(f"{shown} does not work with {flag}: while batches grow the learning rate counts "
                             "the samples of all steps; leave one of them out")
    try:
        start, increment, span = map(int, args.rampup_batch_size)
    except ValueError:
        raise UsageError(f"{shown}: expected three numbers, START INCREMENT SAMPLES") from None
    full, at_once = args.global_batch_size, args.micro_batch_size * args.data_parallel_size
    if min(start, increment, span) < 1:
        raise UsageError(f"{shown}: START, INCREMENT and SAMPLES must be at least 1")
    if start >= full or (full - start) % increment:
        raise UsageError(f"{shown}: --global-batch-size {full} must be START and one or more times INCREMENT more")
    if start % at_once or increment % at_once:
        raise UsageError(f"{shown}: START and INCREMENT must be multiples of --micro-batch-size "
                         f"{args.micro_batch_size} x data-parallel size {args.data_parallel_size} = {at_once}, as "
                         "--global-batch-size is")


def check_faults(args: argparse.Namespace) -> None:
    """Raise UsageError if faults are to happen (``--elastic-inject``) on a rank, or in what, there will never be."""
    config, ramp = ElasticConfig.from_args(args), Ramp.of(args)
    steps = ramp.steps(args.train_samples) if args.train_iters is None else args.train_iters
    for fault in config.inject:
        flag = f"--elastic-inject {fault}"
        # A rank that joins has an id that nobody had before.
        if fault.rank < 0 or (fault.rank >= args.world_size and not (config.respawn or config.spares)):
            raise UsageError(f"{flag}: rank must be from 0 to {args.world_size - 1}, unless --elastic-respawn or "
                             "--elastic-spares is given")
        if fault.step is not None and not 1 <= fault.step <= steps:
            raise UsageError(f"{flag}: step must be from 1 to {steps}, which is the last one")
        grains = ramp.grains(steps if fault.step is None else fault.step)
        if fault.grain is not None and not 0 <= fault.grain < grains:
            raise UsageError(f"{flag}: grain must be from 0 to {grains - 1} "
                             "(batch size / --micro-batch-size / --expert-model-parallel-size - 1)")


def check_schedule(args: argparse.Namespace) -> None:
    """Raise UsageError if learning rates are to go by the flags and by a checkpoint."""
    if args.override_opt_param_scheduler and args.use_checkpoint_opt_param_scheduler:
        raise UsageError("--override-opt_param-scheduler goes by the flags and --use-checkpoint-opt_param-scheduler by "
                         "the checkpoint: leave out one of them")


def check_documents(args: argparse.Namespace) -> None:
    """Raise UsageError if documents or conversations are to be kept apart, and cannot be."""
    if args.sft and args.mtp_num_layers:
        raise UsageError("--sft with --mtp-num-layers does not work with --elastic: further predictions would look "
                         "beyond conversations; leave out one of them")
    if args.sft and (args.create_attention_mask_in_dataloader or args.reset_attention_mask or args.reset_position_ids):
        raise UsageError("--sft: Megatron's data set of conversations needs --no-create-attention-mask-in-dataloader, "
                         "and neither --reset-attention-mask nor --reset-position-ids, which conversations do anyway")
    if args.reset_attention_mask and not args.create_attention_mask_in_dataloader:
        raise UsageError("--reset-attention-mask with --no-create-attention-mask-in-dataloader does not work with "
                         "--elastic: local attention knows documents by the masks of the data; leave out one of them")


_RECIPES = ("tensorwise", "blockwise", "mxfp8")
"""Of 8-bit products, those whose scales follow from what is multiplied alone."""


def engine_installed() -> bool:
    """Whether there is a Transformer Engine. It is not imported."""
    return importlib.util.find_spec("transformer_engine") is not None


def check_norms(args: argparse.Namespace) -> None:
    """Raise UsageError if norms are to be fused of which there are only torch's, as on a CPU."""
    if args.transformer_impl == "local" and not args.no_persist_layer_norm and not importlib.util.find_spec("apex"):
        raise UsageError("persistent norms are Apex's, which is not installed: add --no-persist-layer-norm")


def check_engine(args: argparse.Namespace) -> None:
    """Raise UsageError if layers of Transformer Engine cannot do what flags say that Megatron has parsed."""
    if args.transformer_impl != "transformer_engine":
        return
    if not engine_installed():
        raise UsageError("--transformer-impl transformer_engine, which is Megatron-LM's default, needs Transformer "
                         "Engine, which is not installed: add --transformer-impl local")
    local, own = "use --transformer-impl local", "--transformer-impl transformer_engine"
    if getattr(args, "fp8", None) and args.fp8_recipe not in _RECIPES:
        raise UsageError(f"--fp8-format with --fp8-recipe {args.fp8_recipe} does not work with --elastic: scales that "
                         f"follow from earlier micro-batches belong to a place, not to a grain; use {_RECIPES[0]}, "
                         f"{_RECIPES[1]} or {_RECIPES[2]}")
    if args.context_parallel_size > 1:
        raise UsageError(f"--context-parallel-size with {own} does not work with --elastic: its attention finds the "
                         f"others by their places in the job, which change; {local}")
    if getattr(args, "reset_attention_mask", False) or getattr(args, "sft", False):
        raise UsageError(f"--reset-attention-mask and --sft with {own} do not work with --elastic: its attention does "
                         f"not look at masks of documents; {local}")
    if args.elastic_dataflow == "resize" and args.attention_dropout:
        raise UsageError(f"--elastic-dataflow resize with {own} needs --attention-dropout 0: its kernels draw for the "
                         f"micro-batch that they get, and not for the whole one; add that, or {local}")
    if args.num_experts and args.elastic_schedule != "1f1b":
        raise UsageError(f"--elastic-schedule {args.elastic_schedule} with --num-experts and {own} does not work: "
                         f"experts' gradients are not put off; use --elastic-schedule 1f1b, or {local}")


_PLACES = {
    **dict.fromkeys(("--load", "--save", "--pretrained-checkpoint"),
                    "a checkpoint gets its name once it is whole, which object stores cannot do"),
    **dict.fromkeys(("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path"), _SOURCES),
}  # fmt: skip
"""Where checkpoints and data are, and why not in an object store."""


def check_data(argv: Sequence[str]) -> None:
    """Raise UsageError if data that a command line of Megatron-LM's ``pretrain_gpt.py`` names are not there."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    flags = [flag for flag in _PLACES if flag.endswith("data-path")]
    for flag in flags:
        parser.add_argument(flag, nargs="*", default=[])
    parser.add_argument("--sft", action="store_true")
    given = vars(parser.parse_known_args(list(argv))[0])
    for flag in flags:
        for place in given[flag.removeprefix("--").replace("-", "_")]:
            if usage.is_number(place) and not given["sft"]:
                continue  # the share of the data set that follows
            for path in (place,) if given["sft"] else (f"{place}.idx", f"{place}.bin"):
                if not os.path.exists(path):
                    raise UsageError(f"{flag} {place}: {path} does not exist; name data that are there, without the "
                                     "ending of their names")


def _check_places(args: argparse.Namespace) -> None:
    """Raise UsageError if something is to be in an object store, which Megatron reads through clients of its own."""
    for flag, why in _PLACES.items():
        given = getattr(args, flag.removeprefix("--").replace("-", "_"), None) or ()
        for place in map(str, given if isinstance(given, list) else (given,)):
            if place.startswith(("msc://", "s3://")):
                raise UsageError(f"{flag} {place} does not work with --elastic: {why}; name a folder that all nodes "
                                 "share, and copy")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UsageError(message)


def _values(args: argparse.Namespace) -> Iterator[tuple[Refusal, Any]]:
    for refusal in REFUSALS:
        yield refusal, getattr(args, refusal.name, None)


def _refuse(given: Iterable[tuple[Refusal, Any]]) -> None:
    """Raise UsageError, in one line, for all flags that cannot work with the values they are given."""
    if problems := [_problem(refusal, value) for refusal, value in given if refusal.applies(value)]:
        raise UsageError(". ".join(problems))


def _problem(refusal: Refusal, value: Any) -> str:
    values = value if isinstance(value, list | tuple) else [getattr(value, "value", value)]
    shown = refusal.flag if refusal.reads is None else " ".join(map(str, (refusal.flag, *values)))
    return f"{shown} does not work with --elastic: {refusal.why}; {refusal.fix}"
