"""The first two derivatives of the gamma function's logarithm: mean and variance of the logarithm of a gamma variate.

`scipy.special` has them too; to load it takes longer than to draw a hundred thousand jobs, and each run that draws some
needs a few dozen values.
"""

from __future__ import annotations

import math

LARGE = 10.0
"""From here on the terms below leave an error of no more than a rounding error."""
BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6)
"""The Bernoulli numbers of index 2, 4, 6 and so on."""


def digamma(x: float) -> float:
    """The first derivative at x above 0 (Abramowitz and Stegun 6.3.5 and 6.3.18)."""
    steps = []
    while x < LARGE:
        steps.append(-1 / x)
        x += 1
    series = [-number / (2 * k * x ** (2 * k)) for k, number in enumerate(BERNOULLI, 1)]
    return math.fsum([math.log(x), -1 / (2 * x), *series, *steps])


def trigamma(x: float) -> float:
    """The second derivative at x above 0 (Abramowitz and Stegun 6.4.6 and 6.4.12)."""
    steps = []
    while x < LARGE:
        steps.append(1 / (x * x))
        x += 1
    series = [number / x ** (2 * k + 1) for k, number in enumerate(BERNOULLI, 1)]
    return math.fsum([1 / x, 1 / (2 * x * x), *series, *steps])
