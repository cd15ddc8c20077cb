"""Data in whatever form Megatron-LM takes them: with ``--elastic`` the same samples, whoever is lost."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest

from megatron_elastic.adaptor.dataset import prepare
from tests.models.test_checkout import (
    CheckoutJobs,
    assert_same,
    checkout,
    evaluations,
    inject,
    losses_of,
    needs_checkout,
    patched,
)
from tests.models.test_models import FLAGS, STEPS, log_of_plain, resumed

__all__ = ["checkout", "patched"]
pytestmark = needs_checkout

TOLERANCE = 1e-6
"""Of a loss from the records to the one that Megatron logs with seven digits."""


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, patched: CheckoutJobs) -> str:
    """The prefix of a second data set, with the same vocabulary."""
    folder = tmp_path_factory.mktemp("other")
    prepare(folder, [Path(os.__file__).parent / "email"], vocab_size=400)
    return str(folder / "data")


def form(name: str, one: str, other: str, folder: Path) -> list[str]:
    """Flags of a form of data."""
    weighed = ["0.3", one, "0.7", other]
    match name:
        case "one prefix":
            return ["--data-path", one]
        case "a blend":
            return ["--data-path", *weighed]
        case "a blend without weights":
            return ["--data-path", one, other, "--mid-level-dataset-surplus", "0.5"]
        case "a file with the arguments":
            (folder / "arguments").write_text(" ".join(weighed))
            return ["--data-args-path", str(folder / "arguments")]
        case "a file of each part":
            (folder / "parts.json").write_text(json.dumps({"train": weighed, "valid": ["1.0", one], "test": [other]}))
            return ["--per-split-data-args-path", str(folder / "parts.json")]
        case "paths of each part":
            return ["--train-data-path", *weighed, "--valid-data-path", one, "--test-data-path", other]
        case "paths of two parts":
            return ["--train-data-path", *weighed, "--valid-data-path", one]
        case "the whole as each part":
            return ["--train-data-path", one, "--valid-data-path", one, "--test-data-path", one]
        case "no test part":
            return ["--data-path", one, "--split", "4,1,0"]
        case "a training part only":
            return ["--data-path", one, "--split", "1,0,0"]
        case "no validation part":
            return ["--data-path", one, "--split", "4,0,1"]
        case "made up":
            return ["--mock-data"]
        case "built by two threads":
            return ["--data-path", *weighed, "--num-dataset-builder-threads", "2"]
        case "in other orders":
            return ["--data-path", one, "--dataloader-type", "cyclic"]
        case "in other orders, not sharded":
            return ["--data-path", *weighed, "--dataloader-type", "cyclic", "--no-data-sharding"]
        case "a cache of its own":
            return ["--data-path", *weighed, "--data-cache-path", str(folder / "cache")]
    raise ValueError(name)


FORMS = ["one prefix", "a blend", "a blend without weights", "a file with the arguments", "a file of each part",
         "paths of each part", "paths of two parts", "no test part", "a training part only", "no validation part",
         "made up", "built by two threads", "a cache of its own", "in other orders",
         "in other orders, not sharded"]  # fmt: skip
PARTS_OF_THEIR_OWN = {"a file of each part", "paths of each part", "paths of two parts", "the whole as each part"}
PLAIN = {"no validation part": "no test part", "a training part only": "the whole as each part"}
"""Plain training ends without validation data; of these forms the training samples are the same."""
KILLED = {"a blend", "paths of two parts", "a training part only", "in other orders"}
COLUMNS = 2
"""Data-parallel ranks of the elastic job. The order of samples may depend on that."""


@pytest.mark.parametrize("name", FORMS)
def test_the_same_samples_as_plain_training(
    patched: CheckoutJobs, other: str, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its checkpoint, losses of six steps are those that plain training goes on with."""
    one, saved, usual = str(patched.data / "data"), tmp_path / "saved", patched.usual

    def flags_of(name: str) -> list[str]:
        not_here = ["--data-path", one, *(["--split", "3,1,1"] if name in PARTS_OF_THEIR_OWN else [])]
        monkeypatch.setattr(patched, "usual", [word for word in usual if word not in not_here])
        return form(name, one, other, tmp_path)

    plain = flags_of(PLAIN.get(name, name))
    whole = losses_of(patched.plain(*FLAGS, *plain, "--save", str(saved), ranks=COLUMNS))
    flags = flags_of(name)
    job = resumed(patched, saved, *flags)
    assert {step: line["loss"] for step, line in job.metrics().items()} == pytest.approx(
        {step: whole[step] for step in range(3, STEPS + 1)}, rel=TOLERANCE
    )
    there, said = {data for _, data, _ in evaluations(job)}, {event["data"] for event in job.events("not_evaluated")}
    assert there | said == {"validation", "test"} and not there & said
    if name in KILLED:
        killed = resumed(patched, saved, *flags, *inject("kill:rank=3,step=4,at=backward"))
        assert_same(killed, job)
        assert evaluations(killed) == evaluations(job)


