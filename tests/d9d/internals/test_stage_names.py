"""Keys of tensors: by name where names are those of the whole model, by stage where they are not, one for tied weights."""

from collections.abc import Mapping

import torch
from torch import nn

from d9d.internals.stage_names import SavedNames, StageTensor, agree_on_names


def parameter(*names: str, tie: str | None = None) -> StageTensor:
    return StageTensor(names, is_parameter=True, tie=tie)


def table(name: str) -> StageTensor:
    return StageTensor((name,), is_parameter=False)


def test_names_of_the_whole_model_are_the_keys_whoever_has_them():
    tensors = {0: [parameter("layers.0.weight")], 1: [parameter("layers.1.weight")], 2: [parameter("head.weight")]}
    names = SavedNames.of_stages([0, 2], tensors)
    assert names.keys == ({"layers.0.weight": "layers.0.weight"}, {"head.weight": "head.weight"})
    assert names.parameters == {"layers.0.weight", "layers.1.weight", "head.weight"}
    assert names.num_stages == 3


def test_a_name_that_means_different_tensors_tells_the_stage():
    tensors = {
        0: [parameter("layers.0.weight"), table("rope")],
        1: [parameter("layers.0.weight"), parameter("head"), table("rope")],
    }
    names = SavedNames.of_stages([1], tensors)
    (keys,) = names.keys
    assert keys == {"layers.0.weight": "stage 1: layers.0.weight", "head": "stage 1: head", "rope": "stage 1: rope"}
    assert names.others == {"stage 0: rope", "stage 1: rope"}


def test_no_parameter_of_a_stage_that_counts_its_layers_is_found_by_its_name_alone():
    """Else the second layer of the one stage would be that of the other in the mirrored cut."""

    def of_sizes(*sizes: int) -> SavedNames:
        tensors = {stage: [parameter(f"layers.{i}") for i in range(size)] for stage, size in enumerate(sizes)}
        return SavedNames.of_stages([0, 1], tensors)

    one, other = of_sizes(3, 1).parameters, of_sizes(1, 3).parameters
    assert one == {"stage 0: layers.0", "stage 0: layers.1", "stage 0: layers.2", "stage 1: layers.0"}
    assert other - one == {"stage 1: layers.1", "stage 1: layers.2"}
    # A stage whose names are all its own keeps them.
    head = {0: [parameter("layers.0")], 1: [parameter("layers.0")], 2: [parameter("head")]}
    assert SavedNames.of_stages([2], head).keys == ({"head": "head"},)


def test_a_tied_weight_has_one_key():
    tensors = {
        0: [parameter("embed.weight", tie="embedding"), parameter("layers.0.weight")],
        1: [parameter("head.weight", tie="embedding")],
    }
    names = SavedNames.of_stages([1], tensors)
    assert names.keys == ({"head.weight": "embed.weight"},)
    assert names.aliases["embed.weight"] == ("head.weight",)
    # Also if both stages call it the same.
    tensors = {0: [parameter("embed.weight", tie="embedding")], 1: [parameter("embed.weight", tie="embedding")]}
    assert SavedNames.of_stages([0, 1], tensors).keys == ({"embed.weight": "embed.weight"},) * 2


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def tied_parameters(self) -> Mapping[str, str]:
        return {"head.weight": "embedding"}


def test_names_of_a_module():
    model = Tied()
    names = agree_on_names([model], [0], None)
    (keys,) = names.keys
    assert keys == {name: "embed.weight" if name == "head.weight" else name for name in model.state_dict()}
    assert names.others == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    (of_parameters,) = names.key_of_parameters([model])
    assert list(of_parameters.values()) == ["embed.weight", "norm.weight", "norm.bias"]
