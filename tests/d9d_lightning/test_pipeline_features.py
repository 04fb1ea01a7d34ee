"""What a LightningModule may do around and inside a pipelined call: as on one process, or an error on all ranks."""

import dataclasses
import itertools
import time

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import nn

from d9d_lightning.pipeline.stages import PipelineStages
from tests.d9d_lightning.differential import BATCH, WIDTH, Case, Variant, run_ours, run_plain
from tests.d9d_lightning.support import Block

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}  # fp64: sums in another order, and what AdamW's division makes of them
LOGGED = {"rel": 2e-6, "abs": 2e-6}  # float32
MICROBATCH = 2


def pipeline(schedule="1f1b", *, microbatches=BATCH // MICROBATCH, mesh=None, **options):
    options = {"pipeline_module": "net", "schedule": schedule, **options}
    return Variant({"pipeline_parallel": 2, **(mesh or {})}, microbatches=microbatches, options=options)


def fit(trainer, module, data):
    trainer.fit(module, data["train_dataloaders"])


def trained(folder, module, variant, *, act=fit, **settings):
    """The run in a pipeline, and one of a process that goes from microbatch to microbatch."""
    case = Case(lambda folder: {"max_epochs": 2}, module, num_train=2, act=act, **settings)
    window = (variant.microbatches or 1) * variant.options.get("accumulate", 1)
    micro = dataclasses.replace(
        case,
        options=lambda folder: {"max_epochs": 2, "accumulate_grad_batches": window},
        batch_size=BATCH // (variant.microbatches or 1),
    )
    return run_ours(case, variant, folder), run_plain(micro, folder)


def check_parity(folder, module, variant=None, **settings):
    own, lightning = trained(folder, module, variant or pipeline(), **settings)
    assert len(own.module.seen) == len(lightning.module.seen) == 4
    for gradients, expected in zip(own.module.seen, lightning.module.seen, strict=True):
        torch.testing.assert_close(gradients, {name: expected[name] for name in gradients}, **TOLERANCE)
    weights = lightning.weights
    torch.testing.assert_close(own.weights, {name: weights[name] for name in own.weights}, **TOLERANCE)
    epochs = [[row["loss_epoch"] for _, row in run.rows if "loss_epoch" in row] for run in (own, lightning)]
    assert epochs[0] == pytest.approx(epochs[1], **LOGGED)
    assert len(epochs[0]) == 2
    return own


class Watched(L.LightningModule):
    """Keeps its gradients, and trains on what `errors` returns."""

    num_layers = 4

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[Block(WIDTH) for _ in range(self.num_layers)])
        self.head = nn.Linear(WIDTH, 1)
        self.seen, self.events = [], []

    def errors(self, x):
        return self.head(self.net(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self.errors(x).squeeze(-1), y)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(y))
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.seen.append({name: p.grad if p.grad is None else p.grad.clone() for name, p in self.named_parameters()})

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


class AroundTheCall(Watched):
    """A parameter in front, one behind, one at both ends, one that goes around the stages, and one that nobody uses."""

    def __init__(self):
        super().__init__()
        self.front = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(WIDTH, WIDTH)

    def errors(self, x):
        hidden = self.front(x) * self.scale
        return self.head(self.net(hidden) + hidden) * self.scale


class FrozenStage(AroundTheCall):
    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)
        self.net[1].requires_grad_(False)


class FrozenOutside(AroundTheCall):
    def __init__(self):
        super().__init__()
        self.front.requires_grad_(False)
        self.head.requires_grad_(False)


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Block(WIDTH)

    def forward(self, x, mask, shift=None):
        return self.inner(x) * mask + shift


class FurtherArguments(Watched):
    """A mask by position and a parameter by name, which all stages get."""

    def __init__(self):
        super().__init__()
        self.net = Passing(*[Shifted() for _ in range(self.num_layers)])
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.1))

    def errors(self, x):
        return self.head(self.net(x, (x > 0).to(x.dtype), shift=self.shift))


