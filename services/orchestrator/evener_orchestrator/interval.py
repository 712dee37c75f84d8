"""A pass rate is shown with its interval, so that nobody takes 3 of 4 for 75 %. Used by the progress of a run.

The view `harness_matrix` computes the same in SQL; a test holds them together.
"""

from math import sqrt

Z = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""


def wilson(solved: int, n: int) -> tuple[float, float]:
    """Wilson's score interval (95 %) of a rate ``solved / n``, n > 0. E. B. Wilson, JASA 22 (1927)."""
    rate = solved / n
    centre = rate + Z * Z / (2 * n)
    half = Z * sqrt(rate * (1 - rate) / n + Z * Z / (4 * n * n))
    scale = 1 + Z * Z / n
    return (max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale))