def small(folder: Path, size: int) -> str:
    """The prefix of a data set of so many characters."""
    text = folder.with_suffix(".txt")
    text.write_text(Path(os.__file__).read_text()[:size])
    prepare(folder, [text], vocab_size=300)
    return str(folder / "data")


def test_all_samples_of_each_validation_set(
    patched: CheckoutJobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain training goes round and round in them, so the means are the same."""
    one = str(patched.data / "data")
    sets = ["--train-data-path", one, "--valid-data-path", small(tmp_path / "a", 2000), small(tmp_path / "b", 1500),
            "--full-validation", "--multiple-validation-sets"]  # fmt: skip
    monkeypatch.setattr(patched, "usual", [word for word in patched.usual if word not in
                                            ("--data-path", one, "--split", "3,1,1")])  # fmt: skip
    patched.plain(*FLAGS, *sets, "--save", str(tmp_path / "saved"), ranks=1)
    pattern = r"validation-(\d) loss at iteration (\d)[^|]*\| lm loss value: (\S+)"
    found = re.findall(pattern, log_of_plain(patched).read_text())
    plain = {(int(step), f"validation-{number}"): float(loss) for number, step, loss in found}
    assert len(plain) == 4
    job = resumed(patched, tmp_path / "saved", *sets)
    ours = {(step, data): loss for step, data, loss in evaluations(job)}
    assert ours == pytest.approx(plain, rel=TOLERANCE)
    killed = resumed(patched, tmp_path / "saved", *sets, *inject("kill:rank=3,step=5,at=data"))
    assert_same(killed, job)
    assert evaluations(killed) == evaluations(job)


@contextmanager
def beginning_with(patched: CheckoutJobs, code: str) -> Iterator[None]:
    """Meanwhile the checkout's script does this, before anything else."""
    main, script = 'if __name__ == "__main__":', patched.checkout / "pretrain_gpt.py"
    before = script.read_text()
    try:
        script.write_text(before.replace(main, code + main))
        yield
    finally:
        script.write_text(before)


BLANKS = """
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer
NullTokenizer.text_to_ids = lambda self, text: [int(word) for word in text.split()]
"""
"""What is cut out of a text may begin or end with a blank, which this tokenizer does not take."""
FILLED_IN = ("--fim-data", "--fim-rate", "0.7", "--fim-prefix-token", "1", "--fim-middle-token", "2",
             "--fim-suffix-token", "3", "--fim-pad-token", "4", "--fim-eod-token", "5")  # fmt: skip


def test_what_is_drawn_as_samples_are_read(patched: CheckoutJobs) -> None:
    """Filling in the middle: whoever reads, ahead or not, draws the same."""
    flags = ("--elastic", *FLAGS, "--pipeline-model-parallel-size", "2")
    with beginning_with(patched, BLANKS):
        whole = patched.run(*flags, *FILLED_IN, ranks=4)
        killed = patched.run(*flags, *FILLED_IN, "--num-workers", "4", *inject("kill:rank=3,step=3,at=data"), ranks=4)
        other = patched.run(*flags, ranks=4)
    assert_same(killed, whole)
    ours, others = ([job.metrics()[step]["loss_hex"] for step in range(1, STEPS + 1)] for job in (whole, other))
    assert all(one != two for one, two in zip(ours, others, strict=True))


SLOW = """
import time
from megatron.core.datasets.gpt_dataset import GPTDataset
_get = GPTDataset.__getitem__
def slow(self, number):
    time.sleep(0.02)
    return _get(self, number)
GPTDataset.__getitem__ = slow
"""


def test_reading_ahead_beside_plain_training(patched: CheckoutJobs, measured: Callable[[object], None]) -> None:
    """Data of which each sample takes 20 ms, in turns: plain training and ours, with so many workers."""
    losses = set()
    with beginning_with(patched, SLOW):
        for workers in ("0", "1", "4"):
            flags = ("--train-iters", "12", "--eval-iters", "0", "--num-workers", workers)
            patched.plain(*flags, ranks=2)
            logs = "".join(log.read_text() for log in log_of_plain(patched).parent.glob("rank*.log"))
            plain = re.findall(r"elapsed time per iteration \(ms\): (\S+)", logs)
            ours = patched.run("--elastic", *flags, ranks=2).metrics().values()
            losses.add(tuple(line["loss_hex"] for line in ours))
            measured(f"--num-workers {workers}: plain {median(map(float, plain[5:])):.0f} ms a step, "
                     f"elastic {median([line['step_ms'] for line in ours][5:]):.0f} ms")
    assert len(losses) == 1
