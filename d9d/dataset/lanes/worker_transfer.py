"""How items get from loader processes to the one that trains: small ones within the message, others in shared memory."""

import dataclasses
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch

from d9d.core.pytree import tree_map

__all__ = ["WorkerTransfer", "message_bytes", "tried"]

_PIPE_BYTES = 65_536
"""What a pipe holds until writing waits for the reader."""
_ONE_WRITE_BYTES = 16_384
"""Python writes longer messages in two parts (`multiprocessing.connection`, 3.14)."""
_ATOMIC_BYTES = 4_096
_ENVELOPE_BYTES = 256
"""Room for what the loader adds to a message."""


def message_bytes(num_under_way: int) -> int:
    """Return how many bytes a message may have, see [Note: small items go through the pipe].

    Args:
        num_under_way: Most messages that nobody has read yet.
    """
    share = min(_ONE_WRITE_BYTES, _PIPE_BYTES // (num_under_way + 1))
    return max(share, _ATOMIC_BYTES) - _ENVELOPE_BYTES


# `Any`, here and below: items are of any type.
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WorkerTransfer:
    """Packs items in loader processes, which it travels to, and unpacks them in the process that trains.

    [Note: small items go through the pipe]
    PyTorch puts each tensor into shared memory of its own. The process that trains connects to the loader process to be
    given the file behind it, which takes several hundred microseconds, and the file stays open as long as the tensor lives.
    The bytes of a small item travel in the message that is sent anyway, for a quarter of that. Messages must stay so short
    that the pipe holds all that are under way: a process that is killed while it waits for room leaves half a message, and
    whoever reads it waits for the rest for ever. So a message that is longer goes into shared memory as a whole.

    [Note: messages are made at once]
    A queue makes its messages in a thread, which only prints what goes wrong with one; it is lost then, and the process that
    trains waits for ever. So messages are made where an error is told, and the queue is given bytes.

    Attributes:
        max_bytes: Most bytes of a message.
        is_copied: Whether larger items are copied out of shared memory: then no files stay open, however many tensors wait for
            their use. Otherwise their tensors go as PyTorch sends them, and stay there.
    """

    max_bytes: int
    is_copied: bool = False

    def pack(self, item: Any) -> bytes:  # noqa: ANN401
        """Return what to send for an item.

        Raises:
            TypeError: It cannot be sent.
        """
        packer = _Packer()
        packed = tree_map(packer.place, item)
        if packer.contents and (self.is_copied or packer.num_bytes <= self.max_bytes):
            message = _message(_Packed(packed, torch.cat(packer.contents).numpy().tobytes()))
        else:
            message = _message(item)
        if len(message) > self.max_bytes:
            message = _message(_LongMessage(torch.frombuffer(bytearray(message), dtype=torch.uint8)))
        return message

    def unpack(self, message: bytes) -> Any:  # noqa: ANN401
        """Return the item that was packed."""
        item = _read(message)
        if isinstance(item, _LongMessage):
            item = _read(item.message.numpy().data)
        return item.item() if isinstance(item, _Packed) else item


def tried(item: Any) -> Any:  # noqa: ANN401
    """Return an item of a loader process as it is, if it can be sent: for a thread that must find its tensors.

    Raises:
        TypeError: It cannot.
    """
    # Without its plain tensors, which would go into shared memory.
    _message(tree_map(_Packer().place, item))
    return item


def _message(sent: object) -> bytes:
    try:
        return bytes(ForkingPickler.dumps(sent))
    except Exception as error:
        raise TypeError(
            f"a loader process has made something that cannot be sent to the process that trains: {error!r}. Let the dataset and "
            f"the collate function return tensors, arrays, and other values that can be pickled, or set num_workers to 0."
        ) from error


def _read(message: bytes | memoryview) -> Any:  # noqa: ANN401
    # A plain function, which typeshed takes for a method.
    return ForkingPickler.loads(message)  # pyright: ignore[reportAttributeAccessIssue]


class _LongMessage(NamedTuple):
    """Holds a message that a pipe might not."""

    message: torch.Tensor


class _Slot:
    """Stands for a tensor whose values are elsewhere. As a plain class, it is a leaf of trees."""

    __slots__ = ("_dtype", "_shape", "_start", "_stop", "_tensor")

    def __init__(self, start: int, stop: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._start = start
        self._stop = stop
        self._dtype = dtype
        self._shape = shape
        self._tensor: torch.Tensor | None = None

    def __reduce__(self) -> tuple[type["_Slot"], tuple[object, ...]]:
        """Travel as arguments, for a quarter of the time that names and values take."""
        return _Slot, (self._start, self._stop, self._dtype, self._shape)

    def tensor_in(self, content: memoryview) -> torch.Tensor:
        """Return the tensor, in memory of its own; the same one each time, as there was one before."""
        if self._tensor is None:
            values = bytearray(content[self._start : self._stop])
            flat = torch.frombuffer(values, dtype=self._dtype) if values else torch.empty(0, dtype=self._dtype)
            self._tensor = flat.view(self._shape)
        return self._tensor


class _Packer:
    """Collects the values of the tensors of an item behind each other."""

    def __init__(self) -> None:
        self.contents: list[torch.Tensor] = []
        self.num_bytes = 0
        self._slots: dict[int, _Slot] = {}

    def place(self, leaf: Any) -> Any:  # noqa: ANN401
        """Return what stands for a leaf."""
        if not _is_plain(leaf):
            return leaf
        if id(leaf) not in self._slots:
            start, self.num_bytes = self.num_bytes, self.num_bytes + leaf.nbytes
            self._slots[id(leaf)] = _Slot(start, self.num_bytes, leaf.dtype, tuple(leaf.shape))
            self.contents.append(leaf.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8))
        return self._slots[id(leaf)]


class _Packed(NamedTuple):
    """Holds an item with slots in place of its tensors, and their values."""

    packed: Any
    content: bytes

    def item(self) -> Any:  # noqa: ANN401
        content = memoryview(self.content)
        return tree_map(lambda leaf: leaf.tensor_in(content) if isinstance(leaf, _Slot) else leaf, self.packed)


def _is_plain(leaf: object) -> bool:
    """Tell whether a leaf is a tensor that is its values, shape and type, and nothing else."""
    if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.device.type != "cpu":
        return False
    return not (leaf.requires_grad or leaf.is_nested or leaf.is_quantized)
