"""Launcher: ``megatron-elastic run``. Checks the command, then runs coordinator and agent until the job ends."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import difflib
import itertools
import os
import re
import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from megatron_elastic import argument_file, profiles, usage
from megatron_elastic.cluster import first_process
from megatron_elastic.cluster.brief import Brief
from megatron_elastic.cluster.launch import attempt, script, torchrun
from megatron_elastic.cluster.launch.output import ROLE, Console, streams_shown
from megatron_elastic.cluster.launch.rendezvous import (
    MOST,
    Rendezvous,
    endpoint_of,
    host_of,
    is_count,
    is_here,
    nodes_of,
)
from megatron_elastic.cluster.leadership import Choice, parse
from megatron_elastic.cluster.node.assignment import END_LIMIT, Assignment
from megatron_elastic.cluster.node.exit_signal import ExitSignal
from megatron_elastic.cluster.node.station import Station
from megatron_elastic.cluster.program import Program
from megatron_elastic.cluster.recording.screen import Screen, complain
from megatron_elastic.cluster.wire import Credentials
from megatron_elastic.cluster.wire.tls import certificates_of
from megatron_elastic.cluster.wire.token import given_token, make_token, token_of
from megatron_elastic.config import ElasticConfig, UsageError, add_elastic_arguments
from megatron_elastic.device import allowance, visible
from megatron_elastic.observe.records import read_events

ARGUMENTS_VARIABLE = "MEGATRON_ELASTIC_ARGS"
"""Environment variable with further arguments for the script, as a shell would split them."""

_AT_ONCE = 1.0
"""Seconds within which SIGTERM counts once."""
_THREADS = 6
"""Processes and threads that a rank is, at least, and what starts it."""

_EXAMPLES = """\
examples:
  megatron-elastic run --nproc-per-node 8 examples/pretrain_gpt.py --elastic \\
      --data-path data ...
      eight ranks on this machine; a rank that dies does not end the job
  megatron-elastic run --nproc-per-node 8 examples/pretrain_gpt.py --elastic \\
      --elastic-inject 'kill:rank=5,step=12,at=backward' ...
      the same, and rank 5 is killed in the backward pass of step 12
  export MEGATRON_ELASTIC_TOKEN=...  # the same on both: openssl rand -hex 32
  megatron-elastic run --nnodes 2 --node-rank 0 --master-addr HOST0 \\
      --master-port 29500 --nproc-per-node 8 SCRIPT ...
  megatron-elastic run --nnodes 2 --node-rank 1 --master-addr HOST0 \\
      --master-port 29500 --nproc-per-node 8 SCRIPT ...
      two nodes; the first one's launcher coordinates and keeps the records
      (from three nodes on another's, if it is lost)

The --elastic-* flags stand among the script's arguments; the launcher reads them too. What MEGATRON_ELASTIC_ARGS has
in the environment is put before them, for run scripts that are not to be edited; before that, what the file of
Megatron-LM's --yaml-cfg has. Each rank's output is in RUN_DIR/logs/rank<N>.log, the records of the job are beside it.
The exit code is 0 only if training finished, 2 if the flags cannot work, and a script's own if it ends itself with one.
"""


class _Parser(argparse.ArgumentParser):
    """Errors are one line, as every other error of the launcher."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("the following arguments are required"):
            message = "there is no SCRIPT: megatron-elastic run [options] SCRIPT [ARGS ...]; --help lists the options"
        raise UsageError(message)

    def closest(self, flag: str, otherwise: str = "--help lists them") -> str:
        """What somebody may have meant who wrote ``flag``."""
        known = [name for action in self._actions for name in action.option_strings]
        near = [name for name in known if name.startswith(flag)]
        near += difflib.get_close_matches(flag, known, n=1, cutoff=0.8)
        return f"did you mean {near[0]}?" if near else otherwise


@dataclass(frozen=True, slots=True)
class _Command:
    """The checked command line."""

    program: Program
    rendezvous: Rendezvous
    ranks_per_node: int
    config: ElasticConfig
    console: Console
    name: str
    """torchrun's run id."""
    log_dir: str | None
    end_limit: float
    signals: frozenset[signal.Signals]
    """At which the job ends in order."""
    credentials: Credentials
    choice: Choice
    """Of the store that says who coordinates."""

    @property
    def spares(self) -> int:
        """Of the ranks of all nodes, the last ones, which do not train for now."""
        return self.config.spares if self.config.elastic else 0


def make_parser() -> _Parser:
    """The flags of ``megatron-elastic run``."""
    parser = _Parser(
        prog="megatron-elastic run", usage="%(prog)s [options] SCRIPT [ARGS ...]", allow_abbrev=False,
        description="Start a script on every rank, as torchrun does; with --elastic in ARGS, train on when ranks die.",
        epilog=_EXAMPLES, formatter_class=usage.Formatter,
    )

    torchrun.add_flags(parser)
    parser.add_argument("script", metavar="SCRIPT", help="Python file that trains")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments, with --elastic-*")
    return parser


def _read_command(argv: Sequence[str] | None) -> _Command:
    """Parse and check the command line. Raises UsageError."""
    parser = make_parser()
    options, unknown = parser.parse_known_args(argv)
    for flag in unknown:
        if flag.startswith("--elastic"):
            raise UsageError(f"{flag} is for the script: put it behind SCRIPT")
        raise UsageError(f"unknown flag {flag.partition('=')[0]} before SCRIPT, where the launcher's are: "
                         f"{parser.closest(flag.partition('=')[0])}")
    options.arguments = with_arguments_from_elsewhere(options.arguments)
    for text in (*vars(options).values(), *options.arguments):
        if isinstance(text, str):
            _check_text(text)
    config = elastic_config(options.arguments)
    for flag, why in torchrun.look_at(options):
        complain("note", f"{flag} has no effect: {why}", config.log_format == "json")
    where = _rendezvous(options, config.elastic)
    token = given_token(os.environ) if where.several else token_of(os.environ) or make_token()
    ranks = _ranks_per_node(options.nproc_per_node or "1")
    _check_kernel()
    _check_processes(ranks)
    console = Console(streams_shown(options.redirects, options.tee, options.local_ranks_filter, ranks),
                      options.role or ROLE, config.log_format == "json")
    program = _program(options, config)
    command = _Command(program, where, ranks, config, console, options.rdzv_id or "none",
                       options.log_dir, _end_limit(options.shutdown_timeout), _signals(options.signals_to_handle),
                       Credentials(token, certificates_of(config)),
                       parse(config.store, where.nodes if config.elastic else 1))
    if not where.joins and command.spares >= where.nodes * ranks:
        raise UsageError(f"--elastic-spares {command.spares}: there are {where.nodes * ranks} ranks in all, "
                         "and some must train: raise --nproc-per-node or --nnodes")
    if where.node_rank == 0:
        profiles.check(config)
    script.check(program, config, None if where.joins else where.nodes * ranks - command.spares)
    return command


def with_arguments_from_elsewhere(arguments: Sequence[str]) -> list[str]:
    """A script's arguments behind those that a file and the environment have, so that the command line wins.

    Raises UsageError.
    """
    arguments = [*_arguments_of_the_environment(), *arguments]
    return [*argument_file.launcher_flags(arguments), *arguments]


def _arguments_of_the_environment() -> list[str]:
    text = os.environ.get(ARGUMENTS_VARIABLE, "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{ARGUMENTS_VARIABLE}={text}: it is split as a shell would split it, and that fails: "
                         f"{str(error).lower()}; close the quotation") from None


def elastic_config(arguments: Sequence[str]) -> ElasticConfig:
    """The elastic flags among a script's arguments. Raises UsageError."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_elastic_arguments(parser)
    options, others = parser.parse_known_args(arguments)
    config = ElasticConfig.from_args(options)
    for flag in others:
        if config.elastic and flag.startswith("--elastic-"):
            name = flag.partition("=")[0]
            raise UsageError(f"unknown flag {name}: {parser.closest(name, 'docs/flags.md lists them')}")
    return config


def _program(options: argparse.Namespace, config: ElasticConfig) -> Program:
    """What ranks run. Raises UsageError if there is none."""
    if options.no_python and options.module:
        raise UsageError("--no-python and -m exclude each other: a module is run by Python; leave one of them out")
    if options.no_python and config.elastic:
        raise UsageError("--no-python does not work with --elastic: a rank that trains is a process that the launcher "
                         "has forked; give the Python script itself, or its module with -m")
    if options.no_python and shutil.which(options.script) is None:
        raise UsageError(f"--no-python: there is no program {options.script}, or it may not be run (chmod +x)")
    return Program(options.script, options.module, options.arguments, options.no_python)


def _check_text(text: str) -> None:
    """Refuse what no message can have. Raises UsageError."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{text!r} is no Unicode, and cannot be told to ranks: name it otherwise") from None


