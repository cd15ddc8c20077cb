"""Our flags from elsewhere than the command line: Megatron-LM's YAML file, and the environment."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from megatron_elastic import argument_file, support
from megatron_elastic.cluster.launch import launcher
from megatron_elastic.cluster.wire.certificate import self_signed
from megatron_elastic.config import ElasticConfig, UsageError

PEM = "all.pem"
EVERYTHING = {
    "elastic": True, "elastic_run_dir": "somewhere", "elastic_consistency": "fast", "elastic_slices": 3,
    "elastic_replicas": 2, "elastic_respawn": True, "elastic_spares": 1, "elastic_verify_every": 5,
    "elastic_profile": "profile.json", "elastic_emulate": "profile.json", "elastic_dvfs": "energy",
    "elastic_actuator": "quota", "elastic_device": "soft",
    "elastic_reduction": "host",
    "elastic_replay": "state", "elastic_background_mbps": 10.5, "elastic_inject": ["kill:rank=1,step=2,at=vote"],
    "elastic_start_timeout": 11, "elastic_suspect_timeout": 2, "elastic_heartbeat_timeout": 3,
    "elastic_hang_timeout": 7,
    "elastic_report_timeout": 40, "elastic_wait_timeout": 200, "elastic_schedule": "split",
    "elastic_placement": "v",
    "elastic_dataflow": "resize", "elastic_end_timeout": 30, "elastic_store": "etcd://localhost:2379",
    "elastic_tls_cert": PEM, "elastic_tls_key": PEM, "elastic_tls_ca": PEM, "elastic_redo": "step",
    "elastic_on_error": "stop", "elastic_slow": "evict", "elastic_log_mb": 7.5,
    "elastic_metrics_port": 9400, "elastic_log_format": "json", "elastic_trace": "10-12", "elastic_policy": "column",
}  # fmt: skip
"""A value that is not the default for each of our flags."""
TWO = ("--nproc-per-node", "2")
"""Of which one trains."""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / PEM).write_text(self_signed())  # tried out when the command is read
    power = {"idle_w": 10, "static_w": 20, "dynamic_w": 80}
    (tmp_path / "profile.json").write_text(json.dumps({"units": {}, "power": power}))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "script.py"
    path.write_text("print()\n")
    return path


def assert_everything(config: ElasticConfig) -> None:
    for field in fields(ElasticConfig):
        given = EVERYTHING["elastic" if field.name == "elastic" else f"elastic_{field.name}"]
        value = getattr(config, field.name)
        assert value != getattr(ElasticConfig(), field.name), field.name
        if field.name not in ("run_dir", "inject"):
            assert (str(value) if isinstance(value, Path) else value) == given


def test_all_flags_from_the_environment(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [word for name, value in EVERYTHING.items() for word in argument_file.flags(name, value)]
    monkeypatch.setenv(launcher.ARGUMENTS_VARIABLE, shlex.join(words))
    assert_everything(launcher._read_command([*TWO, str(script)]).config)
    config = launcher._read_command([*TWO, str(script), "--elastic-replicas", "4"]).config
    assert config.replicas == 4  # the command line wins


def test_all_flags_from_a_file(script: Path, tmp_path: Path) -> None:
    path = write(tmp_path, *(f"{name}: {value}" for name, value in EVERYTHING.items()), "exit_signal_handler: true")
    command = launcher._read_command([*TWO, str(script), "--yaml-cfg", path, "--elastic-slices=7"])
    assert command.config.slices == 7  # the command line wins
    assert {"--elastic", "--exit-signal-handler", "--yaml-cfg"} <= set(command.program.arguments)
    assert_everything(launcher._read_command([*TWO, str(script), f"--yaml-cfg={path}"]).config)


@pytest.mark.parametrize("word", ["off", "Off", "'off'", "no"])
def test_off_is_a_word(word: str, script: Path, tmp_path: Path) -> None:
    """Of which YAML makes False."""
    path = write(tmp_path, f"elastic_slow: {word}", "elastic_respawn: off")
    command = launcher._read_command([str(script), "--yaml-cfg", path])
    assert command.config.slow == "off"
    assert not command.config.respawn


def test_sections_are_flags(tmp_path: Path) -> None:
    """With the names that Megatron's flags have."""
    path = write(
        tmp_path, "language_model:", "  num_layers: 4", "  layernorm_epsilon: 1.e-6", "  activation_func: swiglu",
        "  num_query_groups: null", "  num_moe_experts: 8", "model_parallel:", "  bf16: True", "lr: 1e-3",
    )  # fmt: skip
    values = {"num_layers": 4, "norm_epsilon": 1e-6, "swiglu": True, "num_experts": 8, "bf16": True, "lr": "1e-3"}
    assert argument_file.read(path) == values


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["model_parallel:", "  tp_comm_overlap: True"], "--tp-comm-overlap does not work with --elastic"),
        (["language_model:", "  moe_enable_deepep: True"], "--moe-enable-deepep does not work with --elastic"),
        (["elastic_replica: 2"], "elastic_replica is no argument: docs/flags.md lists them"),
        (["bf16: True", "model_parallel:", "  bf16: True"], "bf16 is there twice, once under model_parallel"),
        (["model_parallel: 3"], "model_parallel must have names and values under it"),
        (["model_parallel:", "  3: 4"], "model_parallel must have names and values under it"),
        (["elastic_slow: on"], "elastic_slow takes a value, and YAML reads on, off, yes and no as true and false: "
         "write it in quotes, or leave it out"),
        (["elastic_profile: off"], "elastic_profile takes a value, and YAML reads"),
        (["elastic_run_dir: no"], "elastic_run_dir takes a value, and YAML reads"),
        (["elastic_inject: [no]"], "elastic_inject takes a value, and YAML reads"),
        (["elastic:", "  run_dir: x"], "elastic has names and values under it, as only language_model and model_p"),
        (["- 3"], "expected names with values"),
        (["a: [3"], "is no YAML file"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_what_a_file_cannot_say(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        support.check_arguments(["--yaml-cfg", write(tmp_path, *lines), "--bf16"])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_line_has_the_last_word(tmp_path: Path) -> None:
    path = write(tmp_path, "num_distributed_optimizer_instances: 2")
    support.check_arguments(["--yaml-cfg", path, "--num-distributed-optimizer-instances", "1"])
    with pytest.raises(UsageError, match="--num-distributed-optimizer-instances 2"):
        support.check_arguments(["--yaml-cfg", path])


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere: No such file"):
        argument_file.read(str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="expected one argument"):
        argument_file.split(["--yaml-cfg"])
    assert argument_file.split(["--a", "3", "--b"]) == (None, ["--a", "3", "--b"])


def write(folder: Path, *lines: str) -> str:
    path = folder / "arguments.yaml"
    path.write_text("\n".join((*lines, "")))
    return str(path)
