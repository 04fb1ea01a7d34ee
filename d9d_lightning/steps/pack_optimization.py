"""Lightning's optimization loop, where an optimizer step is a pack of microbatches.

[Note: three feeders]
``native``: one microbatch per batch, no pipeline. Lightning's own loop runs forward and backward pass of each batch, and
only the last batch of an accumulation window sums gradients.
``split``: a batch is cut into microbatches, which run in turn; the last one of the window sums gradients. Hooks and
counters see batches.
``gather``: with a pipeline, the batches of an accumulation window wait until the last one is there, and run as one pack
(each cut into microbatches, where this is asked for). Hooks that come before and behind a batch run as ever, but the
outputs of a batch that waits are not known yet.
"""
# Lightning's loops are its own, and the only ones its trainer knows
# pyright: reportPrivateUsage=false

import contextlib
import math
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult, _AutomaticOptimization
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from d9d.core.types import PyTree
from d9d_lightning.gradients.loss_weights import LossWeights, merge_training_outputs, scaled
from d9d_lightning.logs.replay import LogRecorder, replay
from d9d_lightning.pipeline.step import PipelineSteps, StepArguments
from d9d_lightning.steps.empty_hooks import calls_torch_only
from d9d_lightning.steps.microbatches import split_batch

__all__ = ["PackOptimization", "WaitingOutputs", "check_pipeline_optimizers", "check_steps", "window_size"]

_Zero = Callable[[], None]

_NOTHING = contextlib.nullcontext()

_SKIPPED = "`training_step` returned `None`. If this was on purpose, ignore this warning..."  # Lightning's own words

_SKIPPED_ON_A_RANK = (
    "training_step returned None: on several ranks it can not skip a batch, as the others would wait for its gradients. "
    "Return a loss of zero weight, such as 0.0 * loss."
)

_BACKWARD_HOOKS = frozenset(("backward", "on_before_backward", "on_after_backward"))

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class WaitingOutputs(dict[str, Any]):  # the user's own outputs
    """Stands for the outputs of a batch that runs later, together with the last one of its accumulation window."""

    def __missing__(self, key: str) -> None:
        raise KeyError(
            f"{key!r}: with pipeline_parallel > 1 the batches of an accumulation window run together with its last one, "
            f"so their outputs are not known before. Look at the outputs of the last batch (trainer.fit_loop."
            f"_should_accumulate() is False there), or use D9DStrategy(microbatches=...) in place of "
            f"accumulate_grad_batches."
        )


def window_size(trainer: Trainer) -> int:
    """Return how many batches are in the accumulation window of the current batch.

    The last window of an epoch may be short. Where the number of batches is not known, it is taken for a full one until
    its end shows.
    """
    num_batches = trainer.accumulate_grad_batches
    progress = trainer.fit_loop.epoch_loop.batch_progress
    num_before = (progress.current.ready - 1) // num_batches * num_batches
    return int(max(1, min(num_batches, trainer.num_training_batches - num_before)))


def check_steps(module: LightningModule, num_microbatches: int, *, has_pipeline: bool, is_fitting: bool) -> None:
    """Refuse modules whose steps can not run as packs. No communication: all ranks have the same module.

    Args:
        module: The LightningModule.
        num_microbatches: Parts that a batch is cut into.
        has_pipeline: Whether the module is cut into stages.
        is_fitting: Whether it is going to be trained.

    Raises:
        NotImplementedError: With what it does, why this can not work, and what to change.
    """
    if is_fitting and not module.automatic_optimization:
        _check_manual(type(module).__name__, num_microbatches, has_pipeline=has_pipeline)
    steps = (module.training_step, module.validation_step, module.test_step, module.predict_step)
    for name, step in zip(_STEPS, steps, strict=True):
        if has_pipeline and is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
            raise NotImplementedError(
                f"{name}(dataloader_iter) does not work with pipeline_parallel > 1: all ranks of a pipeline must see the "
                f"batch. Let the step take a batch."
            )


def _check_manual(name: str, num_microbatches: int, *, has_pipeline: bool) -> None:
    if has_pipeline:
        raise NotImplementedError(
            f"{name} optimizes manually, which does not work with pipeline_parallel > 1: the strategy runs the forward and "
            f"backward passes of all microbatches together, and training_step can not step in between them. Leave "
            f"self.automatic_optimization True, or set pipeline_parallel to 1."
        )
    if num_microbatches > 1:
        rank_zero_warn(
            f"{name} optimizes manually, so training_step gets whole batches: microbatches={num_microbatches} does nothing. "
            f"Cut the batch in the step to save memory."
        )


