"""A rank of the pool: takes tasks from the pytest process, one at a time, until that process is gone."""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from _pytest._code import Traceback

from tests.harness import rank_state
from tests.harness.messages import RANK_FIXTURES, Finish, RankOutcome, RankTask, Ready
from tests.harness.rank_import import import_test, install_assertion_rewriting

Command = RankTask | Finish


def serve(connection: Connection, stack_path: str, pytest_args: Sequence[str]) -> None:
    """Run tasks until the pipe closes. Entry point of a rank process.

    A task is answered twice: when its body ended, then, after `Finish`, when the process group is gone. Between the
    two the rank keeps its sockets open, so that no rank sees a peer leave that merely was faster.
    """
    _become_rank_process(stack_path)
    install_assertion_rewriting(pytest_args)
    commands: SimpleQueue[Command] = SimpleQueue()
    reader = threading.Thread(target=_read_commands, args=(connection, commands), daemon=True, name="rank-commands")
    reader.start()
    _spare_modules_from_collections()
    connection.send(Ready())
    gauge = rank_state.WearGauge({thread.native_id or 0 for thread in (threading.main_thread(), reader)})
    while True:
        gauge.start_waiting()
        task = commands.get()
        gauge.stop_waiting()
        if not isinstance(task, RankTask):
            raise RuntimeError(f"A rank without a task was sent {task}.")
        num_modules = len(sys.modules)
        outcome = _run_task(task, connection, commands)
        if len(sys.modules) > num_modules:
            _spare_modules_from_collections()
        connection.send(replace(outcome, is_worn=gauge.is_worn))


def _spare_modules_from_collections() -> None:
    # What is imported lives for ever, and to walk it takes 0.1 s once Lightning is there: more than most tests. After a
    # test its garbage has been collected, so that little else is frozen.
    gc.freeze()


def _become_rank_process(stack_path: str) -> None:
    # Own process group: Ctrl-C reaches pytest alone, and one kill ends the rank with its children.
    os.setsid()
    # The pytest process holds us as a daemon, to end us when it exits, but a rank may have children (data loaders).
    multiprocessing.current_process().daemon = False
    # Ours is the fork server, whose children import everything anew. Data loaders get the start method that users have.
    multiprocessing.set_start_method(None, force=True)
    # Never closed: faulthandler keeps only its descriptor.
    stack_file = os.open(stack_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    # Not SIGUSR1, by which Lightning and our trainers are told to save and end.
    faulthandler.register(signal.SIGUSR2, file=stack_file, all_threads=True)
    faulthandler.enable(file=2)
    torch.set_num_threads(1)


def _read_commands(connection: Connection, commands: SimpleQueue[Command]) -> None:
    # A thread, so that a rank stuck in a collective still notices that the pytest process died.
    while True:
        try:
            commands.put(connection.recv())
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)


def _run_task(task: RankTask, connection: Connection, commands: SimpleQueue[Command]) -> RankOutcome:
    variables = task.call.environment | rank_state.torchrun_environment(task.rank, task.world_size)
    try:
        with (
            rank_state.environment(variables),
            rank_state.redirected_output(Path(task.output_path)),
            ExitStack() as group,
        ):
            connection.send(_run_body(task, group))
            commands.get()  # Finish; it never comes after a failure: then the pool is killed
    except BaseException as error:  # noqa: BLE001 - it is reported
        return _outcome_of(error)
    return RankOutcome("passed")


def _run_body(task: RankTask, group: ExitStack) -> RankOutcome:
    try:
        group.enter_context(rank_state.process_group(task.rank, task.world_size, task.store_path, task.timeout_s))
    except RuntimeError as error:
        return RankOutcome("no_group", _format_error(error))
    try:
        # Imported before the seeds are set: a module may draw numbers when it is imported for the first time.
        test = import_test(task.call.source)
        arguments = pickle.loads(task.call.arguments)  # noqa: S301 - written by the pytest process
        with rank_state.seeded_globals(), ExitStack() as fixtures:
            for name in task.call.rank_fixtures:
                arguments[name] = RANK_FIXTURES[name]()
                fixtures.callback(arguments[name].undo)
            test(**arguments)
    except BaseException as error:  # noqa: BLE001 - it is reported
        return _outcome_of(error)
    return RankOutcome("passed")


def _outcome_of(error: BaseException) -> RankOutcome:
    match error:
        case pytest.skip.Exception():
            return RankOutcome("skipped", str(error))
        case pytest.xfail.Exception():
            return RankOutcome("xfailed", str(error))
        case _:
            return RankOutcome("failed", _format_error(error))


def _format_error(error: BaseException) -> str:
    # Short: with the long style, whole functions of torch stand between the test and its error, once per rank.
    return str(pytest.ExceptionInfo.from_exception(error).getrepr(style="short", tbfilter=_without_harness))


def _without_harness(info: pytest.ExceptionInfo[BaseException]) -> Traceback:
    outside = [entry for entry in info.traceback if Path(entry.path) != Path(__file__)]
    return Traceback(outside or info.traceback)
