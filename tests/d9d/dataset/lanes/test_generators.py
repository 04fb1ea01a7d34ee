"""Global generators go on after a block as if it had not run, and draws within it are noticed."""

import pickle
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from d9d.dataset.lanes.generators import KeptGenerators, seed_generators


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), torch.rand(()).item()]


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
        (np.random.randn, True),
        (lambda: np.random.seed(3), True),
        (lambda: np.random.set_bit_generator(np.random.PCG64(1)), True),
        (lambda: torch.rand(3), False),
    ],
)
def test_what_a_block_draws_is_noticed_and_undone(draw: Callable[[], object], is_noticed: bool):
    # Python keeps the second of a pair of normal numbers: once there is one, and once there is none.
    kept = KeptGenerators()
    for num_before in (1, 2):
        seed_generators(7)
        for _ in range(num_before):
            random.gauss(0, 1)
        state, expected = random.getstate(), draws()
        seed_generators(7)
        for _ in range(num_before):
            random.gauss(0, 1)
        with kept:
            assert not kept.have_drawn() or num_before == 2
            draw()
            assert kept.have_drawn() == is_noticed
            assert kept.have_drawn() == is_noticed
        assert random.getstate() == state
        assert draws() == expected
        # Numbers that are drawn between blocks do not count.
        np.random.randn()


def test_another_generator_of_numpy_is_kept_as_well():
    outside = np.random.get_bit_generator()
    own = np.random.PCG64(1)
    np.random.set_bit_generator(own)
    try:
        expected = np.random.PCG64(1).random_raw()
        with KeptGenerators() as kept:
            np.random.rand()
            assert kept.have_drawn()
        assert np.random.get_bit_generator() is own
        assert own.random_raw() == expected
    finally:
        np.random.set_bit_generator(outside)


def test_a_block_for_good_begins_once_and_can_travel_before():
    with KeptGenerators():
        kept = pickle.loads(pickle.dumps(KeptGenerators()))  # noqa: S301 - our own
        for _ in range(3):
            kept.keep_for_good()
            assert not kept.have_drawn()
        random.random()
        kept.keep_for_good()
        assert kept.have_drawn()
