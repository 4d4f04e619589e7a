"""The functions that the generator of jobs needs, against SciPy's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import polygamma, psi

from fedsched.sim.polygamma import digamma, trigamma


@given(st.floats(min_value=1e-3, max_value=1e9))
def test_they_are_what_scipy_computes(x: float) -> None:
    """A job drawn on another machine, or with another SciPy, must be the same job."""
    assert digamma(x) == pytest.approx(float(psi(x)), rel=2e-14, abs=2e-15)
    assert trigamma(x) == pytest.approx(float(polygamma(1, x)), rel=2e-14)
