"""A LightningDataModule over map-style datasets, with the elastic stream for training."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from d9d.core.types import CollateFn
from d9d.dataset.lanes import LoaderOptions, MapDataset, StepRange, Tail
from d9d_lightning.data.elastic_loader import ElasticLoader, elastic_dataloader

__all__ = ["D9DDataModule"]

EvaluationData = Dataset[Any] | Mapping[str, Dataset[Any]] | None


class D9DDataModule(LightningDataModule):
    """Trains on the elastic stream of a dataset, and evaluates on others, with each sample once.

    ``trainer.fit(module, D9DDataModule(train, validation=val, global_batch_size=256, batch_size=8))``.

    Args:
        train: Map-style dataset to train on; None if the module only evaluates.
        validation: Dataset to validate on; or several by name, one loader each, in this order.
        test: The same for ``trainer.test``.
        predict: The same for ``trainer.predict``.
        global_batch_size: Samples of an optimizer step over all ranks.
        batch_size: Samples of a training batch of a rank; see `elastic_dataloader`.
        evaluation_batch_size: Samples of an evaluation batch of a rank. With two or more, all ranks have as many batches.
        collate_fn: Makes a batch from samples. None: PyTorch's default.
        seed: Seed of the shuffle, and of random numbers within training samples.
        shuffle: Draw another order of the training samples for each pass over them.
        tail: What happens to samples that do not fill a last training step; see `elastic_dataloader`.
        skip_steps: Training steps to jump over, such as those of a loss spike.
        loading: Loader processes of each loader, and how they load.
    """

    def __init__(
        self,
        train: MapDataset | None = None,
        *,
        validation: EvaluationData = None,
        test: EvaluationData = None,
        predict: EvaluationData = None,
        global_batch_size: int = 1,
        batch_size: int | None = None,
        evaluation_batch_size: int = 1,
        collate_fn: CollateFn | None = None,
        seed: int = 0,
        shuffle: bool = True,
        tail: Tail | Literal["drop", "wrap"] = Tail.drop,
        skip_steps: Sequence[StepRange] = (),
        loading: LoaderOptions | None = None,
    ) -> None:
        super().__init__()
        self._train = train
        self._evaluated = {"validation": validation, "test": test, "predict": predict}
        self._global_batch_size = global_batch_size
        self._batch_size = batch_size
        self._evaluation_batch_size = evaluation_batch_size
        self._collate_fn = collate_fn
        self._seed = seed
        self._shuffle = shuffle
        self._tail: Tail | Literal["drop", "wrap"] = tail
        self._skip_steps = skip_steps
        self._loading = loading or LoaderOptions()

    @override
    def train_dataloader(self) -> ElasticLoader:
        if self._train is None:
            raise ValueError("the D9DDataModule has no `train` dataset to fit on.")
        return elastic_dataloader(
            self._train,
            global_batch_size=self._global_batch_size,
            batch_size=self._batch_size,
            collate_fn=self._collate_fn,
            seed=self._seed,
            shuffle=self._shuffle,
            tail=self._tail,
            skip_steps=self._skip_steps,
            loading=self._loading,
        )

    @override
    def val_dataloader(self) -> list[DataLoader[Any]]:
        return self._loaders("validation")

    @override
    def test_dataloader(self) -> list[DataLoader[Any]]:
        return self._loaders("test")

    @override
    def predict_dataloader(self) -> list[DataLoader[Any]]:
        return self._loaders("predict")

    def _loaders(self, name: str) -> list[DataLoader[Any]]:
        data = self._evaluated[name]
        datasets = [] if data is None else list(data.values()) if isinstance(data, Mapping) else [data]
        options = self._loading
        return [
            DataLoader(
                dataset,
                batch_size=self._evaluation_batch_size,
                collate_fn=self._collate_fn,
                num_workers=options.num_workers,
                persistent_workers=options.persistent_workers,
                pin_memory=options.pin_memory,
                prefetch_factor=options.prefetch_factor,
                timeout=options.timeout_s,
                multiprocessing_context=options.start_method,
            )
            for dataset in datasets
        ]
