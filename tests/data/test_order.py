"""Which sample comes when: as Megatron-LM's samplers have it, asked by place."""

from __future__ import annotations

import importlib.util
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.adaptor.samples.order import Cyclic, in_order, order_of
from megatron_elastic.config import UsageError
from tests.tiers.examples import examples


@settings(max_examples=examples(200))
@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_an_epoch_has_each_sample_once(more: int, micro_batch: int, columns: int, sharding: bool) -> None:
    samples = micro_batch * columns + more - 1
    order = Cyclic(samples, micro_batch, columns, sharding)
    each = samples // (micro_batch * columns) * micro_batch * columns
    epochs = [[order(place) for place in range(epoch * each, (epoch + 1) * each)] for epoch in range(2)]
    for epoch in epochs:
        assert len({*epoch}) == each and {*epoch} <= {*range(samples)}
    assert [order(place) for place in range(each)] == epochs[0], "whoever comes back finds the same"


def test_other_epochs_have_other_orders() -> None:
    order = Cyclic(64, 2, 4, sharding=True)
    assert [order(place) for place in range(64)] != [order(place) for place in range(64, 128)]


def test_too_few_samples() -> None:
    args = Namespace(dataloader_type="cyclic", micro_batch_size=2, data_parallel_size=4, data_sharding=True)
    with pytest.raises(UsageError, match="a data set has 7 samples, too few for one micro-batch of each data-parallel"):
        order_of(args, 7)
    assert order_of(Namespace(**{**vars(args), "dataloader_type": "single"}), 7) is in_order


@pytest.mark.checkout
@pytest.mark.parametrize("sharding", [True, False])
@pytest.mark.parametrize(("samples", "micro_batch", "columns"), [(24, 2, 3), (40, 1, 4), (12, 3, 1), (29, 2, 3)])
def test_as_megatrons_sampler(samples: int, micro_batch: int, columns: int, sharding: bool) -> None:
    """Where samples are too few for all columns to the end, Megatron's columns drift apart after an epoch."""
    sampler, order = samplers().MegatronPretrainingRandomSampler, Cyclic(samples, micro_batch, columns, sharding)
    turn = micro_batch * columns
    turns = samples // turn * (3 if samples % turn == 0 else 1)

    def micro_batches(column: int) -> Iterator[list[int]]:
        made = sampler([], samples, 0, micro_batch, column, columns, sharding)
        while True:
            yield from made

    theirs = [list(islice(micro_batches(column), turns)) for column in range(columns)]
    ours = [[[order(t * turn + column * micro_batch + i) for i in range(micro_batch)] for t in range(turns)]
            for column in range(columns)]  # fmt: skip
    assert ours == theirs


def samplers() -> Any:
    """Megatron-LM's module, without the rest of ``megatron.training``."""
    stood_in = {"megatron.training": ModuleType("megatron.training"), "megatron.core": ModuleType("megatron.core"),
                "megatron.core.datasets.utils": ModuleType("utils"),
                "megatron.training.dist_signal_handler": ModuleType("handler")}  # fmt: skip
    vars(stood_in["megatron.training"])["get_args"] = vars(stood_in["megatron.core"])["mpu"] = None
    vars(stood_in["megatron.core.datasets.utils"])["Split"] = None
    vars(stood_in["megatron.training.dist_signal_handler"])["DistributedSignalHandler"] = None
    path = Path(os.environ["MEGATRON_LM_PATH"], "megatron/training/datasets/data_samplers.py")
    spec = importlib.util.spec_from_file_location("data_samplers", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in stood_in.items():
            patch.setitem(sys.modules, name, stand_in)
        spec.loader.exec_module(module)
    return module
