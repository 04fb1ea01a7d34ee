"""Global generators go on after a block as if it had not run, and draws within it are noticed."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from d9d.dataset.lanes import generators
from d9d.dataset.lanes.generators import KeptGenerators, numpy_and_python_state, seed_generators


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), torch.rand(()).item()]


@pytest.fixture(params=["memory", "asked"])
def access(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the state of Python's generator is read."""
    if request.param == "asked":
        monkeypatch.setattr(generators, "_PYTHON_MEMORY", None)
    return request.param


@pytest.mark.parametrize(
    ("draw", "is_noticed"),
    [
        (lambda: None, False),
        (random.random, True),
        (lambda: random.gauss(0, 1), True),
        (lambda: [random.getrandbits(32) for _ in range(624)], True),
        (lambda: random.seed(3), True),
        (lambda: random.shuffle([1, 2, 3]), True),
        (np.random.rand, True),
        (lambda: np.random.seed(3), True),
        (lambda: torch.rand(3), False),
    ],
)
def test_what_a_block_draws_is_noticed_and_undone(access: str, draw: Callable[[], object], is_noticed: bool):
    # Python keeps the second of a pair of normal numbers: once there is one, and once there is none.
    for num_before in (1, 2):
        seed_generators(7)
        for _ in range(num_before):
            random.gauss(0, 1)
        state, expected = random.getstate(), draws()
        seed_generators(7)
        for _ in range(num_before):
            random.gauss(0, 1)
        with KeptGenerators():
            before = numpy_and_python_state()
            draw()
            assert (numpy_and_python_state() != before) == is_noticed
        assert random.getstate() == state
        assert draws() == expected


def test_another_generator_of_numpy_is_watched_as_well():
    outside = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        before = numpy_and_python_state()
        assert numpy_and_python_state() == before
        np.random.rand()
        assert numpy_and_python_state() != before
    finally:
        np.random.set_bit_generator(outside)


def test_the_state_lies_where_it_is_looked_for():
    # Otherwise it would be right, but slow. Pythons of other makers may differ.
    assert generators._PYTHON_MEMORY is not None
    random.seed(11)
    assert bytes(generators._PYTHON_MEMORY) == generators._asked_python_words()
