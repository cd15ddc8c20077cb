"""Rubick's artifact (``AlibabaPAI/reconfigurable-dl-scheduler``): who gets one GPU after the other by its slopes.

``python rubick.py CHECKOUT < CASES``. A case has ``gpus`` and ``jobs``, each with its ``throughput`` on 1 to 8 GPUs,
that ``as_submitted``, and the ``gpus`` it has. An answer has the ``slopes`` of all jobs at the begin, and their
``gpus`` when all are given, each to the job with the steepest slope (the first of equals).
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_MOST = 8
"""GPUs of a node, beyond which slopes do not look."""


def answer(case: Any, policy: Any) -> Any:
    """What their slopes lead to."""
    names = [str(index) for index in range(len(case["jobs"]))]
    infos = {
        name: SimpleNamespace(
            age=0,
            origin_tpt=job["as_submitted"],
            res_matrix={count: (None, [(speed,)]) for count, speed in enumerate(job["throughput"], 1)},
        )
        for name, job in zip(names, case["jobs"], strict=True)
    }
    held = {name: {"gpu": job["gpus"]} for name, job in zip(names, case["jobs"], strict=True)}
    first: dict[str, float] = policy.job_res_slope(names, infos, held, 1)
    for _ in range(case["gpus"] - sum(own["gpu"] for own in held.values())):
        able = [name for name in names if held[name]["gpu"] < _MOST]
        slopes = policy.job_res_slope(able, infos, held, 1)
        held[max(able, key=lambda name: slopes[name])]["gpu"] += 1
    return {"slopes": [first[name] for name in names], "gpus": [held[name]["gpu"] for name in names]}


def main() -> None:
    """Answer the cases."""
    sys.path.insert(0, str(Path(sys.argv[1]) / "sched" / "morphling_sched" / "policy"))
    policy = importlib.import_module("morphling").MorphlingPolicy()
    json.dump([answer(case, policy) for case in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
