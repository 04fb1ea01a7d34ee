"""Wrong numbers of processes are errors before anything starts; right ones run, however they are started."""

import ast
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from d9d_lightning import D9DStrategy, DeviceMeshParameters
from d9d_lightning.jobs.launch import ScriptLauncher
from d9d_lightning.jobs.process_launcher import ProcessLauncher
from tests.d9d_lightning.support import Regression, make_samples, plain_trainer, rank_loader, seeded

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 180


@pytest.fixture(autouse=True)
def no_launcher_of_ours(monkeypatch):
    """As a shell would start Python, whatever an earlier test has left."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def torchrun_of_two(monkeypatch):
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")


@pytest.mark.parametrize(
    ("mesh", "devices", "needed"),
    [
        ({"data_parallel_shard": 2, "data_parallel_replicate": 2}, 2, 4),
        ({"data_parallel_shard": 2}, 1, 2),
        ({}, 2, 1),
    ],
)
def test_mesh_against_devices(mesh, devices, needed):
    with pytest.raises(
        ValueError, match=rf"mesh needs {needed} processes .*devices={devices}, num_nodes=1\) runs"
    ) as error:
        plain_trainer(strategy=D9DStrategy(mesh), devices=devices)
    assert f"Set devices={needed}" in str(error.value)
    assert not dist.is_initialized()


@pytest.mark.usefixtures("torchrun_of_two")
@pytest.mark.parametrize("mesh", [None, {}, {"data_parallel_shard": 2}])
def test_torchrun_against_devices(mesh):
    """A55: two processes and devices=1 are not two independent jobs."""
    with pytest.raises(ValueError, match=r"2 processes were started, but Trainer\(devices=1, num_nodes=1\) asks for 1"):
        plain_trainer(strategy=D9DStrategy(mesh), devices=1)


@pytest.mark.usefixtures("torchrun_of_two")
def test_torchrun_against_mesh():
    with pytest.raises(ValueError, match="mesh needs 4 processes"):
        plain_trainer(strategy=D9DStrategy({"data_parallel_shard": 4}), devices=2)


@pytest.mark.parametrize(
    "mesh",
    [
        {"context_parallel_shard": 2},
        {"context_parallel_replicate": 2},
    ],
    ids=str,
)
def test_context_degrees_are_refused(mesh):
    with pytest.raises(NotImplementedError, match=r"parallel\w* \(2\): training_step gets whole sequences"):
        plain_trainer(strategy=D9DStrategy(mesh), devices=2)


def test_unknown_degrees_are_named():
    with pytest.raises(ValueError, match=r"^mesh: 'data_parallel' is no degree. Did you mean 'data_parallel"):
        D9DStrategy({"data_parallel": 2})


@pytest.mark.parametrize("mesh", [None, "auto"])
def test_the_default_mesh_replicates(mesh):
    strategy = D9DStrategy(mesh)
    trainer = plain_trainer(strategy=strategy, devices=3)
    assert strategy.mesh == DeviceMeshParameters(data_parallel_replicate=3)
    assert strategy.is_distributed
    assert trainer.distributed_sampler_kwargs == {"num_replicas": 3, "rank": 0}
    assert isinstance(strategy.launcher, ScriptLauncher)
    with pytest.raises(RuntimeError, match="has not started"):
        strategy.dist_context  # noqa: B018


def slurm_of(monkeypatch, num_tasks, per_node, num_nodes):
    variables = {
        "SLURM_NTASKS": num_tasks,
        "SLURM_NTASKS_PER_NODE": per_node,
        "SLURM_NNODES": num_nodes,
        "SLURM_JOB_NAME": "train",
        "SLURM_PROCID": 3,
        "SLURM_LOCALID": 1,
        "SLURM_NODEID": 1,
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def test_slurm_has_started_the_processes(monkeypatch):
    slurm_of(monkeypatch, 4, 2, 2)
    strategy = D9DStrategy({"data_parallel_shard": -1, "data_parallel_replicate": 2}, launcher="fork")
    trainer = plain_trainer(strategy=strategy, devices=2, num_nodes=2)
    assert strategy.launcher is None
    assert trainer.world_size == 4
    assert (trainer.global_rank, trainer.local_rank, trainer.node_rank) == (3, 1, 1)
    assert strategy.mesh == DeviceMeshParameters(data_parallel_shard=2, data_parallel_replicate=2)
    assert trainer.distributed_sampler_kwargs == {"num_replicas": 4, "rank": 3}


@pytest.mark.parametrize(
    ("num_tasks", "per_node", "match"),
    [
        (
            1,
            2,
            r"SLURMEnvironment says that 1 processes were started, but Trainer\(devices=2, num_nodes=1\) asks for 2",
        ),
        (2, 1, r"`devices=2` in Lightning, but .* `--ntasks-per-node=1` does not match"),
    ],
)
def test_slurm_against_devices(num_tasks, per_node, match, monkeypatch):
    """A55: what SLURM has started counts."""
    slurm_of(monkeypatch, num_tasks, per_node, 1)
    with pytest.raises(ValueError, match=match):
        plain_trainer(strategy=D9DStrategy(), devices=2)


SCRIPT = """
import os, sys
import torch
import lightning as L
import torch.nn.functional as F
from d9d_lightning import D9DStrategy
from torch.utils.data import DataLoader, TensorDataset

