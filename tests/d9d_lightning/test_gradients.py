"""What hooks and optimizers see of gradients: counts, values, several backward passes, zeroing, several optimizers."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from tests.d9d_lightning.support import (
    MESHES,
    Regression,
    build_trainer,
    full,
    full_state,
    make_samples,
    rank_loader,
    seeded,
)

EXACT = {"rtol": 1e-12, "atol": 1e-12}  # fp64; only the order of sums differs
ALL_MESHES = [(size, mesh) for size, meshes in MESHES.items() for mesh in meshes]


def fit(module, mesh, samples, batch_size, **options):
    trainer = build_trainer(mesh, **options)
    trainer.fit(module, rank_loader(samples, batch_size, dist.get_rank(), dist.get_world_size()))
    return trainer


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=str)
def test_hooks_run_as_often_as_documented(mesh):
    """A1: 7 batches, 3 of which make a step."""
    module = seeded(Regression)
    fit(module, mesh, make_samples(7 * 4), 4, accumulate_grad_batches=3, gradient_clip_val=1.0)
    assert [
        module.calls.count(name) for name in ("training_step", "on_after_backward", "on_before_optimizer_step")
    ] == [
        7,
        7,
        3,
    ]


def expected_gradients(samples, accumulate):
    """Gradients of the first window of Regression on one process."""
    module = seeded(Regression)
    x, y = (tensor.chunk(accumulate) for tensor in samples)
    for x_part, y_part in zip(x, y, strict=True):
        (F.mse_loss(module(x_part), y_part) / accumulate).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def check_seen_gradients(mesh):
    samples = make_samples(3 * 8)
    module = seeded(Regression)
    fit(module, mesh, samples, 8, accumulate_grad_batches=3, gradient_clip_val=1e-3)
    torch.testing.assert_close(module.seen_gradients[0], expected_gradients(samples, 3), **EXACT)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=str)
def test_hooks_see_the_synced_unclipped_gradient_on_two_ranks(mesh):
    check_seen_gradients(mesh)


@pytest.mark.world_size(4)
def test_hooks_see_the_synced_unclipped_gradient_on_four_ranks():
    check_seen_gradients(MESHES[4][0])


class CountedRegression(Regression):
    """Counts the collectives of each backward pass."""

    def __init__(self):
        super().__init__()
        self.num_reductions = []

    def backward(self, loss, *args, **kwargs):
        with CommDebugMode() as mode:
            super().backward(loss, *args, **kwargs)
        counts = mode.get_comm_counts()
        self.num_reductions.append(sum(n for op, n in counts.items() if "reduce" in str(op)))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=str)
def test_accumulating_batches_reduce_nothing(mesh):
    module = seeded(CountedRegression)
    fit(module, mesh, make_samples(6 * 4), 4, accumulate_grad_batches=3)
    # Replicated: one bucket. Sharded: two blocks and the root.
    per_step = 1 if "data_parallel_replicate" in mesh else 3
    assert module.num_reductions == [0, 0, per_step, 0, 0, per_step]


class TwoBackwards(Regression):
    """Manual optimization with two backward passes before a step."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for part in (0, 1):
            x, y = (tensor.chunk(2)[part] for tensor in batch)
            self.manual_backward(F.mse_loss(self(x), y))
        optimizer.step()


def check_two_backwards(mesh, module_class=TwoBackwards):
    world_size = dist.get_world_size()
    samples = make_samples(2 * world_size * 4)
    module = seeded(module_class)
    fit(module, mesh, samples, len(samples[0]) // 2)
    reference = seeded(Regression)
    # Each rank's half batches, over all ranks: in global order 4 samples per rank, cut in 2 and 2.
    x, y = (tensor.chunk(2)[0].view(world_size, 2, 2, -1).squeeze(-1) for tensor in samples)
    for part in (0, 1):
        F.mse_loss(reference(x[:, part].flatten(0, 1)), y[:, part].flatten()).backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    torch.testing.assert_close(module.seen_gradients[0], expected, **EXACT)
    assert len(module.seen_gradients) == 2
    # The second step starts from zero.
    assert not torch.equal(module.seen_gradients[1]["head.weight"], expected["head.weight"])


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=str)
def test_a_second_backward_adds_its_mean_on_two_ranks(mesh):
    check_two_backwards(mesh)


@pytest.mark.world_size(4)
def test_a_second_backward_adds_its_mean_on_four_ranks():
    check_two_backwards(MESHES[4][0])


class BlockedThenSummed(TwoBackwards):
    """The first backward pass of a step accumulates only, by Lightning's `sync_grad`."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for part in (0, 1):
            x, y = (tensor.chunk(2)[part] for tensor in batch)
            with optimizer.toggle_model(sync_grad=part == 1):
                self.manual_backward(F.mse_loss(self(x), y))
        optimizer.step()


@pytest.mark.world_size(4)
def test_toggle_model_accumulates_without_sums():
    check_two_backwards(MESHES[4][0], BlockedThenSummed)


class BlockedThenZeroed(TwoBackwards):
    """Gives up what it has accumulated, and starts anew."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        with optimizer.toggle_model(sync_grad=False):
            self.manual_backward(100 * self(batch[0]).sum())
        optimizer.zero_grad()
        self.manual_backward(F.mse_loss(self(batch[0]), batch[1]))
        optimizer.step()


class Interrupted(Regression):
    """Fails in the middle of its first accumulation window."""

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1 and not self.losses[2:]:
            self.losses += self.losses
            raise KeyError("interrupted")


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=str)
def test_zeroing_drops_what_waits_for_the_last_batch(mesh):
    samples = make_samples(4)
    module = seeded(BlockedThenZeroed)
    fit(module, mesh, samples, 4)
    torch.testing.assert_close(module.seen_gradients[0], expected_gradients(samples, 1), **EXACT)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=str)
