"""Flags: ``megatron-elastic flags`` says what becomes of each flag of a Megatron-LM checkout with ``--elastic``.

The flags are those of the checkout's own parser, ours left out. What becomes of them is said by ``support``; of what it
does not name, Megatron's own code makes what it always does.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from megatron_elastic import usage
from megatron_elastic.config import UsageError
from megatron_elastic.patching import Checkout
from megatron_elastic.support import REFUSALS, WITHOUT_EFFECT, Refusal

KINDS = {
    "passed on": "Megatron's own code takes them, as always",
    "no effect": "accepted, and change nothing",
    "some values": "refused, but with some values",
    "refused": "refused, but with what they are without being given",
    "of a refused one": "say more about a flag that is refused",
    "of other programs": "for other scripts than pretrain_gpt.py",
}
"""What becomes of a flag, and what that means."""
_OTHER_PROGRAMS = frozenset({"biencoder", "vision", "inference"})
_OF_A_REFUSED_ONE = frozenset({
    "autoresume", "experimental_attention_variant", "ft_package", "heterogeneous architecture", "In-process restart",
    "profiling", "rl", "straggler",
})  # fmt: skip
"""Groups of Megatron's parser, by their titles."""
_MORE_ABOUT = {
    "--dsa-*": "--experimental-attention-variant", "--no-dsa-*": "--experimental-attention-variant",
    "--qk-clip-*": "--qk-clip", "--mamba-training-*": "--hybrid-layer-pattern", "--mup-*": "--use-mup",
    "--muon-*": "--optimizer", "--lion-*": "--optimizer",
    "--high-priority-a2a-comm-stream": "--overlap-moe-expert-parallel-comm",
    "--moe-router-quantile-balancing-ema": "--moe-router-load-balancing-type",
    "--moe-shared-expert-glu-interleave-size": "--use-grouped-gemm-for-shared-expert",
    "--moe-*hybridep*": "--moe-token-dispatcher-type", "--moe-ncclep-*": "--moe-token-dispatcher-type",
    "--moe-flex-*": "--moe-token-dispatcher-type", "--moe-paged-stash-*": "--moe-paged-stash",
    "--moe-routing-trace-*": "--moe-routing-trace-path", "--logits-save-*": "--logits-save-dir",
    "--logits-load-*": "--logits-load-dir", "--fault-injector-*": "--fault-injector-ranks",
    "--megatron-fsdp-*": "--use-megatron-fsdp", "--fsdp-db-*": "--use-megatron-fsdp",
    "--delay-offload-until-cuda-graph": "--fine-grained-activation-offloading",
    "--delta-offload-*": "--fine-grained-activation-offloading",
    "--activation-offload-fraction": "--fine-grained-activation-offloading",
    "--fine-grained-offloading-*": "--fine-grained-activation-offloading",
    "--offload-modules": "--fine-grained-activation-offloading",
    "--min-offloaded-tensor-size": "--fine-grained-activation-offloading",
    **dict.fromkeys((
        "--data-parallel-sharding-strategy", "--outer-dp-sharding-strategy", "--fsdp-double-buffer",
        "--fsdp-manual-registration", "--suggested-communication-unit-size", "--keep-fp8-transpose-cache",
        "--enable-full-sharding-in-hsdp",
    ), "--use-megatron-fsdp"),
    "--torch-fsdp2-*": "--use-torch-fsdp2",
    **dict.fromkeys((
        "--optimizer-offload-fraction", "--use-torch-optimizer-for-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d",
        "--no-pin-cpu-*",
    ), "--optimizer-cpu-offload"),
    "--moe-upcycling-granularity": "--moe-use-upcycling", "--moe-deepep-num-sms": "--moe-enable-deepep",
    "--no-tp-comm-*": "--tp-comm-overlap", "--tp-comm-*": "--tp-comm-overlap",
    "--error-injection-type": "--error-injection-rate", "--fp4-*": "--fp4-format",
    "--reuse-grad-buf-for-mxfp8-param-ag": "--fp8-param-gather",
    "--cuda-graph-warmup-steps": "--cuda-graph-impl",
}  # fmt: skip
"""What says more about a flag that is refused, by name; Megatron has these among those of other kinds."""
_FOR_INFERENCE = "--inference-*", "--nccl-all-reduce-for-prefill"
"""Flags that Megatron has outside of that group, too."""
_OFF = (None, False, 0)
_EXAMPLES = """\
examples:
  megatron-elastic flags ~/Megatron-LM         how many flags work, change
                                               nothing or are refused
  megatron-elastic flags ~/Megatron-LM --list  each of them, and why
  megatron-elastic flags ~/Megatron-LM --json
"""


