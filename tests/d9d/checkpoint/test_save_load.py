"""States over ranks: saved, verified and loaded, on the same ranks and on others."""

import logging
import os
import threading
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as distributed_checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from d9d.checkpoint import CheckpointFolder, CheckpointSaver, Document, find_checkpoint, load_state, verify_checkpoint
from d9d.checkpoint.record import RECORD_NAME
from d9d.core.participants import Participants

LOGGER = logging.getLogger("test")
SHAPES = ((1, 17), (6,), (5, 7), (), (0, 3), (12, 4))
VALUES: dict[str, Any] = {"lr": 0.1, "seen": [1, (2, "x")], "name": None, "betas": (0.9, 0.999)}


def group() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None


def participants() -> Participants:
    world = group()
    return Participants([] if world is None else [world])


def tensors(placement: Shard | Replicate | None, *, filled: bool) -> dict[str, torch.Tensor]:
    """Values that tell the place: tensor, then element."""
    made: dict[str, torch.Tensor] = {}
    for index, shape in enumerate(SHAPES):
        numel = torch.Size(shape).numel()
        full = (torch.arange(numel, dtype=torch.float64) + 100 * (index + 1)).view(shape)
        full = full if filled else torch.full_like(full, torch.nan)
        if placement is not None and dist.is_initialized():
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            by_shape = Replicate() if full.dim() == 0 else placement
            made[f"of_{index}"] = distribute_tensor(full, mesh, [by_shape], src_data_rank=None)
        else:
            made[f"of_{index}"] = full
    made["transposed"] = torch.arange(12.0).view(3, 4).t() if filled else torch.full((4, 3), torch.nan)
    made["half"] = torch.ones(3, dtype=torch.bfloat16) if filled else torch.zeros(3, dtype=torch.bfloat16)
    return made


def state(placement: Shard | Replicate | None, *, filled: bool) -> dict[str, Any]:
    values = VALUES if filled else dict.fromkeys(VALUES)
    return {"model": tensors(placement, filled=filled), "task": dict(values)}


def check(loaded: dict[str, Any]) -> None:
    expected = tensors(None, filled=True)
    for name, tensor in loaded["model"].items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        torch.testing.assert_close(full, expected[name], atol=0, rtol=0)
    assert loaded["task"] == VALUES


def save(path: Path, placement: Shard | Replicate | None, *, in_background: bool = False, step: int = 1) -> None:
    folder = CheckpointFolder(path, LOGGER)
    own = participants()
    if in_background and dist.is_initialized():
        own = Participants([dist.new_group(backend="gloo")])
    saver = CheckpointSaver(folder, participants(), own if in_background else None)
    saved = state(placement, filled=True)
    saver.save(saved, step)
    if in_background:
        for tensor in saved["model"].values():  # training goes on
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(-1)
    saver.close()


def load(path: Path, placement: Shard | Replicate | None) -> None:
    found = find_checkpoint(CheckpointFolder(path, LOGGER), participants(), "raise", LOGGER)
    assert found is not None
    check(load_state(found.path, state(placement, filled=False), group()))


@pytest.mark.parametrize("in_background", [False, True])
def test_on_one_process(tmp_path: Path, in_background: bool):
    save(tmp_path, None, in_background=in_background)
    load(tmp_path, None)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
def test_in_the_background_the_bytes_are_the_same(tmp_path: Path, placement: Shard | Replicate):
    for name in ("first", "second"):
        save(tmp_path / name, placement)
    save(tmp_path / "background", placement, in_background=True)
    files = {name: folder_content(tmp_path / name / "save-1") for name in ("first", "second", "background")}
    assert files["first"] == files["second"] == files["background"]


def folder_content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.world_size(4)
@pytest.mark.parametrize("saved", [Replicate(), Shard(0)])
@pytest.mark.parametrize("loaded", [None, Shard(0)])
def test_other_placements(tmp_path: Path, saved: Shard | Replicate, loaded: Shard | None):
    save(tmp_path, saved)
    load(tmp_path, loaded)
    record = CheckpointFolder(tmp_path, LOGGER).complete()[0].record
    assert record is not None
    assert record.num_ranks == 4
    # Each element is written once: 18 + 6 + 35 + 1 + 48 of 8 bytes, 12 of 4, 3 of 2, and some hundred bytes for each part.
    content = 8 * (17 + 6 + 35 + 1 + 48) + 4 * 12 + 2 * 3
    parts = 8 * 4
    assert content < record.size_bytes < content + parts * 2000


