"""Names of strategies: what they mean, in Trainers, on command lines and in config files."""

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

import d9d_lightning
from d9d_lightning import D9DStrategy, DeviceMeshParameters
from d9d_lightning.registry import StrategyName
from tests.d9d_lightning.support import Regression, plain_trainer

# It warns of arguments that come from a program, as they do in tests.
pytestmark = pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")


@pytest.fixture(autouse=True)
def same_names_afterwards():
    known = dict(StrategyRegistry)
    yield
    StrategyRegistry.clear()
    StrategyRegistry.update(known)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("d9d", {"mesh": {"data_parallel_replicate": -1}}),
        ("fsdp", {"mesh": {"data_parallel_shard": -1}}),
        ("d9d_tp4", {"mesh": {"data_parallel_replicate": -1, "tensor_parallel": 4}}),
        ("d9d_rep2_fsdp", {"mesh": {"data_parallel_shard": -1, "data_parallel_replicate": 2}}),
        ("shard4_rep2", {"mesh": {"data_parallel_shard": 4, "data_parallel_replicate": 2}}),
        (
            "PP2_tp4_mb8",
            {
                "mesh": {"data_parallel_replicate": -1, "pipeline_parallel": 2, "tensor_parallel": 4},
                "microbatches": 8,
            },
        ),
        (
            "pp16_fsdp_zero_bubble_v",
            {"mesh": {"data_parallel_shard": -1, "pipeline_parallel": 16}, "schedule": "zero_bubble_v"},
        ),
        (
            "pp4_zero_bubble",
            {"mesh": {"data_parallel_replicate": -1, "pipeline_parallel": 4}, "schedule": "zero_bubble"},
        ),
        (
            "pp2_1f1b_mb4",
            {
                "mesh": {"data_parallel_replicate": -1, "pipeline_parallel": 2},
                "schedule": "1f1b",
                "microbatches": 4,
            },
        ),
    ],
)
def test_names(name, options):
    parsed = StrategyName.parse(name)
    assert parsed.options == options
    assert parsed.full == (name if name.startswith("d9d") else f"d9d_{name.lower()}")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("pp2_xp4", r"'xp4' is not understood.*pp<N>, rep<N>, shard<N>, tp<N>, mb<N>, fsdp and a schedule"),
        ("d9d_pp0", "'pp0' is not understood"),
        ("pp2_", "'' is not understood"),
        ("pp2x", "'pp2x' is not understood"),
        ("inference", "not understood"),
        ("pp2_zero_bubble_w", "'w' is not understood"),
        ("tp2_pp2_tp4", "one thing twice: tp"),
        ("gpipe_1f1b", "one thing twice: schedule"),
        ("shard2_fsdp", "one thing twice: fsdp beside shard"),
    ],
)
def test_names_that_mean_nothing(name, match):
    with pytest.raises(ValueError, match=match):
        d9d_lightning.register(name)


@pytest.mark.parametrize(
    ("name", "devices", "mesh"),
    [
        ("d9d", 1, {}),
        ("d9d", 4, {"data_parallel_replicate": 4}),
        ("d9d_fsdp", 4, {"data_parallel_shard": 4}),
        ("d9d_tp2", 8, {"tensor_parallel": 2, "data_parallel_replicate": 4}),
        ("d9d_tp8_fsdp", 8, {"tensor_parallel": 8}),
    ],
)
def test_known_from_the_start(name, devices, mesh):
    trainer = plain_trainer(strategy=name, devices=devices)
    assert isinstance(trainer.strategy, D9DStrategy)
    assert trainer.strategy.mesh == DeviceMeshParameters(**mesh)


def test_any_name_that_can_be_understood():
    strategy = plain_trainer(strategy="d9d_tp3_fsdp_mb2", devices=6).strategy
    assert strategy.mesh == DeviceMeshParameters(tensor_parallel=3, data_parallel_shard=2)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("d9d_tpp3", r"'tpp3' is not understood. A name is made of pp<N>, .* Did you mean 'tp3'\?"),
        ("d9d_fsdq", r"Did you mean 'fsdp'\?"),
        ("d9d_", "'' is not understood"),
        ("ddd", "invalid strategy name"),  # Lightning's own words
    ],
)
def test_names_that_a_trainer_refuses(name, match):
    with pytest.raises(ValueError, match=match):
        plain_trainer(strategy=name, devices=2)


