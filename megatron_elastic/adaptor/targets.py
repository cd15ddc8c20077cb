"""Targets: everything in Megatron that the adaptors replace, wrap or call, and what it looks like in which release.

An adaptor changes Megatron only through a target's ``replace`` or ``wrap``, which look first whether the target is
there and takes the parameters that the adaptor was written for. ``megatron-elastic doctor`` compares the same table
with a checkout's sources. Importing this file imports neither torch nor Megatron.

A target is written down as it is in the first of ``RELEASES``, with a ``Since`` for each release that changed it. In a
release that is not among them a target has the newest shape that fits what is found there.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_elastic.adaptor.releases import RELEASES, SUPPORTED, known, running


class AdaptorError(RuntimeError):
    """Megatron is not as an adaptor expects it. The message names the target and what to do."""


@dataclass(frozen=True, slots=True)
class Since:
    """What is different about a target from a release on.

    Attributes:
        release: one of ``RELEASES``.
        module, name, parameters: as ``Target`` has them; empty or None where they are as before.
        gone: there is no such thing any more, or it does by itself what it was changed for.
    """

    release: str
    module: str = ""
    name: str = ""
    parameters: tuple[str, ...] | None = None
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Target:
    """A function, method or variable of Megatron, or of Transformer Engine.

    Attributes:
        name: inside the module; methods as ``Class.method``.
        parameters: names. What is replaced must have exactly these; what is wrapped or called, at least these. None
            for something that takes none.
        when: ``always`` with ``--elastic``; ``checkout`` with ``--elastic`` in a Megatron-LM checkout; ``cpu``
            on machines without a GPU; ``engine`` with ``--elastic`` and layers of Transformer Engine, whose it is.
        later: what later releases have changed, in their order.
        first: the release that brought it.
    """

    module: str
    name: str
    use: Literal["replaced", "wrapped", "called"]
    parameters: tuple[str, ...] | None
    when: Literal["always", "checkout", "cpu", "engine"]
    why: str
    later: tuple[Since, ...] = ()
    first: str = RELEASES[0]

    def find(self) -> Any:
        """The target in the Megatron that is installed, as it is now. Raises AdaptorError if it is not as expected."""
        target = self._here()
        if target is None:
            raise AdaptorError(self._complaint(f"there is none in Megatron {running()}"))
        owner, last = target._owner()
        value = getattr(owner, last)
        if (target.module, target.name) not in _originals:
            problem = target._problem_of(value)
            if problem:
                raise AdaptorError(target._complaint(problem))
        return value

    def replace(self, new: Any) -> None:
        """Put ``new`` in the target's place, if the release has it. May be repeated. Raises AdaptorError."""
        self._put(lambda _: new)

    def wrap(self, make: Callable[[Any], Any]) -> None:
        """Put ``make(original)`` in the target's place, where original is Megatron's own even if repeated."""
        self._put(make)

    @property
    def there(self) -> bool:
        """Whether the release that is installed has it."""
        return self._here() is not None

    def takes(self, parameter: str) -> bool:
        """Whether it has this parameter in the release that is installed."""
        target = self._here()
        return target is not None and parameter in (target.parameters or ())

    def in_release(self, release: str, problem: Callable[[Target], str]) -> Target | None:
        """The target as a release has it, which is None for one that does not; ``later`` is empty in it.

        ``problem`` says why a shape is not what is found there, and is asked for releases that are not known.
        """
        shapes = list(self._shapes())
        if known(release):
            return [shape for since, shape in shapes if RELEASES.index(since) <= RELEASES.index(release)][-1]
        return next((shape for _, shape in reversed(shapes) if shape is not None and not problem(shape)), shapes[-1][1])

    def mismatch(self, found: tuple[str, ...]) -> str:
        """What is wrong with the parameters ``found``; empty if nothing is."""
        assert self.parameters is not None
        if self.use == "replaced":
            fits = found == self.parameters
        else:
            fits = set(self.parameters) <= set(found) or "kwargs" in found
        wanted = ", ".join(self.parameters)
        return "" if fits else f"takes ({', '.join(found)}), expected ({wanted})"

    def _shapes(self) -> Iterator[tuple[str, Target | None]]:
        """What it looks like, and since which release."""
        shape = replace(self, later=(), first=RELEASES[0])
        if self.first != RELEASES[0]:
            yield RELEASES[0], None
        yield self.first, shape
        for since in self.later:
            shape = replace(
                shape, module=since.module or shape.module, name=since.name or shape.name,
                parameters=shape.parameters if since.parameters is None else since.parameters,
            )  # fmt: skip
            yield since.release, None if since.gone else shape

    def _here(self) -> Target | None:
        """As it is in the release that is installed."""
        return self.in_release(running(), Target._problem) if self.later or self.first != RELEASES[0] else self

    def _put(self, make: Callable[[Any], Any]) -> None:
        target = self._here()
        if target is None:
            return
        owner, last = target._owner()
        original = _originals.setdefault((target.module, target.name), target.find())
        setattr(owner, last, make(original))

    def _problem(self) -> str:
        """Why what is installed is not of this shape; empty if it is."""
        try:
            owner, last = self._owner()
        except AdaptorError as error:
            return str(error)
        return self._problem_of(_originals.get((self.module, self.name), getattr(owner, last)))

    def _problem_of(self, value: Any) -> str:
        return "" if self.parameters is None else self.mismatch(tuple(inspect.signature(value).parameters))

    def _owner(self) -> tuple[Any, str]:
        """The module or class that has the target, and its name there."""
        try:
            owner: Any = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if self.module.startswith(str(error.name)):
                raise AdaptorError(self._complaint("there is no such module")) from None
            raise AdaptorError(f"{self.module} of Megatron cannot be imported: it needs {error.name}, which is not "
                               f"installed; install it (pip install {error.name})") from error
        *path, last = self.name.split(".")
        for part in path:
            owner = getattr(owner, part, None)
        if not hasattr(owner, last):
            raise AdaptorError(self._complaint("it does not exist"))
        return owner, last

    def _complaint(self, problem: str) -> str:
        return (f"{self.module}: {self.name}: {problem}. The adaptors are written for Megatron-LM {SUPPORTED}: use "
                "one of these, or see what fits with megatron-elastic doctor CHECKOUT")


