"""Clipping over the mesh, with hand-set gradients."""

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.data import DataLoader

from d9d.core.dist_context import DENSE_DOMAIN, DeviceMeshParameters
from d9d.core.placement import local_tensor
from d9d_lightning import D9DStrategy
from d9d_lightning.gradients.precision import NormScope, install_mesh_clipping
from tests.d9d_lightning.support import (
    PoolEnvironment,
    Regression,
    build_trainer,
    full,
    full_state,
    make_samples,
    plain_trainer,
    rank_loader,
    seeded,
)

TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}  # torch adds 1e-6 to the norm


def parameter_with_gradient(value, layout):
    """A parameter of one element per rank, all with gradient `value`, in a layout of the two ranks."""
    mesh = DeviceMeshParameters(data_parallel_shard=2).build().mesh_for(DENSE_DOMAIN)["dp_cp_shard"]
    local = torch.tensor([value], dtype=torch.float64)
    if layout == "plain":
        parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        parameter.grad = local
        return parameter
    placement = Shard(0) if layout == "shard" else Replicate()
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(1, dtype=torch.float64), mesh, [placement]))
    parameter.grad = DTensor.from_local(local, mesh, [placement])
    return parameter


def local_gradients(parameters):
    return [p.grad.to_local().item() if isinstance(p.grad, DTensor) else p.grad.item() for p in parameters]


@pytest.fixture
def norms():
    return []


def clip_oracle(*rest):
    """Shards (3 | 4), replicated 12, and more plain values."""
    shard = parameter_with_gradient(3.0 + dist.get_rank(), "shard")
    parameters = [shard, parameter_with_gradient(12.0, "replicate")]
    return parameters + [parameter_with_gradient(value, "plain") for value in rest]


@pytest.mark.world_size(2)
def test_norm_counts_shards_once_each_and_replicas_once():
    norms = []
    strategy = D9DStrategy({"data_parallel_shard": 2})
    plugin = strategy.precision_plugin
    install_mesh_clipping(plugin, norms.append)
    for rest, norm in (((), 13.0), ((84.0,), 85.0)):
        parameters = clip_oracle(*rest)
        plugin.clip_gradients(torch.optim.SGD(parameters, lr=1.0), 8.5)
        assert norms.pop().item() == pytest.approx(norm)
        expected = [3.0 + dist.get_rank(), 12.0, *rest]
        assert local_gradients(parameters) == pytest.approx([8.5 / norm * value for value in expected], rel=1e-6)


@pytest.mark.world_size(2)
def test_values_are_limited_on_every_layout():
    strategy = D9DStrategy({"data_parallel_shard": 2})
    plugin = strategy.precision_plugin
    install_mesh_clipping(plugin, lambda norm: None)
    parameters = clip_oracle(-84.0)
    plugin.clip_gradients(torch.optim.SGD(parameters, lr=1.0), 3.5, "value")
    assert local_gradients(parameters) == [min(3.0 + dist.get_rank(), 3.5), 3.5, -3.5]


class NormRegression(Regression):
    """Keeps the norm over all gradients, by hand, before clipping."""

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        squares = [gradient.square().sum() for gradient in self.seen_gradients[-1].values()]
        self.norm = torch.stack(squares).sum().sqrt()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", [{"data_parallel_replicate": 2}, {"data_parallel_shard": 2}], ids=str)
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_trainer_clips_over_the_mesh(mesh, algorithm):
    trainer = build_trainer(mesh, gradient_clip_val=0.05, gradient_clip_algorithm=algorithm)
    module = seeded(NormRegression)
    clipped = {}

    def keep(gradients):
        clipped.update({name: gradient.detach().clone() for name, gradient in gradients.items()})

    def configure_gradient_clipping(optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        module.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        keep({name: full(p.grad) for name, p in module.named_parameters()})

    module.configure_gradient_clipping = configure_gradient_clipping
    trainer.fit(module, rank_loader(make_samples(4), 4, dist.get_rank(), 2))
    before = module.seen_gradients[0]
    if algorithm == "norm":
        torch.testing.assert_close(trainer.strategy.last_grad_norm, module.norm)
        factor = 0.05 / (module.norm + 1e-6)
        torch.testing.assert_close(clipped, {name: gradient * factor for name, gradient in before.items()})
    else:
        torch.testing.assert_close(clipped, {name: gradient.clamp(-0.05, 0.05) for name, gradient in before.items()})


@pytest.mark.world_size(2)
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_infinite_norm_is_seen_by_all_ranks(bad_rank):
    norms = []
    strategy = D9DStrategy({"data_parallel_shard": 2})
    plugin = strategy.precision_plugin
    install_mesh_clipping(plugin, norms.append)
    parameter = parameter_with_gradient(float("inf") if dist.get_rank() == bad_rank else 1.0, "shard")
    plugin.clip_gradients(torch.optim.SGD([parameter], lr=1.0), 1.0)
    assert norms[0].isinf()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", [{"data_parallel_replicate": 2}, {"data_parallel_shard": 2}], ids=str)
@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-true", torch.bfloat16), ("64-true", torch.float64), ("bf16-mixed", torch.float32)]
)
def test_precisions_train(mesh, precision, dtype):
    trainer = build_trainer(mesh, precision=precision, gradient_clip_val=1.0)
    module = seeded(Regression, dtype=torch.float32)
    trainer.fit(module, rank_loader(make_samples(8, dtype=torch.float32), 4, dist.get_rank(), 2))
    assert {parameter.dtype for parameter in module.parameters()} == {dtype}
    assert all(loss.isfinite() for loss in module.losses)


