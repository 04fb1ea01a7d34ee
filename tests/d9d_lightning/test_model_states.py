"""Model states of a LightningModule: loaded and exported on every mesh, against the safetensors library and plain torch."""

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.cli import LightningCLI
from safetensors.torch import load_file, save_file
from torch import nn

from d9d.model_state.mapper import ModelStateMapper, StateGroup
from d9d.model_state.mapper.compose import ModelStateMapperParallel, ModelStateMapperSequential
from d9d.model_state.mapper.leaf import (
    ModelStateMapperConcatenateTensors,
    ModelStateMapperIdentity,
    ModelStateMapperRename,
    ModelStateMapperTranspose,
)
from d9d_lightning import D9DStrategy
from d9d_lightning.callbacks import ModelStateExport
from d9d_lightning.model_states.stage_parts import part_to_export, part_to_load
from tests.d9d_lightning.support import (
    NUM_FEATURES,
    build_trainer,
    full_state,
    make_samples,
    plain_trainer,
    rank_loader,
    seeded,
)
from tests.d9d_lightning.test_pipeline_parity import WIDTH, Stack

NUM_LAYERS = 4
BATCH = 8
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
ROWS = (3, WIDTH - 3)
"""Rows of the two tensors that are one weight in the module."""

STAGES = {"pipeline_module": "model", "microbatches": 2}
SPLIT = {"parallelize": {"model.*.inner.0": "colwise_gather"}}
MESHES = {
    2: [
        ({"data_parallel_replicate": 2}, {}),
        ({"data_parallel_shard": 2}, {}),
        ({"tensor_parallel": 2}, SPLIT),
        ({"pipeline_parallel": 2}, STAGES),
    ],
    4: [
        ({"data_parallel_replicate": 2, "data_parallel_shard": 2}, {}),
        ({"data_parallel_shard": 2, "tensor_parallel": 2}, SPLIT),
        ({"pipeline_parallel": 2, "data_parallel_shard": 2}, {**STAGES, "schedule": "interleaved"}),
    ],
}


class Trained(Stack):
    """One step of plain gradient descent."""

    def predict_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def foreign_tensors():
    """A model state in another layout, with a value of its own everywhere."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tensors = {"embed.T": draw(NUM_FEATURES, WIDTH), "embed.b": draw(WIDTH), "scale": draw()}
    tensors |= {"head.weight": draw(1, WIDTH), "head.bias": draw(1)}
    for layer in range(NUM_LAYERS):
        tensors |= {f"layers.{layer}.{name}": draw(rows, WIDTH) for name, rows in zip("ab", ROWS, strict=True)}
        tensors[f"layers.{layer}.bias"] = draw(WIDTH)
    return tensors


def own_tensors(foreign):
    """The same in the layout of the module, by torch's own functions."""
    own = {"embed.weight": foreign["embed.T"].T, "embed.bias": foreign["embed.b"], "temperature": foreign["scale"]}
    own |= {name: foreign[name] for name in ("head.weight", "head.bias")}
    for layer in range(NUM_LAYERS):
        parts = [foreign[f"layers.{layer}.{name}"] for name in "ab"]
        own[f"model.{layer}.inner.0.weight"] = torch.cat(parts)
        own[f"model.{layer}.inner.0.bias"] = foreign[f"layers.{layer}.bias"]
    return own


def load_mapper(module) -> ModelStateMapper:  # the command line asks for it
    mappers = [
        ModelStateMapperSequential(
            [ModelStateMapperRename("embed.T", "embed.weight"), ModelStateMapperTranspose("embed.weight", (0, 1))]
        ),
        ModelStateMapperRename("embed.b", "embed.bias"),
        ModelStateMapperRename("scale", "temperature"),
        ModelStateMapperIdentity("head.weight"),
        ModelStateMapperIdentity("head.bias"),
    ]
    # The module is whole here, also where it will be cut.
    for layer in range(len([block.inner[0].weight for block in module.model])):
        name = f"model.{layer}.inner.0"
        sources = [f"layers.{layer}.{part}" for part in "ab"]
        mappers += [
            ModelStateMapperConcatenateTensors(sources, f"{name}.weight", 0, sizes=list(ROWS)),
            ModelStateMapperRename(f"layers.{layer}.bias", f"{name}.bias"),
        ]
    return ModelStateMapperParallel(mappers)


