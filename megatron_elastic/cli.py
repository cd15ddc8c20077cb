"""Command line: ``megatron-elastic COMMAND``. A command is imported when it is used."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import select
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_elastic import __version__, usage

COMMANDS = {
    "run": ("train a script on several ranks, elastically", "megatron_elastic.cluster.launch.launcher"),
    "data": ("make training data from text", ""),
    "scale": ("ask a running job for other numbers of stages, cells or ranks", "megatron_elastic.cluster.asking.scale"),
    "drain": ("let the ranks of a node leave a running job", "megatron_elastic.cluster.asking.drain"),
    "status": ("show what a job is doing", "megatron_elastic.cluster.asking.look"),
    "top": ("show what a job is doing, live", "megatron_elastic.top"),
    "compare": ("say whether two runs are equal bit for bit", "megatron_elastic.observe.compare"),
    "trace": ("make one file of what ranks did, for the trace viewer", "megatron_elastic.observe.tracing.command"),
    "report": ("show what happened in a run", "megatron_elastic.observe.report"),
    "plan": ("show what an event would make of a layout, without a job", "megatron_elastic.planner"),
    "predict": ("predict step times and memory of layouts, or check predictions", "megatron_elastic.prediction"),
    "emulate": ("compute a model's profile on an accelerator, to emulate it", "megatron_elastic.emulation.command"),
    "clocks": ("set back clocks that jobs have left on this machine", "megatron_elastic.power.command"),
    "fleet": ("share out the devices of a cluster: policies compared on a trace", "megatron_elastic.fleet.command"),
    "patch": ("add our lines to a Megatron-LM checkout, or take them out", "megatron_elastic.patching"),
    "doctor": ("say whether a Megatron-LM checkout is as the adaptors need it", "megatron_elastic.adaptor.doctor"),
    "flags": ("say what becomes of a Megatron-LM checkout's flags", "megatron_elastic.adaptor.script.flags"),
    "chaos": ("let random faults happen to jobs, and compare with undisturbed ones", ""),
    "completion": ("print what lets a shell complete commands", "megatron_elastic.completion"),
    "bench": ("measure, and print one line of JSON", "megatron_elastic.bench"),
}
"""Command -> what it does, and the module with its ``make_parser`` and ``main``; empty where ``main`` here knows."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; 130 if somebody has interrupted it, and 141 if who reads what it prints
    reads no further (``| head``), of which nothing is said.
    """
    try:
        try:
            return _main(argv)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        if _is_read():
            raise  # it is something else that nobody reads
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes there as Python ends
        return 128 + signal.SIGPIPE


def _is_read() -> bool:
    """Whether there is still somebody to read what is printed."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return not output.poll(0)


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    if name == "--version":
        print(__version__)
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        meant = f"did you mean {near[0]}?" if near else f"one of {', '.join(COMMANDS)}"
        print(f"megatron-elastic: error: there is no command {name!r}; {meant}", file=sys.stderr)
        return 2
    if name == "data":
        return _data(rest)
    if name == "chaos":
        from megatron_elastic import bench

        return bench.become("chaos", rest)
    if name == "predict":  # its matrices are small: on a busy machine threads of BLAS would only wait for one another
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    return int(importlib.import_module(COMMANDS[name][1]).main(rest))


def _overview() -> str:
    lines = ["usage: megatron-elastic COMMAND ...", "", "Megatron pretraining that goes on when ranks are lost."]
    lines += ["", "commands:"]
    lines += [f"  {name:10s} {what}" for name, (what, _) in COMMANDS.items()]
    return "\n".join([*lines, "", "megatron-elastic COMMAND --help tells more, with examples."])


def parsers() -> dict[str, tuple[str, argparse.ArgumentParser]]:
    """Of each command what it does, and its flags; but of ``chaos``, which is not part of the package."""
    made = {}
    for name, (what, module) in COMMANDS.items():
        if name != "chaos":
            made[name] = what, importlib.import_module(module).make_parser() if module else _data_parser()
    return made


def _data_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-elastic data", formatter_class=usage.Formatter, description="Make training data from text.",
        epilog="example:\n  megatron-elastic data prepare data --text books/ --vocab-size 4096",
    )
    prepare = parser.add_subparsers(title="commands", dest="action", required=True, metavar="COMMAND").add_parser(
        "prepare", help="train a byte-level BPE and write Megatron's .bin and .idx", formatter_class=usage.Formatter)
    prepare.add_argument("out", type=Path, metavar="OUT", help="directory to write to; --data-path takes it")
    prepare.add_argument("--text", type=Path, nargs="+", action="extend", default=[], metavar="PATH",
                         help="text files, or directories of them (default: the standard library's sources)")
    prepare.add_argument("--vocab-size", type=int, default=4096, metavar="N", help="tokens (default: %(default)s)")
    return parser


def _data(argv: Sequence[str]) -> int:
    options = _data_parser().parse_args(argv)

    from megatron_elastic.adaptor.dataset import prepare as write
    from megatron_elastic.config import UsageError

    try:
        prepared = write(options.out, options.text, options.vocab_size)
    except UsageError as error:
        print(f"megatron-elastic: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"megatron-elastic: error: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: {prepared.documents} documents, {prepared.tokens} tokens, "
          f"vocabulary of {prepared.vocab_size}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
