"""Life: the loop of a rank. A step after the other, or the recovery from what interrupted one."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time

import megatron.core
import msgspec
import numpy
import torch

from megatron_elastic.adaptor.training import adoption, building, intermission, interruption, step
from megatron_elastic.adaptor.training.tenure import Tenure
from megatron_elastic.adaptor.training.trainer import Trainer
from megatron_elastic.cluster.messages import Enter, Finished, Hello, Invite, SliceDigest, Start, Stop
from megatron_elastic.cluster.rank.control import Interrupted
from megatron_elastic.config import UsageError
from megatron_elastic.device.processor import processor
from megatron_elastic.layout import encode
from megatron_elastic.numerics import kernels
from megatron_elastic.plan.costs import memory
from megatron_elastic.plan.costs.operations import flops_per_token

_OWN_FLAGS = frozenset({"elastic_run_dir", "elastic_inject", "rank", "local_rank"})
"""Arguments that may differ from node to node, or from rank to rank."""
_TRIES = 8
"""How often the last checkpoint is tried once more, within ``--elastic-wait-timeout``."""
_LOOK = 0.1
"""Seconds from one look for an interrupt to the next."""


def live(trainer: Trainer) -> None:
    """From hello to the end of the job."""
    _join(trainer)
    while True:
        try:
            if not trainer.standing.member:
                if _stand_by(trainer):
                    return
            elif trainer.tenure is None:
                building.build(trainer)
            elif trainer.goes_on():
                step.take(trainer, trainer.tenure)
                if trainer.standing.agreed:
                    adoption.switch(trainer, trainer.tenure)
            else:
                with trainer.odometer.patient():
                    _finish(trainer, trainer.tenure)
                return
        except Interrupted as interrupted:
            interruption.handle(trainer, interrupted)


def _join(trainer: Trainer) -> None:
    args, layout = trainer.args, encode(trainer.layout)
    flags = {name: str(value) for name, value in sorted(vars(args).items()) if name not in _OWN_FLAGS}
    versions = {each.__name__: str(each.__version__) for each in (torch, numpy, megatron.core)}
    likeness = hashlib.sha256(msgspec.msgpack.encode((layout, args.train_iters, flags, versions))).digest()
    if len(trainer.layout.hosts) > 1:
        trainer.transport.listen()
    trainer.control.send(
        Hello(
            rank=trainer.rank, pid=os.getpid(), host=socket.gethostname(), address=trainer.transport.address,
            linked=trainer.transport.listening, layout=layout,
            start_step=trainer.standing.step - 1, train_iters=args.train_iters, flags=flags, likeness=likeness,
            tied=memory.tied(args), device=trainer.device.product,
            flops_per_token=None if trainer.accelerator is not None else flops_per_token(args),
            versions=versions, processor=processor(), kernels=kernels.which(trainer.device.torch),
        )
    )  # fmt: skip
    if trainer.standing.member:
        start = trainer.control.wait((Start,), timeout=trainer.config.start_timeout)
        trainer.transport.trust(start.key)
        trainer.transport.add_peers(start.addresses)


def _stand_by(trainer: Trainer) -> bool:
    """In no cell: wait to be invited into one, and be let in. Returns whether the job is over."""
    # Others may have been sending to it when it left, and have no room for one another while that lies there.
    with trainer.transport.attentive():
        message = trainer.control.wait((Stop, Invite, Enter), timeout=float("inf"))
    match message:
        case Invite():
            with trainer.odometer.patient():
                building.prepare(trainer, message)
        case Enter():
            adoption.enter(trainer, message)
    return isinstance(message, Stop)


def _save_after_all(trainer: Trainer, tenure: Tenure, done: int) -> None:
    """The last checkpoint is all that is left of the job: while it cannot be written somebody may make room.

    All ranks know alike whether it was written, so they try together.
    """
    for _ in range(_TRIES):
        if not trainer.saving.gave_up(done):
            return
        pause = time.monotonic() + trainer.config.wait_timeout / _TRIES
        while time.monotonic() < pause:
            trainer.control.interrupt.check()
            threading.Event().wait(_LOOK)
        intermission.save(trainer, tenure, done)
        intermission.complete_save(trainer)


def _finish(trainer: Trainer, tenure: Tenure) -> None:
    """Report what the model has become, and stay until everybody has."""
    trainer.hooks.step = trainer.standing.step
    done, layout = trainer.standing.step - 1, tenure.layout
    step.level(trainer, tenure)
    if trainer.trains:
        intermission.hold(trainer, tenure, done)
    trainer.await_parameters(tenure)
    intermission.complete_save(trainer)
    if trainer.trains and trainer.saving.wanted(done):
        intermission.save(trainer, tenure, done)
    trainer.conclude(tenure, done)
    intermission.complete_save(trainer)
    _save_after_all(trainer, tenure, done)
    if trainer.saving.gave_up(done) and trainer.rank == layout.ranks[0]:
        raise UsageError(f"--save {trainer.args.save}: the last checkpoint, of step {done}, could not be written; make "
                         f"room and start the job again, and it goes on from step {trainer.saving.saved}")
    digests = []
    for unit, k in layout.owned(trainer.rank):
        weights = trainer.stage.units[unit].slice_of(trainer.stage.units[unit].params, k)
        sha256 = tenure.store[unit, k].sha256(weights)
        digests.append(SliceDigest(unit=unit, slice=k, part=layout.part_of(unit, trainer.rank), sha256=sha256))
    first, sent = trainer.counted_from
    trainer.event("traffic", steps=done + 1 - first, bytes=trainer.transport.bytes_sent - sent)
    trainer.control.send(Finished(rank=trainer.rank, step=done, digests=digests))
    trainer.control.wait((Stop,), timeout=float("inf"))