def write_source(folder, tensors):
    """Two files with an index, on rank 0; the other ranks wait."""
    is_distributed = dist.is_initialized()
    if not is_distributed or dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
        names = sorted(tensors)
        halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
        for file, part in halves.items():
            save_file({name: tensors[name].contiguous() for name in part}, folder / file)
        weight_map = {name: file for file, part in halves.items() for name in part}
        text = str({"metadata": {"total_size": 0}, "weight_map": weight_map}).replace("'", '"')
        (folder / "model.safetensors.index.json").write_text(text)
    if is_distributed:
        dist.barrier()
    return folder


def read_export(folder):
    files = sorted(folder.glob("*.safetensors"))
    loaded = [load_file(file) for file in files]
    assert sum(map(len, loaded)) == len({name for part in loaded for name in part})
    return {name: tensor for part in loaded for name, tensor in part.items()}


def loader_of(trainer, num_samples=BATCH):
    strategy = trainer.strategy
    return rank_loader(
        make_samples(num_samples), BATCH, strategy.distributed_sampler_kwargs["rank"], strategy.mesh.data_parallel
    )


def one_trainer(options, **trainer_options):
    return plain_trainer(strategy=D9DStrategy(**options), **trainer_options)


def mesh_trainer(mesh, options, **trainer_options):
    return build_trainer(mesh, strategy_options=options, **trainer_options)


def own_part(module, expected):
    return {name: expected[name] for name in module.state_dict()}


def equal(tensors, expected):
    torch.testing.assert_close(tensors, expected, rtol=0, atol=0)


def check_round_trip(folder, make_trainer):
    """Untrained weights go in and out without a change."""
    foreign = foreign_tensors()
    source = write_source(folder / "source", foreign)
    trainer = make_trainer({"source_checkpoint": str(source), "load_mapper": load_mapper})
    module = seeded(Trained, seed=1)
    trainer.predict(module, loader_of(trainer), return_predictions=False)
    equal(full_state(module), own_part(module, own_tensors(foreign)))
    trainer.strategy.export_model_state(folder / "exported")
    equal(read_export(folder / "exported"), foreign)
    own_layout = ModelStateMapperParallel([ModelStateMapperIdentity(name) for name in own_tensors(foreign)])
    trainer.strategy.export_model_state(folder / "own", own_layout, shard_size_gb=1e-6)
    equal(read_export(folder / "own"), own_tensors(foreign))


def trained(tensors):
    """What plain torch makes of weights in one step."""
    module = seeded(Trained)
    module.load_state_dict(tensors)
    module.loss(make_samples(BATCH)).backward()
    with torch.no_grad():
        return {name: parameter - 0.1 * parameter.grad for name, parameter in module.named_parameters()}


def check_training(folder, make_trainer):
    """What is exported after a step is what plain torch has after it."""
    foreign = foreign_tensors()
    source = write_source(folder / "source", foreign)
    trainer = make_trainer(
        {"source_checkpoint": source, "load_mapper": load_mapper}, callbacks=[ModelStateExport(folder / "exported")]
    )
    module = seeded(Trained, seed=2)
    trainer.fit(module, loader_of(trainer))
    exported = own_tensors(read_export(folder / "exported"))
    torch.testing.assert_close(exported, trained(own_tensors(foreign)), **CLOSE)
    assert (exported["embed.weight"] - own_tensors(foreign)["embed.weight"]).abs().max() > 1e-6


def test_round_trip_on_one_process(tmp_path):
    check_round_trip(tmp_path, one_trainer)


