"""A rank without a model: it takes part in steps, votes through files, and recovers as a training rank does.

``--at RANK:STEP:POINT:ACT`` makes a rank do something there, once; STEP may be ``*``. The only meeting point of a step
is the directory ``--meet``: a rank leaves a mark there and waits until every rank of the layout has, looking at the
interrupt flag.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import time
from pathlib import Path

from megatron_elastic.cluster.messages import (
    Back,
    Committed,
    Finished,
    Forward,
    Hello,
    Injected,
    Recovered,
    Report,
    SliceDigest,
    Start,
    Stop,
    Suspect,
    VoteResult,
)
from megatron_elastic.cluster.rank.control import Control, Interrupted
from megatron_elastic.config import add_elastic_arguments
from megatron_elastic.layout import Layout, decode, encode


class Member:
    """One rank: ``step`` is the step in progress, ``vote`` its result once known, ``last`` that of the step before."""

    def __init__(self, options: argparse.Namespace, control: Control, world_size: int) -> None:
        self.options = options
        self.control = control
        self.rank = control.rank
        self.layout = Layout.grid(tp=1, pp=1, dp=world_size, stage_units=[[0]], units=["all"],
                                  num_grains=8, num_slices=world_size, replicas=1,
                                  ranks_per_host=int(os.environ["LOCAL_WORLD_SIZE"]))
        self.step = 1
        self.vote: VoteResult | None = None
        self.last: VoteResult | None = None

    def at(self, point: str) -> None:
        """Do what the flags ask for here, and unwind if there is an interrupt."""
        for act in list(self.options.at):
            rank, step, where, what = act.split(":")
            if int(rank) == self.rank and step in ("*", str(self.step)) and where == point:
                self.options.at.remove(act)
                self.act(what)
        self.control.interrupt.check()

    def act(self, what: str) -> None:
        match what:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "announce":
                self.control.send(Injected(rank=self.rank, time=time.time(), spec="kill"))
                os.kill(os.getpid(), signal.SIGKILL)
            case "segv":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "raise":
                raise RuntimeError("the program is wrong on purpose")
            case "leave":
                sys.exit(0)
            case "leave7":
                sys.exit(7)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "mute":
                signal.pause()
            case "child":
                if os.fork() == 0:
                    signal.pause()
            case "stubborn":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                self.act("tell")
                signal.pause()
            case "tell":
                (Path(self.options.meet) / "told").write_text("x")
            case "wait":  # until somebody writes to the pipe
                pipe = os.open(Path(self.options.meet) / "go", os.O_RDWR)
                select.select([pipe, self.control.interrupt.fd], [], [])
                os.close(pipe)
            case "different":
                self.vote = VoteResult(step=self.step, loss=0.5, grad_norm=1.0, lr=0.1, consumed_samples=0, tokens=8)
            case _ if what.startswith("suspect"):
                suspects = [int(what.removeprefix("suspect"))]
                epoch = self.layout.epoch
                self.control.send(Suspect(rank=self.rank, epoch=epoch, suspects=suspects, reason="on purpose"))
                self.control.wait((), timeout=60)

    def meet(self) -> None:
        """Wait for every rank of the layout at this step, until interrupted."""
        room = Path(self.options.meet) / f"{self.layout.epoch}-{self.step}"
        room.mkdir(exist_ok=True)
        (room / str(self.rank)).touch()
        while {int(path.name) for path in room.iterdir()} != set(self.layout.ranks):
            select.select([self.control.interrupt.fd], [], [], 0.005)
            self.control.interrupt.check()

    def train(self) -> None:
        print(f"pid {os.getpid()}")
        self.control.send(Hello(tied=False, rank=self.rank, pid=os.getpid(), host="here", address=b"a",
                                linked=True, layout=encode(self.layout), start_step=0,
                                train_iters=self.options.steps, flags={}, likeness=b"like"))
        start = self.control.wait((Start,), timeout=60)
        assert self.rank in start.addresses
        others = [rank for rank in self.layout.ranks if rank not in start.addresses]
        assert sorted(self.control.find(others, timeout=60)) == others
        while True:
            try:
                if self.rank not in self.layout.ranks:
                    self.control.wait((Stop,), timeout=float("inf"))
                    return
                while self.step <= self.options.steps:
                    self.one_step()
                owned = self.layout.owned(self.rank)
                digests = [SliceDigest(unit=u, slice=k, part=0, sha256=f"{u}-{k}") for u, k in owned]
                self.control.send(Finished(rank=self.rank, step=self.step - 1, digests=digests))
                self.control.wait((Stop,), timeout=float("inf"))
                return
            except Interrupted:
                self.recover()

    def one_step(self) -> None:
        self.at("begin")
        if self.vote is None:
            self.meet()
            self.vote = VoteResult(step=self.step, loss=10 / self.step, grad_norm=1 + 1 / self.step, lr=0.1,
                                   consumed_samples=8 * self.step, tokens=64)
        self.at("voted")
        here = [rank for rank in self.layout.hosts[self.layout.host_of(self.rank)] if rank in self.layout.ranks]
        if self.rank == here[0]:
            self.control.send(Committed(rank=self.rank, epoch=self.layout.epoch, vote=self.vote, time=time.time(),
                                        first=self.rank == self.layout.ranks[0]))
        self.at("committed")
        self.last, self.vote, self.step = self.vote, None, self.step + 1

    def recover(self) -> None:
        past = {f"{self.rank}:{step}" for step in ("*", self.step)}
        self.options.at = [act for act in self.options.at
                           if not act.endswith(":wait") or act.rsplit(":", 2)[0] not in past]
        while True:
            flag = self.control.interrupt
            epoch = flag.epoch
            flag.acknowledge(epoch)
            print(f"interrupted {epoch} {time.time():.6f}")
            tp = self.layout.tp_index(self.rank)
            held = [(*at, tp) for at in (*self.layout.owned(self.rank), *self.layout.replicated(self.rank))]
            try:
                self.at("report")
                self.control.send(Report(rank=self.rank, epoch=epoch, member=True, step=self.step, vote=self.vote,
                                         last=self.last, held=held, interrupted_at=time.time()))
                commit = self.control.wait((Forward, Back), timeout=60)
                self.layout = decode(commit.layout)
                self.at("edit")
            except Interrupted:
                continue
            if isinstance(commit, Forward):
                if self.step == commit.step:
                    self.vote = commit.vote
            else:
                self.vote = None
            self.control.send(Recovered(rank=self.rank, epoch=epoch, edit_ms=1.0, state_ms=2.0))
            return


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--meet", required=True)
    parser.add_argument("--at", action="append", default=[])
    add_elastic_arguments(parser)
    options = parser.parse_args()
    control = Control.connect()
    try:
        Member(options, control, int(os.environ["WORLD_SIZE"])).train()
    finally:
        control.close()


if __name__ == "__main__":
    main()
