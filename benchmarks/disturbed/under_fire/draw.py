"""Draw: which faults happen to a job, and when, from a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_elastic.faults.injection import Injection

IN_STEP = ("data", "forward", "backward", "grad_sync", "replay", "vote", "apply", "param_sync", "commit")
IN_RECOVERY = ("interrupt", "report", "edit", "promote", "replicate", "resume")
KINDS = {
    "kill": 6, "raise": 2, "hang": 1, "pause": 2, "slow": 1, "disconnect": 1, "disk": 1, "flip": 2,
    "kill outside": 4, "stop outside": 2, "scale": 1,
}  # fmt: skip
"""How often each kind is drawn. ``pause``: a hang that ends in time."""
KINDS_OF_HOSTS = {
    "host killed": 3, "host leaves": 2, "host cut off": 3, "host deaf": 2, "host mute": 2, "hosts apart": 2,
    "link lossy": 2, "link slow": 2,
}  # fmt: skip
"""The same of jobs that are on several hosts: they are added. For each host that is gone another one comes."""
KINDS_OF_DEVICES = {"memory short": 2, "device fails": 1}
"""The same of jobs on a device made of software."""
DEADLY = frozenset({"kill", "raise", "hang", "kill outside", "memory short", "device fails"})
_RAISED = frozenset({"raise", "memory short"})
"""What is the program's error if it comes again and again."""
VARIANTS: dict[str, list[str]] = {
    "fp32": [],
    "bf16": ["--bf16"],
    "recompute": ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"],
    "virtual": ["--num-layers-per-virtual-pipeline-stage", "1"],
    "experts": ["--num-experts", "3", "--moe-ffn-hidden-size", "32", "--moe-aux-loss-coeff", "1e-2",
                "--disable-bias-linear", "--sequence-parallel"],
    "verify": ["--elastic-verify-every", "1"],
    "contexts": ["--position-embedding-type", "rope"],
    "shared": ["--num-experts", "4", "--moe-ffn-hidden-size", "32", "--moe-aux-loss-coeff", "1e-2",
               "--disable-bias-linear", "--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"],
    "further": ["--mtp-num-layers", "2", "--position-embedding-type", "rope"],
    "flextrain": [
        "--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "16",
        "--moe-shared-expert-intermediate-size", "16", "--moe-router-score-function", "sigmoid",
        "--moe-router-enable-expert-bias", "--moe-router-load-balancing-type", "seq_aux_loss",
        "--moe-aux-loss-coeff", "1e-3", "--mtp-num-layers", "2", "--normalization", "RMSNorm",
        "--position-embedding-type", "rope", "--swiglu", "--disable-bias-linear",
        "--untie-embeddings-and-output-weights", "--bf16",
    ],
}
_DIVIDED = {
    "contexts": ("CP", "context-parallel-size"), "shared": ("EP", "expert-model-parallel-size"),
    "flextrain": ("EP", "expert-model-parallel-size"),
}
"""What the ranks of a cell share, if that is not tensors; and the flag that says how many there are."""
BEARABLE = 2
"""Cells that may be missing at once."""
_LAYERS = 4
HANG = 2.0
"""``--elastic-hang-timeout``, in seconds: less than a user's, as steps take so little here."""
_FIRST, _LAST, _SAVE_EVERY = 14, 25, 6
"""Steps without faults at the beginning, when there is no checkpoint yet, and at the end; and between checkpoints."""
_PER_HOST, _LAST_ON_HOSTS = 40, 80
"""Steps that it takes until another host is there, and at the end of a job on hosts. Both are seconds."""


@dataclass(frozen=True, slots=True)
class Fault:
    """``kind`` happens in ``step``: on ``rank`` at hook point ``at``, or from outside."""

    kind: str
    step: int
    rank: int
    at: str
    number: float
    """Between 0 and 1: chooses what else there is to choose."""

    def spec(self, peers: Sequence[int]) -> str | None:
        """As ``--elastic-inject``; None for what comes from outside. ``peers``: all ranks that there may be."""
        action, more = {
            "kill": ("kill", ""), "raise": ("raise", ""), "hang": ("hang", ""),
            "pause": ("hang", f",for={0.2 + 0.5 * HANG * self.number:.2f}"),
            "slow": ("slow", f",factor={1.5 + 3 * self.number:.1f},for=3"),
            "disconnect": ("disconnect", f",for=0.5,peers={'+'.join(str(p) for p in peers if p != self.rank)}"),
            "disk": ("disk", f",what={'full' if self.number < 0.5 else 'slow'},for={0.1 + 0.4 * self.number:.2f}"),
            "flip": ("flip", f",what={('weights', 'moments', 'replica')[int(3 * self.number)]}"),
            "memory short": ("device", ",what=memory"), "device fails": ("device", ",what=error"),
        }.get(self.kind, ("", ""))  # fmt: skip
        return f"{action}:rank={self.rank},step={self.step},at={self.at}{more}" if action else None


