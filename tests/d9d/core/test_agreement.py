"""Ranks that do not agree: all of them hear of each difference by name."""

import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist

from d9d.core.agreement import agree_on
from d9d.core.dist_context import DeviceMeshParameters
from d9d.core.participants import Participants


def all_ranks() -> Participants:
    world = dist.group.WORLD
    assert world is not None
    return Participants([world])


def test_a_process_agrees_with_itself():
    agree_on(Participants(), "x", {"a": object()}, "Mend it.")


@pytest.mark.world_size(4)
def test_each_difference_is_named_with_its_ranks():
    rank = dist.get_rank()
    same = {"a": 1, "nested": {"b": [1, 2], "empty": {}}}
    agree_on(all_ranks(), "x", same, "Mend it.")
    facts = {**same, "steps": 12 if rank == 1 else 10, "nested": {"b": [1, 2 if rank < 2 else 3]}}
    if rank == 3:
        facts["only here"] = None
    with pytest.raises(ValueError, match="ranks do not agree") as error:
        agree_on(all_ranks(), "the plan", facts, "Mend it.")
    assert str(error.value).splitlines() == [
        "ranks do not agree on the plan:",
        "- nested.b: [1, 2] on ranks 0-1; [1, 3] on ranks 2-3",
        "- steps: 10 on ranks 0, 2-3; 12 on rank 1",
        "- only here: nothing on ranks 0-2; null on rank 3",
        "Mend it.",
    ]


@pytest.mark.world_size(2)
def test_objects_count_by_their_text_without_its_address():
    class Mapper:
        pass

    kept = [Mapper() for _ in range(dist.get_rank() + 1)]  # so that the next ones lie elsewhere
    agree_on(all_ranks(), "x", {"mapper": Mapper(), "function": lambda: kept, "set": {"b", "a"}}, "Mend it.")
    with pytest.raises(ValueError, match=r"float16.? on rank 0; .*float64.? on rank 1"):
        agree_on(all_ranks(), "x", {"dtype": (torch.float16, torch.float64)[dist.get_rank()]}, "Mend it.")


@dataclasses.dataclass(frozen=True)
class Renamed:
    names: frozenset[str]
    form: object = None


@pytest.mark.world_size(2)
def test_fields_of_dataclasses_are_compared_without_the_order_of_sets():
    """Sets are written in the order of hashes, which differ between processes that have no common PYTHONHASHSEED."""
    rank = dist.get_rank()

    class Hashed(str):
        __slots__ = ()

        def __hash__(self) -> int:
            return 1  # so that sets keep the order in which they are filled

    def names() -> frozenset[str]:
        return frozenset(map(Hashed, ["a", "b", "c"][:: 1 if rank else -1]))

    assert repr(names()) == ("frozenset({'c', 'b', 'a'})", "frozenset({'a', 'b', 'c'})")[rank]
    kept = [object() for _ in range(rank + 1)]
    inside = [Renamed(names(), {"of": kept[rank]}), functools.partial(print, end=names())]
    agree_on(all_ranks(), "x", {"mapper": Renamed(names(), Renamed(names())), "inside": inside}, "Mend it.")
    mapper = Renamed(names(), {"steps": 1 + rank})
    with pytest.raises(ValueError, match=r"- mapper\.form\.steps: 1 on rank 0; 2 on rank 1\nMend it"):
        agree_on(all_ranks(), "x", {"mapper": mapper}, "Mend it.")


@pytest.mark.world_size(2)
def test_tensors_are_compared_by_their_values():
    rates = {"betas": (torch.tensor(0.5), 0.25), "late": torch.empty(2, device="meta")}
    agree_on(all_ranks(), "x", rates, "Mend it.")
    with pytest.raises(ValueError, match=r'- rate: \["torch.float32", \[\], 0.5\] on rank 0; .* 1.5\] on rank 1'):
        agree_on(all_ranks(), "x", {"rate": torch.tensor(0.5 + dist.get_rank())}, "Mend it.")


@pytest.mark.world_size(2)
def test_long_values_are_shown_around_the_first_difference():
    names = [f"layers.{index}.weight" for index in range(100)]
    facts = {"names": names[: 100 - dist.get_rank()], "same": names}
    with pytest.raises(ValueError, match="names") as error:
        agree_on(all_ranks(), "x", facts, "Mend it.")
    (line,) = str(error.value).splitlines()[1:-1]
    assert line.endswith('layers.98.weight"] on rank 1')
    assert 'layers.99.weight"] on rank 0; ...' in line
    assert len(line) < 300


@pytest.mark.world_size(2)
def test_many_differences_are_counted():
    facts = {f"fact {index:02}": dist.get_rank() for index in range(25)}
    with pytest.raises(ValueError, match="fact 00: 0 on rank 0; 1 on rank 1") as error:
        agree_on(all_ranks(), "x", facts, "Mend it.")
    assert str(error.value).splitlines()[-3:] == ["- fact 19: 0 on rank 0; 1 on rank 1", "- and 5 more", "Mend it."]


@pytest.mark.world_size(2)
def test_ranks_with_other_meshes_are_refused_before_they_have_groups():
    degrees = ("data_parallel_replicate", "pipeline_parallel")
    with pytest.raises(ValueError, match="pipeline_parallel: 1 on rank 0; 2 on rank 1"):
        DeviceMeshParameters.model_validate({degrees[dist.get_rank()]: 2}).build()