_originals: dict[tuple[str, str], Any] = {}
"""What was there before the first change of this process, by module and name."""

_CORE = "megatron.core."
_DATASETS = _CORE + "datasets."
_SAVING = _CORE + "dist_checkpointing.strategies."
_FILES = _SAVING + "filesystem_async"
_EXPERTS = _CORE + "transformer.moe.experts"
_MOE_LOG = _CORE + "transformer.moe.moe_logging"
_MTP = _CORE + "transformer.multi_token_prediction"
_OPTIMIZER = _CORE + "optimizer.distrib_optimizer"
_RANDOM = _CORE + "tensor_parallel.random"
_TRAINING = "megatron.training."
_ENGINE = "transformer_engine.pytorch."

# ---- what the elastic trainer needs of megatron.core ---------------------------------------

FORK = Target(_RANDOM, "CudaRNGStatesTracker.fork", "replaced", ("self", "name"), "always",
              "dropout and initialisation draw from generators keyed by (seed, step, grain, unit)")
SEED = Target(_RANDOM, "model_parallel_cuda_manual_seed", "called", ("seed",), "always",
              "names the streams that Megatron's modules ask for")
UNSET_CHECKPOINTING = Target(_RANDOM, "_unset_checkpointing", "called", (), "always",
                             "an interrupted recomputation leaves the flag set")
LAYER = Target(_CORE + "transformer.transformer_layer", "TransformerLayer.__init__", "wrapped",
               ("self", "layer_number"), "always", "a layer's initial weights depend on its number alone")
EMBEDDING = Target(_CORE + "models.common.embeddings.language_model_embedding", "LanguageModelEmbedding.__init__",
                   "wrapped", ("self",), "always", "the embedding's initial weights depend on the seed alone")
BLOCK_LAYERS = Target(_CORE + "transformer.transformer_block", "get_num_layers_to_build", "replaced",
                      ("config", "vp_stage", "pp_rank"), "always", "the layout says which layers a stage holds")
BLOCK_OFFSET = Target(_CORE + "transformer.transformer_block", "get_transformer_layer_offset", "replaced",
                      ("config", "vp_stage", "pp_rank"), "always", "the layout says which layers a stage holds")
BLOCK_BUILD = Target(_CORE + "transformer.transformer_block", "build_module", "wrapped", ("spec_or_module", "kwargs"),
                     "always", "a stage that is built anew takes over the layers that it has")