@pytest.mark.world_size(2)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.bool])
def test_rows_columns_and_other_strides(tmp_path: Path, dim: int, dtype: torch.dtype):
    """Rows are read straight into memory, and columns, small tensors and other strides as they are."""
    mesh = init_device_mesh("cpu", (2,))
    full = (torch.arange(300 * 70).view(300, 70) % 251).to(dtype)
    saved = {"x": distribute_tensor(full, mesh, [Shard(dim)]), "few": full[:3, :2], "turned": full.t()}
    CheckpointSaver(CheckpointFolder(tmp_path, LOGGER), participants()).save(saved, 1)
    wanted = {
        "x": distribute_tensor(torch.zeros_like(full), mesh, [Shard(1 - dim)]),
        "few": torch.zeros_like(full[:3, :2]),
        "turned": torch.zeros(300, 70, dtype=dtype).t(),
    }
    load_state(tmp_path / "save-1", wanted, group())
    assert torch.equal(wanted["x"].full_tensor(), full)
    assert torch.equal(wanted["few"], full[:3, :2])
    assert torch.equal(wanted["turned"], full.t())
    again = {
        "x": distribute_tensor(torch.zeros_like(full), mesh, [Shard(dim)]),
        "few": torch.zeros(3, 2, dtype=dtype),
        "turned": torch.zeros(70, 300, dtype=dtype),
    }
    load_state(tmp_path / "save-1", again, group())
    assert torch.equal(again["x"].full_tensor(), full)
    assert torch.equal(again["turned"], full.t())


def test_parts_of_larger_storages(tmp_path: Path):
    """They are copied to be written. The copies must live until they are hashed."""
    large = torch.arange(1_000_000.0)
    parts = {f"from_{start}": large[start : start + 1000] for start in range(0, 100_000, 1000)}
    CheckpointSaver(CheckpointFolder(tmp_path, LOGGER), participants()).save(parts, 1)
    assert verify_checkpoint(CheckpointFolder(tmp_path, LOGGER).complete()[0]) == []
    wanted = {name: torch.zeros(1000) for name in parts}
    load_state(tmp_path / "save-1", wanted, None)
    assert all(torch.equal(wanted[name], part) for name, part in parts.items())


def test_files_that_end_early_are_named_without_verification(tmp_path: Path):
    save(tmp_path, None)
    path = tmp_path / "save-1" / "__0_0.distcp"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises((ValueError, RuntimeError), match=r"__0_0\.distcp is damaged|PytorchStreamReader"):
        load_state(tmp_path / "save-1", state(None, filled=False), None)


@pytest.mark.world_size(2)
def test_what_does_not_fit_is_told_at_once_on_all_ranks(tmp_path: Path):
    save(tmp_path, Shard(0))
    path = tmp_path / "save-1"
    wanted = state(Shard(0), filled=False)
    mesh = init_device_mesh("cpu", (2,))
    wanted["model"]["of_2"] = distribute_tensor(torch.zeros(5, 8, dtype=torch.float64), mesh, [Shard(0)])
    wanted["model"]["half"] = torch.zeros(3)
    wanted["model"]["of_9"] = torch.zeros(1)
    wanted["task"]["lr"] = torch.zeros(1)
    before = wanted["model"]["of_0"]
    with pytest.raises(ValueError, match="cannot resume from the checkpoint") as refused:
        load_state(path, wanted, group())
    text = str(refused.value)
    assert "model.of_2 has the shape (5, 7) there and (5, 8) in the job" in text
    assert "model.half is of torch.bfloat16 there and of torch.float32 in the job" in text
    assert "model.of_9 is not in it (it holds model.of_" in text
    assert "task.lr is no tensor there" in text
    assert before.to_local().isnan().all()  # nothing was touched

    without = state(Shard(0), filled=False)
    if dist.get_rank() == 0:
        del without["model"]["half"]  # rank 1 still asks for it
    load_state(path, without, group())
    del without["model"]["of_2"]
    without["model"].pop("half", None)
    with pytest.raises(ValueError, match=r"it holds model\.half.*\n.*it holds model\.of_2"):
        load_state(path, without, group())
    load_state(path, without, group(), may_be_left=lambda key: key in ("model.half", "model.of_2"))


