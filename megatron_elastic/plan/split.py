"""Split: how many layers each stage begins with, from Megatron's flags.

Megatron wants the same number everywhere unless a flag says otherwise; here what is left over when layers are dealt out
goes to the chunks that come first, because the last one has the head. Later the planner moves layers by measured costs.
"""

from __future__ import annotations

import re
from typing import Any

from megatron_elastic.layout import LayoutError, Placement, joined, way

Split = tuple[tuple[int, ...], ...]
"""[stage][chunk] = number of transformer layers."""

_REPEATED = re.compile(r"\(([^()]*)\)\*(\d{1,4})|([^*()])\*(\d{1,4})")
"""Part of a pipeline layout, as in ``(tt|)*29`` and ``t*3``."""
_OF_A_V = 2
"""Chunks of each stage with ``--elastic-placement v``; the last stage's follow one another, and are one."""
_FIRST_LAST = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_ACCOUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
UNSAID: dict[str, Any] = {
    "pipeline_model_parallel_layout": None, **dict.fromkeys(_FIRST_LAST), **dict.fromkeys(_ACCOUNTED, False)
}  # fmt: skip
"""Arguments that say how many layers a stage has, with values that say nothing."""


def split(args: Any) -> Split:
    """The split that a job's flags ask for, with Megatron-LM's names and meanings.

    The first chunk of the first stage, which has the embedding, and the last one of the last, which has the head, may
    be without a layer. Raises LayoutError where flags contradict one another, or another chunk would be empty.
    """
    stages, chunks = args.pipeline_model_parallel_size, _chunks(args)
    first_last, accounted = [[getattr(args, name, None) for name in names] for names in (_FIRST_LAST, _ACCOUNTED)]
    kinds = {
        "--pipeline-model-parallel-layout": bool(args.pipeline_model_parallel_layout),
        "--decoder-first/last-pipeline-num-layers": first_last != [None, None],
        "--account-for-embedding/loss-in-pipeline-split": any(accounted),
    }
    given = [name for name, is_given in kinds.items() if is_given]
    if len(given) > 1:
        raise LayoutError(f"{' and '.join(given)} say different things: leave all but one out")
    placement = _placement(args)
    if args.pipeline_model_parallel_layout:
        positions = _drawn(args.pipeline_model_parallel_layout, args.num_layers, stages, mtp_layers(args))
        chunks = len(positions) // stages
    elif first_last != [None, None]:
        by_stage = _with_ends(args.num_layers, stages, *first_last)
        of_stages = [iter(_even(layers, chunks)) for layers in by_stage]
        positions = [next(of_stages[stage]) for stage in way(placement, stages, chunks)]
    else:
        before, after = map(bool, accounted)
        positions = _even(args.num_layers + before + after, stages * chunks)
        positions[0] -= before
        positions[-1] -= after
    if placement == "v" and (stages == 1 or chunks != _OF_A_V):
        raise LayoutError(f"--elastic-placement v places {_OF_A_V} chunks on each of several stages, not {chunks} on "
                          f"{stages}: change --pipeline-model-parallel-size or the virtual stages, or leave it out")
    found: list[list[int]] = [[] for _ in range(stages)]
    previous = None
    for position, (stage, layers) in enumerate(zip(way(placement, stages, chunks), positions, strict=True)):
        if layers < 0 or (layers == 0 and 0 < position < len(positions) - 1):
            chunk = f"chunk {position // stages} of " if chunks > 1 else ""
            raise LayoutError(f"{chunk}stage {stage} of the pipeline would be empty with --num-layers "
                              f"{args.num_layers}: use fewer stages, or more layers")
        if placement == "v" and stage == previous:
            found[stage][-1] += layers
        else:
            found[stage].append(layers)
        previous = stage
    return tuple(map(tuple, found))


def through(args: Any) -> tuple[int, ...]:
    """[chunk in the order in which a grain passes them] = its stage, for the chunks of ``split``."""
    found = way(_placement(args), args.pipeline_model_parallel_size, max(map(len, split(args))))
    return joined(found) if _placement(args) == "v" else found


def _chunks(args: Any) -> int:
    """Of each stage, as flags say."""
    return args.virtual_pipeline_model_parallel_size or (_OF_A_V if _placement(args) == "v" else 1)


def _placement(args: Any) -> Placement:
    # Megatron's own arguments have none, and a search begins with a loop.
    return "v" if getattr(args, "elastic_placement", None) == "v" else "loop"


def _even(layers: int, parts: int) -> list[int]:
    return [layers // parts + (part < layers % parts) for part in range(parts)]


def _with_ends(layers: int, stages: int, first: int | None, last: int | None) -> list[int]:
    """Layers of each stage, with the number for the first and the last one given."""
    ends = [number for number in (first, last) if number is not None]
    middle = stages - len(ends)
    rest = layers - sum(ends)
    if min(ends) < 1 or rest < middle or (middle == 0 and rest) or middle < 0:
        flags = " and ".join(f"--{name.replace('_', '-')} {number}"
                             for name, number in zip(_FIRST_LAST, (first, last), strict=True) if number is not None)
        raise LayoutError(f"{flags} leave {rest} of {layers} layers for {middle} other stages of the pipeline: each "
                          "has to have one at least, and all layers a stage")
    return [*([first] if first is not None else []), *(_even(rest, middle) if middle else []),
            *([last] if last is not None else [])]  # fmt: skip


def mtp_layers(args: Any) -> int:
    """How many tokens further ahead than the next one are predicted."""
    return getattr(args, "mtp_num_layers", None) or 0


def _drawn(text: str, layers: int, stages: int, mtp: int) -> list[int]:
    """Layers of each position of a layout like ``Ettt|(tt|)*29L``, in the order in which a grain passes them."""
    flag = f"--pipeline-model-parallel-layout {text}"
    unrolled = text.replace(",", "")
    while match := _REPEATED.search(unrolled):
        what, times = (match[1], match[2]) if match[2] else (match[3], match[4])
        unrolled = unrolled[: match.start()] + what * int(times) + unrolled[match.end() :]
    if unknown := sorted(set(unrolled) - set("EtmL|")):
        raise LayoutError(f"{flag}: {' '.join(unknown)} is unknown: E is the embedding, t a layer, m a further "
                          "prediction, L the loss, | ends a stage, and *N repeats a letter or (...)")
    if unrolled.count("m") != mtp:
        raise LayoutError(f"{flag} has m {unrolled.count('m')} times, but --mtp-num-layers is {mtp}")
    if not re.fullmatch("E[t|]*m*L", unrolled):
        raise LayoutError(f"{flag}: it has to begin with E, the embedding, and to end with L, the loss, once each, and "
                          "directly before L with what predicts further tokens, m")
    positions = [position.count("t") for position in unrolled.split("|")]
    if len(positions) % stages:
        raise LayoutError(f"{flag} has {len(positions)} stages, which is no multiple of --pipeline-model-parallel-size "
                          f"{stages}")
    if sum(positions) != layers:
        raise LayoutError(f"{flag} has {sum(positions)} layers, not --num-layers {layers}")
    return positions