class Passing(nn.Sequential):
    def forward(self, x, mask, shift):
        for layer in self:
            x = layer(x, mask, shift=shift)
        return x


class InDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Block(WIDTH)

    def forward(self, state):
        x, (total, count) = state["x"], state["rest"]
        return {"x": self.inner(x), "rest": (total + x.sum(-1), count + 1)}


class NestedActivations(Watched):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*[InDict() for _ in range(self.num_layers)])

    def errors(self, x):
        state = self.net({"x": x, "rest": (x[:, 0], 0)})
        assert state["rest"][1] == self.num_layers
        return self.head(state["x"]) + state["rest"][0][:, None]


class BatchNorms(Watched):
    """Statistics in front of the stages, in them, and behind."""

    def __init__(self):
        super().__init__()
        self.front = nn.BatchNorm1d(WIDTH)
        self.net = nn.Sequential(*[nn.Sequential(Block(WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(4)])
        self.behind = nn.BatchNorm1d(WIDTH)

    def errors(self, x):
        return self.head(self.behind(self.net(self.front(x))))


class Deep(Watched):
    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.inner.model = self.net
        del self.net

    def errors(self, x):
        return self.head(self.inner.model(x))


class Pops(Watched):
    def training_step(self, batch, batch_idx):
        y = batch.pop("y")
        return super().training_step((batch.pop("x"), y), batch_idx)


def as_dict(samples):
    return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}


# One and two stages per rank, with whole and with split backward passes, for each module: half of these as a sample.
EXHAUSTIVE = {
    (module, schedule)
    for modules, schedules in (
        ((AroundTheCall, FrozenOutside), ("interleaved", "zero_bubble")),
        ((FrozenStage, NestedActivations), ("1f1b", "zero_bubble_v")),
    )
    for module, schedule in itertools.product(modules, schedules)
}


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("module", "schedule"),
    [
        pytest.param(*case, marks=[pytest.mark.exhaustive] * (case in EXHAUSTIVE))
        for case in itertools.product(
            [AroundTheCall, FrozenStage, FrozenOutside, NestedActivations],
            ["1f1b", "interleaved", "zero_bubble", "zero_bubble_v"],
        )
    ],
)
def test_modules_train_as_on_one_process(module, schedule, tmp_path):
    own = check_parity(tmp_path, module, pipeline(schedule))
    if module is AroundTheCall:
        assert {name for name, gradient in own.module.seen[-1].items() if gradient is None} == {
            "unused.weight",
            "unused.bias",
        }


