"""Torchrun: its command line, flag by flag: which ones work here, which have no effect, and which are refused, and why.

One table, of which ``megatron-elastic run`` makes its parser and ``docs/launching.md`` shows. A test compares it with
torch's own parser. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from megatron_elastic import usage
from megatron_elastic.config import UsageError

Kind = Literal["works", "no effect", "refused"]


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag of torchrun's.

    Attributes:
        name: its name, with dashes; it may be written with underscores, too.
        kind: what becomes of it.
        says: what it does here, why it does nothing, or why it is refused and what to do instead.
        metavar: of its value; None for a switch.
        but: values that work, of one that is refused; or that ask for nothing, of one without effect.
        short: its other name, as ``-t``.
        type: of its value.
    """

    name: str
    kind: Kind
    says: str
    metavar: str | None = None
    but: tuple[str, ...] = ()
    short: str | None = None
    type: type[Any] = field(default=str)

    @property
    def spellings(self) -> tuple[str, ...]:
        """All ways to write it."""
        other = "--" + self.dest
        return tuple(dict.fromkeys(filter(None, (self.short, self.name, other))))

    @property
    def dest(self) -> str:
        """The attribute of the parsed command line."""
        return usage.dest(self.name)

    def shown(self, value: Any) -> str:
        """How it was given."""
        return self.name if self.metavar is None else f"{self.name} {value}"


def _works(name: str, says: str, metavar: str | None = None, **more: Any) -> Flag:
    return Flag(name, "works", says, metavar, **more)


def _idle(name: str, says: str, metavar: str | None = None, **more: Any) -> Flag:
    return Flag(name, "no effect", says, metavar, **more)


def _refused(name: str, says: str, metavar: str | None = None, **more: Any) -> Flag:
    return Flag(name, "refused", says, metavar, **more)


FLAGS: tuple[Flag, ...] = (
    _works("--nnodes", "nodes of the job. MIN:MAX: an --elastic job begins with MIN, and others join it while it "
           "trains, up to MAX (default: 1)", "N"),
    _works("--nproc-per-node", "ranks on this node: a number, auto, cpu or gpu (default: 1)", "N"),
    _works("--node-rank", "which of the nodes this is; node 0 coordinates, and a node beyond --nnodes joins the "
           "running job, which must be --elastic (default: 0)", "I", type=int),
    _works("--master-addr", "address of node 0, as every node can reach it: a name, IPv4 or IPv6", "HOST"),
    _works("--master-port", "port of the coordinator (default: any free one; 29500 with several nodes)", "PORT",
           type=int),
    _works("--rdzv-endpoint", "the same as --master-addr and --master-port; an IPv6 address before a port is in "
           "brackets", "HOST:PORT"),
    _refused("--rdzv-backend", "there would be no node 0 at --rdzv-endpoint, but a store: give the address of node 0, "
             "and --elastic-store etcd://HOST:PORT among the script's arguments for who coordinates", "NAME",
             but=("static", "c10d")),
    _works("--rdzv-id", "name of the job: TORCHELASTIC_RUN_ID of its ranks, and part of its folder in --log-dir", "ID"),
    _works("--standalone", "one node, any free port (the default); --rdzv-endpoint does not count"),
    _works("--role", "name of the ranks: before each line of theirs on the console, and their ROLE_NAME (default: "
           "default)", "NAME"),
    _works("--module", "SCRIPT is a module's name, as in python -m", short="-m"),
    _works("--no-python", "SCRIPT is a program, which each rank runs; without --elastic only"),
    _works("--run-path", "run the script in the process of its rank, as is always done"),
    _works("--log-dir", "keep the ranks' logs in a folder of their own in DIR; RUN_DIR/logs is a link to it", "DIR"),
    _works("--redirects", "streams of local ranks that are not on the console: 0 none, 1 stdout, 2 stderr, 3 both, or "
           "by local rank, as 0:3,1:1. All streams are in the logs, and without this flag, --tee and "
           "--local-ranks-filter none is on the console", "STREAMS", short="-r"),
    _works("--tee", "streams of local ranks that are on the console, too; written as those of --redirects", "STREAMS",
           short="-t"),
    _works("--local-ranks-filter", "local ranks, as 0,1, that alone are on the console", "RANKS"),
    _works("--signals-to-handle", "signals, as SIGTERM,SIGUSR1, at which the job ends in order (default: "
           "SIGINT,SIGTERM,SIGHUP)", "NAMES"),
    _works("--shutdown-timeout", "seconds that ranks have to end when the job has failed or was interrupted (default: "
           "10)", "S", type=float),
    _idle("--max-restarts", "nothing is restarted: with --elastic the ranks that are left train on, and "
          "--elastic-respawn replaces those that die", "N", but=("0",)),
    _idle("--rdzv-conf", "there is one rendezvous; --elastic-start-timeout says how long it may take", "KEY=VALUE,..."),
    _idle("--monitor-interval", "a rank's end is seen when it happens", "S"),
    _idle("--start-method", "ranks are forked from one process that has imported everything", "NAME"),
    _idle("--event-log-handler", "events are in RUN_DIR/events.jsonl", "NAME", but=("null",)),
    _idle("--duplicate-stdout-filters", "all lines are in the ranks' logs: grep finds them there", "TEXT,..."),
    _idle("--duplicate-stderr-filters", "all lines are in the ranks' logs: grep finds them there", "TEXT,..."),
    _idle("--local-addr", "a node is reached at the address from which it reaches node 0", "HOST"),
    _idle("--numa-binding", "ranks are not bound to processors: numactl or taskset before megatron-elastic binds all "
          "ranks of a node", "HOW"),
    _refused("--logs-specs", "it names a plug-in of torchrun's; leave it out, and see --log-dir, --tee and "
             "--redirects", "NAME", but=("default",)),
    _refused("--virtual-local-rank", "a rank finds its device by its local rank; leave it out"),
)  # fmt: skip
"""All but ``--help``, in the order in which ``--help`` shows them."""


class NoEffect(NamedTuple):
    """A flag that was given and does nothing."""

    flag: str
    why: str


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all of them. What is not given is None, of switches False."""
    idle = parser.add_argument_group("flags of torchrun without effect here")
    for flag in FLAGS:
        group: Any = idle if flag.kind == "no effect" else parser
        hidden = flag.kind == "refused" and not flag.but
        says = argparse.SUPPRESS if hidden else _help(flag)
        if flag.metavar is None:
            group.add_argument(*flag.spellings, dest=flag.dest, action="store_true", help=says)
        else:
            group.add_argument(*flag.spellings, dest=flag.dest, metavar=flag.metavar, type=flag.type, help=says)


def _help(flag: Flag) -> str:
    return f"{' or '.join(flag.but)}, which are the same here" if flag.kind == "refused" else flag.says


def look_at(options: argparse.Namespace) -> Iterator[NoEffect]:
    """The flags of a parsed command line that have no effect. Raises UsageError for what is refused."""
    for flag in FLAGS:
        value = getattr(options, flag.dest)
        if value in (None, False) or str(value) in flag.but:
            continue
        if flag.kind == "refused":
            raise UsageError(f"{flag.shown(value)} does not work here: {flag.says}")
        if flag.kind == "no effect":
            yield NoEffect(flag.shown(value), flag.says)
