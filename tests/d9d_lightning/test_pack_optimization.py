"""A batch that is cut into microbatches trains as the whole batch, with the hooks and values of Lightning."""

import contextlib
import weakref

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.d9d_lightning.support import (
    MESHES,
    Regression,
    build_trainer,
    full_state,
    make_samples,
    rank_loader,
    seeded,
)

BATCH = 14
NUM_STEPS = 3
# fp64: sums in another order, and what AdamW's division makes of the last bits.
TOLERANCE = 1e-12


class Logging(Regression):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "predictions": self(batch[0]).detach()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.calls.append(("end", len(batch[0]), tuple(outputs["predictions"].shape)))


def plain_training(accumulate):
    module = seeded(Regression)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    x, y = make_samples(NUM_STEPS * accumulate * BATCH)
    losses = []
    for start in range(0, len(x), BATCH):
        loss = F.mse_loss(module(x[start : start + BATCH]), y[start : start + BATCH])
        losses.append(loss.detach())
        (loss / accumulate).backward()
        if len(losses) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses), module.state_dict()


def check_split(mesh, accumulate):
    """Seven samples per rank in four microbatches: 2, 2, 2 and 1."""
    trainer = build_trainer(mesh, accumulate_grad_batches=accumulate, strategy_options={"microbatches": 4})
    module = seeded(Logging)
    world = dist.get_world_size()
    samples = make_samples(NUM_STEPS * accumulate * BATCH)
    trainer.fit(module, rank_loader(samples, BATCH, dist.get_rank(), world))
    losses, state = plain_training(accumulate)
    torch.testing.assert_close(full_state(module), dict(state), rtol=TOLERANCE, atol=TOLERANCE)
    epoch = trainer.callback_metrics["loss_epoch"].clone()
    dist.all_reduce(epoch)
    torch.testing.assert_close(epoch.double() / world, losses.mean(), rtol=1e-6, atol=0)
    assert [call for call in module.calls if type(call) is tuple] == [("end", BATCH // world, (BATCH // world,))] * (
        NUM_STEPS * accumulate
    )
    assert module.calls.count("on_after_backward") == 4 * NUM_STEPS * accumulate
    assert trainer.global_step == NUM_STEPS


@pytest.mark.world_size(1)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_rank_with_microbatches_trains_like_plain_torch(accumulate):
    check_split({}, accumulate)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", MESHES[2], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_ranks_with_microbatches_train_like_one_process(mesh, accumulate):
    check_split(mesh, accumulate)


class Unsized(torch.utils.data.IterableDataset):
    def __init__(self, tensors):
        self.tensors = tensors

    def __iter__(self):
        return iter(zip(*self.tensors, strict=True))


@pytest.mark.world_size(1)
@pytest.mark.parametrize("has_length", [True, False])
def test_a_short_last_window_is_a_mean_over_its_batches(has_length):
    """Five batches in windows of 3: the second window has two."""
    x, y = make_samples(5 * BATCH)
    module = seeded(Regression)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    for window in (range(3), range(3, 5)):
        for index in window:
            rows = slice(index * BATCH, (index + 1) * BATCH)
            (F.mse_loss(module(x[rows]), y[rows]) / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = seeded(Regression)
    data = torch.utils.data.TensorDataset(x, y) if has_length else Unsized((x, y))
    trainer = build_trainer({}, accumulate_grad_batches=3)
    trainer.fit(trained, torch.utils.data.DataLoader(data, batch_size=BATCH))
    torch.testing.assert_close(trained.state_dict(), module.state_dict(), rtol=TOLERANCE, atol=TOLERANCE)
    assert trainer.global_step == 2


# ---- hooks that are empty --------------------------------------------------------------------------------------------


class SeesBackward(Regression):
    """Steps without hooks; what a test puts on it is noted."""

    def __init__(self):
        super().__init__()
        self.seen = []


def on_class(module, callback, monkeypatch):
    monkeypatch.setattr(L.Callback, "on_after_backward", lambda self, *args: module.seen.append("after"))


def on_module(module, callback, monkeypatch):
    module.on_after_backward = lambda: module.seen.append("after")


def on_callback(module, callback, monkeypatch):
    callback.on_after_backward = lambda *args: module.seen.append("after")


def on_plugin(module, callback, monkeypatch):
    plugin = module.trainer.precision_plugin
    inherited = plugin.post_backward
    monkeypatch.setattr(plugin, "post_backward", lambda *args: [module.seen.append("after"), inherited(*args)][1])


def on_step_context(module, callback, monkeypatch):
    see = lambda: contextlib.nullcontext(module.seen.append("entered"))  # noqa: E731
    monkeypatch.setattr(type(module.trainer.precision_plugin), "train_step_context", lambda self: see())


def on_forward_context(module, callback, monkeypatch):
    see = lambda: contextlib.nullcontext(module.seen.append("entered"))  # noqa: E731
    monkeypatch.setattr(module.trainer.precision_plugin, "forward_context", see)


def around_model(module, callback, monkeypatch):
    class Wrapper(torch.nn.Module):
        def forward(self, *args):
            module.seen.append("through")
            return module(*args)

    monkeypatch.setattr(module.trainer.strategy, "model", Wrapper())


class PutsHook(L.Callback):
    """Puts a hook somewhere while the first batch runs, as tools for debugging do."""

    def __init__(self, put, monkeypatch):
        self.put, self.monkeypatch = put, monkeypatch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0:
            self.put(pl_module, self, self.monkeypatch)


@pytest.mark.world_size(1)
@pytest.mark.parametrize("microbatches", [None, 2])
@pytest.mark.parametrize(
    "put", [on_class, on_module, on_callback, on_plugin, on_step_context, on_forward_context, around_model]
)
def test_hooks_are_called_however_they_came_there(put, microbatches, monkeypatch):
    module = seeded(SeesBackward)
    trainer = build_trainer(
        {}, strategy_options={"microbatches": microbatches}, max_steps=2, callbacks=[PutsHook(put, monkeypatch)]
    )
    trainer.fit(module, rank_loader(make_samples(2 * BATCH), BATCH, 0, 1))
    num_callbacks = len(trainer.callbacks) if put is on_class else 1
    assert len(module.seen) == 2 * (microbatches or 1) * num_callbacks


class SeesLoss(SeesBackward):
    """Backward passes of its own see the loss as Lightning would have scaled it."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * 0 + len(batch[0])

    def backward(self, loss):
        self.seen.append(loss.item())
        loss.backward()


class PutsHookOnItself(SeesBackward):
    """Puts a hook on itself in its first step, in front of the backward pass that it is for."""

    def training_step(self, batch, batch_idx):
        self.on_before_backward = lambda loss: self.seen.append(loss.item())
        return super().training_step(batch, batch_idx) * 0 + len(batch[0])


class ChangesGradient(Regression):
    """Changes the gradient that a backward pass starts with in place, and notes what it was."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(self.change)
        return loss

    def change(self, gradient):
        self.seen.append(gradient.item())
        gradient.zero_()


@pytest.mark.world_size(1)
def test_backward_passes_start_with_their_own_share_whatever_hooks_do():
    module = seeded(ChangesGradient)
    trainer = build_trainer({}, strategy_options={"microbatches": 4}, max_steps=1)
    trainer.fit(module, rank_loader(make_samples(6), 6, 0, 1))
    assert module.seen == pytest.approx([2 / 6, 2 / 6, 1 / 6, 1 / 6])


class ReplacesBackward(SeesBackward):
    """Has no backward pass of its own, but Lightning's was replaced for all modules."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * 0 + len(batch[0])


@pytest.mark.world_size(1)
@pytest.mark.parametrize("kind", [SeesLoss, PutsHookOnItself, ReplacesBackward])
def test_backward_sees_the_share_of_a_microbatch(kind, monkeypatch):
    """Six samples in four parts of 2, 2, 1, 1: the loss of each is its size, and its share is size / 6."""
    if kind is ReplacesBackward:
        monkeypatch.setattr(L.LightningModule, "backward", SeesLoss.backward)
    module = seeded(kind)
    trainer = build_trainer({}, strategy_options={"microbatches": 4}, max_steps=1)
    trainer.fit(module, rank_loader(make_samples(6), 6, 0, 1))
    assert module.seen == pytest.approx([2 * 2 / 6, 2 * 2 / 6, 1 / 6, 1 / 6])


class WatchesLoss(Regression):
    """Notes whether the loss of one microbatch, and so its graph, is there when the next one begins."""

    def __init__(self):
        super().__init__()
        self.last = None
        self.is_kept = []

    def training_step(self, batch, batch_idx):
        if self.last is not None:
            self.is_kept.append(self.last() is not None)
        loss = super().training_step(batch, batch_idx)
        self.last = weakref.ref(loss)
        return {"loss": loss, "size": len(batch[0])}


@pytest.mark.world_size(1)
def test_the_graph_of_a_microbatch_is_let_go_before_the_next():
    module = seeded(WatchesLoss)
    build_trainer({}, strategy_options={"microbatches": 4}, max_steps=1).fit(
        module, rank_loader(make_samples(8), 8, 0, 1)
    )
    assert module.is_kept == [False] * 3
