"""Seeds of what happens at random, and jobs that start quickly."""

import multiprocessing
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.harness.pool import one_blas_thread, preload_modules

_MODULES_OF_JOBS = (
    "tests.faults.training",
    "tests.faults.failing_job",
    "tests.faults.failing_lightning",
    "tests.faults.waiting_job",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-seed", type=int, help="seed of faults at random moments, as a run before has printed it")


@pytest.fixture
def seed_of_faults(request: pytest.FixtureRequest) -> int:
    """The seed that was asked for; without one, another each time, which tests print."""
    # pytest knows the option only where this folder is named on its command line.
    seed: int | None = request.config.getoption("--faults-seed", default=None)
    return time.time_ns() % 1_000_000 if seed is None else seed


@pytest.fixture(scope="session", autouse=True)
def _quick_starts(request: pytest.FixtureRequest) -> None:
    """Have jobs forked from a process that has imported what they run: most of a start, and there are hundreds of them.

    Only where nothing but faults is tested, since other tests shall find our modules not yet imported.
    """
    if all(item.path.is_relative_to(Path(__file__).parent) for item in request.session.items):
        preload_modules(multiprocessing.get_context("forkserver"), _MODULES_OF_JOBS)
        with one_blas_thread():
            forkserver.ensure_running()