@pytest.mark.world_size(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_further_arguments_reach_all_stages(schedule, tmp_path):
    check_parity(tmp_path, FurtherArguments, pipeline(schedule, stages=PipelineStages(layers=["*"])))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_v"])
def test_running_statistics_are_those_of_one_process(schedule, tmp_path):
    own = check_parity(tmp_path, BatchNorms, pipeline(schedule))
    outside = {name: buffer for name, buffer in own.module.named_buffers() if not name.startswith("net.")}
    parts = [None, None]
    dist.all_gather_object(parts, outside)
    torch.testing.assert_close(parts[0], parts[1], rtol=0, atol=0)
    assert outside["front.num_batches_tracked"] == 8


@pytest.mark.world_size(2)
def test_the_pipelined_module_may_lie_deep(tmp_path):
    check_parity(tmp_path, Deep, pipeline(pipeline_module="inner.model"))


@pytest.mark.world_size(2)
def test_a_step_may_take_its_batch_apart(tmp_path):
    check_parity(tmp_path, Pops, collate=as_dict)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("axis", ["data_parallel_replicate", "data_parallel_shard"])
def test_replicas_of_pipelines(axis, tmp_path):
    """Each replica has one sample of each microbatch; the buffers are those of rank 0, as under DDP."""
    variant = pipeline("interleaved", mesh={axis: 2})
    case = Case(module=AroundTheCall, num_train=2, act=fit)
    own, lightning = run_ours(case, variant, tmp_path), run_plain(case, tmp_path)
    names = set(own.weights)
    full = {name: whole(tensor) for name, tensor in own.weights.items()}
    torch.testing.assert_close(full, {name: lightning.weights[name] for name in names}, **TOLERANCE)


def fit_and_validate(trainer, module, data):
    trainer.fit(module, **data)


class NormsInStages(BatchNorms):
    """Without statistics outside; what it validates depends on those inside."""

    def errors(self, x):
        return self.head(self.net(x))

    def validation_step(self, batch, batch_idx):
        self.log("val", self.errors(batch[0]).mean(), sync_dist=True)


@pytest.mark.world_size(4)
def test_replicas_validate_with_the_statistics_of_the_first(tmp_path):
    variant = pipeline(microbatches=None, mesh={"data_parallel_replicate": 2})
    own = run_ours(Case(module=NormsInStages, num_train=2, act=fit_and_validate), variant, tmp_path)
    buffers = [None] * 4
    dist.all_gather_object(buffers, {name: buffer for name, buffer in own.module.named_buffers() if "net." in name})
    for first, second in ((0, 1), (2, 3)):
        assert len(buffers[first]) == 6
        torch.testing.assert_close(buffers[second], buffers[first], rtol=0, atol=0)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# Random numbers


class Denoises(Watched):
    """Draws noise in front of the call, which its loss needs again."""

    def __init__(self):
        super().__init__()
        self.noises = []

    def training_step(self, batch, batch_idx):
        x, _ = batch
        noise = torch.randn_like(x)
        self.noises.append(noise)
        return F.mse_loss(self.net(F.dropout(x, 0.5) + noise), noise)


def check_noise(variant, folder, num_replicas):
    module = run_ours(Case(module=Denoises, num_train=2, act=fit), variant, folder).module
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, [noise.numpy().tobytes() for noise in module.noises])
    # The first rank of a pipeline draws once for each microbatch, the last one once more.
    by_rank = [set(noises) for noises in everywhere]
    for replica in range(num_replicas):
        assert by_rank[replica] == by_rank[num_replicas + replica]
        assert len(by_rank[replica]) == 2 * 2
        assert [everywhere[num_replicas + replica].count(noise) for noise in by_rank[replica]] == [2] * 4
    assert len(set().union(*by_rank)) == 2 * 2 * num_replicas


@pytest.mark.world_size(2)
def test_stages_agree_on_noise_that_differs_over_microbatches_and_steps(tmp_path):
    check_noise(pipeline(), tmp_path, 1)


@pytest.mark.world_size(4)
def test_replicas_draw_noise_of_their_own(tmp_path):
    check_noise(pipeline(mesh={"data_parallel_replicate": 2}), tmp_path, 2)


# Batches


class Lengths(Watched):
    """Means over sequences, whose lengths differ between batches."""

    def errors(self, x):
        return self.head(self.net(x)).mean(1)


def of_any_length(samples):
    x = torch.stack([x for x, _ in samples])
    length = 1 + int(x[0, 0] * 100) % 4
    return x[:, None].expand(-1, length, -1).contiguous(), torch.stack([y for _, y in samples])


@pytest.mark.world_size(2)
def test_batches_of_a_window_may_have_different_shapes(tmp_path):
    case = Case(lambda folder: {"accumulate_grad_batches": 3}, Lengths, num_train=6, act=fit, collate=of_any_length)
    own, lightning = run_ours(case, pipeline(microbatches=None), tmp_path), run_plain(case, tmp_path)
    torch.testing.assert_close(own.weights, {name: lightning.weights[name] for name in own.weights}, **TOLERANCE)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("microbatches", [3, 4])
def test_a_short_last_batch_has_fewer_microbatches(microbatches, tmp_path):
    """Batches of 6, 6 and 4 samples in microbatches of 2, or of 2, 2, 1 and 1."""
    case = Case(module=Watched, num_train=4, batch_size=6, act=fit)
    own, lightning = run_ours(case, pipeline(microbatches=microbatches), tmp_path), run_plain(case, tmp_path)
    torch.testing.assert_close(own.weights, {name: lightning.weights[name] for name in own.weights}, **TOLERANCE)


