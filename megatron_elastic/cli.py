"""Command line: ``megatron-elastic COMMAND``. A command is imported when it is used."""

from __future__ import annotations

import argparse
import codecs
import difflib
import importlib
import io
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


_PLAIN = {**dict(zip(" ▁▂▃▄▅▆▇█", " ..::==##", strict=True)), "░": ".", "▲": "^", "→": ">"}
"""What is drawn -> what is printed in its place where characters are of a set without it."""
_DRAWN = "megatron_elastic.drawn"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; 130 if somebody has interrupted it, 141 if who reads what it prints
    reads no further (``| head``), of which nothing is said, and 1 if it cannot be printed for another reason. That of a
    job that has ended is the job's in any case.
    """
    arguments, code = list(sys.argv[1:] if argv is None else argv), None
    is_job = arguments[:1] == ["run"]
    _prepare_output(drawn=not is_job)
    try:
        try:
            code = _main(arguments)
        finally:
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        if _is_read():
            raise  # it is something else that nobody reads
        _print_no_more()
        return code if is_job and code is not None else 128 + signal.SIGPIPE
    except OSError as error:
        if _is_printed():
            raise  # it is something else that failed
        _print_no_more()
        print(f"megatron-elastic: error: cannot print: {error.strerror}", file=sys.stderr)
        return code if is_job and code is not None else 1


def _prepare_output(drawn: bool) -> None:
    """Let whatever is printed have a place to go to (``>&-``), and what is ``drawn`` characters that are there.

    Ranks have the launcher's output as Python made it.
    """
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if drawn and isinstance(sys.stdout, io.TextIOWrapper):
        codecs.register_error(_DRAWN, _in_plain)
        sys.stdout.reconfigure(errors=_DRAWN)


def _in_plain(error: UnicodeError) -> tuple[str | bytes, int]:
    """What takes the place of a character that cannot be printed; bytes of file names that are no text stay."""
    assert isinstance(error, UnicodeEncodeError)
    character, end = error.object[error.start], error.start + 1
    if "\udc80" <= character <= "\udcff":
        return bytes([ord(character) - 0xDC00]), end
    return _PLAIN.get(character, "?"), end


def _print_no_more() -> None:
    """What is left to be printed goes nowhere as Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_printed() -> bool:
    """Whether what is printed is taken. What was not may be gone (``PYTHONUNBUFFERED``): one more line tells."""
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        return False
    return True


def _is_read() -> bool:
    """Whether there is still somebody to read what is printed."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return not output.poll(0)


def _main(arguments: Sequence[str]) -> int:
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
                         help="text files, or directories of them, without what is in hidden ones there and in "
                         "__pycache__ (default: the standard library's sources)")
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
