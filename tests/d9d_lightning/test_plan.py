"""Pattern plans: what they may say, where they come from, and what they are told when they are wrong."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from d9d.module.parallelism.plan import ParallelPlan, read_plan, resolve_plan
from d9d_lightning import D9DStrategy, DeviceMeshParameters


class Mlp(nn.Module):
    def __init__(self, inner=12):
        super().__init__()
        self.up, self.down = nn.Linear(8, inner), nn.Linear(inner, 8)
        self.norm = nn.LayerNorm(8)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList([Mlp() for _ in range(3)])
        self.head = nn.Linear(8, 10)


PAIR = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def resolve(patterns, tensor_parallel=2, module=None):
    plan = ParallelPlan(parallelize=patterns, min_unit_params=100, fsdp_kwargs={})
    return resolve_plan(module or Model(), plan, DeviceMeshParameters(tensor_parallel=tensor_parallel))


def test_words_of_both_kinds_and_the_first_pattern():
    resolved = resolve({**PAIR, "blocks.0": "shard", "blocks.*": "replicate", "blocks.?.up": "colwise_gather"})
    assert {name: choice.value for name, choice in resolved.placements.items()} == {
        "blocks.0": "shard",
        "blocks.1": "replicate",
        "blocks.2": "replicate",
    }
    assert {name: choice.value for name, choice in resolved.splits.items()} == {
        **{f"blocks.{index}.up": "colwise" for index in range(3)},
        **{f"blocks.{index}.down": "rowwise" for index in range(3)},
    }


def test_one_plan_serves_meshes_without_tensor_parallelism():
    resolved = resolve(PAIR, tensor_parallel=1)
    assert not resolved.splits
    assert resolved.placements is None


def test_styles_of_torch_are_taken_as_they_are():
    style = ColwiseParallel()
    assert resolve({"head": style}).splits["head"].style is style


@pytest.mark.parametrize(
    ("patterns", "degree", "message"),
    [
        ({"block.0.up": "colwise"}, 2, r"'block\.0\.up' matches no submodule; the nearest are .*'blocks\.0\.up'"),
        ({"head": "colwise_gathered"}, 2, r"unknown placement 'colwise_gathered'\. Did you mean 'colwise_gather'\?"),
        ({"head": "colwise"}, 2, r"'head' splits head, which leaves a part.*use 'colwise_gather'"),
        ({"head": "rowwise"}, 2, r"'head' splits head, which takes a part.*use 'rowwise_split'"),
        ({**PAIR, "head": "colwise"}, 2, r"'head' splits head, which leaves a part"),
        (PAIR, 5, r"splits blocks\.\{0-2\}\.up, which has 12 features .* valid degrees are 1, 2, 3, 4, 6, 12"),
        (
            {"blocks.*.norm": "colwise"},
            2,
            r"blocks\.\{0-2\}\.norm, which is a LayerNorm, but 'colwise' is for nn\.Linear",
        ),
        ({"head": "vocab"}, 2, r"which is a Linear, but 'vocab' is for nn\.Embedding"),
        (None, 2, r"nothing says which layers to split.*blocks\.\{0-2\}\.up \(8 -> 12\).*head \(8 -> 10\)"),
        ({"blocks.*": "shard"}, 2, r"nothing says which layers to split"),
    ],
)
def test_what_is_wrong_with_a_plan(patterns, degree, message):
    with pytest.raises(ValueError, match=message):
        resolve(patterns, degree)


def test_all_problems_come_in_one_error():
    with pytest.raises(ValueError, match="'nothing' matches no") as error:
        resolve({"nothing": "shard", "head": "halve", "embed": "rowwise", **PAIR}, 5)
    for part in ("'halve'", "embed, which is a Embedding", "12 features"):
        assert part in str(error.value)


def test_embeddings_that_cannot_be_split():
    module = Model()
    module.embed = nn.Embedding(10, 8, max_norm=1.0)
    with pytest.raises(ValueError, match="max_norm"):
        resolve({"embed": "vocab"}, module=module)


@pytest.mark.parametrize(
    "text", ["'blocks.*': shard\nhead: replicate\n", "patterns:\n  'blocks.*': shard\n  head: replicate\n"]
)
def test_plans_from_files(tmp_path, text):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    assert read_plan(str(path)) == read_plan(path) == {"blocks.*": "shard", "head": "replicate"}
    explained = D9DStrategy({"data_parallel_shard": 2}, str(path)).explain(Model())
    assert "blocks.*: shard" in explained


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "must map patterns"),
        ("patterns: {a: shard}\nmore: 1\n", "has 'more' beside 'patterns'"),
        ("{", "is no YAML file"),
        ("", "must map patterns"),
        ("patern: {a: shard}", r"has a mapping under 'patern'\. .* Did you mean 'patterns'\?"),
        ("head: shard\nhead: replicate\n", "line 2 repeats 'head' of line 1"),
    ],
)
def test_files_that_are_no_plans(tmp_path, text, message):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        D9DStrategy({"data_parallel_shard": 2}, str(path))


def test_shared_layers_are_named_by_any_of_their_names():
    module = Model()
    module.alias = module.blocks[0]
    assert set(resolve({"alias.up": "colwise", "alias.down": "rowwise"}, module=module).splits) == {
        "alias.up",
        "alias.down",
    }


def test_units_are_those_of_the_whole_module():
    module = Model()
    assert resolve(PAIR, module=module).units == tuple(module.blocks)
    assert torch.nn.Linear in {
        type(unit) for unit in resolve({"0": "colwise_gather"}, module=nn.Sequential(nn.Linear(10, 10))).units
    }
