"""Packs documents of any length into sequences of a fixed number of tokens, one lane at a time."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch

__all__ = ["BestFitPacker", "Documents", "ExpectedDocuments", "PackedSequence", "WrapPacker"]

Documents: TypeAlias = Callable[[int], torch.Tensor]
"""Loads the tokens, of shape (T_i,), of a document of the lane by its number, such as `LaneRecords`. There is no end."""

_MAX_EMPTY = 10_000


@runtime_checkable
class ExpectedDocuments(Protocol):
    """Describes documents that are read ahead, and so want to know where a packer goes on, such as `LaneRecords`."""

    def expect(self, first: Sequence[int], then: int) -> None:
        """Tell which documents come next: those of `first`, in about this order, and all from `then` on."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PackedSequence:
    """Holds the tokens of several documents behind each other.

    Attributes:
        tokens: Of shape (T,).
        lengths: Tokens of each document, or piece of one, in order; their sum is T. Attention may keep to these.
    """

    tokens: torch.Tensor
    lengths: tuple[int, ...]


class WrapPacker:
    """Cuts the concatenation of all documents into sequences of equal length: no token is lost, none is padding.

    Its state is two integers, the number of the current document and the tokens of it that are used up.

    Args:
        documents: Loads the documents of this lane.
        num_tokens: Tokens per sequence.
    """

    def __init__(self, documents: Documents, num_tokens: int) -> None:
        _check_sizes(num_tokens=num_tokens)
        self._documents = documents
        self._num_tokens = num_tokens
        self._number = 0
        self._offset = 0
        self._loaded: tuple[int, torch.Tensor] | None = None

    def __next__(self) -> PackedSequence:
        number, offset, room = self._number, self._offset, self._num_tokens
        pieces: list[torch.Tensor] = []
        num_empty = 0
        while room:
            piece = self._load(number)[offset : offset + room]
            num_empty = 0 if len(piece) else _count_empty(num_empty, number)
            if len(piece):
                pieces.append(piece)
            room -= len(piece)
            offset += len(piece)
            if offset == len(self._load(number)):
                number, offset = number + 1, 0
        self._number, self._offset = number, offset
        return _joined(pieces)

    def _load(self, number: int) -> torch.Tensor:
        if self._loaded is None or self._loaded[0] != number:
            self._loaded = (number, self._documents(number))
        return self._loaded[1]

    def state_dict(self) -> dict[str, Any]:
        """Return the position by name."""
        return {"number": self._number, "offset": self._offset}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a saved position; loads nothing yet."""
        self._number, self._offset = state_dict["number"], state_dict["offset"]
        self._loaded = None
        if isinstance(self._documents, ExpectedDocuments):
            self._documents.expect([], self._number)


class _Piece(NamedTuple):
    """Tokens `start` to `stop` of a document."""

    number: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


class BestFitPacker:
    """Fills sequences with whole documents that fit together, out of a buffer of the next ones.

    A sequence starts with the oldest piece of the buffer, so that none waits for ever, and goes on with the longest that
    still fits (the older one of equals) until none does. Documents that are longer than a sequence are cut; shorter ones
    never are. Sequences may stay a bit shorter than `num_tokens`.

    Its state lists the pieces of the buffer, not their tokens: these are loaded again when they are needed.

    Source: Ding et al.: Fewer Truncations Improve Language Modeling, ICML 2024, section 3 (best-fit packing), here with a
    buffer instead of all documents at once.

    Args:
        documents: Loads the documents of this lane.
        num_tokens: Most tokens per sequence.
        buffer_size: Pieces to choose from.
    """

    def __init__(self, documents: Documents, num_tokens: int, buffer_size: int) -> None:
        _check_sizes(num_tokens=num_tokens, buffer_size=buffer_size)
        self._documents = documents
        self._num_tokens = num_tokens
        self._buffer_size = buffer_size
        self._next_number = 0
        self._pieces: list[_Piece] = []
        self._loaded: dict[int, torch.Tensor] = {}

    def __next__(self) -> PackedSequence:
        self._fill()
        waiting, chosen = list(self._pieces), list[_Piece]()
        room = self._num_tokens
        best: int | None = 0
        while best is not None:
            piece = waiting.pop(best)
            chosen.append(piece)
            room -= piece.length
            best = _longest_that_fits(waiting, room)
        sequence = _joined([self._tokens(piece) for piece in chosen])
        self._pieces = waiting
        needed = {piece.number for piece in waiting}
        self._loaded = {number: tokens for number, tokens in self._loaded.items() if number in needed}
        return sequence

    def _fill(self) -> None:
        num_empty = 0
        while len(self._pieces) < self._buffer_size:
            number = self._next_number
            tokens = self._documents(number)
            num_empty = 0 if len(tokens) else _count_empty(num_empty, number)
            self._loaded[number] = tokens
            starts = range(0, len(tokens), self._num_tokens)
            self._pieces.extend(_Piece(number, at, min(at + self._num_tokens, len(tokens))) for at in starts)
            self._next_number = number + 1

    def _tokens(self, piece: _Piece) -> torch.Tensor:
        if piece.number not in self._loaded:
            self._loaded[piece.number] = self._documents(piece.number)
        return self._loaded[piece.number][piece.start : piece.stop]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the next document to load, and the pieces of the buffer."""
        return {"next_number": self._next_number, "pieces": [list(piece) for piece in self._pieces]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a saved position; loads nothing yet."""
        self._next_number = state_dict["next_number"]
        self._pieces = [_Piece(*piece) for piece in state_dict["pieces"]]
        self._loaded = {}
        if isinstance(self._documents, ExpectedDocuments):
            # The buffer is filled up first, by a piece or more for each document.
            then = self._next_number + max(0, self._buffer_size - len(self._pieces))
            kept = sorted({piece.number for piece in self._pieces})
            self._documents.expect([*range(self._next_number, then), *kept], then)


def _longest_that_fits(pieces: Sequence[_Piece], room: int) -> int | None:
    fitting = [(-piece.length, index) for index, piece in enumerate(pieces) if piece.length <= room]
    return min(fitting)[1] if fitting else None


def _joined(pieces: Sequence[torch.Tensor]) -> PackedSequence:
    return PackedSequence(tokens=torch.cat(list(pieces)), lengths=tuple(len(piece) for piece in pieces))


def _check_sizes(**sizes: int) -> None:
    problems = [f"{name} ({value}) must be at least 1." for name, value in sizes.items() if value < 1]
    if problems:
        raise ValueError(" ".join(problems))


def _count_empty(num_empty: int, number: int) -> int:
    if num_empty + 1 == _MAX_EMPTY:
        raise ValueError(f"{_MAX_EMPTY} documents in a row are empty, the last one being number {number} of its lane.")
    return num_empty + 1
