"""A module of which each pipeline rank has a part: one checkpoint, as one process would have written it."""

import copy

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn

from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters
from d9d.module.parallelism.api import parallelize_hsdp
from d9d_lightning import D9DStrategy, read_checkpoint
from d9d_lightning.checkpoints.restore import load_model_state, load_optimizer_states
from d9d_lightning.checkpoints.stage_optimizers import (
    GroupPart,
    OptimizerPart,
    StageCut,
    check_optimizers,
    merge_group_names,
    optimizer_problems,
    set_up_together,
)
from d9d_lightning.checkpoints.store import CheckpointStore
from tests.d9d_lightning.support import (
    NUM_FEATURES,
    PoolEnvironment,
    full_state,
    make_samples,
    plain_trainer,
    rank_loader,
    seeded,
)

EXACT = {"rtol": 0, "atol": 0}
NUM_LAYERS = 4


class Gone(nn.Module):
    """In the place of a layer that another rank has."""


class Staged(L.LightningModule):
    """An embedding and a head outside of the pipelined layers, buffers, and AdamW with two groups."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(NUM_FEATURES, NUM_FEATURES), nn.BatchNorm1d(NUM_FEATURES))
                for _ in range(NUM_LAYERS)
            )
        )
        self.head = nn.Linear(NUM_FEATURES, 1)

    def training_step(self, batch, batch_idx):
        return (self.head(self.layers(self.embed(batch[0]))).squeeze(-1) - batch[1]).square().mean()

    def configure_optimizers(self):
        groups = [
            {"params": [p for n, p in self.named_parameters() if n.endswith("weight")], "weight_decay": 0.1},
            {"params": [p for n, p in self.named_parameters() if n.endswith("bias")], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1e-2)


def cut_of(module, group):
    return StageCut(
        parameter_names=tuple(name for name, _ in module.named_parameters()),
        state_names=tuple(module.state_dict()),
        group=group,
    )


def keep_half(module, rank):
    """Layers 0 and 1 on the first rank, 2 and 3 on the second."""
    for index in range(NUM_LAYERS):
        if index // 2 != rank:
            module.layers[index] = Gone()
    return module


def train_by_hand(module, optimizer, num_steps=3):
    """Steps on gradients that depend on names only, so that each rank knows those of its own parameters."""
    for step in range(num_steps):
        for name, parameter in module.named_parameters():
            generator = torch.Generator().manual_seed(step * 1000 + sum(map(ord, name)))
            full = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
            parameter.grad = full if not hasattr(parameter, "placements") else like(full, parameter)
        optimizer.step()


def like(full, parameter):
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(full, parameter.device_mesh, parameter.placements)


def whole_checkpoint(num_steps=3):
    """What one process saves, in Lightning's own format."""
    module = seeded(Staged)
    trainer = plain_trainer()
    trainer.fit(module, rank_loader(make_samples(8), 8, 0, 1))
    optimizer = trainer.optimizers[0]
    train_by_hand(module, optimizer, num_steps)
    # A dump shares tensors with the optimizer, and so does what is loaded from it.
    return copy.deepcopy(trainer._checkpoint_connector.dump_checkpoint()), module, optimizer


def stage_of(whole, optimizer, rank):
    """The part that a rank has of a trained module, and its optimizer, by torch alone."""
    module = keep_half(copy.deepcopy(whole), rank)
    part = module.configure_optimizers()
    names = {id(p): n for n, p in whole.named_parameters()}
    states = {names[id(p)]: state for p, state in optimizer.state.items()}
    for name, parameter in module.named_parameters():
        part.state[parameter] = copy.deepcopy(states[name])
    return module, part


def context_of(**degrees):
    return DeviceMeshParameters(**degrees).build()


def pipeline_group(context):
    return context.mesh_for(DENSE_DOMAIN).get_group("pp")


def save(context, path, checkpoint, module, optimizers, cut):
    """Save on all ranks, and return what plain Lightning would find."""
    store = CheckpointStore()
    store.join(context, None)
    store.save(checkpoint, path, module, optimizers, cut)
    return read_checkpoint(path)


def assert_same(actual, expected):
    assert list(actual) == list(expected)
    assert list(actual["state_dict"]) == list(expected["state_dict"])
    for entry, content in expected.items():
        if entry in ("state_dict", "optimizer_states"):
            torch.testing.assert_close(actual[entry], content, **EXACT)
        else:
            assert actual[entry] == content


