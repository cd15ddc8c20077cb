"""Argument file: Megatron-LM's ``--yaml-cfg``, as flags.

The file has the names of Megatron's arguments and, in sections, the fields of its ``TransformerConfig``. What it says
is put before the command line, which so has the last word. The launcher does that with what it acts upon itself, and
each rank with the rest, since Megatron's parser knows how its flags are written (``adaptor.script.yaml_arguments``).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from megatron_elastic.config import UsageError, add_elastic_arguments

_SECTIONS = ("language_model", "model_parallel")
_RENAMED = {
    "bias_activation_fusion": "bias_gelu_fusion",
    "fp8_param": "fp8_param_gather",
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "num_moe_experts": "num_experts",
}
"""Fields and the arguments that they are made of, where the names differ."""
_CHOSEN = {
    ("activation_func", "gelu"): {},
    ("activation_func", "swiglu"): {"swiglu": True},
    ("activation_func", "squaredrelu"): {"squared_relu": True},
    ("init_method", "xavier_uniform"): {"init_method_xavier_uniform": True},
    ("persist_layer_norm", False): {"no_persist_layer_norm": True},
    ("persist_layer_norm", True): {},
}
"""The same for some values."""


def split(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The file that a command line names, if it does; and the rest of the line. Raises UsageError."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--yaml-cfg")
    try:
        given, rest = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise UsageError(str(error)) from None
    return given.yaml_cfg, rest


def read(path: str) -> dict[str, Any]:
    """The arguments of a file by name; those that are null are left out. Raises UsageError."""
    content = _content(path)
    values: dict[str, Any] = {}
    for section in (None, *_SECTIONS):
        for name, value in content.items() if section is None else _inside(content, section, path):
            if (section is None and name in _SECTIONS) or value is None:
                continue
            if isinstance(value, dict):
                raise UsageError(f"--yaml-cfg {path}: {name} has names and values under it, as only "
                                 f"{' and '.join(_SECTIONS)} have: give it a value")
            if name in values:
                raise UsageError(f"--yaml-cfg {path}: {name} is there twice, once under {section}: take one out")
            values[name] = value
    ours = {action.dest: action for action in add_elastic_arguments(argparse.ArgumentParser(add_help=False))._actions}
    for name in [name for name in values if name.startswith("elastic")]:
        if name not in ours:
            raise UsageError(f"--yaml-cfg {path}: {name} is no argument: docs/flags.md lists them")
        values[name] = _as_written(ours[name], values[name], path)
    return {name: value for given in values.items() for name, value in _as_arguments(*given).items()}


def for_launcher(name: str) -> bool:
    """Whether the launcher acts upon an argument, and so has put it on the command line of the ranks."""
    return name.startswith(("elastic", "exit_signal", "wandb_")) or name == "tensorboard_dir"


def launcher_flags(argv: Sequence[str]) -> list[str]:
    """Of the file that ``argv`` names, what the launcher acts upon, as flags."""
    path = split(argv)[0]
    values = {} if path is None else read(path)
    return [word for name, value in values.items() if for_launcher(name) for word in flags(name, value)]


def flags(name: str, value: Any) -> Iterator[str]:
    """An argument as flags: one for each value of a list, none for False."""
    flag = "--" + name.replace("_", "-")
    for each in value if isinstance(value, list) else [value]:
        if each is True:
            yield flag
        elif each is not False:
            yield f"{flag}={each}"


def _as_written(action: argparse.Action, value: Any, path: str) -> Any:
    """The value of one of our flags, with words where YAML has made True or False of them. Raises UsageError."""
    if isinstance(value, list):
        return [_as_written(action, each, path) for each in value]
    if not isinstance(value, bool) or action.nargs == 0:
        return value
    word = "on" if value else "off"
    if word in (action.choices or ()):
        return word
    raise UsageError(f"--yaml-cfg {path}: {action.dest} takes a value, and YAML reads on, off, yes and no as true and "
                     "false: write it in quotes, or leave it out")


def _as_arguments(name: str, value: Any) -> Mapping[str, Any]:
    if isinstance(value, str | bool) and (name, value) in _CHOSEN:
        return _CHOSEN[name, value]
    return {_RENAMED.get(name, name): value}


def _content(path: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--yaml-cfg {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--yaml-cfg {path} is no YAML file: {' '.join(str(error).split())}") from None
    if not _has_names(content):
        raise UsageError(f"--yaml-cfg {path}: expected names with values, as in examples/gpt3/gpt_config.yaml of "
                         "Megatron-LM")
    return content


def _has_names(content: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(content, dict) and all(isinstance(name, str) for name in content)


def _inside(content: Mapping[str, Any], section: str, path: str) -> Iterator[tuple[str, Any]]:
    inside = content.get(section) or {}
    if not _has_names(inside):
        raise UsageError(f"--yaml-cfg {path}: {section} must have names and values under it")
    yield from inside.items()
