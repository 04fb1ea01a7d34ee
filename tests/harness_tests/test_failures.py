"""What a reader sees of a test that fails, hangs or dies on a rank, and that the next test is not harmed.

All tests look at one run of pytest, on the file below.
"""

import re

import pytest

from tests.harness_tests.pytest_run import PytestReport, read_report, start_pytest

pytestmark = pytest.mark.slow

_SAMPLE = """
import ctypes, os, signal, time, threading
import pytest, torch
import torch.distributed as dist


def sum_of_ranks():
    value = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(value)
    return value.item()


@pytest.mark.world_size(2)
def test_assert_while_other_waits():
    print("printed by", dist.get_rank())
    if dist.get_rank() == 1:
        numbers = [1, 2, 3]
        assert numbers == [1, 5, 3]
    dist.barrier()


@pytest.mark.world_size(2)
def test_after_assert():
    assert sum_of_ranks() == 3


@pytest.mark.world_size(2, timeout_s=1.5)
def test_hang():
    def never_called_by_rank_0():
        dist.barrier()
    if dist.get_rank() == 1:
        never_called_by_rank_0()


@pytest.mark.world_size(4)
def test_after_hang():
    assert sum_of_ranks() == 10


@pytest.mark.world_size(2)
def test_killed():
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.world_size(2)
def test_exits():
    if dist.get_rank() == 0:
        os._exit(7)
    dist.barrier()


@pytest.mark.world_size(1)
def test_segfault():
    ctypes.string_at(0)


@pytest.mark.world_size(2)
def test_raises_alike():
    raise ValueError("the same on both")


@pytest.mark.world_size(2)
def test_skips_apart():
    if dist.get_rank() == 0:
        pytest.skip("on one rank alone")


@pytest.mark.world_size(2)
def test_local_class_as_argument(local_class):
    pass


@pytest.fixture
def local_class():
    class Local: ...
    return Local()


@pytest.mark.world_size(3)
def test_wrong_world_size():
    pass


@pytest.mark.timeout_s(0.5)
def test_slow_in_process():
    while True:
        try:
            time.sleep(10)
        except Exception:
            pass


@pytest.mark.world_size(2)
def test_last():
    assert sum_of_ranks() == 3
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> PytestReport:
    return read_report(start_pytest(tmp_path_factory.mktemp("failures"), _SAMPLE, "-rA", "--durations=0", "-vv"))


def _duration_s(report: PytestReport, test: str) -> float:
    match = re.search(rf"([\d.]+)s call +test_sample.py::{test}\n", report.text)
    assert match is not None, report.text
    return float(match[1])


def test_tests_between_failures_pass(report: PytestReport) -> None:
    for test in ("test_after_assert", "test_after_hang", "test_last"):
        assert f"PASSED test_sample.py::{test}\n" in report.text
    assert "3 passed" in report.text


def test_failing_rank_shows_its_assert_with_values(report: PytestReport) -> None:
    text = report.failures["test_assert_while_other_waits"]
    assert "rank 1 of 2 failed" in text
    assert "assert numbers == [1, 5, 3]" in text
    assert "At index 1 diff: 2 != 5" in text


def test_failing_rank_does_not_wait_for_the_others(report: PytestReport) -> None:
    text = report.failures["test_assert_while_other_waits"]
    assert re.search(r"rank 0 of 2 still running after 2\.\d s", text)  # the grace, as soon as it is looked at
    assert "in barrier" in text


def test_output_of_ranks_is_shown(report: PytestReport) -> None:
    text = report.failures["test_assert_while_other_waits"]
    assert "[rank 0] printed by 0" in text
    assert "[rank 1] printed by 1" in text


def test_hang_shows_the_stack_of_the_stuck_rank(report: PytestReport) -> None:
    text = report.failures["test_hang"]
    assert "hang: rank 1 of 2 did not finish within 1.5 s" in text
    assert "in never_called_by_rank_0" in text
    assert _duration_s(report, "test_hang") < 10  # two at most on a free machine


@pytest.mark.parametrize(
    ("test", "how"), [("test_killed", "killed by SIGKILL (exit code -9)"), ("test_exits", "exit code 7")]
)
def test_dead_rank_is_reported_first(report: PytestReport, test: str, how: str) -> None:
    text = report.failures[test]
    first_entry = text.split("----")[1:3]
    assert "rank 0 of 2 died" in first_entry[0]
    assert how in first_entry[1]


def test_crash_shows_the_python_stack(report: PytestReport) -> None:
    text = report.failures["test_segfault"]
    assert "killed by SIGSEGV" in text
    assert "[rank 0] Fatal Python error: Segmentation fault" in text
    assert "in test_segfault" in text


def test_equal_failures_are_shown_once(report: PytestReport) -> None:
    text = report.failures["test_raises_alike"]
    assert "ranks 0, 1 of 2 failed" in text
    assert text.count("E   ValueError: the same on both") == 1


def test_harness_frames_are_hidden(report: PytestReport) -> None:
    text = report.failures["test_raises_alike"]
    assert "worker.py" not in text
    assert "plugin.py" not in text


def test_skip_on_some_ranks_is_a_failure(report: PytestReport) -> None:
    assert "ranks ended differently: rank 0 skipped, rank 1 passed" in report.failures["test_skips_apart"]


def test_argument_that_cannot_be_sent_is_named(report: PytestReport) -> None:
    assert "argument 'local_class' (Local) cannot be sent" in report.failures["test_local_class_as_argument"]


def test_unknown_world_size_is_refused(report: PytestReport) -> None:
    assert "n one of (1, 2, 4, 8)" in report.failures["test_wrong_world_size"]


def test_time_limit_in_the_pytest_process(report: PytestReport) -> None:
    text = report.failures["test_slow_in_process"]
    assert "hang: did not finish within 0.5 s" in text
    assert "time.sleep(10)" in text