LAYER_OFFSET = Target(_CORE + "transformer.transformer_layer", "get_transformer_layer_offset", "replaced",
                      ("config", "vp_stage", "pp_rank"), "always", "the layout says which layers a stage holds")
SPECS_LAYERS = Target(_CORE + "models.gpt.gpt_layer_specs", "get_num_layers_to_build", "replaced",
                      ("config", "vp_stage", "pp_rank"), "always", "the layout says which layers a stage holds")
SPECS_OFFSET = Target(_CORE + "models.gpt.gpt_layer_specs", "get_transformer_layer_offset", "replaced",
                      ("config", "vp_stage", "pp_rank"), "always", "the layout says which layers a stage holds")
FINAL_NORM = Target(_CORE + "transformer.transformer_block", "TransformerBlock.has_final_layernorm_in_this_stage",
                    "replaced", ("self",), "always", "the final norm is with the head, wherever the last layer is")
MTP_LAYERS = Target(_CORE + "models.gpt.gpt_layer_specs", "get_mtp_num_layers_to_build", "replaced",
                    ("config", "vp_stage", "pp_rank"), "always", "further tokens are predicted where the head is")
MTP_HERE = Target(_CORE + "models.gpt.gpt_model", "mtp_on_this_rank", "replaced",
                  ("config", "ignore_virtual", "vp_stage"), "always", "further tokens are predicted where the head is",
                  (Since("0.18", parameters=("layout", "mtp_num_layers", "ignore_virtual", "vp_stage")),), first="0.17")
MTP_OFFSET = Target(_MTP, "get_transformer_layer_offset", "replaced", ("config", "vp_stage", "pp_rank"), "always",
                    "the layout says which layers a stage holds", (Since("0.17", gone=True),))
MTP_BUILD = Target(_MTP, "build_module", "wrapped", ("spec_or_module", "kwargs"), "always",
                   "a stage that is built anew takes over the layers that it has")
MTP_LAYER = Target(_MTP, "MultiTokenPredictionLayer.__init__", "wrapped", ("self", "layer_number"), "always",
                   "a layer's initial weights depend on its number alone")
MTP_ROLL = Target(_MTP, "roll_tensor", "replaced", ("tensor", "shifts", "dims", "cp_group", "packed_seq_params"),
                  "always", "the next token may be another context-parallel rank's")
LABEL_ROLL = Target(_CORE + "models.gpt.gpt_model", "roll_tensor", "replaced",
                    ("tensor", "shifts", "dims", "cp_group", "packed_seq_params"), "always",
                    "the next token may be another context-parallel rank's, and the loss is a mean over all of theirs",
                    (Since("0.17", gone=True),))
MTP_LOSS = Target(_MTP, "MTPLossLoggingHelper.save_loss_to_tracker", "replaced",
                  ("loss", "layer_number", "num_layers", "reduce_group", "avg_group"), "always",
                  "losses belong to a grain, and go with the vote",
                  (Since("0.19", name="MTPLossLoggingHelper.save_metrics_to_tracker", parameters=(
                      "loss", "correct", "total", "layer_number", "num_layers", "reduce_group", "avg_group")),))
MTP_RECOMPUTED = Target(_MTP, "MultiTokenPredictionLayer._checkpointed_forward", "wrapped",
                        ("self", "hidden_states", "decoder_input", "attention_mask", "context"), "always",
                        "0.18 tells it of padding, which it does not take, so that nothing could be recomputed",
                        (Since("0.19", gone=True),), first="0.18")
WRITE = Target(_FILES, "FileSystemWriterAsync.write_preloaded_data_multiproc", "replaced",
               ("transform_list", "use_msc", "rank", "write_buckets", "global_results_queue"), "always",
               "a rank writes its checkpoint itself: forked copies of it would hold its links",
               (Since("0.17", name="FileSystemWriterAsync.write_preloaded_data_multithread"),))
WRITE_ONE = Target(_FILES, "FileSystemWriterAsync.write_preloaded_data", "called",
                   ("transform_list", "local_proc_idx", "write_bucket", "results_queue", "count_queue", "use_fsync"),
                   "always", "writes one file of a checkpoint")
PROCESS_MEMORY = Target(_FILES, "_process_memory", "replaced", (), "always", "needs psutil, and is only logged")
BY_KEY = Target(_SAVING + "torch", "_replace_state_dict_keys_with_sharded_keys", "called",
                ("sharded_state_dict", "keep_only_main_replica"), "always", "what a rank has of each tensor on disk")
