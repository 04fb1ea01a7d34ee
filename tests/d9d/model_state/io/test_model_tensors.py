"""What of a model is filled, what is not, and what is refused; the values are ones or integers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.d9d.model_state.io.load_support import Tensors, identity, load, numbered, write


def test_names_that_are_kept(tmp_path: Path):
    model = Tensors(weight=torch.zeros(2), lora_a=torch.full((2,), 5.0), lora_b=torch.full((2,), 6.0))
    write(tmp_path, {"weight": torch.ones(2), "lora_b": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"1 parameters or buffers .* not produced by the mapper: 'lora_a' .*keep"):
        load(tmp_path, identity("weight", "lora_b"), model)
    assert model.weight.tolist() == [0, 0]
    load(tmp_path, identity("weight", "lora_b"), model, keep=["lora_*"])
    assert [p.tolist() for p in model.parameters()] == [[1, 1], [5, 5], [6, 6]]
    # Neither is what a kept one would be made of needed.
    load(tmp_path, identity("weight", "lora_a"), model, keep=["lora_*"])
    with pytest.raises(
        ValueError, match=r"`keep` matches nothing of the model by 'lora_aa' \(nearest: 'lora_a'\)\."
    ) as error:
        load(tmp_path, identity("weight", "lora_b"), model, keep=["lora_a", "lora_aa"])
    assert "'lora_a' (" not in str(error.value)


def test_models_without_memory_of_their_own_are_refused(tmp_path: Path):
    write(tmp_path, {"x": torch.ones(2)})
    with torch.device("meta"):
        model = Tensors(x=torch.zeros(2))
    with pytest.raises(ValueError, match=r"on the meta device.*'x'\. Materialize the model first"):
        load(tmp_path, identity("x"), model)
    # Memory alone does not give values to what no model state holds, and neither must it stay without memory.
    model.register_buffer("frequencies", torch.ones(2, device="meta"), persistent=False)
    with pytest.raises(
        ValueError, match=r"2 param.*to_empty.*then compute .*reset_parameters\(\) .*does: 'frequencies'\."
    ):
        load(tmp_path, identity("x"), model)
    model.x = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"1 param.*without memory: 'frequencies'\."):
        load(tmp_path, identity("x"), model)
    model.register_buffer("frequencies", torch.ones(2), persistent=False)
    load(tmp_path, identity("x"), model)
    assert (model.x.tolist(), model.frequencies.tolist()) == ([1, 1], [1, 1])
    model = nn.Module()
    model.register_buffer("x", torch.zeros(1).expand(2))
    with pytest.raises(ValueError, match="'x' share memory with one another"):
        load(tmp_path, identity("x"), model)


def test_entries_that_a_hook_computes_are_refused(tmp_path: Path):
    write(tmp_path, {"x": torch.ones(2)})
    model = Tensors(x=torch.zeros(2))
    model.register_state_dict_post_hook(lambda module, state, *_: state.update(x=state["x"] * 2))
    with pytest.raises(ValueError, match="computes 'x' instead of giving its parameters"):
        load(tmp_path, identity("x"), model)
    load(tmp_path, identity("x"), model, keep=["x"])
    assert model.x.tolist() == [0, 0]


def test_parameters_that_a_hook_hides_are_not_left_random(tmp_path: Path):
    write(tmp_path, {"x": torch.ones(2)})
    model = Tensors(x=torch.zeros(2), hidden=torch.full((2,), 5.0))
    model.register_state_dict_post_hook(lambda module, state, *_: state.__delitem__("hidden"))
    with pytest.raises(ValueError, match=r"1 parameters of the model are not in its state_dict\(\), .*'hidden'.*keep"):
        load(tmp_path, identity("x"), model)
    assert model.x.tolist() == [0, 0]
    load(tmp_path, identity("x"), model, keep=["hidden"])
    assert (model.x.tolist(), model.hidden.tolist()) == ([1, 1], [5, 5])


def test_parameters_under_other_names_are_not_hidden(tmp_path: Path):
    write(tmp_path, {"x": torch.ones(2)})
    model = nn.Module()
    model.wrapped = Tensors(inner=torch.zeros(2))
    model.register_state_dict_post_hook(lambda module, state, *_: state.update(x=state.pop("wrapped.inner")))
    load(tmp_path, identity("x"), model)
    assert model.wrapped.inner.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda memory: memory.view(4, 4)[:3, :3], lambda memory: memory.view(4, 4)[:3, :3].t()),
        (lambda memory: memory[:9].view(3, 3), lambda memory: memory[8:].view(2, 4)),
        (lambda memory: memory[:4].view(2, 2), lambda memory: memory[:4]),
        (lambda memory: memory, lambda memory: memory[5]),
        (lambda memory: memory[:4], lambda memory: memory.view(torch.bfloat16)[7:9]),
    ],
)
def test_overlapping_parameters_that_are_not_the_same_are_refused(
    tmp_path: Path,
    first: Callable[[torch.Tensor], torch.Tensor],
    second: Callable[[torch.Tensor], torch.Tensor],
):
    memory = torch.zeros(16)
    model = Tensors(a=first(memory), b=second(memory))
    write(tmp_path, {name: torch.ones_like(value).contiguous() for name, value in model.state_dict().items()})
    with pytest.raises(ValueError, match="'a', 'b' overlap in memory and are not the same view"):
        load(tmp_path, identity("a", "b"), model)
    with pytest.raises(ValueError, match="'a', 'b' overlap in memory and are not the same view"):
        load(tmp_path, identity("a"), model, keep=["b"])
    assert (memory == 0).all()
    load(tmp_path, identity(), model, keep=["*"])


def test_parameters_side_by_side_in_one_memory(tmp_path: Path):
    memory = torch.zeros(3, 6)
    model = Tensors(a=memory[:, :2], b=memory[:, 2:5], c=memory[0, 5], d=memory[1:, 5])
    values = {name: numbered(value.shape, 10, torch.float32) for name, value in model.state_dict().items()}
    load(write(tmp_path, values), identity(*values), model)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
