"""NaN never is the best value."""

import math

import pytest

from d9d.metric import is_better


@pytest.mark.parametrize(
    ("candidate", "best", "mode", "expected"),
    [
        (1.0, 2.0, "min", True),
        (1.0, 2.0, "max", False),
        (2.0, 2.0, "min", False),
        (1.0, None, "max", True),
        (math.nan, None, "min", False),
        (math.nan, 5.0, "min", False),
        (math.nan, 5.0, "max", False),
        (5.0, math.nan, "min", True),
        (5.0, math.nan, "max", True),
    ],
)
def test_is_better(candidate, best, mode, expected):
    assert is_better(candidate, best, mode) is expected