@pytest.mark.world_size(2)
def test_a_short_last_window_is_a_mean_over_its_batches(tmp_path):
    """Five batches in windows of 3: the second mean is over two."""
    case = Case(lambda folder: {"accumulate_grad_batches": 3}, Watched, num_train=5, act=fit)
    own = run_ours(case, pipeline(), tmp_path)
    alone = Case(lambda folder: {}, Windowed, num_train=5, act=fit)
    lightning = run_plain(alone, tmp_path)
    torch.testing.assert_close(own.weights, {name: lightning.weights[name] for name in own.weights}, **TOLERANCE)


class Windowed(Watched):
    """Takes its means by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss / (3 if batch_idx < 3 else 2))
        if batch_idx in (2, 4):
            self.optimizers().step()
            self.optimizers().zero_grad()


# Evaluation


class Evaluates(Watched):
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = self.training_step(batch, batch_idx)
        return {"loss": loss, "prediction": self.last}

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.last = self.errors(x).squeeze(-1)
        loss = F.mse_loss(self.last, y)
        self.log("value", loss, sync_dist=True)
        return loss

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.training_step(batch, batch_idx)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return {"prediction": self.errors(batch[0]), "index": batch_idx}


class Writer(BasePredictionWriter):
    def __init__(self):
        super().__init__("batch_and_epoch")
        self.shown = []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.shown.append((prediction, batch_idx, dataloader_idx))

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.shown.append(predictions)


class ValidationOutputs(L.Callback):
    def __init__(self):
        self.shown = []

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.shown.append(outputs)


def evaluate(trainer, module, data):
    loaders = data["val_dataloaders"]
    results = [trainer.validate(module, loaders, verbose=False), trainer.test(module, loaders, verbose=False)]
    trainer.fit(module, data["train_dataloaders"], loaders)
    predictions = trainer.predict(module, loaders)
    shown = [each.shown for each in trainer.callbacks if isinstance(each, Writer | ValidationOutputs)]
    return [*results, predictions, *shown]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero_bubble_v", "dual_pipe_v"])
def test_evaluation_gives_whole_results_on_all_ranks(schedule, tmp_path):
    def watch(folder):
        return {"callbacks": [Writer(), ValidationOutputs()]}

    case = Case(watch, Evaluates, num_val_loaders=2, act=evaluate)
    own, lightning = run_ours(case, pipeline(schedule), tmp_path), run_plain(case, tmp_path)
    torch.testing.assert_close(own.result, lightning.result, rtol=2e-6, atol=2e-6)


# Hooks


class LogsInHooks(Watched):
    def on_before_backward(self, loss):
        self.log("in_before_backward", loss)

    def on_after_backward(self):
        self.log("in_after_backward", float(self.global_step))


@pytest.mark.world_size(2)
def test_logs_of_hooks_agree_on_all_ranks(tmp_path):
    case = Case(module=LogsInHooks, num_train=2, act=fit)
    own, lightning = run_ours(case, pipeline(), tmp_path), run_plain(case, tmp_path)
    assert [step for step, _ in own.rows] == [step for step, _ in lightning.rows]
    for (_, row), (_, expected) in zip(own.rows, lightning.rows, strict=True):
        # Each microbatch has half of the samples, and so half of the loss.
        halved = {name: value / 2 if name == "in_before_backward" else value for name, value in expected.items()}
        assert row == pytest.approx(halved, **LOGGED)


class GivesMore(Watched):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "double": 2 * loss.detach(), "y": batch[1]}


@pytest.mark.world_size(2)
def test_a_callback_of_functions_sees_outputs(tmp_path):
    seen = []

    def keep(trainer, pl_module, outputs, batch, batch_idx):
        seen.append(outputs)

    def watch(folder):
        return {"callbacks": [L.pytorch.callbacks.LambdaCallback(on_train_batch_end=keep)]}

    case = Case(watch, GivesMore, num_train=2, act=fit)
    run_ours(case, pipeline(), tmp_path)
    own = list(seen)
    seen.clear()
    run_plain(case, tmp_path)
    torch.testing.assert_close(own, seen, **TOLERANCE)


# What is refused


class NoCall(Watched):
    def training_step(self, batch, batch_idx):
        return self.head(batch[0]).sum()


class TwoCalls(Watched):
    def errors(self, x):
        return self.head(self.net(x) + self.net(-x))


class CallWithoutGradients(Watched):
    def errors(self, x):
        with torch.no_grad():
            hidden = self.net(x)
        return self.head(hidden)


class ChangesBatch(Watched):
    def errors(self, x):
        x += 1
        return super().errors(x)


class ReturnsNone(Watched):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)


class ReturnsText(Watched):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        return "loss"


class FailsBefore(Watched):
    def errors(self, x):
        raise LookupError("boom before")


class FailsBehind(Watched):
    def errors(self, x):
        super().errors(x)
        raise LookupError("boom behind")


class FailsInStage(Watched):
    def __init__(self):
        super().__init__()
        self.net[0].register_forward_hook(self.fail)

    def fail(self, *args):
        raise LookupError("boom inside")


class CallsLayer(Watched):
    def errors(self, x):
        for layer in self.net:
            x = layer(x)
        return self.head(x)


class LogsVector(Watched):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("vector", batch[0])
        return loss


class OtherOutputs(Watched):
    """Returns other entries for each microbatch."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, f"of {float(batch[1][0])}": 1.0}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.events.append(outputs)


