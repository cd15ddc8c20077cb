"""Samples and the indices that say what they are: whole, of the present data, and built once a cache."""

from __future__ import annotations

import logging
import os
import random
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from megatron_elastic.adaptor import targets
from megatron_elastic.adaptor.dataset import prepare
from megatron_elastic.adaptor.samples import indices
from megatron_elastic.adaptor.samples.sample import Reader, collate
from megatron_elastic.config import UsageError
from megatron_elastic.lock import locked

TEXT = "the quick brown fox jumps over the lazy dog\n"


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    """Ours in Megatron's place, and Megatron's own again in the end."""
    indices.install()
    yield
    for target in (targets.INDICES, targets.BLEND_INDICES):
        target.wrap(lambda original: original)


def data(folder: Path, lines: int = 400, documents: int = 4) -> str:
    """A data set of so many documents; its prefix."""
    text = folder / "text"
    text.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        (text / f"{number}.txt").write_text(f"{number}{TEXT}" * (lines // documents))
    prepare(folder, [text], vocab_size=300)
    return str(folder / "data")


class Tokens:
    """What data sets ask of a tokenizer."""

    unique_identifiers: dict[str, Any] = {}  # noqa: RUF012
    eod, vocab_size = 0, 300


def build(*prefixes: str, split: str = "1,0,0", sizes: tuple[int, ...] = (50, 0, 0), cache: Path | None = None) -> Any:
    """Training, validation and test data as Megatron builds them."""
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=16, blend=(list(prefixes), [1.0] * len(prefixes) if len(prefixes) > 1 else None),
        split=split, path_to_cache=None if cache is None else str(cache), tokenizer=Tokens(), reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
    )  # fmt: skip
    return BlendedMegatronDatasetBuilder(GPTDataset, list(sizes), lambda: True, config).build()


def samples(data: Any, count: int = 40) -> list[list[int]]:
    return [data[i]["tokens"].tolist() for i in range(count)]


# ---- indices -----------------------------------------------------------------------------------


def test_an_index_is_built_once(tmp_path: Path) -> None:
    """Loaded the second time; and nothing is left of the folder that it was built in."""
    prefix, cache = data(tmp_path / "a"), tmp_path / "cache"
    first = samples(build(prefix, cache=cache)[0])
    times = {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert sorted(name.rpartition("-")[2] for name in times if name != "indices.lock") == [
        "description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy", "sources.json"]  # fmt: skip
    assert samples(build(prefix, cache=cache)[0]) == first
    assert {path.name: path.stat().st_mtime_ns for path in cache.iterdir()} == times


def test_beside_the_data_where_no_folder_is_given(tmp_path: Path) -> None:
    prefix = data(tmp_path / "a")
    first = samples(build(prefix)[0])
    assert len(list((Path(prefix) / "cache" / "GPTDataset_indices").glob("*.npy"))) == 3
    assert samples(build(prefix)[0]) == first


@pytest.mark.parametrize("name", ["document", "sample", "shuffle"])
@pytest.mark.parametrize("size", [0, 60, -8], ids=["empty", "in the header", "at the end"])
def test_what_is_cut_short_is_built_anew(
    tmp_path: Path, name: str, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    prefix, cache = data(tmp_path / "a"), tmp_path / "cache"
    first = samples(build(prefix, cache=cache)[0])
    (path,) = cache.glob(f"*-{name}_index.npy")
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    with caplog.at_level(logging.WARNING):
        assert samples(build(prefix, cache=cache)[0]) == first
    assert f"is built anew: {path.name} is cut short or damaged" in caplog.text


@pytest.mark.parametrize("recorded", [True, False], ids=["as we record it", "as Megatron leaves it"])
def test_an_index_of_other_data_is_built_anew(tmp_path: Path, recorded: bool) -> None:
    """Data were written anew under the same name."""
    cache, prefix = tmp_path / "cache", data(tmp_path / "a")
    build(prefix, cache=cache)
    if not recorded:
        for path in cache.glob("*-sources.json"):
            path.unlink()
    data(tmp_path / "a", lines=100)
    newer = max(path.stat().st_mtime_ns for path in cache.iterdir()) + 10**9
    for suffix in (".idx", ".bin"):
        os.utime(f"{prefix}{suffix}", ns=(newer, newer))
    assert samples(build(prefix, cache=cache)[0]) == samples(build(prefix, cache=tmp_path / "new")[0])


def test_data_that_were_cut_short_are_refused(tmp_path: Path) -> None:
    """Whatever names them, before samples are read; also where there is an index of all of them."""
    prefix, cache = data(tmp_path / "a"), tmp_path / "cache"
    build(prefix, cache=cache)
    size = os.path.getsize(f"{prefix}.bin")
    os.truncate(f"{prefix}.bin", size - 2)
    with pytest.raises(UsageError, match=rf"^data {prefix}: {prefix}.bin was cut short: it has {size - 2} bytes of "):
        build(prefix, cache=cache)


def test_an_index_of_megatron_itself_is_used(tmp_path: Path) -> None:
    prefix, cache = data(tmp_path / "a"), tmp_path / "cache"
    targets.INDICES.wrap(lambda original: original)
    first = samples(build(prefix, cache=cache)[0])
    times = {path.name: path.stat().st_mtime_ns for path in cache.iterdir()}
    indices.install()
    assert samples(build(prefix, cache=cache)[0]) == first
    assert {path.name: path.stat().st_mtime_ns for path in cache.iterdir()} == times


def test_what_is_left_of_who_was_killed_there_is_in_nobodys_way(tmp_path: Path) -> None:
    prefix, cache = data(tmp_path / "a"), tmp_path / "cache"
    first = samples(build(prefix, cache=cache)[0])
    for path in cache.glob("*-description.txt"):
        (cache / f"{path.name.removesuffix('-description.txt')}.part" / "half").mkdir(parents=True)
        path.unlink()
    assert samples(build(prefix, cache=cache)[0]) == first
    assert not list(cache.glob("*.part"))


@pytest.mark.parametrize(("split", "sizes"), [("949,50,1", (40, 4, 4)), ("1,0,1", (40, 0, 4))])
def test_a_part_without_text_is_refused(tmp_path: Path, split: str, sizes: tuple[int, ...]) -> None:
    """For which Megatron would look for ever."""
    prefix = data(tmp_path / "a", documents=1)
    with pytest.raises(UsageError, match=rf"--split {split}: the \w+ part has 0 of the 1 documents of .*data, and no "
                                         "text: give it a larger share or more documents(, or leave.*)?$") as caught:
        build(prefix, split=split, sizes=sizes)
    assert ("leave it out" in str(caught.value)) == ("the train part" not in str(caught.value))


def test_who_waits_for_another_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("megatron_elastic.lock._SAID_AFTER", 0.0)

    class Over(Exception):
        pass

    def warn(text: str, *args: object) -> None:
        told.append(text % args)
        raise Over

    monkeypatch.setattr("megatron_elastic.lock._logger.warning", warn)
    with locked(tmp_path / "lock", "the index"), pytest.raises(Over), locked(tmp_path / "lock", "the index"):
        pass
    assert told == [f"waiting for another process, which makes the index ({tmp_path / 'lock'})"]


# ---- samples -----------------------------------------------------------------------------------


def test_blends_become_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They say of each sample which data set it is of, as a number of numpy's; and their index is looked at, too."""
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    prefixes, cache = [data(tmp_path / name, lines) for name, lines in (("a", 400), ("b", 100))], tmp_path / "cache"
    train = build(*prefixes, cache=cache)[0]
    batch = collate([train[i] for i in range(8)])
    assert batch["tokens"].shape == (8, 16)
    assert batch["dataset_id"].dtype == torch.int16 and set(batch["dataset_id"].tolist()) == {0, 1}
    before = samples(train)
    (path,) = cache.glob("*-dataset_sample_index.npy")
    os.truncate(path, 100)
    assert samples(build(*prefixes, cache=cache)[0]) == before


class Draws:
    """Data that draw as they are read: from a generator of their own, numpy's, and Python's."""

    def __init__(self) -> None:
        self.np_rng = np.random.RandomState(5)

    def __getitem__(self, number: int) -> dict[str, Any]:
        drawn = [self.np_rng.random(), np.random.random(), random.random()]
        return {"number": number, "drawn": torch.tensor(drawn)}


def test_what_is_drawn_for_a_sample_depends_on_its_number_alone() -> None:
    blend = Namespace(datasets=[Draws(), Draws()])

    class Blend(Namespace):
        def __getitem__(self, number: int) -> dict[str, Any]:
            return blend.datasets[number % 2][number // 2]

    def read(numbers: list[int], seed: int = 1) -> dict[int, list[float]]:
        reader = Reader(Blend(datasets=blend.datasets), seed)
        return {number: reader[number]["drawn"].tolist() for number in numbers}

    there, back = read([0, 1, 2, 3]), read([3, 1, 0, 2])
    assert there == back
    assert len({tuple(drawn) for drawn in there.values()}) == 4
    assert read([0], seed=2)[0] != there[0]
