"""Loader processes outlive a signal that a launcher sends to the whole process group of a rank."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]

RANK = """
import logging, os, signal
from d9d.core.preemption import StopSignals
from d9d.dataset.lanes import BatchSchedule, DataPlan, ElasticMapStream, LoaderOptions

if __name__ == "__main__":
    plan = DataPlan(num_samples=24, microbatch_size=2, schedule=BatchSchedule.constant(2), shuffle=False)
    loader = LoaderOptions(num_workers=1, start_method={start_method!r}, prefetch_factor=2)
    packs = ElasticMapStream(range(24), list, plan, dp_size=1, dp_rank=0, loader=loader)
    signals = StopSignals([signal.SIGTERM], logging.getLogger())
    with signals.noted():
        read = iter(packs)
        samples = [*next(read)[0]]
        os.killpg(0, signal.SIGTERM)
        samples += [sample for (microbatch,) in read for sample in microbatch]
    print(signals.received == signal.SIGTERM, samples == list(range(24)))
"""


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_signal_to_the_process_group(start_method, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK.format(start_method=start_method))
    rank = subprocess.run(
        [sys.executable, script],
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (rank.returncode, rank.stdout) == (0, "True True\n"), rank.stderr
