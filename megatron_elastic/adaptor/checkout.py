"""``megatron.training.training.pretrain``, for the scripts of a Megatron-LM checkout: train elastically in its place.

Megatron's parser, checks, tokenizer, data sets, model, step function, schedule, log and writers are used as they are.
Its loop is not: the elastic trainer runs in its place, because a loop that holds schedules and counts in local
variables cannot be taken back to the start of a step.
"""

from __future__ import annotations

import argparse
import enum
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed
from megatron.core.models.gpt import GPTModel
from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine

from megatron_elastic.adaptor import targets
from megatron_elastic.adaptor.model import groups
from megatron_elastic.adaptor.model.grains import ForwardStep
from megatron_elastic.adaptor.script import arguments, log, yaml_arguments
from megatron_elastic.adaptor.script.progress_log import ProgressLog, operations
from megatron_elastic.adaptor.training import ballots, ending, entry, evaluation
from megatron_elastic.adaptor.training.schedules.rates import RatesByStep
from megatron_elastic.adaptor.training.tenure import Tenure
from megatron_elastic.adaptor.training.trainer import Trainer
from megatron_elastic.adaptor.without_cuda import helpers
from megatron_elastic.cluster.messages import VoteResult
from megatron_elastic.cluster.rank.control import Control
from megatron_elastic.config import UsageError
from megatron_elastic.numerics.exact import Diverged
from megatron_elastic.plan.split import UNSAID
from megatron_elastic.plan.work.ramp import Ramp
from megatron_elastic.state.vote import vote

_STARTED = time.time()

# Here, because the script parses them once before it calls pretrain().
arguments.install()
sys.argv[1:] = yaml_arguments.expanded(sys.argv[1:])


def pretrain(
    train_valid_test_dataset_provider: Callable[[tuple[int, int, int]], tuple[Any, Any, Any]],
    model_provider: Callable[..., torch.nn.Module],
    model_type: Any,
    forward_step_func: Callable[..., Any],
    process_non_loss_data_func: Callable[..., Any] | None = None,
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    get_embedding_ranks: Callable[..., Any] | None = None,
    get_position_embedding_ranks: Callable[..., Any] | None = None,
    non_loss_data_func: Callable[..., Any] | None = None,
    store: Any = None,
    inprocess_call_wrapper: Any = None,
) -> None:
    """Train elastically, as one rank of a job started by ``megatron-elastic run``; takes what Megatron's own takes.

    ``get_embedding_ranks``, ``get_position_embedding_ranks`` and ``store`` are for groups that the layout makes here.
    Returns when training is over. Raises UsageError for flags or a script that cannot work.
    """

    targets.PRETRAIN.find()
    _refuse(process_non_loss_data_func, non_loss_data_func, inprocess_call_wrapper)
    entry.run(lambda control: CheckoutTrainer(
        _initialize(extra_args_provider, args_defaults), control,
        model_provider=partial(_build_model, model_provider, model_type),
        datasets_provider=partial(_build_datasets, train_valid_test_dataset_provider),
        forward_step=forward_step_func,
    ), checkout=True)  # fmt: skip


def pretrain_configured(
    cfg_container: Any,
    train_valid_test_dataset_provider: Callable[[tuple[int, int, int]], tuple[Any, Any, Any]],
    model_type: Any,
    forward_step_func: Callable[..., Any],
    model_provider: Callable[..., torch.nn.Module] | None = None,
    process_non_loss_data_func: Callable[..., Any] | None = None,
    get_embedding_ranks: Callable[..., Any] | None = None,
    get_position_embedding_ranks: Callable[..., Any] | None = None,
    non_loss_data_func: Callable[..., Any] | None = None,
    store: Any = None,
    inprocess_call_wrapper: Any = None,
    p2p_communicator: Any = None,
    pg_collection: Any = None,
    skip_model_parallel_init: bool = False,
) -> None:
    """The same for the scripts of 0.19, which have parsed the flags, and made configurations of them.

    Of these only the kind of the model counts, for which the flags say the rest; groups are ours.
    """
    from megatron.training.global_vars import get_args

    targets.PRETRAIN.find()
    _refuse(process_non_loss_data_func, non_loss_data_func, inprocess_call_wrapper)
    entry.run(lambda control: CheckoutTrainer(
        get_args(), control,
        model_provider=partial(_build_model, model_provider or partial(_by_builder, cfg_container.model), model_type),
        datasets_provider=partial(_build_datasets, train_valid_test_dataset_provider),
        forward_step=forward_step_func,
    ), checkout=True)  # fmt: skip


