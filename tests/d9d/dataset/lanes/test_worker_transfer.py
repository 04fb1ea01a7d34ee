"""Items of loader processes: what arrives is what was sent, in messages that a pipe holds."""

import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from d9d.dataset.lanes.worker_transfer import WorkerTransfer, message_bytes

FILES = Path("/proc/self/fd")
"""The files that this process has open."""


@dataclasses.dataclass
class Item:
    tokens: torch.Tensor
    labels: torch.Tensor
    name: str


class Named(dict):
    pass


ITEMS = {
    "tensor": torch.arange(6).view(2, 3).T,
    "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
    "empty": torch.zeros(0, 3, dtype=torch.bool),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "large": torch.arange(5000),
    "array": np.arange(5000),
    "gradient": torch.ones(2, requires_grad=True),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "text": "text",
    "none": None,
}


class Single:
    """Shows one item."""

    def __init__(self, item: object) -> None:
        self.item = item

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> object:
        return self.item


def through_a_process(item: object, transfer: WorkerTransfer) -> object:
    items = iter(DataLoader(Single(item), batch_size=None, num_workers=1, collate_fn=transfer.pack))
    return transfer.unpack(next(items))


@pytest.mark.parametrize("is_copied", [False, True])
def test_items_come_as_they_are(is_copied):
    found = through_a_process(ITEMS, WorkerTransfer(max_bytes=4000, is_copied=is_copied))
    assert list(found) == list(ITEMS)
    for name, value in ITEMS.items():
        assert type(found[name]) is type(value)
        if isinstance(value, torch.Tensor) and not value.is_nested:
            assert (found[name].dtype, found[name].requires_grad) == (value.dtype, value.requires_grad)
            # PyTorch itself loses conjugation on the way (2.13).
            assert (name == "conjugate" and not is_copied) or torch.equal(found[name], value)
    assert [len(row) for row in found["nested"].unbind()] == [2, 3]
    assert found["array"].tolist() == list(range(5000))


@pytest.mark.parametrize("max_bytes", [64, 4000])
def test_types_and_shared_tensors_stay(max_bytes):
    tokens = torch.arange(40)
    item = Item(tokens, tokens, "a")
    found = through_a_process((item, Named(tokens=tokens)), WorkerTransfer(max_bytes=max_bytes, is_copied=True))
    assert (type(found[0]), type(found[1]), found[0].name) == (Item, Named, "a")
    assert found[0].tokens is found[0].labels
    found[0].tokens.zero_()  # it can be changed
    assert found[1]["tokens"].tolist() == list(range(40))


def size_of(message: bytes) -> int:
    return len(pickle.dumps((0, message))) + 4


ITEM_OF_MANY = [torch.arange(3) for _ in range(260)]


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("item", [[torch.arange(1500)], ITEM_OF_MANY, ["text" * 5000], [np.arange(5000)]], ids=len)
def test_messages_are_short(item, is_copied):
    for num_under_way in (1, 4, 16, 1000):
        transfer = WorkerTransfer(max_bytes=message_bytes(num_under_way), is_copied=is_copied)
        # A write of up to 4 KiB is never cut, one of up to 16 KiB only if the pipe of 64 KiB is full.
        message = size_of(transfer.pack(item))
        assert message <= 4096 or (message <= 16384 and message * (num_under_way + 1) <= 65536)


@pytest.mark.parametrize("is_copied", [False, True])
def test_many_small_tensors_come_as_they_are(is_copied):
    found = through_a_process(ITEM_OF_MANY, WorkerTransfer(max_bytes=4000, is_copied=is_copied))
    assert [each.tolist() for each in found] == [[0, 1, 2]] * 260


def test_large_items_keep_no_files_open_if_they_are_copied():
    # Each of 20 tensors would keep a file open in the process that trains.
    items = [[torch.arange(1000 + index) for index in range(20)]]
    transfer = WorkerTransfer(max_bytes=4000, is_copied=True)
    iterator = iter(DataLoader(items, batch_size=None, num_workers=1, collate_fn=transfer.pack))
    num_open = len(list(FILES.iterdir()))
    found = transfer.unpack(next(iterator))
    assert [row.tolist() for row in found] == [list(range(1000 + index)) for index in range(20)]
    assert len(list(FILES.iterdir())) - num_open < 5