def _end_limit(given: float | None) -> float:
    if given is not None and not given > 0:
        raise UsageError(f"--shutdown-timeout must be positive, got {given:g}")
    return END_LIMIT if given is None else given


def _signals(text: str | None) -> frozenset[signal.Signals]:
    """Signals at which a job ends in order; of ``nohup`` SIGHUP stays ignored. Raises UsageError."""
    names = "SIGINT,SIGTERM,SIGHUP" if text is None else text
    unknown = [name for name in names.split(",") if name not in signal.Signals.__members__]
    if unknown or {"SIGKILL", "SIGSTOP", "SIGCHLD"} & set(names.split(",")):
        raise UsageError(f"--signals-to-handle {text}: expected names like SIGTERM,SIGUSR1, of signals that a program "
                         "may handle")
    chosen = frozenset(signal.Signals[name] for name in names.split(","))
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return chosen - {signal.SIGHUP} if ignored else chosen


def _ranks_per_node(text: str) -> int:
    if text in ("auto", "cpu", "gpu"):
        devices = visible.count(os.environ) if text != "cpu" else 0
        if text == "gpu" and not devices:
            raise UsageError("--nproc-per-node gpu: this machine shows no GPU or NPU; give a number")
        return devices or max(int(allowance.cores()), 1)
    if not is_count(text):
        raise UsageError(f"--nproc-per-node {text}: give a positive number, auto, cpu or gpu; at most {MOST}")
    return int(text)