@pytest.mark.world_size(2)
def test_a_damaged_checkpoint(tmp_path: Path):
    for step in (1, 2):
        save(tmp_path, Shard(0), step=step)
    damaged = tmp_path / "save-2" / "__1_0.distcp"
    dist.barrier()
    if dist.get_rank() == 0:
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 4
        damaged.write_bytes(content)
    dist.barrier()
    folder = CheckpointFolder(tmp_path, LOGGER)
    with pytest.raises(
        ValueError, match=r"save-2 is damaged:\n- .*__1_0\.distcp is damaged.*\nThe next older one is .*save-1"
    ):
        find_checkpoint(folder, participants(), "raise", LOGGER)
    found = find_checkpoint(folder, participants(), "fallback", LOGGER)
    assert found is not None
    assert found.step == 1
    assert verify_checkpoint(found, participants()) == []
    dist.barrier()
    if dist.get_rank() == 1:
        (tmp_path / "save-1" / "tensors.json").unlink()
    dist.barrier()
    with pytest.raises(ValueError, match=r"save-2 is damaged:\n- .*__1_0.*\n- .*tensors\.json is missing\nRestore it"):
        find_checkpoint(folder, participants(), "fallback", LOGGER)


def save_and_wait(saver: CheckpointSaver) -> None:
    saver.save(state(Shard(0), filled=True), 2)
    saver.wait()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk_fails_on_all_ranks_and_leaves_the_old_one(tmp_path: Path, in_background: bool):
    save(tmp_path, Shard(0))

    def full_disk(point: str) -> None:
        if point == "before_write" and dist.get_rank() == 1:
            (tmp_path / "save-2.partial" / "__1_0.distcp").symlink_to("/dev/full")

    own = Participants([dist.new_group(backend="gloo")]) if in_background else None
    saver = CheckpointSaver(CheckpointFolder(tmp_path, LOGGER), participants(), own, full_disk)
    with pytest.raises(OSError, match=r"on rank 1 of 2: .*No space left on device"):
        save_and_wait(saver)
    load(tmp_path, Shard(0))
    saver = CheckpointSaver(CheckpointFolder(tmp_path, LOGGER), participants())
    saver.save(state(Shard(0), filled=True), 3)  # training may go on
    load(tmp_path, Shard(0))


def test_all_files_are_on_the_disk_before_the_record_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[int] = []
    sync = os.fsync

    def note(descriptor: int) -> None:
        sync(descriptor)
        synced.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", note)
    save(tmp_path, None)
    folder = tmp_path / "save-1"
    files = {path.name: path.stat().st_ino for path in folder.iterdir()}
    record = synced.index(files.pop(RECORD_NAME))
    assert len(files) >= 2  # tensors, and what there is
    assert set(files.values()) | {folder.stat().st_ino} <= set(synced[:record])
    # The name of the record, and that of the checkpoint.
    assert {folder.stat().st_ino, tmp_path.stat().st_ino} <= set(synced[record:])


def test_values_that_json_has_not_are_refused_before_anything_is_committed(tmp_path: Path):
    saver = CheckpointSaver(CheckpointFolder(tmp_path, LOGGER), participants())
    with pytest.raises(TypeError, match=r"cannot hold task\.seen"):
        saver.save({"task": {"seen": frozenset()}}, 1)
    assert CheckpointFolder(tmp_path, LOGGER).complete() == []


def test_checkpoints_are_read_by_torch(tmp_path: Path):
    """Tensors are in PyTorch's own format: its tools can read them."""
    save(tmp_path, None)
    read = {"model": tensors(None, filled=False)}
    distributed_checkpoint.load(read, checkpoint_id=tmp_path / "save-1", no_dist=True)
    torch.testing.assert_close(read["model"], tensors(None, filled=True), atol=0, rtol=0)
    with pytest.raises(CheckpointException):  # its own unpickler meets JSON
        distributed_checkpoint.load({"task": {"lr": 0.0}}, checkpoint_id=tmp_path / "save-1", no_dist=True)


