"""Generated values, the same in every run.

@given(draw=randoms())
@examples(20)
def test_a_property(draw: random.Random) -> None: ...
"""

import random

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

__all__ = ["examples", "randoms"]


def examples(number: int, *, shrink: bool = True) -> settings:
    """So many examples, chosen by the code of the test alone, with as much time as they take.

    Args:
        number: how many.
        shrink: whether to look for a smaller example once one has failed.
    """
    return settings(
        phases=[phase for phase in Phase if shrink or phase not in (Phase.shrink, Phase.explain)],
        max_examples=number,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )


def randoms() -> st.SearchStrategy[random.Random]:
    """Sources of numbers chosen by hypothesis, which makes them smaller where a test fails."""
    return st.randoms(use_true_random=False)