def _check_kernel() -> None:
    """Refuse a system where nobody can wait for a process's end. Raises UsageError."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        raise UsageError(f"this system has no pidfd_open ({error.strerror}): Linux 5.3 or newer is needed, and a "
                         "container's seccomp profile must allow it") from None


def _check_processes(ranks: int) -> None:
    """Refuse what this machine cannot hold, or a container does not let start. Raises UsageError."""
    if (most := allowance.processes()) < ranks * _THREADS:
        raise UsageError(f"--nproc-per-node {ranks}: this machine can have {most} processes and threads (kernel.pid_max"
                         f"), and {ranks} ranks are at least {ranks * _THREADS}: start fewer")
    left = allowance.limits().processes
    if left is not None and left < ranks * _THREADS:
        raise UsageError(f"--nproc-per-node {ranks}: this container lets {left} more processes and threads start, and "
                         f"{ranks} ranks are at least {ranks * _THREADS}: raise its limit (pids.max; docker run "
                         "--pids-limit, podPidsLimit of the kubelet), or start fewer ranks")


def _rendezvous(options: argparse.Namespace, elastic: bool) -> Rendezvous:
    """Where nodes meet, and which of them this is. Raises UsageError."""
    fewest, most = nodes_of(options.nnodes or "1")
    if most > fewest and not elastic:
        raise UsageError(f"--nnodes {options.nnodes}: only to an --elastic job nodes can come while it trains; add "
                         "--elastic behind SCRIPT, or give one number")
    rank = options.node_rank or 0
    ranges = ":" in (options.nnodes or "")
    if not 0 <= rank < MOST or (rank >= most and (ranges or not elastic)):
        raise UsageError(f"--node-rank {rank} must be from 0 to {most - 1}, as --nnodes is {options.nnodes or 1}" + (
            "" if elastic else "; only to an --elastic job further nodes can come"))
    host, port = None, None
    if options.rdzv_endpoint and not options.standalone:
        host, port = endpoint_of(options.rdzv_endpoint)
    host = host_of("--master-addr", options.master_addr) if options.master_addr else host
    port = options.master_port if options.master_port is not None else port
    if port is not None and not 0 <= port < 1 << 16:
        raise UsageError(f"--master-port {port} is no port: give a number up to 65535, or 0 for any free one")
    if most == 1 and rank == 0:
        return Rendezvous(1, 0, host or "127.0.0.1", port or 0)
    if not host:
        raise UsageError("several nodes need --master-addr: the address of node 0, as every node can reach it")
    if options.node_rank is None and fewest > 1 and not is_here(host):
        raise UsageError(f"--node-rank is missing: {host} is no address of this machine, so it is not node 0; give "
                         f"every node its number, from 0 to {fewest - 1}")
    return Rendezvous(fewest, rank, host, port or 29500, several=True)


def _begins(command: _Command) -> bool:
    """Whether this node is to begin a job: it is the first one, and not there again in place of one that was lost."""
    config, run_dir = command.config, command.config.run_dir
    if command.rendezvous.node_rank != 0 or command.choice.kind == "alone" or run_dir is None:
        return command.rendezvous.node_rank == 0
    note = partial(complain, "note", as_json=config.log_format == "json")
    return not attempt.led(run_dir, command.credentials, config.suspect_timeout + 2 * config.heartbeat_timeout, note)


def _make_run_dir(command: _Command, begins: bool) -> Path:
    """Make the run directory. Raises UsageError if it is another run's, and this node ``begins`` a job."""
    path = command.config.run_dir or _own(Path("runs") / time.strftime("%Y%m%d-%H%M%S"))
    try:
        path.mkdir(parents=True, exist_ok=True)
        if begins:
            attempt.claim(path)
            attempt.put_away(path)
        if command.log_dir is None:
            (path / "logs").mkdir(exist_ok=True)
    except OSError as error:
        raise UsageError(f"--elastic-run-dir: cannot make {path}: {error.strerror}; name a folder that can be written "
                         "to") from None
    if command.log_dir is not None:
        _keep_logs_in(Path(command.log_dir), path / "logs", "" if command.name == "none" else f"{command.name}_")
    path = path.resolve()
    _check_text(str(path))
    _keep_temporary_files_in(path)
    return path


