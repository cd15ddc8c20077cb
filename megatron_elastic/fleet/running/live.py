"""Live: ``megatron-elastic fleet run``, ``submit``, ``cancel`` and ``status``: a fleet of real jobs."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from megatron_elastic import tables, usage
from megatron_elastic.fleet.managers.kubernetes import DEVICES, Kubernetes, TemplateError
from megatron_elastic.fleet.managers.local import Local
from megatron_elastic.fleet.managers.manager import Manager, ManagerError
from megatron_elastic.fleet.managers.slurm import COUNTED, Slurm
from megatron_elastic.fleet.running import daemon
from megatron_elastic.fleet.running.journal import Entry, Journal, JournalError
from megatron_elastic.fleet.running.submission import NameTaken, Submission, cancel, free_name, submit
from megatron_elastic.fleet.running.ward import Ward
from megatron_elastic.observe import telling
from megatron_elastic.observe.records import RecordsError

_RUN = """\
Share out devices among real jobs: start them in the order of submission, let elastic ones use what is idle, and have it
given back when somebody needs it. Who decides is the policy that `fleet simulate` simulates.

Jobs do not need this process: it may be ended, or killed, and be started again with the same folder. Jobs go on
meanwhile, and are found again; nothing is started twice."""
_RUN_EXAMPLES = """\
example:
  megatron-elastic fleet run fleet --slots 16 &
  megatron-elastic fleet submit fleet --devices 4 --max-devices 12 -- \\
      examples/pretrain_gpt.py --elastic ...
  megatron-elastic fleet submit fleet --devices 2 -- python evaluate.py
  megatron-elastic fleet status fleet

A slot stands for a device of this machine; a command finds the numbers of its slots in MEGATRON_ELASTIC_SLOTS."""
_SUBMIT = """\
Give a job to a fleet. It is written to the fleet's folder; a fleet that runs there, or will, takes it from there.

A rigid job is any program, with exactly the devices that it asks for. With --max-devices it is elastic: the command is
a training script and its arguments, as behind `megatron-elastic run`, and the fleet starts its launchers: one with
--devices ranks, and further ones, of a cell each, that join and leave while it trains. It never has fewer than
--devices, and its result does not depend on how many it has, bit for bit."""
_SUBMIT_EXAMPLES = """\
examples:
  megatron-elastic fleet submit fleet --name llm \\
      --devices 4 --max-devices 12 -- \\
      examples/pretrain_gpt.py --elastic --elastic-slices 12 \\
      --data-path data --train-iters 5000 ...
  megatron-elastic fleet submit fleet --devices 2 --seconds 600 -- \\
      python evaluate.py --checkpoint 5000

