"""Run a job in children of this process: in notebooks, which no script can be run again for, and wherever asked for."""
# Lightning's launchers are its own, and the only ones its trainer knows
# pyright: reportPrivateUsage=false

import os
import tempfile
from collections.abc import Callable
from multiprocessing import Process
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from queue import Queue
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.strategies.launchers.multiprocessing import (
    _check_bad_cuda_fork,
    _check_missing_main_guard,
    _disable_module_memory_sharing,
)
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.multiprocessing import (
    _GlobalStateSnapshot,
    _MultiProcessingLauncher,
    _WorkerOutput,
)
from lightning.pytorch.trainer.states import TrainerFn
from torch.multiprocessing.spawn import ProcessContext, start_processes
from typing_extensions import override

from d9d.core.parent_watch import ends_with_parent

__all__ = ["HandBack", "ProcessLauncher"]

_POLL_S = 0.2
"""How long the parent waits for its children before it looks whether the first one wants to hand over its result."""


class HandBack(NamedTuple):
    """How trained weights come back from the children."""

    collect_weights: Callable[[], dict[str, Any]]
    """Returns the state dict of the whole module on rank 0. All ranks call it."""
    note_fit: Callable[[LightningModule], None]
    """Called in the parent with the module that has its trained weights again."""


class ProcessLauncher(_MultiProcessingLauncher):
    """Lightning's launcher of child processes, with four differences.

    - The weights that come back are whole, whatever the mesh.
    - A result is taken while the processes run, and one that never comes is an error. Lightning waits for ever for the
      result of a process that has called ``exit()``, or whose result does not fit into a pipe.
    - The children end when their parent is gone.
    - The thread count is left alone, except after a fork: see [Note: threads after a fork].

    [Note: threads after a fork]
    The threads of OpenMP do not survive a fork, but the child's copy of the library believes in them and waits for ever
    in the next operation that is large enough for several threads. So forked children compute on one thread, as the
    workers of a DataLoader do.
    """

    def __init__(
        self,
        strategy: ParallelStrategy,
        start_method: Literal["fork", "spawn"],
        num_processes: int,
        hand_back: HandBack,
    ) -> None:
        """Describe how to start; nothing is started yet.

        Args:
            strategy: The strategy of the Trainer.
            start_method: "spawn" starts Python anew and sends it the Trainer; "fork" copies this process.
            num_processes: Number of children.
            hand_back: How trained weights come back.
        """
        super().__init__(strategy, start_method)
        self._num_processes = num_processes
        self._hand_back = hand_back

    # `Any`: whatever the function takes and returns.
    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Run a function in all children.

        Returns:
            What it returned on rank 0.

        Raises:
            RuntimeError: If this process belongs to a process group already, or a child ended without a result.
            NotImplementedError: For a second fit of one Trainer, as in Lightning.
        """
        self._refuse_bad_start(trainer)
        # Whatever finds a free port must do so here, for all children.
        environment = self._strategy.cluster_environment
        if environment is None or environment.main_port < 0:
            raise RuntimeError("the strategy is not connected to a Trainer")
        results: SimpleQueue[Any] = mp.get_context(self._start_method).SimpleQueue()
        is_spawned = self._start_method == "spawn"
        processes = start_processes(
            self._wrapping_function,
            args=(trainer, function, args, kwargs, results, _GlobalStateSnapshot.capture() if is_spawned else None),
            nprocs=self._num_processes,
            start_method=self._start_method,
            join=False,
        )
        if processes is None:
            raise RuntimeError("torch has started no processes")
        # Torch's annotation says that they are None.
        self.procs = cast("list[Process]", processes.processes)
        output = _wait_for_result(processes, results)
        if trainer is None:
            return output
        self._already_fit |= trainer.state.fn == TrainerFn.FITTING
        self._recover_results_in_main_process(output, trainer)
        return output.trainer_results

    def _refuse_bad_start(self, trainer: Trainer | None) -> None:
        if self._start_method == "fork":
            _check_bad_cuda_fork()
        else:
            _check_missing_main_guard()
        if dist.is_initialized():
            raise RuntimeError(
                f"launcher={self._start_method!r} cannot start processes from one that belongs to a process group "
                f"(an earlier Trainer of this process has run on several ranks). Use the same launcher for all of them."
            )
        if self._already_fit and trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            raise NotImplementedError(
                "a Trainer whose processes are children of this one can fit once, as their loops and optimizers are gone "
                "with them. Build a new Trainer, and give it fit(ckpt_path=...) to resume."
            )

    @override
    def _wrapping_function(
        self,
        process_idx: int,
        trainer: Trainer | None,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        return_queue: "SimpleQueue[Any] | Queue[Any]",
        global_states: _GlobalStateSnapshot | None = None,
    ) -> None:
        if global_states is not None:
            global_states.restore()
        if self._start_method == "fork":
            torch.set_num_threads(1)
        elif isinstance(self._strategy.accelerator, CPUAccelerator):
            args, kwargs = _disable_module_memory_sharing((args, kwargs))
        os.environ["LOCAL_RANK"] = str(process_idx)
        with ends_with_parent(os.getppid()):
            results = function(*args, **kwargs)
            if trainer is not None:
                results = self._collect_rank_zero_results(trainer, results)
            if process_idx == 0:
                return_queue.put(move_data_to_device(results, "cpu"))
            if dist.is_initialized():
                # A forked process runs no exit handlers.
                dist.destroy_process_group()

    @override
    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> _WorkerOutput | None:
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        weights = self._hand_back.collect_weights() if is_fitting else {}
        if not self._strategy.is_global_zero:
            return None
        path = None
        if is_fitting:
            # Not through the queue, whose tensors end with the process that sent them.
            path = str(Path(tempfile.mkdtemp()) / "weights.ckpt")
            TorchCheckpointIO().save_checkpoint(weights, path)
        callback = trainer.checkpoint_callback
        best_path = None if callback is None else vars(callback).get("best_model_path")
        return _WorkerOutput(best_path, path, trainer.state, results, self.get_extra_results(trainer))

    @override
    def _recover_results_in_main_process(self, worker_output: _WorkerOutput, trainer: Trainer) -> None:
        if worker_output.weights_path is not None and any(
            tensor.is_meta for tensor in trainer.lightning_module.state_dict().values()
        ):
            trainer.lightning_module.to_empty(device="cpu")
        super()._recover_results_in_main_process(worker_output, trainer)
        if worker_output.weights_path is not None:
            Path(worker_output.weights_path).parent.rmdir()
            self._hand_back.note_fit(trainer.lightning_module)


def _wait_for_result(processes: ProcessContext, results: "SimpleQueue[Any]") -> Any:  # noqa: ANN401  # the user's
    """Join all processes, and return what the first one has sent; a process that failed raises here."""
    received: list[Any] = []
    is_over = False
    while not is_over:
        is_over = processes.join(timeout=_POLL_S)
        if not received and not results.empty():
            received.append(results.get())
    if not received:
        codes = [process.exitcode for process in processes.processes]
        raise RuntimeError(
            f"the processes of the job have ended without a result (exit codes {codes}): did code in them call "
            f"exit(), or were they stopped by a signal?"
        )
    return received[0]
