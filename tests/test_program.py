"""Programs: the 1F1B generator, the text form, and the checker against programs that are wrong on purpose."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_elastic.layout import Cell, Layout, Stage, gpt_units
from megatron_elastic.pipeline.program import Op, Program, ProgramError, check, one_forward_one_backward
from megatron_elastic.plan import lose


def make(tp: int, pp: int, dp: int, grains: int) -> Layout:
    units, stage_units = gpt_units(pp, pp, True, False)
    return Layout.grid(
        tp=tp, pp=pp, dp=dp, stage_units=stage_units, units=units, num_grains=grains, num_slices=dp, replicas=1
    )


def test_one_forward_one_backward_by_hand() -> None:
    program = one_forward_one_backward(make(1, 3, 2, 8))
    assert program.text().splitlines() == [
        "0: F0 F2 F4 B0 F6 B2 B4 B6",
        "1: F1 F3 F5 B1 F7 B3 B5 B7",
        "2: F0 F2 B0 F4 B2 F6 B4 B6",
        "3: F1 F3 B1 F5 B3 F7 B5 B7",
        "4: F0 B0 F2 B2 F4 B4 F6 B6",
        "5: F1 B1 F3 B3 F5 B5 F7 B7",
    ]
    assert program[4][:2] == (Op("forward", 0), Op("backward", 0))


@settings(max_examples=1000, deadline=None)
@given(
    tp=st.integers(1, 2),
    pp=st.integers(1, 6),
    dp=st.integers(1, 4),
    grains=st.integers(1, 16),
    losses=st.lists(st.integers(0, 47), max_size=3),
)
def test_one_forward_one_backward_is_always_executable(
    tp: int, pp: int, dp: int, grains: int, losses: list[int]
) -> None:
    """On any grid, and after any losses that leave a column: it passes the checker, in 1F1B's memory."""
    layout = make(tp, pp, dp, grains)
    everything = {(unit, k) for unit in range(len(layout.units)) for k in range(layout.num_slices)}
    for victim in losses:
        if layout.stages[0].width > 1:
            held = dict.fromkeys(range(tp * pp * dp), everything)
            layout = lose(layout, [layout.ranks[victim % len(layout.ranks)]], held, layout.epoch + 1)
    program = one_forward_one_backward(layout)
    check(program, layout, max_in_flight=pp)
    again = Program.parse(program.text())
    assert again == program
    for index, stage in enumerate(layout.stages):
        alone = Program({cell.leader: program[cell.leader] for cell in stage.cells})
        # A stage by itself has no dependencies on others, so only its memory is checked here.
        only = replace(layout, stages=(stage,))
        check(alone, only, max_in_flight=max(1, min(pp - index, max(len(cell.grains) for cell in stage.cells))))


@settings(max_examples=500, deadline=None)
@given(
    pp=st.integers(1, 4),
    dp=st.integers(1, 3),
    grains=st.integers(1, 8),
    data=st.data(),
)
def test_a_program_with_one_operation_dropped_doubled_or_changed_is_refused(
    pp: int, dp: int, grains: int, data: st.DataObject
) -> None:
    layout = make(1, pp, dp, grains)
    cells = dict(one_forward_one_backward(layout).cells)
    leader = data.draw(st.sampled_from([rank for rank, ops in cells.items() if ops]))
    ops = list(cells[leader])
    place = data.draw(st.integers(0, len(ops) - 1))
    change = data.draw(st.sampled_from(["drop", "double", "change"]))
    if change == "drop":
        del ops[place]
    elif change == "double":
        ops.insert(place, ops[place])
    else:
        ops[place] = Op(ops[place].kind, ops[place].grain + 1)
    cells[leader] = tuple(ops)
    with pytest.raises(ProgramError, match=f"cell {leader} misses"):
        check(Program(cells), layout)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0: B0 F0\n1: F0 B0", "cell 0 cannot do B0 before F0 at stage 0"),
        (
            "0: F0 B0 F1 B1\n1: F1 F0 B1 B0",
            "cycle.*cell 0 cannot do B0 before B0 at stage 1; cell 1 cannot do F1 before F1",
        ),
        ("0: F0 B0 F1 B1", r"for cells \[0\], but the layout has \[0, 1\]"),
        ("0: F0 F1 B0 B1\n1: F0 F1 F0 B0 B1", "cell 1 misses nothing and has F0 too much"),
        ("0: F0 F1 B0 B1\n1: F0 F1 B0", "cell 1 misses B1 and has nothing too much"),
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
    with pytest.raises(ProgramError, match="cell 0 holds 4 grains in flight, more than the 2 allowed"):
        check(gpipe, layout, max_in_flight=2)


def test_stages_of_different_widths_can_be_checked() -> None:
    grid = make(1, 2, 2, 4)
    narrow = Stage(grid.stages[1].units, (Cell((2,), (0, 1, 2, 3)),))
    layout = replace(grid, stages=(grid.stages[0], narrow))
    check(one_forward_one_backward(layout), layout, max_in_flight=2)
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
    ],
)
def test_text_that_is_no_program_is_refused(text: str, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        Program.parse(text)


def test_comments_and_empty_cells_are_read() -> None:
    program = Program.parse("# a step\n\n0: F0 B0  # all there is\n1:\n")
    assert program == Program({0: (Op("forward", 0), Op("backward", 0)), 1: ()})
    assert Program.parse(program.text()) == program
