"""Lacking: what modules of Megatron import that is not here, put in before they are imported, and for them alone.

``triton`` is for GPUs; Megatron 0.18 and later import it wherever experts may be, for kernels that nobody calls without
one. ``typing.override`` came with Python 3.12, which Megatron asks for from 0.17 on; ``typing_extensions`` has it, too.
"""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_MODULES = {
    "megatron.core.transformer.moe.paged_stash": "triton",  # 0.18
    "megatron.core.transformer.moe.ops.paged_stash": "triton",  # 0.19
    "megatron.training.models.hybrid": "typing",
    "megatron.training.models.gpt": "typing",
}
"""What imports what may be lacking."""


def provide() -> None:
    """Let these modules be imported from now on, whatever is lacking. Idempotent."""
    absent = dict(_absent())
    if absent and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder({module: absent for module, name in _MODULES.items() if name in absent}))


def _absent() -> Iterator[tuple[str, types.ModuleType]]:
    if importlib.util.find_spec("triton") is None:
        triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
        vars(triton).update(language=language, jit=lambda kernel: kernel)
        vars(language).update(constexpr=object)
        yield "triton", triton
        yield "triton.language", language
    if sys.version_info < (3, 12):
        import typing_extensions

        yield "typing", typing_extensions


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules where they are, and gives each what it lacks."""

    def __init__(self, modules: Mapping[str, Mapping[str, types.ModuleType]]) -> None:
        self._modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """In place of what finds a file in ``path``."""
        if fullname not in self._modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path, self._modules[fullname])
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, given: Mapping[str, types.ModuleType]) -> None:
        super().__init__(fullname, path)
        self._given = given

    def exec_module(self, module: types.ModuleType) -> None:
        """Run it with an ``import`` of its own, so that nobody else finds what it is given."""
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": _importing(self._given)}
        super().exec_module(module)


def _importing(given: Mapping[str, types.ModuleType]) -> Callable[..., Any]:
    def find(
        name: str, globals: Mapping[str, object] | None = None, locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (), level: int = 0,
    ) -> Any:  # fmt: skip
        if level == 0 and name in given:
            return given[name if fromlist else name.partition(".")[0]]
        return builtins.__import__(name, globals, locals, fromlist or (), level)

    return find
