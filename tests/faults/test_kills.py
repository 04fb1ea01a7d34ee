"""D1: SIGKILL for all ranks at random moments. D2: SIGKILL for all ranks at each point of a save. D5: resuming several times.

Nothing is asked of what lies on the disk: the job is started again, and must go on as if nothing had happened. So a torn
checkpoint, a lost one and a wrong one all show as a step that begins with other values than in a job that nobody killed.
"""

import dataclasses
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults.training import NUM_RANKS, TOTAL_STEPS, Trail, logged, train
from tests.harness.jobs import RunningJob, running_job

START_LIMIT_S = 120.0
END_LIMIT_S = 30.0
RUN_LIMIT_S = 240.0
POINTS = {
    # Whether the save that is stopped there counts: the commit record is the commit.
    "before_write": False,
    "after_write": False,
    "before_commit": False,
    "after_record": True,
    "after_commit": True,
    "before_purge": True,
}
COLLECTIVES_OF_A_SAVE = 9
"""Three have something to say: plans, what each rank shall write, what it has written. After each part of a save (state, folder,
plan, plan of all, files, commit) one tells who has failed."""
FIRST_IN_BACKGROUND = 7
"""The first collective that is not in the way of a step: before it, copies to the host may fail as well."""
LINES_OF_A_STEP = len(POINTS) + 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uninterrupted:
    """What a job has written that is neither killed nor saved."""

    digests: list[list[str]]
    """Of the state at the beginning of each step, by rank."""
    read: list[dict[str, set[str]]]
    """Samples of each step, by rank."""
    logged: dict[tuple[int, str], object]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Uninterrupted:
    folder = tmp_path_factory.mktemp("uninterrupted")
    with running_job(train, folder, str(folder), {"period_steps": "disable"}) as job:
        assert job.wait(RUN_LIMIT_S) == [0] * NUM_RANKS
    of_ranks = [Trail(folder, rank).steps() for rank in range(NUM_RANKS)]
    assert [[step.number for step in steps] for steps in of_ranks] == [list(range(TOTAL_STEPS))] * NUM_RANKS
    return Uninterrupted(
        digests=[[step.digest for step in steps] for steps in of_ranks],
        read=[Trail(folder, rank).read() for rank in range(NUM_RANKS)],
        logged=logged(folder),
    )


def check_steps(folder: Path, uninterrupted: Uninterrupted) -> None:
    for rank, digests in enumerate(uninterrupted.digests):
        for step in Trail(folder, rank).steps():
            assert step.digest == digests[step.number], f"rank {rank} began step {step.number} with other values"


def last_step(folder: Path) -> int:
    """Return the last step that any rank has begun."""
    return max((step.number for rank in range(NUM_RANKS) for step in Trail(folder, rank).steps()), default=0)


def starts(folder: Path) -> list[int | None]:
    """Return the step that each attempt has begun with; None for those that have not come that far."""
    begun: list[int | None] = []
    for line in Trail(folder, 0).lines():
        if line == "start":
            begun.append(None)
        elif line.startswith("step ") and begun[-1] is None:
            begun[-1] = int(line.split()[1])
    return begun


def run_to_the_end(folder: Path, uninterrupted: Uninterrupted) -> int | None:
    """Return the step that the job resumed at; None if it was complete."""
    with running_job(train, folder, str(folder)) as job:
        assert job.wait(RUN_LIMIT_S) == [0] * NUM_RANKS
    check_steps(folder, uninterrupted)
    assert [Trail(folder, rank).read() for rank in range(NUM_RANKS)] == uninterrupted.read
    # What waited for the host when a process was killed belongs to steps that are done again.
    assert logged(folder) == uninterrupted.logged
    assert sorted(path.name for path in (folder / "checkpoints" / "job").iterdir()) == [
        f"save-{TOTAL_STEPS - 1}",
        f"save-{TOTAL_STEPS}",
    ]
    return starts(folder)[-1]


@pytest.mark.timeout_s(600)  # eight starts of a job: seconds each, on a busy machine far more
def test_a_kill_at_each_point_of_a_save(tmp_path: Path, uninterrupted: Uninterrupted):
    """D2 and D5: the process of the next point resumes what that of the one before has left."""
    expected = 0
    trail = Trail(tmp_path, 0)
    for num_before, (point, counts) in enumerate(POINTS.items()):
        num_saves = 2
        with running_job(train, tmp_path, str(tmp_path), {}, (point, num_saves - 1)) as job:
            wait_for_stop(job, trail, num_before + 1)
            job.kill()
            assert job.wait(START_LIMIT_S) == [-9] * NUM_RANKS
        check_steps(tmp_path, uninterrupted)
        assert starts(tmp_path)[-1] == expected, f"killed at the point before {point}"
        expected += num_saves if counts else num_saves - 1
    assert run_to_the_end(tmp_path, uninterrupted) == expected


