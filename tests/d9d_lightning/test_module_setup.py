"""Modules that torch has changed before: compiled ones, and synchronised batch norms."""

import pytest
import torch
import torch.distributed as dist
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
