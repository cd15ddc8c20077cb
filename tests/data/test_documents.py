"""Documents and conversations: who looks at whom. Jobs that keep them apart are in ``test_models.py``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_bounds_become_a_mask(lengths: Sequence[int]) -> None:
    """Of a sample as Megatron-LM's ``SFTDataset`` makes it."""
    from megatron_elastic.adaptor.layers import documents

    bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    tokens = torch.arange(sum(lengths))
    sample = {"tokens": tokens, "cu_seqlens": bounds, "max_seqlen": bounds.max()}
    found = documents.unpacked(sample)
    assert set(found) == {"tokens", "conversations"}
    apart = torch.block_diag(*(torch.ones(length, length).tril() for length in lengths)) == 0
    assert torch.equal(found["conversations"], apart.unsqueeze(0))
    whole = {"tokens": tokens}
    assert documents.unpacked(whole) is whole