@pytest.mark.world_size(2)
def test_two_stages_save_what_one_process_saves(tmp_path):
    expected, whole, optimizer = whole_checkpoint()
    context = context_of(pipeline_parallel=2)
    module, part = stage_of(whole, optimizer, context.rank)
    cut = cut_of(whole, pipeline_group(context))
    check_optimizers(module, [part], cut)
    own = {**expected, "state_dict": module.state_dict(), "optimizer_states": [part.state_dict()]}
    # As callbacks keep averages.
    own["current_model_state"] = {name: tensor * 2 for name, tensor in module.state_dict().items()}
    # Averages of some parameters, of which the first stage has none.
    own["some"] = {name: tensor * 3 for name, tensor in module.state_dict().items() if name == "layers.3.0.weight"}
    own["none"] = {}
    own["mine"] = dist.get_rank()
    saved = save(context, tmp_path / "a", own, module, [part], cut)
    doubled = saved.pop("current_model_state")
    assert_same({"state_dict": doubled}, {"state_dict": {n: t * 2 for n, t in expected["state_dict"].items()}})
    assert len(own["some"]) == dist.get_rank()
    torch.testing.assert_close(
        dict(saved.pop("some")), {"layers.3.0.weight": expected["state_dict"]["layers.3.0.weight"] * 3}, **EXACT
    )
    assert saved.pop("none") == {}
    assert saved.pop("mine") == 0
    assert_same(saved, expected)
    versions = [dict(vars(state["state_dict"])["_metadata"]) for state in (saved, expected)]
    assert versions[0] == versions[1]


@pytest.mark.world_size(2)
def test_weights_alone(tmp_path):
    expected, whole, optimizer = whole_checkpoint(1)
    context = context_of(pipeline_parallel=2)
    module, part = stage_of(whole, optimizer, context.rank)
    cut = cut_of(whole, pipeline_group(context))
    saved = save(context, tmp_path / "a", {"state_dict": module.state_dict(), "epoch": 3}, module, [part], cut)
    assert_same(saved, {"state_dict": expected["state_dict"], "epoch": 3})


@pytest.mark.world_size(2)
def test_stages_load_what_one_process_has_saved():
    saved, whole, optimizer = whole_checkpoint()
    context = context_of(pipeline_parallel=2)
    cut = cut_of(whole, pipeline_group(context))
    module = keep_half(seeded(Staged, seed=1), context.rank)
    part = module.configure_optimizers()
    load_model_state(module, saved["state_dict"], strict=True, cut=cut)
    load_optimizer_states(saved["optimizer_states"], [part], module=module, cut=cut)
    expected_module, expected_part = stage_of(whole, optimizer, context.rank)
    torch.testing.assert_close(dict(module.state_dict()), dict(expected_module.state_dict()), **EXACT)
    torch.testing.assert_close(part.state_dict(), expected_part.state_dict(), **EXACT)
    assert [group["weight_decay"] for group in part.param_groups] == [0.1, 0.0]
    for loaded, expected in zip(part.param_groups, expected_part.param_groups, strict=True):
        for one, other in zip(loaded["params"], expected["params"], strict=True):
            torch.testing.assert_close(part.state[one], expected_part.state[other], **EXACT)


@pytest.mark.world_size(4)
def test_two_stages_of_two_shards_each(tmp_path):
    """Saved from shards of stages, and loaded into them."""
    expected, whole, optimizer = whole_checkpoint(0)
    context = context_of(pipeline_parallel=2, data_parallel_shard=2)
    cut = cut_of(whole, pipeline_group(context))
    rank = context.mesh_for(DENSE_DOMAIN).get_local_rank("pp")
    module = keep_half(seeded(Staged, seed=1), rank)
    data_mesh = context.mesh_for(DENSE_DOMAIN)["dp_replicate", "dp_cp_shard", "cp_replicate"]
    for unit in (layer for layer in module.layers if not isinstance(layer, Gone)):
        parallelize_hsdp(unit, data_mesh, "dp_cp_shard")
    part = module.configure_optimizers()
    load_model_state(module, expected["state_dict"], strict=True, cut=cut)
    load_optimizer_states(expected["optimizer_states"], [part], module=module, cut=cut)
    train_by_hand(module, part, 2)
    train_by_hand(whole, optimizer, 2)
    own = {"state_dict": module.state_dict(), "optimizer_states": [part.state_dict()]}
    saved = save(context, tmp_path / "a", own, module, [part], cut)
    assert_same(saved, {"state_dict": whole.state_dict(), "optimizer_states": [optimizer.state_dict()]})


