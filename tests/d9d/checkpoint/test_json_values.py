"""Values of states as JSON."""

import collections
import enum
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from d9d.checkpoint.json_values import from_json, to_json

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.sampled_from([torch.bfloat16, torch.int8, torch.Size([2, 3]), torch.Size([])])
)
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=20,
)


def typed(value: Any) -> Any:
    """Tell 1 from True and from 1.0, at every depth."""
    match value:
        case list() | tuple():
            return type(value), [typed(item) for item in value]
        case dict():
            return [(typed(key), typed(item)) for key, item in value.items()]
        case _:
            return type(value), value


@given(VALUES)
def test_what_is_read_is_what_was_written(value: Any):
    assert typed(from_json(to_json(value, "key"), "key")) == typed(value)


def test_floats_that_json_has_not():
    read = from_json(to_json([math.nan, math.inf, -math.inf], "key"), "key")
    assert math.isnan(read[0])
    assert read[1:] == [math.inf, -math.inf]
    json.loads(to_json(math.nan, "key"), parse_constant=pytest.fail)  # any reader of JSON can read it


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="<u4").reshape(2, 3).T,
        np.float64(0.1),
        np.bool_(True),
        np.zeros((0, 2)),
        np.array(7, dtype=">i2"),
    ],
)
def test_numpy(array: Any):
    read = from_json(to_json({"state": array}, "key"), "key")["state"]
    assert type(read) is type(array)
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read, array)


def test_sets_have_one_text():
    assert from_json(to_json({"a", "b", 1}, "key"), "key") == {"a", "b", 1}
    assert to_json({"a", "b", "c"}, "key") == to_json({"c", "a", "b"}, "key")


Point = collections.namedtuple("Point", "x y")  # as users have them


class Number(enum.IntEnum):
    ONE = 1


def test_ordered_dictionaries_stay_such():
    value = collections.OrderedDict([("b", 1), (2, [])])
    read = from_json(to_json(value, "key"), "key")
    assert type(read) is collections.OrderedDict
    assert read == value


@pytest.mark.parametrize("value", [collections.Counter({4: 2, 2: 1}), Path("a") / "b"])
def test_counters_and_paths_stay_such(value: Any):
    """As MultiStepLR keeps its milestones, and hyper-parameters have them."""
    read = from_json(to_json([value], "key"), "key")
    assert type(read[0]) is type(value)
    assert read == [value]


@pytest.mark.parametrize("value", [Point(1, 2), collections.defaultdict(int), Number.ONE, np.ma.masked_array([1])])
def test_what_would_come_back_as_something_else_is_refused(value: Any):
    with pytest.raises(TypeError, match="cannot hold task"):
        to_json(value, "task")


@pytest.mark.parametrize("value", [frozenset(), object(), torch.ones(1), print, 1j, np.array(["a"]), np.array([None])])
def test_others_are_refused_with_their_place(value: Any):
    with pytest.raises(TypeError, match=r"cannot hold task\.seen\[1\], of type .*nothing is pickled"):
        to_json({"seen": [0, value]}, "task")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff",
        b'{"!dtype":"Tensor"}',
        b'{"!code":"1"}',
        b'{"!tuple":"ab"}',
        b"[" * 100_000,
        b'{"!dict":[[1]]}',
    ],
)
def test_other_texts_are_refused(text: bytes):
    with pytest.raises(ValueError, match="key does not hold a value that was saved"):
        from_json(text, "key")
