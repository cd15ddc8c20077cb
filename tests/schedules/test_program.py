"""Programs: the text form, and the checker against programs that are wrong on purpose."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.layout import Cell, Layout, Stage, gpt_units
from megatron_elastic.pipeline.program import KINDS, Op, Program, ProgramError, check
from megatron_elastic.pipeline.schedule import one_forward_one_backward, split_backward, usual
from tests import placements
from tests.tiers.examples import examples


def make(tp: int, pp: int, dp: int, grains: int) -> Layout:
    units, stage_units = gpt_units(pp, pp, True, False)
    return Layout.grid(
        tp=tp, pp=pp, dp=dp, stage_units=stage_units, units=units, num_grains=grains, num_slices=dp, replicas=1
    )


@settings(max_examples=examples(200), deadline=None)
@given(
    st.dictionaries(
        st.integers(0, 200_000),
        st.lists(
            st.builds(Op, st.sampled_from(sorted(KINDS.values())), st.integers(0, 99_999), st.integers(0, 12)),
            max_size=12,
        ).map(tuple),
    )
)
def test_text_is_read_back_as_it_was(cells: dict[int, tuple[Op, ...]]) -> None:
    assert Program.parse(Program(cells).text()) == Program(cells)


@settings(max_examples=examples(500), deadline=None)
@given(
    pp=st.integers(1, 4),
    dp=st.integers(1, 3),
    grains=st.integers(1, 8),
    data=st.data(),
)
def test_a_program_with_one_operation_dropped_doubled_or_changed_is_refused(
    pp: int, dp: int, grains: int, data: st.DataObject
) -> None:
    layout = make(1, pp, dp, grains) if data.draw(st.booleans()) else data.draw(placements.layouts())
    whole = usual(layout)
    if data.draw(st.booleans()):
        whole = split_backward(whole, layout)
    cells = dict(whole.cells)
    leader = data.draw(st.sampled_from([rank for rank, ops in cells.items() if ops]))
    ops = list(cells[leader])
    place = data.draw(st.integers(0, len(ops) - 1))
    change = data.draw(st.sampled_from(["drop", "double", "change"]))
    if change == "drop":
        del ops[place]
    elif change == "double":
        ops.insert(place, ops[place])
    else:
        ops[place] = ops[place]._replace(grain=ops[place].grain + 1)
    cells[leader] = tuple(ops)
    with pytest.raises(ProgramError, match=f"cell {leader} misses"):
        check(Program(cells), layout)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0: B0 F0\n1: F0 B0", "cell 0 cannot do B0 before the output of grain 0 at stage 0"),
        ("0: F0 W0 I0\n1: F0 B0", "cell 0 cannot do W0 before the input gradient of grain 0 at stage 0"),
        (
            "0: F0 B0 F1 B1\n1: F1 F0 B1 B0",
            "cycle.*cell 0 cannot do B0 before the input gradient of grain 0 at stage 1; "
            "cell 1 cannot do F1 before the output of grain 1",
        ),
        ("0: F0 B0 F1 B1", r"for cells \[0\], but the layout has \[0, 1\]"),
        ("0: F0 F1 B0 B1\n1: F0 F1 F0 B0 B1", "cell 1 misses nothing and has F0 too much"),
        ("0: F0 F1 B0 B1\n1: F0 F1 B0", "cell 1 misses B1 and has nothing too much"),
        ("0: F0 F1 B0 B1\n1: F0 F1 B0 I1", "cell 1 misses W1 and has nothing too much"),
        ("0: F0 F1 B0 B1\n1: F0 F1 B0 I1 W1 B1", "cell 1 misses nothing and has B1 too much"),
        ("0: F0 F1 B0 B1\n1: F0 F1 B0 B1.1", "cell 1 misses B1 and has B1.1 too much"),
    ],
)
def test_the_checker_says_what_is_wrong(text: str, message: str) -> None:
    layout = make(1, 2, 1, 2 if "1" in text.replace("1:", "") else 1)
    with pytest.raises(ProgramError, match=message):
        check(Program.parse(text), layout)


def test_the_memory_limit() -> None:
    layout = make(1, 2, 1, 4)
    gpipe = Program.parse("0: F0 F1 F2 F3 B0 B1 B2 B3\n1: F0 B0 F1 B1 F2 B2 F3 B3")
    check(gpipe, layout)
    with pytest.raises(ProgramError, match="cell 0 has 4 live activations at a time, more than the 2 allowed"):
        check(gpipe, layout, max_live=2)
    check(gpipe, layout, max_live={0: 4, 1: 1})


def test_stages_of_different_widths_can_be_checked() -> None:
    grid = make(1, 2, 2, 4)
    narrow = Stage(grid.stages[1].units, (Cell((2,), (0, 1, 2, 3)),))
    layout = replace(grid, stages=(grid.stages[0], narrow))
    check(one_forward_one_backward(layout), layout, max_live=2)
    with pytest.raises(ProgramError, match="cycle"):
        check(Program.parse("0: F0 B0 F2 B2\n1: F1 B1 F3 B3\n2: F0 F2 B0 B2 F1 B1 F3 B3"), layout)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0 F0", "line 1: expected 'RANK: OPERATIONS'"),
        ("x: F0", "line 1: expected"),
        ("0: F0\n0: B0", "line 2: cell 0 has a second line"),
        ("0: Q0", "line 1: 'Q0' is no operation"),
        ("0: F", "'F' is no operation"),
        ("0: F1.", "'F1.' is no operation"),
    ],
)
def test_text_that_is_no_program_is_refused(text: str, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        Program.parse(text)


def test_comments_and_empty_cells_are_read() -> None:
    program = Program.parse("# a step\n\n0: F0 B0  # all there is\n1:\n")
    assert program == Program({0: (Op("forward", 0), Op("backward", 0)), 1: ()})
    assert Program.parse(program.text()) == program
