"""Amounts of resources: what a record from outside may say, and what is computed from them."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fedsched.core.resources import FIELD_BITS, Resources, amount_of, resources_of
from fedsched.runtime import codec

FIELDS = Resources.__struct_fields__
LARGEST = 2 ** (FIELD_BITS - 1) - 1


@given(st.builds(Resources, *[st.integers(0, LARGEST)] * len(FIELDS)))
def test_an_amount_that_there_can_be_comes_back_as_it_was(amount: Resources) -> None:
    assert codec.loads(Resources, codec.dumps(amount)) == amount
    assert resources_of(amount_of(amount)) == amount


@given(field=st.sampled_from(FIELDS), value=st.one_of(st.integers(max_value=-1), st.integers(min_value=LARGEST + 1)))
def test_an_amount_that_no_node_has_is_refused_where_it_is_read(field: str, value: int) -> None:
    """A negative capacity, summed up, lets jobs run that have no place; one too large spills into the next field."""
    with pytest.raises(ValueError, match=rf"not a Resources: .*{field}|out of range"):
        codec.from_plain(Resources, {field: value})
