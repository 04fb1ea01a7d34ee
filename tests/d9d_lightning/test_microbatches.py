"""Cutting batches into microbatches, and putting outputs together."""

import collections
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d_lightning.steps.microbatches import merge_outputs, split_batch


class Encoding(collections.UserDict):
    """As tokenizers return them."""


Pair = collections.namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    name: str
    lengths: list
    note: int | None = None


def parts_of(batch, num_microbatches, module=None):
    parts, _ = split_batch(batch, num_microbatches, module)
    return parts


@settings(deadline=None)
@given(num_samples=st.integers(1, 40), num_microbatches=st.integers(1, 12))
def test_parts_are_views_of_about_equal_size_in_order(num_samples, num_microbatches):
    batch = torch.arange(num_samples)
    parts, weights = split_batch(batch, num_microbatches, None)
    sizes = [len(part) for part in parts]
    assert len(parts) == min(num_samples, num_microbatches)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert torch.equal(torch.cat(list(parts)), batch)
    assert list(weights) == [size / num_samples for size in sizes]
    assert all(part.untyped_storage().data_ptr() == batch.untyped_storage().data_ptr() for part in parts)


def test_containers_keep_their_types():
    x, y = torch.arange(8).reshape(4, 2), torch.arange(4)
    batch = {
        "tuple": (x, y),
        "list": [x, 7],
        "named": Pair(x, y),
        "encoding": Encoding(ids=x),
        "data": Sample(x, "all", ["a", "b", "c", "d"]),
        "texts": ("p", "q", "r", "s"),
        "scalar": torch.tensor(3.0),
        "none": None,
        "empty": {},
    }
    first, second = parts_of(batch, 2)
    assert list(first) == list(batch)
    assert torch.equal(first["tuple"][0], x[:2])
    assert torch.equal(second["tuple"][1], y[2:])
    assert (type(second["list"]), second["list"][1]) == (list, 7)
    assert (type(first["named"]), first["named"].y.tolist()) == (Pair, [0, 1])
    assert (type(second["encoding"]), second["encoding"]["ids"].tolist()) == (Encoding, [[4, 5], [6, 7]])
    assert (second["data"].lengths, second["data"].name, second["data"].note) == (["c", "d"], "all", None)
    assert first["texts"] == ("p", "q")
    assert (first["scalar"] == 3, first["none"], second["empty"]) == (True, None, {})


def test_a_module_may_cut_its_batches_itself():
    class Cuts:
        def split_batch(self, batch, num_microbatches):
            return [batch[:1], batch[1:]]

    parts, weights = split_batch(torch.arange(4), 3, Cuts())
    assert [part.tolist() for part in parts] == [[0], [1, 2, 3]]
    assert list(weights) == [0.25, 0.75]
    with pytest.raises(ValueError, match="2 parts: it must return 1 to 1"):
        split_batch(torch.arange(4), 1, Cuts())


@pytest.mark.parametrize(
    ("batch", "error", "text"),
    [
        ({"x": 1}, ValueError, "holds no tensor with a dimension"),
        (
            {"x": torch.zeros(4), "y": torch.zeros(3)},
            ValueError,
            r"batch\['y'\] has 3 entries .* another tensor of the batch has 4",
        ),
        ({"x": torch.zeros(4), "y": object()}, TypeError, r"batch\['y'\] is a object"),
    ],
)
def test_what_can_not_be_cut(batch, error, text):
    with pytest.raises(error, match=text):
        split_batch(batch, 2, None)
    with pytest.raises(error, match="split_batch"):
        split_batch(batch, 2, None)


def test_whole_batches_may_be_of_any_type():
    batch = object()
    [part], [weight] = split_batch(batch, 1, None)
    assert part is batch
    assert weight == 1.0


def test_outputs_are_those_of_the_whole_batch():
    outputs = [
        {
            "loss": torch.tensor(1.0),
            "logits": torch.zeros(3, 2),
            "n": 3,
            "names": ["a", "b", "c"],
            "pair": Pair(1, None),
        },
        {"loss": torch.tensor(5.0), "logits": torch.ones(1, 2), "n": 7, "names": ["d"], "pair": Pair(1, None)},
    ]
    merged = merge_outputs(outputs, [0.75, 0.25])
    assert merged["loss"] == 2.0
    assert merged["logits"].tolist() == [[0, 0], [0, 0], [0, 0], [1, 1]]
    assert merged["n"] == 4.0
    assert merged["names"] == ["a", "b", "c", "d"]
    assert merged["pair"] == Pair(1, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64], ids=str)
def test_scalars_become_their_weighted_mean(dtype):
    merged = merge_outputs([torch.tensor(1, dtype=dtype), torch.tensor(5, dtype=dtype)], [0.75, 0.25])
    assert merged == 2.0
    assert merged.ndim == 0
    assert merged.dtype == (torch.float32 if dtype == torch.int64 else dtype)


def test_the_parts_of_a_batch_may_be_changed_in_place():
    """As its own tensor each: what a part saves for its backward pass is not spoilt by what happens to another."""
    scale = torch.ones(1, requires_grad=True)
    first, second = parts_of(torch.tensor([[2.0], [3.0]]), 2)
    first.mul_(scale)
    second.mul_(scale)
    first.sum().backward()
    second.sum().backward()
    assert scale.grad.item() == 5.0


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ([torch.zeros(()), None], "different types .*: NoneType, Tensor"),
        ([{"a": 1}, {"b": 1}], "different entries"),
        ([object(), object()], "returned is another object for each microbatch"),
        ([{"notes": ("x", 1)}, {"notes": ("y", 1)}], r"returned\['notes'\]\[0\] is another str for each microbatch"),
    ],
)
def test_what_can_not_be_merged(outputs, text):
    with pytest.raises(TypeError, match=text):
        merge_outputs(outputs, [0.5, 0.5])
