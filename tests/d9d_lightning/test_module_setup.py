"""Modules that torch has changed before: compiled ones, and synchronised batch norms."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from tests.d9d_lightning.support import (
    NUM_FEATURES,
    Regression,
    build_trainer,
    full_state,
    make_samples,
    plain_trainer,
    rank_loader,
    seeded,
)

EXACT = {"rtol": 1e-11, "atol": 1e-11}  # fp64
BATCH = 8


class Compiled(Regression):
    """Blocks compiled in place; the backend runs what was traced as it is."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager")


class Wrapped(Regression):
    """Blocks inside of what torch.compile returns, which has other parameter names."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([torch.compile(block, backend="aot_eager") for block in self.blocks])


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("mesh", "module_class"),
    [
        ({"data_parallel_replicate": 2}, Wrapped),
        ({"data_parallel_shard": 2}, Compiled),
        ({"tensor_parallel": 2}, Wrapped),
    ],
)
def test_compiled_submodules(mesh, module_class):
    torch.compiler.reset()
    module, reference = seeded(module_class), seeded(Regression)
    plan = {"blocks.*.inner.0": "colwise_gather"} if "tensor_parallel" in mesh else None
    rank, size = (0, 1) if plan else (dist.get_rank(), 2)
    samples = make_samples(2 * BATCH)
    build_trainer(mesh, strategy_options={"parallelize": plan}).fit(module, rank_loader(samples, BATCH, rank, size))
    plain_trainer().fit(reference, rank_loader(samples, BATCH, 0, 1))
    trained = {name.replace("_orig_mod.", ""): tensor for name, tensor in full_state(module).items()}
    torch.testing.assert_close(trained, dict(reference.state_dict()), **EXACT)
    is_distributed = any(isinstance(parameter, DTensor) for parameter in module.blocks.parameters())
    assert is_distributed == ("data_parallel_replicate" not in mesh)


class Staged(Regression):
    """The same with blocks that can be cut into stages."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(*self.blocks)
        del self.blocks

    def forward(self, x):
        return self.head(self.model(x)).squeeze(-1)

    def validation_step(self, batch, batch_idx):
        self.log("val", F.mse_loss(self(batch[0]), batch[1]))

    def on_before_optimizer_step(self, optimizer):
        pass


def state_of_ranks(module):
    state = full_state(module)
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return states


@pytest.mark.world_size(2)
@pytest.mark.parametrize("axis", ["data_parallel_replicate", "data_parallel_shard", "pipeline_parallel"])
def test_a_layer_that_was_exchanged_between_runs_is_equal_on_all_ranks(axis):
    module = seeded(Staged)
    samples = make_samples(BATCH)
    trainer = build_trainer({axis: 2}, strategy_options={"pipeline_module": "model"})
    rank, size = (0, 1) if axis == "pipeline_parallel" else (dist.get_rank(), 2)
    trainer.fit(module, rank_loader(samples, BATCH, rank, size))
    module.head = nn.Linear(NUM_FEATURES, 1, dtype=torch.float64)
    nn.init.constant_(module.head.weight, float(dist.get_rank() + 1))
    module.register_buffer("offset", torch.full((2,), float(dist.get_rank() + 1)))
    trainer.validate(module, rank_loader(samples, BATCH, rank, size), verbose=False)
    first, second = state_of_ranks(module)
    assert {"head.weight", "head.bias", "offset"} <= first.keys() & second.keys()
    torch.testing.assert_close(first["head.weight"], torch.ones_like(first["head.weight"]))
    for name in first.keys() & second.keys():
        assert torch.equal(first[name], second[name]), name
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, rank_loader(samples, BATCH, rank, size))
    first, second = state_of_ranks(module)
    assert torch.equal(first["head.weight"], second["head.weight"])
    assert not torch.equal(first["head.weight"], torch.ones_like(first["head.weight"]))


class WithNorm(Regression):
    """Has a batch norm that it does not use: torch's synchronised one runs on GPUs only."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(NUM_FEATURES)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("other", [{}, {"tensor_parallel": 2}], ids=["data only", "tp"])
def test_batch_norms_see_each_batch_once(other):
    mesh = {"data_parallel_replicate": 2 if other else 4, **other}
    module = seeded(WithNorm)
    plan = {"blocks.*.inner.0": "colwise_gather"}
    trainer = build_trainer(mesh, strategy_options={"parallelize": plan}, sync_batchnorm=True)
    trainer.fit(module, rank_loader(make_samples(BATCH), BATCH, 0, 2))
    assert isinstance(module.norm, nn.SyncBatchNorm)
    group = module.norm.process_group or dist.group.WORLD
    expected = [dist.get_rank() % 2, dist.get_rank() % 2 + 2] if other else [0, 1, 2, 3]
    assert dist.get_process_group_ranks(group) == expected


@pytest.mark.world_size(2)
def test_batch_norms_of_a_module_that_was_validated_first_are_synchronised():
    class Validated(WithNorm):
        def validation_step(self, batch, batch_idx):
            self.log("val", self.norm(batch[0]).sum())

    module = seeded(Validated)
    trainer = build_trainer({"data_parallel_replicate": 2}, sync_batchnorm=True)
    loader = rank_loader(make_samples(BATCH), BATCH, dist.get_rank(), 2)
    trainer.validate(module, loader, verbose=False)
    trainer.fit(module, loader)
    assert isinstance(module.norm, nn.SyncBatchNorm)