LOADED = Target(_SAVING + "torch", "MCoreLoadPlanner.commit_tensor", "wrapped", ("self", "read_item", "tensor"),
                "always", "a rank tells how much of a checkpoint it has read")
COMMON_INSIDE = Target(_CORE + "dist_checkpointing.serialization", "_legacy_common_state_exists", "called",
                       ("checkpoint_dir",), "always",
                       "what a checkpoint says besides tensors is among them, if it is not in a file of its own",
                       first="0.19")
PLAN = Target(_SAVING + "state_dict_saver", "save_state_dict_async_plan", "called",
              ("state_dict", "storage_writer", "planner"), "always", "all ranks plan a checkpoint")
RESULTS_QUEUE = Target(_FILES, "_results_queue", "replaced", None, "always", "would be made by a process of its own")
GROUPS = Target(_CORE + "parallel_state", "initialize_model_parallel", "called",
                ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
                 "expert_model_parallel_size"), "always", "Megatron's groups, made over the elastic backend")
FORWARD = Target(_CORE + "pipeline_parallel.schedules", "forward_step", "called",
                 ("forward_step_func", "data_iterator", "model", "num_microbatches", "input_tensor",
                  "forward_data_store", "config", "cp_group_size", "is_last_stage"), "always",
                 "the forward pass of one grain")
FIRST_OF_STEP = Target(_CORE + "transformer.module", "MegatronModule.set_is_first_microbatch", "called", ("self",),
                       "always", "layers that keep what they make of their weights are told that these are new")
BACKWARD = Target(_CORE + "pipeline_parallel.schedules", "backward_step", "called",
                  ("input_tensor", "output_tensor", "output_tensor_grad", "model_type", "config"), "always",
                  "the backward pass of one grain",
                  (Since("0.17", parameters=("input_tensor", "output_tensor", "output_tensor_grad", "config")),))
LINEAR_BACKWARD = Target(_CORE + "tensor_parallel.layers", "LinearWithGradAccumulationAndAsyncCommunication.backward",
                         "wrapped", ("ctx", "grad_output"), "always",
                         "with --elastic-schedule split weights get their gradients after the pass")

ROUTER_LOSS = Target(_CORE + "transformer.moe.router", "save_to_aux_losses_tracker", "replaced",
                     ("name", "loss", "layer_number", "num_layers", "reduce_group", "avg_group", "reduce_group_has_dp"),
                     "always", "auxiliary losses belong to a grain, and go with the vote",
                     (Since("0.18", module=_MOE_LOG, name="MoEMetricsTracker.record", parameters=(
                         "self", "name", "value", "layer_number", "num_layers", "reduce_group", "avg_group",
                         "needs_dp_avg")),))

AUXILIARY = Target(_CORE + "transformer.moe.router", "MoEAuxLossAutoScaler", "replaced", None, "always",
                   "with --calculate-per-token-loss auxiliary losses count for all tokens of a micro-batch",
                   (Since("0.19", gone=True),))
SINKHORN = Target(_CORE + "transformer.moe.router", "sinkhorn", "wrapped", ("cost",), "always",
                  "tokens are dealt out over all of a micro-batch, whoever has them")
ROUTING = Target(_CORE + "transformer.moe.router", "TopKRouter.routing", "wrapped", ("self", "logits"), "always",
                 "a router's bias is told how many tokens each expert got")
EXPERTS = Target(_EXPERTS, "SequentialMLP.__init__", "wrapped", ("self", "num_local_experts", "config"), "always",
                 "an expert's initial weights depend on its number alone")
EXPERT = Target(_CORE + "transformer.mlp", "MLP.__init__", "wrapped", ("self", "config", "submodules"), "always",
                "an expert's initial weights depend on its number alone")
EXPERTS_FORWARD = Target(_EXPERTS, "SequentialMLP.forward", "wrapped",
                         ("self", "permuted_local_hidden_states", "tokens_per_expert", "permuted_probs"), "always",
                         "what an expert makes of one rank's tokens does not depend on the others'")
ATTENTION = Target(_CORE + "transformer.dot_product_attention", "DotProductAttention.__init__", "wrapped",
                   ("self", "config"), "always", "local attention is made for contexts and latent attention, too")
