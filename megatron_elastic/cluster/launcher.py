"""Launcher: ``megatron-elastic run``. Checks the command, then runs coordinator and agent until the job ends."""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import importlib.util
import itertools
import os
import runpy
import shlex
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from megatron_elastic import argument_file, support, usage
from megatron_elastic.cluster.agent import END_LIMIT
from megatron_elastic.cluster.agent import Job as AgentsJob
from megatron_elastic.cluster.exit_signal import ExitSignal
from megatron_elastic.cluster.leadership import Choice, parse
from megatron_elastic.cluster.part import Part
from megatron_elastic.cluster.screen import Screen, as_object, complain
from megatron_elastic.cluster.station import Station
from megatron_elastic.cluster.wire import Credentials
from megatron_elastic.cluster.wire.tls import certificates_of
from megatron_elastic.cluster.wire.token import given_token, make_token, token_of
from megatron_elastic.cluster.zygote import Program
from megatron_elastic.config import ElasticConfig, UsageError, add_elastic_arguments
from megatron_elastic.device import visible

ARGUMENTS_VARIABLE = "MEGATRON_ELASTIC_ARGS"
"""Environment variable with further arguments for the script, as a shell would split them."""

_IMPORTED = ("pydantic", "regex", "six")
"""What ``megatron.training`` imports of what neither torch nor megatron-core brings along."""

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
The exit code is 0 only if training finished.
"""


class _Parser(argparse.ArgumentParser):
    """Errors are one line, as every other error of the launcher."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


