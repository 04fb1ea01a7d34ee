"""The pytest plugin: sends tests marked `world_size` to the rank pool, and limits the time of all tests."""

import gc
import os
import pickle
from collections.abc import Callable, Generator
from dataclasses import dataclass

import pytest

from tests.harness.messages import RANK_FIXTURES, TestCall, TestSource
from tests.harness.pool import RankPool, RankReport
from tests.harness.report import describe_disagreement, describe_failure, prefix_output
from tests.harness.time_limit import time_limit

WORLD_SIZES = (1, 2, 4, 8)
RANK_LIMIT_S = 60.0
PROCESS_LIMIT_S = 120.0

_MARKS = (
    "world_size(n, timeout_s=60): run the test on n ranks of the pool (1, 2, 4 or 8), each with a gloo process group",
    "timeout_s(n): time limit of the test in seconds (60 on ranks, 120 otherwise)",
)

_POOL = pytest.StashKey[RankPool]()
_STDERR_FD = pytest.StashKey[int]()


@dataclass(frozen=True, slots=True)
class _World:
    size: int
    timeout_s: float


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks; the pool itself starts no process before a test needs it."""
    for mark in _MARKS:
        config.addinivalue_line("markers", mark)
    config.stash[_POOL] = RankPool(_rank_pytest_args(config))
    # The terminal's: pytest captures nothing while it configures, whereas in a test descriptor 2 is a file of its own.
    config.stash[_STDERR_FD] = os.dup(2)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Spare the modules and tests from garbage collections, of which jobs in this process make many: 0.3 s each."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the pool. pytest calls it on Ctrl-C too."""
    config.stash[_POOL].close()
    os.close(config.stash[_STDERR_FD])


def _rank_pytest_args(config: pytest.Config) -> list[str]:
    # What shapes imports and asserts, and no conftest: fixtures are evaluated here, and plugins are not for ranks.
    args = ["--noconftest", "--capture=no", f"--rootdir={config.rootpath}", f"--verbosity={config.get_verbosity()}"]
    args.append(f"--assert={config.getoption('assertmode')}")
    if config.inipath is not None:
        args.append(f"--config-file={config.inipath}")
    return args


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Limit the time of a test in this process; the pool limits that of the others."""
    if item.get_closest_marker("world_size") is not None:
        return (yield)
    with time_limit(_marked_limit_s(item, PROCESS_LIMIT_S), item.config.stash[_STDERR_FD]):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked `world_size` on the pool; leave others to pytest."""
    __tracebackhide__ = True
    if pyfuncitem.get_closest_marker("world_size") is None:
        return None
    world = _read_world(pyfuncitem)
    call = _build_call(pyfuncitem)
    reports = pyfuncitem.config.stash[_POOL].run(call, world.size, world.timeout_s)
    for report in reports:
        if report.output:
            pyfuncitem.add_report_section("call", f"output of rank {report.rank}", prefix_output(report))
    _conclude(reports)
    return True


def _read_world(item: pytest.Function) -> _World:
    mark = item.get_closest_marker("world_size")
    assert mark is not None
    size = mark.args[0] if len(mark.args) == 1 else None
    if size not in WORLD_SIZES or mark.kwargs.keys() - {"timeout_s"}:
        usage = f"world_size(n) or world_size(n, timeout_s=...), n one of {WORLD_SIZES}"
        pytest.fail(f"world_size with {mark.args} and {mark.kwargs} is not known. Use {usage}.", pytrace=False)
    if item.cls is not None:
        pytest.fail("world_size is for functions: a rank cannot rebuild the instance of a test class.", pytrace=False)
    return _World(size, mark.kwargs.get("timeout_s", _marked_limit_s(item, RANK_LIMIT_S)))


def _marked_limit_s(item: pytest.Item, default_s: float) -> float:
    mark = item.get_closest_marker("timeout_s")
    return default_s if mark is None else mark.args[0]


def _build_call(item: pytest.Function) -> TestCall:
    names = item._fixtureinfo.argnames  # those of the function itself; `funcargs` holds used fixtures too
    arguments = {name: item.funcargs[name] for name in names if name not in RANK_FIXTURES}
    return _call_of(item, item.originalname, arguments, tuple(name for name in names if name in RANK_FIXTURES))


def _call_of(
    item: pytest.Item, function: str, arguments: dict[str, object], rank_fixtures: tuple[str, ...] = ()
) -> TestCall:
    """Describe a call of a function of a test's module."""
    return TestCall(
        source=TestSource(
            path=str(item.path),
            function=function,
            import_mode=str(item.config.getoption("importmode")),
            root=str(item.config.rootpath),
            consider_namespace_packages=item.config.getini("consider_namespace_packages"),
        ),
        arguments=_pickle_arguments(arguments),
        rank_fixtures=rank_fixtures,
        environment=dict(os.environ),
    )


class OnRanks:
    """Runs functions of a test's module on ranks, one after another, each on as many as it needs."""

    def __init__(self, item: pytest.Item) -> None:
        """Take the test."""
        self._item = item

    def __call__(self, num_ranks: int, function: Callable[..., None], **arguments: object) -> None:
        """Run a function on ranks with a gloo process group, and fail as it does there. Blocks."""
        __tracebackhide__ = True
        call = _call_of(self._item, function.__name__, arguments)
        reports = self._item.config.stash[_POOL].run(call, num_ranks, _marked_limit_s(self._item, RANK_LIMIT_S))
        for report in reports:
            if report.output:
                self._item.add_report_section(
                    "call", f"{function.__name__} on rank {report.rank} of {num_ranks}", prefix_output(report)
                )
        _conclude(reports)


@pytest.fixture
def on_ranks(request: pytest.FixtureRequest) -> OnRanks:
    """What runs functions of the module on ranks, for tests of what several meshes do in turn."""
    assert isinstance(request.node, pytest.Item)
    return OnRanks(request.node)


def _pickle_arguments(arguments: dict[str, object]) -> bytes:
    for name, value in arguments.items():
        reason = _why_not_picklable(value)
        if reason is not None:
            pytest.fail(
                f"argument {name!r} ({type(value).__name__}) cannot be sent to the ranks: {reason}. "
                "Pass a picklable value, or build it in the test.",
                pytrace=False,
            )
    return pickle.dumps(arguments)


def _why_not_picklable(value: object) -> str | None:
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        return str(error)
    return None


def _conclude(reports: list[RankReport]) -> None:
    __tracebackhide__ = True
    if not all(report.ended_well for report in reports):
        pytest.fail(describe_failure(reports), pytrace=False)
    kinds = {report.kind for report in reports}
    if len(kinds) > 1:
        pytest.fail(describe_disagreement(reports), pytrace=False)
    if kinds == {"skipped"}:
        raise pytest.skip.Exception(reports[0].text, _use_item_location=True)
    if kinds == {"xfailed"}:
        pytest.xfail(reports[0].text)
