"""Runs one LightningModule under Lightning's own strategy and under ours, and keeps all that Lightning shows of a run."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.loggers.logger import Logger
from torch import nn
from torch.utils.data import DataLoader

from d9d.core.dist_context import DeviceMeshParameters
from tests.d9d_lightning.support import Block, build_trainer, make_samples, plain_trainer, rank_loader, seeded

WIDTH = 3
BATCH = 4
NUM_TRAIN, NUM_VAL = 4, 2
# fp64: sums in another order.
WEIGHT_TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}

_SHARED_HOOKS = [
    "on_fit_start",
    "on_fit_end",
    "on_train_start",
    "on_train_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_test_start",
    "on_test_end",
    "on_test_batch_start",
    "on_test_batch_end",
    "on_predict_start",
    "on_predict_end",
    "on_predict_batch_start",
    "on_predict_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_save_checkpoint",
    "on_load_checkpoint",
]
MODULE_HOOKS = [
    *_SHARED_HOOKS,
    "on_validation_model_zero_grad",
    "on_validation_model_eval",
    "on_validation_model_train",
    "backward",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "configure_gradient_clipping",
    "training_step",
    "validation_step",
    "test_step",
    "predict_step",
]
CALLBACK_HOOKS = [*_SHARED_HOOKS, "on_sanity_check_start", "on_sanity_check_end", "on_exception"]
_LOGGED_AT = {"on_train_batch_end", "on_validation_end", "on_train_epoch_end", "on_test_end"}


class MemoryLogger(Logger):
    """Keeps what a rank would log, whichever it is."""

    def __init__(self):
        super().__init__()
        self.rows = []

    @property
    def name(self):
        return "memory"

    @property
    def version(self):
        return 0

    def log_metrics(self, metrics, step=None):
        self.rows.append((step, {name: float(value) for name, value in metrics.items()}))

    def log_hyperparams(self, *args, **kwargs):
        pass


class CallbackRecorder(L.Callback):
    """Keeps each call of a hook of callbacks."""

    def __init__(self, events, values):
        self.events = events
        self.values = values


def _record_callback(name):
    @functools.wraps(getattr(L.Callback, name))
    def hook(self, trainer, pl_module, *args, **kwargs):
        self.events.append(("callback", name, _batch_idx(name, args), trainer.global_step, trainer.current_epoch))
        if name in _LOGGED_AT:
            self.values.append((name, {key: float(value) for key, value in trainer.callback_metrics.items()}))

    return hook


for _name in CALLBACK_HOOKS:
    setattr(CallbackRecorder, _name, _record_callback(_name))


def _batch_idx(name, args):
    if "batch_start" in name:
        return args[1]
    return args[2] if "batch_end" in name else None


def recorded(module_class):
    """A subclass that keeps each call of its hooks in `events`."""

    def record(name, inherited):
        @functools.wraps(inherited)
        def hook(self, *args, **kwargs):
            named = inspect.signature(inherited).bind(self, *args, **kwargs).arguments
            index = named.get("batch_idx")
            self.events.append(("module", name, index, self.trainer.global_step, self.trainer.current_epoch))
            return inherited(self, *args, **kwargs)

        return hook

    hooks = {name: record(name, getattr(module_class, name)) for name in MODULE_HOOKS if hasattr(module_class, name)}
    return type(module_class.__name__, (module_class,), hooks)


class Probe(L.LightningModule):
    """A regression that logs in the common ways, with a metric and a head outside of what is pipelined."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(Block(WIDTH), Block(WIDTH))
        self.head = nn.Linear(WIDTH, 1)
        self.error = torchmetrics.MeanSquaredError()
        self.val_error = torchmetrics.MeanAbsoluteError()
        self.events = []

    def errors(self, batch):
        x, y = batch
        return self.head(self.net(x)).squeeze(-1), y

    def training_step(self, batch, batch_idx):
        prediction, y = self.errors(batch)
        loss = F.mse_loss(prediction, y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.error(prediction.detach(), y)
        self.log("error", self.error, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        prediction, y = self.errors(batch)
        self.log("val_loss", F.mse_loss(prediction, y), sync_dist=True)
        self.val_error.update(prediction, y)
        self.log("val_error", self.val_error)

    def test_step(self, batch, batch_idx):
        prediction, y = self.errors(batch)
        self.log("test_loss", F.mse_loss(prediction, y), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self.errors(batch)[0]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)


@dataclasses.dataclass
class Run:
    """What a run has shown."""

    trainer: L.Trainer
    module: L.LightningModule
    events: list
    values: list
    rows: list
    result: Any

    @property
    def weights(self):
        return {name: tensor.detach().clone() for name, tensor in self.module.state_dict().items()}


@dataclasses.dataclass
class Variant:
    """A way to run our strategy."""

    mesh: dict
    microbatches: int | None = None
    options: dict = dataclasses.field(default_factory=dict)

    @property
    def has_pipeline(self):
        return "pipeline_parallel" in self.mesh


WORLD_1 = {"native": Variant({}), "split": Variant({}, microbatches=2)}
WORLD_2 = {
    "replicate": Variant({"data_parallel_replicate": 2}),
    "pipeline": Variant({"pipeline_parallel": 2}, microbatches=2, options={"pipeline_module": "net"}),
}


@dataclasses.dataclass
class Case:
    """A use of the Trainer."""

    options: Callable[[Any], dict] = lambda folder: {}
    module: Callable[[], L.LightningModule] = Probe
    num_train: int = NUM_TRAIN
    num_val: int = NUM_VAL
    num_val_loaders: int = 1
    is_sized: bool = True
    batch_size: int = BATCH
    collate: Callable[[list], Any] | None = None
    act: Callable[..., Any] = lambda trainer, module, data: trainer.fit(module, **data)
    has_windows: bool = False
    gives_window_up: bool = False
    # Lightning divides the losses of a short window by the number that a full one has.
    has_equal_values: bool = True


class Unsized(torch.utils.data.IterableDataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return (self.dataset[index] for index in range(len(self.dataset)))


def loaders(case, rank=0, world_size=1):
    def loader(num_batches, seed):
        tensors = make_samples(num_batches * BATCH, WIDTH, seed=seed)
        sized = rank_loader(tensors, case.batch_size, rank, world_size)
        dataset = sized.dataset if case.is_sized else Unsized(sized.dataset)
        return DataLoader(dataset, batch_size=sized.batch_size, collate_fn=case.collate)

    val = [loader(case.num_val, seed + 10) for seed in range(case.num_val_loaders)]
    return {"train_dataloaders": loader(case.num_train, 1), "val_dataloaders": val if len(val) > 1 else val[0]}


def _run(case, make_trainer, folder, data, prepare=lambda module: None):
    module = seeded(recorded(case.module))
    prepare(module)
    options = case.options(folder)
    events, values, logger = module.events, [], MemoryLogger()
    callbacks = [CallbackRecorder(events, values), *options.pop("callbacks", [])]
    if options.get("barebones"):
        options["enable_checkpointing"] = False
        trainer = make_trainer(callbacks=None, **options)
    else:
        trainer = make_trainer(callbacks=callbacks, **{"logger": logger, "log_every_n_steps": 1, **options})
    result = case.act(trainer, module, data)
    return Run(trainer=trainer, module=module, events=events, values=values, rows=logger.rows, result=result)


def run_plain(case, folder):
    """Run under Lightning's own strategy, on each rank for itself."""

    def alone(module):
        # torchmetrics would look for other processes by itself, and find those of the test.
        for child in module.modules():
            if isinstance(child, torchmetrics.Metric):
                child.distributed_available_fn = lambda: False

    torch.manual_seed(0)
    return _run(case, plain_trainer, folder, loaders(case), alone)


def run_ours(case, variant, folder):
    """Run under our strategy on the ranks of the pool."""

    def make_trainer(**options):
        strategy_options = {**variant.options, "microbatches": variant.microbatches}
        return build_trainer(variant.mesh, strategy_options=strategy_options, **options)

    mesh = DeviceMeshParameters(**variant.mesh)
    # Ranks of one pipeline have the same samples, and the pipeline is the outermost dimension of the mesh.
    world_size = mesh.data_parallel
    rank = dist.get_rank() % world_size if world_size > 1 else 0
    torch.manual_seed(0)
    return _run(case, make_trainer, folder, loaders(case, rank, world_size))


# What our hooks must be, by what Lightning's are

_RUNS_PER_MICROBATCH = {"training_step", "on_before_backward", "backward", "on_after_backward"}
_ZERO = {"on_before_zero_grad", "optimizer_zero_grad"}
_STEPS = {"training_step", "validation_step", "test_step", "predict_step", "backward", "on_before_backward"}


def split_events(events, num_microbatches):
    """Each batch runs its step and its backward pass once for each microbatch; zeroing comes between the first two."""
    expected, block = [], []
    for event in [*events, ("end", None, None, None, None)]:
        if event[1] == "training_step" or (block and event[1] in _RUNS_PER_MICROBATCH | _ZERO):
            block.append(event)
            continue
        expected += block
        expected += [each for each in block if each[1] not in _ZERO] * (num_microbatches - 1)
        block = []
        expected.append(event)
    return expected[:-1]


def pipeline_events(events):
    """Batches of a window run with the last one of it, and the gradients are there once for all.

    Steps are left out, as ranks run different parts of them, and so is what only ranks with a loss call.
    """
    expected, zeroing = [], []
    for event in without_steps(events):
        owner, name = event[:2]
        if name in _ZERO and not takes_step(expected):
            # A window that was given up has been zeroed for nothing.
            zeroing = [event] if (owner, name) == ("callback", "on_before_zero_grad") else [*zeroing, event]
            continue
        if name == "on_after_backward" and not takes_step(expected):
            continue
        expected.append(event)
        if name == "optimizer_step":
            expected += zeroing
            zeroing = []
    return expected


def without_steps(events):
    left_out = {("callback", "on_before_backward"), *(("module", name) for name in _STEPS)}
    return [event for event in events if event[:2] not in left_out]


def takes_step(events):
    """Whether the batch that runs now takes an optimizer step."""
    for event in reversed(events):
        if event[1] in {"optimizer_step", "on_train_batch_start"}:
            return event[1] == "optimizer_step"
    return False