# Loss scaling


def scaled(mesh, **options):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    strategy = D9DStrategy(mesh, min_unit_params=20)
    trainer = plain_trainer(strategy=strategy, devices=2, plugins=[PoolEnvironment(), plugin], **options)
    return trainer, scaler


class Overflowing(Regression):
    """Has an infinite gradient on one rank after the backward pass of one step."""

    def __init__(self, bad_rank=None, bad_step=None):
        super().__init__()
        self.bad = (bad_rank, bad_step)
        self.states = []

    def on_after_backward(self):
        super().on_after_backward()
        if (self.trainer.global_rank, self.trainer.fit_loop.batch_idx) == self.bad:
            local_tensor(self.blocks[0].inner[0].weight.grad)[0, 0] = float("inf")

    def on_train_batch_end(self, *args):
        self.states.append(full_state(self))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", [{"data_parallel_replicate": 2}, {"data_parallel_shard": 2}], ids=str)
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(mesh, bad_rank):
    trainer, scaler = scaled(mesh, gradient_clip_val=1.0)
    module = seeded(lambda: Overflowing(bad_rank, 1), dtype=torch.float32)
    trainer.fit(module, rank_loader(make_samples(12, dtype=torch.float32), 4, dist.get_rank(), 2))
    assert scaler.get_scale() == 2.0**7
    first, second, third = module.states
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    assert any((third[name] != first[name]).any() for name in first)
    gathered = [torch.empty_like(third["head.weight"]) for _ in range(2)]
    dist.all_gather(gathered, third["head.weight"])
    torch.testing.assert_close(gathered[0], gathered[1], rtol=0, atol=0)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", [{"data_parallel_replicate": 2}, {"data_parallel_shard": 2}], ids=str)
def test_scaled_gradients_are_those_of_one_process(mesh):
    trainer, _ = scaled(mesh)
    module = seeded(Regression, dtype=torch.float32)
    trainer.fit(module, rank_loader(make_samples(4, dtype=torch.float32), 4, dist.get_rank(), 2))
    one = seeded(Regression, dtype=torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    plain_trainer(plugins=[plugin]).fit(one, rank_loader(make_samples(4, dtype=torch.float32), 4, 0, 1))
    # Half precision: sums in other orders.
    torch.testing.assert_close(module.seen_gradients, one.seen_gradients, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("mesh", [{"data_parallel_shard": -1}, None, {"pipeline_parallel": -1}], ids=str)
def test_scales_are_agreed_on_meshes_that_the_trainer_completes(mesh):
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    strategy = D9DStrategy(mesh, pipeline_module="model")
    L.Trainer(strategy=strategy, accelerator="cpu", devices=2, plugins=[plugin], logger=False)
    assert "_unscale_grads_" in vars(plugin.scaler)


class HalfStack(L.LightningModule):
    """A loss that overflows in half precision for one batch, on the last stage alone."""

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        self.seen = []

    def training_step(self, batch, batch_idx):
        loss = self.model(batch).square().mean()
        return loss * float("inf") if batch_idx == 1 else loss

    def on_before_optimizer_step(self, optimizer):
        self.seen.append({name: full(p.grad) for name, p in self.named_parameters() if p.grad is not None})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.world_size(2)
def test_stages_scale_losses_and_skip_steps_together():
    """Three batches of which the second is not finite: two updates, and half the scale afterwards, on both ranks."""
    batches = list(torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0)))
    loader = DataLoader(batches, batch_size=None)
    results = []
    for strategy in (D9DStrategy({"pipeline_parallel": 2}, pipeline_module="model"), None):
        plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**8))
        module = seeded(HalfStack, dtype=torch.float32)
        if strategy is None:
            plain_trainer(plugins=[plugin]).fit(module, loader)
        else:
            plugins = [PoolEnvironment(), plugin]
            plain_trainer(strategy=strategy, devices=2, plugins=plugins).fit(module, loader)
        results.append((module, plugin.scaler.get_scale()))
    (module, scale), (one, expected_scale) = results
    assert scale == expected_scale == 2.0**7
    own = module.state_dict()
    assert 0 < len(own) < 4
    torch.testing.assert_close(own, {name: one.state_dict()[name] for name in own}, rtol=1e-2, atol=1e-3)


