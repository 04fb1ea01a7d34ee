"""Pieces against torch: the same operations on tensors with data, of which `fill` must give every box."""

import dataclasses
import math
from collections.abc import Callable

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from d9d.model_state.mapper.pieces import Box, Piece, TensorPieces

SIZES = st.integers(0, 4)


@dataclasses.dataclass
class Pair:
    """A tensor twice: with data, and as pieces of the sources."""

    real: torch.Tensor
    pieces: TensorPieces


class Sources:
    """Small integer tensors, no number twice; counts what is read."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.num_read = 0

    def add(self, shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Pair:
        first = 1 + sum(tensor.numel() for tensor in self.tensors.values())
        name = f"source.{len(self.tensors)}"
        values = torch.arange(first, first + math.prod(shape)).view(shape).to(dtype)
        self.tensors[name] = values
        return Pair(values, TensorPieces.whole(name, shape, dtype))

    def read(self, name: str, box: Box) -> torch.Tensor:
        part = self.tensors[name][box.slices]
        assert part.shape == box.shape
        assert part.numel() > 0
        self.num_read += part.numel()
        return part

    def filled(self, pieces: TensorPieces, box: Box, dtype: torch.dtype | None = None) -> torch.Tensor:
        # -1 is nowhere in the sources, so that what stays unfilled is seen.
        target = torch.full(box.shape, -1, dtype=dtype or pieces.dtype)
        pieces.fill(target, box, self.read)
        return target


@st.composite
def random_chains(draw: st.DrawFn) -> tuple[Sources, Pair]:
    sources = Sources()
    pair = sources.add(tuple(draw(st.lists(SIZES, max_size=3))))
    for _ in range(draw(st.integers(0, 6))):
        pair = draw(random_steps(sources, pair))
        assert pair.pieces.shape == tuple(pair.real.shape)
    return sources, pair


@st.composite
def random_steps(draw: st.DrawFn, sources: Sources, pair: Pair) -> Pair:
    real, pieces = pair.real, pair.pieces
    num_dims = real.ndim
    operation = draw(
        st.sampled_from(["stack", "unsqueeze", "squeeze"] + ["cat", "narrow", "select", "pad"] * 2 + ["transpose"])
    )
    match operation:
        case "unsqueeze" if num_dims < 4:
            dim = draw(st.integers(-num_dims - 1, num_dims))
            return Pair(real.unsqueeze(dim), pieces.unsqueeze(dim))
        case "stack" if num_dims < 4:
            dim = draw(st.integers(-num_dims - 1, num_dims))
            other = sources.add(tuple(real.shape))
            both = draw(st.permutations([pair, other]))
            return Pair(torch.stack([p.real for p in both], dim), TensorPieces.stack([p.pieces for p in both], dim))
        case "squeeze":
            dim = draw(st.none() | st.integers(-max(num_dims, 1), max(num_dims - 1, 0)))
            return Pair(real.squeeze() if dim is None else real.squeeze(dim), pieces.squeeze(dim))
        case _ if num_dims == 0:
            return pair
        case _:
            dim = draw(st.integers(-num_dims, num_dims - 1))
    match operation:
        case "transpose":
            other_dim = draw(st.integers(-num_dims, num_dims - 1))
            return Pair(real.transpose(dim, other_dim), pieces.transpose(dim, other_dim))
        case "cat":
            shape = list(real.shape)
            shape[dim] = draw(SIZES)
            both = draw(st.permutations([pair, sources.add(tuple(shape)), pair]))
            return Pair(torch.cat([p.real for p in both], dim), TensorPieces.cat([p.pieces for p in both], dim))
        case "narrow":
            start = draw(st.integers(0, real.shape[dim]))
            length = draw(st.integers(0, real.shape[dim] - start))
            return Pair(real.narrow(dim, start, length), pieces.narrow(dim, start, length))
        case "select" if real.shape[dim]:
            index = draw(st.integers(-real.shape[dim], real.shape[dim] - 1))
            return Pair(real.select(dim, index), pieces.select(dim, index))
        case "pad":
            length = real.shape[dim] + draw(SIZES)
            zeros_shape = list(real.shape)
            zeros_shape[dim] = length - real.shape[dim]
            return Pair(torch.cat([real, real.new_zeros(zeros_shape)], dim), pieces.pad(dim, length))
        case _:
            return pair


@st.composite
def random_boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    start = [draw(st.integers(0, size)) for size in shape]
    return Box(tuple(start), tuple(draw(st.integers(0, size - at)) for size, at in zip(shape, start, strict=True)))


@hypothesis.given(chain=random_chains(), data=st.data())
@hypothesis.settings(max_examples=400, deadline=None)
def test_chains_give_what_torch_gives(chain: tuple[Sources, Pair], data: st.DataObject):
    sources, pair = chain
    shape = tuple(pair.real.shape)
    assert torch.equal(sources.filled(pair.pieces, Box.whole(shape)), pair.real)
    box = data.draw(random_boxes(shape))
    sources.num_read = 0
    assert torch.equal(sources.filled(pair.pieces, box), pair.real[box.slices])
    # Nothing is read but what is copied: the others are the zeros of the padding, as sources have none.
    assert sources.num_read == int((pair.real[box.slices] != 0).sum())


@hypothesis.given(chain=random_chains())
@hypothesis.settings(max_examples=100, deadline=None)
def test_pieces_cover_a_tensor_once_and_are_never_empty(chain: tuple[Sources, Pair]):
    _, pair = chain
    covered = torch.zeros(tuple(pair.real.shape), dtype=torch.int64)
    for piece in pair.pieces.pieces:
        assert math.prod(piece.box.shape) > 0
        covered[piece.box.slices] += 1
    assert bool((covered == 1).all())


def test_a_part_of_a_transposed_join_is_read_from_where_it_is():
    # By hand: rows 2..3 of [a (2, 3); b (2, 3)].T are columns; entry [i, j] is b[j - 2, i] for j >= 2.
    joined = TensorPieces.cat([TensorPieces.whole(n, (2, 3), torch.float32) for n in "ab"], 0).transpose(0, 1)
    assert joined.within(Box((1, 2), (2, 1))) == (
        Piece(box=Box((0, 0), (2, 1)), source="b", source_box=Box((0, 1), (1, 2)), dims=(1, 0)),
    )
    assert joined.within(Box((0, 1), (3, 0))) == ()


def test_tensors_without_dimensions_and_without_elements():
    scalar = TensorPieces.whole("s", (), torch.float32)
    assert scalar.pieces == (Piece(Box((), ()), "s", Box((), ()), ()),)
    sources = Sources()
    pair = sources.add(())
    assert sources.filled(pair.pieces, Box((), ())).item() == 1
    assert TensorPieces.whole("e", (0, 3), torch.float32).pieces == ()
    assert sources.filled(TensorPieces.whole("e", (0, 3), torch.float32), Box((0, 0), (0, 3))).shape == (0, 3)
    # torch joins vectors without elements to anything
    vector = TensorPieces.whole("v", (0,), torch.float32)
    matrix = TensorPieces.whole("m", (2, 3), torch.float32)
    assert TensorPieces.cat([vector, matrix], 1).shape == torch.cat([torch.zeros(0), torch.zeros(2, 3)], 1).shape
    assert TensorPieces.cat([vector, vector], 0).shape == (0,)


def test_targets_may_be_strided_and_require_gradients():
    sources = Sources()
    pair = sources.add((3, 4), torch.float32)
    parameter = torch.nn.Parameter(torch.zeros(4, 3).t())
    version = parameter._version
    pair.pieces.fill(parameter, Box.whole((3, 4)), sources.read)
    assert torch.equal(parameter, pair.real)
    assert parameter.requires_grad
    assert parameter.grad_fn is None
    assert parameter._version > version


def test_dtypes_are_converted_one_after_the_other():
    # 1 + 2^-9 is not in bfloat16 (8 bits): rounding on the way must show in the result.
    source = torch.tensor([1 + 2**-9], dtype=torch.float32)
    pieces = TensorPieces.whole("a", (1,), torch.float32)
    for dtypes, expected in [((), source), ((torch.bfloat16,), source.bfloat16()), ((torch.float64,), source.double())]:
        converted = pieces
        for dtype in dtypes:
            converted = converted.to(dtype)
        target = torch.empty(1, dtype=torch.float64)
        converted.fill(target, Box.whole((1,)), lambda name, box: source[box.slices])
        assert torch.equal(target, expected.double())
        assert converted.dtype == expected.dtype


@pytest.mark.parametrize(
    "dtypes",
    [(torch.bfloat16, torch.float32), (torch.int64, torch.float16), (torch.float8_e4m3fn, torch.float8_e4m3fn)],
)
def test_joined_dtypes_are_those_of_torch(dtypes: tuple[torch.dtype, torch.dtype]):
    tensors = {name: torch.ones(2, dtype=dtype) for name, dtype in zip("ab", dtypes, strict=True)}
    pieces = [TensorPieces.whole(name, (2,), tensor.dtype) for name, tensor in tensors.items()]
    joined = TensorPieces.cat(pieces, 0)
    expected = torch.cat(list(tensors.values()))
    assert joined.dtype == expected.dtype
    target = torch.empty(4, dtype=joined.dtype)
    joined.fill(target, Box.whole((4,)), lambda name, box: tensors[name][box.slices])
    assert torch.equal(target.float(), expected.float())


MATRIX = TensorPieces.whole("w.weight", (2, 3), torch.float32)
OTHER = TensorPieces.whole("o.weight", (4, 5), torch.float32)
SCALAR = TensorPieces.whole("s", (), torch.float32)


@pytest.mark.parametrize(
    ("operation", "error", "message"),
    [
        (lambda: MATRIX.narrow(2, 0, 1), IndexError, r"shape \(2, 3\) made of 'w.weight' has no dimension 2"),
        (lambda: MATRIX.narrow(0, 3, 0), IndexError, "at 3 along dimension 0, which has size 2"),
        (lambda: MATRIX.narrow(0, -3, 0), IndexError, "at -3 along dimension 0"),
        (lambda: MATRIX.narrow(1, 2, 2), ValueError, r"cannot cut 2 from 2 on .* there are 1"),
        (lambda: MATRIX.narrow(1, 0, -1), ValueError, "cannot cut -1"),
        (lambda: SCALAR.narrow(0, 0, 1), IndexError, "no dimensions"),
        (lambda: SCALAR.select(0, 0), IndexError, "no dimensions"),
        (lambda: SCALAR.pad(0, 1), IndexError, "no dimensions"),
        (lambda: MATRIX.select(0, 2), IndexError, "no entry 2 along dimension 0"),
        (lambda: MATRIX.select(-3, 0), IndexError, "no dimension -3"),
        (lambda: MATRIX.transpose(0, 2), IndexError, "no dimension 2"),
        (lambda: MATRIX.unsqueeze(3), IndexError, "no dimension 3"),
        (lambda: MATRIX.squeeze(2), IndexError, "no dimension 2"),
        (lambda: MATRIX.pad(0, 1), ValueError, "longer already"),
        (lambda: TensorPieces.cat([], 0), ValueError, "no tensors"),
        (lambda: TensorPieces.stack([], 0), ValueError, "no tensors"),
        (lambda: TensorPieces.cat([SCALAR], 0), ValueError, "at least one"),
        (lambda: TensorPieces.cat([MATRIX, OTHER], 0), ValueError, "'o.weight'.*'w.weight'.*sizes differ"),
        (lambda: TensorPieces.cat([MATRIX, MATRIX.unsqueeze(0)], 0), ValueError, "same number of dimensions"),
        (lambda: TensorPieces.cat([MATRIX], 2), IndexError, "no dimension 2"),
        (lambda: TensorPieces.stack([MATRIX, OTHER], 0), ValueError, "'o.weight'.*'w.weight'.*shapes differ"),
        (lambda: MATRIX.within(Box((0,), (1,))), ValueError, "is not in"),
        (lambda: MATRIX.within(Box((1, 0), (2, 3))), ValueError, "is not in"),
        (lambda: MATRIX.within(Box((-1, 0), (1, 3))), ValueError, "is not in"),
    ],
)
def test_what_torch_refuses_is_refused_by_name(operation: Callable[[], object], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        operation()


def test_wrong_targets_and_wrong_reads_are_refused():
    with pytest.raises(ValueError, match=r"cannot fill \(3, 2\)"):
        MATRIX.fill(torch.empty(3, 2), Box.whole((2, 3)), lambda name, box: torch.zeros(box.shape))
    # copy_ would expand it silently
    with pytest.raises(ValueError, match=r"read \(1, 3\) of 'w.weight' where \(2, 3\) was asked for"):
        MATRIX.fill(torch.empty(2, 3), Box.whole((2, 3)), lambda name, box: torch.zeros(1, 3))
    float8 = [TensorPieces.whole(n, (1,), d) for n, d in [("a", torch.float8_e4m3fn), ("b", torch.float8_e5m2)]]
    with pytest.raises(ValueError, match=r"'b' of torch.float8_e5m2"):
        TensorPieces.cat(float8, 0)


@hypothesis.given(chain=random_chains(), data=st.data())
@hypothesis.settings(max_examples=200, deadline=None)
def test_what_comes_from_boxes_of_the_sources(chain: tuple[Sources, Pair], data: st.DataObject):
    """Parts of all pieces, from the two sides of a cut through each source, put together."""
    sources, pair = chain
    target = torch.full(pair.pieces.shape, -1, dtype=pair.pieces.dtype)
    for piece in pair.pieces.pieces:
        if piece.source is None:
            assert piece.within_source(Box((), ())) is None
            target[piece.box.slices] = 0
            continue
        source = sources.tensors[piece.source]
        dim = data.draw(st.integers(0, max(source.ndim - 1, 0)))
        cut = data.draw(st.integers(0, source.shape[dim] if source.ndim else 0))
        for start, size in [(0, cut), (cut, source.shape[dim] - cut)] if source.ndim else [(0, 1)]:
            shape = [*source.shape]
            shape[dim : dim + 1] = [size] if source.ndim else []
            box = Box(tuple(start if each == dim else 0 for each in range(source.ndim)), tuple(shape))
            own = piece.within_source(box)
            if own is not None:
                values = own.arranged(source[own.source_box.slices])
                for dtype in own.dtypes:
                    values = values.to(dtype)
                target[own.box.slices] = values
    assert torch.equal(target, pair.real)
