"""Tables as people and their programs read them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from fedsched.cli.output import CUT_MIN, GAP, aligned

WORDS = st.text(st.characters(exclude_categories=["C", "Z", "M"]), min_size=1, max_size=30)


@given(rows=st.lists(st.tuples(WORDS, WORDS, WORDS), min_size=1, max_size=6))
def test_columns_stand_below_each_other_whatever_is_written_in_them(rows: list[tuple[str, str, str]]) -> None:
    """Names of users and jobs come in every script of the world, and some letters take two places."""
    header, *lines = aligned(("ID", "NAME", "REASON"), rows)
    second, third = header.index("NAME"), header.index("REASON")
    for (first, name, reason), line in zip(rows, lines, strict=True):
        parts = line.split()
        assert parts == [first, name, reason]
        assert cell_len(line) - cell_len(reason) == third
        assert cell_len(line[: len(line) - len(reason)].rstrip()) - cell_len(name) == second


@given(rows=st.lists(st.tuples(WORDS, WORDS, WORDS), min_size=1, max_size=6), width=st.integers(60, 100))
def test_a_table_that_can_be_fitted_is_no_wider_than_its_terminal(rows: list[tuple[str, str, str]], width: int) -> None:
    """A line that the terminal breaks is read as two."""
    lines = aligned(("ID", "NAME", "REASON"), rows, ("NAME",), width)
    first = max(cell_len(row[0]) for row in rows)
    if first + GAP + CUT_MIN <= width:
        assert max(map(cell_len, lines)) <= width
        assert all(line.endswith((row[-1], "…")) for row, line in zip(rows, lines[1:], strict=True))


def test_a_cell_of_several_lines_stays_one_line_of_its_table() -> None:
    """What reads a table line by line would take the rest of a message for a job."""
    assert aligned(("ID", "WHY"), [(1, "two\nlines"), (22, None)]) == ["ID  WHY", "1   two lines", "22  -"]