def check_pipeline_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that look at all parameters at once. No communication: all ranks have the same.

    Raises:
        NotImplementedError: If there is one.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise NotImplementedError(
                f"{type(optimizer).__name__} looks at all parameters at once, and with pipeline_parallel > 1 each rank has "
                f"those of its stages only: ranks would go different ways. Use an optimizer that updates each parameter by "
                f"itself, such as AdamW."
            )


class _PackClosure(Closure):
    """Runs a whole pack in place of one step, one zeroing and one backward pass."""

    def __init__(self, run: Callable[[], ClosureResult]) -> None:
        super().__init__(step_fn=run)

    @override
    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        return self._step_fn()


class _Starts:
    """What the backward passes of a batch start with: mostly the same for all, and made once."""

    def __init__(self) -> None:
        self._factor = 0.0
        self._gradient: torch.Tensor | None = None

    def gradient(self, loss: torch.Tensor, factor: float) -> torch.Tensor:
        """Return the gradient for a loss that counts for a factor."""
        known = self._gradient
        # A hook of the user's may have changed it in place.
        if known is None or factor != self._factor or known._version or known.shape != loss.shape:
            self._factor = factor
            known = self._gradient = torch.full_like(loss, factor)
        return known


class PackOptimization(_AutomaticOptimization):
    """Takes the place of Lightning's automatic optimization. See [Note: three feeders]."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        *,
        num_microbatches: int,
        pipeline: PipelineSteps | None,
        loss_weights: LossWeights,
        num_replicas: int,
        block_sums: Callable[[], contextlib.AbstractContextManager[None]],
        correct_gradients: Callable[[float | torch.Tensor], contextlib.AbstractContextManager[None]],
        apply_correction: Callable[[], None],
        around_backward: Callable[[torch.Tensor], contextlib.AbstractContextManager[None]],
        own_backward: object,
        note_loss: Callable[[torch.Tensor], None],
        end_step: Callable[[], None],
    ) -> None:
        """Go on with the counters of the loop that is there.

        Args:
            trainer: Runs the loop.
            module: The LightningModule.
            num_microbatches: Parts that a batch is cut into.
            pipeline: Runs packs over the stages of this rank; None without a pipeline.
            loss_weights: Of this rank.
            num_replicas: Number of data-parallel ranks, over whose losses the mean is taken.
            block_sums: Lets backward passes inside only accumulate.
            correct_gradients: Lets backward passes inside multiply the gradients by a factor when they have summed them.
            apply_correction: Multiplies them within, where no backward pass does it.
            around_backward: Lets the backward pass inside, of a loss, leave the gradients as hooks expect them.
            own_backward: `D9DStrategy.backward`, unless a class has its own.
            note_loss: Is told the loss of each step of a pipeline.
            end_step: Called with several microbatches, when the step of a batch has logged, without a pipeline.
        """
        super().__init__(trainer)
        replaced = trainer.fit_loop.epoch_loop.automatic_optimization
        self.optim_progress = replaced.optim_progress
        self._skip_backward = replaced._skip_backward
        self._module = module
        self._num_microbatches = num_microbatches
        self._pipeline = pipeline
        self._loss_weights = loss_weights
        self._num_replicas = num_replicas
        self._block_sums = block_sums
        self._correct_gradients = correct_gradients
        self._apply_correction = apply_correction
        self._around_backward = around_backward
        self._own_backward = own_backward
        self._note_loss = note_loss
        self._end_step = end_step
        self._recorder = LogRecorder(module)
        self._waiting: list[StepArguments] = []
        self._has_warned = False

    @override
    def run(self, optimizer: Optimizer, batch_idx: int, kwargs: "OrderedDict[str, Any]") -> dict[str, Any]:
        self._warn_of_short_epochs()
        position = batch_idx % self.trainer.accumulate_grad_batches
        if position == 0:
            # An epoch may have ended within a window, when a hook asked for it.
            self._waiting.clear()
            self._loss_weights.clear()
        if self._pipeline is None:
            return super().run(optimizer, batch_idx, kwargs)
        self._waiting.append(StepArguments.of(kwargs))
        if self.trainer.fit_loop._should_accumulate():
            return WaitingOutputs()
        window, self._waiting = self._waiting, []
        zero = self._make_zero_grad_fn(batch_idx - position, optimizer)
        closure = _PackClosure(partial(self._run_pipeline, self._pipeline, window, zero or _do_nothing))
        self._optimizer_step(batch_idx, closure)
        return closure.consume_result().asdict()

    @override
    def _make_closure(self, kwargs: "OrderedDict[str, Any]", optimizer: Optimizer, batch_idx: int) -> Closure:
        if self._num_microbatches == 1 or self._skip_backward or "batch" not in kwargs:
            return super()._make_closure(kwargs, optimizer, batch_idx)
        zero = self._make_zero_grad_fn(batch_idx, optimizer)
        return _PackClosure(partial(self._run_split, kwargs, optimizer, zero or _do_nothing))

    def _run_pipeline(self, pipeline: PipelineSteps, window: list[StepArguments], zero: _Zero) -> ClosureResult:
        zero()
        with _in_hook(self._module, "training_step"):
            output = pipeline.train(window)
        self._note_loss(output["loss"])
        return ClosureResult.from_training_step_output(output)

    def _run_split(self, kwargs: "OrderedDict[str, Any]", optimizer: Optimizer, zero: _Zero) -> ClosureResult:
        parts, weights = split_batch(kwargs["batch"], self._num_microbatches, self._module)
        others = tuple(value for name, value in kwargs.items() if name != "batch")
        num_batches = window_size(self.trainer)
        outputs: list[PyTree[Any]] = []
        starts = _Starts() if calls_torch_only(self.trainer.strategy, self._own_backward) else None
        # Once for all microbatches: setting an attribute of a module takes as long as a small layer.
        with _in_hook(self._module, "training_step"):
            for part, weight in zip(parts, weights, strict=True):
                with self._recorder.recording(part), self._profiled("training_step"):
                    output = self.trainer.strategy.training_step(part, *others)
                if output is None or (outputs and outputs[0] is None):
                    self._refuse_skipping([*outputs, output])
                if not outputs:
                    zero()
                if output is not None:
                    is_last = len(outputs) == len(parts) - 1
                    self._run_weighted_backward(output, weight / num_batches, optimizer, starts, is_last=is_last)
                    # Lets go of its graph before the next forward pass.
                    output = _detached(output)
                outputs.append(output)
            replay(self._module, self._recorder.take())
        self._end_step()
        if outputs[0] is None:
            _PackClosure.warning_cache.warn(_SKIPPED)
            self._skip_batch()
            return ClosureResult(None)
        return _result_of(merge_training_outputs(outputs, weights), num_batches)

    def _run_weighted_backward(
        self, output: PyTree[Any], share: float, optimizer: Optimizer, starts: "_Starts | None", *, is_last: bool
    ) -> None:
        """Run the backward pass of a microbatch, which counts for a share of its window."""
        loss = _loss_of(output)
        with _NOTHING if is_last else self._block_sums():
            factor = self._loss_weights.factor(output, share)
            # The step itself may have put a hook on its module.
            if factor and starts is not None and vars(self._module).keys().isdisjoint(_BACKWARD_HOOKS):
                # What the strategy does where nobody looks at the loss. It takes two kernels more to scale that.
                with self._correcting(is_last=is_last), self._around_backward(loss):
                    loss.backward(starts.gradient(loss, factor))
            else:
                self._run_backward(scaled(loss, factor), optimizer, is_last=is_last)

    def _profiled(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Measure a call of the strategy under the name that Lightning gives it."""
        profiler: Profiler = vars(self.trainer)["profiler"]  # Lightning does not declare it
        if type(profiler) is PassThroughProfiler:
            return _NOTHING
        return profiler.profile(f"[Strategy]{type(self.trainer.strategy).__name__}.{name}")

    def _refuse_skipping(self, outputs: Sequence[PyTree[Any]]) -> None:
        """Refuse steps that return None, but for one process that skips a whole batch, as Lightning allows."""
        if self.trainer.world_size > 1:
            raise RuntimeError(_SKIPPED_ON_A_RANK)
        if any(output is not None for output in outputs):
            raise RuntimeError(
                "training_step returned None for some microbatches of a batch: with microbatches > 1 it can only skip all "
                "of them. Return a loss of zero weight, such as 0.0 * loss, or set microbatches to None."
            )

    @override
    def _make_backward_fn(self, optimizer: Optimizer) -> Callable[[torch.Tensor], None] | None:
        if self._skip_backward:
            return None
        return partial(self._run_backward, optimizer=optimizer, is_last=True)

    def _run_backward(self, loss: torch.Tensor, optimizer: Optimizer, *, is_last: bool) -> None:
        """Run a backward pass; the last one of a window leaves the gradients of the mean over all of it."""
        with self._correcting(is_last=is_last), self._profiled("backward"):
            self.trainer.strategy.backward(loss, optimizer)

    def _correcting(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Let the last backward pass of the last batch of a window multiply its gradients by what they need."""
        completes_step = is_last and not self.trainer.fit_loop._should_accumulate()
        return self._correct_gradients(self._correction()) if completes_step else _NOTHING

    def _skip_batch(self) -> None:
        """Finish the gradients of a window whose last batch has no backward pass.

        Raises:
            RuntimeError: On several ranks, which can not leave out a batch each for itself.
        """
        if self.trainer.world_size > 1:
            raise RuntimeError(_SKIPPED_ON_A_RANK)
        if self.trainer.fit_loop._should_accumulate():
            return
        factor = self._correction() if self._loss_weights.has_weights else self._late_correction()
        with self._correct_gradients(factor):
            self._apply_correction()

    def _correction(self) -> float | torch.Tensor:
        """Return what the gradients of a window must be multiplied with when it ends."""
        inverse = self._loss_weights.inverse_total(self._loss_weights.take_own_total())
        # They are a mean over the replicas by now.
        return self._late_correction() if inverse is None else inverse * self._num_replicas

    def _late_correction(self) -> float:
        """Return what the gradients of a window must be multiplied with, as it has turned out to be a short one."""
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        if not progress.is_last_batch or not math.isinf(self.trainer.num_training_batches):
            return 1.0
        num_batches = self.trainer.accumulate_grad_batches
        return num_batches / ((progress.current.ready - 1) % num_batches + 1)

    @override
    def _training_step(self, kwargs: "OrderedDict[str, Any]") -> ClosureResult:
        # As Lightning's own, but for the divisor: the number of batches in this window, which may be a short one.
        output = call._call_strategy_hook(self.trainer, "training_step", *kwargs.values())
        self.trainer.strategy.post_training_step()
        if self._num_microbatches > 1:
            # The strategy leaves it to this class, which has not cut the batch.
            self._end_step()
        if output is None:
            self._skip_batch()
        num_batches = window_size(self.trainer)
        result = self.output_result_cls.from_training_step_output(output, num_batches)
        if result.closure_loss is not None and output is not None:
            loss = output["loss"] if isinstance(output, Mapping) else output
            result.closure_loss = self._loss_weights.weigh(loss, output, 1 / num_batches)
        return result

    def _warn_of_short_epochs(self) -> None:
        num_batches = self.trainer.accumulate_grad_batches
        if self._has_warned or num_batches <= self.trainer.num_training_batches:
            return
        self._has_warned = True
        rank_zero_warn(
            f"an epoch has {self.trainer.num_training_batches} batches, fewer than accumulate_grad_batches "
            f"({num_batches}): the optimizer steps at the end of each epoch, on the mean over the batches that are there."
        )


def _do_nothing() -> None:
    pass


def _loss_of(output: PyTree[Any]) -> torch.Tensor:
    """Return the loss that a step has returned, or let Lightning raise its own error."""
    if isinstance(output, torch.Tensor):
        return output
    ClosureResult.from_training_step_output(output)
    return output["loss"]


def _result_of(merged: PyTree[Any], num_batches: int) -> ClosureResult:
    """Return what ``ClosureResult.from_training_step_output`` would of the merged outputs of a batch.

    But without a copy of the loss, which is one already, and without dividing it by a single batch: that takes as long as
    a small layer.
    """
    entries = {"loss": merged} if isinstance(merged, torch.Tensor) else dict(merged)
    loss = entries.pop("loss")
    result = ClosureResult(None, extra=entries)
    result.loss = loss / num_batches if num_batches > 1 else loss
    return result


def _detached(output: PyTree[Any]) -> PyTree[Any]:
    """Return what a step has returned, without the graph of the loss, which may have one element in any shape."""
    if isinstance(output, torch.Tensor):
        loss = output.detach()
        return loss.reshape(()) if loss.ndim else loss
    return {**output, "loss": _detached(output["loss"])}


@contextlib.contextmanager
def _in_hook(module: LightningModule, name: str) -> Generator[None]:
    """Let log calls inside count as those of a hook."""
    attributes = vars(module)  # setting an attribute of a module takes twice as long
    previous, attributes["_current_fx_name"] = attributes["_current_fx_name"], name
    try:
        yield
    finally:
        attributes["_current_fx_name"] = previous
