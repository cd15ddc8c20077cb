"""Pollux's simulator (``petuum/adaptdl``, branch ``osdi21-artifact``): goodput, and which job gets how many GPUs.

``python pollux.py CHECKOUT < CASES``. A case has ``gpus`` of one node and ``jobs``, each with ``perf`` (their seven
constants), ``grad`` (squared mean, variance), ``batch``, ``largest`` batch, ``gpus`` that it has, ``age_s``,
``restarts``. An answer has for each job its ``goodput`` on 1 to ``gpus`` GPUs and the ``batch`` that it has there,
and its ``gpus``. The genetic algorithm draws from numpy's generator, seeded by the case.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np

_SMALLEST = 16
"""Samples that a GPU computes at once, at least."""


def answer(case: Any, policy: Any, goodput: Any, speedup: Any, utils: Any) -> Any:
    """What their policy makes of a case."""
    np.random.seed(case["seed"])
    jobs, functions = {}, []
    for index, job in enumerate(case["jobs"]):
        function = goodput.GoodputFunction(job["perf"], job["grad"], job["batch"])
        limits = {"max_batch_size": job["largest"], "atomic_bsz_range": (_SMALLEST, job["largest"])}
        info = utils.JobInfo({"gpu": 1}, speedup.SpeedupFunction(function, **limits), index, 0, 1, case["gpus"])
        info.age, info.num_restarts = job["age_s"], job["restarts"]
        jobs[index] = info
        functions.append([function.optimize(1, count, **limits)[:2] for count in range(1, case["gpus"] + 1)])
    had = {index: [0] * job["gpus"] for index, job in enumerate(case["jobs"]) if job["gpus"]}
    node = utils.NodeInfo({"gpu": case["gpus"]}, False)
    given, _ = policy.PolluxPolicy().optimize(jobs, {0: node}, had, node)
    return [
        {"goodput": [own for own, _ in best], "batch": [count * size for count, (_, size) in enumerate(best, 1)],
         "gpus": len(given[index])}
        for index, best in enumerate(functions)
    ]  # fmt: skip


def main() -> None:
    """Answer the cases."""
    sys.path.insert(0, str(Path(sys.argv[1]) / "simulator"))
    for name in ("int", "float"):  # aliases that newer versions of numpy have not
        setattr(np, name, {"int": int, "float": float}[name])
    logging.disable(logging.CRITICAL)
    with contextlib.redirect_stdout(sys.stderr):
        modules = [importlib.import_module(name) for name in ("pollux", "goodput", "speedup", "utils")]
        answers = [answer(case, *modules) for case in json.load(sys.stdin)]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