ATTEND = Target(_CORE + "transformer.dot_product_attention", "DotProductAttention.forward", "wrapped",
                ("self", "query", "key", "value", "attention_mask"), "always",
                "with context parallelism a rank has a part of the sequence, and looks at all of it")

LATENT_ATTENTION = Target(_CORE + "transformer.multi_latent_attention", "MLASelfAttention.__init__", "wrapped",
                          ("self", "config"), "always",
                          "gradients of the key that all heads share are added up over tensor-parallel ranks")

INDICES = Target(_DATASETS + "gpt_dataset", "GPTDataset._build_document_sample_shuffle_indices", "wrapped", ("self",),
                 "always", "any rank may come first to an index, and finds one that is whole and of these data")
BLEND_INDICES = Target(_DATASETS + "blended_dataset", "BlendedDataset._build_indices", "wrapped", ("self",), "always",
                       "likewise")

# ---- what a Megatron-LM checkout needs ------------------------------------------------------

PRETRAIN = Target(
    _TRAINING + "training", "pretrain", "replaced",
    ("train_valid_test_dataset_provider", "model_provider", "model_type", "forward_step_func",
     "process_non_loss_data_func", "extra_args_provider", "args_defaults", "get_embedding_ranks",
     "get_position_embedding_ranks", "non_loss_data_func", "store", "inprocess_call_wrapper"),
    "checkout", "the patched script calls ours in its place",
    (Since("0.19", parameters=(
        "cfg_container", "train_valid_test_dataset_provider", "model_type", "forward_step_func", "model_provider",
        "process_non_loss_data_func", "get_embedding_ranks", "get_position_embedding_ranks", "non_loss_data_func",
        "store", "inprocess_call_wrapper", "p2p_communicator", "pg_collection", "skip_model_parallel_init")),),
)  # fmt: skip
PARSE = Target(_TRAINING + "arguments", "parse_args", "called", ("extra_args_provider", "ignore_unknown_args"),
               "checkout", "the --elastic-* flags are a group of Megatron's own parser")
PARSED_BY_SCRIPT = Target(
    _TRAINING + "arguments", "parse_and_validate_args", "replaced",
    ("extra_args_provider", "ignore_unknown_args", "args_defaults"), "checkout",
    "the script parses the flags before it calls pretrain", first="0.19",
)  # fmt: skip
CONFIGURATION = Target(_TRAINING + "argument_utils", "gpt_config_from_args", "called", ("args", "model_config_cls"),
                       "checkout", "a stage's model is made of the flags as they are for it", first="0.19")
BUILT = Target(_TRAINING + "models.gpt", "GPTModelBuilder.build_model", "called",
               ("self", "pg_collection", "pre_process", "post_process", "vp_stage"), "checkout",
               "makes the model of a stage, or of a chunk of one", first="0.19")
VALIDATE = Target(_TRAINING + "arguments", "validate_args", "called", ("args", "defaults"), "checkout",
                  "Megatron's own checks of its flags")
CHECKPOINT_ARGS = Target(_TRAINING + "checkpointing", "load_args_from_checkpoint", "called", ("args", "load_arg"),
                         "checkout", "--use-checkpoint-args: a checkpoint says what the model is")
FLAGS = Target(_TRAINING + "arguments", "add_megatron_arguments", "called", ("parser",), "checkout",
               "--yaml-cfg: how Megatron's flags are written")
GLOBALS = Target(_TRAINING + "global_vars", "set_global_variables", "called", ("args", "build_tokenizer"), "checkout",
                 "arguments, tokenizer, timers and writers")
TIMERS = Target(_TRAINING + "global_vars", "_set_timers", "replaced", ("args",), "checkout",
                "timers of this rank alone: comparing them across ranks would be one more thing to interrupt")
TENSORBOARD = Target(_TRAINING + "global_vars", "_set_tensorboard_writer", "called", ("args",), "checkout",
                     "another rank writes on when the one that did is lost")
TENSORBOARD_ARGUMENTS = Target(_TRAINING + "initialize", "write_args_to_tensorboard", "called", (), "checkout",
                               "the arguments are shown there, as texts")
WANDB = Target(_TRAINING + "global_vars", "_set_wandb_writer", "called", ("args",), "checkout", "the same")
SCHEDULER = Target(_TRAINING + "training", "get_optimizer_param_scheduler", "called", ("optimizer",), "checkout",
                   "learning rate and weight decay of a step")
