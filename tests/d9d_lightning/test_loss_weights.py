"""Losses with weights: token means over unequal microbatches, zero weights, and all that is refused."""

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from tests.d9d_lightning.support import build_trainer, full

# Token counts and constant loss per token by rank and batch: public report A5. Step loss 20 / 16 = 1.25.
COUNTS = {0: (1.0, 3.0), 1: (8.0, 4.0)}
LOSSES = {0: (4.0, 0.0), 1: (1.0, 2.0)}
LEARNING_RATE = 0.5


class Tokens(L.LightningModule):
    """The loss of a batch is its constant times a product of weights that is 1 at first."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(*[nn.Linear(1, 1, bias=False) for _ in range(2)])
        self.seen = {}
        for parameter in self.parameters():
            nn.init.ones_(parameter)

    def training_step(self, batch, batch_idx):
        value, count = batch
        output = self.model(value.reshape(-1, 1)).sum()
        mean = output / count.sum() if float(count.sum()) == 0 else output
        return {"loss": mean, "loss_weight": count.sum()}

    def on_before_optimizer_step(self, optimizer):
        self.seen = {name: full(parameter.grad) for name, parameter in self.named_parameters()}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


def loader(values, counts):
    pairs = [
        (torch.tensor([v], dtype=torch.float64), torch.tensor([c], dtype=torch.float64))
        for v, c in zip(values, counts, strict=True)
    ]
    return DataLoader(pairs, batch_size=None)


def fit(mesh, values, counts, **options):
    trainer = build_trainer(mesh, accumulate_grad_batches=len(values), **options)
    module = Tokens().double()
    trainer.fit(module, loader(values, counts))
    return module


@pytest.mark.world_size(1)
def test_one_rank_weighs_its_batches():
    """(4 * 1 + 0 * 3) / 4."""
    module = fit({}, LOSSES[0], COUNTS[0])
    assert module.seen["model.0.weight"].item() == pytest.approx(1.0, abs=1e-12)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("axis", ["data_parallel_replicate", "data_parallel_shard"])
def test_ranks_weigh_all_tokens_of_the_step(axis):
    """A5: neither 1.75, the mean of means, nor 1.1667, the mean of the ranks' token means."""
    rank = dist.get_rank()
    module = fit({axis: 2}, LOSSES[rank], COUNTS[rank])
    assert module.seen["model.0.weight"].item() == pytest.approx(1.25, abs=1e-12)


@pytest.mark.world_size(4)
def test_pipelines_weigh_all_tokens_of_the_step():
    options = {"pipeline_module": "model"}
    replica = dist.get_rank() % 2
    module = fit(
        {"pipeline_parallel": 2, "data_parallel_replicate": 2},
        LOSSES[replica],
        COUNTS[replica],
        strategy_options=options,
    )
    (gradient,) = module.seen.values()
    assert gradient.item() == pytest.approx(1.25, abs=1e-12)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("axis", ["data_parallel_replicate", "data_parallel_shard", "pipeline_parallel"])
def test_a_batch_without_weight_adds_nothing_even_if_its_loss_is_not_a_number(axis):
    """A8: the loss of the second rank, or of the second microbatch, is 0 / 0."""
    if axis == "pipeline_parallel":
        values, counts = (3.0, 0.0), (2.0, 0.0)
    else:
        values, counts = ((3.0,), (2.0,)) if dist.get_rank() == 0 else ((0.0,), (0.0,))
    module = fit({axis: 2}, values, counts, strategy_options={"pipeline_module": "model"})
    assert all(gradient.item() == pytest.approx(3.0, abs=1e-12) for gradient in module.seen.values())


@pytest.mark.world_size(2)
@pytest.mark.parametrize("axis", ["data_parallel_replicate", "data_parallel_shard", "pipeline_parallel"])
def test_a_step_without_weight_is_refused_on_all_ranks_and_changes_nothing(axis):
    trainer = build_trainer({axis: 2}, strategy_options={"pipeline_module": "model"})
    module = Tokens().double()
    with pytest.raises(RuntimeError, match="loss_weight of all microbatches of this step is 0 on all ranks"):
        trainer.fit(module, loader((0.0,), (0.0,)))
    assert all(full(parameter).item() == 1.0 for parameter in module.parameters())