def parse_and_validate_args(
    extra_args_provider: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
    ignore_unknown_args: bool = False, args_defaults: Mapping[str, Any] | None = None,
) -> argparse.Namespace:  # fmt: skip
    """What scripts of 0.19 call before ``pretrain``. What is wrong with the flags, the coordinator is told."""
    try:
        return _initialize(extra_args_provider, args_defaults)
    except Exception as error:
        entry.run(partial(_fail, error), checkout=True)
        raise


def _fail(error: Exception, _: Control) -> NoReturn:
    raise error


def _refuse(*given: object) -> None:
    if any(given):
        entry.run(partial(_fail, UsageError(
            "process_non_loss_data_func, non_loss_data_func and in-process restart are not supported with --elastic: "
            "call pretrain() without them")), checkout=True)  # fmt: skip


def _initialize(
    extra: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None, defaults: Mapping[str, Any] | None
) -> argparse.Namespace:
    """Arguments and everything else that Megatron keeps for the whole process, except its groups."""
    args = arguments.parse(extra, defaults)
    log.install()
    targets.BUILDER.wrap(_on_every_rank)
    helpers.provide()
    with arguments.usage_errors():  # the tokenizer's files, for one
        targets.GLOBALS.find()(args)
    if args.logging_level is not None:
        logging.getLogger().setLevel(args.logging_level)
    targets.RERUN.find()(mode=RerunMode.DISABLED)  # results are looked at; steps are not repeated
    targets.RESULT.wrap(_judging)
    args.iteration = args.num_floating_point_operations_so_far = 0  # whoever joins later must propose the same
    return args


def _on_every_rank(original: Callable[..., None]) -> Callable[..., None]:
    """Megatron builds data sets on the ranks that read them; here a rank may become one of these later."""

    def build(self: Any, cls: Any, sizes: Any, is_built_on_rank: Any, config: Any) -> None:
        original(self, cls, sizes, lambda: True, config)

    return build


def _judging(original: Callable[..., None]) -> Callable[..., None]:
    """Megatron raises what looks like any error of a program where it rejects a result."""

    def judge(self: Any, result: Any, rejection_func: Any, message: str, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, result, rejection_func, message, *args, **kwargs)
        except RuntimeError as error:
            raise Diverged(f"{message}; the newest checkpoint is before it. With --no-check-for-nan-in-loss-and-grad "
                           "such a step changes nothing, and training goes on") from error

    return judge


def _build_model(
    provider: Callable[..., torch.nn.Module], model_type: Any, args: argparse.Namespace,
    overrides: Mapping[str, Any] | None, first: bool, last: bool, vp_stage: int | None,
) -> GPTModel:
    """The script's model. It makes its configuration of the arguments, so that is where ``overrides`` go meanwhile."""
    from megatron.training.global_vars import get_timers

    virtual = {} if vp_stage is None else {"vp_stage": vp_stage}
    with _meanwhile(args, {**UNSAID, **(overrides or {})}):
        try:
            model = provider(pre_process=first, post_process=last, **virtual)
        except (AssertionError, ValueError) as error:  # sizes that do not go together, for one
            raise arguments.refusal(error) from error
    if not isinstance(model, GPTModel):
        raise UsageError(f"the script builds a {type(model).__name__}; --elastic trains a GPTModel only")
    model.model_type = model_type
    model.config.deallocate_pipeline_outputs = False  # they may be on their way to the next stage
    model.config.timers = get_timers()
    return model