SAMPLES = Target(_TRAINING + "training", "get_train_valid_test_num_samples", "called", (), "checkout",
                 "how many samples the data sets must have")
LOG = Target(_TRAINING + "training", "training_log", "called",
             ("loss_dict", "total_loss_dict", "learning_rate", "iteration", "loss_scale", "report_memory_flag",
              "skipped_iter", "grad_norm", "params_norm", "num_zeros_in_grad", "max_attention_logit",
              "is_first_iteration"), "checkout",
             "Megatron's line for a step, TensorBoard and Weights & Biases")
BATCH = Target(_CORE + "num_microbatches_calculator", "reconfigure_num_microbatches_calculator", "called",
               ("rank", "rampup_batch_size", "global_batch_size", "micro_batch_size", "data_parallel_size"), "checkout",
               "Megatron's log has the size of a step's batch")
LOG_RATE = Target(_TRAINING + "training", "reduce_max_stat_across_model_parallel_group", "replaced", ("stat",),
                  "checkout", "one rank logs alone, and knows the learning rate",
                  (Since("0.19", parameters=("stat", "group")),))
LOG_LAST = Target(_TRAINING + "training", "print_rank_last", "replaced", ("message",), "checkout",
                  "one rank logs alone, whichever it is")
RERUN = Target(_CORE + "rerun_state_machine", "initialize_rerun_state_machine", "called", ("mode",), "checkout",
               "checks losses for NaN")
RESULT = Target(_CORE + "rerun_state_machine", "RerunStateMachine.validate_result", "wrapped",
                ("self", "result", "rejection_func", "message"), "checkout",
                "a loss that is not finite is no fault of the rank that finds it")
PROGRESS = Target(_TRAINING + "training", "append_to_progress_log", "replaced", ("string", "barrier"), "checkout",
                  "--log-progress: any rank may come to write it, and alone",
                  (Since("0.18", parameters=("save_dir", "string", "barrier")),))
PROGRESS_SAVED = Target(_TRAINING + "training", "compute_throughputs_and_append_to_progress_log", "called",
                        ("iteration", "num_floating_point_operations_so_far"), "checkout",
                        "--log-progress: the line for a checkpoint")
OPERATIONS = Target(_TRAINING + "training", "num_floating_point_operations", "called", ("args", "batch_size"),
                    "checkout", "what training has cost: for --log-progress, and in checkpoints")
LOG_ROUTERS = Target(_CORE + "transformer.moe.moe_utils", "reduce_aux_losses_tracker_across_ranks", "replaced",
                     ("track_names", "pg_collection"), "checkout", "one rank logs alone, and knows routers' losses",
                     (Since("0.18", module=_MOE_LOG, name="MoEMetricsTracker._sync_metrics",
                            parameters=("self", "metric_names", "pg_collection")),))
ROUTER_LOSSES = Target(_CORE + "transformer.moe.moe_utils", "get_moe_layer_wise_logging_tracker", "called", (),
                       "checkout", "where Megatron's log looks for routers' losses",
                       (Since("0.18", module=_MOE_LOG, name="get_moe_metrics_tracker"),))
TIMER = Target(_CORE + "timers", "Timers._get_elapsed_time_all_ranks", "replaced",
               ("self", "names", "reset", "barrier"), "checkout", "a rank's timers are its own")
MTP_LOSSES = Target(_MTP, "MTPLossLoggingHelper.tracker", "called", None, "checkout",
                    "where Megatron's log looks for the losses of further predictions")
BUILDER = Target(_DATASETS + "blended_megatron_dataset_builder", "BlendedMegatronDatasetBuilder.__init__", "wrapped",
                 ("self", "cls", "sizes", "is_built_on_rank", "config"), "checkout",
                 "every rank has the data sets, since ranks change their place")

# ---- what a machine without a GPU needs -----------------------------------------------------

GET_STATE = Target(_RANDOM, "_get_cuda_rng_state", "replaced", ("device", "clone", "graph_safe"), "cpu",
                   "the CPU's generator is the device's")
SET_STATE = Target(_RANDOM, "_set_cuda_rng_state", "replaced", ("new_state", "device", "graph_safe"), "cpu",
                   "the CPU's generator is the device's")
SET_MAIN_PARAM = Target(_OPTIMIZER, "DistributedOptimizer._set_main_param_and_optimizer_states", "replaced",
                        ("self", "model_param", "tensors"), "cpu", "torch's Adam keeps a step for each parameter")
