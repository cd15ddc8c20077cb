"""Doctor: ``megatron-elastic doctor`` compares what the adaptors need of Megatron with the sources of a checkout.

And what they need of Transformer Engine with its Python. Sources are read, never run, so a checkout for another Python,
or without what it depends on, can be looked at too. A job asks as well, where the release is one that nobody has tried.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_elastic import usage
from megatron_elastic.adaptor import releases
from megatron_elastic.adaptor.releases import SUPPORTED
from megatron_elastic.adaptor.targets import TARGETS, Target
from megatron_elastic.config import UsageError
from megatron_elastic.patching import Checkout

_EXAMPLES = """\
examples:
  megatron-elastic doctor ~/Megatron-LM            every change and call of the
                                                   adaptors, and whether it fits
  megatron-elastic doctor ~/Megatron-LM --misfits  only what does not
  megatron-elastic doctor ~/Megatron-LM --transformer-engine DIR
                                                   with a Transformer Engine
                                                   that is not installed

The exit code is 0 if everything fits.
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a checkout has in the place of a target, as its release has it; ``problem`` is empty if it fits."""

    target: Target
    problem: str


def examine(root: Path) -> list[Finding]:
    """Look every target of Megatron's up in the Megatron-LM source tree at ``root``, but those that its release does
    not have."""
    sources, release = _Sources(root), releases.release_of(Checkout.at(root).tag)
    here = [target.in_release(release, sources.problem) for target in TARGETS if target.when != "engine"]
    return [Finding(target, sources.problem(target)) for target in here if target is not None]


def admit(checkout: bool, cpu: bool) -> str:
    """What is to be said of the Megatron that is installed before a job trains with it: nothing of a known release.

    One that is not known is tried if everything fits that will be needed: ``checkout``, by its scripts; ``cpu``,
    without a GPU. Raises UsageError with what does not.
    """
    here = releases.installed()
    if here is None or releases.known(releases.running()):
        return ""
    whens = {"always", *(["checkout"] if checkout else []), *(["cpu"] if cpu else [])}
    misfits = [finding for finding in examine(here.root) if finding.problem and finding.target.when in whens]
    what = f"Megatron {here.tag.removeprefix('core_v')} at {here.root} is none of {SUPPORTED}"
    if misfits:
        raise UsageError(f"{what}, and does not fit; use one of these:\n" + "\n".join(map(_line, misfits)))
    return f"{what}: it is tried, since everything that is changed and called there fits (megatron-elastic doctor)"


def examine_engine(root: Path) -> list[Finding]:
    """Look every target of Transformer Engine's up in the folder that has its package."""
    sources = _Sources(root)
    return [Finding(target, sources.problem(target)) for target in TARGETS if target.when == "engine"]


def installed_engine() -> Path | None:
    """The folder that has the package of the Transformer Engine that is installed, if one is. Imports nothing of it."""
    spec = importlib.util.find_spec("transformer_engine")
    return None if spec is None or spec.origin is None else Path(spec.origin).parents[1]