def _keep_temporary_files_in(run_dir: Path) -> None:
    """Where nothing else can be written, as with a read-only root, temporary files of all processes are there."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        folder = run_dir / "tmp"
        folder.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = str(folder)


def _keep_logs_in(folder: Path, link: Path, prefix: str) -> None:
    """Make ``link``, unless another node has, to a new folder for the logs of this job. Raises UsageError."""
    if link.exists():
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        own = _own(folder.resolve() / f"{prefix}{link.parent.resolve().name}")
        own.mkdir(exist_ok=True)  # says why if it could not be made
        try:
            link.symlink_to(own)
        except FileExistsError:
            own.rmdir()
            if not link.exists():
                raise
    except OSError as error:
        raise UsageError(f"--log-dir {folder}: cannot keep logs there: {error.strerror}; name a folder that can "
                         "be written to") from None


def _own(stem: Path) -> Path:
    """A folder that is made now, by nobody else. A path that is not there if none can be made."""
    for path in _names(stem):
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:
            pass  # who needs it will say why
        return path
    raise AssertionError("names do not end")


def _names(stem: Path) -> Iterator[Path]:
    return itertools.chain([stem], (Path(f"{stem}-{i}") for i in itertools.count(2)))


# ---- running -------------------------------------------------------------------------------


def check(argv: Sequence[str]) -> ElasticConfig:
    """Look at a command line as ``main`` does, and start nothing; returns its elastic flags. Raises UsageError."""
    return _read_command(argv).config


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job; return the exit code: 0 training finished, 2 bad flags, the script's own, 1 else, 128 + N signal N."""
    return first_process.tend(partial(_main, argv)) if os.getpid() == 1 else _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    try:
        command = _read_command(argv)
        begins = _begins(command)
        run_dir = _make_run_dir(command, begins)
    except UsageError as error:
        complain("error", str(error), as_json=False)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    exit_signal = ExitSignal(command.program.arguments)
    note = partial(complain, "note", as_json=command.config.log_format == "json")
    job = _take_part(command, _brief(command, run_dir, begins), exit_signal, note)
    return _run_until_signalled(job, exit_signal, note, command.signals)


