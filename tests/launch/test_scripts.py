"""Launch scripts: valid shell, free of what shellcheck finds, and they pass on what they are given."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import yaml

from megatron_elastic.cluster.launch import launcher
from megatron_elastic.config import UsageError

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for path in (ROOT / "scripts").iterdir() if path.suffix in (".sh", ".sbatch"))

SHELLCHECK = shutil.which("shellcheck", path=os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"])))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_valid_shell(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck(script: Path) -> None:
    assert SHELLCHECK is not None
    done = subprocess.run([SHELLCHECK, "--shell=bash", "--external-sources", str(script)], cwd=ROOT,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def launched(script: str, *arguments: str, folder: Path, **env: str) -> list[str]:
    """What a script starts ``megatron-elastic`` with; a stand-in for it writes its arguments down."""
    stand_in = folder / "megatron-elastic"
    stand_in.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    stand_in.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(["bash", str(ROOT / "scripts" / script), *arguments], capture_output=True, text=True,
                          check=True, env={"PATH": path, **env})
    return done.stdout.splitlines()


def test_local(tmp_path: Path) -> None:
    program = tmp_path / "pretrain_gpt.py"
    program.touch()
    given = launched("launch_local.sh", str(program), "--bf16", folder=tmp_path, RANKS="4", RUN_DIR="runs/a b")
    assert given == ["run", "--standalone", "--nproc-per-node", "4", str(program), "--elastic", "--elastic-run-dir",
                     "runs/a b", "--bf16"]
    usage = subprocess.run(["bash", str(ROOT / "scripts" / "launch_local.sh"), "nothing.py"], capture_output=True,
                           text=True, check=False)
    assert usage.returncode == 2
    assert usage.stderr.startswith("usage: ")


def test_flags_that_are_given_win(tmp_path: Path) -> None:
    """A launch script's own flags are before them, or not there at all."""
    program = tmp_path / "pretrain_gpt.py"
    program.touch()
    for given in (("--elastic-run-dir", "runs/z", "--elastic-replicas=2"), ("--elastic-run-dir=runs/z",)):
        assert launched("launch_local.sh", str(program), *given, folder=tmp_path)[-len(given):] == list(given)
        compat = launched("launch_torchrun_compat.sh", str(program), *given, folder=tmp_path)
        assert compat == ["run", str(program), *given, "--elastic"]


@pytest.mark.parametrize("given", ["--bf16 --elastic-run-dir runs/z", "--elastic-run-dir=runs/z --elastic-replicas 2"])
def test_flags_of_the_environment_win(given: str, tmp_path: Path) -> None:
    """The launcher puts them before all others, so a launch script may not have them."""
    program = tmp_path / "pretrain_gpt.py"
    program.touch()
    for script in ("launch_local.sh", "launch_torchrun_compat.sh"):
        words = launched(script, str(program), folder=tmp_path, MEGATRON_ELASTIC_ARGS=given, RUN_DIR="r")
        assert [word for word in words if word.startswith("--elastic")] == ["--elastic"]


def test_without_a_name_records_go_where_the_launcher_says(tmp_path: Path) -> None:
    """Which may be what a file of ``--yaml-cfg`` has."""
    program = tmp_path / "pretrain_gpt.py"
    program.touch()
    for script in ("launch_local.sh", "launch_torchrun_compat.sh"):
        assert launched(script, str(program), folder=tmp_path)[-2:] == [str(program), "--elastic"]


def test_a_script_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no SCRIPT"):
        launcher.check(launched("launch_torchrun_compat.sh", "--standalone", folder=tmp_path, RUN_DIR="r")[1:])


