"""Data: what ``prepare`` writes is complete, the same every time, and what training reads is what was written."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from megatron_elastic.adaptor.dataset import (
    EOD,
    Prepared,
    build_datasets,
    locate,
    prepare,
    standard_library,
)  # fmt: skip
from megatron_elastic.adaptor.samples.sample import collate
from megatron_elastic.adaptor.training.batches import Batches
from megatron_elastic.config import UsageError
from megatron_elastic.device.cpu import Cpu
from megatron_elastic.faults.odometer import Odometer
from megatron_elastic.layout import Layout, Part

TEXTS = {
    "a.txt": "the quick brown fox jumps over the lazy dog\n" * 40,
    "b.txt": "grüße, naïve façade: 日本語\n" * 30,
    "sub/c.txt": "def f(x):\n    return x + 1\n" * 50,
    "empty.txt": "",
}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    for name, text in TEXTS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "binary.dat").write_bytes(b"\x00\x01\x02")
    return folder


def test_prepare_round_trip(corpus: Path, tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    prepared = prepare(tmp_path / "out", [corpus], vocab_size=300)

    assert locate(tmp_path / "out").prepared == prepared
    assert prepared == Prepared(**json.loads((tmp_path / "out" / "data.json").read_text()))
    assert (prepared.vocab_size, prepared.documents, prepared.dtype) == (300, 3, "uint16")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.token_to_id(EOD) == prepared.eod
    data = IndexedDataset(str(tmp_path / "out" / "data"))
    documents = [data[i] for i in range(len(data))]
    assert sum(map(len, documents)) == prepared.tokens
    assert all(ids[-1] == prepared.eod and (ids[:-1] != prepared.eod).all() for ids in documents)
    assert [tokenizer.decode(ids[:-1].tolist()) for ids in documents] == [text for text in TEXTS.values() if text]


def test_prepare_is_deterministic(corpus: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        prepare(tmp_path / name, [corpus], vocab_size=320)
    for file in ("data.bin", "data.idx", "data.json", "tokenizer.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file


def test_prepare_again_replaces_text_and_index(corpus: Path, tmp_path: Path) -> None:
    def first_sample() -> list[int]:
        train, _, _ = build_datasets(out, split="1", seq_length=16, seed=1, samples=(4, 0, 0))
        tokens: list[int] = train[0]["tokens"].tolist()
        return tokens

    out = tmp_path / "out"
    prepare(out, [corpus / "a.txt"], vocab_size=300)
    before = first_sample()
    prepare(out, [corpus / "b.txt"], vocab_size=300)
    assert first_sample() != before


def test_prepare_again_leaves_what_is_there_until_all_is_written(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that reads the old text goes on with it; and who is interrupted has not lost it."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    out = tmp_path / "out"
    prepare(out, [corpus / "a.txt"], vocab_size=300)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    running = IndexedDataset(str(out / "data"))
    text = running[0].tolist()

    def interrupt(_builder: IndexedDatasetBuilder, _path: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(IndexedDatasetBuilder, "finalize", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(out, [corpus / "b.txt"], vocab_size=320)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before

    prepare(out, [corpus / "b.txt"], vocab_size=320)
    assert {path.name for path in out.iterdir()} == before.keys()
    assert locate(out).prepared != Prepared(**json.loads(before["data.json"]))
    assert running[0].tolist() == text


def test_a_data_set_that_was_cut_short(corpus: Path, tmp_path: Path) -> None:
    prepare(tmp_path / "out", [corpus], vocab_size=300)
    path = tmp_path / "out" / "data.bin"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(UsageError, match=rf"^--data-path {tmp_path}/out/data: {path} was cut short: it has "):
        locate(tmp_path / "out")


def test_datasets(corpus: Path, tmp_path: Path) -> None:
    prepared = prepare(tmp_path, [corpus], vocab_size=300)
    train, valid, test = build_datasets(tmp_path, split="2,1,0", seq_length=16, seed=5, samples=(500, 3, 0))

    assert len(train) >= 500  # the text is repeated
    assert len(valid) >= 3
    assert test is None
    batch = collate([train[i] for i in range(4)])
    assert {name: tuple(field.shape) for name, field in batch.items()} == {
        "tokens": (4, 16), "labels": (4, 16), "loss_mask": (4, 16), "position_ids": (4, 16),
    }  # fmt: skip
    assert (batch["tokens"][:, 1:] == batch["labels"][:, :-1]).all()
    assert (batch["loss_mask"] == 1).all()
    assert 0 <= int(batch["tokens"].min()) <= int(batch["tokens"].max()) < prepared.vocab_size
    again, _, _ = build_datasets(tmp_path, split="2,1,0", seq_length=16, seed=5, samples=(500, 3, 0))
    assert all((train[i]["tokens"] == again[i]["tokens"]).all() for i in range(len(train)))


def test_part_of_the_split_without_text(corpus: Path, tmp_path: Path) -> None:
    prepare(tmp_path, [corpus], vocab_size=300)
    with pytest.raises(UsageError, match=r"--split 999,1,0: the valid part has 0 tokens.*--eval-iters 0"):
        build_datasets(tmp_path, split="999,1,0", seq_length=16, seed=5, samples=(10, 1, 0))
    with pytest.raises(UsageError, match=r"the train part has 0 tokens.* share or more text, or a lower --seq-length$"):
        build_datasets(tmp_path, split="1,999,0", seq_length=16, seed=5, samples=(10, 1, 0))


def test_data_without_description(corpus: Path, tmp_path: Path) -> None:
    prepare(tmp_path, [corpus], vocab_size=300)
    (tmp_path / "data.json").unlink()
    with pytest.raises(UsageError, match="--vocab-size is needed"):
        build_datasets(tmp_path / "data", split="1", seq_length=16, seed=5, samples=(1, 0, 0))
    train, _, _ = build_datasets(tmp_path / "data", split="1", seq_length=16, seed=5, samples=(1, 0, 0), vocab_size=300)
    assert len(train) >= 1


def test_a_prefix_that_is_a_folder_too_is_the_prefix(corpus: Path, tmp_path: Path) -> None:
    prepare(tmp_path / "out", [corpus], vocab_size=300)
    prefix = tmp_path / "out" / "data"
    (prefix / "cache").mkdir(parents=True)
    assert locate(prefix) == locate(tmp_path / "out")


def test_input_that_cannot_work(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--text .*missing does not exist"):
        prepare(tmp_path / "out", [corpus / "missing"])
    with pytest.raises(UsageError, match="no text in 1 files"):
        prepare(tmp_path / "out", [corpus / "binary.dat"])
    with pytest.raises(UsageError, match="--vocab-size must be at least 257"):
        prepare(tmp_path / "out", [corpus], vocab_size=256)
    with pytest.raises(UsageError, match=r"data\.idx does not exist; write it with: megatron-elastic data prepare"):
        locate(tmp_path)


def test_all_text_of_a_folder_is_taken_whatever_folders_are_called(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("test/d.txt", "site-packages/e.txt", ".git/config", "sub/.venv/f.txt", "sub/__pycache__/f.txt"):
        path = corpus / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"this is {name}\n" * 20)
    assert prepare(tmp_path / "out", [corpus], vocab_size=300).documents == 5
    told = capsys.readouterr().err
    assert "left out: 3 files, in hidden folders or __pycache__" in told
    assert "left out: 2 files, binary or empty" in told


@pytest.mark.parametrize("above", ["tests", ".cache", "site-packages"])
def test_what_a_folder_of_text_is_in_is_of_no_matter(above: str, corpus: Path, tmp_path: Path) -> None:
    (tmp_path / above).mkdir()
    assert prepare(tmp_path / "out", [corpus.rename(tmp_path / above / "text")], vocab_size=300).documents == 3


def test_standard_library_is_text_without_tests() -> None:
    files = standard_library()
    assert len(files) > 300
    assert any(path.name == "argparse.py" for path in files)
    assert not any({"test", "tests", "site-packages"} & set(path.parts) for path in files)


def test_what_is_read_of_a_grain_does_not_depend_on_the_flag_at_that_time() -> None:
    """While a part of a micro-batch is computed, Megatron's flag says the part's size."""
    args = Namespace(micro_batch_size=2, global_batch_size=8)
    batches = Batches(args, lambda args: ((), (), ()), Odometer.alone(), lambda: None, Cpu(), 0)
    layout = Layout.grid(tp=1, pp=1, dp=2, stage_units=((0,),), units=["layer.0"], num_grains=4, num_slices=2,
                         replicas=1, samples=2)  # fmt: skip
    args.micro_batch_size = 1
    data = [{"tokens": torch.tensor([i])} for i in range(16)]
    read = batches.read(data, 8, layout, 0, 0, Part(grain=3, start=1, stop=2))
    assert read["tokens"].tolist() == [[15]]