def test_a_run_starts_without_the_gradients_of_an_interrupted_one(mesh):
    samples = make_samples(3 * 8)
    module = seeded(Interrupted)
    with pytest.raises(KeyError, match="interrupted"):
        fit(module, mesh, samples, 8, accumulate_grad_batches=3)
    module.losses = [0, 0, 0]
    fit(module, mesh, samples, 8, accumulate_grad_batches=3)
    torch.testing.assert_close(module.seen_gradients[0], expected_gradients(samples, 3), **EXACT)


class ZeroedByHand(Regression):
    """Clears gradients in the ways that do not go through the optimizer's defaults."""

    ways = (
        lambda module, optimizer: optimizer.zero_grad(set_to_none=False),
        lambda module, optimizer: module.zero_grad(),
        lambda module, optimizer: [child.zero_grad() for child in module.children()],
        lambda module, optimizer: module.head.zero_grad() or module.blocks.zero_grad(),
    )

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.ways[batch_idx % len(self.ways)](self, optimizer)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=str)
def test_gradients_are_cleared_however_they_are_zeroed(mesh):
    samples = make_samples(8 * 4)
    module = seeded(ZeroedByHand)
    fit(module, mesh, samples, 4)
    reference = seeded(Regression)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1)
    for x, y in zip(samples[0].split(4), samples[1].split(4), strict=True):
        optimizer.zero_grad()
        F.mse_loss(reference(x), y).backward()
        optimizer.step()
    torch.testing.assert_close(full_state(module), dict(reference.state_dict()), **EXACT)


class Gan(Regression):
    """Two networks, two optimizers, toggled as Lightning's documentation shows."""

    def __init__(self, toggles=True):
        super().__init__()
        self.automatic_optimization = False
        self.toggles = toggles
        self.critic = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))

    def losses_of(self, x, y):
        fake = self(x).unsqueeze(-1)
        return -self.critic(fake).mean(), lambda: F.mse_loss(self.critic(fake.detach()).squeeze(-1), y)

    def training_step(self, batch, batch_idx):
        x, y = batch
        generator, critic = self.optimizers()
        if self.toggles:
            self.toggle_optimizer(generator)
        loss, _ = self.losses_of(x, y)
        generator.zero_grad()
        self.manual_backward(loss)
        if batch_idx == 0:
            self.foreign_gradients = sum(p.grad is not None for p in self.critic.parameters())
        generator.step()
        if self.toggles:
            self.untoggle_optimizer(generator)
            self.toggle_optimizer(critic)
        _, critic_loss = self.losses_of(x, y)
        critic.zero_grad()
        self.manual_backward(critic_loss())
        critic.step()
        if self.toggles:
            self.untoggle_optimizer(critic)

    def configure_optimizers(self):
        generator = torch.optim.SGD([*self.blocks.parameters(), *self.head.parameters()], lr=0.1, momentum=0.9)
        return generator, torch.optim.AdamW(self.critic.parameters(), lr=1e-2)


def plain_gan(samples, batch_size):
    module = seeded(Gan)
    generator, critic = module.configure_optimizers()
    for x, y in zip(samples[0].split(batch_size), samples[1].split(batch_size), strict=True):
        generator.zero_grad()
        module.losses_of(x, y)[0].backward()
        generator.step()
        critic.zero_grad()
        module.losses_of(x, y)[1]().backward()
        critic.step()
    return module.state_dict()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=str)
@pytest.mark.parametrize("toggles", [True, False])
def test_two_optimizers_train_like_one_process(mesh, toggles):
    samples = make_samples(6 * 4)
    module = seeded(lambda: Gan(toggles))
    trainer = fit(module, mesh, samples, 4)
    torch.testing.assert_close(full_state(module), dict(plain_gan(samples, 4)), **EXACT)
    if toggles and "data_parallel_replicate" in mesh:
        assert module.foreign_gradients == 0
    assert trainer.global_step == 12


class Unused(Regression):
    """`spare` is used on no rank, `odd` on rank 1 alone."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(1, 1)
        self.odd = nn.Parameter(torch.ones(3))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + self.odd.square().sum() if dist.get_rank() == 1 else loss


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=str)
def test_unused_parameters(mesh):
    module = seeded(Unused)
    before = full(module.spare.weight)
    fit(module, mesh, make_samples(4), 4)
    # d/dx of x^2 at 1 on one of two ranks.
    torch.testing.assert_close(module.seen_gradients[0]["odd"], torch.ones(3, dtype=torch.float64))
    if "data_parallel_replicate" in mesh:
        assert module.seen_gradients[0]["spare.weight"] is None
        torch.testing.assert_close(full(module.spare.weight), before)
    else:
        # FSDP counts what its unit did not use as zero.
        assert module.seen_gradients[0]["spare.weight"] == 0


class Unfreezing(Regression):
    def __init__(self):
        super().__init__()
        self.head.requires_grad_(False)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.head.requires_grad_(True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=str)
def test_parameters_can_be_unfrozen_between_epochs(mesh):
    samples = make_samples(2 * 4)
    module = seeded(Unfreezing)
    fit(module, mesh, samples, 4, max_epochs=2)
    reference = seeded(Unfreezing)
    for epoch in range(2):
        reference.head.requires_grad_(epoch == 1)
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        for x, y in zip(samples[0].split(4), samples[1].split(4), strict=True):
            optimizer.zero_grad()
            F.mse_loss(reference(x), y).backward()
            optimizer.step()
    torch.testing.assert_close(full_state(module), dict(reference.state_dict()), **EXACT)
