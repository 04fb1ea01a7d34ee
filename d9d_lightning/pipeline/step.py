"""Run the steps of an unchanged LightningModule over the stages of a pipeline."""
# torch has no public way to exchange a buffer
# pyright: reportPrivateUsage=false

import contextlib
import dataclasses
import zlib
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Self

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.hooks import RemovableHandle
from torchmetrics import Metric

from d9d.core.fsdp_internals import fsdp_units
from d9d.core.pytree import tree_leaves, tree_map_only
from d9d.core.side_loss import LOSS_SCALE, announce_loss
from d9d.core.types import PyTree
from d9d.internals.broadcast import broadcast_packed
from d9d.internals.determinism import seeded
from d9d.internals.fsdp_accumulation import FsdpAccumulation
from d9d_lightning.checkpoints.added_groups import AddedGroups
from d9d_lightning.collectives import decide_together
from d9d_lightning.gradients.loss_weights import LossWeights, merge_training_outputs
from d9d_lightning.logs.exchange import LogExchange
from d9d_lightning.logs.replay import LogEntry, LogRecorder, replay
from d9d_lightning.metrics.step_calls import KeptStates
from d9d_lightning.pipeline.call import CapturedCall, own_containers, unchanged_batch
from d9d_lightning.pipeline.cut import Pipeline
from d9d_lightning.pipeline.gradients import PipelineGradients
from d9d_lightning.pipeline.output_exchange import OutputExchange
from d9d_lightning.steps.microbatches import merge_outputs, split_batch

__all__ = ["PipelineSteps", "StepArguments"]


# `Any` in this module: the user's own batches, arguments and results.
@dataclasses.dataclass(frozen=True, slots=True)
class StepArguments:
    """What a step of the user's is called with."""

    batch: PyTree[Any]
    others: tuple[Any, ...]
    """Index of the batch and of its loader, if the step takes them."""

    @classmethod
    def of(cls, kwargs: "OrderedDict[str, Any]") -> Self:
        """Take the arguments that Lightning has put together.

        Raises:
            NotImplementedError: For a step that takes the iterator of the loader.
        """
        if "batch" not in kwargs:
            raise NotImplementedError(
                "training_step(dataloader_iter) does not work with pipeline_parallel > 1: all ranks of a pipeline must see "
                "the batch. Let the step take a batch."
            )
        return cls(kwargs["batch"], tuple(value for name, value in kwargs.items() if name != "batch"))