def test_the_grid():
    names = {name for name in StrategyRegistry.available_strategies() if name.startswith("d9d")}
    assert len(names) == 4 * 4 * 2
    assert {"d9d", "d9d_fsdp", "d9d_pp2", "d9d_pp8_tp4", "d9d_pp4_tp2_fsdp"} <= names


def test_a_name_with_further_options():
    name = d9d_lightning.register("pp2_tp2_mb8_gpipe", pipeline_module="blocks")
    assert name == "d9d_pp2_tp2_mb8_gpipe"
    trainer = plain_trainer(strategy=name, devices=8)
    assert trainer.strategy.mesh == DeviceMeshParameters(
        pipeline_parallel=2, tensor_parallel=2, data_parallel_replicate=2
    )
    assert d9d_lightning.register("pp2_tp2_mb8_gpipe", pipeline_module="model") == name


PLAIN = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_checkpointing=false"]


def strategy_of(*arguments):
    cli = LightningCLI(
        Regression, run=False, args=[*PLAIN, *arguments], save_config_callback=None, seed_everything_default=False
    )
    return cli.trainer.strategy


def test_command_line_with_a_name():
    strategy = strategy_of("--trainer.strategy=d9d_tp2_fsdp", "--trainer.devices=4")
    assert strategy.mesh == DeviceMeshParameters(tensor_parallel=2, data_parallel_shard=2)


CLASS = "--trainer.strategy=d9d_lightning.D9DStrategy"


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        (["--trainer.strategy.mesh.data_parallel_shard=2"], {"data_parallel_shard": 2, "data_parallel_replicate": 1}),
        (
            ["--trainer.strategy.mesh.data_parallel_shard=2", "--trainer.strategy.mesh.data_parallel_replicate=2"],
            {"data_parallel_shard": 2, "data_parallel_replicate": 2},
        ),
        (
            ['--trainer.strategy.mesh={"data_parallel_shard": -1, "data_parallel_replicate": 2}'],
            {"data_parallel_shard": 2, "data_parallel_replicate": 2},
        ),
        (["--trainer.strategy.mesh.data_parallel_shard=-1"], {"data_parallel_shard": 4}),
        (["--trainer.strategy.mesh.data_parallel_shard=auto"], {"data_parallel_shard": 4}),
        (["--trainer.strategy.mesh=auto"], {"data_parallel_replicate": 4}),
    ],
)
def test_command_line_with_the_class(mesh, expected):
    mesh_expected = DeviceMeshParameters(**expected)
    strategy = strategy_of(CLASS, *mesh, f"--trainer.devices={mesh_expected.world_size}")
    assert strategy.mesh == mesh_expected


def test_command_line_takes_every_simple_option(tmp_path):
    strategy = strategy_of(
        CLASS,
        "--trainer.strategy.microbatches=4",
        "--trainer.strategy.schedule=gpipe",
        "--trainer.strategy.pipeline_module=model",
        "--trainer.strategy.launcher=fork",
        "--trainer.strategy.stages.balance=layers",
        "--trainer.strategy.timeout_s=60",
        "--trainer.strategy.parallelize={'blocks.*': 'shard'}",
        "--trainer.devices=2",
    )
    assert strategy.launcher.is_interactive_compatible


def test_config_files(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        "trainer:\n"
        "  devices: 4\n"
        "  strategy:\n"
        "    class_path: d9d_lightning.D9DStrategy\n"
        "    init_args:\n"
        "      mesh: {data_parallel_shard: -1, pipeline_parallel: 2}\n"
        "      pipeline_module: blocks\n"
        "      schedule: {schedule: 1f1b, num_stages_per_rank: 2, zero_bubble: true}\n"
        "      stages: {boundaries: [1, 2, 3]}\n"
        "      parallelize: {blocks.*: shard}\n"
    )
    strategy = strategy_of(f"--config={config}")
    assert strategy.mesh == DeviceMeshParameters(data_parallel_shard=2, pipeline_parallel=2)