Records of an elastic job are in FLEET_DIR/jobs/NAME/run, what a launcher prints in FLEET_DIR/jobs/NAME/nodes/N/output.
--elastic-slices should be at least --max-devices, so that everybody owns a part of the optimizer's state."""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """``run``, ``submit``, ``cancel`` and ``status``."""

    def add(name: str, text: str, description: str, epilog: str) -> argparse.ArgumentParser:
        parser = commands.add_parser(name, help=text, description=description, epilog=epilog,
                                     formatter_class=usage.Formatter)  # fmt: skip
        parser.add_argument("folder", type=Path, metavar="FLEET_DIR", help="the fleet's folder")
        return parser

    parser = add("run", "look after jobs: start, grow and shrink them", _RUN, _RUN_EXAMPLES)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--slots", type=usage.count, metavar="N", help="devices of this machine")
    where.add_argument("--slurm", metavar="NAME", help="those of a partition of Slurm; all its nodes share "
                       "FLEET_DIR")
    where.add_argument("--kubernetes", type=Path, metavar="POD", help="those of a cluster; launches are pods like "
                       "this one, which has the image and mounts FLEET_DIR")
    parser.add_argument("--count", metavar="WHAT", help="what a device is: gpu or cpu, with --slurm or "
                        "--kubernetes; with that also the name of another resource, such as amd.com/gpu (default: gpu)")
    parser.add_argument("--policy", choices=daemon.POLICIES, default="elastic", help="elastic: use what is idle as "
                        "long as that is expected to pay; fifo: every job has what it was submitted with (default: "
                        "elastic)")
    parser.add_argument("--every", type=_seconds, default=1.0, metavar="SECONDS",
                        help="between two looks (default: 1)")
    parser.add_argument("--limit", type=_seconds, default=120.0, metavar="SECONDS", help="that a node may take to "
                        "join, to leave, or to end, before it is said that the job does not obey (default: 120)")
    parser.add_argument("--until-idle", action="store_true", help="end when no job waits or runs")
    parser.set_defaults(command=run)

    parser = add("submit", "give a job to a fleet", _SUBMIT, _SUBMIT_EXAMPLES)
    parser.add_argument("--name", metavar="NAME", help="of the job (default: the program's, numbered)")
    parser.add_argument("--devices", type=usage.count, default=1, metavar="N",
                        help="devices that it needs (default: 1)")
    parser.add_argument("--max-devices", type=usage.count, metavar="N", help="devices that it can use: it is elastic")
    parser.add_argument("--seconds", type=_seconds, metavar="S", help="that it is expected to run on --devices; of an "
                        "elastic job that is measured")
    parser.add_argument("words", nargs="+", metavar="-- COMMAND ...", help="the program, or, of an elastic job, the "
                        "training script, and its arguments")
    parser.set_defaults(command=_submit)

    parser = add("cancel", "end a job", "End a job: at once where it waits, else as SIGTERM does.", "")
    parser.add_argument("name", metavar="NAME", help="of the job")
    parser.set_defaults(command=_cancel)

    parser = add("status", "show jobs and who has which devices", "Show jobs, and who has which devices.", "")
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    parser.set_defaults(command=_status)


def parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Parse a command line of ``fleet``, where a job's command is kept word for word.

    argparse takes a ``--`` out of whatever follows each argument: the one that separates, and the command's own.
    """
    if argv[:1] != ["submit"] or "--" not in argv:
        return parser.parse_args(argv)
    end = argv.index("--")
    first, command = argv[end + 1 : end + 2], argv[end + 1 :]
    options = parser.parse_args([*argv[: end + 1], *first])
    before = options.words[: len(options.words) - len(first)]
    options.words = [*before, "--", *command] if before else command  # without a separator it is the command's own
    return options


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


# ---- run, submit, cancel -------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """Look after a fleet until SIGTERM or Ctrl-C, or until it is idle. Raises JournalError."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    manager = _manager(options)
    daemon.run(options.folder.resolve(), manager, options.policy, options.every, options.limit, options.until_idle,
               _say, stop.wait)  # fmt: skip
    if stop.is_set():
        _say("this fleet ends; jobs go on, and are found again by the next one")
    return 0


def _manager(options: argparse.Namespace) -> Manager:
    """Raises ValueError where it is not known, or cannot be, what is asked for."""
    if options.slots:
        if options.count is not None:
            raise ValueError("--count is of --slurm and --kubernetes: leave it out with --slots")
        return Local(options.slots)
    counted = options.count or "gpu"
    if options.slurm:
        if counted not in COUNTED:
            raise ValueError(f"--count {counted}: Slurm's devices are {' or '.join(COUNTED)}")
        return Slurm(options.slurm, counted)
    try:
        return Kubernetes(options.kubernetes, DEVICES.get(counted, counted))
    except (TemplateError, ManagerError) as error:
        raise ValueError(f"--kubernetes: {error}") from None


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it, or the disk is full: a fleet goes on all the same
        print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)


def _submit(options: argparse.Namespace) -> int:
    while True:
        name = options.name or free_name(options.folder, options.words)
        try:
            own = submit(options.folder, Submission(
                name=name, command=options.words, devices=options.devices, submitted=time.time(), cwd=os.getcwd(),
                max_devices=options.max_devices, seconds=options.seconds,
            ))  # fmt: skip
        except NameTaken:
            if options.name:
                raise
            continue  # somebody was quicker, who has none either
        print(f"{name}: {own}")
        return 0