class PipelineSteps:
    """Runs ``training_step`` and the like over all stages. All ranks of a pipeline call it, with equal batches."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        pipeline: Pipeline,
        *,
        num_microbatches: int,
        loss_weights: LossWeights,
        seed: int,
        end_step: Callable[[], None],
    ) -> None:
        """Prepare for the steps of a run of the Trainer. All ranks of the pipeline must call it.

        Args:
            trainer: Runs the loops.
            module: The LightningModule, cut into stages.
            pipeline: Its stages on this rank.
            num_microbatches: Parts that each batch is cut into.
            loss_weights: Of this rank.
            seed: For the random numbers that steps draw; the same on all ranks of a pipeline.
            end_step: Called when logs are replayed, ahead of what ranks exchange about gradients.
        """
        self._trainer = trainer
        self._module = module
        self._pipeline = pipeline
        self._num_microbatches = num_microbatches
        self._loss_weights = loss_weights
        self._seed = seed
        self._end_step = end_step
        self._num_evaluations = 0
        self._recorder = LogRecorder(module)
        self._logs = LogExchange(module, pipeline.group, pipeline.last_rank, pipeline.device)
        self._outputs = OutputExchange(trainer, module, pipeline.group, pipeline.last_rank, pipeline.device)
        self._outside_buffers = _OutsideBuffers(module, pipeline)
        self._added_groups = AddedGroups(module, pipeline.cut)
        # Replicas may have different numbers of microbatches, and each gathering is a collective.
        for stage in pipeline.stages:
            FsdpAccumulation([stage]).start_pack(2)
        self._gradients: PipelineGradients | None = None
        self._are_side_losses_unknown = True
        self._num_attached_before = 0
        self._scale = torch.ones(())
        self._handles: list[RemovableHandle] = []
        if pipeline.has_first_stage:
            self._handles.append(pipeline.stages[0].register_forward_hook(_forget_input))
        pipeline.context.use(trainer.precision_plugin.forward_context)
        pipeline.domains.activate()

    def start_training(self, gradients: PipelineGradients, num_replicas: int) -> None:
        """Take over the gradients.

        Args:
            gradients: Of this rank.
            num_replicas: Number of data-parallel ranks, over whose losses the mean is taken.
        """
        self._gradients = gradients
        self._scale = torch.tensor(1.0 / num_replicas, dtype=gradients.dtype, device=self._pipeline.device)
        self._pipeline.training.set_backward_observer(gradients)

    def train(self, window: Sequence[StepArguments]) -> PyTree[Any]:
        """Run the batches of an accumulation window as one pack, and sum the gradients of the mean of their losses.

        Returns:
            What ``training_step`` has returned for the last batch, where a hook looks at it, without the graph; the loss
            is the mean over the window, on every rank.

        Raises:
            RuntimeError: Before `start_training`.
        """
        gradients = self._gradients
        if gradients is None:
            raise RuntimeError("the gradients of the stages are not set up: start_training() comes first")
        module, precision = self._module, self._trainer.precision_plugin
        progress = (self._trainer.current_epoch, self._trainer.global_step)
        self._num_attached_before = LOSS_SCALE.num_attached
        self._added_groups.agree(self._trainer.optimizers, self._trainer.current_epoch)
        by_batch = [
            self._runs("training_step", arguments, *progress, position) for position, arguments in enumerate(window)
        ]
        runs = [run for of_batch in by_batch for run in of_batch]
        losses: dict[int, torch.Tensor] = {}
        extras: dict[int, dict[str, Any]] = {}
        last = range(len(runs) - len(by_batch[-1]), len(runs))
        wanted = last if self._outputs.wants("training_step") else range(0)

        def run_loss(output: PyTree[Any], index: int) -> torch.Tensor:
            result = runs[index].finish(output)
            share = runs[index].weight / len(window)
            loss = _loss_of(result)
            loss = self._loss_weights.weigh(announce_loss(loss) if LOSS_SCALE.is_awaited else loss, result, share)
            losses[index] = loss.detach()
            if index in wanted:
                extras[index] = _without_loss(result)
            # What on_before_backward logs goes to the other ranks as well, which do not run it.
            with self._recorder.recording(runs[index].batch):
                return precision.pre_backward(loss, module)

        scale = 1.0
        if isinstance(precision, MixedPrecision) and precision.scaler is not None:
            # It makes its scale when it is first used, but most ranks see no loss.
            precision.scaler.scale(torch.zeros((), device=self._pipeline.device))
            scale = precision.scaler.get_scale()
        gradients.start_pack([scale * run.weight / len(window) for run in runs])
        with self._own_random_numbers("training_step", *progress):
            self._pipeline.training.step(tuple(runs), tuple(runs), run_loss)
        loss = self._finish_gradients(gradients, [losses[index] for index in sorted(losses)])
        self._outside_buffers.share()
        extra = self._outputs.share(
            "training_step", lambda: _merge_training([extras[index] for index in last], by_batch[-1])
        )
        precision.post_backward(loss, module)
        return {**(extra or {}), "loss": loss}

    def _finish_gradients(self, gradients: PipelineGradients, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """Make the gradients those of the mean loss over all replicas; log on all ranks, and return this replica's loss."""
        own_weight = self._loss_weights.take_own_total()
        values = [torch.stack(list(losses)).sum(), *([] if own_weight is None else [own_weight])] if losses else None
        loss, *weights = self._replay(values)
        own_weight = weights[0] if weights else None
        LOSS_SCALE.set(None)
        if own_weight is not None and self._are_side_losses_unknown:
            self._are_side_losses_unknown = False
            self._refuse_side_losses()
        inverse = self._loss_weights.inverse_total(own_weight)
        gradients.finish(self._scale if inverse is None else inverse.to(self._scale.dtype))
        return loss if own_weight is None else torch.where(own_weight == 0, 0.0, loss / own_weight)

    def _refuse_side_losses(self) -> None:
        """Refuse losses of layers beside a weight, on all ranks: not every stage has such layers."""
        has_attached = LOSS_SCALE.num_attached > self._num_attached_before
        if decide_together(has_attached, self._pipeline.device, of_all=False):
            raise RuntimeError(
                "training_step returned a loss_weight, and layers of this pipeline add losses of their own, such as those "
                "of routers: only the last stage sees the weight. Return the loss alone."
            )

    def evaluate(self, name: str, arguments: StepArguments) -> PyTree[Any]:
        """Run a batch of validation, test or prediction.

        Args:
            name: ``validation_step``, ``test_step`` or ``predict_step``.
            arguments: What it is called with.

        Returns:
            What it has returned, put together over the microbatches, on every rank; None where nobody looks at it.
        """
        self._num_evaluations += 1
        runs = self._runs(name, arguments, self._num_evaluations)
        results: dict[int, PyTree[Any]] = {}

        def finish(output: PyTree[Any], index: int) -> None:
            results[index] = runs[index].finish(output)

        with self._own_random_numbers(name, self._num_evaluations):
            self._pipeline.forward_only.step(tuple(runs), tuple(runs), finish)
        if name == "predict_step":
            self._recorder.forget()  # nothing is logged there
        else:
            self._replay([] if self._pipeline.has_last_stage else None)
        return self._outputs.share(name, lambda: _merge([results[index] for index in range(len(runs))], runs))

    def _replay(self, values: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
        """Log on all ranks what the last stage has logged, and return its values."""
        entries, values = self._logs.share(self._take if self._pipeline.has_last_stage else None, values)
        replay(self._module, entries)
        self._end_step()
        return values

    def _take(self) -> list[LogEntry]:
        with self._pipeline.domains.inside_step():
            return self._recorder.take()

    def end_evaluation(self) -> None:
        """Share what steps have left in buffers outside the stages, and free what is gathered. All ranks must call it."""
        self._outside_buffers.share()
        self.free_gathered()

    def free_gathered(self) -> None:
        """Let ``parameters()`` show the shards, after an optimizer step or an evaluation."""
        for stage in self._pipeline.stages:
            for unit in fsdp_units(stage):
                unit.reshard()

    def release(self) -> None:
        """Free what the run has needed; the stages stay."""
        for handle in self._handles:
            handle.remove()
        # The plugin knows the strategy, and so the module, which must not be kept by its own stages.
        self._pipeline.context.use(contextlib.nullcontext)
        if self._gradients is not None:
            self._pipeline.training.set_backward_observer(None)
            self._gradients.release()
            self._gradients = None

    def _runs(self, name: str, arguments: StepArguments, *progress: int) -> "list[_Run]":
        parts, weights = split_batch(arguments.batch, self._num_microbatches, self._module)
        keys = [repr((self._seed, name, *progress, index)).encode() for index in range(len(parts))]
        return [
            _Run(self, name, part, arguments.others, weight=weight, seed=zlib.crc32(key))
            for part, weight, key in zip(parts, weights, keys, strict=True)
        ]

    def _own_random_numbers(self, name: str, *progress: int) -> AbstractContextManager[None]:
        """Let stages draw numbers of their own, and the generators of the ranks of a pipeline stay equal.

        Samplers and transforms in this process draw from these generators, on each rank for itself.
        """
        key = (self._seed, name, *progress, "stages", self._pipeline.group.rank())
        return seeded(zlib.crc32(repr(key).encode()), self._pipeline.device)

    # For the microbatches

    def capture(self, name: str, run: "_Run") -> CapturedCall:
        """Run the step of a microbatch up to the call of the pipelined submodule. See [Note: one call]."""
        pipeline = self._pipeline
        is_training = name == "training_step"
        with (
            unchanged_batch(name, run.batch) as batch,
            self._recorder.dropping(),
            self._outside_buffers.kept(),
            KeptStates(),
            self._around_step(run),
        ):
            call = pipeline.call.capture(name, run.step(self._method(name), batch), needs_grad=is_training)
        if is_training and len(pipeline.stages) > 1:
            _refuse_shared_graph(name, pipeline.stages[0].further_arguments(call))
        if not pipeline.has_first_stage:
            call.forget_values()
        return call

    def finish(self, name: str, run: "_Run", output: PyTree[Any]) -> PyTree[Any]:
        """Run the whole step of a microbatch behind the last stage."""
        batch = own_containers(run.batch)
        with self._recorder.recording(run.batch), self._pipeline.domains.inside_step(), self._around_step(run):
            return self._pipeline.call.inject(name, run.step(self._method(name), batch), output)

    @contextlib.contextmanager
    def _around_step(self, run: "_Run") -> Generator[None]:
        with seeded(run.seed, self._pipeline.device), self._trainer.precision_plugin.forward_context():
            yield

    def _method(self, name: str) -> Callable[..., PyTree[Any]]:
        match name:
            case "training_step":
                return self._module.training_step
            case "validation_step":
                return self._module.validation_step
            case "test_step":
                return self._module.test_step
            case _:
                return self._module.predict_step


class _Run:
    """One microbatch on its way: the pipeline's input, and what its stages share."""

    def __init__(
        self,
        steps: PipelineSteps,
        name: str,
        batch: PyTree[Any],
        others: tuple[Any, ...],
        *,
        weight: float,
        seed: int,
    ) -> None:
        self._steps = steps
        self._name = name
        self._others = others
        self._call: CapturedCall | None = None
        self.batch = batch
        self.weight = weight
        self.seed = seed

    @property
    def call(self) -> CapturedCall:
        """What the pipelined submodule is called with. Found when first asked for, so that memory follows the program."""
        if self._call is None:
            self._call = self._steps.capture(self._name, self)
        return self._call

    @property
    def args(self) -> tuple[Any, ...]:
        """Positional arguments of the call."""
        return self.call.args

    @property
    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments of the call."""
        return self.call.kwargs

    def step(self, method: Callable[..., PyTree[Any]], batch: PyTree[Any]) -> Callable[[], PyTree[Any]]:
        """Return the user's step on this microbatch."""
        return partial(method, batch, *self._others)

    def finish(self, output: PyTree[Any]) -> PyTree[Any]:
        """Run the step of the user with the output of the last stage."""
        return self._steps.finish(self._name, self, output)


class _OutsideBuffers:
    """Buffers outside the stages, such as statistics of a batch norm in front of them.

    The code around the pipelined call runs several times, in parts (see [Note: one call]), but buffers may change once.
    They do in the whole run on the last stage; what the others have changed is put back, and they get its values.
    """

    def __init__(self, module: nn.Module, pipeline: Pipeline) -> None:
        inside = {id(buffer) for stage in pipeline.stages for buffer in stage.buffers()}
        self._places = [
            (owner, name)
            for owner in module.modules()
            if not isinstance(owner, Metric)
            for name, buffer in owner.named_buffers(recurse=False)
            if buffer.numel() and id(buffer) not in inside
        ]
        self._pipeline = pipeline

    @contextlib.contextmanager
    def kept(self) -> Generator[None]:
        """Let a run of the step that does not count change copies of the buffers.

        They are not copied back: what is written to a tensor that a graph has saved spoils its backward pass.
        """
        originals = [(owner._buffers, name, owner._buffers[name]) for owner, name in self._places]
        copies = {id(buffer): buffer.clone() for _, _, buffer in originals if buffer is not None}
        for slots, name, buffer in originals:
            slots[name] = copies.get(id(buffer))
        try:
            yield
        finally:
            for slots, name, buffer in originals:
                slots[name] = buffer

    def share(self) -> None:
        """Give all ranks of the pipeline the values of the last stage. All of them must call it."""
        if self._places:
            broadcast_packed(self._tensors(), self._pipeline.group, self._pipeline.last_rank)

    def _tensors(self) -> list[torch.Tensor]:
        return [owner.get_buffer(name) for owner, name in self._places]


def _forget_input(stage: nn.Module, args: tuple[Any, ...], output: object) -> None:
    """Let go of what has entered the first stage: its graph keeps what it needs, and for no longer."""
    args[0].call.forget_values()


def _refuse_shared_graph(name: str, further_arguments: Sequence[Any]) -> None:
    shared = tree_leaves(list(further_arguments))
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in shared):
        raise NotImplementedError(
            f"{name} gives the pipelined call a further argument that needs a gradient, and the schedule has several "
            f"stages on a rank, each of which would run its backward pass. Use a schedule with one stage per rank, or "
            f"detach the argument."
        )


def _loss_of(result: PyTree[Any]) -> torch.Tensor:
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, torch.Tensor):
        raise RuntimeError(
            f"training_step must return a loss, or a dict with the key 'loss', and returned {type(result).__name__}. With "
            f"pipeline_parallel > 1 it can not skip a batch by returning None: return a loss of zero weight, such as "
            f"0.0 * output.sum()."
        )
    return loss


def _without_loss(result: PyTree[Any]) -> dict[str, Any]:
    """Return what a step has returned beside the loss, without graphs."""
    entries = {key: value for key, value in result.items() if key != "loss"} if isinstance(result, Mapping) else {}
    return tree_map_only(torch.Tensor, torch.Tensor.detach, entries)


def _merge_training(results: Sequence[PyTree[Any]], runs: Sequence[_Run]) -> PyTree[Any]:
    return merge_training_outputs(results, [run.weight for run in runs])


def _merge(results: Sequence[PyTree[Any]], runs: Sequence[_Run]) -> PyTree[Any]:
    return merge_outputs(results, [run.weight for run in runs])
