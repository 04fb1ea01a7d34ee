"""A small transformer that classifies handwritten digits: an ordinary LightningModule."""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

NUM_CLASSES = 10
NUM_ROWS = 8  # an image is a sequence of rows
ROW_PIXELS = 8
HEAD_SIZE = 8


class Embedding(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.pixels = nn.Linear(ROW_PIXELS, width)
        self.position = nn.Parameter(0.02 * torch.randn(NUM_ROWS, width))

    def forward(self, images):
        return self.pixels(images) + self.position  # (B, T, D)


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        normed = self.attention_norm(x)
        query, key, value = (
            project(normed).unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2)  # (B, H, T, HEAD_SIZE)
            for project in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Classifier(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.digits = nn.Linear(width, NUM_CLASSES)

    def forward(self, x):
        return self.digits(self.norm(x).mean(dim=1))


class DigitTransformer(L.LightningModule):
    def __init__(self, width: int = 32, num_blocks: int = 6, learning_rate: float = 3e-3):
        super().__init__()
        self.save_hyperparameters()
        blocks = [Block(width) for _ in range(num_blocks)]
        self.model = nn.Sequential(Embedding(width), *blocks, Classifier(width))
        self.val_metrics = MetricCollection(
            {
                "accuracy": MulticlassAccuracy(NUM_CLASSES, average="micro"),
                "f1": MulticlassF1Score(NUM_CLASSES),
                "auroc": MulticlassAUROC(NUM_CLASSES),
            },
            prefix="val_",
        )

    def training_step(self, batch, batch_idx):
        images, digits = batch
        loss = F.cross_entropy(self.model(images), digits)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, digits = batch
        logits = self.model(images)
        self.log("val_loss", F.cross_entropy(logits, digits), prog_bar=True, sync_dist=True)
        self.val_metrics.update(logits, digits)
        self.log_dict(self.val_metrics)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
