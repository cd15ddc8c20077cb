"""Weights and Biases: what is written down, for that service, where the script's ``--wandb-project`` asks for it.

Megatron's run there is the last rank's, which may be lost. The coordinator begins one of its own in the same project,
in a group with Megatron's name: figures of steps and recoveries by part as curves, events as lines of its log.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_elastic.cluster.recording.curves import Curves, Point
from megatron_elastic.cluster.recording.recorder import GivenUp

_ARGUMENTS = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
for _name in ("project", "entity", "exp-name", "save-dir"):
    _ARGUMENTS.add_argument(f"--wandb-{_name}", default="")


@dataclass(frozen=True, slots=True)
class Project:
    """What Megatron-LM's flags say; empty where they do not."""

    project: str
    entity: str
    name: str
    folder: str
    """Where files are kept until they are sent."""


def project_of(arguments: Sequence[str], run_dir: Path, note: Callable[[str], None]) -> Project | None:
    """What a script is told to write for; None if it is not. If wandb is not installed ``note`` is told so."""
    try:
        o = _ARGUMENTS.parse_known_args(list(arguments))[0]
    except argparse.ArgumentError:
        return None  # Megatron's parser will say what is wrong
    if not o.wandb_project:
        return None
    if importlib.util.find_spec("wandb") is None:
        note("--wandb-project: wandb is not installed where the launcher runs, so that it gets no figures of elastic "
             "training: pip install 'megatron-elastic[wandb]'")
        return None
    return Project(o.wandb_project, o.wandb_entity, o.wandb_exp_name, o.wandb_save_dir or str(run_dir))


class WeightsAndBiases(Curves):
    """One run of a project there, from the first point on.

    Args:
        job: the run directory's name.
        trouble: told once if there is none to be had.
    """

    def __init__(self, project: Project, job: str, trouble: Callable[[str], None]) -> None:
        self._project = project
        self._job = job
        self._run: Any = None
        self._in_vain = False
        super().__init__("weights and biases", "--wandb-project", trouble)

    def _write(self, point: Point) -> None:
        import wandb  # which takes a while, and is here for those who ask

        if self._in_vain:
            return
        try:
            if self._run is None:
                self._run = self._begin(wandb)
            if point.figures:
                self._run.log({self.PREFIX + name: value for name, value in point.figures.items()}, step=point.step)
            if point.kind:
                at = time.strftime("%H:%M:%S", time.localtime(point.time))
                self._run.write_logs(f"{at} step {point.step}: {point.kind}: {point.text}")
        except wandb.Error as error:
            self._in_vain = True
            raise GivenUp(f"no more figures of elastic training: {error}") from error

    def _begin(self, wandb: Any) -> Any:
        p = self._project
        Path(p.folder).mkdir(parents=True, exist_ok=True)
        name = p.name or self._job
        # Megatron has what machines do, and what the program prints.
        settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True)
        return wandb.init(project=p.project, entity=p.entity or None, name=f"{name} (elastic)", group=name,
                          job_type="elastic", dir=p.folder, config={"run": self._job}, settings=settings,
                          reinit="create_new")

    def _end(self) -> None:
        import wandb

        if self._run is not None:
            self._run.finish()
        wandb.teardown()  # a process of its own does the sending
