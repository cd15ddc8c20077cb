"""Script: what a job is to run is looked at before anything starts: whether it is there, and is given what it takes."""

from __future__ import annotations

import ast
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from megatron_elastic import support
from megatron_elastic.cluster.program import Program
from megatron_elastic.config import ElasticConfig, UsageError

_IMPORTED = ("pydantic", "regex", "six")
"""What ``megatron.training`` imports of what neither torch nor megatron-core brings along."""


def check(program: Program, config: ElasticConfig, world_size: int | None) -> None:
    """Find the script, and let its ``check_arguments(argv, world_size)`` look at the arguments if it has one.

    ``world_size``: of the ranks that train when the job begins; None: it has begun, and they were looked at then.
    Raises UsageError.
    """
    if not program.is_command:
        path = _module_file(program) if program.is_module else Path(program.target)
        if not _is_file(path):
            where = f" (looked for from {Path.cwd()})" if not path.is_absolute() else ""
            fix = "give its path, or -m and a module's name"
            raise UsageError(f"there is no script {path}{where}: "
                             f"{'it is a directory; name a file in it' if path.is_dir() else fix}")
        if path.suffix in ("", ".py"):
            _check_file(program, config, path, world_size)
    if config.elastic and importlib.util.find_spec("ucxx") is None:
        raise UsageError("--elastic needs ucxx, which is not installed: pip install 'ucxx-cu13==0.52.*' "
                         "(beside a torch for CUDA 12: ucxx-cu12)")


def _module_file(program: Program) -> Path:
    """The file that Python would run of a module; no package is imported for it. Raises UsageError."""
    missing = UsageError(f"there is no module {program.target}; -m takes a module's name, with dots, as Python finds "
                         f"it from {program.directory}")
    where: Sequence[str] | None = [program.directory, *sys.path]
    spec = None
    for name in program.target.split("."):
        spec = None if where is None else PathFinder.find_spec(name, where)
        if spec is None:
            raise missing
        where = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    if where is not None and (spec := PathFinder.find_spec("__main__", where)) is None:
        raise UsageError(f"{program.target} is a package without a __main__ module, so it cannot be run with -m; name "
                         "a module of it")
    if spec is None or spec.origin is None:
        raise missing
    return Path(spec.origin)


def _is_file(path: Path) -> bool:
    """Raises UsageError where that cannot be seen."""
    try:
        return path.is_file()
    except OSError as error:
        raise _unreadable(path, error) from None


def _read(path: Path) -> bytes:
    """Raises UsageError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot read {path}: {error.strerror}")


def _check_file(program: Program, config: ElasticConfig, path: Path, world_size: int | None) -> None:
    folder = path.resolve().parent
    if config.elastic and (folder / "megatron" / "training").is_dir():
        _check_checkout(path.resolve(), program.arguments)
    if world_size is not None and _defines_check(path):
        sys.path.insert(0, program.directory)
        try:
            runpy.run_path(str(path), run_name="__preflight__")["check_arguments"](program.arguments, world_size)
        finally:
            sys.path.pop(0)


def _check_checkout(path: Path, arguments: Sequence[str]) -> None:
    """Check what can be checked of a Megatron-LM script without Megatron: that it is patched, its flags, and that there
    is what it imports.
    """
    if b"megatron_elastic" not in _read(path):
        raise UsageError(f"{path} does not know --elastic; let it: megatron-elastic patch apply {path.parent}")
    support.check_arguments(arguments)
    if path.name == "pretrain_gpt.py":  # another script may have data of its own
        support.check_data(arguments)
    if missing := [name for name in _IMPORTED if importlib.util.find_spec(name) is None]:
        raise UsageError(f"{path} imports what is not installed: pip install {' '.join(missing)}")


def _defines_check(path: Path) -> bool:
    try:
        tree = ast.parse(_read(path), filename=str(path))
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