def test_training_on_one_process(tmp_path):
    check_training(tmp_path, one_trainer)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("mesh", "options"), MESHES[2], ids=str)
def test_two_ranks(mesh, options, tmp_path):
    def make_trainer(more, **trainer_options):
        return mesh_trainer(mesh, {**options, **more}, **trainer_options)

    check_round_trip(tmp_path, make_trainer)
    dist.barrier()
    check_training(tmp_path, make_trainer)


@pytest.mark.world_size(4)
@pytest.mark.parametrize(("mesh", "options"), MESHES[4], ids=str)
def test_four_ranks(mesh, options, tmp_path):
    def make_trainer(more, **trainer_options):
        return mesh_trainer(mesh, {**options, **more}, **trainer_options)

    check_round_trip(tmp_path, make_trainer)
    dist.barrier()
    check_training(tmp_path, make_trainer)


class OnMeta(Trained):
    """Has no memory before the strategy gives it some."""

    def __init__(self):
        super().__init__()
        self.frozen_scale = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)

    def reset_parameters(self):
        for module in (self.embed, self.head, *(block.inner[0] for block in self.model)):
            module.reset_parameters()
        nn.init.ones_(self.temperature)
        nn.init.ones_(self.frozen_scale)


@pytest.mark.world_size(2)
def test_a_module_on_meta_loads_what_the_source_has(tmp_path):
    own = own_tensors(foreign_tensors())
    source = write_source(tmp_path / "source", own)
    with torch.device("meta"):
        module = OnMeta().to(torch.float64)
    trainer = mesh_trainer(
        {"data_parallel_shard": 2},
        {"source_checkpoint": source, "load_mapper": lambda _: _identity(own), "keep_initial": ["frozen_*"]},
    )
    trainer.validate(module, loader_of(trainer), verbose=False)
    expected = {**own, "frozen_scale": torch.ones(2, dtype=torch.float64)}
    equal(full_state(module), own_part(module, expected))
    trainer.strategy.export_model_state(tmp_path / "exported")
    equal(read_export(tmp_path / "exported"), expected)  # also what the source did not have


@pytest.mark.world_size(2)
@pytest.mark.parametrize("degrees", [{"data_parallel_shard": 2}, {"pipeline_parallel": 2}], ids=str)
def test_what_the_source_sets_needs_no_initialisation(degrees, tmp_path):
    source = write_source(tmp_path / "source", foreign_tensors())
    with torch.device("meta"):
        module = Trained().to(torch.float64)
    options = STAGES if "pipeline_parallel" in degrees else {}
    trainer = mesh_trainer(degrees, {**options, "source_checkpoint": source, "load_mapper": load_mapper})
    trainer.validate(module, loader_of(trainer), verbose=False)
    equal(full_state(module), own_part(module, own_tensors(foreign_tensors())))


@pytest.mark.world_size(4)
def test_one_replica_reads_for_the_others(tmp_path):
    """Each replica has files with other values, and all get those of the first."""
    replica = dist.get_rank() // 2
    tensors = {name: (tensor + replica).contiguous() for name, tensor in own_tensors(foreign_tensors()).items()}
    source = tmp_path / str(dist.get_rank())
    source.mkdir(parents=True)
    save_file(tensors, source / "model.safetensors")
    module = seeded(Trained)
    trainer = mesh_trainer(
        {"data_parallel_replicate": 2, "data_parallel_shard": 2},
        {"source_checkpoint": source, "load_mode": "broadcast"},
    )
    trainer.validate(module, loader_of(trainer), verbose=False)
    expected, loaded = own_tensors(foreign_tensors()), full_state(module)
    equal(loaded.pop("temperature"), expected.pop("temperature") + replica)  # plain: read by all
    equal(loaded, expected)


