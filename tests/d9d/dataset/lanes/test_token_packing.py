"""Sequences out of documents: no token lost, whole documents where promised, and a position after every sequence."""

import itertools
import json
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from d9d.dataset.lanes import BestFitPacker, WrapPacker


class Documents:
    """Document i is i * 1000 + 0, 1, 2, ...; lengths repeat."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.loaded: list[int] = []

    def __call__(self, number: int) -> torch.Tensor:
        self.loaded.append(number)
        return number * 1000 + torch.arange(self.lengths[number % len(self.lengths)])


LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any)


def take(packer, count: int) -> list:
    return [(sequence.tokens.tolist(), sequence.lengths) for sequence in itertools.islice(iter_of(packer), count)]


def iter_of(packer):
    while True:
        yield next(packer)


def through_json(state: dict) -> dict:
    return json.loads(json.dumps(state))


@given(LENGTHS, st.integers(1, 9))
def test_wrapped_sequences_are_the_concatenation_of_all_documents(lengths, num_tokens):
    sequences = take(WrapPacker(Documents(lengths), num_tokens), 10)
    documents = Documents(lengths)
    concatenated = torch.cat([documents(number) for number in range(10 * num_tokens * len(lengths) + 1)]).tolist()
    assert [token for tokens, _ in sequences for token in tokens] == concatenated[: 10 * num_tokens]
    for tokens, pieces in sequences:
        assert sum(pieces) == len(tokens) == num_tokens
        # A piece ends where the next document begins.
        starts = list(itertools.accumulate(pieces, initial=0))
        owners = [tokens[start] // 1000 for start in starts[:-1]]
        assert owners == sorted(set(owners)) == sorted({token // 1000 for token in tokens})


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 9))
def test_a_wrapped_lane_goes_on_from_every_position(lengths, num_tokens):
    whole = take(WrapPacker(Documents(lengths), num_tokens), 8)
    packer = WrapPacker(Documents(lengths), num_tokens)
    for done in range(8):
        resumed = WrapPacker(Documents(lengths), num_tokens)
        resumed.load_state_dict(through_json(packer.state_dict()))
        assert take(resumed, 8 - done) == whole[done:]
        next(packer)


def test_a_wrapped_position_is_a_document_and_an_offset():
    packer = WrapPacker(Documents([3, 5]), 4)
    next(packer)
    assert packer.state_dict() == {"number": 1, "offset": 1}
    next(packer)
    assert packer.state_dict() == {"number": 2, "offset": 0}


def test_a_position_far_on_loads_only_what_is_there():
    documents = Documents([3, 5])
    packer = WrapPacker(documents, 4)
    packer.load_state_dict({"number": 10**6 + 1, "offset": 2})
    assert documents.loaded == []
    next(packer)
    assert documents.loaded == [10**6 + 1, 10**6 + 2]


def test_best_fit_by_hand():
    # Room for 10, buffer of 4. Documents: 6, 3, 4, 2, then 6, 3, 4, 2, ...
    packer = BestFitPacker(Documents([6, 3, 4, 2]), 10, 4)
    lengths = [sequence[1] for sequence in take(packer, 4)]
    # 6 and the longest of (3, 4, 2) that fits, 4. Then 3 first of (3, 2, 6, 3): with 6, nothing fits into 1.
    # Then 2 first of (2, 3, 4, 2): with 4, with 3, nothing fits into 1. Then 2 first of (2, 6, 3, 4): with 6, with 2 no more.
    assert lengths == [(6, 4), (3, 6), (2, 4, 3), (2, 6)]


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 9), st.integers(1, 6))
def test_best_fit_keeps_documents_whole_and_loses_no_token(lengths, num_tokens, buffer_size):
    packer = BestFitPacker(Documents(lengths), num_tokens, buffer_size)
    sequences = take(packer, 12)
    pieces = []
    for tokens, sizes in sequences:
        assert 0 < sum(sizes) == len(tokens) <= num_tokens
        starts = itertools.accumulate(sizes, initial=0)
        pieces.extend(tokens[start : start + size] for start, size in zip(starts, sizes, strict=False))
    waiting = [tuple(piece) for piece in packer.state_dict()["pieces"]]
    pieces.extend(list(range(number * 1000 + start, number * 1000 + stop)) for number, start, stop in waiting)
    documents = Documents(lengths)
    seen = Counter(itertools.chain(*pieces))
    expected = [documents(number).tolist() for number in range(packer.state_dict()["next_number"])]
    assert seen == Counter(itertools.chain(*expected))
    whole = [document for document in expected if 0 < len(document) <= num_tokens]
    assert all(document in pieces for document in whole)


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 9), st.integers(1, 6))
def test_a_best_fit_lane_goes_on_from_every_position(lengths, num_tokens, buffer_size):
    whole = take(BestFitPacker(Documents(lengths), num_tokens, buffer_size), 8)
    packer = BestFitPacker(Documents(lengths), num_tokens, buffer_size)
    for done in range(8):
        resumed = BestFitPacker(Documents(lengths), num_tokens, buffer_size)
        resumed.load_state_dict(through_json(packer.state_dict()))
        assert take(resumed, 8 - done) == whole[done:]
        next(packer)


def test_a_failing_document_leaves_the_position_as_it_was():
    class Once(Documents):
        def __call__(self, number: int) -> torch.Tensor:
            tokens = super().__call__(number)
            if number == 3 and self.loaded.count(3) == 1:
                raise OSError("disk")
            return tokens

    for build in (WrapPacker, lambda documents, size: BestFitPacker(documents, size, 2)):
        packer, whole = build(Once([3, 2]), 4), build(Documents([3, 2]), 4)
        sequences = []
        while len(sequences) < 5:
            before = packer.state_dict() if build is WrapPacker else None
            try:
                sequences += take(packer, 1)
            except OSError:
                assert before is None or packer.state_dict() == before
        assert sequences == take(whole, 5)


def test_endless_empty_documents_are_refused():
    with pytest.raises(ValueError, match="10000 documents in a row are empty"):
        next(WrapPacker(Documents([0]), 4))
    with pytest.raises(ValueError, match="10000 documents in a row are empty"):
        next(BestFitPacker(Documents([0]), 4, 2))


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match=r"num_tokens \(0\)"):
        WrapPacker(Documents([1]), 0)
    with pytest.raises(ValueError, match=r"num_tokens \(0\).*buffer_size \(-1\)"):
        BestFitPacker(Documents([1]), 0, -1)