@dataclass(slots=True)
class Round:
    """One job and what happens to it, drawn from ``seed``."""

    seed: int
    layout: tuple[int, int, int]
    variant: str
    nodes: int = 1
    """Hosts that it is on; a job on one is not apart from this machine."""
    device: str = "cpu"
    """What ranks compute on."""
    faults: list[Fault] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        tp, pp, dp = self.layout
        return tp * pp * dp

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return 12 if self.layout[2] % 3 == 0 else 8

    @property
    def name(self) -> str:
        tp, pp, dp = self.layout
        where = f" on {self.nodes} hosts" if self.nodes > 1 else f" on {self.device}" if self.device != "cpu" else ""
        return f"{self._divided[0]}{tp} PP{pp} DP{dp} {self.variant}{where}"

    @property
    def _divided(self) -> tuple[str, str]:
        return _DIVIDED.get(self.variant, ("TP", "tensor-model-parallel-size"))

    def draw(self, kinds: Mapping[str, int], count: int) -> None:
        """Draw about so many faults. Ids of ranks that come are foretold; a fault whose rank is not there fails. On a
        device that has failed none comes, so one fails at most.
        """
        choose = random.Random(self.seed)
        since: dict[int, int] = dict.fromkeys(range(self.ranks), 0)
        step, last_error, last_change = _FIRST, -99, -99
        allowed = {kind: often for kind, often in kinds.items() if self._may(kind)}
        while len(self.faults) < count:
            again = bool(self.faults) and choose.random() < 0.2
            step += 0 if again else choose.choice((1, 2, 4, 6, 9, 14))
            kind = choose.choices(list(allowed), list(allowed.values()))[0]
            if (kind in _RAISED and step - last_error < 8) or (kind == "scale" and step - last_change < 40):
                kind = "pause"  # what is raised again and again would be the program's error
            if kind == "device fails" and any(fault.kind == kind for fault in self.faults):
                kind = "pause"
            there = [rank for rank, joined in since.items() if joined <= step]
            if kind in DEADLY and self.ranks - len(there) >= BEARABLE:
                kind = "pause"
                step += 12
            rank = choose.choice(there)
            at = choose.choice(IN_RECOVERY if again and kind in ("kill", "pause") else IN_STEP)
            self.faults.append(Fault(kind, step, rank, at, choose.random()))
            last_error = step if kind in _RAISED else last_error
            last_change = step if kind == "scale" else last_change
            if kind in DEADLY:
                del since[rank]
                if kind != "device fails":
                    since[max((*since, self.ranks - 1, rank)) + 1] = step + 15

    def _may(self, kind: str) -> bool:
        if kind == "flip":
            return self.variant == "verify"
        if kind in KINDS_OF_DEVICES:
            return self.device != "cpu"
        return self.nodes > 1 or kind not in KINDS_OF_HOSTS

    @property
    def steps(self) -> int:
        """So many that all of them can happen."""
        of_hosts = sum(fault.kind in KINDS_OF_HOSTS for fault in self.faults)
        return self.faults[-1].step + _PER_HOST * of_hosts + (_LAST if self.nodes == 1 else _LAST_ON_HOSTS)

    def flags(self, data: Path, save: Path, device: str = "cpu") -> list[str]:
        """Of the job without faults."""
        tp, pp, _ = self.layout
        values = {
            "data-path": data, self._divided[1]: tp,
            "pipeline-model-parallel-size": pp,
            "num-layers": _LAYERS if self.variant != "virtual" else 2 * pp, "hidden-size": 32,
            "num-attention-heads": 4, "seq-length": 32, "micro-batch-size": 1, "global-batch-size": self.batch,
            "train-iters": self.steps, "lr": 1e-3, "attention-dropout": 0.1, "hidden-dropout": 0.1, "eval-iters": 0,
            "save": save, "save-interval": _SAVE_EVERY, "elastic-device": device,
        }  # fmt: skip
        return ["--elastic", *(text for name, value in values.items() for text in (f"--{name}", str(value))),
                *VARIANTS[self.variant]]

    @property
    def injected(self) -> dict[str, Fault]:
        """Those that ranks do themselves, by how they are written."""
        specs = {fault: fault.spec(range(self.ranks + len(self.faults))) for fault in self.faults}
        return {str(Injection.parse(spec)): fault for fault, spec in specs.items() if spec is not None}