@pytest.mark.world_size(2)
def test_the_strategy_saves_and_loads_stages(tmp_path):
    """A plain Trainer resumes the file, and the strategy resumes the plain Trainer's."""
    expected, whole, optimizer = whole_checkpoint()
    strategy = D9DStrategy({"pipeline_parallel": 2}, pipeline_module="layers")
    plain_trainer(strategy=strategy, devices=2, plugins=[PoolEnvironment()])
    strategy.setup_environment()
    module, part = stage_of(whole, optimizer, dist.get_rank())
    strategy._lightning_module = module
    strategy.optimizers = [part]
    strategy._cut = cut_of(whole, pipeline_group(strategy.dist_context))
    own = {**expected, "state_dict": module.state_dict(), "optimizer_states": [strategy.optimizer_state(part)]}
    strategy.save_checkpoint(own, tmp_path / "stages.ckpt")
    assert not any(tensor.any() for tensor in [parameter.zero_() for parameter in no_grad(module)])
    part.state.clear()

    restored = strategy.load_checkpoint(tmp_path / "stages.ckpt")
    strategy.load_model_state_dict(restored)
    strategy.load_optimizer_state_dict(restored)
    expected_module, expected_part = stage_of(whole, optimizer, dist.get_rank())
    torch.testing.assert_close(dict(module.state_dict()), dict(expected_module.state_dict()), **EXACT)
    torch.testing.assert_close(part.state_dict(), expected_part.state_dict(), **EXACT)
    if dist.get_rank() == 0:
        plain = seeded(Staged, seed=1)
        trainer = plain_trainer(max_epochs=2)
        # A Trainer without the strategy opens folders too.
        trainer.fit(plain, rank_loader(make_samples(8), 8, 0, 1), ckpt_path=tmp_path / "stages.ckpt")
        assert trainer.global_step == 2
        train_on(whole, optimizer)
        torch.testing.assert_close(full_state(plain), full_state(whole), **EXACT)


def no_grad(module):
    return [parameter.detach() for parameter in module.parameters()]


def train_on(module, optimizer):
    """One more batch, without a Trainer."""
    module.train()
    optimizer.zero_grad()
    module.training_step(make_samples(8), 0).backward()
    optimizer.step()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("strict", [True, False])
def test_keys_that_do_not_fit_the_whole_module(strict):
    saved, whole, _ = whole_checkpoint(0)
    context = context_of(pipeline_parallel=2)
    cut = cut_of(whole, pipeline_group(context))
    module = keep_half(seeded(Staged, seed=1), context.rank)
    state = dict(saved["state_dict"])
    del state["layers.3.0.weight"]
    state["surplus"] = torch.zeros(1)
    if strict:
        match = r"Missing key\(s\) in state_dict: 'layers.3.0.weight'.\s+Unexpected key\(s\) in state_dict: 'surplus'."
        with pytest.raises(RuntimeError, match=match):
            load_model_state(module, state, strict=True, cut=cut)
    else:
        load_model_state(module, state, strict=False, cut=cut)
        assert torch.equal(module.head.weight, whole.head.weight)
    with pytest.raises(RuntimeError, match=r"size mismatch for layers\.0\.0\.weight"):
        load_model_state(
            module, {**saved["state_dict"], "layers.0.0.weight": torch.zeros(2, 2)}, strict=strict, cut=cut
        )


@pytest.mark.world_size(2)
def test_optimizers_of_another_shape_are_refused():
    saved, whole, _ = whole_checkpoint(0)
    context = context_of(pipeline_parallel=2)
    cut = cut_of(whole, pipeline_group(context))
    module = keep_half(seeded(Staged, seed=1), context.rank)
    one_group = torch.optim.AdamW(module.parameters(), lr=1e-2)
    with pytest.raises(
        ValueError, match=r"optimizer 0 of the checkpoint has \[10, 10\] parameters .* module has \[20\]"
    ):
        load_optimizer_states(saved["optimizer_states"], [one_group], module=module, cut=cut)


