"""Digest: one fingerprint of a job's final weights and optimizer state that does not depend on where they lived."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Protocol

from megatron_elastic.layout import Layout
from megatron_elastic.observe.records import RecordsError


class SliceDigest(Protocol):
    """What is known of a part of one slice; ``cluster.messages.SliceDigest`` is one."""

    @property
    def unit(self) -> int: ...
    @property
    def slice(self) -> int: ...
    @property
    def part(self) -> int: ...
    @property
    def sha256(self) -> str: ...


def combine(layout: Layout, digests: Iterable[SliceDigest], step: int) -> dict[str, Any]:
    """``{"step", "slices", "units": {name: sha256}, "sha256"}`` from the digests of all slices after ``step``.

    A unit's hash covers those of its slices, by slice, then part; the whole covers the units, in
    order. Ranks, stages and owners do not enter; the number of slices and the sizes of cells do. Raises
    RecordsError when a slice is missing, unknown, or reported twice with different hashes.
    """
    found: dict[tuple[int, int, int], str] = {}
    for digest in digests:
        key = (digest.unit, digest.slice, digest.part)
        if found.setdefault(key, digest.sha256) != digest.sha256:
            raise RecordsError(f"{_name(layout, key)} has two different digests: {found[key]} and {digest.sha256}")
    expected = layout.parts
    if unknown := sorted(set(found) - set(expected)):
        raise RecordsError(f"digests were given for {len(unknown)} slices that do not exist, first {unknown[0]}")
    if missing := [key for key in expected if key not in found]:
        raise RecordsError(f"the digest of {_name(layout, missing[0])} is missing ({len(missing)} are)")
    units = {
        name: _hash(
            f"{k} {part} {found[unit, k, part]}"
            for k in range(layout.num_slices)
            for part in range(layout.num_parts(unit))
        )
        for unit, name in enumerate(layout.units)
    }
    whole = _hash(f"{name} {sha256}" for name, sha256 in units.items())
    return {"step": step, "slices": layout.num_slices, "units": units, "sha256": whole}


def _hash(lines: Iterable[str]) -> str:
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode()).hexdigest()


def _name(layout: Layout, key: tuple[int, int, int]) -> str:
    unit, k, part = key
    name = layout.units[unit] if 0 <= unit < len(layout.units) else f"unknown unit {unit}"
    return f"slice {k} of {name}, part {part},"
