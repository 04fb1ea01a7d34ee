"""Values of one key, merged by hand-computed formulas."""

import math

import pytest
import torch

from d9d_lightning.logs.merge import KeyMerge, SampleCount


def merged(reduction, values, sizes=None, *, counts_samples=False):
    merge = KeyMerge(reduction=reduction, counts_samples=counts_samples)
    for value, size in zip(values, sizes or [1] * len(values), strict=True):
        merge.add(value, None, SampleCount(torch.zeros(size)))
    return merge.value(), merge.batch_size()


@pytest.mark.parametrize("reduction", ["max", "min"])
@pytest.mark.parametrize("as_value", [float, torch.tensor], ids=["float", "tensor"])
@pytest.mark.parametrize("where", [0, 1])
def test_extremes_show_what_is_not_a_number(reduction, as_value, where):
    values = [as_value(1.0), as_value(2.0)]
    values[where] = as_value(math.nan)
    assert math.isnan(merged(reduction, values)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_means_are_of_at_least_single_precision(dtype):
    value, size = merged("mean", torch.tensor([1.0, 1.0 + 2**-7], dtype=dtype), [1, 3], counts_samples=True)
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (value, size) == (1 + 0.75 * 2**-7, 4)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_integers(dtype):
    values = torch.tensor([1, 1, 0], dtype=dtype)
    value, _ = merged("mean", values, [3, 4, 1])
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(7 / 8)
    assert merged("sum", values)[0] == 2
    assert merged("sum", torch.full((3,), 200, dtype=torch.uint8))[0] == 600


def test_numbers_and_tensors_mix():
    assert merged("mean", [1, torch.tensor(2), 4.0], [1, 2, 1])[0] == 9 / 4
    assert merged("mean", [torch.tensor(2), 1, 4.5], [1, 1, 2])[0] == 12 / 4
    assert merged("sum", [1, torch.tensor(2), torch.tensor(0.5)])[0] == 3.5
    assert merged("max", [1, torch.tensor(2.5), 2])[0] == 2.5
    assert merged("min", [torch.tensor(2), 0.5, torch.tensor(1)])[0] == 0.5


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize("first", [1, 1.5])
def test_fractional_sizes(first, dtype):
    merge = KeyMerge(reduction="mean", counts_samples=True)
    for value, size in ((first, 0.5), (torch.tensor(3, dtype=dtype), 1.5), (torch.tensor(5, dtype=dtype), 2.0)):
        merge.add(value, size, SampleCount(None))
    assert merge.value() == (first * 0.5 + 4.5 + 10) / 4
    assert merge.batch_size() == 4.0


def test_sizes_are_looked_for_where_lightning_does():
    recursive = []
    recursive.append(recursive)
    for batch in (object(), None, [], recursive):
        assert SampleCount(batch).guessed() == 1
    assert SampleCount(None).counted() == 1
    assert SampleCount({"text": ["a"], "x": torch.zeros(3, 5)}).guessed() == 3