@dataclass(frozen=True, slots=True)
class _Command:
    """The checked command line. ``port`` 0 means any free one."""

    program: Program
    nodes: int
    node_rank: int
    ranks_per_node: int
    host: str
    port: int
    config: ElasticConfig
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

    def add(name: str, **keywords: Any) -> None:
        # torchrun spells its flags both ways.
        parser.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}")), **keywords)

    add("nproc-per-node", metavar="N", default="1", help="ranks on this node: a number, auto, cpu or gpu (default: 1)")
    add("nnodes", metavar="N", default="1", help="nodes of the job (default: 1)")
    add("node-rank", metavar="I", type=int, default=0, help="which of them this is; node 0 coordinates, and a node "
        "beyond --nnodes joins the running job, which must be --elastic (default: 0)")
    add("master-addr", metavar="HOST", default=None, help="address of node 0, as every node can reach it")
    add("master-port", metavar="PORT", type=int, default=None, help="port of the coordinator (default: any free "
        "one; 29500 with several nodes)")
    add("rdzv-endpoint", metavar="HOST:PORT", default=None, help="the same as --master-addr and --master-port")
    add("rdzv-backend", metavar="NAME", default=None, help="accepted for torchrun's sake: there is one rendezvous")
    add("rdzv-id", metavar="ID", default=None, help="accepted for torchrun's sake")
    add("max-restarts", metavar="N", type=int, default=0, help="accepted for torchrun's sake: nothing is restarted")
    parser.add_argument("--standalone", action="store_true", help="one node, any free port (the default)")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name, as in python -m")
    add("no-python", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("script", metavar="SCRIPT", help="Python file that trains")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments, with --elastic-*")
    return parser


def _read_command(argv: Sequence[str] | None) -> _Command:
    """Parse and check the command line. Raises UsageError."""
    options = make_parser().parse_args(argv)
    if options.no_python:
        raise UsageError("--no-python is not supported: ranks are forked from a Python process; give a Python script")
    # First, so that the command line wins.
    options.arguments[:0] = shlex.split(os.environ.get(ARGUMENTS_VARIABLE, ""))
    elastic = _Parser(add_help=False, allow_abbrev=False)
    add_elastic_arguments(elastic)
    options.arguments[:0] = argument_file.launcher_flags(options.arguments)
    config = ElasticConfig.from_args(elastic.parse_known_args(options.arguments)[0])
    if options.max_restarts:
        complain("note", "--max-restarts has no effect: ranks that die are never restarted, the others train on",
                 config.log_format == "json")
    nodes = _nodes(options.nnodes)
    if options.node_rank < 0 or (options.node_rank >= nodes and not config.elastic):
        raise UsageError(f"--node-rank {options.node_rank} must be from 0 to {nodes - 1}, as --nnodes is {nodes}; only "
                         "to an --elastic job further nodes can come")
    host, port = _endpoint(options, nodes)
    several = nodes > 1 or options.node_rank > 0
    token = given_token(os.environ) if several else token_of(os.environ) or make_token()
    program = Program(options.script, options.module, options.arguments)
    command = _Command(program, nodes, options.node_rank, _ranks_per_node(options.nproc_per_node), host, port, config,
                       Credentials(token, certificates_of(config)), parse(config.store, nodes if config.elastic else 1))
    if command.spares >= nodes * command.ranks_per_node:
        raise UsageError(f"--elastic-spares {command.spares}: there are {nodes * command.ranks_per_node} ranks in all, "
                         "and some must train: raise --nproc-per-node or --nnodes")
    _check_script(command)
    return command


def _nodes(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--nnodes {text}: give one positive number; a range of nodes (MIN:MAX) is not supported")
    return int(text)


def _ranks_per_node(text: str) -> int:
    if text in ("auto", "cpu", "gpu"):
        devices = visible.count(os.environ) if text != "cpu" else 0
        if text == "gpu" and not devices:
            raise UsageError("--nproc-per-node gpu: this machine shows no GPU or NPU; give a number")
        return devices or len(os.sched_getaffinity(0))
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--nproc-per-node {text}: give a positive number, auto, cpu or gpu")
    return int(text)


def _endpoint(options: argparse.Namespace, nodes: int) -> tuple[str, int]:
    host, port = options.master_addr, options.master_port
    if options.rdzv_endpoint and not options.standalone:
        given_host, _, given_port = options.rdzv_endpoint.partition(":")
        if given_port and not given_port.isdecimal():
            raise UsageError(f"--rdzv-endpoint {options.rdzv_endpoint}: expected HOST:PORT")
        host = host or given_host
        port = port if port is not None else int(given_port or 0) or None
    if nodes == 1 and options.node_rank == 0:
        return host or "127.0.0.1", port or 0
    if not host:
        raise UsageError("several nodes need --master-addr: the address of node 0, as every node can reach it")
    return host, port or 29500


def _check_script(command: _Command) -> None:
    """Find the script, and let its ``check_arguments(argv, world_size)`` look at the arguments if it has one."""
    program = command.program
    if program.is_module:
        if importlib.util.find_spec(program.target.partition(".")[0]) is None:
            raise UsageError(f"there is no module {program.target}; -m takes a module's name")
    else:
        path = Path(program.target)
        if not path.is_file():
            raise UsageError(f"there is no script {path}" + (" (it is a directory)" if path.is_dir() else ""))
        if command.config.elastic and (path.parent / "megatron" / "training").is_dir():
            _check_checkout(path, program.arguments)
        if _defines_check(path):
            sys.path.insert(0, str(path.resolve().parent))
            try:
                check = runpy.run_path(str(path), run_name="__preflight__")["check_arguments"]
                check(program.arguments, command.nodes * command.ranks_per_node - command.spares)
            finally:
                sys.path.pop(0)
    if command.config.elastic and importlib.util.find_spec("ucxx") is None:
        raise UsageError("--elastic needs ucxx, which is not installed: pip install 'ucxx-cu12==0.52.*'")


def _check_checkout(path: Path, arguments: Sequence[str]) -> None:
    """Check what can be checked of a Megatron-LM script without Megatron: that it is patched, its flags, and that there
    is what it imports.
    """
    if "megatron_elastic" not in path.read_text(errors="replace"):
        raise UsageError(f"{path} does not know --elastic; let it: megatron-elastic patch apply {path.parent}")
    support.check_arguments(arguments)
    if missing := [name for name in _IMPORTED if importlib.util.find_spec(name) is None]:
        raise UsageError(f"{path} imports what is not installed: pip install {' '.join(missing)}")


def _defines_check(path: Path) -> bool:
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        raise UsageError(f"{path} is no Python program: {error}") from None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "check_arguments":
            return True
        if isinstance(node, ast.ImportFrom | ast.Import) and any(
            (alias.asname or alias.name) == "check_arguments" for alias in node.names
        ):
            return True
    return False


def _make_run_dir(command: _Command) -> Path:
    """Make the run directory. Raises UsageError if it holds another run's records."""
    path = command.config.run_dir or _fresh_run_dir()
    taken = next((path / name for name in ("metrics.jsonl", "events.jsonl") if (path / name).exists()), None)
    if command.node_rank == 0 and taken is not None:
        raise UsageError(f"{taken} is there already; choose another --elastic-run-dir, or move that run away")
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--elastic-run-dir: cannot make {path}: {error.strerror}") from None
    return path.resolve()


def _fresh_run_dir() -> Path:
    stem = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    candidates = itertools.chain([stem], (Path(f"{stem}-{i}") for i in itertools.count(2)))
    return next(path for path in candidates if not path.exists())


# ---- running -------------------------------------------------------------------------------


def check(argv: Sequence[str]) -> ElasticConfig:
    """Look at a command line as ``main`` does, and start nothing; returns its elastic flags. Raises UsageError."""
    return _read_command(argv).config


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job; return the exit code: 0 training finished, 1 it did not, 2 bad flags, 130 / 143 interrupted."""
    try:
        command = _read_command(argv)
        run_dir = _make_run_dir(command)
    except UsageError as error:
        complain("error", str(error), as_json=False)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    exit_signal = ExitSignal(command.program.arguments)
    as_json, there = command.config.log_format == "json", f"records and logs are in {run_dir}"
    note = partial(complain, "note", as_json=as_json)
    code = _run_until_signalled(_take_part(command, run_dir, exit_signal, note), exit_signal, note)
    print(as_object("info", "said", there) if as_json else there, flush=True)
    return code


def _run_until_signalled(
    job: Coroutine[Any, Any, int], exit_signal: ExitSignal, note: Callable[[str], None]
) -> int:
    """Run ``job``; the first SIGINT, SIGTERM or SIGHUP cancels it, so that it ends its ranks, and sets the exit code.

    The second one cancels it again, which ends its patience with the ranks. The script's exit signal goes to the ranks.
    """
    received: list[int] = []

    async def watched() -> int:
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(job)

        def on_signal(number: int) -> None:
            if (what := exit_signal.taken(number)) is not None:
                note(what)
                return
            received.append(number)
            if len(received) <= 2:
                task.cancel()

        for number in {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, exit_signal.number or signal.SIGTERM}:
            loop.add_signal_handler(number, on_signal, number)
        return await task

    code = 1
    with contextlib.suppress(asyncio.CancelledError):
        code = asyncio.run(watched())
    for number in received:
        signal.signal(number, signal.SIG_IGN)  # one more of them, so late, would only change the exit code
    return 128 + received[0] if received else code


async def _take_part(
    command: _Command, run_dir: Path, exit_signal: ExitSignal, note: Callable[[str], None]
) -> int:
    """Run this node's part of the job to its end; returns the exit code."""
    screen = Screen(command.config.log_format == "json")
    station = Station(_part(command, run_dir), exit_signal, screen, note)
    outcome = await station.run()
    if not outcome.ok:
        screen.complain(outcome.reason)
    await station.end(outcome)
    if outcome.ok:
        screen.say(outcome.reason, "finished")
    screen.close(END_LIMIT)
    return 0 if outcome.ok else 1


def _part(command: _Command, run_dir: Path) -> Part:
    config = command.config
    job = AgentsJob(
        program=command.program, nodes=command.nodes, node_rank=command.node_rank,
        ranks_per_node=command.ranks_per_node, run_dir=run_dir, host=command.host,
        heartbeat_timeout=config.heartbeat_timeout, grace=config.end_timeout, look_every=config.suspect_timeout / 4,
        tells_paces=_tells_paces(config, command.ranks_per_node), spares=command.spares,
        actuator=None if config.dvfs is None else "emulated" if config.emulate is not None else config.actuator,
    )  # fmt: skip
    return Part(job, config, command.credentials, command.choice, command.port)


def _tells_paces(config: ElasticConfig, ranks: int) -> bool:
    """Ranks that share a processor are slow or fast by chance."""
    if config.slow is None:
        return config.elastic and ranks <= len(os.sched_getaffinity(0))
    return config.elastic and config.slow != "off"
