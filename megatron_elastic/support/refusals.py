"""Refusals: which of Megatron-LM's flags do not work with ``--elastic``, and what to do about them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from megatron_elastic import argument_file, usage
from megatron_elastic.config import UsageError
from megatron_elastic.support import places
from megatron_elastic.support.model import check_grouped
from megatron_elastic.support.places import Parser

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
        return self.dest or usage.dest(self.flag)

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
    Refusal("--object-storage-cache-path", places.SOURCES, "copy them to a folder"),
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
    Refusal("--config-logger-dir", "its files are named by ranks' places, which change", but=("",)),
    _switch("--qk-clip", _LOOP),
    _switch("--batch-invariant-mode", "not supported yet"),
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
    "`--ddp-*`, `--no-align-grad-reduce`, `--no-align-param-gather`, `--overlap-param-gather-with-optimizer-step`, "
    "`--no-gradient-reduce-div-fusion`": "there is no DDP wrapper",
    "`--head-lr-mult`, `--exit-signal-handler-for-dataloader`, `--no-scatter-gather-tensors-in-pipeline`": "nothing in "
    "Megatron-LM reads it",
    "`--check-weight-hash-across-dp-replicas-interval`": "`--elastic-verify-every` compares copies, and heals them",
    "`--no-ckpt-fully-parallel-save`, `--dist-ckpt-*`": "checkpoints are written by all ranks, each its own slices",
    "`--ckpt-fully-parallel-*`, `--ckpt-assume-constant-structure`, `--use-persistent-ckpt-worker`, "
    "`--distrib-optim-fully-reshardable-mem-efficient`": "ranks write what they own, and read what they compute with",
    "`--async-strategy`, `--async-ckpt-*`": "a thread of each rank writes",
    "`--no-ckpt-load-validate-sharding-integrity`, `--no-stream-ckpt-dequant`": "each rank reads what it computes with",
    "`--flight-recorder-*`, `--no-flight-recorder-*`, `--use-sharp`, `--sharp-enabled-group`, `--use-nccl-ub`, "
    "`--nccl-communicator-config-path`, `--high-priority-stream-groups`, `--create-all-gather-group`, "
    "`--disable-symmetric-registration`, `--disable-gloo-process-groups`, "
    "`--pipeline-model-parallel-comm-backend`": "the groups are elastic, and not NCCL's",
    "`--no-overlap-p2p-communication`, `--overlap-p2p-communication-warmup-flush`, `--use-ring-exchange-p2p`": "what "
    "stages send each other goes in the background",
    "`--no-use-layer-wise-param-layout`": "the optimizer is always sharded by slices",
    "`--auto-detect-ckpt-format`, `--use-dist-ckpt`": "what lies in a folder says what it is",
    "`--no-strict-fsdp-dtensor-load`, `--ckpt-convert-*`, `--non-persistent-global-ckpt-dir`, "
    "`--non-persistent-local-*`, `--replication*`": "they say more about checkpoints that are refused",
    "`--distributed-backend`, `--distributed-timeout-*`": "the groups are elastic; see `--elastic-*-timeout`",
    "`--cp-comm-type`": "keys and values of all context-parallel ranks are gathered",
    "`--microbatch-group-size-per-virtual-pipeline-stage`": "groups have as many micro-batches as there are stages",
    "`--no-save-rng`, `--no-load-rng`": "random numbers are keyed, and no state",
    "`--override-opt_param-scheduler`, `--override-opt-param-scheduler`": "always, without "
    "`--use-checkpoint-opt_param-scheduler`",
    "`--validation-set-names`": "several sets are numbered",
    "`--exit-signal-handler-for-training`": "signals go to the launcher; see `--exit-signal-handler`",
    "`--dump-param-to-param-group-map`": "nothing is written: groups are made of all overrides",
    "`--manual-gc`, `--manual-gc-interval`, `--no-manual-gc-eval`, `--empty-unused-memory-level`, "
    "`--train-sync-interval`, `--lazy-mpu-init`, `--no-barrier-with-level-1-timing`": "of Megatron's own loop",
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
    parser = Parser(add_help=False, allow_abbrev=False)
    for refusal in REFUSALS:
        if refusal.reads is None:
            parser.add_argument(refusal.flag, dest=refusal.name, action="store_true")
        elif refusal.reads == 1:
            parser.add_argument(refusal.flag, dest=refusal.name)
        else:
            parser.add_argument(refusal.flag, dest=refusal.name, nargs=refusal.reads)
    parser.add_argument("--moe-grouped-gemm", action="store_true")
    parser.add_argument("--elastic-device")
    for flag in places.PLACES:
        parser.add_argument(flag, nargs="*")
    given = parser.parse_known_args(list(argv), argparse.Namespace(**file))[0]
    check_grouped(given)
    places.check_places(given)
    _refuse((refusal, value) for refusal, value in _values(given) if value not in (None, False))


def check_namespace(args: argparse.Namespace) -> None:
    """The same for arguments that Megatron has parsed, with its defaults."""
    places.check_places(args)
    _refuse(_values(args))


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
