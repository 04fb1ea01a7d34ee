"""Errors of one rank that all ranks raise."""

import errno
from pathlib import Path

import pytest
import torch.distributed as dist

from d9d.core.participants import Participants


def world() -> Participants:
    group = dist.group.WORLD
    assert group is not None
    return Participants([group])


@pytest.mark.world_size(2)
def test_errors_of_the_system_keep_number_and_path(tmp_path: Path):
    missing = tmp_path / "missing"
    with (
        pytest.raises(FileNotFoundError, match="on rank 1 of 2: No such file or directory") as raised,
        world().failing_together(),
    ):
        (missing if dist.get_rank() == 1 else tmp_path).stat()
    assert (raised.value.errno, raised.value.filename) == (errno.ENOENT, str(missing))

    with pytest.raises(PermissionError, match="on ranks 0, 1 of 2: refused") as denied:
        world().raise_together(PermissionError(errno.EACCES, "refused"))
    assert (denied.value.errno, denied.value.filename) == (errno.EACCES, None)


@pytest.mark.world_size(2)
def test_errors_of_several_kinds(tmp_path: Path):
    full = OSError(errno.ENOSPC, "No space left on device", "a")
    other = ValueError("wrong")
    with pytest.raises(
        OSError, match=r"on rank 0 of 2: \[Errno 28\] No space left on device: 'a'\non rank 1 of 2: wrong"
    ):
        world().raise_together(full if dist.get_rank() == 0 else other)
    with pytest.raises(OSError, match=r"on rank 0 of 2: .*'a'\non rank 1 of 2: .*'b'") as several:
        world().raise_together(full if dist.get_rank() == 0 else OSError(errno.ENOSPC, "No space left on device", "b"))
    assert several.value.errno is None
    with pytest.raises(ValueError, match="on ranks 0, 1 of 2: wrong"):
        world().raise_together(other)
    with pytest.raises(RuntimeError, match="on rank 1 of 2: KeyError: 'x'"):
        world().raise_together(KeyError("x") if dist.get_rank() == 1 else None)
    with pytest.raises(FileNotFoundError, match="on rank 0 of 2: gone"):
        world().raise_together(FileNotFoundError("gone") if dist.get_rank() == 0 else None)
    world().raise_together(None)


def test_a_process_on_its_own_raises_what_it_has():
    error = KeyError("x")
    with pytest.raises(KeyError) as raised:
        Participants().raise_together(error)
    assert raised.value is error
