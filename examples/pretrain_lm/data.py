"""Text that every machine has: the source files of Python's standard library, one token per byte."""

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset

NUM_BYTES = 256
MAX_TEXT_BYTES = 2_000_000


class SourceFiles(Dataset):
    """Pieces of the text from random places, the same ones in every run: bytes, and one more to predict the last."""

    def __init__(self, num_samples: int, length: int):
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)[:MAX_TEXT_BYTES]
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        generator = torch.Generator().manual_seed(0)
        self._starts = torch.randint(len(self._text) - length, (num_samples,), generator=generator)
        self._length = length

    def __getitem__(self, index: int) -> torch.Tensor:
        start = int(self._starts[index])
        return self._text[start : start + self._length + 1].long()  # (T + 1,)

    def __len__(self) -> int:
        return len(self._starts)