@pytest.mark.world_size(2)
def test_what_nothing_sets_is_named(tmp_path):
    own = own_tensors(foreign_tensors())
    source = write_source(tmp_path / "source", own)
    with torch.device("meta"):
        module = OnMeta().to(torch.float64)
    module.reset_parameters = None
    options = {"source_checkpoint": source, "load_mapper": lambda _: _identity(own), "keep_initial": ["frozen_*"]}
    trainer = mesh_trainer({"data_parallel_shard": 2}, options)
    with pytest.raises(TypeError, match=r"no source sets: frozen_scale\."):
        trainer.validate(module, loader_of(trainer), verbose=False)


def _identity(names):
    return ModelStateMapperParallel([ModelStateMapperIdentity(name) for name in names])


class Tied(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def predict_step(self, batch, batch_idx):
        return self.head(self.embed.weight)


@pytest.mark.parametrize("names", [["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]], ids=str)
def test_a_tied_weight_is_loaded_from_either_of_its_names(names, tmp_path):
    weight = torch.arange(15.0).view(5, 3)
    save_file({name: weight.clone() for name in names}, tmp_path / "model.safetensors")
    module = Tied()
    trainer = one_trainer({"source_checkpoint": tmp_path})
    trainer.predict(module, loader_of(trainer), return_predictions=False)
    equal(module.embed.weight.data, weight)
    assert module.head.weight is module.embed.weight
    trainer.strategy.export_model_state(tmp_path / "exported")
    equal(read_export(tmp_path / "exported"), {"embed.weight": weight, "head.weight": weight})


def test_a_tied_weight_with_two_values_is_refused(tmp_path):
    weight = torch.arange(15.0).view(5, 3)
    save_file({"embed.weight": weight, "head.weight": weight + 1}, tmp_path / "model.safetensors")
    trainer = one_trainer({"source_checkpoint": tmp_path})
    with pytest.raises(ValueError, match=r"head\.weight"):
        trainer.predict(Tied(), loader_of(trainer), return_predictions=False)


# What is refused


def test_problems_come_when_the_trainer_is_constructed(tmp_path):
    (tmp_path / "llama").mkdir()
    with pytest.raises(ValueError, match=r"source_checkpoint .*lama\) does not exist \(nearest: 'llama'\)"):
        one_trainer({"source_checkpoint": tmp_path / "lama"})
    with pytest.raises(ValueError, match=r"source_checkpoint .*holds no model state: expected"):
        one_trainer({"source_checkpoint": tmp_path / "llama"})
    with pytest.raises(ValueError, match="cannot run as it is configured") as caught:
        one_trainer({"load_mapper": load_mapper, "keep_initial": "head.*", "microbatches": 0})
    for part in (
        "load_mapper has no effect",
        "keep_initial has no effect",
        "must be a list of patterns",
        "microbatches",
    ):
        assert part in str(caught.value)
    with pytest.raises(ValueError, match=r"export_mapper \('mapper'\) must be a ModelStateMapper, or a function"):
        one_trainer({"export_mapper": "mapper"})


def test_a_function_must_return_a_mapper(tmp_path):
    source = write_source(tmp_path / "source", foreign_tensors())
    trainer = one_trainer({"source_checkpoint": source, "load_mapper": lambda _: None})
    with pytest.raises(TypeError, match="load_mapper has returned None for Trained"):
        trainer.validate(seeded(Trained), loader_of(trainer))


def test_exports_need_the_processes_of_the_job(tmp_path):
    strategy = D9DStrategy({"data_parallel_shard": 2})
    plain_trainer(strategy=strategy, devices=2)
    with pytest.raises(RuntimeError, match="during or after a run"):
        strategy.export_model_state(tmp_path)


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("mesh", "options"), MESHES[2], ids=str)
def test_a_failure_of_one_rank_is_raised_on_all(mesh, options, tmp_path):
    own = own_tensors(foreign_tensors())
    source = write_source(tmp_path / "source", own)

    def for_one_rank_only(module):
        # A name that the source lacks.
        return _identity([*own, "surplus"] if dist.get_rank() == 1 else own)

    trainer = mesh_trainer(mesh, {**options, "source_checkpoint": source, "load_mapper": for_one_rank_only})
    with pytest.raises(ValueError, match=r"(?s)on rank 1 of 2.*surplus"):
        trainer.validate(seeded(Trained), loader_of(trainer), verbose=False)
    trainer = mesh_trainer(mesh, options)
    trainer.validate(seeded(Trained), loader_of(trainer), verbose=False)
    with pytest.raises(ValueError, match=r"surplus"):
        trainer.strategy.export_model_state(tmp_path / "exported", for_one_rank_only(None))
    assert not list((tmp_path / "exported").glob("model*"))


class Normed(Trained):
    """With statistics that each rank takes from its own samples."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm1d(NUM_FEATURES) for _ in range(3)])

    def training_step(self, batch, batch_idx):
        x, y = batch
        for norm in self.norms:
            x = norm(x)
        return self.loss((x, y))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("mesh", [{"data_parallel_replicate": 2}, {"data_parallel_shard": 2}], ids=str)
def test_statistics_come_from_the_first_rank(mesh, tmp_path):
    trainer = mesh_trainer(mesh, {})
    module = seeded(Normed)
    trainer.fit(module, loader_of(trainer))
    expected = [{name: buffer.clone() for name, buffer in module.named_buffers()}]
    equals = torch.tensor(float(expected[0]["norms.0.running_mean"].sum()))
    dist.all_reduce(equals, op=dist.ReduceOp.SUM)
    assert equals != 2 * expected[0]["norms.0.running_mean"].sum()  # they do differ
    dist.broadcast_object_list(expected, src=0)
    trainer.strategy.export_model_state(tmp_path, shard_size_gb=1e-7)  # so that both ranks write
    exported = read_export(tmp_path)
    equal({name: exported[name] for name in expected[0]}, expected[0])


# Parts of stages


def outputs_of(mapper):
    return {name for group in mapper.state_dependency_groups() for name in group.outputs}


def test_a_rank_loads_the_groups_of_its_tensors():
    mapper = load_mapper(Trained())
    whole = set(own_tensors(foreign_tensors()))
    own = {"embed.weight", "model.1.inner.0.weight"}
    part = part_to_load(mapper, own, whole)
    assert outputs_of(part) == own
    inputs = {name for group in part.state_dependency_groups() for name in group.inputs}
    assert inputs == {"embed.T", "layers.1.a", "layers.1.b"}
    with pytest.raises(ValueError, match=r"does not have: 'embed\.bias' \(nearest: 'embed\.bia'\)"):
        part_to_load(mapper, own, whole - {"embed.bias"} | {"embed.bia"})


def test_each_group_is_exported_by_one_rank():
    mapper = load_mapper(Trained()).inverse()
    whole = sorted(own_tensors(foreign_tensors()))
    outside = [name for name in whole if not name.startswith("model.")]
    ranks = [
        [*outside, *(name for name in whole if name.startswith(("model.0", "model.1")))],
        [*outside, *(name for name in whole if name.startswith(("model.2", "model.3")))],
    ]
    first, last = (outputs_of(part_to_export(mapper, ranks, rank, last_rank=1)) for rank in range(2))
    assert first == {f"layers.{layer}.{part}" for layer in (0, 1) for part in ("a", "b", "bias")}
    assert last == set(foreign_tensors()) - first


def test_what_no_rank_can_export_is_refused():
    joined = ModelStateMapperConcatenateTensors(["model.0", "model.1"], "both", 0)
    with pytest.raises(ValueError, match=r"several pipeline stages together.*'model\.0', 'model\.1'"):
        part_to_export(joined, [["model.0"], ["model.1"]], 0, last_rank=1)
    with pytest.raises(ValueError, match=r"does not have: 'modl\.0' \(nearest: 'model\.0'\)"):
        part_to_export(ModelStateMapperIdentity("modl.0"), [["model.0"], ["model.1"]], 1, last_rank=1)


# Config files


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
def test_a_config_file_names_source_and_mapper(tmp_path):
    own = own_tensors(foreign_tensors())
    source = write_source(tmp_path / "source", foreign_tensors())
    config = tmp_path / "config.yaml"
    config.write_text(
        "trainer:\n"
        "  accelerator: cpu\n"
        "  logger: false\n"
        "  enable_checkpointing: false\n"
        "  enable_progress_bar: false\n"
        "  max_epochs: 1\n"
        "  callbacks:\n"
        "    class_path: d9d_lightning.callbacks.ModelStateExport\n"
        f"    init_args: {{dirpath: '{tmp_path}/exported', every_n_steps: 10, at_end: true}}\n"
        "  strategy:\n"
        "    class_path: d9d_lightning.D9DStrategy\n"
        "    init_args:\n"
        f"      source_checkpoint: {source}\n"
        "      load_mapper: tests.d9d_lightning.test_model_states.load_mapper\n"
    )
    cli = LightningCLI(
        Trained, run=False, args=[f"--config={config}"], save_config_callback=None, seed_everything_default=False
    )
    module = cli.model.to(torch.float64)
    cli.trainer.fit(module, rank_loader(make_samples(BATCH), BATCH, 0, 1))
    exported = own_tensors(read_export(tmp_path / "exported"))
    torch.testing.assert_close(exported, trained(own), **CLOSE)


class OneWay(ModelStateMapper):
    """Takes tensors as they are, and has no inverse."""

    def __init__(self, names):
        self._groups = frozenset(StateGroup(inputs=frozenset([name]), outputs=frozenset([name])) for name in names)

    def state_dependency_groups(self):
        return self._groups

    def apply(self, group):
        return group


def test_a_mapper_without_inverse_cannot_export(tmp_path):
    own = own_tensors(foreign_tensors())
    options = {"source_checkpoint": write_source(tmp_path / "source", own), "load_mapper": OneWay(own)}
    module = seeded(Trained)
    trainer = one_trainer(options)
    trainer.validate(module, loader_of(trainer), verbose=False)
    with pytest.raises(ValueError, match=r"layout of an export is not known.*no inverse.*export_mapper="):
        trainer.strategy.export_model_state(tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
    trainer = one_trainer(options, callbacks=[ModelStateExport(tmp_path / "exported")])
    fresh = seeded(Trained)
    with pytest.raises(ValueError, match="layout of an export is not known"):  # before it trains
        trainer.fit(fresh, loader_of(trainer))
    equal(full_state(fresh), own)
    given = one_trainer(options, callbacks=[ModelStateExport(tmp_path / "exported", mapper=_identity(own))])
    given.fit(fresh, loader_of(given))
    equal(read_export(tmp_path / "exported"), full_state(fresh))


@pytest.mark.world_size(2)
def test_a_mapper_without_inverse_in_one_stage(tmp_path):
    """A concatenation does not tell its parts without their sizes, also to the ranks that have not read them."""
    own = own_tensors(foreign_tensors())
    name = "model.0.inner.0.weight"
    foreign = {key: value for key, value in own.items() if key != name}
    foreign |= {"a": own[name][: ROWS[0]], "b": own[name][ROWS[0] :]}
    rest = _identity(own.keys() - {name})
    mapper = ModelStateMapperParallel([rest, ModelStateMapperConcatenateTensors(["a", "b"], name, 0)])
    source = write_source(tmp_path / "source", foreign)
    mesh, options = MESHES[2][3]
    trainer = mesh_trainer(mesh, {**options, "source_checkpoint": source, "load_mapper": mapper})
    module = seeded(Trained, seed=1)
    trainer.predict(module, loader_of(trainer), return_predictions=False)
    equal(full_state(module), own_part(module, own))
    with pytest.raises(ValueError, match=r"on ranks 0, 1 of 2: The layout of an export is not known.*sizes"):
        trainer.strategy.export_model_state(tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