class _Sources:
    """The parsed modules of a source tree."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._modules: dict[str, ast.Module | None] = {}

    def problem(self, target: Target) -> str:
        """Why the target does not fit; empty if it does."""
        if self._module(target.module) is None:
            return "there is no such module"
        *path, last = target.name.split(".")
        scope: ast.stmt | ast.Module | None = self._module(target.module)
        for part in path:
            scope = _definition(scope, part)
        found = _definition(scope, last)
        if isinstance(found, ast.ImportFrom):
            found = self._follow(target.module, found, last)
        if found is None:
            return "it does not exist"
        if target.parameters is None:
            return ""
        if not isinstance(found, ast.FunctionDef):
            return "it is no function"
        return target.mismatch(_parameters(found))

    def _follow(self, module: str, statement: ast.ImportFrom, name: str) -> ast.stmt | None:
        """The definition of what a module imports."""
        package = module.split(".")[: -statement.level] if statement.level else []
        source = ".".join([*package, *([statement.module] if statement.module else [])])
        original = next(alias.name for alias in statement.names if (alias.asname or alias.name) == name)
        found = _definition(self._module(source), original)
        return self._follow(source, found, original) if isinstance(found, ast.ImportFrom) else found

    def _module(self, name: str) -> ast.Module | None:
        if name not in self._modules:
            path = self._root.joinpath(*name.split("."))
            files = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
            self._modules[name] = ast.parse(files[0].read_bytes(), filename=str(files[0])) if files else None
        return self._modules[name]


def _definition(scope: ast.stmt | ast.Module | None, name: str) -> ast.stmt | None:
    """What defines ``name`` in a module or class, also below an ``if`` or ``try``; None if nothing does."""
    if not isinstance(scope, ast.Module | ast.ClassDef):
        return None
    for node in _statements(scope.body):
        match node:
            case ast.FunctionDef(name=found) | ast.ClassDef(name=found) if found == name:
                return node
            case ast.Assign(targets=targets) if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                return node
            case ast.AnnAssign(target=ast.Name(id=found)) if found == name:
                return node
            case ast.ImportFrom(names=names) if any((alias.asname or alias.name) == name for alias in names):
                return node
    return None


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def _parameters(function: ast.FunctionDef) -> tuple[str, ...]:
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    names += [argument.arg for argument in (given.vararg, *given.kwonlyargs, given.kwarg) if argument is not None]
    return tuple(names)


def make_parser() -> argparse.ArgumentParser:
    """The flags of ``megatron-elastic doctor``."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic doctor", formatter_class=usage.Formatter, epilog=_EXAMPLES,
        description="List everything in Megatron that the adaptors change or call, and whether it fits a checkout; and "
                    "in Transformer Engine.",
    )
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="folder of a Megatron-LM source tree")
    parser.add_argument("--misfits", action="store_true", help="list only what does not fit")
    parser.add_argument("--transformer-engine", type=Path, metavar="DIR",
                        help="folder that has the Python package transformer_engine, or an unpacked wheel of it "
                             "(default: the one that is installed, if any)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """``megatron-elastic doctor``. Returns the exit code: 0 everything fits, 1 something does not, 2 bad usage."""
    options = make_parser().parse_args(argv)
    try:
        checkout = Checkout.at(options.checkout)
        engine = options.transformer_engine or installed_engine()
        findings = examine(options.checkout) + ([] if engine is None else _of_engine(engine))
    except (UsageError, OSError, SyntaxError) as error:
        print(f"megatron-elastic: error: {error}", file=sys.stderr)
        return 1
    print(f"{checkout.root}: Megatron-LM {checkout.tag}; the adaptors are written for {SUPPORTED}")
    for when, title in (("always", "with --elastic"), ("checkout", "with --elastic, in a checkout's scripts"),
                        ("cpu", "on a machine without a GPU, with --elastic or without"),
                        ("engine", f"with --elastic and Transformer Engine {_version(engine)}")):
        chosen = [f for f in findings if f.target.when == when and (f.problem or not options.misfits)]
        if chosen:
            print(f"{title}:")
        for finding in chosen:
            print(_line(finding))
    if engine is None:
        print("Transformer Engine is not installed; --transformer-engine DIR looks at one elsewhere")
    misfits = [finding.target for finding in findings if finding.problem]
    print(f"{len(findings) - len(misfits)} of {len(findings)} fit: {_conclusion(misfits)}")
    return 1 if misfits else 0


def _conclusion(misfits: Sequence[Target]) -> str:
    """What the targets that do not fit mean for who wants to use the checkout."""
    lost = [
        what
        for what, whens in (("training with --elastic", ("always", "checkout")), ("training without a GPU", ("cpu",)),
                            ("training with --elastic and this Transformer Engine", ("engine",)))
        if any(target.when in whens for target in misfits)
    ]
    return f"{' and '.join(lost)} will not work with this checkout" if lost else "this checkout can be used"


def _of_engine(folder: Path) -> list[Finding]:
    if not (folder / "transformer_engine").is_dir():
        raise UsageError(f"--transformer-engine {folder}: there is no package transformer_engine in it")
    return examine_engine(folder)


def _version(engine: Path | None) -> str:
    """What the metadata beside the package says."""
    found = [] if engine is None else sorted(engine.glob("transformer_engine-*.dist-info"))
    return found[0].name.removesuffix(".dist-info").partition("-")[2] if found else "of no known version"


def _line(finding: Finding) -> str:
    target = finding.target
    line = f"  {'NO ' if finding.problem else 'ok '} {target.use:8s} {target.module}: {target.name}\n"
    return line + f"               {finding.problem or target.why}"
