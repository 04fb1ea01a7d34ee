"""Unchanged modules of many kinds train on every mesh as on one process; plans; repeated runs."""

import fnmatch

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from d9d.core.dist_context import DENSE_DOMAIN
from d9d.core.placement import is_sharded
from d9d.module.parallelism.api import parallelize_hsdp
from d9d_lightning import read_checkpoint
from tests.d9d_lightning.support import (
    MESHES,
    NUM_FEATURES,
    Block,
    Regression,
    build_trainer,
    full,
    full_state,
    make_samples,
    plain_trainer,
    rank_loader,
    seeded,
)

EXACT = {"rtol": 1e-11, "atol": 1e-11}  # fp64
NUM_STEPS = 5
BATCH = 8
NUM_CLASSES = 5


class Recurrent(Regression):
    """An LSTM, whose weights the module keeps in a list of its own."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList()
        self.lstm = nn.LSTM(NUM_FEATURES, NUM_FEATURES, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.head(self.lstm(x.unsqueeze(1))[0][:, 0]).squeeze(-1)


class Tied(Regression):
    """The last layer uses the first one's weight, across what the default plan would make two units."""

    def __init__(self):
        super().__init__()
        self.tied = nn.Linear(NUM_FEATURES, NUM_FEATURES, bias=False)
        self.tied.weight = self.blocks[0].inner[0].weight

    def forward(self, x):
        return super().forward(self.tied(x))


class Frozen(Regression):
    def __init__(self):
        super().__init__()
        self.blocks[0].requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class CheckpointedActivations(Regression):
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x).squeeze(-1)


class OwnParameters(Regression):
    """Parameters of the LightningModule itself; layers are called in the step, and `forward` never is."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 0.5))
        self.register_buffer("offset", torch.tensor(0.25))

    def training_step(self, batch, batch_idx):
        x, y = batch
        for block in self.blocks:
            x = block.inner(x) if isinstance(block, nn.Identity) else block(x)
        loss = F.mse_loss(self.head(x).squeeze(-1) * self.scale.sum() + self.offset, y)
        self.losses.append(loss.detach())
        return {"loss": loss, "extra": 1}


class NormalizedButEqual(Regression):
    """A batch norm that uses its running statistics, so that ranks need not see one batch."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(NUM_FEATURES).eval()

    def forward(self, x):
        return super().forward(self.norm.eval()(x))


class InStages(Regression):
    """Some layers are built in `setup`, which callbacks and the strategy see later."""

    def setup(self, stage):
        if not hasattr(self, "extra"):
            torch.manual_seed(5)
            self.extra = nn.Linear(NUM_FEATURES, NUM_FEATURES).double()

    def forward(self, x):
        return super().forward(self.extra(x))


MODULES = [Recurrent, Tied, Frozen, CheckpointedActivations, OwnParameters, NormalizedButEqual, InStages]


def train_on(mesh, module, **options):
    trainer = build_trainer(mesh, **options)
    trainer.fit(module, rank_loader(make_samples(NUM_STEPS * BATCH), BATCH, dist.get_rank(), dist.get_world_size()))
    return trainer


def plain_state(module):
    plain_trainer().fit(module, rank_loader(make_samples(NUM_STEPS * BATCH), BATCH, 0, 1))
    return dict(module.state_dict())


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=str)
@pytest.mark.parametrize("module_class", MODULES)
def test_module_trains_as_on_one_process(mesh, module_class):
    module = seeded(module_class)
    train_on(mesh, module)
    is_sharded_mesh = "data_parallel_shard" in mesh
    assert all(isinstance(parameter, DTensor) == is_sharded_mesh for parameter in module.parameters())
    torch.testing.assert_close(full_state(module), plain_state(seeded(module_class)), **EXACT)
    assert type(module).__name__ == module_class.__name__


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=str)
def test_tied_weights_stay_tied(mesh):
    module = seeded(Tied)
    train_on(mesh, module)
    assert module.tied.weight is module.blocks[0].inner[0].weight


