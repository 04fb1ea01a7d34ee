"""D4: files that are damaged on the disk. D12: files that somebody has written to run code, or to read what is elsewhere."""

import logging
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from d9d.checkpoint import CheckpointFolder, CheckpointSaver, CommitRecord, find_checkpoint
from d9d.checkpoint.digest import digest_file
from d9d.checkpoint.record import RECORD_NAME
from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.participants import Participants
from tests.d9d.loop.run.regression_job import build_job

LOGGER = logging.getLogger("test")
NUM_FLIPS = 100


def participants() -> Participants:
    world = dist.group.WORLD
    assert world is not None
    return Participants([world])


def save_two(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    saver = CheckpointSaver(CheckpointFolder(path, LOGGER), participants())
    for step in (1, 2):
        saver.save({"x": distribute_tensor(torch.arange(5000.0) * step, mesh, [Shard(0)]), "n": [step]}, step)


def check_found(path: Path, damaged: Path) -> None:
    """Check on all ranks that a damaged file is named, with the older checkpoint, and that it is taken if asked for."""
    dist.barrier()
    folder = CheckpointFolder(path, LOGGER)
    with pytest.raises(ValueError, match=r"The next older one is .*save-1") as refused:
        find_checkpoint(folder, participants(), "raise", LOGGER)
    assert str(damaged) in str(refused.value)
    older = find_checkpoint(folder, participants(), "fallback", LOGGER)
    assert older is not None
    assert older.step == 1
    dist.barrier()


def on_rank_0(action: Callable[[], object]) -> None:
    if dist.get_rank() == 0:
        action()


@pytest.mark.world_size(2)
def test_every_flipped_bit_is_found(tmp_path: Path):
    save_two(tmp_path)
    generator = random.Random(0)
    files = sorted((tmp_path / "save-2").iterdir())
    assert [file.name for file in files] == [".metadata", "__0_0.distcp", "__1_0.distcp", RECORD_NAME, "tensors.json"]
    for index in range(NUM_FLIPS):
        damaged = files[index % len(files)]
        intact = damaged.read_bytes()
        content, bit = bytearray(intact), generator.randrange(8 * len(intact))
        content[bit // 8] ^= 1 << bit % 8
        dist.barrier()
        on_rank_0(lambda path=damaged, content=content: path.write_bytes(content))
        check_found(tmp_path, damaged)
        on_rank_0(lambda path=damaged, intact=intact: path.write_bytes(intact))
    dist.barrier()
    found = find_checkpoint(CheckpointFolder(tmp_path, LOGGER), participants(), "raise", LOGGER)
    assert found is not None
    assert found.step == 2


@pytest.mark.world_size(2)
@pytest.mark.parametrize("damage", ["truncated", "zeroed", "deleted", "swapped", "linked"])
def test_other_damage_is_found(tmp_path: Path, damage: str):
    save_two(tmp_path)
    shard, other = (tmp_path / "save-2" / name for name in ("__0_0.distcp", "__1_0.distcp"))

    def do_damage() -> None:
        match damage:
            case "truncated":
                os.truncate(shard, shard.stat().st_size // 2)
            case "zeroed":
                shard.write_bytes(bytes(shard.stat().st_size))
            case "deleted":
                shard.unlink()
            case "swapped":
                shard.rename(tmp_path / "moved")
                other.rename(shard)
                (tmp_path / "moved").rename(other)
            case "linked":
                shard.rename(tmp_path / "moved")
                shard.symlink_to(tmp_path / "moved")

    on_rank_0(do_damage)
    check_found(tmp_path, shard)


class Hostile:
    """A pickle that makes a file when it is read."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self._marker}",)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "tensors.json", RECORD_NAME])
def test_no_code_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    """D12: whoever can write to the folder can write a fitting record, too. Nothing is executed all the same."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    options = {"checkpointing": {"save_dir": str(tmp_path / "saved"), "period_steps": 1}}
    build_job(DeviceMeshParameters(), tmp_path, total_steps=1, overrides=options).trainer.train()
    folder, marker = tmp_path / "saved" / "job" / "save-1", tmp_path / "marker"
    written = CommitRecord.read(folder)
    hostile = pickle.dumps(Hostile(marker))
    (folder / name).write_bytes(hostile)
    if name != RECORD_NAME:
        files = {file: digest_file(folder / file) for file in written.files}
        (folder / RECORD_NAME).write_bytes(CommitRecord(step=1, num_ranks=1, files=files).to_bytes())

    def resume() -> None:
        build_job(DeviceMeshParameters(), tmp_path, total_steps=2, overrides=options).trainer.train()

    if name == ".metadata":
        resume()  # it is for tools of PyTorch, and never read
    else:
        with pytest.raises((ValueError, RuntimeError, OSError)):
            resume()
    assert not marker.exists()
    pickle.loads(hostile)  # noqa: S301  # the file would have done it
    assert marker.exists()
