"""What commands say about themselves, and what shells complete of them."""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest
from disturbed import chaos

from megatron_elastic import bench, cli, usage
from megatron_elastic.layout import Layout, gpt_units
from tests.jobs import ROOT
from tests.observe.test_observe import write_run

WIDTH = 80
PARTS = [["plan", "--memory"], ["data", "prepare"], *(["fleet", part] for part in (
    "run", "submit", "cancel", "status", "simulate"))]  # fmt: skip


@pytest.fixture(autouse=True)
def _width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))


def helped(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    try:
        code: object = cli.main([*words, "--help"])
    except SystemExit as done:
        code = done.code
    assert code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", [[], *([name] for name in cli.COMMANDS if name != "chaos"), *PARTS], ids=" ".join)
def test_help_fits_a_terminal(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    told = helped(words, capsys)
    assert told.startswith(f"usage: {' '.join(['megatron-elastic', *words])} ")
    assert [line for line in told.splitlines() if len(line) > WIDTH] == []
    if not words:
        assert all(f"  {name} " in told for name in cli.COMMANDS)


def test_the_help_of_chaos_fits_as_well() -> None:
    assert max(map(len, chaos.make_parser().format_help().splitlines())) <= WIDTH


def test_prose_is_filled_and_examples_stay() -> None:
    text = "A long line. " * 9 + "\nThe same paragraph.\n\nexample:\n  a  b\n\n  c\nThe end."
    parser = argparse.ArgumentParser(prog="x", epilog=text, formatter_class=usage.Formatter)
    told = parser.format_help()
    assert told.endswith("The same paragraph.\n\nexample:\n  a  b\n\n  c\nThe end.\n")
    assert max(map(len, told.splitlines())) <= WIDTH


def test_all_parts_of_commands_are_looked_at() -> None:
    found = [[name, part] for name, (_, parser) in cli.parsers().items() for part in _parts(parser)]
    assert sorted(found) == sorted(words for words in PARTS if not words[1].startswith("-"))


def _parts(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="argparse words help otherwise in each version of Python")
def test_the_page_of_commands_is_up_to_date() -> None:
    """If not: ``python scripts/commands.py > docs/commands.md``."""
    command = [sys.executable, str(ROOT / "scripts" / "commands.py")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    page = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
    assert page == (ROOT / "docs" / "commands.md").read_text()


# ---- completion ------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(("line", "some", "none"), [
    ("megatron-elastic s", {"status", "scale"}, {"top"}),
    ("megatron-elastic fleet s", {"submit", "status", "simulate"}, {"run"}),
    ("megatron-elastic run --n", {"--nproc-per-node", "--nnodes", "--node-rank"}, {"--pp"}),
    ("megatron-elastic scale runs --", {"--pp", "--dp", "--tp"}, {"--node"}),
    ("megatron-elastic patch ", {"status", "apply", "revert"}, set()),
    ("megatron-elastic status REA", {"README.md"}, {"docs"}),
    ("megatron-elastic bench rec", {"recovery"}, {"overhead"}),
])  # fmt: skip
def test_bash_completes(line: str, some: set[str], none: set[str], completion: str) -> None:
    words = line.split(" ")
    script = f"""{completion}
        COMP_WORDS=({" ".join(word or "''" for word in words)}) COMP_CWORD={len(words) - 1}
        COMP_LINE='{line}' COMP_POINT={len(line)}
        _shtab_megatron_elastic megatron-elastic '{words[-1]}' '{words[-2]}'
        printf '%s\\n' "${{COMPREPLY[@]}}" """
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    found = {each.strip() for each in done.stdout.splitlines()}
    assert some <= found and not none & found, done.stdout + done.stderr


@pytest.fixture(scope="module")
def completion() -> str:
    from megatron_elastic import completion

    return completion.script("bash")


def test_every_shell_gets_something(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("bash", "zsh", "tcsh"):
        assert cli.main(["completion", shell]) == 0
        told = capsys.readouterr().out
        assert all(name in told for name in cli.COMMANDS if name != "chaos")
        assert bench.available()[0] in told


@pytest.mark.parametrize("command", [["run", "x.py"], ["emulate", "--model", "llama2-13b"], ["data", "prepare", "x"]])
def test_ctrl_c_ends_a_command_quietly(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    for where in ("cluster.launch.launcher.main", "emulation.command.main", "adaptor.dataset.prepare"):
        monkeypatch.setattr(f"megatron_elastic.{where}", interrupted)
    assert cli.main(command) == 130
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("command", [
    "completion bash", "--help", "plan --layout {layout} --event lose:rank=5 --json", "fleet status {fleet} --json",
    "plan --layout {layout} --event lose:rank=5", "fleet status {fleet}",
    "predict --layers 24 --hidden 2048 --heads 16 --seq 2048 --global-batch-size 256 --devices 8-64 --json",
])  # fmt: skip
def test_who_reads_no_further_is_told_nothing(command: str, tmp_path: Path) -> None:
    """As with ``| head``, whether it is printed at once or as the command ends."""
    units, stages = gpt_units(8, 4, tied=True, positions=True)
    layout, fleet = tmp_path / "layout.json", tmp_path / "fleet"
    layout.write_text(Layout.grid(tp=2, pp=4, dp=8, stage_units=stages, units=units, num_grains=64, num_slices=32,
                                  replicas=1).to_json())  # fmt: skip
    for number in range(1000):
        (fleet / "jobs" / f"job-{number}").mkdir(parents=True)
    words = [word.format(layout=layout, fleet=fleet) for word in command.split()]
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([sys.executable, "-m", "megatron_elastic.cli", *words], cwd=ROOT, stdout=write,
                              stderr=subprocess.PIPE, text=True, check=False)  # fmt: skip
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def _printing_to(output: int, words: list[str], encoding: str = "utf-8") -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "megatron_elastic.cli", *words], cwd=ROOT, stdout=output, check=False,
                          stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONIOENCODING": encoding})


@pytest.mark.parametrize("command", [["status"], ["status", "--json"], ["report"], ["--version"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_cannot_be_printed_is_said(
    unbuffered: str, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full, whether it is printed at once or as the command ends."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    words = command if command == ["--version"] else [*command, str(write_run(tmp_path / "run", [3.0]))]
    with open("/dev/full", "w") as full:
        done = _printing_to(full.fileno(), words)
    assert (done.returncode, done.stderr) == (1, "megatron-elastic: error: cannot print: No space left on device\n")


def test_who_has_closed_the_output_is_told_nothing(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", [3.0])
    done = subprocess.run(["bash", "-c", 'exec "$@" >&-', "-", sys.executable, "-m", "megatron_elastic.cli", "status",
                           str(run_dir)], cwd=ROOT, capture_output=True, text=True, check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_is_drawn_is_printed_with_the_characters_that_there_are(encoding: str, tmp_path: Path) -> None:
    run_dir, output = write_run(tmp_path / "run", [3.0, 2.0]), tmp_path / "output"
    with output.open("wb") as file:
        done = _printing_to(file.fileno(), ["report", str(run_dir)], encoding)
    assert (done.returncode, done.stderr) == (0, "")
    text = output.read_text(encoding)
    assert "3.000  #" in text and "2.000  #." in text and "\n        ^" in text


def test_names_that_are_no_text_are_printed_as_they_are(tmp_path: Path) -> None:
    run_dir, output = Path(os.fsdecode(bytes(tmp_path / "run") + b"\xff")), tmp_path / "output"
    write_run(run_dir, [3.0])
    with output.open("wb") as file:
        done = _printing_to(file.fileno(), ["report", str(run_dir)])
    assert done.returncode == 0, done.stderr
    assert bytes(run_dir) in output.read_bytes()


@pytest.mark.parametrize("error", [BrokenPipeError(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])
@pytest.mark.parametrize("code", [0, 3])
def test_a_job_that_has_ended_has_its_own_exit_code(code: int, error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads what the launcher prints is gone, or the disk is full: that ends no job, and so it fails none."""

    def fails() -> None:
        raise error

    monkeypatch.setattr("megatron_elastic.cluster.launch.launcher.main", lambda argv: code)
    with open(os.devnull, "w") as null:
        monkeypatch.setattr(sys, "stdout", Namespace(flush=fails, fileno=null.fileno))
        monkeypatch.setattr(cli, "_is_read", lambda: False)
        assert cli.main(["run", "x.py"]) == code


@pytest.mark.usefixtures("capfd")
def test_another_pipe_that_breaks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(argv: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(cli, "_main", breaks)
    with pytest.raises(BrokenPipeError):
        cli.main([])


def test_ctrl_c_ends_a_benchmark_quietly() -> None:
    done = subprocess.run([sys.executable, "-c", "import benchmarks.__main__; raise KeyboardInterrupt"], cwd=ROOT,
                          capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")  # of which a shell makes 130


def test_data_is_not_made_for_a_place_that_cannot_have_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("a text " * 100)
    (tmp_path / "file").touch()
    out = str(tmp_path / "file")
    assert cli.main(["data", "prepare", out, "--text", str(tmp_path / "text.txt"), "--vocab-size", "257"]) == 2
    err = capsys.readouterr().err
    assert f"error: cannot write to {out}: File exists; name a folder that can be written to" in err
    assert "tokenizer" not in err