@pytest.mark.world_size(4)
def test_default_plan_shards_repeated_blocks_and_the_root():
    module = seeded(Regression)
    train_on(MESHES[4][0], module)
    assert [isinstance(m, FSDPModule) for m in (*module.blocks, module, module.head)] == [True, True, True, False]
    assert all(is_sharded(parameter) for parameter in module.parameters())


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=str)
def test_modules_that_start_differently_agree(mesh):
    module = seeded(Regression, seed=dist.get_rank())
    train_on(mesh, module)
    torch.testing.assert_close(full_state(module), plain_state(seeded(Regression, seed=0)), **EXACT)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=str)
def test_one_module_through_many_runs(mesh):
    """fit, validate, fit again, also by a second Trainer, leaves the parameters as they are between runs."""

    class Evaluated(Regression):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

        test_step = validation_step

        def predict_step(self, batch, batch_idx):
            return self(batch[0])

    module, reference = seeded(Evaluated), seeded(Evaluated)
    loader = rank_loader(make_samples(NUM_STEPS * BATCH), BATCH, dist.get_rank(), 2)
    whole = rank_loader(make_samples(NUM_STEPS * BATCH), BATCH, 0, 1)
    trainer = train_on(mesh, module)
    parameters = list(module.parameters())
    [first] = trainer.validate(module, loader)
    second_trainer = build_trainer(mesh)
    second_trainer.fit(module, loader, loader)
    [second] = second_trainer.test(module, loader)
    predictions = torch.cat(second_trainer.predict(module, loader))
    assert [id(parameter) for parameter in module.parameters()] == [id(parameter) for parameter in parameters]
    # NCCL would get inference mode, and what FSDP gathers in it could not be trained. On gloo Lightning itself takes none.
    loops = (trainer.validate_loop, second_trainer.test_loop, second_trainer.predict_loop)
    assert not any(loop.inference_mode for loop in (*loops, second_trainer.fit_loop.epoch_loop.val_loop))
    plain_trainer().fit(reference, whole)
    plain = plain_trainer()
    [expected_first] = plain.validate(reference, whole)
    plain_trainer().fit(reference, whole)
    [expected_second] = plain.test(reference, whole)
    assert first["val_loss"] == pytest.approx(expected_first["val_loss"], rel=1e-6)
    assert second["val_loss"] == pytest.approx(expected_second["val_loss"], rel=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(predictions, torch.cat([reference(x) for x, _ in loader]), **EXACT)


@pytest.mark.world_size(2)
def test_two_meshes_one_after_the_other():
    for mesh in MESHES[2]:
        train_on(mesh, seeded(Regression))
    replicate, shard = MESHES[2]
    module = seeded(Regression)
    train_on(replicate, module)
    train_on(shard, module)
    with pytest.raises(RuntimeError, match="distributed over another mesh"):
        train_on(replicate, module)


class Normalized(Regression):
    """A batch norm with statistics of each rank's own batches."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(NUM_FEATURES)
        self.seen_means = []

    def forward(self, x):
        return super().forward(self.norm(x))

    def validation_step(self, batch, batch_idx):
        self.seen_means.append(self.norm.running_mean.clone())


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=str)
def test_evaluation_uses_the_statistics_of_rank_0(mesh):
    module = seeded(Normalized)
    samples = make_samples(2 * BATCH)
    loader = rank_loader(samples, BATCH, dist.get_rank(), 2)
    build_trainer(mesh).fit(module, loader, loader)
    # torch's formula: momentum 0.1 from 0, over the two batches of rank 0.
    expected = torch.zeros(NUM_FEATURES, dtype=torch.float64)
    for x, _ in rank_loader(samples, BATCH, 0, 2):
        expected = 0.9 * expected + 0.1 * x.mean(0)
    torch.testing.assert_close(module.seen_means[0], expected, **EXACT)


# ---- plans ---------------------------------------------------------------------------------------------------------


@pytest.mark.world_size(4)
def test_pattern_plan():
    module = seeded(Regression)
    plan = {"blocks.0": "hsdp", "blocks.*": "replicate"}
    train_on(MESHES[4][0], module, strategy_options={"parallelize": plan})
    for name, parameter in module.named_parameters():
        assert is_sharded(parameter) == fnmatch.fnmatch(name, "blocks.0.*"), name
    torch.testing.assert_close(full_state(module), plain_state(seeded(Regression)), **EXACT)


@pytest.mark.world_size(2)
def test_pattern_that_matches_nothing_shows_the_nearest():
    options = {"parallelize": {"block.0": "shard"}}
    with pytest.raises(ValueError, match=r"'block\.0' matches no submodule; the nearest are .*'blocks\.0'"):
        train_on(MESHES[2][1], seeded(Regression), strategy_options=options)


@pytest.mark.world_size(2)
def test_function_plan():
    def plan(module, context):
        parallelize_hsdp(module.blocks[1], context.mesh_for(DENSE_DOMAIN)["dp_cp_shard"])

    module = seeded(Regression)
    train_on(MESHES[2][1], module, strategy_options={"parallelize": plan})
    assert isinstance(module.blocks[1].inner[0].weight.placements[0], Shard)
    assert not is_sharded(module.head.weight)
    torch.testing.assert_close(full_state(module), plain_state(seeded(Regression)), **EXACT)


# ---- code that a module for DDP may have ------------------------------------------------------------------------------


class Liberties(Regression):
    """Penalises all parameters, hangs a hook on one, exchanges a gradient and data, and freezes by attribute."""

    def __init__(self):
        super().__init__()
        self.only_penalised = nn.Parameter(torch.ones(3))
        self.blocks[1].inner[0].bias.register_hook(lambda gradient: 2 * gradient)

    def on_train_start(self):
        self.blocks[0].inner[0].bias.requires_grad = False
        self.head.bias.data = torch.full_like(self.head.bias, 0.5)

    def training_step(self, batch, batch_idx):
        penalty = sum(parameter.pow(2).sum() for parameter in self.parameters())
        return super().training_step(batch, batch_idx) + 0.1 * penalty

    def on_before_optimizer_step(self, optimizer):
        weight = self.head.weight
        weight.grad = weight.grad.clamp(-0.01, 0.01)
        norms = grad_norm(self, norm_type=2)
        assert norms["grad_2.0_norm_total"] > 0


@pytest.mark.world_size(2)
def test_a_replicated_module_may_take_liberties():
    module = seeded(Liberties)
    train_on({"data_parallel_replicate": 2}, module)
    torch.testing.assert_close(full_state(module), plain_state(seeded(Liberties)), **EXACT)
    assert not isinstance(module.state_dict()["head.weight"], DTensor)


class CodeBook(Regression):
    """A buffer that each rank moves towards its own batch, and that the loss uses."""

    def __init__(self):
        super().__init__()
        self.register_buffer("code", torch.zeros(NUM_FEATURES))

    def training_step(self, batch, batch_idx):
        loss = super().training_step((batch[0] - self.code, batch[1]), batch_idx)
        self.code = 0.5 * self.code + 0.5 * batch[0].mean(0)
        return loss


@pytest.mark.world_size(2)
def test_buffers_are_those_of_rank_0_in_each_step():
    """The code book after n steps is a sum over the batches of rank 0 alone, on all ranks, up to the last step."""
    module = seeded(CodeBook)
    samples = make_samples(24)
    trainer = build_trainer({"data_parallel_replicate": 2}, max_steps=3)
    trainer.fit(module, rank_loader(samples, 8, dist.get_rank(), 2))
    code = torch.zeros(NUM_FEATURES, dtype=torch.float64)
    for step in range(3):
        # In the last step each rank has moved on by itself.
        rank = dist.get_rank() if step == 2 else 0
        code = 0.5 * code + 0.5 * samples[0][8 * step + 4 * rank :][:4].mean(0)
    torch.testing.assert_close(module.code, code, **EXACT)


# ---- lazy building ---------------------------------------------------------------------------------------------------


class Constant(nn.Module):
    """Counts up from a number, whatever the mesh."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float64))
        self.reset_parameters()

    def reset_parameters(self):
        with torch.no_grad():
            self.weight.copy_(torch.arange(len(self.weight), dtype=torch.float64))

    def forward(self, x):
        return x @ self.weight


class Lazy(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = None

    def configure_model(self):
        if self.layer is None:
            with torch.device("meta"):
                self.layer = Constant(NUM_FEATURES)

    def reset_parameters(self):
        self.layer.reset_parameters()

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=str)
def test_modules_on_the_meta_device_get_their_values(mesh, tmp_path):
    module = Lazy()
    trainer = train_on(mesh, module)
    expected = torch.arange(NUM_FEATURES, dtype=torch.float64)
    torch.testing.assert_close(full(module.layer.weight), expected)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    resumed = Lazy()
    resumed.reset_parameters = lambda: nn.init.zeros_(resumed.layer.weight)
    loader = rank_loader(make_samples(2 * NUM_STEPS * BATCH), BATCH, dist.get_rank(), 2)
    build_trainer(mesh, max_epochs=2).fit(resumed, loader, ckpt_path=tmp_path / "a.ckpt")
    torch.testing.assert_close(full(resumed.layer.weight), expected)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", [MESHES[2][0], {"data_parallel_shard": 2}], ids=str)
def test_lazily_built_modules_restore_what_only_full_loading_reads(mesh, tmp_path):
    """A path among the hyperparameters of a file, which torch refuses under ``weights_only``."""
    module = Lazy()
    module.save_hyperparameters({"data": tmp_path})
    trained = train_on(mesh, module)
    trained.save_checkpoint(tmp_path / "folder")
    torch.save(read_checkpoint(tmp_path / "folder"), tmp_path / f"{dist.get_rank()}.ckpt")
    assert read_checkpoint(tmp_path / "folder")["hyper_parameters"] == {"data": tmp_path}
    resumed = Lazy()
    resumed.reset_parameters = lambda: nn.init.zeros_(resumed.layer.weight)
    loader = rank_loader(make_samples(2 * NUM_STEPS * BATCH), BATCH, dist.get_rank(), 2)
    trainer = build_trainer(mesh, max_epochs=2)
    trainer.fit(resumed, loader, ckpt_path=tmp_path / f"{dist.get_rank()}.ckpt", weights_only=False)
    torch.testing.assert_close(full(resumed.layer.weight), torch.arange(NUM_FEATURES, dtype=torch.float64))


def test_one_process_materializes_too():
    module = Lazy()
    plain = build_single_trainer()
    plain.fit(module, rank_loader(make_samples(BATCH), BATCH, 0, 1))
    assert type(module.layer.weight) is nn.Parameter
    torch.testing.assert_close(module.layer.weight.detach(), torch.arange(NUM_FEATURES, dtype=torch.float64))


def test_what_a_lazy_module_lacks_is_not_hidden_by_the_end_of_the_run():
    """It has no ``reset_parameters``, and Lightning would move it to the CPU first."""

    class Unready(Lazy):
        reset_parameters = None

    with pytest.raises(TypeError, match="reset_parameters"):
        build_single_trainer().fit(Unready(), rank_loader(make_samples(BATCH), BATCH, 0, 1))


def build_single_trainer():
    from d9d_lightning import D9DStrategy

    return plain_trainer(strategy=D9DStrategy())


def test_one_process_is_plain_lightning():
    module = seeded(Regression)
    trainer = build_single_trainer()
    trainer.fit(module, rank_loader(make_samples(NUM_STEPS * BATCH), BATCH, 0, 1))
    assert not dist.is_initialized()
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    torch.testing.assert_close(dict(module.state_dict()), plain_state(seeded(Regression)), rtol=0, atol=0)
    assert isinstance(module.blocks[0], Block)
