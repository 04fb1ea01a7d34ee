"""Handwritten digits, in the same batches on every mesh."""

import lightning as L
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class DigitData(L.LightningDataModule):
    """1797 images of 8 x 8 pixels: 1408 to train with, 352 to validate."""

    def __init__(self, global_batch_size: int = 64):
        super().__init__()
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32) / 16  # (N, T, pixels), in 0..1
        labels = torch.tensor(digits.target)
        train, val = train_test_split(
            range(len(labels)), train_size=1408, test_size=352, stratify=labels, random_state=0
        )
        self.global_batch_size = global_batch_size
        self.train_set = TensorDataset(images[train], labels[train])
        self.val_set = TensorDataset(images[val], labels[val])

    def train_dataloader(self):
        # Lightning's own choice on several replicas. Made here, so that one replica draws the same batches as well.
        sampler = DistributedSampler(self.train_set, **self.trainer.distributed_sampler_kwargs)
        return DataLoader(self.train_set, batch_size=self.global_batch_size // sampler.num_replicas, sampler=sampler)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=88)
