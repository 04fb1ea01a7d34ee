"""Zephon's own pipelines feed a job, and resume on another number of ranks with the same microbatches in each step."""

import json
from functools import partial

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from d9d.core.dist_context import DeviceMeshParameters
from d9d.dataset.zephon import pipeline_identity
from d9d.loop.component import DataParallelMicrobatchPackStream, DirectDevicePackStream, build_device_pack_stream
from d9d.loop.control import InitializeDataProviderContext
from d9d.loop.zephon_provider import ZephonConfig, ZephonDataProvider

zephon = pytest.importorskip("zephon")
options = pytest.importorskip("zephon.options")

LANES, PER_STEP = 4, 8
NUM_STEPS, SAVED_AT = 4, 2
NUM_SAMPLES, PER_SHARD = 96, 24
MESHES = {4: [{"data_parallel_replicate": 2, "tensor_parallel": 2}, {"data_parallel_shard": 4}], 2: [], 1: []}


def write_data(folder, num_shards=NUM_SAMPLES // PER_SHARD, changed=None):
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(num_shards):
        numbers = range(shard * PER_SHARD, (shard + 1) * PER_SHARD)
        lines = [
            json.dumps({"number": changed if changed is not None and number == 0 else number}) for number in numbers
        ]
        (folder / f"{shard}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def build(folder, seed=5, batch_size=2, chunk_size=4, prefetch=None, **extra):
    source = zephon.StaticMixtureWorkSource(
        datasets=[zephon.Dataset.from_path("numbers", str(folder))],
        mixture=zephon.MixtureSpec({"numbers": 1.0}),
        seed=seed,
        chunk_size=chunk_size,
        **extra,
    )
    pipeline = zephon.Pipeline(source)
    if prefetch is not None:
        pipeline = pipeline.prefetch(prefetch)
    return pipeline.batch(microbatch_size=batch_size).options(max_workers=1)


def numbers_of(batch):
    return tuple(record.payload["number"] for record in batch.records)


def config(folder, **values):
    own = {"lanes": LANES, "microbatches_per_step": PER_STEP, "run_id": "test", "timeout_s": 60}
    return ZephonConfig(**own, coordination="dir", location=str(folder / "rounds"), **values)


def stream_on(context, folder, *, data="data", **values):
    provider = ZephonDataProvider(partial(build, folder / data), config(folder, **values), numbers_of)
    return DataParallelMicrobatchPackStream(context, provider(InitializeDataProviderContext(dist_context=context)))


def steps_of(context, stream, num_steps):
    """Read steps, and return the microbatches of each over all data-parallel ranks, which do not have an order."""
    steps = []
    packs = iter(stream)
    for _ in range(num_steps):
        pack = next(packs)
        everywhere = [(context.dp_rank, pack)]
        if context.is_distributed:
            everywhere = [None] * context.world_size
            dist.all_gather_object(everywhere, (context.dp_rank, pack))
        by_rank = {}
        for rank, each in everywhere:
            assert by_rank.setdefault(rank, each) == each, "peers have read other samples"
        steps.append({microbatch for each in by_rank.values() for microbatch in each})
    return steps


def build_context(mesh):
    return DeviceMeshParameters(**mesh).build()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zephon")
    write_data(folder / "data")
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    """What Zephon alone reads on one process."""
    pipeline = build(folder / "data").options(canonical_replicas=LANES)
    batches = iter(pipeline)
    return [{numbers_of(next(batches)) for _ in range(PER_STEP)} for _ in range(NUM_STEPS)]


@pytest.mark.world_size(4)
def test_two_data_parallel_ranks_with_peers_save(folder, expected):
    context = build_context(MESHES[4][0])
    stream = stream_on(context, folder)
    assert steps_of(context, stream, SAVED_AT) == expected[:SAVED_AT]
    dcp.save({"data": stream.state_dict()}, checkpoint_id=folder / "saved")


def check_resume(mesh, folder, expected):
    context = build_context(mesh)
    stream = stream_on(context, folder)
    loaded = {"data": stream.state_dict()}
    dcp.load(loaded, checkpoint_id=folder / "saved", no_dist=not context.is_distributed)
    stream.load_state_dict(loaded["data"])
    assert steps_of(context, stream, NUM_STEPS - SAVED_AT) == expected[SAVED_AT:]


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    "mesh", [{"data_parallel_shard": 4}, {"pipeline_parallel": 2, "data_parallel_replicate": 2}], ids=str
)
def test_four_ranks_resume(mesh, folder, expected):
    check_resume(mesh, folder, expected)


@pytest.mark.world_size(2)
def test_two_ranks_resume(folder, expected):
    check_resume({"data_parallel_replicate": 2}, folder, expected)


def test_one_process_resumes(folder, expected):
    check_resume({}, folder, expected)


@pytest.mark.world_size(2)
def test_the_end_is_agreed(tmp_path, folder):
    """A source that ends leaves ranks with different numbers of batches: all of them stop behind the same step."""
    write_data(tmp_path / f"{dist.get_rank()}" / "data", num_shards=2)
    finite = partial(build, tmp_path / f"{dist.get_rank()}" / "data", stop_after_passes=1)
    context = build_context({"data_parallel_replicate": 2})
    provider = ZephonDataProvider(finite, config(folder), numbers_of)
    packs = list(provider(InitializeDataProviderContext(dist_context=context)))
    everywhere = [None] * 2
    dist.all_gather_object(everywhere, len(packs))
    assert everywhere == [2 * PER_SHARD // (2 * PER_STEP)] * 2


# ---- what Zephon itself lets pass ----------------------------------------------------------------------------------


def stream_of(rounds, **builder):
    context = build_context({})
    provider = ZephonDataProvider(partial(build, **builder), config(rounds), numbers_of)
    return provider(InitializeDataProviderContext(dist_context=context))


def test_other_data_are_refused(tmp_path):
    state = stream_of(tmp_path, folder=write_data(tmp_path / "data")).state_dict()
    stream_of(tmp_path, folder=write_data(tmp_path / "moved" / "elsewhere")).load_state_dict(state)
    for name, builder in {
        "seed": {"folder": tmp_path / "data", "seed": 6},
        "shards": {"folder": write_data(tmp_path / "edited", changed=7)},
        "order": {"folder": tmp_path / "data", "shuffle_within_shard": True},
        "operations": {"folder": tmp_path / "data", "batch_size": 3},
        "chunk_size": {"folder": tmp_path / "data", "chunk_size": 2},
    }.items():
        with pytest.raises(ValueError, match=rf"cannot resume.*Changed: .*{name} \(checkpoint: "):
            stream_of(tmp_path, **builder).load_state_dict(state)
    added = write_data(tmp_path / "added", num_shards=5)
    with pytest.raises(ValueError, match=r"Changed: shards"):
        stream_of(tmp_path, folder=added).load_state_dict(state)


@pytest.mark.parametrize(("before", "after"), [(None, 8), (8, 64), (64, None)])
def test_another_prefetch_resumes(tmp_path, folder, expected, before, after):
    saved, resumed = (stream_of(tmp_path, folder=folder / "data", prefetch=each) for each in (before, after))
    assert steps_of(build_context({}), saved, SAVED_AT) == expected[:SAVED_AT]
    resumed.load_state_dict(saved.state_dict())
    assert steps_of(build_context({}), resumed, NUM_STEPS - SAVED_AT) == expected[SAVED_AT:]


def test_operations_are_told_by_their_settings(folder):
    def doubled(payload):
        return payload

    source = build(folder / "data").ws
    pipeline = zephon.Pipeline(source).decode_text().map_transform(doubled).batch(microbatch_size=2)
    first, second, third, last = pipeline_identity(pipeline)["operations"].split(" | ")
    assert first == "fetch"
    assert second.startswith("decode_text encoding='utf-8'")
    assert f"transform_fn={__name__}.test_operations_are_told_by_their_settings.<locals>.doubled" in third
    assert last == "batch drop_last=True microbatch_size=2"


def test_all_problems_at_once(tmp_path):
    write_data(tmp_path / "data")

    def careless():
        return build(tmp_path / "data").options(prefetch_batch=2, canonical_replicas=8)

    provider = ZephonDataProvider(careless, config(tmp_path))
    with pytest.raises(ValueError, match=r"Unknown pipeline option 'prefetch_batch'.*sets canonical_replicas=8"):
        provider(InitializeDataProviderContext(dist_context=build_context({})))
    (problem,) = provider.mesh_problems(DeviceMeshParameters(data_parallel_replicate=3))
    assert "not a multiple of the 3 data-parallel ranks. Use one of 1, 2, 4 ranks" in problem


def test_configs():
    with pytest.raises(
        ValueError, match=r"microbatches_per_step \(6\) is not a multiple of lanes \(4\).*4 or 8 microb"
    ) as e:
        ZephonConfig(lanes=4, microbatches_per_step=6, run_id="a", coordination="dir")
    assert "'dir' needs a location" in str(e.value)
    with pytest.raises(ValueError, match="run_id"):
        ZephonConfig(lanes=4, microbatches_per_step=8)


def test_data_that_end_too_early(tmp_path):
    finite = partial(build, write_data(tmp_path / "data", num_shards=2), stop_after_passes=1)
    provider = ZephonDataProvider(finite, config(tmp_path, total_steps=5), numbers_of)
    with pytest.raises(RuntimeError, match="ended behind 3 of 5 steps"):
        list(provider(InitializeDataProviderContext(dist_context=build_context({}))))


def test_no_thread_asks_for_positions(folder):
    stream = stream_on(build_context({}), folder)
    assert isinstance(build_device_pack_stream(stream, "cpu", prefetch_factor=2), DirectDevicePackStream)


@pytest.mark.world_size(2)
def test_positions_by_a_store(folder, expected):
    context = build_context({"data_parallel_replicate": 2})
    # The pool has none, where torchrun has one.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
    ports = [None if store is None else store.port]
    dist.broadcast_object_list(ports, src=0)
    values = {"lanes": LANES, "microbatches_per_step": PER_STEP, "run_id": "by-store", "timeout_s": 30}
    values["location"] = f"torch://127.0.0.1:{ports[0]}"
    provider = ZephonDataProvider(partial(build, folder / "data"), ZephonConfig(**values), numbers_of)
    stream, resumed = (provider(InitializeDataProviderContext(dist_context=context)) for _ in range(2))
    assert steps_of(context, stream, SAVED_AT) == expected[:SAVED_AT]
    resumed.load_state_dict(stream.state_dict())
    assert steps_of(context, resumed, NUM_STEPS - SAVED_AT) == expected[SAVED_AT:]