@pytest.mark.parametrize("of_the_environment", [False, True])
def test_slurm_keeps_records_of_each_time(of_the_environment: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has to find them, so it refuses the flag, and names the variable."""
    for given in (("--elastic-run-dir", "runs/z"), ("--elastic-run-dir=runs/z",)):
        if of_the_environment:
            monkeypatch.setenv(launcher.ARGUMENTS_VARIABLE, " ".join(given))
        words = () if of_the_environment else given
        done = subprocess.run(["bash", str(ROOT / "scripts" / "launch_slurm.sbatch"), __file__, *words],
                              capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "set RUNS to a folder for them" in done.stderr


def test_torchrun_compat(tmp_path: Path) -> None:
    """torchrun's variables come first, so its command line wins; ours come last, so they are the script's."""
    given = launched("launch_torchrun_compat.sh", "--nproc-per-node", "8", "pretrain_gpt.py", "--bf16", folder=tmp_path,
                     PET_NNODES="2", PET_NPROC_PER_NODE="4", PET_STANDALONE="1", PET_MODULE="0", PET_LOG_DIR="a b",
                     PET_ROLE="", RUN_DIR="r")
    assert given == ["run", "--log-dir", "a b", "--nnodes", "2", "--nproc-per-node", "4", "--standalone",
                     "--nproc-per-node", "8", "pretrain_gpt.py", "--bf16", "--elastic", "--elastic-run-dir=r"]
    assert launched("launch_torchrun_compat.sh", "x.py", folder=tmp_path, ELASTIC="0") == ["run", "x.py"]


@pytest.mark.parametrize(
    ("code", "steps", "ended", "before", "said"),
    [
        (0, 100, 100, None, ""),
        (137, 100, 100, None, ""),
        (0, 0, 100, 100, ""),
        (0, 40, 40, None, "stopped at step 40 of 100 (exit code 0): queued again"),
        (1, 40, None, None, "stopped at step 40 of 100 (exit code 1): queued again"),
        (1, 100, None, None, "stopped at step 100 of 100 (exit code 1): queued again"),
        (2, 0, None, None, "the flags are wrong: not queued again"),
        (1, 0, None, None, "stopped at step 0 of 100 (exit code 1): queued again"),
        (1, 0, None, 0, "no step was done, this time and the time before: not queued again"),
        (1, 0, None, 30, "stopped at step 0 of 100 (exit code 1): queued again"),
    ],
)
def test_slurm_queues_again_what_a_restart_can_mend(
    code: int, steps: int, ended: int | None, before: int | None, said: str, tmp_path: Path
) -> None:
    """With stand-ins for Slurm's commands, and for the job: it exits with a code after some steps, and has ended
    training, or failed.
    """
    queue(code, steps, ended, before, said, tmp_path, "--train-iters", "100")


@pytest.mark.parametrize("given", ["--train-iters=100", "--train-samples=1600", "@of_a_file"])
def test_slurm_queues_again_however_it_is_said_how_long_to_train(given: str, tmp_path: Path) -> None:
    said = "stopped at step 40 of 100 (exit code 0): queued again"
    queue(0, 40, 40, None, said, tmp_path, given, started=True)


def test_slurm_knows_before_a_job_begins_how_long_it_is_to_train(tmp_path: Path) -> None:
    queue(1, 0, None, None, "stopped at step 0 of 100 (exit code 1): queued again", tmp_path, "--train-iters=100")


def queue(
    code: int, steps: int, ended: int | None, before: int | None, said: str, tmp_path: Path, *flags: str,
    started: bool = False,
) -> None:  # fmt: skip
    end = ("failed", "no") if ended is None else ("finished", f"training finished at step {ended}")
    begin = """{"kind": "started", "step": 0, "train_iters": 100}\n""" if started else ""
    attempt, runs = "0" if before is None else "1", tmp_path / "runs"
    for name, text in {
        "scontrol": 'if [ "$1" = show ]; then echo host0; else echo "$@" >> "$0.asked"; fi',
        "srun": 'shift 2; SLURM_NODEID=0 exec "$@"',
        "megatron-elastic": f"mkdir -p {runs}/{attempt}; "
        + (f"""echo '{{"step": {steps}, "loss": 1.0}}' > {runs}/{attempt}/metrics.jsonl; """ if steps else "")
        + f"""echo '{begin}{{"kind": "{end[0]}", "reason": "{end[1]}"}}' > {runs}/{attempt}/events.jsonl; """
        + f"exit {code}",
    }.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    if before is not None:
        (runs / "0").mkdir(parents=True)
        (runs / "0" / "metrics.jsonl").write_text(f'{{"step": {before}}}\n' if before else "")
    script = tmp_path / "pretrain_gpt.py"
    script.touch()
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "launch_slurm.sbatch"), str(script), *flags],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_NAME": "job", "SLURM_JOB_ID": "7",
             "SLURM_JOB_NODELIST": "host0", "SLURM_NNODES": "1", "SLURM_RESTART_COUNT": attempt, "RUNS": str(runs)},
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (code if said else 0, said), done.stderr
    assert (tmp_path / "scontrol.asked").exists() == said.endswith("): queued again")


def test_an_interpreter_that_is_named_is_not_replaced_by_another(tmp_path: Path) -> None:
    """``PYTHON`` is too old, or is not there."""
    (tmp_path / "scripts").mkdir()
    for name in ("pyproject.toml", "scripts/setup.sh", "scripts/constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    other = tmp_path / "python3.11"
    other.write_text('#!/bin/sh\n[ "$1" = -c ] || echo "$0 is taken" >&2\n')
    other.chmod(0o755)
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHON": "/no/python"}
    done = subprocess.run(["bash", "-euo", "pipefail", "scripts/setup.sh"], cwd=tmp_path, capture_output=True,
                          text=True, check=False, env=env)
    assert done.returncode == 1
    assert "PYTHON=/no/python is no Python 3.11 or newer with venv" in done.stderr and "is taken" not in done.stderr


def pod(tmp_path: Path, role: str, index: int = 0, agent: str = 'echo "$5"') -> subprocess.Popen[str]:
    """What a pod of the JobSet does, with a stand-in for the agent, which says which node it is by itself."""
    _, jobset = (ROOT / "scripts" / "launch_k8s.yaml").read_text().split("spec:\n", 1)
    sets = yaml.safe_load(f"spec:\n{jobset}")["spec"]["replicatedJobs"]
    (container,) = sets[0]["template"]["spec"]["template"]["spec"]["containers"]
    (script,) = container["args"]
    path = tmp_path / "megatron-elastic"
    path.write_text(f"#!/usr/bin/env bash\n{agent}\n")
    path.chmod(0o755)
    return subprocess.Popen([*container["command"], script.replace("/shared", str(tmp_path / "shared"))],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "ROLE": role, "ATTEMPT": "0",
                               "JOB_COMPLETION_INDEX": str(index), "NODES": "4", "MEGATRON_ARGUMENTS": ""})  # fmt: skip


def test_pods_take_the_first_free_number(tmp_path: Path) -> None:
    numbers = [pod(tmp_path, "worker", index).communicate(timeout=60)[0].strip() for index in (0, 2, 0, 0)]
    assert [pod(tmp_path, "lead").communicate(timeout=60)[0].strip(), *numbers] == ["0", "1", "3", "5", "9"]


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_pod_ends_as_its_agent_does(code: int, tmp_path: Path) -> None:
    ended = pod(tmp_path, "worker", agent=f"exit {code}")
    ended.communicate(timeout=60)
    assert ended.returncode == code


@pytest.mark.parametrize(("code", "expected"), [(0, 143), (143, 143), (1, 1)], ids=["left", "ended", "failed"])
def test_a_pod_that_has_to_go_has_not_finished(code: int, expected: int, tmp_path: Path) -> None:
    """Kubernetes starts another in its place, though its agent has done well: the ranks have left."""
    agent = f"trap 'kill $!; exit {code}' TERM\nsleep 60 &\necho ready\nwait"
    gone = pod(tmp_path, "worker", agent=agent)
    assert gone.stdout is not None
    assert gone.stdout.readline() == "ready\n"
    gone.terminate()
    gone.communicate(timeout=60)
    assert gone.returncode == expected


def test_a_pod_that_cannot_make_its_folder_says_so(tmp_path: Path) -> None:
    """It does not look for a free number for ever: the shared disk is full, or nobody may write there."""
    (tmp_path / "mkdir").write_text(
        '#!/usr/bin/env bash\n[ "$1" = -p ] || { echo "mkdir: No space left on device" >&2; exit 1; }\n'
    )
    (tmp_path / "mkdir").chmod(0o755)
    done = pod(tmp_path, "lead")
    errors = done.communicate(timeout=60)[1]
    assert done.returncode == 1 and "No space left on device" in errors
