"""Classify real handwritten digits with an ordinary LightningModule, replicated and sharded over CPU processes."""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from d9d_lightning import D9DStrategy

NUM_CLASSES = 10


class DigitClassifier(L.LightningModule):
    def __init__(self, num_channels: int = 32, learning_rate: float = 5e-3):
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(
            nn.Conv2d(1, num_channels, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(num_channels, num_channels, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(num_channels * 4 * 4, NUM_CLASSES),
        )
        self.val_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.test_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")

    def forward(self, images):
        return self.model(images)

    def training_step(self, batch, batch_idx):
        images, digits = batch
        loss = F.cross_entropy(self(images), digits)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, digits = batch
        self.val_accuracy(self(images), digits)
        self.log("val_accuracy", self.val_accuracy, on_epoch=True, prog_bar=True)

    def test_step(self, batch, batch_idx):
        images, digits = batch
        self.test_accuracy(self(images), digits)
        self.log("test_accuracy", self.test_accuracy, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)


def load_splits():
    """1797 images of 8 x 8 pixels as train, validation and test sets, with all digits equally often in each."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # (N, 1, 8, 8), in 0..1
    labels = torch.tensor(digits.target)
    rest, test = train_test_split(range(len(labels)), test_size=360, stratify=labels, random_state=0)
    train, val = train_test_split(rest, test_size=180, stratify=labels[rest], random_state=0)
    return [TensorDataset(images[part], labels[part]) for part in (train, val, test)]


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=4, help="processes to start: replicate times shard")
    parser.add_argument("--replicate", type=int, default=2, help="copies of the model")
    parser.add_argument("--shard", type=int, default=2, help="parts that each copy is cut into")
    parser.add_argument("--epochs", type=int, default=12)
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    L.seed_everything(0)
    train_set, val_set, test_set = load_splits()
    checkpoint = ModelCheckpoint(monitor="val_accuracy", mode="max")
    trainer = L.Trainer(
        strategy=D9DStrategy(
            mesh={"data_parallel_replicate": arguments.replicate, "data_parallel_shard": arguments.shard}
        ),
        accelerator="cpu",
        devices=arguments.devices,
        max_epochs=arguments.epochs,
        callbacks=[checkpoint],
        logger=CSVLogger("runs", name="digits"),
        log_every_n_steps=5,
    )
    module = DigitClassifier()
    trainer.fit(module, DataLoader(train_set, batch_size=16, shuffle=True), DataLoader(val_set, batch_size=45))
    [result] = trainer.test(module, DataLoader(test_set, batch_size=90))

    log_dir = trainer.log_dir  # every process has to ask
    if trainer.is_global_zero:
        print(f"test accuracy: {result['test_accuracy']:.4f}")
        print(f"checkpoint: {checkpoint.best_model_path}")
        print(f"logs: {log_dir}/metrics.csv")


if __name__ == "__main__":
    main()
