"""Utilisation: what a model asks of devices, and how much that is of what they could."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megatron_elastic import cli
from megatron_elastic.observe.records import RunRecords
from megatron_elastic.observe.run import Run
from megatron_elastic.observe.status import picture, status
from megatron_elastic.observe.utilisation import Utilisation, peak_of
from megatron_elastic.plan.costs.operations import flops_per_token
from tests.observe.test_observe import line, make

H100 = "NVIDIA H100 80GB HBM3"


def gpt(layers: int, hidden: int, sequence: int, vocabulary: int) -> SimpleNamespace:
    return SimpleNamespace(
        num_layers=layers, hidden_size=hidden, num_attention_heads=16, kv_channels=hidden // 16, swiglu=False,
        ffn_hidden_size=4 * hidden, group_query_attention=False, num_experts=None, mtp_num_layers=None,
        seq_length=sequence, padded_vocab_size=vocabulary,
    )  # fmt: skip


@given(st.integers(1, 200), st.integers(1, 1000), st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_plain_gpt_is_counted_as_published(layers: int, width: int, sequence: int, vocabulary: int) -> None:
    """Narayanan et al. 2021, arXiv 2104.04473, equation 2, without recomputation and with half of the scores."""
    h, s, v = 16 * width, sequence, vocabulary
    published = 72 * layers * h**2 * (1 + s / (12 * h) + v / (12 * layers * h))
    assert flops_per_token(gpt(layers, h, s, v)) == pytest.approx(published)


def test_gpt_3_is_counted_as_known() -> None:
    """175 billion parameters, 2048 tokens: 6 operations for each weight, and some hundredths for attention."""
    assert flops_per_token(gpt(96, 12288, 2048, 51200)) == pytest.approx(6 * 174.6e9 * 1.014, rel=5e-3)


@pytest.mark.parametrize(("name", "peak"), [
    (H100, 989.4e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA H200", 989.4e12),
    ("Tesla V100-SXM2-32GB", 125e12), ("AMD Instinct MI300X", 1307.4e12), ("Ascend910B3", 313e12),
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None), ("NVIDIA A100X", None), ("NVIDIA H20", None), ("cpu", None),
])  # fmt: skip
def test_peaks_by_name(name: str, peak: float | None) -> None:
    assert peak_of(name) == peak


def test_the_share_of_the_peak() -> None:
    """Eight devices that do 1000 tokens a second together."""
    used = Utilisation([{"rank": rank, "device": H100, "flops_per_token": 1e12} for rank in range(8)])
    record = line(1, 2.0)
    assert (used.flops(record), used.per_device(record)) == (1e15, 1.25e14)
    assert used.mfu(record) == pytest.approx(1.25e14 / 989.4e12)
    assert used.usual([record, record, {**record, "tokens_per_s": 1.0}]) == (1.25e14, used.mfu(record))
    used.heard({"rank": 8, "device": "NVIDIA A100-SXM4-80GB", "flops_per_token": 1e12})
    assert used.mfu(record) is None and used.usual([record]) == (1.25e14, None)
    assert Utilisation([{"rank": 0}]).usual([record]) is None, "records of an older version"


def written(path: Path, **hello: Any) -> Path:
    records = RunRecords(path)
    records.event("hello", 0, rank=0, pid=1, host="h", **hello)
    for step in (1, 2):
        records.metrics(line(step, 2.0))
    records.layout(make())
    records.close()
    return path


@pytest.mark.parametrize(("hello", "told"), [
    ({"device": H100, "flops_per_token": 1e12}, f"125.0 TFLOP/s a device (MFU 12.6 % of {H100} in bf16)"),
    ({"device": "cpu", "flops_per_token": 1e6}, "0.125 GFLOP/s a device (no MFU: the peak of cpu is not known)"),
    ({"device": "cpu", "flops_per_token": None}, None),
])  # fmt: skip
def test_it_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str], hello: dict[str, Any],
                     told: str | None) -> None:
    run_dir = written(tmp_path / "run", **hello)
    console = Console(width=100)
    console.print(picture(Run.of_folder(run_dir)))
    assert cli.main(["report", str(run_dir)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("FLOP/s") == (0 if told is None else 2) and (told is None or shown.count(told) == 2), shown
    assert cli.main(["report", str(run_dir), "--html", str(tmp_path / "page.html")]) == 0
    assert ("FLOP/s" in (tmp_path / "page.html").read_text()) == (told is not None)
    now = json.loads(json.dumps(status(Run.of_folder(run_dir))))
    assert now["ranks"]["0"] == {"pid": 1, "host": "h", "device": hello["device"]}
    assert now["flops_per_token"] == hello["flops_per_token"]
    assert (now["tflops_per_device"] is None) == (told is None)
    assert (now["mfu"] is None) == (hello["device"] == "cpu")