class Flag(NamedTuple):
    """A flag, a key of ``KINDS``, and why, where there is a reason."""

    flag: str
    kind: str
    why: str


def sort(parser: argparse.ArgumentParser) -> Iterator[Flag]:
    """What becomes of each flag of a parser, in its order."""
    refusals = {refusal.flag: refusal for refusal in REFUSALS}
    without_effect = [(pattern, why) for text, why in WITHOUT_EFFECT.items()
                      for pattern in re.findall(r"`(--[\w*-]+)`", text)]  # fmt: skip
    for group in parser._action_groups:
        for action in group._group_actions:
            names = [name for name in action.option_strings if name.startswith("--")]
            if not names or names == ["--help"]:
                continue
            found = [refusals[name] for name in names if name in refusals]
            reasons = [why for pattern, why in without_effect if any(fnmatch(name, pattern) for name in names)]
            if found:
                yield Flag(found[0].flag, _refused(found[0], action), found[0].why)
            elif reasons:
                yield Flag(names[0], "no effect", reasons[0])
            elif more := [of for pattern, of in _MORE_ABOUT.items() if fnmatch(names[0], pattern)]:
                yield Flag(names[0], "of a refused one", more[0])
            elif group.title in _OF_A_REFUSED_ONE:
                yield Flag(names[0], "of a refused one", str(group.title))
            elif group.title in _OTHER_PROGRAMS or any(fnmatch(names[0], pattern) for pattern in _FOR_INFERENCE):
                yield Flag(names[0], "of other programs", str(group.title))
            else:
                yield Flag(names[0], "passed on", "")


def _refused(refusal: Refusal, action: argparse.Action) -> str:
    """Whether more than one value is not refused."""
    values = {_plain(value) for value in (*refusal.but, action.default)} - set(map(_plain, _OFF))
    return "some values" if len(values) > 1 else "refused"


def _plain(value: object) -> str:
    """The same text for a value however it is written."""
    text = str(getattr(value, "value", value)).removeprefix("torch.").replace("float", "fp")
    try:
        return f"{float(text):g}"
    except ValueError:
        return text


def make_parser() -> argparse.ArgumentParser:
    """The flags of ``megatron-elastic flags``."""
    parser = argparse.ArgumentParser(
        prog="megatron-elastic flags", formatter_class=usage.Formatter, epilog=_EXAMPLES,
        description="Say what becomes of each flag of a Megatron-LM checkout's scripts with --elastic.",
    )
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="folder of a Megatron-LM source tree")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--list", action="store_true", help="list the flags that are not just passed on, and why")
    how.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """``megatron-elastic flags``. Returns the exit code: 1 for a checkout that cannot be read."""
    options = make_parser().parse_args(argv)
    try:
        checkout = Checkout.at(options.checkout)
        with warnings.catch_warnings(action="ignore"):  # of Megatron's imports: nothing is trained here
            flags = list(sort(_parser_of(checkout)))
    except (UsageError, RuntimeError, OSError) as error:
        print(f"megatron-elastic: error: {error}", file=sys.stderr)
        return 1
    counts = Counter(flag.kind for flag in flags)
    if options.json:
        print(json.dumps({"tag": checkout.tag, "flags": len(flags), "counts": {kind: counts[kind] for kind in KINDS},
                          "by_flag": {flag.flag: flag.kind for flag in flags}}))  # fmt: skip
        return 0
    print(f"{checkout.root}: Megatron-LM {checkout.tag}, {len(flags)} flags")
    for kind, meaning in KINDS.items():
        print(f"{counts[kind]:5d}  {kind:18s} {meaning}")
        if options.list and kind != "passed on":
            for flag in flags:
                if flag.kind == kind:
                    print(f"       {flag.flag}: {flag.why}")
    return 0


def _parser_of(checkout: Checkout) -> argparse.ArgumentParser:
    """Megatron's parser, from the checkout's sources. Raises AdaptorError."""
    from megatron_elastic.adaptor import targets
    from megatron_elastic.device import stand_in

    sys.path.insert(0, str(checkout.root))
    stand_in.install()

    from megatron_elastic.adaptor.without_cuda import stand_ins  # imports Megatron

    stand_ins.install()
    parser: argparse.ArgumentParser = targets.FLAGS.find()(argparse.ArgumentParser(allow_abbrev=False))
    return parser