def _cancel(options: argparse.Namespace) -> int:
    cancel(options.folder, options.name)
    return 0


# ---- status --------------------------------------------------------------------------------------


def status(folder: Path) -> dict[str, Any]:
    """What a fleet is doing, as JSON has it. Raises JournalError."""
    journal = Journal(folder)
    fleet = journal.read_fleet()
    entries = [entry for name in journal.names() if (entry := journal.read_entry(name)) is not None]
    entries.sort(key=lambda entry: entry.index)
    known = {entry.name for entry in entries}
    held = sum(entry.held for entry in entries)
    return {
        "folder": str(folder),
        "running": journal.is_led(),
        "policy": None if fleet is None else fleet.policy,
        "manager": None if fleet is None else fleet.manager,
        "looked": None if fleet is None else fleet.now,
        "devices": None if fleet is None else fleet.total,
        "held": held,
        "scale_operations": 0 if fleet is None else fleet.scalings,
        "jobs": {entry.name: _job(journal, entry) for entry in entries},
        "not_taken_in": [name for name in journal.names() if name not in known],
    }


def _job(journal: Journal, entry: Entry) -> dict[str, Any]:
    asked, ward = entry.submission, Ward(entry, journal.job(entry.name))
    unstarted = next((f"node {node.rank} cannot be started: {node.unstarted}" for node in entry.nodes
                      if node.unstarted), "")  # fmt: skip
    unreadable = ""
    try:
        ward.progress.refresh()
    except RecordsError as error:
        unreadable = str(error)
    return {
        "phase": entry.phase,
        "elastic": asked is not None and asked.elastic,
        "devices": entry.held,
        "target": entry.target,
        "given": None if asked is None else asked.devices,
        "max_devices": None if asked is None else asked.max_devices,
        "slots": sorted(slot for node in entry.nodes for slot in node.slots),
        "nodes": [
            {"node": node.rank, "devices": node.devices, "joined": node.rank == 0 or node.joined is not None,
             "leaves": node.leaves is not None}
            for node in entry.nodes
        ],
        "submitted": None if asked is None else asked.submitted,
        "started": entry.started,
        "ended": entry.ended,
        "changes": entry.changes,
        "reason": entry.reason,
        "trouble": entry.trouble or unstarted or unreadable,
        **ward.figures(),
    }  # fmt: skip


def _status(options: argparse.Namespace) -> int:
    now = status(options.folder)
    if now["looked"] is None and not now["not_taken_in"]:
        raise JournalError(f"there is no fleet in {options.folder}")
    if options.json:
        print(json.dumps(now))
        return 0
    console = tables.console(140)
    if now["running"]:
        console.print(f"{now['held']} of {now['devices']} devices are in use ({now['manager']}, policy "
                      f"{now['policy']}, {now['scale_operations']} scale operations)")  # fmt: skip
    else:
        console.print("no fleet runs here now; jobs that have been started go on")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("job", "state", "devices", "slots", "step", "waited", "ran", ""):
        table.add_column(column)
    for name, job in now["jobs"].items():
        table.add_row(name, *_row(job))
    for name in now["not_taken_in"]:
        table.add_row(name, "submitted")
    console.print(table)
    return 0


def _row(job: dict[str, Any]) -> list[str]:
    devices = str(job["devices"] or "-")
    if job["target"] != job["devices"]:
        devices += f" (to be {job['target']})"
    elif job["elastic"]:
        devices += f" ({job['given']} to {job['max_devices']})"
    step = f"{job['step']}/{job['total_steps']}" if job.get("total_steps") else ""
    end = job["ended"] or time.time()
    waited = (job["started"] or end) - job["submitted"] if job["submitted"] else 0.0
    ran = telling.duration(end - job["started"]) if job["started"] else ""
    slots = ",".join(map(str, job["slots"]))
    return [job["phase"], devices, slots, step, telling.duration(waited), ran, job["trouble"] or job["reason"]]
