"""Which runs load a source checkpoint into a module, and which take it as it is."""

import copy
import logging

import pytest
import torch

from d9d_lightning import D9DStrategy
from d9d_lightning.model_states.used_modules import origin_of
from tests.d9d_lightning.support import full_state, make_samples, plain_trainer, rank_loader, seeded
from tests.d9d_lightning.test_model_states import (
    BATCH,
    CLOSE,
    MESHES,
    Trained,
    equal,
    foreign_tensors,
    loader_of,
    mesh_trainer,
    one_trainer,
    own_part,
    own_tensors,
    read_export,
    trained,
    write_source,
)

AS_FLOAT32 = {"rtol": 1e-6, "atol": 1e-6}
"""Lightning makes the module anew to load a checkpoint, in fp32."""


def check_order(folder, make_trainer):
    own = own_tensors(foreign_tensors())
    source = write_source(folder / "source", own)
    first = make_trainer({"source_checkpoint": source})
    module = seeded(Trained, seed=3)
    first.validate(module, loader_of(first), verbose=False)
    equal(full_state(module), own_part(module, own))
    first.fit(module, loader_of(first))
    expected = trained(own)
    torch.testing.assert_close(full_state(module), own_part(module, expected), **CLOSE)
    first.save_checkpoint(folder / "step.ckpt")
    # A module that has trained keeps its weights, whatever runs next.
    first.validate(module, loader_of(first), verbose=False)
    second = make_trainer({"source_checkpoint": source})
    second.validate(module, loader_of(second), verbose=False)
    torch.testing.assert_close(full_state(module), own_part(module, expected), **CLOSE)
    # A checkpoint is restored after the source is loaded.
    resumed = make_trainer({"source_checkpoint": source})
    other = seeded(Trained, seed=4)
    resumed.validate(other, loader_of(resumed), ckpt_path=folder / "step.ckpt", weights_only=True, verbose=False)
    torch.testing.assert_close(full_state(other), own_part(other, expected), **CLOSE)


def test_order_on_one_process(tmp_path):
    check_order(tmp_path, one_trainer)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("mesh", "options"), MESHES[2], ids=str)
def test_order_on_two_ranks(mesh, options, tmp_path):
    check_order(tmp_path, lambda more, **rest: mesh_trainer(mesh, {**options, **more}, **rest))


def test_a_fit_loads_after_an_evaluation_without_source(tmp_path):
    own = own_tensors(foreign_tensors())
    module = seeded(Trained, seed=3)
    plain = one_trainer({})
    plain.validate(module, loader_of(plain), verbose=False)
    trainer = one_trainer({"source_checkpoint": write_source(tmp_path / "source", own)})
    trainer.fit(module, loader_of(trainer))
    torch.testing.assert_close(full_state(module), trained(own), **CLOSE)


def check_training_without_source(folder, make_trainer):
    """A source takes the place of no training."""
    own = own_tensors(foreign_tensors())
    source = write_source(folder / "source", own)
    module = seeded(Trained, seed=3)
    plain = make_trainer({})
    plain.fit(module, loader_of(plain))
    expected = full_state(module)
    trainer = make_trainer({"source_checkpoint": source})
    trainer.validate(module, loader_of(trainer), verbose=False)
    equal(full_state(module), expected)
    with pytest.raises(
        ValueError, match=r"would overwrite what Trained has learnt.*Build the module anew.*leave source"
    ):
        trainer.fit(module, loader_of(trainer))
    equal(full_state(module), expected)


def test_a_module_trained_without_source_is_refused(tmp_path):
    check_training_without_source(tmp_path, one_trainer)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("mesh", "options"), MESHES[2][1::2], ids=str)
def test_a_module_trained_without_source_is_refused_on_two_ranks(mesh, options, tmp_path):
    check_training_without_source(tmp_path, lambda more, **rest: mesh_trainer(mesh, {**options, **more}, **rest))


def check_evaluation_of_a_checkpoint(folder, make_trainer):
    """After a fit the same Trainer evaluates a checkpoint as it is."""
    own = own_tensors(foreign_tensors())
    trainer = make_trainer({"source_checkpoint": write_source(folder / "source", own)})
    trainer.fit(seeded(Trained, seed=3), loader_of(trainer))
    trainer.save_checkpoint(folder / "step.ckpt")
    best = Trained.load_from_checkpoint(folder / "step.ckpt", weights_only=True).to(torch.float64)
    trainer.validate(best, loader_of(trainer), verbose=False)
    torch.testing.assert_close(full_state(best), own_part(best, trained(own)), **AS_FLOAT32)


def test_a_checkpoint_is_evaluated_after_a_fit(tmp_path):
    check_evaluation_of_a_checkpoint(tmp_path, one_trainer)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("mesh", "options"), MESHES[2][1::2], ids=str)
def test_a_checkpoint_is_evaluated_after_a_fit_on_two_ranks(mesh, options, tmp_path):
    check_evaluation_of_a_checkpoint(tmp_path, lambda more, **rest: mesh_trainer(mesh, {**options, **more}, **rest))


def test_a_checkpoint_is_evaluated_after_a_fit_in_child_processes(tmp_path):
    own = own_tensors(foreign_tensors())
    source = write_source(tmp_path / "source", own)
    strategy = D9DStrategy(source_checkpoint=source, launcher="fork")
    samples = rank_loader(make_samples(BATCH), BATCH, 0, 1)
    trainer = plain_trainer(strategy=strategy, devices=2)
    trainer.fit(seeded(Trained), samples)
    other = seeded(Trained, seed=6)
    expected = other.loss(make_samples(BATCH)).item()
    [scores] = trainer.validate(other, samples, verbose=False)
    assert scores["val_loss"] == pytest.approx(expected, rel=1e-6)


def test_a_copy_of_a_trained_module_keeps_its_weights(tmp_path):
    own = own_tensors(foreign_tensors())
    options = {"source_checkpoint": write_source(tmp_path / "source", own)}
    module = seeded(Trained)
    trainer = one_trainer(options)
    trainer.fit(module, loader_of(trainer))
    module.trainer = None
    clone = copy.deepcopy(module)
    trainer = one_trainer(options)
    trainer.validate(clone, loader_of(trainer), verbose=False)
    torch.testing.assert_close(full_state(clone), trained(own), **CLOSE)


def test_child_processes_hand_back_that_a_module_has_trained(tmp_path):
    own = own_tensors(foreign_tensors())
    source = write_source(tmp_path / "source", own)
    module = seeded(Trained)
    strategy = D9DStrategy(source_checkpoint=source, launcher="fork")
    samples = rank_loader(make_samples(BATCH), BATCH, 0, 1)
    trainer = plain_trainer(strategy=strategy, devices=2)
    trainer.fit(module, samples)  # both ranks read the same batch
    assert origin_of(module) == "loaded"
    torch.testing.assert_close(full_state(module), trained(own), **CLOSE)
    strategy.export_model_state(tmp_path / "exported")
    equal(read_export(tmp_path / "exported"), full_state(module))


def test_what_is_loaded_and_what_not_is_said_once(tmp_path, caplog):
    own = own_tensors(foreign_tensors())
    trainer = one_trainer({"source_checkpoint": write_source(tmp_path / "source", own)})
    module = seeded(Trained)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            trainer.validate(module, loader_of(trainer), verbose=False)
        trainer.validate(seeded(Trained), loader_of(trainer), verbose=False)
    for text in (
        "is loaded into Trained, in place of the weights that it has",
        "is not loaded: a run has used this module already",
        "is not loaded into Trained: the strategy has loaded it already, into another module",
    ):
        assert caplog.text.count(text) == 1
