"""What a container allows: of both versions of control groups, in trees as containers and machines show them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_elastic.device.allowance import Limits, cores, limits, memory

GIB = 1 << 30
CASES: dict[str, tuple[str, dict[str, str], Limits]] = {
    "no control groups": ("", {}, Limits(None, None, None)),
    "a machine, v2": ("0::/user.slice", {"cpu.max": "", "user.slice/memory.max": "max"}, Limits(None, None, None)),
    "a container, v2, with a namespace of its own": (
        "0::/", {"cpu.max": "150000 100000", "memory.max": f"{4 * GIB}", "pids.max": "100", "pids.current": "40"},
        Limits(1.5, 4 * GIB, 60),
    ),
    "no limits, v2": (
        "0::/", {"cpu.max": "max 100000", "memory.max": "max", "pids.max": "max", "pids.current": "4"},
        Limits(None, None, None),
    ),
    "the group above has less": (
        "0::/pod/one",
        {"pod/cpu.max": "100000 100000", "pod/one/cpu.max": "400000 100000", "pod/memory.max": f"{8 * GIB}",
         "pod/one/memory.max": f"{2 * GIB}", "pod/one/memory.high": f"{GIB}", "pod/pids.max": "9",
         "pod/pids.current": "12", "pod/one/pids.max": "max", "pod/one/pids.current": "2"},
        Limits(1.0, GIB, 0),
    ),
    "a path that the container does not see, v2": (
        "0::/../../docker/1f", {"cpu.max": "50000 100000"}, Limits(0.5, None, None),
    ),
    "a container, v1, whose path is the host's": (
        "5:cpu,cpuacct:/docker/1f\n4:memory:/docker/1f\n3:pids:/docker/1f",
        {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000",
         "memory/memory.limit_in_bytes": f"{GIB}", "pids/pids.max": "64", "pids/pids.current": "1"},
        Limits(2.5, GIB, 63),
    ),
    "no limits, v1": (
        "5:cpu,cpuacct:/\n4:memory:/",
        {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000",
         "memory/memory.limit_in_bytes": "9223372036854771712"},
        Limits(None, None, None),
    ),
    "both versions side by side": (
        "4:memory:/job/a\n0::/",
        {"unified/cgroup.procs": "1", "memory/job/memory.limit_in_bytes": f"{3 * GIB}"}, Limits(None, 3 * GIB, None),
    ),
}


@pytest.mark.parametrize(("groups", "files", "expected"), list(CASES.values()), ids=list(CASES))
def test_limits(tmp_path: Path, groups: str, files: dict[str, str], expected: Limits) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{groups}\n")
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    assert limits(tmp_path) == expected


def test_where_nothing_is_told_there_are_no_limits(tmp_path: Path) -> None:
    assert limits(tmp_path) == Limits(None, None, None)


def test_this_machine_has_something() -> None:
    assert cores() > 0 and memory() > 0
