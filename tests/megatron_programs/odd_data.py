"""The example script with data that are slow to read (``ODD_SLOW``, milliseconds a sample) or have a sample that cannot
be read (``ODD_BAD``, its number). With ``ODD_SLOW`` computing a micro-batch takes that long, too, without a processor;
nothing is read ahead in even steps; and the log has a line of JSON for each step: how long it took, and how many
micro-batches the thread that computes has read itself.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import pretrain_gpt
from pretrain_gpt import check_arguments

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_elastic.adaptor.training.tenure import Tenure
    from megatron_elastic.adaptor.training.trainer import Trainer

__all__ = ["check_arguments"]

SECONDS = int(os.environ.get("ODD_SLOW", "0")) / 1e3
BAD = int(os.environ.get("ODD_BAD", "-1"))
read_by_itself = 0


class OddData:
    """A data set like another one, but for that."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        global read_by_itself
        if index == BAD:
            raise ValueError(f"sample {index} is damaged")
        time.sleep(SECONDS)
        read_by_itself += threading.current_thread() is threading.main_thread()
        return self._data[index]


def install() -> None:
    """Let the script have such data."""
    from megatron_elastic.device import stand_in

    stand_in.install()
    from megatron_elastic.adaptor.training import step

    provide = pretrain_gpt.datasets_provider

    def provide_odd(args: Any) -> tuple[Any, Any, Any]:
        training, *others = provide(args)
        return OddData(training), *others

    pretrain_gpt.datasets_provider = provide_odd
    if SECONDS:
        compute, take, to_read = pretrain_gpt.forward_step, step.take, step._to_read

        def compute_slowly(data: Iterator[Any], model: Any) -> Any:
            time.sleep(SECONDS)
            return compute(data, model)

        def timed(trainer: Trainer, tenure: Tenure) -> None:
            global read_by_itself
            number, begun = trainer.standing.step, time.perf_counter()
            read_by_itself = 0
            take(trainer, tenure)
            took = time.perf_counter() - begun
            print(json.dumps({"step": number, "seconds": took, "read_by_itself": read_by_itself}), flush=True)

        def of_odd_steps(trainer: Trainer, tenure: Tenure) -> Iterator[Any]:
            return to_read(trainer, tenure) if trainer.standing.step % 2 else iter(())

        pretrain_gpt.forward_step = compute_slowly  # type: ignore[assignment]
        step.take, step._to_read = timed, of_odd_steps


if __name__ == "__main__":
    install()
    sys.exit(pretrain_gpt.main())