@pytest.mark.world_size(2)
def test_documents_come_back_as_they_were(tmp_path: Path):
    """Names, number and shapes of what a task keeps are unknown to the job that resumes."""
    mesh = init_device_mesh("cpu", (2,))
    lanes = distribute_tensor(torch.arange(8).view(4, 2), mesh, [Shard(0)])
    value = {3: [torch.ones(2), ("x", {"y": torch.zeros(3)})], "lanes": lanes, (1, 2): {}, "none": []}
    saver = CheckpointSaver(CheckpointFolder(tmp_path, LOGGER), participants())
    saver.save({"task": Document(value), "of": {str(dist.get_rank()): Document(dist.get_rank())}}, 1)
    mine = distribute_tensor(torch.zeros(4, 2, dtype=torch.int64), mesh, [Shard(0)])
    wanted = {"task": Document({"lanes": mine}), "of": {str(dist.get_rank()): Document(None)}}
    loaded = load_state(tmp_path / "save-1", wanted, group())
    assert loaded["of"] == {str(dist.get_rank()): dist.get_rank()}
    read = loaded["task"]
    assert list(read) == [3, "lanes", (1, 2), "none"]
    assert torch.equal(read[3][0], torch.ones(2))
    assert torch.equal(read[3][1][1]["y"], torch.zeros(3))
    assert read[3][1][0] == "x"
    full = read["lanes"].full_tensor() if isinstance(read["lanes"], DTensor) else read["lanes"]
    assert torch.equal(full, torch.arange(8).view(4, 2))
    assert read[1, 2] == {}
    assert read["none"] == []


@pytest.mark.world_size(2)
def test_documents_of_one_name_are_never_mixed(tmp_path: Path):
    """Ranks may fill dictionaries in other orders, or even hold other values: the first rank's value is saved, whole."""
    one, two = torch.full((2,), 1.0), torch.full((2,), 2.0)
    order = {"a": one, "b": two} if dist.get_rank() == 0 else {"b": two, "a": one}
    of_rank = {"n": dist.get_rank(), "t": one + 10 * dist.get_rank(), "u": two + 10 * dist.get_rank()}
    saver = CheckpointSaver(CheckpointFolder(tmp_path, LOGGER), participants())
    saver.save({"task": Document(order), "other": Document(of_rank)}, 1)
    loaded = load_state(tmp_path / "save-1", {"task": Document(None), "other": Document(None)}, group())
    assert {key: value.tolist() for key, value in loaded["task"].items()} == {"a": [1.0, 1.0], "b": [2.0, 2.0]}
    assert loaded["other"]["n"] == 0
    assert loaded["other"]["t"].tolist() == [1.0, 1.0]
    assert loaded["other"]["u"].tolist() == [2.0, 2.0]


@pytest.mark.world_size(2)
def test_values_of_one_name_are_those_of_the_first_rank(tmp_path: Path):
    names = ("a", "b", "c", "d")
    folder = CheckpointFolder(tmp_path, LOGGER)
    CheckpointSaver(folder, participants()).save({"own": dict.fromkeys(names, dist.get_rank() + 10)}, step=1)
    loaded = load_state(folder.complete()[-1].path, {"own": dict.fromkeys(names)}, group())
    assert loaded["own"] == dict.fromkeys(names, 10)


def test_a_save_that_was_given_up_keeps_others_out(tmp_path: Path):
    release = threading.Event()
    saver = CheckpointSaver(
        CheckpointFolder(tmp_path, LOGGER),
        participants(),
        participants(),
        lambda point: point != "before_write" or release.wait(30),
    )
    saver.save({"weight": torch.ones(2)}, 1)
    saver.abandon(limit_s=0.01)
    with pytest.raises(RuntimeError, match="given up"):
        saver.save({"weight": torch.ones(2)}, 1)
    release.set()


def test_strides_may_change_between_saves_in_the_background(tmp_path: Path):
    weight = torch.arange(6.0).view(2, 3)
    saver = CheckpointSaver(CheckpointFolder(tmp_path, LOGGER), participants(), participants())
    saver.save({"weight": weight}, 1)
    saver.save({"weight": weight.t().contiguous().t()}, 2)
    saver.close()
    direct = CheckpointSaver(CheckpointFolder(tmp_path / "direct", LOGGER), participants())
    direct.save({"weight": weight.t().contiguous().t()}, 2)
    assert folder_content(tmp_path / "save-2") == folder_content(tmp_path / "direct" / "save-2")


@pytest.mark.parametrize("on_corrupt", ["raise", "fallback"])
def test_a_damaged_record_counts_as_damage(tmp_path: Path, on_corrupt: Literal["raise", "fallback"]):
    for step in (1, 2):
        save(tmp_path, None, step=step)
    (tmp_path / "save-2" / "commit.json").write_bytes(b"{}")
    folder = CheckpointFolder(tmp_path, LOGGER)
    if on_corrupt == "fallback":
        found = find_checkpoint(folder, participants(), on_corrupt, LOGGER)
        assert found is not None
        assert found.step == 1
    else:
        with pytest.raises(ValueError, match=r"commit\.json is damaged"):
            find_checkpoint(folder, participants(), on_corrupt, LOGGER)