def _by_builder(given: Any, pre_process: bool, post_process: bool, vp_stage: int | None = None) -> torch.nn.Module:
    """The model of a script that has a configuration of it (0.19), made of the arguments as they are now."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.global_vars import get_args
    from megatron.training.models.gpt import GPTModelConfig

    if not isinstance(given, GPTModelConfig):
        raise UsageError(f"the script configures a {type(given).__name__}; --elastic trains a GPTModel only")
    targets.BUILT.find()
    builder = given.get_builder_cls()(targets.CONFIGURATION.find()(get_args(), model_config_cls=type(given)))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model: torch.nn.Module = builder.build_model(groups, pre_process, post_process, vp_stage)
    return model


@contextmanager
def _meanwhile(args: argparse.Namespace, values: Mapping[str, Any]) -> Iterator[None]:
    """Let some arguments have other values."""
    given = {name: getattr(args, name) for name in values}
    vars(args).update(values)
    try:
        yield
    finally:
        vars(args).update(given)


def _build_datasets(
    provider: Callable[[tuple[int, int, int]], tuple[Any, Any, Any]], args: argparse.Namespace
) -> tuple[Any, Any, Any]:
    # Steps that begin before --train-samples are used up while the batch grows may end after them.
    training, *others = targets.SAMPLES.find()()
    try:
        return provider((max(training, Ramp.of(args).before(args.train_iters + 1)), *others))
    except (AssertionError, ValueError, FileNotFoundError) as error:  # data that are not there, for one
        raise arguments.refusal(error) from error


_ENUMERATIONS = frozenset({
    "AttnBackend", "CudaGraphScope", "ModelType", "RerunDiagnostic", "RerunMode", "RerunState", "Signals",
})  # fmt: skip
"""Those that the oldest release reads in a checkpoint. Later ones have more, for CUDA graphs, which are refused."""


def _known_to_all(value: Any) -> bool:
    """Whether any release can read a flag's value in a checkpoint."""
    values = value if isinstance(value, list | tuple) else [value]
    return all(type(one).__name__ in _ENUMERATIONS for one in values if isinstance(one, enum.Enum))


