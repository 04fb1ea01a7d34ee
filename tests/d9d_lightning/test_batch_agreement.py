"""Ranks that work on one batch and read different ones end with an error, on all of them."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import RunningStage

from d9d.core.dist_context import DeviceMeshParameters
from d9d_lightning.jobs.batch_agreement import BatchAgreement
from tests.d9d_lightning.support import Regression, build_trainer, make_samples, rank_loader, seeded

MESH = {"tensor_parallel": 2}


@pytest.mark.world_size(2)
def test_a_loader_by_the_global_rank():
    trainer = build_trainer(MESH, strategy_options={"parallelize": {"head": "rowwise_split"}})
    with pytest.raises(RuntimeError, match=r"first batches in train differ.*distributed_sampler_kwargs"):
        trainer.fit(seeded(Regression), rank_loader(make_samples(16), 8, dist.get_rank(), 2))


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("same", "other"),
    [
        ({"x": torch.ones(2), "text": "a"}, {"x": torch.ones(2), "text": "b"}),
        ([torch.tensor(float("nan")), 1], [torch.tensor(float("nan")), 2]),
        (torch.arange(4), torch.arange(4).flip(0)),
    ],
)
def test_what_differs(same, other):
    agreement = BatchAgreement(DeviceMeshParameters(**MESH).build())
    agreement.check(same, RunningStage.TRAINING)
    # Only the first batch of a stage is looked at.
    agreement.check(other if dist.get_rank() else same, RunningStage.TRAINING)
    with pytest.raises(RuntimeError, match="in validate differ"):
        agreement.check(other if dist.get_rank() else same, RunningStage.VALIDATING)


@pytest.mark.world_size(2)
def test_replicas_have_their_own_batches():
    agreement = BatchAgreement(DeviceMeshParameters(data_parallel_replicate=2).build())
    agreement.check(torch.tensor(dist.get_rank()), RunningStage.TRAINING)
