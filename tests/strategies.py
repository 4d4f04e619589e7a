"""Hypothesis strategies for the domain: what no type says by itself."""

from __future__ import annotations

import hypothesis.strategies as st

from fedsched.core.job import Allocation, Range
from fedsched.core.resources import FIELD_BITS, Resources

FINITE = st.floats(-1e9, 1e9)
AMOUNT_MAX = 2 ** (FIELD_BITS - 1) - 1
NAMES = st.text("abcxyz-019", min_size=1, max_size=8)


def ranges(most: int = 8) -> st.SearchStrategy[Range]:
    """Valid ranges up to `most`."""
    return st.tuples(st.integers(0, most), st.integers(0, most)).map(lambda ends: Range(min(ends), max(ends)))


def register() -> None:
    """Let `st.from_type` build valid domain objects only."""
    st.register_type_strategy(float, FINITE)
    st.register_type_strategy(str, NAMES)
    st.register_type_strategy(Range, ranges())
    st.register_type_strategy(Resources, st.builds(Resources, *[st.integers(0, AMOUNT_MAX)] * 3))
    st.register_type_strategy(Allocation, st.builds(Allocation, st.integers(0, 8), st.integers(0, 8)))
