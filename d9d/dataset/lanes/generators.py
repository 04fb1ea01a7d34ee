"""The global random number generators on the CPU: seeding them for a microbatch, and leaving no trace of it."""

import ctypes
import functools
import random
import struct
import threading
from types import TracebackType
from typing import Self, TypeAlias

import numpy as np
import torch
from torch.utils.data import get_worker_info

__all__ = [
    "KeptGenerators",
    "may_seed_generators",
    "numpy_and_python_state",
    "seed_generators",
    "seed_torch_generator",
]

_NUM_NUMPY_SEEDS = 2**32
_NUM_WORDS = 624
_MT19937_BYTES = _NUM_WORDS * 4 + 4
"""Size of the state of a Mersenne Twister in memory: its words, and the place among them."""
_PYTHON = random.random.__self__
"""The generator behind the functions of `random`."""
_WORDS_FORMAT = f"={_NUM_WORDS + 1}I"
_PythonState: TypeAlias = tuple[bytes, float | None]
"""The place among its words and these; and the second of a pair of normal numbers."""


def may_seed_generators() -> bool:
    """Tell whether seeding the global generators here disturbs nobody: no other thread may be drawing from them."""
    return get_worker_info() is not None or threading.current_thread() is threading.main_thread()


def seed_torch_generator(seed: int) -> None:
    """Seed the global CPU generator of PyTorch; takes about 1 microsecond. `torch.initial_seed` returns the seed then."""
    # The generator's own method: `torch.manual_seed` would reach for accelerators too.
    torch.default_generator.manual_seed(seed)


def seed_generators(seed: int) -> None:
    """Seed the global CPU generators of PyTorch, NumPy and Python; takes about 7 microseconds."""
    seed_torch_generator(seed)
    np.random.seed(seed % _NUM_NUMPY_SEEDS)
    random.seed(seed)


class KeptGenerators:
    """Lets the global CPU generators go on after a block as if it had not run. Takes about 5 microseconds.

    [Note: NumPy's generator is exchanged]
    Reading and writing its state takes 90 microseconds, so the block gets another one, which begins anywhere. NumPy forgets
    the second of a pair of normal numbers that `np.random.randn` keeps for its next call, whether the block draws or not.
    """

    def __init__(self) -> None:
        self._numpy = np.random.MT19937(0)
        self._numpy_outside: np.random.BitGenerator = self._numpy
        self._torch_before = torch.empty(0)
        self._python_before: _PythonState = (b"", None)

    def __enter__(self) -> Self:
        self._torch_before = torch.default_generator.get_state()
        self._python_before = _python_state()
        self._numpy_outside = _exchange_numpy(self._numpy)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _exchange_numpy(self._numpy_outside)
        torch.default_generator.set_state(self._torch_before)
        if _python_state() != self._python_before:
            of_words, next_gauss = self._python_before
            place, *words = struct.unpack(_WORDS_FORMAT, of_words)
            random.setstate((_PYTHON.VERSION, (*words, place), next_gauss))


def numpy_and_python_state() -> tuple[bytes, _PythonState]:
    """Return a value that changes when something draws from the global generators of NumPy or Python, or seeds them."""
    numpy = np.random.get_bit_generator()  # pyright: ignore[reportAttributeAccessIssue]  # see `_exchange_numpy`
    memory = _numpy_memory(numpy)
    return repr(numpy.state).encode() if memory is None else memory.tobytes(), _python_state()


@functools.lru_cache(maxsize=2)
def _numpy_memory(generator: np.random.BitGenerator) -> memoryview | None:
    """Return where the state of a generator lies, or None if its form is not known."""
    return _memory_at(generator.ctypes.state_address) if isinstance(generator, np.random.MT19937) else None


def _memory_at(address: int) -> memoryview:
    # As plain bytes, a view is copied twice as fast as the array.
    return memoryview((ctypes.c_ubyte * _MT19937_BYTES).from_address(address)).cast("B")


def _python_state() -> _PythonState:
    """Return the state of Python's global generator.

    [Note: Python's generator is read from memory]
    Asking for its state makes 625 numbers, which takes 9 microseconds, and comparing two of these 5 more. In memory they lie
    behind the head of the object, in all versions of CPython until now (3.14). That is checked when this module is
    imported; elsewhere the slow way is taken. Nothing is written there.
    """
    next_gauss = _PYTHON.gauss_next  # pyright: ignore[reportAttributeAccessIssue]  # its stubs do not know it
    return _PYTHON_MEMORY.tobytes() if _PYTHON_MEMORY is not None else _asked_python_words(), next_gauss


def _asked_python_words() -> bytes:
    *words, place = random.getstate()[1]
    return struct.pack(_WORDS_FORMAT, place, *words)


def _python_memory() -> memoryview | None:
    """Return where the state of Python's global generator lies, or None if it is not where it is looked for."""
    head = object.__basicsize__
    if random.Random.__basicsize__ < head + _MT19937_BYTES:
        return None
    memory = _memory_at(id(_PYTHON) + head)
    return memory if memory.tobytes() == _asked_python_words() else None


_PYTHON_MEMORY = _python_memory()


def _exchange_numpy(generator: np.random.BitGenerator) -> np.random.BitGenerator:
    """Let NumPy's global functions draw from another generator, and return the one before."""
    # Both functions are public since NumPy 1.24, but its stubs do not know them (2.3).
    before = np.random.get_bit_generator()  # pyright: ignore[reportAttributeAccessIssue]
    np.random.set_bit_generator(generator)  # pyright: ignore[reportAttributeAccessIssue]
    return before
