"""What launchers make of a job that a signal has ended: exit codes, restarts, and a second signal."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.d9d.loop.run.preempted_job import TOTAL_STEPS

ROOT = Path(__file__).resolve().parents[4]
TIME_LIMIT_S = 90
JOB = "tests.d9d.loop.run.preempted_job"
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


def start(folder: Path, plan: str, *torchrun: str) -> subprocess.Popen[str]:
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", *torchrun, "-m") if torchrun else ()
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return subprocess.Popen(
        [sys.executable, "-m", *launcher, JOB, str(folder), plan],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=TIME_LIMIT_S)
    return process.returncode, output


def logged_steps(folder: Path) -> list[int]:
    points = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [point["step"] for point in points if point.get("name") == "loss"]


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "saved" / "job").iterdir())


def test_torchrun_restarts_a_job_of_which_one_process_was_signalled(tmp_path):
    code, output = finish(start(tmp_path, "once:3", "--max-restarts=1"))
    assert code == 0, output
    assert "143" in output  # what torchrun has seen of the first attempt
    assert logged_steps(tmp_path) == list(range(1, TOTAL_STEPS + 1))
    assert (tmp_path / "complete").exists()


def test_torchrun_hands_on_the_signal_and_starts_nothing_again(tmp_path):
    process = start(tmp_path, "wait", "--max-restarts=3")
    end_s = time.monotonic() + TIME_LIMIT_S
    while not (tmp_path / "ran").exists() and process.poll() is None and time.monotonic() < end_s:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code != 0, output
    assert not (tmp_path / "complete").exists()
    *_, newest = saved(tmp_path)
    done = int(newest.removeprefix("save-"))
    assert logged_steps(tmp_path) == list(range(1, done + 1))


def test_a_second_signal_in_the_save_ends_the_process_and_leaves_the_checkpoint_before(tmp_path):
    code, output = finish(start(tmp_path, "twice"))
    assert code == -signal.SIGTERM, output
    assert "save-3" not in saved(tmp_path)
    code, output = finish(start(tmp_path, "never"))
    assert code == 0, output
    assert f"save-{TOTAL_STEPS}" in saved(tmp_path)
    assert "save-3.partial" not in saved(tmp_path)