REFUSED = {
    NoCall: "does not call self.net",
    TwoCalls: "calls self.net a second time",
    CallWithoutGradients: "under no_grad",
    ChangesBatch: "changes a tensor of its batch in place",
    ReturnsNone: "returned NoneType",
    ReturnsText: "returned str",
    FailsBefore: "boom before",
    FailsBehind: "boom behind",
    FailsInStage: "boom inside",
    CallsLayer: "on another pipeline rank",
    LogsVector: "vector",
    OtherOutputs: "different entries for the microbatches",
}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("module", REFUSED)
def test_what_does_not_work_is_said_on_all_ranks(module, tmp_path):
    start_s = time.monotonic()
    with pytest.raises(Exception, match=REFUSED[module]):
        run_ours(Case(module=module, num_train=2, act=fit), pipeline(), tmp_path)
    assert time.monotonic() - start_s < 5


@pytest.mark.world_size(2)
def test_what_fails_in_a_later_step_is_said_on_all_ranks(tmp_path):
    start_s = time.monotonic()
    with pytest.raises(Exception, match="boom in step 1"):
        run_ours(Case(module=FailsLater, num_train=2, act=fit), pipeline(), tmp_path)
    assert time.monotonic() - start_s < 5


class FailsLater(Watched):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if self.global_step == 1:
            raise LookupError("boom in step 1")
        return loss


@pytest.mark.world_size(2)
def test_an_argument_that_needs_a_gradient_is_for_one_stage_per_rank(tmp_path):
    variant = pipeline("interleaved", stages=PipelineStages(layers=["*"]))
    with pytest.raises(RuntimeError, match="one stage per rank"):
        run_ours(Case(module=FurtherArguments, num_train=2, act=fit), variant, tmp_path)


class TakesIterator(Watched):
    def training_step(self, dataloader_iter):
        return super().training_step(next(dataloader_iter)[0], 0)


@pytest.mark.world_size(2)
def test_steps_that_take_the_iterator_are_refused(tmp_path):
    with pytest.raises(NotImplementedError, match="dataloader_iter"):
        run_ours(Case(module=TakesIterator, num_train=2, act=fit), pipeline(), tmp_path)


@pytest.mark.world_size(2)
def test_outputs_of_batches_that_wait_say_so(tmp_path):
    def watch(folder):
        return {"accumulate_grad_batches": 2, "callbacks": [Reads()]}

    with pytest.raises(KeyError, match="run together with its last one"):
        run_ours(Case(watch, num_train=2, act=fit), pipeline(), tmp_path)


class Reads(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        outputs["loss"]