class Rows(Tokens):
    """The loss of a microbatch is the sum over its rows, and notes what hooks see of the batch."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.outputs = outputs


def outputs_of_rows(mesh, values, counts, **options):
    batch = (torch.tensor(values, dtype=torch.float64), torch.tensor(counts, dtype=torch.float64))
    module = Rows().double()
    options = {"microbatches": 2, **options}
    build_trainer(mesh, strategy_options=options).fit(module, DataLoader([batch], batch_size=None))
    return module.outputs


@pytest.mark.world_size(1)
@pytest.mark.parametrize(
    ("values", "counts", "loss"),
    # Two rows of a loss of 4 and weight 1, two of 0 and weight 3: (4 * 1 + 0 * 3) / 4. The loss without weight is 0 / 0.
    [((4.0, 0.0), (1.0, 3.0), 1.0), ((4.0, 0.0, 0.0), (2.0, 0.0, 6.0), 1.0), ((4.0, 0.0), (2.0, 0.0), 4.0)],
)
def test_outputs_of_a_split_batch_are_weighed(values, counts, loss):
    outputs = outputs_of_rows({}, values, counts)
    assert outputs["loss"].item() == pytest.approx(loss, abs=1e-12)
    assert outputs["loss_weight"].item() == sum(counts)


@pytest.mark.world_size(2)
def test_outputs_of_a_pipeline_are_weighed():
    outputs = outputs_of_rows({"pipeline_parallel": 2}, (4.0, 0.0), (1.0, 3.0), pipeline_module="model")
    assert outputs["loss"].item() == pytest.approx(1.0, abs=1e-12)
    assert outputs["loss_weight"].item() == 4.0


@pytest.mark.world_size(1)
@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_weights_that_make_no_sense_are_refused(weight):
    with pytest.raises(ValueError, match="must be at least 0, and finite"):
        fit({}, (1.0,), (weight,))


@pytest.mark.world_size(2)
def test_weights_on_some_ranks_only_are_refused_on_all():
    class Partly(Tokens):
        def training_step(self, batch, batch_idx):
            output = super().training_step(batch, batch_idx)
            return output if dist.get_rank() == 0 else output["loss"]

    trainer = build_trainer({"data_parallel_replicate": 2})
    with pytest.raises(RuntimeError, match="on 1 of 2 data-parallel ranks"):
        trainer.fit(Partly().double(), loader((1.0,), (1.0,)))


@pytest.mark.world_size(1)
def test_a_skipped_last_batch_leaves_the_mean_of_the_others():
    """The loss 4 with weight 100, and then a batch that returns None: the gradient is that of 4, not of 400."""

    class Skipping(Tokens):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    trainer = build_trainer({}, accumulate_grad_batches=2)
    module = Skipping().double()
    trainer.fit(module, loader((4.0, 1.0), (100.0, 1.0)))
    assert module.seen["model.0.weight"].item() == pytest.approx(4.0, abs=1e-12)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", [{"data_parallel_replicate": 2}, {"pipeline_parallel": 2}], ids=str)
def test_weights_for_a_part_of_a_step_are_refused(mesh):
    class Partly(Tokens):
        def training_step(self, batch, batch_idx):
            output = super().training_step(batch, batch_idx)
            return output if batch_idx == 0 else output["loss"]

    trainer = build_trainer(mesh, accumulate_grad_batches=2, strategy_options={"pipeline_module": "model"})
    with pytest.raises(RuntimeError, match="returned a loss_weight for 1 of 2 microbatches"):
        trainer.fit(Partly().double(), loader((1.0, 1.0), (1.0, 1.0)))


@pytest.mark.world_size(2)
def test_weights_that_come_and_go_are_refused():
    class Late(Tokens):
        def training_step(self, batch, batch_idx):
            output = super().training_step(batch, batch_idx)
            return output["loss"] if batch_idx == 0 else output

    trainer = build_trainer({"data_parallel_replicate": 2})
    with pytest.raises(RuntimeError, match="in the first step not, but one now"):
        trainer.fit(Late().double(), loader((1.0, 1.0), (1.0, 1.0)))
