"""``megatron.training.yaml_arguments``: the file of ``--yaml-cfg``, as flags on the command line of the rank.

Megatron's own way with that file cannot be gone (core_v0.16.1). Whatever the file does not name is missing afterwards,
and some 600 names are read, of which Megatron's example has 200. ``account_for_embedding_in_pipeline_split`` is
asked for both outside of the sections and in one, but having it twice is an error. And ``pretrain_gpt.py`` makes a
configuration of the flags in each step, file or not. With flags in its place all of that is well.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.transformer import TransformerConfig

from megatron_elastic import argument_file
from megatron_elastic.adaptor import targets


def expanded(argv: Sequence[str]) -> list[str]:
    """A command line with what the file says in the place of ``--yaml-cfg``, and before everything else.

    What Megatron has no flag for is passed on as one, for its parser to complain about. Raises UsageError.
    """
    path, rest = argument_file.split(argv)
    if path is None:
        return rest
    parser: argparse.ArgumentParser = targets.FLAGS.find()(argparse.ArgumentParser(allow_abbrev=False))
    defaults = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    words: list[str] = []
    for name, value in argument_file.read(path).items():
        actions = [action for action in parser._actions if action.dest == name]
        if actions:
            words += _flag(actions, value)
        elif not argument_file.for_launcher(name) and defaults.get(name) != value:
            words += argument_file.flags(name, value)
    return [*words, *rest]


def _flag(actions: Sequence[argparse.Action], value: Any) -> Iterator[str]:
    """The flag among those of one name that gives it the value; none if it has it anyway."""
    for action in actions:
        option = action.option_strings[-1]
        if isinstance(action, argparse.BooleanOptionalAction):
            yield option if value is False else action.option_strings[0]
            return
        if action.nargs == 0:
            if value == action.const:
                yield option
                return
        elif action.nargs is None:
            yield f"{option}={value}"
            return
        elif value != []:
            yield option
            yield from map(str, value if isinstance(value, list) else str(value).split())
            return
    if value not in ([], actions[0].default):
        yield from argument_file.flags(actions[0].dest, value)