LOAD_OPTIMIZER = Target(_OPTIMIZER, "DistributedOptimizer.load_state_dict", "wrapped", ("self", "state_dict"), "cpu",
                        "torch's Adam keeps a step for each parameter")
SAVE_OPTIMIZER = Target(_OPTIMIZER, "DistributedOptimizer.sharded_state_dict", "wrapped", ("self",), "cpu",
                        "torch's Adam has no state before its first step")
TORCH_NORM = Target(_CORE + "transformer.torch_norm", "WrappedTorchNorm.__new__", "wrapped",
                    ("cls", "config", "hidden_size", "eps"), "cpu",
                    "Apex, whose norms know of sequence parallelism, needs a GPU")
GATING = Target(_CORE + "transformer.moe.moe_utils", "router_gating_linear", "wrapped",
                ("inp", "weight", "bias", "router_dtype"), "cpu",
                "asks whether Transformer Engine's product is None, a name that it has only with Transformer Engine")
TO_HOST = Target(_CORE + "transformer.moe.token_dispatcher", "maybe_move_tensor_to_cpu", "replaced",
                 ("tensor", "as_numpy", "record_stream"), "cpu",
                 "moves what is on CUDA by name, and streams of other devices are not CUDA's")
LATENT = Target(_CORE + "transformer.multi_latent_attention", "HAVE_TE", "replaced", None, "cpu",
                "is true without Transformer Engine, whose linear layer it then asks for")
RECOMPUTE = Target(_RANDOM, "CheckpointWithoutOutput.__init__", "wrapped", ("self", "fp8"), "cpu",
                   "takes False for 8 bits, for which it asks Transformer Engine (--recompute-modules layernorm)")
KERNELS = Target("megatron.legacy.fused_kernels", "load", "replaced", ("args",), "cpu", "there is no CUDA compiler",
                 (Since("0.17", gone=True),))
HELPERS = Target(_DATASETS + "utils", "compile_helpers", "replaced", (), "cpu",
                 "compiled for the Python that runs; an installed megatron-core has them ready")
WARM_UP = Target(_TRAINING + "initialize", "_warmup_jit_function", "replaced", (), "cpu", "nothing is compiled",
                 (Since("0.19", parameters=("tp_size",)),))

BATCH_INVARIANT = Target(_CORE + "transformer.custom_layers.batch_invariant_kernels", "enable_batch_invariant_mode",
                         "replaced", (), "cpu", "its module imports triton, which is for GPUs; --batch-invariant-mode "
                         "ends the job")

# ---- what layers of Transformer Engine need -------------------------------------------------

WGRAD_DELAYED = Target(_ENGINE + "module._common", "WeightGradStore.delay_wgrad_compute", "replaced", ("self",),
                       "engine", "with --elastic-schedule split weights get their gradients after the pass")
WGRAD_PUT = Target(_ENGINE + "module._common", "WeightGradStore.put", "replaced", ("self", "tensor_list", "func"),
                   "engine", "with --elastic-schedule split weights get their gradients after the pass")
WGRAD_STORE = Target(_ENGINE + "module._common", "WeightGradStore.__init__", "called",
                     ("self", "delay_wgrad_compute", "ub_bulk_wgrad"), "engine",
                     "each linear layer has one, in wgrad_store")
ENGINE_LINEAR = Target(_ENGINE + "module.linear", "Linear.forward", "called", ("self", "inp", "is_first_microbatch"),
                       "engine", "what it has made of its weights is made anew after an update")
ENGINE_NORM_LINEAR = Target(_ENGINE + "module.layernorm_linear", "LayerNormLinear.forward", "called",
                            ("self", "inp", "is_first_microbatch"), "engine",
                            "what it has made of its weights is made anew after an update")
ENGINE_ATTENTION = Target(_ENGINE + "attention.dot_product_attention.dot_product_attention",
                          "DotProductAttention.__init__", "called", ("self", "get_rng_state_tracker", "tp_group"),
                          "engine", "dropout draws from Megatron's streams, which are keyed")
ENGINE_GROUP = Target(_ENGINE + "module.base", "TransformerEngineBaseModule.set_tensor_parallel_group", "called",
                      ("self", "tp_group"), "engine", "the group stays the same object in every layout")

TARGETS: tuple[Target, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Target))
"""All of them, in the order above."""