@pytest.mark.world_size(2)
def test_ranks_agree_on_what_is_wrong_with_optimizers():
    whole = seeded(Staged)
    context = context_of(pipeline_parallel=2)
    cut = cut_of(whole, pipeline_group(context))
    module = keep_half(whole, context.rank)
    good = module.configure_optimizers()
    check_optimizers(module, [good], cut)
    check_optimizers(module, [good], None)
    good.param_groups[1]["lr"] = 0.1 * context.rank
    with pytest.raises(ValueError, match=r"group 1: lr is 0\.0, 0\.1 by pipeline rank"):
        check_optimizers(module, [good], cut)
    stray = torch.optim.SGD([nn.Parameter(torch.zeros(3))] if context.rank else module.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"pipeline rank 1: group 0 of the SGD has parameters of shapes \[\(3,\)\]"):
        check_optimizers(module, [stray], cut)


@pytest.mark.world_size(2)
def test_a_stage_without_parameters_fails_on_all_ranks():
    whole = seeded(Staged)
    context = context_of(pipeline_parallel=2)
    cut = cut_of(whole, pipeline_group(context))
    module = keep_half(whole, context.rank)

    def set_up():
        torch.optim.SGD([p for n, p in module.named_parameters() if n.startswith("layers.0")], lr=0.1)

    error, match = (ValueError, "empty") if context.rank else (RuntimeError, "pipeline rank 1: ValueError: .*empty")
    with pytest.raises(error, match=match):
        set_up_together(set_up, cut)
    set_up_together(module.configure_optimizers, cut)


@pytest.mark.world_size(2)
def test_values_that_cannot_be_saved_are_an_error_on_all_ranks(tmp_path):
    whole = seeded(Staged)
    context = context_of(pipeline_parallel=2)
    cut = cut_of(whole, pipeline_group(context))
    module = keep_half(whole, context.rank)
    optimizer = module.configure_optimizers()
    if context.rank == 1:
        optimizer.state[module.head.bias] = {"hook": lambda: None}
    checkpoint = {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    with pytest.raises(
        RuntimeError, match=r"on rank 1 of 2: TypeError: a checkpoint cannot hold optimizer_states.*hook"
    ):
        save(context, tmp_path / "a", checkpoint, module, [optimizer], cut)


ORDER = ["a", "b", "c", "d", "e"]


def optimizer_part(*groups, kind="AdamW", **options):
    return OptimizerPart(kind, tuple(GroupPart(tuple(names), {"lr": "0.1", **options}) for names in groups))


def test_groups_are_merged_in_the_order_of_the_module():
    parts = [(("b", "e"), ("a",)), (("c", "e"), ()), (("d",), ("a",))]
    assert merge_group_names(parts, ORDER) == (("b", "c", "d", "e"), ("a",))


@pytest.mark.parametrize(
    ("parts", "problems"),
    [
        ([[optimizer_part("ab", "e")], [optimizer_part("cd", "")]], []),
        (
            [[optimizer_part("a")], [optimizer_part("a"), optimizer_part("b")]],
            ["by pipeline rank: [['AdamW'], ['AdamW', 'AdamW']]"],
        ),
        ([[optimizer_part("a")], [optimizer_part("b", kind="SGD")]], ["[['AdamW'], ['SGD']]"]),
        ([[optimizer_part("a", "b")], [optimizer_part("c")]], ["optimizer 0 has [2, 1] groups by pipeline rank"]),
        ([[optimizer_part("a")], [optimizer_part("b", eps="1")]], ["group 0: eps is missing, 1 by pipeline rank"]),
        (
            [[optimizer_part("ba")], [optimizer_part("c")]],
            ["not in the order of named_parameters() on pipeline rank 0: b, a"],
        ),
        ([[optimizer_part("ae", "")], [optimizer_part("b", "e")]], ["optimizer 0: e is in group 0 and in group 1"]),
        (
            [[optimizer_part("ba", lr="0.2")], [optimizer_part("c")]],
            ["lr is 0.2, 0.1 by pipeline rank", "not in the order of named_parameters() on pipeline rank 0"],
        ),
    ],
)
def test_optimizer_problems(parts, problems):
    found = optimizer_problems(parts, ORDER)
    assert len(found) == len(problems)
    for text, expected in zip(found, problems, strict=True):
        assert expected in text