@pytest.mark.faults
@pytest.mark.timeout_s(1800)
def test_a_kill_at_each_collective_of_a_save(tmp_path: Path, uninterrupted: Uninterrupted):
    """D2: each process saves a first checkpoint, and stops before a collective of the second one."""
    for number in range(COLLECTIVES_OF_A_SAVE):
        place = ("collective", COLLECTIVES_OF_A_SAVE + number)
        with running_job(train, tmp_path, str(tmp_path), {}, place) as job:
            wait_for_stop(job, Trail(tmp_path, 0), number + 1)
            job.kill()
            assert job.wait(START_LIMIT_S) == [-9] * NUM_RANKS
        check_steps(tmp_path, uninterrupted)
        assert starts(tmp_path)[-1] == number, (
            f"killed before collective {number} of a save, the ones before it counted"
        )
        # Before the first collective of the next save, a process would have done one step more.
        assert last_step(tmp_path) == number + 1
    # The last collective tells the others of the commit.
    assert run_to_the_end(tmp_path, uninterrupted) == COLLECTIVES_OF_A_SAVE + 1


@pytest.mark.faults
@pytest.mark.parametrize(
    ("in_background", "numbers"), [(True, [FIRST_IN_BACKGROUND]), (False, range(COLLECTIVES_OF_A_SAVE))]
)
@pytest.mark.timeout_s(1800)
def test_a_rank_that_is_killed_in_a_save(
    tmp_path: Path, uninterrupted: Uninterrupted, in_background: bool, numbers: Sequence[int]
):
    """D2 and D7: the others wait for it in a collective of the second save. They end, say why, and the first one stays."""
    per_save = COLLECTIVES_OF_A_SAVE + int(in_background)  # after copies to the host one more tells who has failed
    for attempt, number in enumerate(numbers):
        options = {"async_save": in_background}
        with running_job(train, tmp_path, str(tmp_path), options, ("collective", per_save + number), (1,)) as job:
            wait_for_stop(job, Trail(tmp_path, 1), Trail(tmp_path, 1).lines().count("stopped") + 1)
            started_s = time.monotonic()
            job.kill(1)
            assert job.wait(END_LIMIT_S) == [1, -9]
            print(f"collective {number}: all ranks ended {time.monotonic() - started_s:.1f} s after one was killed")
            assert "rank 1 is gone" in "\n".join(job.output(0).splitlines()[-40:])
        check_steps(tmp_path, uninterrupted)
        assert starts(tmp_path)[-1] == attempt
    # The last collective tells the others of the commit.
    assert run_to_the_end(tmp_path, uninterrupted) == len(numbers) + int(not in_background)


def wait_for_stop(job: RunningJob, trail: Trail, number: int) -> None:
    job.wait_until(lambda: trail.lines().count("stopped") == number, RUN_LIMIT_S)


@pytest.mark.parametrize(
    ("num_kills", "in_background"),
    [
        pytest.param(3, True),
        pytest.param(20, False, marks=pytest.mark.faults),
        pytest.param(20, True, marks=pytest.mark.faults),
        pytest.param(100, False, marks=pytest.mark.faults_nightly),
        pytest.param(100, True, marks=pytest.mark.faults_nightly),
    ],
)
@pytest.mark.timeout_s(1800)
def test_kills_at_random(
    tmp_path: Path, uninterrupted: Uninterrupted, num_kills: int, in_background: bool, seed_of_faults: int
):
    """D1. In the background the save of a step may be lost with the step after it: one interval."""
    generator = random.Random(seed_of_faults)
    started_s = time.monotonic()
    killed_after: Counter[str] = Counter()
    folder = new_run(tmp_path)
    for _ in range(num_kills):
        kept = last_step(folder) - int(in_background)
        num_attempts = len(starts(folder))
        with running_job(train, folder, str(folder), {"async_save": in_background}) as job:
            killed_after[kill_at_random(job, Trail(folder, 0), generator)] += 1
        check_steps(folder, uninterrupted)
        assert all(begun is None or begun >= kept for begun in starts(folder)[num_attempts:])
        if last_step(folder) == TOTAL_STEPS - 1:
            folder = new_run(tmp_path)
    kept = last_step(folder) - int(in_background)
    begun = run_to_the_end(folder, uninterrupted)
    assert begun is None or begun >= kept
    duration_s = time.monotonic() - started_s
    print(f"seed {seed_of_faults}: {num_kills} kills in {duration_s:.0f} s, after these points: {dict(killed_after)}")


def new_run(folder: Path) -> Path:
    made = folder / f"run-{len(list(folder.iterdir()))}"
    made.mkdir()
    return made


def kill_at_random(job: RunningJob, trail: Trail, generator: random.Random) -> str:
    """Kill all ranks some lines of the trail later, and return the last of them."""
    num_lines = len(trail.lines()) + generator.randint(0, 3 * LINES_OF_A_STEP)

    def has_come() -> bool:
        # Or the job is through, be it on one rank first.
        return len(trail.lines()) >= num_lines or (0 in job.exit_codes and {*job.exit_codes} <= {0, None})

    job.wait_until(has_come, RUN_LIMIT_S)
    time.sleep(generator.uniform(0, 0.05))
    job.kill()
    job.wait(START_LIMIT_S)
    return (trail.lines() or ["nothing"])[-1].split()[0]
