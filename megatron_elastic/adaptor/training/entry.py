"""``megatron.training.pretrain``: train elastically, as one rank of a job, and let the coordinator know of errors."""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable

from megatron_elastic.adaptor import doctor
from megatron_elastic.adaptor.model.grains import ForwardStep
from megatron_elastic.adaptor.model.stage import ModelProvider
from megatron_elastic.adaptor.training import life
from megatron_elastic.adaptor.training.batches import DatasetsProvider
from megatron_elastic.adaptor.training.trainer import Trainer
from megatron_elastic.cluster.rank.control import Control, JobStopped
from megatron_elastic.comm import torch_release
from megatron_elastic.config import USAGE, UsageError
from megatron_elastic.device import stand_in
from megatron_elastic.numerics.exact import Diverged


def pretrain(
    args: argparse.Namespace,
    model_provider: ModelProvider,
    datasets_provider: DatasetsProvider,
    forward_step: ForwardStep,
) -> None:
    """Train elastically, as one rank of a job started by ``megatron-elastic run``.

    ``args`` has Megatron-LM's names and the ``elastic_*`` ones. Returns when training is done. Raises JobStopped when
    the job ends otherwise; whatever else it raises is an error of the program.
    """
    run(lambda control: Trainer(args, control, model_provider, datasets_provider, forward_step))


def run(make: Callable[[Control], Trainer], checkout: bool = False) -> None:
    """Let the trainer that ``make`` builds train as this rank, and tell the coordinator if the program fails.

    ``checkout``: whether a script of Megatron-LM's asks for it.
    """
    control = Control.connect()
    trainer: Trainer | None = None
    try:
        warnings = [torch_release.admit(), doctor.admit(checkout, stand_in.needed())]
        trainer = make(control)
        for warning in filter(None, warnings if trainer.rank == 0 else ()):
            trainer.event("untried", what=warning)
        life.live(trainer)
    except JobStopped:
        raise
    except Exception as error:
        # Told before the connection closes: a rank that only goes silent counts as dead, and the others train on.
        if isinstance(error, UsageError):
            control.fail(str(error), code=USAGE if trainer is None or trainer.begins else 0)
        elif trainer is None:
            control.fail(traceback.format_exc())
        elif isinstance(error, Diverged):  # no fault of this rank: whoever did it would find the same
            where = "" if error.grain is None else f", micro-batch {error.grain}"
            control.fail(f"step {trainer.standing.step}{where}: {error}")
        else:
            standing, device = trainer.standing, trainer.device
            failed = device.label if device.is_fault(error) else ""
            short = device.label if device.is_short(error) else ""
            # Before training begins what raises is the program, but for a device.
            step = None if trainer.begins and not failed and not short else standing.step
            control.fail(traceback.format_exc(), standing.epoch, step, device=failed, short=short)
        raise
    finally:
        if trainer is not None:
            trainer.close()
        control.close()
