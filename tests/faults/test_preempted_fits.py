"""D8 in Lightning: signals to all ranks in a forward pass, in a backward pass and in a save; a second signal in the save."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import TensorDataset
from typing_extensions import override

from d9d_lightning.data import elastic_dataloader
from tests.d9d_lightning.support import Regression, build_trainer, full_state, make_samples, seeded
from tests.harness.jobs import running_job

NUM_STEPS = 8
SIGNALLED_STEP = 3
END_LIMIT_S = 240.0


class Signalled(Regression):
    """Sends signals to its own process, at given places of its third step."""

    def __init__(self, places: list[str]) -> None:
        super().__init__()
        self._places = places

    def _signal_in(self, place: str) -> None:
        if place in self._places:
            self._places.remove(place)
            os.kill(os.getpid(), signal.SIGTERM)

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == SIGNALLED_STEP - 1:
            self._signal_in("forward")
        return super().training_step(batch, batch_idx)

    @override
    def on_after_backward(self) -> None:
        super().on_after_backward()
        if self.global_step == SIGNALLED_STEP - 1:
            self._signal_in("backward")

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_step == SIGNALLED_STEP:
            self._signal_in("save")


def fit(folder: str, places: list[str], ckpt_path: str | None, period_steps: int) -> None:
    """Fit with a checkpoint every few steps, and note the steps that were done and the state after the last one."""
    trainer = build_trainer(
        {"data_parallel_shard": 2},
        callbacks=[ModelCheckpoint(f"{folder}/saved", every_n_train_steps=period_steps, save_top_k=-1, save_last=True)],
        enable_checkpointing=True,
    )
    module = seeded(lambda: Signalled(places))
    try:
        loader = elastic_dataloader(TensorDataset(*make_samples(4 * NUM_STEPS)), global_batch_size=4)
        trainer.fit(module, loader, ckpt_path=ckpt_path)
    finally:
        ended = {"step": trainer.global_step, "num_done": len(module.losses)}
        Path(folder, f"ended-{dist.get_rank()}.json").write_text(json.dumps(ended))
    torch.save(full_state(module), f"{folder}/state-{dist.get_rank()}.pt")


def ended(folder: Path) -> list[dict[str, int]]:
    return [json.loads((folder / f"ended-{rank}.json").read_text()) for rank in range(2)]


def run_to_the_end(folder: Path, ckpt_path: str | None) -> dict[str, torch.Tensor]:
    with running_job(fit, folder, str(folder), [], ckpt_path, SIGNALLED_STEP) as job:
        assert job.wait(END_LIMIT_S) == [0, 0]
    return torch.load(folder / "state-0.pt", weights_only=True)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    return run_to_the_end(tmp_path_factory.mktemp("uninterrupted"), None)


@pytest.mark.faults
@pytest.mark.timeout_s(900)
@pytest.mark.parametrize("place", ["forward", "backward", "save"])
def test_all_ranks_end_after_one_step(tmp_path: Path, uninterrupted: dict[str, torch.Tensor], place: str):
    with running_job(fit, tmp_path, str(tmp_path), [place], None, SIGNALLED_STEP) as job:
        assert job.wait(END_LIMIT_S) == [128 + signal.SIGTERM] * 2
    first, other = ended(tmp_path)
    assert first == other
    assert SIGNALLED_STEP <= first["step"] < NUM_STEPS
    resumed = run_to_the_end(tmp_path, "last")
    assert [each["num_done"] for each in ended(tmp_path)] == [NUM_STEPS - first["step"]] * 2
    torch.testing.assert_close(resumed, uninterrupted, rtol=0, atol=0)


@pytest.mark.faults
@pytest.mark.timeout_s(900)
def test_a_second_signal_in_the_save_leaves_the_checkpoint_before(
    tmp_path: Path, uninterrupted: dict[str, torch.Tensor]
):
    with running_job(fit, tmp_path, str(tmp_path), ["forward", "save"], None, 1) as job:
        codes = job.wait(END_LIMIT_S)
    # A rank may find the other one gone before it gets its own signal.
    assert -signal.SIGTERM in codes
    assert 0 not in codes
    resumed = run_to_the_end(tmp_path, "last")
    assert [each["num_done"] for each in ended(tmp_path)] == [NUM_STEPS - (SIGNALLED_STEP - 1)] * 2
    torch.testing.assert_close(resumed, uninterrupted, rtol=0, atol=0)