# Precisions


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("precision", "tolerance"), [("64-true", 1e-12), ("32-true", 1e-5), ("bf16-true", 2e-2)])
def test_gradients_in_a_precision_are_those_of_one_process(precision, tolerance):
    samples = make_samples(4, dtype=torch.float32)
    module, one = seeded(Regression, dtype=torch.float32), seeded(Regression, dtype=torch.float32)
    trainer = build_trainer({"data_parallel_shard": 2}, precision=precision)
    trainer.fit(module, rank_loader(samples, 4, dist.get_rank(), 2))
    plain_trainer(precision=precision).fit(one, rank_loader(samples, 4, 0, 1))
    torch.testing.assert_close(module.seen_gradients, one.seen_gradients, rtol=tolerance, atol=tolerance)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_mixed_precision_of_fsdp(precision):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    module = seeded(Regression, dtype=torch.float32)
    seen = set()
    module.blocks[0].inner[0].register_forward_hook(lambda layer, args, output: seen.add((args[0].dtype, output.dtype)))
    trainer = build_trainer({"data_parallel_shard": 2}, precision=precision, strategy_options={"mp_policy": policy})
    trainer.fit(module, rank_loader(make_samples(4, dtype=torch.float32), 4, dist.get_rank(), 2))
    assert seen == {(torch.bfloat16, torch.bfloat16)}
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    one = seeded(Regression, dtype=torch.float32)
    plain_trainer().fit(one, rank_loader(make_samples(4, dtype=torch.float32), 4, 0, 1))
    torch.testing.assert_close(module.seen_gradients, one.seen_gradients, rtol=5e-2, atol=5e-2)


# Norms over pipelines


@pytest.mark.world_size(2)
def test_copies_outside_of_the_stages_count_once():
    pipeline = DeviceMeshParameters(pipeline_parallel=2).build().mesh_for(DENSE_DOMAIN)["pp"]
    rank = dist.get_rank()
    inside, outside = parameter_with_gradient((36.0, 77.0)[rank], "plain"), parameter_with_gradient(2.0, "plain")
    scope = NormScope(pipeline=pipeline, uncounted=frozenset([outside] if rank else []))
    norms = []
    strategy = D9DStrategy({"pipeline_parallel": 2}, pipeline_module="model")
    plugin = strategy.precision_plugin
    install_mesh_clipping(plugin, norms.append, lambda: scope)
    plugin.clip_gradients(torch.optim.SGD([outside, inside], lr=1.0), 8.5)
    norm = (36.0**2 + 77.0**2 + 2.0**2) ** 0.5
    assert norms[0].item() == pytest.approx(norm)
    expected = [8.5 / norm * value for value in (2.0, (36.0, 77.0)[rank])]
    assert local_gradients([outside, inside]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.world_size(2)
def test_norms_of_stages():
    pipeline = DeviceMeshParameters(pipeline_parallel=2).build().mesh_for(DENSE_DOMAIN)["pp"]
    parameter = parameter_with_gradient((36.0, 77.0)[dist.get_rank()], "plain")
    norms = []
    strategy = D9DStrategy({"pipeline_parallel": 2}, pipeline_module="model")
    plugin = strategy.precision_plugin
    install_mesh_clipping(plugin, norms.append, lambda: NormScope(pipeline=pipeline))
    plugin.clip_gradients(torch.optim.SGD([parameter], lr=1.0), 8.5)
    assert norms[0].item() == 85.0
    assert local_gradients([parameter]) == pytest.approx([(3.6, 7.7)[dist.get_rank()]], rel=1e-6)
