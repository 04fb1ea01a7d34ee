"""Exports while a module trains: at the end, every so many steps, and of the best weights."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging

from d9d_lightning import D9DStrategy, read_checkpoint
from d9d_lightning.callbacks import EMAWeightAveraging, ModelStateExport
from tests.d9d_lightning.support import full_state, make_samples, plain_trainer, rank_loader, seeded
from tests.d9d_lightning.test_model_states import (
    BATCH,
    CLOSE,
    Trained,
    equal,
    loader_of,
    mesh_trainer,
    one_trainer,
    read_export,
)


class Scored(Trained):
    """Validates to given scores, one after another."""

    def __init__(self, scores):
        super().__init__()
        self.scores = list(scores)

    def validation_step(self, batch, batch_idx):
        self.log("score", torch.tensor(self.scores[self.current_epoch]))


def recording(scores):
    """A module that keeps its weights after each validation, and the list that they go to."""
    weights = []

    class Recorded(Scored):
        def on_validation_end(self):
            weights.append(full_state(self))

    return seeded(lambda: Recorded(scores)), weights


def test_exports_of_steps_and_of_the_best(tmp_path):
    export = ModelStateExport(tmp_path, every_n_steps=2, on_best="score", mode="max", at_end=True)
    module, weights = recording([1.0, 3.0, float("nan"), 2.0])
    trainer = one_trainer({}, max_epochs=4, callbacks=[export])
    trainer.fit(module, loader_of(trainer), loader_of(trainer))
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["best", "step-2", "step-4"]
    equal(read_export(tmp_path / "best"), weights[1])
    equal(read_export(tmp_path / "step-2"), weights[1])  # one step an epoch
    equal(read_export(tmp_path), full_state(module))


@pytest.mark.parametrize(
    ("options", "epochs"),
    [
        ({}, [0, 1, 4]),
        ({"mode": "min"}, [0, 2]),
        # It looks at epochs 1 and 3 only: the best of all, of epoch 4, is not seen.
        ({"every_n_epochs": 2}, [1]),
        ({"save_top_k": 2}, [0, 1, 4]),
        ({"save_top_k": -1}, [0, 1, 4]),
        ({"save_on_train_epoch_end": True}, [0, 1, 4]),
        # After a step Lightning sees the score of the validation before it.
        ({"every_n_train_steps": 1}, [1, 2, 5]),
        # All are written to one path.
        ({"filename": "best", "enable_version_counter": False}, [0, 1, 4]),
        ({"save_weights_only": True}, [0, 1, 4]),
    ],
    ids=str,
)
def test_exports_what_a_checkpoint_callback_takes_for_its_best(options, epochs, tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "kept", **{"monitor": "score", "mode": "max", **options})
    export = ModelStateExport(tmp_path, on_best=checkpoint, mode="min")  # the mode of the checkpoint counts
    module, weights = recording([2.0, 3.0, 1.0, 2.0, 4.0, 2.0])
    exported, kept = [], []

    class Watched(D9DStrategy):
        def export_model_state(self, path, *args, **kwargs):
            super().export_model_state(path, *args, **kwargs)
            exported.append(read_export(path))
            kept.append(read_checkpoint(checkpoint.best_model_path)["state_dict"])

    trainer = plain_trainer(strategy=Watched(), max_epochs=6, callbacks=[export, checkpoint], enable_checkpointing=True)
    trainer.fit(module, loader_of(trainer), loader_of(trainer))
    equal(exported, [weights[epoch] for epoch in epochs])
    equal(exported, kept)


def test_the_checkpoint_callback_must_be_there(tmp_path):
    trainer = one_trainer({}, callbacks=[ModelStateExport(tmp_path, on_best=ModelCheckpoint(monitor="score"))])
    with pytest.raises(ValueError, match="ModelCheckpoint that the Trainer does not have"):
        trainer.fit(seeded(Trained), loader_of(trainer))


def test_a_metric_that_nobody_logs_is_said_in_the_first_epoch(tmp_path):
    module, _ = recording([1.0, 2.0])
    trainer = one_trainer({}, max_epochs=2, callbacks=[ModelStateExport(tmp_path, on_best="scor")])
    with pytest.raises(ValueError, match=r"nobody logs: 'scor' \(nearest: 'score'\)"):
        trainer.fit(module, loader_of(trainer), loader_of(trainer))
    assert trainer.current_epoch == 0


class Disagreeing(Trained):
    """Its score, which is not synced, gets better on rank 1 only."""

    def validation_step(self, batch, batch_idx):
        self.log("score", torch.tensor(float(-self.current_epoch * dist.get_rank())))

    def on_validation_end(self):
        if self.current_epoch == 0:
            self.first_weights = full_state(self)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("takes_checkpoint", [False, True])
def test_the_best_of_ranks_that_disagree_is_not_exported(takes_checkpoint, tmp_path):
    folders = [tmp_path]  # that of rank 0
    dist.broadcast_object_list(folders, src=0)
    checkpoint = ModelCheckpoint(folders[0] / "kept", monitor="score", save_top_k=-1)
    export = ModelStateExport(folders[0], on_best=checkpoint if takes_checkpoint else "score")
    callbacks = [export, checkpoint] if takes_checkpoint else [export]
    trainer = mesh_trainer(
        {"data_parallel_shard": 2}, {}, max_epochs=3, callbacks=callbacks, enable_checkpointing=takes_checkpoint
    )
    module = seeded(Disagreeing)
    trainer.fit(module, loader_of(trainer), loader_of(trainer))
    assert not torch.equal(full_state(module)["embed.weight"], module.first_weights["embed.weight"])
    equal(read_export(folders[0] / "best"), module.first_weights)


def test_the_end_exports_averaged_weights(tmp_path):
    callbacks = [ModelStateExport(tmp_path), EMAWeightAveraging(decay=0.5)]
    trainer = one_trainer({}, max_epochs=3, callbacks=callbacks)
    module = seeded(Trained)
    trainer.fit(module, loader_of(trainer))
    equal(read_export(tmp_path), full_state(module))


class Stepping(Trained):
    """Keeps its weights after each step."""

    def __init__(self):
        super().__init__()
        self.after_steps = []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.after_steps.append(full_state(self))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("degrees", [{"data_parallel_shard": 2}, {"data_parallel_replicate": 2}], ids=str)
def test_exports_of_steps_have_the_averages_or_the_weights(degrees, tmp_path):
    folders = [tmp_path]  # that of rank 0
    dist.broadcast_object_list(folders, src=0)
    averaged, raw = folders[0] / "averaged", folders[0] / "raw"
    exports = [
        ModelStateExport(averaged, every_n_steps=1, at_end=True, in_background=True),
        ModelStateExport(raw, every_n_steps=1, at_end=True, averages=False, in_background=True),
    ]
    trainer = mesh_trainer(degrees, {}, max_epochs=2, callbacks=[EMAWeightAveraging(decay=0.5), *exports])
    module = seeded(Stepping)
    trainer.fit(module, loader_of(trainer))
    first, second = module.after_steps
    equal(read_export(averaged / "step-1"), first)
    equal(read_export(raw / "step-1"), first)
    equal(read_export(raw / "step-2"), second)
    equal(read_export(raw), second)
    mean = {name: (first[name] + second[name]) / 2 for name in first}
    for folder in (averaged / "step-2", averaged):
        torch.testing.assert_close(read_export(folder), mean, **CLOSE)
    torch.testing.assert_close(full_state(module), mean, **CLOSE)


def test_the_best_export_has_the_averages_of_its_checkpoint(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "kept", monitor="score", mode="max")
    exports = [
        ModelStateExport(tmp_path / "by_checkpoint", on_best=checkpoint),
        ModelStateExport(tmp_path / "by_metric", on_best="score", mode="max"),
    ]
    module, _ = recording([1.0, 3.0, 2.0])
    callbacks = [EMAWeightAveraging(decay=0.5), *exports, checkpoint]
    trainer = plain_trainer(strategy=D9DStrategy(), max_epochs=3, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(module, loader_of(trainer), loader_of(trainer))
    kept = read_checkpoint(checkpoint.best_model_path)
    assert not torch.equal(kept["state_dict"]["head.weight"], kept["current_model_state"]["head.weight"])
    for folder in ("by_checkpoint", "by_metric"):
        equal(read_export(tmp_path / folder / "best"), kept["state_dict"])


def test_an_exception_gives_up_what_is_not_complete(tmp_path):
    class Failing(Trained):
        def on_train_epoch_start(self):
            if self.current_epoch == 2:
                raise KeyError("no third epoch")

    export = ModelStateExport(tmp_path, every_n_steps=1, in_background=True)
    trainer = one_trainer({}, max_epochs=4, callbacks=[export])
    with pytest.raises(KeyError, match="no third epoch"):
        trainer.fit(seeded(Failing), loader_of(trainer))
    assert list((tmp_path / "step-1").glob("*.safetensors"))
    assert not list((tmp_path / "step-2").glob("*"))


def test_averages_of_lightning_are_not_exported_in_silence(tmp_path):
    callbacks = [WeightAveraging(), ModelStateExport(tmp_path, every_n_steps=1)]
    trainer = one_trainer({}, callbacks=callbacks)
    with pytest.warns(UserWarning, match=r"not the averages of Lightning's WeightAveraging\. EMAWeightAveraging"):
        trainer.fit(seeded(Trained), loader_of(trainer))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every_n_steps": 0}, "every_n_steps"),
        ({"on_best": ModelCheckpoint()}, "without monitor"),
        ({"mode": "best"}, "mode"),
    ],
)
def test_bad_options_of_the_callback(options, message, tmp_path):
    with pytest.raises(ValueError, match=f"ModelStateExport: .*{message}"):
        ModelStateExport(tmp_path, **options)


def test_the_callback_needs_the_strategy(tmp_path):
    trainer = plain_trainer(callbacks=[ModelStateExport(tmp_path)])
    with pytest.raises(TypeError, match=r"ModelStateExport needs Trainer\(strategy=D9DStrategy"):
        trainer.fit(Trained(), rank_loader(make_samples(BATCH), BATCH, 0, 1))