class CheckoutTrainer(Trainer):
    """The elastic trainer with Megatron-LM's schedule, log and reasons to stop."""

    def __init__(
        self, args: argparse.Namespace, control: Control, *, forward_step: ForwardStep, **providers: Any
    ) -> None:
        super().__init__(args, control, forward_step=partial(self._compute_part, forward_step), **providers)
        self.evaluations = ("validation", "test")
        self._time_limit = ending.TimeLimit(args.exit_duration_in_mins, _STARTED)
        self._log = log.TrainingLog(args)
        if args.timing_log_level >= 1:
            self.hooks.attach(self._log.parts)
        self._progress = ProgressLog(args)
        if self.rank == 0:  # which is there at the start of a job, and never again
            self._progress.starting()
        self._params_norm: float | None = None
        """Of all weights after the newest step, if it is to be logged."""

    def close(self) -> None:
        """Release links and groups, and the writers of the log."""
        self._log.close()
        super().close()

    @property
    def _writes(self) -> bool:
        """Whether this rank writes the log: the last one of the layout, as in Megatron."""
        return self.rank == self.layout.ranks[-1]

    def _compute_part(self, forward_step: ForwardStep, data: Any, model: torch.nn.Module) -> Any:
        """The script's step function: a cell's first rank sends the batch.

        The others take its size from the flags, and which parts of it the stage needs from the number of stages there.
        """
        args, layout = self.args, self.layout
        get_rerun_state_machine().current_iteration = self.standing.step - 1  # for what is said of results
        size = args.micro_batch_size * self.stage.key.part.size // layout.samples
        now = {"micro_batch_size": size, "pipeline_model_parallel_size": layout.pipeline_size}
        with _meanwhile(args, {**UNSAID, **now}), groups.looped(layout):
            return forward_step(data, model)

    def make_rates(self) -> RatesByStep:
        args = self.args
        with arguments.usage_errors():  # no rate may fall below 0, for one
            rates = RatesByStep(args, targets.SCHEDULER.find(), self.parameter_groups)
        if args.train_samples:  # Megatron 0.19 makes steps of them as if batches did not grow
            args.train_iters = Ramp.of(args).steps(args.train_samples)
        return rates

    def saved_besides(self, step: int) -> dict[str, Any]:
        """With Megatron's flags, which say what can be loaded: random numbers are no state."""
        args = argparse.Namespace(**{name: value for name, value in vars(self.args).items()
                                     if not name.startswith("elastic") and _known_to_all(value)})  # fmt: skip
        args.no_save_rng, args.consumed_train_samples = True, self.ramp.before(step + 1)
        rounds = step // args.eval_interval
        args.consumed_valid_samples, args.skipped_train_samples = rounds * args.eval_iters * args.global_batch_size, 0
        done = operations(self.args, self.ramp.before(step + 1))
        return {**super().saved_besides(step), "args": args, "checkpoint_version": 3.0,
                "num_floating_point_operations_so_far": done}  # fmt: skip

    def prepared(self) -> None:
        self._log.begin()

    def goes_on(self) -> bool:
        """Whether there is another step, and nobody has a reason to stop."""
        args, done = self.args, self.standing.step - 1
        if args.exit_interval and self.counts.trained(done) and done % args.exit_interval == 0:
            return False
        return super().goes_on() and not self._time_limit.over()

    def agree(self) -> None:
        super().agree()
        self._time_limit.agree()
        self._log.agree()

    def applied(self, tenure: Tenure) -> None:
        if self.args.log_params_norm:  # Megatron's is that of the weights as the step leaves them
            squares = tenure.store.squared_weights(tenure.layout.owned(self.rank))
            self._params_norm = vote(tenure.vote_group, ballots.of_weights(self, squares)).grad_norm

    def committed(self, result: VoteResult) -> None:
        if self.counts.skips(result.step):
            return
        # Megatron logs rate and scale as the step leaves them.
        scaling = self.loss_scales.at(result.step + 1)
        rate = self.rates.at(self.counted(result.step + 1))[0].lr
        self._log.step(result.step, result.loss, None if result.skipped else result.grad_norm, rate, scaling.scale,
                       self.ramp.before(result.step), result.consumed_samples, len(self.layout.ranks), self._writes,
                       result.measures, self._params_norm, result.step == self.counts.first)

    def evaluated(self, done: int, name: str, loss: float) -> None:
        super().evaluated(done, name, loss)
        self._log.evaluation(done, name, loss, self.ramp.before(done + 1), self._writes)

    def saved(self, step: int) -> None:
        super().saved(step)
        self._progress.saved(step, self.ramp.before(step + 1), self.counts.start.samples)

    @contextmanager
    def pause(self) -> Iterator[None]:
        configs = [model.config for model in self.stage.models]
        timers = [config.timers for config in configs]
        for config in configs:
            config.timers = None  # as Megatron while it evaluates
        try:
            with self._log.paused():
                yield
        finally:
            for config, given in zip(configs, timers, strict=True):
                config.timers = given

    def conclude(self, tenure: Tenure, done: int) -> None:
        """The last evaluations, if training is complete, or there is none; then on the first of the data."""
        if done >= self.args.train_iters or not self.trains:
            position = min(done, self.args.train_iters) // self.args.eval_interval if self.trains else 0
            evaluation.evaluate(self, tenure, done, "validation", position)
            evaluation.evaluate(self, tenure, done, "test", 0)
