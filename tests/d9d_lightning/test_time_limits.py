"""Which limit collectives have: the first one until the first step of a fit is done, and the other one everywhere else."""

import pytest
import torch
import torch.distributed as dist

from tests.d9d_lightning.support import Regression, build_trainer, make_samples, rank_loader, seeded

LIMIT_S, FIRST_LIMIT_S = 300.0, 900.0
MESH = {"data_parallel_replicate": 2}


def limit_s():
    return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.total_seconds()


class Watched(Regression):
    """Notes the limit in each step."""

    def __init__(self):
        super().__init__()
        self.limits = []

    def training_step(self, batch, batch_idx):
        self.limits.append(limit_s())
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx):
        self.limits.append(limit_s())

    validation_step = test_step = predict_step


class ByHand(Watched):
    """Steps the optimizer itself, past Lightning's wrapper."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def trainer_and_loader():
    limits = {"timeout_s": LIMIT_S, "init_timeout_s": FIRST_LIMIT_S}
    trainer = build_trainer(MESH, strategy_options=limits)
    return trainer, rank_loader(make_samples(8), 4, dist.get_rank(), 2)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("kind", [Watched, ByHand])
def test_the_first_step_has_its_own_limit(kind):
    module = seeded(kind)
    trainer, loader = trainer_and_loader()
    trainer.fit(module, loader)
    assert module.limits == [FIRST_LIMIT_S, LIMIT_S]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["validate", "test", "predict"])
def test_evaluations_have_the_usual_limit(name):
    module = seeded(Watched)
    trainer, loader = trainer_and_loader()
    run = {"validate": trainer.validate, "test": trainer.test, "predict": trainer.predict}[name]
    run(module, loader)
    assert module.limits == [LIMIT_S, LIMIT_S]
