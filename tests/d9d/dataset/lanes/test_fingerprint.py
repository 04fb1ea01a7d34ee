"""Fingerprints: the same for the same samples, others otherwise."""

import dataclasses
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from d9d.dataset.lanes import MixtureDataset, dataset_fingerprint
from d9d.dataset.lanes.fingerprint import _probes


class Samples:
    def __init__(self, samples: list) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int):
        return self.samples[index]


@dataclasses.dataclass
class Pair:
    left: object
    right: object


class Opaque:
    def __init__(self, value: int) -> None:
        self.value = value


VALUES = [
    None,
    0,
    1,
    1.0,
    1.5,
    float("nan"),
    1j,
    "a",
    "b",
    "",
    b"a",
    torch.tensor(1),
    torch.tensor([1]),
    torch.tensor([1, 2]),
    torch.tensor([[1, 2]]),
    torch.tensor([1, 2], dtype=torch.int32),
    torch.tensor([1.0, 2.0]),
    torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    torch.tensor([1.0, 3.0], dtype=torch.bfloat16),
    torch.tensor([]),
    torch.tensor([True]),
    np.array([1, 2]),
    np.array([1.0, 2.0]),
    np.array(["x", "y"]),
    np.array([{"a": 1}, None], dtype=object),
    np.array([{"a": 2}, None], dtype=object),
    [],
    [1],
    [1, 2],
    [[1], 2],
    [[1, 2]],
    {},
    {"a": 1},
    {"a": 2},
    {"b": 1},
    {1, 2},
    Pair(1, 2),
    Pair(2, 1),
    Opaque(1),
]


def fingerprint(value: object) -> str:
    return dataset_fingerprint(Samples([value]))


def test_different_values_have_different_fingerprints():
    fingerprints = [fingerprint(value) for value in VALUES]
    assert len(set(fingerprints)) == len(VALUES)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (torch.arange(6).reshape(2, 3).T, torch.arange(6).reshape(2, 3).T.contiguous()),
        (np.arange(6).reshape(2, 3).T, np.arange(6).reshape(2, 3).T.copy()),
        (Opaque(1), Opaque(2)),
        (1, np.int64(1)),
        (torch.ones(2, requires_grad=True), torch.ones(2)),
    ],
)
def test_what_does_not_count(one, other):
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize(
    ("num_samples", "expected"),
    [(1, [0]), (2, [0, 1]), (34, list(range(34))), (34_000, [33_999 * i // 33 for i in range(34)])],
)
def test_probes_reach_from_the_first_to_the_last(num_samples, expected):
    assert _probes(num_samples) == expected
    assert expected[-1] == num_samples - 1


def test_the_length_counts_even_where_no_probe_looks():
    assert dataset_fingerprint(Samples([0] * 100)) != dataset_fingerprint(Samples([0] * 101))


def test_a_changed_probe_is_noticed():
    changed = list(range(1000))
    changed[999] = -1
    assert dataset_fingerprint(Samples(list(range(1000)))) != dataset_fingerprint(Samples(changed))


def test_a_dataset_that_knows_its_fingerprint_is_asked():
    class Named(Samples):
        def fingerprint(self) -> str:
            return "shards-v2"

    assert dataset_fingerprint(Named([])) == "shards-v2"


def test_samples_with_random_parts_have_one_fingerprint_and_disturb_nobody():
    class Noisy(Samples):
        def __getitem__(self, index: int):
            return [torch.rand(2), np.random.rand(), random.random()]

    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    expected = (torch.rand(()).item(), np.random.rand(), random.random())
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    assert dataset_fingerprint(Noisy([0] * 5)) == dataset_fingerprint(Noisy([0] * 5))
    assert (torch.rand(()).item(), np.random.rand(), random.random()) == expected


def test_another_process_finds_the_same():
    # Its hash seed is another one, so sets come in another order. A list is a map-style dataset, too.
    samples = [{"a": {"x", "y", "z"}, "b": [1, 2.5, None]}]
    script = f"from d9d.dataset.lanes import dataset_fingerprint\nprint(dataset_fingerprint({samples!r}))"
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONHASHSEED": "12345", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == dataset_fingerprint(samples)


def test_a_dataset_with_a_state_gets_it_back():
    class Advancing(Samples):
        def __init__(self, samples: list) -> None:
            super().__init__(samples)
            self.state = {"num_loaded": 3}

        def __getitem__(self, index: int):
            self.state["num_loaded"] += 1
            return super().__getitem__(index)

        def state_dict(self):
            return self.state

        def load_state_dict(self, state_dict):
            self.state = state_dict

    dataset = Advancing([0] * 5)
    dataset_fingerprint(dataset)
    assert dataset.state_dict() == {"num_loaded": 3}


class OpensInProcess:
    """Notes the process in which a sample is loaded."""

    def __init__(self) -> None:
        self.opened_in: int | None = None

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        self.opened_in = os.getpid()
        return index


def test_sources_of_a_mixture_are_not_opened_here():
    """Loader processes that are forked afterwards would share what is open."""
    source = OpensInProcess()
    dataset_fingerprint(MixtureDataset([source, source], [1, 1], num_samples=4), in_process_of_its_own=True)
    assert source.opened_in is None
