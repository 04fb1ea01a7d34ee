"""Parts of tensors written to their places, compared with copies that torch makes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from d9d.model_state.io.export import ExportOptions
from d9d.model_state.io.file_layout import StoredTensor, lay_out
from d9d.model_state.io.laid_out_files import LaidOutFiles
from d9d.model_state.mapper.pieces import Box


def files_of(
    directory: Path,
    tensors: dict[str, torch.Tensor],
    rank: int = 0,
    dtype: torch.dtype | None = None,
    *,
    in_background: bool = False,
) -> LaidOutFiles:
    layouts = lay_out([StoredTensor(name, tuple(t.shape), dtype or t.dtype) for name, t in tensors.items()], 10**9)
    paths = [directory / f"{number}.safetensors" for number in range(len(layouts))]
    return LaidOutFiles(paths, layouts, ExportOptions(dtype=dtype), rank, 0, in_background=in_background)


def boxes_of(shape: tuple[int, ...], cuts: list[list[int]]) -> list[Box]:
    """All boxes between cuts of the dimensions."""
    boxes = [Box((), ())]
    for size, own in zip(shape, cuts, strict=True):
        ends = [*own, size]
        boxes = [
            Box((*box.start, start), (*box.shape, end - start))
            for box in boxes
            for start, end in zip([0, *own], ends, strict=True)
        ]
    return boxes


CASES: list[tuple[tuple[int, ...], list[list[int]]]] = [
    ((), []),
    ((5,), [[2]]),
    ((4, 6), [[1], []]),
    ((4, 6), [[], [2, 5]]),
    ((3, 4, 5), [[1], [2], [3]]),
    ((3, 4, 5), [[], [1], []]),
    ((1, 4, 1), [[], [3], []]),
    # More than is held at a time, along the first and along another dimension.
    ((1300, 1100), [[700], [3, 600]]),
    ((2, 1100, 700), [[1], [], [500]]),
]


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("stored_as", [None, torch.bfloat16])
@pytest.mark.parametrize(("shape", "cuts"), CASES)
def test_boxes(
    tmp_path: Path, shape: tuple[int, ...], cuts: list[list[int]], stored_as: torch.dtype | None, in_background: bool
):
    torch.manual_seed(0)
    whole = torch.randn(shape)
    files = files_of(tmp_path, {"x": whole, "other": whole.clone()}, dtype=stored_as, in_background=in_background)
    files.create()
    for box in boxes_of(shape, cuts):
        files.write("x", box, whole[box.slices])
        # Of other strides.
        values = whole[box.slices]
        files.write("other", box, values.T.contiguous().T if values.ndim == 2 else values)
    files.flush()
    [written] = files.complete()
    assert written.num_bytes == (tmp_path / "0.safetensors").stat().st_size
    found = load_file(tmp_path / "0.safetensors")
    expected = whole if stored_as is None else whole.to(stored_as)
    assert torch.equal(found["x"], expected)
    assert torch.equal(found["other"], expected)


def test_several_ranks_write_one_file(tmp_path: Path):
    whole = torch.arange(24.0).view(4, 6)
    ranks = [files_of(tmp_path, {"x": whole}, rank) for rank in range(2)]
    ranks[0].create()
    for rank, files in enumerate(ranks):
        columns = slice(3 * rank, 3 * rank + 3)
        files.write("x", Box((0, 3 * rank), (4, 3)), whole[:, columns])
        files.flush()
    # Zeros where the header will be: nobody takes the file for complete.
    assert (tmp_path / "0.safetensors").read_bytes()[:8] == bytes(8)
    reports = [files.complete() for files in ranks]
    assert [len(report) for report in reports] == [1, 0]
    assert torch.equal(load_file(tmp_path / "0.safetensors")["x"], whole)
    for files in ranks:
        files.abort()
    assert list(tmp_path.iterdir()) == []


def test_what_nobody_writes_is_zero(tmp_path: Path):
    files = files_of(tmp_path, {"x": torch.ones(4, 2)})
    files.create()
    files.write("x", Box((0, 0), (3, 2)), torch.ones(3, 2))
    files.flush()
    files.complete()
    assert load_file(tmp_path / "0.safetensors")["x"].tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]


def test_conversions_in_turn(tmp_path: Path):
    values = torch.tensor([1.001, 3.3])
    files = files_of(tmp_path, {"x": values})
    files.create()
    files.write("x", Box.whole((2,)), values, [torch.bfloat16, torch.float32])
    files.flush()
    files.complete()
    assert torch.equal(load_file(tmp_path / "0.safetensors")["x"], values.bfloat16().float())


def test_values_out_of_range(tmp_path: Path):
    files = files_of(tmp_path, {"x": torch.ones(2)}, dtype=torch.float16)
    files.create()
    with pytest.raises(ValueError, match="x has values beyond the range"):
        files.write("x", Box.whole((2,)), torch.tensor([1.0, 1e6]))
