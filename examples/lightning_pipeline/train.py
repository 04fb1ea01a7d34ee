"""Train one unchanged LightningModule on one process, on shards, in tensor-parallel parts and in pipelines."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import lightning as L
from data import DigitData
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from module import DigitTransformer
from rich.console import Console
from rich.table import Table

from d9d_lightning import D9DStrategy

RUNS = Path("runs") / "lightning_pipeline"

TENSOR_PLAN = {
    "model.*.query": "colwise",
    "model.*.key": "colwise",
    "model.*.value": "colwise",
    "model.*.out": "rowwise",
    "model.*.up": "colwise",
    "model.*.down": "rowwise",
}

PIPELINE = {"pipeline_module": "model", "microbatches": 4}

# Arguments of the strategy by the name of a mesh.
MESHES = {
    "one": {"mesh": {}},
    "replicate2": {"mesh": {"data_parallel_replicate": 2}},
    "shard2": {"mesh": {"data_parallel_shard": 2}},
    "hsdp2x2": {"mesh": {"data_parallel_replicate": 2, "data_parallel_shard": 2}},
    "tp2_shard2": {"mesh": {"tensor_parallel": 2, "data_parallel_shard": 2}, "parallelize": TENSOR_PLAN},
    "pp2": {"mesh": {"pipeline_parallel": 2}, "schedule": "1f1b", **PIPELINE},
    "pp2_shard2": {
        "mesh": {"pipeline_parallel": 2, "data_parallel_shard": 2},
        "schedule": "interleaved",
        **PIPELINE,
    },
    "pp2_tp2": {
        "mesh": {"pipeline_parallel": 2, "tensor_parallel": 2},
        "schedule": "zero_bubble",
        "parallelize": TENSOR_PLAN,
        **PIPELINE,
    },
}


class History(L.Callback):
    """Keeps what this rank has logged."""

    def __init__(self):
        self.train_losses = []
        self.epochs = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.train_losses.append(float(trainer.callback_metrics["train_loss"]))

    def on_validation_epoch_end(self, trainer, module):
        if not trainer.sanity_checking:
            values = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val_")}
            self.epochs.append(values)

    def as_dict(self):
        return {"train_losses": self.train_losses, "epochs": self.epochs}


def train(name, num_epochs, explains):
    """Train on one mesh. Rank 0 returns what it has logged, after comparing it with the other ranks; others None."""
    L.seed_everything(0)
    strategy = D9DStrategy(**MESHES[name])
    history = History()
    checkpoint = ModelCheckpoint(monitor="val_accuracy", mode="max", filename="{epoch}")
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=strategy.mesh.world_size,
        max_epochs=num_epochs,
        gradient_clip_val=1.0,
        callbacks=[
            checkpoint,
            EarlyStopping(monitor="val_loss", patience=3),
            LearningRateMonitor(),
            RichProgressBar(),
            history,
        ],
        logger=CSVLogger(RUNS, name=name),
        log_every_n_steps=5,
    )
    trainer.fit(DigitTransformer(), DigitData())

    best = {"best": checkpoint.best_model_path, "best_score": float(checkpoint.best_model_score)}
    own = {**history.as_dict(), **best}
    folder = Path(trainer.log_dir)  # every process has to ask
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(own), encoding="utf-8")
    strategy.barrier()
    if not trainer.is_global_zero:
        return None
    ranks = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("rank*.json"))]
    if any(rank != own for rank in ranks):
        raise RuntimeError(f"the ranks have logged different values, see {folder}/rank*.json")
    if explains:
        print(strategy.explain())
    return {**own, "num_ranks": len(ranks)}


def report(name, result):
    """Print what was logged after each epoch."""
    table = Table(title=f"{name}: the same on all {result['num_ranks']} ranks" if result["num_ranks"] > 1 else name)
    for column in ("epoch", *result["epochs"][0]):
        table.add_column(column, justify="right")
    for epoch, values in enumerate(result["epochs"]):
        table.add_row(str(epoch), *(f"{value:.6f}" for value in values.values()))
    console = Console()
    console.print(table)
    console.print(f"best checkpoint: {result['best']} (val_accuracy {result['best_score']:.4f})", soft_wrap=True)


def difference(result, expected):
    """Largest difference between the losses and metrics that two meshes have logged."""
    pairs = list(zip(result["train_losses"], expected["train_losses"], strict=True))
    for values, others in zip(result["epochs"], expected["epochs"], strict=True):
        pairs += [(values[key], others[key]) for key in others]
    return max(abs(value - other) for value, other in pairs)


def compare_all(num_epochs):
    """Train on each mesh in processes of its own, and print how far it is from one process."""
    table = Table(title="All meshes against one process")
    for column in ("mesh", "ranks", "val_loss", "best checkpoint", "accuracy", "difference"):
        table.add_column(column, justify="right")
    expected = None
    for name in MESHES:
        subprocess.run([sys.executable, __file__, "--mesh", name, "--epochs", str(num_epochs)], check=True)
        result = json.loads((RUNS / f"{name}.json").read_text(encoding="utf-8"))
        expected = expected or result
        last, best = result["epochs"][-1], Path(result["best"]).name
        table.add_row(
            name,
            str(result["num_ranks"]),
            f"{last['val_loss']:.6f}",
            best,
            f"{result['best_score']:.4f}",
            f"{difference(result, expected):.1e}",
        )
    Console().print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", choices=[*MESHES, "all"], default="pp2")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--explain", action="store_true", help="show where rank 0 has the parameters")
    arguments = parser.parse_args()
    if arguments.mesh == "all":
        compare_all(arguments.epochs)
        return
    result = train(arguments.mesh, arguments.epochs, arguments.explain)
    if result is not None:
        (RUNS / f"{arguments.mesh}.json").write_text(json.dumps(result), encoding="utf-8")
        report(arguments.mesh, result)


if __name__ == "__main__":
    main()
