"""Data of a Lightning job: the elastic stream, loaders of evaluations, positions in checkpoints."""

from d9d_lightning.data.data_module import D9DDataModule
from d9d_lightning.data.elastic_loader import ElasticLoader, elastic_dataloader

__all__ = ["D9DDataModule", "ElasticLoader", "elastic_dataloader"]
