"""Seeds of what happens at random."""

import time

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-seed", type=int, help="seed of faults at random moments, as a run before has printed it")


@pytest.fixture
def seed_of_faults(request: pytest.FixtureRequest) -> int:
    """The seed that was asked for; without one, another each time, which tests print."""
    # pytest knows the option only where this folder is named on its command line.
    seed: int | None = request.config.getoption("--faults-seed", default=None)
    return time.time_ns() % 1_000_000 if seed is None else seed
