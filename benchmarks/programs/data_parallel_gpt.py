"""The example's GPT in data-parallel replicas, with torchft or with torch's own ``DistributedDataParallel``.

Needs an interpreter with the project and, for ``--wrapper torchft``, with torchft. Model, data, optimizer settings
and batch come from the flags of ``examples/pretrain_gpt.py``. The replicas are forked from one process after the
imports, each a replica group of its own to torchft, which is used as its documentation has it (``Manager``,
``ProcessGroupGloo``, its wrappers of module and optimizer): samples of a step that did not commit are not tried again.

Each replica writes ``RECORDS/REPLICA.jsonl``, a line for each attempt at a step: the ``step`` it was about, ``began``
and ``ended`` (seconds, one clock for all processes), whether it was ``committed``, and the ``replicas`` that took part.
The replica to be killed writes ``killed``, the time, right before it kills itself.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from gpt_arguments import parse_args

from megatron_elastic.device import stand_in

_FORK = multiprocessing.get_context("fork")
_HEARTBEAT_TIMEOUT_MS = 400
"""Tuned: as short as an undisturbed job of eight replicas on two cores bears; torchft's default is 5 s."""
_JOIN_TIMEOUT_MS = 10_000
"""As in torchft's documentation: survivors wait for each other this long. With its default, 100 ms, they part."""
_WAIT = 120.0
"""Seconds that replicas wait for each other at the beginning and at the end at most."""


def _live(body: Callable[[], None]) -> None:
    """A replica's process; ends without the clean-up of what was inherited, and without leaving a group in turn."""
    code = 1
    try:
        body()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def _lighthouse() -> Iterator[str]:
    """torchft's server that knows who lives; its address."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=_JOIN_TIMEOUT_MS,
                              quorum_tick_ms=10, heartbeat_timeout_ms=_HEARTBEAT_TIMEOUT_MS)
    yield f"http://localhost:{server.address().rpartition(':')[2]}"
    server.shutdown()


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, argparse.Namespace]:
    """Our flags, and the training's."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--wrapper", choices=("torchft", "ddp"), required=True)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--records", type=Path, required=True)
    parser.add_argument("--kill", type=int, nargs=2, metavar=("REPLICA", "STEP"))
    own, rest = parser.parse_known_args(argv)
    return own, parse_args(rest, own.replicas)


def main(argv: Sequence[str] | None = None) -> int:
    """Train; 0 if all replicas but the killed one finished."""
    own, args = _parse(argv)
    stand_in.install()
    from pretrain_gpt import datasets_provider

    from megatron_elastic.adaptor.without_cuda import stand_ins
    from programs.replica import Kill, train, with_ddp, with_torchft

    kill = Kill(*own.kill) if own.kill else None
    stand_ins.apply()
    data = datasets_provider(args)[0]
    own.records.mkdir(parents=True)
    began, ended = _FORK.Barrier(own.replicas), _FORK.Barrier(own.replicas - (kill is not None))
    ours, theirs = zip(*(_FORK.Pipe() for _ in range(own.replicas)), strict=True)

    def body(me: int) -> None:
        if own.wrapper == "torchft":
            replica = with_torchft(args, me, theirs[me].recv())
        else:
            replica = with_ddp(args, me, own.records)
        began.wait(_WAIT)
        train(args, me, replica, data, own.records, kill)
        ended.wait(_WAIT)  # who leaves early would be one more loss to the others

    processes = [_FORK.Process(target=_live, args=(lambda me=me: body(me),)) for me in range(own.replicas)]
    for process in processes:
        process.start()
    try:
        with _lighthouse() if own.wrapper == "torchft" else contextlib.nullcontext("") as address:
            for connection in ours:
                connection.send(address)
            for process in processes:
                process.join()
    finally:
        for process in processes:
            process.kill()
            process.join()
    wanted = [-signal.SIGKILL if kill and me == kill.replica else 0 for me in range(own.replicas)]
    return int([process.exitcode for process in processes] != wanted)


if __name__ == "__main__":
    sys.exit(main())