def _run_until_signalled(
    job: Coroutine[Any, Any, int], exit_signal: ExitSignal, note: Callable[[str], None],
    signals: frozenset[signal.Signals],
) -> int:  # fmt: skip
    """Run ``job``; the first of ``signals`` cancels it, so that it ends its ranks, and sets the exit code.

    The second one cancels it again, which ends its patience with the ranks. The script's exit signal goes to the ranks.
    SIGTERM twice at once counts once: a scheduler signals a launcher, and who has started it passes that on.
    """
    received: list[int] = []
    terminated = -_AT_ONCE

    async def watched() -> int:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(job)

        def on_signal(number: int) -> None:
            nonlocal terminated
            if number == signal.SIGTERM:
                before, terminated = terminated, loop.time()
                if terminated < before + _AT_ONCE:
                    return
            if (what := exit_signal.taken(number)) is not None:
                note(what)
                return
            received.append(number)
            if len(received) <= 2:
                task.cancel()

        for number in signals if exit_signal.number is None else signals | {exit_signal.number}:
            loop.add_signal_handler(number, on_signal, number)
        return await task

    code = 1
    with contextlib.suppress(asyncio.CancelledError):
        code = asyncio.run(watched())
    for number in received:
        signal.signal(number, signal.SIG_IGN)  # one more of them, so late, would only change the exit code
    return 128 + received[0] if received else code


async def _take_part(
    command: _Command, brief: Brief, exit_signal: ExitSignal, note: Callable[[str], None]
) -> int:  # fmt: skip
    """Run this node's part of the job to its end; returns the exit code. Why it failed is the last that it says."""
    screen = Screen(command.config.log_format == "json")
    station = Station(brief, exit_signal, screen, note)
    outcome = await station.run()
    where = f"records and logs are in {brief.assignment.run_dir}"
    if not outcome.ok:
        screen.say(where)
        if not command.config.elastic and re.search(r"unrecognized arguments:.* --elastic-", outcome.reason):
            note("a Megatron-LM checkout knows the --elastic-... flags only with --elastic: add it")
        screen.complain(outcome.reason)
    await station.end(outcome)
    if outcome.ok and station.coordinates:
        for spec in _never_injected(command.config, brief.assignment.run_dir):
            screen.say(f"WARNING: --elastic-inject {spec} never happened: its rank was lost before, or did not come to "
                       "that point; give another step, point or grain")
    if outcome.ok:
        screen.say(outcome.reason, "finished")
        screen.say(where)
    screen.close(END_LIMIT)
    return 0 if outcome.ok else outcome.code


def _never_injected(config: ElasticConfig, run_dir: Path) -> list[str]:
    """Faults that were asked for, and are not on record."""
    if not config.inject or not (run_dir / "events.jsonl").is_file():
        return []
    happened = {event.get("spec") for event in read_events(run_dir) if event.get("kind") == "injected"}
    return [spec for spec in map(str, config.inject) if spec not in happened]


def _brief(command: _Command, run_dir: Path, begins: bool) -> Brief:
    config = command.config
    job = Assignment(
        program=command.program, nodes=command.rendezvous.nodes, node_rank=command.rendezvous.node_rank,
        ranks_per_node=command.ranks_per_node, run_dir=run_dir, host=command.rendezvous.host, console=command.console,
        name=command.name, end_limit=command.end_limit,
        heartbeat_timeout=config.heartbeat_timeout, grace=config.end_timeout, look_every=config.suspect_timeout / 4,
        elastic=config.elastic, tells_paces=_tells_paces(config, command.ranks_per_node), spares=command.spares,
        actuator=None if config.dvfs is None else "emulated" if config.emulate is not None else config.actuator,
    )  # fmt: skip
    return Brief(job, config, command.credentials, command.choice, command.rendezvous.port, begins)


def _tells_paces(config: ElasticConfig, ranks: int) -> bool:
    """Ranks that share a processor are slow or fast by chance."""
    if config.slow is None:
        return config.elastic and not allowance.crowded(ranks)
    return config.elastic and config.slow != "off"