class Module(L.LightningModule):
    def __init__(self, quits_on=None):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.quits_on = quits_on

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == self.quits_on:
            return None
        if self.quits_on == "launcher":
            with open(f"pid-{self.global_rank}", "w") as file:
                file.write(str(os.getpid()))
            if batch_idx == 2 and self.global_rank == 0:
                os.kill(os.getpid(), 9)
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def fit(mesh, quits_on=None):
    L.seed_everything(0, workers=True)
    trainer = L.Trainer(
        strategy="ddp" if mesh == "ddp" else D9DStrategy(mesh),
        accelerator="cpu", devices=2, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    module = Module(quits_on)
    data = torch.arange(64.0).view(16, 4) / 64
    trainer.fit(module, DataLoader(TensorDataset(data), batch_size=2))
    return trainer.callback_metrics["loss"].item(), trainer.world_size

threads = torch.get_num_threads()
meshes = [{"data_parallel_replicate": 2}, {"data_parallel_shard": 2}, None]
if sys.argv[1:] in (["quit"], ["kill-launcher"]):
    fit({"data_parallel_replicate": 2}, quits_on=1 if sys.argv[1] == "quit" else "launcher")
else:
    results = []
    if sys.argv[1:] == ["ddp-first"]:
        results += [fit("ddp"), fit({"data_parallel_shard": 2}), fit("ddp"), fit(None)]
    else:
        results += [fit(mesh) for mesh in meshes]
        assert "OMP_NUM_THREADS" not in os.environ or os.environ["OMP_NUM_THREADS"] == "1"
        assert torch.get_num_threads() == threads
        # Lightning's own strategies set the number of threads.
        results.append(fit("ddp"))
    # Not to a pipe that they share, where lines may run into each other.
    with open(f"result-{os.environ['LOCAL_RANK']}", "w") as file:
        file.write(repr(results))
"""


def run_script(tmp_path, *command, source=SCRIPT, **environment):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(source))
    arguments = [str(script) if part == "SCRIPT" else part for part in command]
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env=variables | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )


def check_results(process, tmp_path):
    assert process.returncode == 0, process.stderr
    results = [ast.literal_eval((tmp_path / f"result-{rank}").read_text()) for rank in range(2)]
    assert results[0] == results[1]
    losses = [loss for loss, _ in results[0]]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)
    assert {world_size for _, world_size in results[0]} == {2}


@pytest.mark.slow
def test_lightning_starts_the_processes(tmp_path):
    check_results(run_script(tmp_path, "SCRIPT"), tmp_path)


@pytest.mark.slow
def test_torchrun_starts_the_processes(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    check_results(run_script(tmp_path, *torchrun, "SCRIPT"), tmp_path)


@pytest.mark.exhaustive  # on the rank pool: test_a_step_of_several_ranks_may_not_return_none
def test_a_missing_loss_ends_the_job(tmp_path):
    """A4: the rank that returned None raises, and its peer does not wait for ever."""
    start = time.monotonic()
    process = run_script(
        tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "SCRIPT", "quit"
    )
    assert process.returncode != 0
    assert "training_step returned None: on several ranks it can not skip a batch" in process.stderr
    assert time.monotonic() - start < TIME_LIMIT_S / 2


@pytest.mark.slow
def test_nothing_outlives_a_killed_launcher(tmp_path):
    process = run_script(tmp_path, "SCRIPT", "kill-launcher")
    assert process.returncode == -signal.SIGKILL
    child = int((tmp_path / "pid-1").read_text())
    deadline = time.monotonic() + 40
    while time.monotonic() < deadline and Path(f"/proc/{child}").exists():
        time.sleep(0.2)
    assert not Path(f"/proc/{child}").exists()


@pytest.mark.exhaustive  # waits for the real periods, which test_nothing_outlives_a_killed_launcher does as well
def test_a_process_ends_with_its_parent():
    """The watch alone: a parent that is not ours is taken for one that has died."""
    code = (
        "import time\n"
        "from d9d.core.parent_watch import ends_with_parent\n"
        "with ends_with_parent(1 << 30):\n"
        "    time.sleep(60)\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
    )
    assert process.returncode == 1
    assert "is gone" in process.stderr


def test_a_process_whose_launcher_lives_goes_on():
    """Also if a shell stands between them."""
    code = (
        "import os, time\n"
        "from d9d.core import parent_watch\n"
        "parent_watch._PERIOD_S = parent_watch._GRACE_S = 0.1\n"
        f"with parent_watch.ends_with_parent({os.getpid()}):\n"
        "    time.sleep(1)\n"
    )
    environment = os.environ | {"CODE": code}
    command = f'{sys.executable} -c "$CODE"; exit $?'
    process = subprocess.run(["sh", "-c", command], cwd=ROOT, env=environment, timeout=TIME_LIMIT_S, check=False)
    assert process.returncode == 0


class Logged(Regression):
    """Logs its loss, and does something odd in the second step."""

    def __init__(self, oddity=None):
        super().__init__()
        self.oddity = oddity

    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.oddity is not None:
            self.oddity(self.trainer)
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def test_step(self, batch, batch_idx):
        self.log("test_loss", (self(batch[0]) - batch[1]).square().mean(), sync_dist=True)

    def train_dataloader(self):
        # In the process that trains.
        return rank_loader(make_samples(16), 8, self.trainer.global_rank, self.trainer.world_size)

    test_dataloader = train_dataloader


def build_forking_trainer(mesh, **options):
    strategy = D9DStrategy(mesh, launcher="fork", min_unit_params=20)
    return plain_trainer(strategy=strategy, devices=2, **options)


@pytest.mark.parametrize("mesh", [{"data_parallel_shard": 2}, {"data_parallel_replicate": 2}], ids=str)
def test_forked_processes_bring_weights_and_metrics_back(mesh, tmp_path):
    """As a notebook does. What was used here before, threads of OpenMP among it, must not stop the children."""
    torch.randn(600, 600) @ torch.randn(600, 600)
    expected = seeded(Logged)
    reference = plain_trainer(max_epochs=2)
    reference.fit(expected)

    module = seeded(Logged)
    checkpoint = ModelCheckpoint(tmp_path, monitor="loss")
    trainer = build_forking_trainer(mesh, max_epochs=2, enable_checkpointing=True, callbacks=[checkpoint])
    trainer.fit(module)
    assert type(module) is Logged
    torch.testing.assert_close(dict(module.state_dict()), dict(expected.state_dict()), rtol=1e-12, atol=1e-12)
    assert trainer.callback_metrics["loss"].item() == pytest.approx(reference.callback_metrics["loss"].item(), rel=1e-6)
    assert trainer.state.finished
    assert Path(checkpoint.best_model_path).is_dir()
    assert not dist.is_initialized()
    assert "LOCAL_RANK" not in os.environ

    [result] = trainer.test(module, ckpt_path="best", verbose=False)
    [expected_result] = reference.test(expected, verbose=False)
    assert result["test_loss"] == pytest.approx(expected_result["test_loss"], rel=1e-6)
    with pytest.raises(NotImplementedError, match="can fit once"):
        trainer.fit(module)


def leave(trainer):
    sys.exit(0)


def die(trainer):
    if trainer.global_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def fail(trainer):
    raise ValueError("a bad sample")


def log_a_lot(trainer):
    # More than a pipe holds.
    trainer.callback_metrics.update({f"metric {number}": torch.ones(100) for number in range(500)})


@pytest.mark.parametrize(
    ("oddity", "error", "match"),
    [
        (leave, RuntimeError, r"ended without a result \(exit codes \[0, 0\]\)"),
        (die, ProcessExitedException, "process 1 terminated with signal SIGKILL"),
        (fail, ProcessRaisedException, "a bad sample"),
    ],
)
def test_the_parent_does_not_wait_for_children_that_are_gone(oddity, error, match):
    with pytest.raises(error, match=match):
        build_forking_trainer({"data_parallel_replicate": 2}).fit(seeded(lambda: Logged(oddity)))


def test_results_may_be_larger_than_a_pipe():
    trainer = build_forking_trainer({"data_parallel_replicate": 2})
    trainer.fit(seeded(lambda: Logged(log_a_lot)))
    assert trainer.callback_metrics["metric 499"].tolist() == [1.0] * 100


def test_notebooks_fork(monkeypatch):
    monkeypatch.setattr("d9d_lightning.jobs.launch._IS_INTERACTIVE", True)
    strategy = D9DStrategy()
    plain_trainer(strategy=strategy, devices=2)
    assert isinstance(strategy.launcher, ProcessLauncher)
    assert strategy.launcher.is_interactive_compatible


def test_strategies_can_be_pickled():
    strategy = D9DStrategy({"data_parallel_shard": -1}, launcher="spawn")
    plain_trainer(strategy=strategy, devices=2)
    copied = pickle.loads(pickle.dumps(strategy))  # noqa: S301  # our own
    assert copied.mesh == strategy.mesh == DeviceMeshParameters(data_parallel_shard=2)
    assert isinstance(copied.launcher, ProcessLauncher)


SPAWNING = """
import torch
import lightning as L
from d9d_lightning import D9DStrategy
from torch.utils.data import DataLoader, TensorDataset

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def fit(batch_size, **options):
    torch.manual_seed(0)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, **options,
    )
    module = Module()
    trainer.fit(module, DataLoader(TensorDataset(torch.arange(64.0).view(16, 4) / 64), batch_size=batch_size))
    return module.layer.weight, trainer.callback_metrics["loss"]

if __name__ == "__main__":
    expected = fit(16, devices=1)
    spawned = fit(8, devices=2, strategy=D9DStrategy({"data_parallel_shard": 2}, launcher="spawn"))
    torch.testing.assert_close(spawned, expected, rtol=1e-5, atol=1e-6)
"""


@pytest.mark.slow
def test_spawned_processes_bring_weights_and_metrics_back(tmp_path):
    process = run_script(tmp_path, "SCRIPT", source=SPAWNING)
    assert process.returncode == 0, process.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_strategies_take_turns_in_one_process(tmp_path):
    """Also where Lightning's own strategy has made the process group."""
    check_results(run_script(tmp_path, "SCRIPT", "ddp-first"), tmp_path)


def test_module_is_exported():
    assert issubclass(D9DStrategy, L.pytorch.strategies.ParallelStrategy)
