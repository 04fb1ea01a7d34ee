"""A short text that changes with the samples of a dataset, to notice that a run resumes on other data."""

import copy
import dataclasses
import hashlib
import struct
from collections.abc import Mapping, Set
from typing import Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import DataLoader, Dataset

from d9d.dataset.lanes.generators import KeptGenerators
from d9d.dataset.lanes.loader_processes import OwnProcessGroup
from d9d.dataset.lanes.sample_loading import MapDataset, load_sample

__all__ = ["FingerprintedDataset", "dataset_fingerprint"]

_NUM_PROBES = 34
_DIGEST_BYTES = 16


@runtime_checkable
class FingerprintedDataset(Protocol):
    """Describes a dataset that knows a name of its contents, such as a hash of its files."""

    def fingerprint(self) -> str:
        """Return a text that is the same for the same samples, on every machine, and another one otherwise."""
        ...


def dataset_fingerprint(dataset: MapDataset, *, in_process_of_its_own: bool = False) -> str:
    """Return a text that is very likely to differ for datasets with other samples.

    It is what the dataset itself says (`FingerprintedDataset`), or else its class, its length and a digest of up to 34
    samples that are spread evenly over it. Tensors, arrays, strings, bytes, numbers and nests of these count by value;
    of other objects, the type counts alone. Random numbers that loading draws are the same every time.

    It loads samples: in a job, call it on one rank and hand the result to the others. A dataset with a state gets back the
    one that it had.

    Args:
        dataset: Map-style dataset of at least one sample.
        in_process_of_its_own: Load the samples in a loader process of PyTorch, for a dataset that is read in such ones
            later. Many open their files at the first sample, and processes that are forked after that share the position
            in these files.
    """
    if in_process_of_its_own:
        item = _FingerprintItem(dataset)
        (fingerprint,) = DataLoader(item, batch_size=None, num_workers=1, worker_init_fn=OwnProcessGroup())
        return fingerprint
    if isinstance(dataset, FingerprintedDataset):
        return dataset.fingerprint()  # one of several sources loads samples, too
    # Copied: a dataset may return what it goes on to change.
    state = copy.deepcopy(dataset.state_dict()) if isinstance(dataset, Stateful) else None
    num_samples = len(dataset)
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with KeptGenerators():
        for index in _probes(num_samples):
            digest.update(_digest_of(load_sample(dataset, index, seed=index)))
    if isinstance(dataset, Stateful) and state is not None:
        dataset.load_state_dict(state)
    kind = type(dataset)
    return f"{kind.__module__}.{kind.__qualname__}/{num_samples}/{digest.hexdigest()}"


class _FingerprintItem(Dataset[str]):
    """Shows the fingerprint of a dataset as its only item, so that a loader process computes it."""

    def __init__(self, dataset: MapDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        return dataset_fingerprint(self._dataset)


def _probes(num_samples: int) -> list[int]:
    last = num_samples - 1
    return sorted({last * step // (_NUM_PROBES - 1) for step in range(_NUM_PROBES)})


def _digest_of(value: object) -> bytes:
    """Return the digest of one node; those of its children go into it, so that no nesting looks like another."""
    kind, content = _content(value)
    node = hashlib.blake2b(kind.encode(), digest_size=_DIGEST_BYTES)
    for part in content:
        node.update(struct.pack("<Q", len(part)))
        node.update(part)
    return node.digest()


def _content(value: object) -> tuple[str, list[bytes]]:  # one case per type
    match value:
        case None:
            return "none", []
        case bool() | int() | np.bool_() | np.integer():
            return "int", [str(int(value)).encode()]
        case float() | np.floating():
            return "float", [struct.pack("<d", float(value))]
        case complex():
            return "complex", [struct.pack("<dd", value.real, value.imag)]
        case str():
            return "str", [value.encode("utf-8", "surrogatepass")]
        case bytes() | bytearray():
            return "bytes", [bytes(value)]
        case torch.Tensor():
            return _tensor_content(value)
        case np.ndarray():
            return _array_content(value)
        case _:
            return _container_content(value)


def _container_content(value: object) -> tuple[str, list[bytes]]:
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return "mapping", sorted(_digest_of(key) + _digest_of(item) for key, item in items)
    if isinstance(value, Set):
        return "set", sorted(_digest_of(item) for item in cast("Set[object]", value))
    if isinstance(value, (list, tuple)):
        return "sequence", [_digest_of(item) for item in cast("list[object]", value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        children = [(name, getattr(value, name)) for name in names]  # introspection: any dataclass is a node
        return type(value).__qualname__, [_digest_of(child) for child in children]
    return f"object {type(value).__module__}.{type(value).__qualname__}", []


def _tensor_content(tensor: torch.Tensor) -> tuple[str, list[bytes]]:
    kind = f"tensor {tensor.dtype} {tuple(tensor.shape)} {tensor.layout}"
    if tensor.layout is not torch.strided or tensor.is_meta:
        return kind, []
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return kind, [plain.reshape(-1).view(torch.uint8).numpy().tobytes()]


def _array_content(array: np.ndarray) -> tuple[str, list[bytes]]:
    kind = f"array {array.dtype.str} {array.shape}"
    if array.dtype.hasobject:
        return kind, [_digest_of(item) for item in array.reshape(-1).tolist()]
    return kind, [array.tobytes()]
