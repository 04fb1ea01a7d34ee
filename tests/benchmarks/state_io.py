"""Model states in and out against what else reads the same data, in one run.

Run: torchrun --nproc-per-node 2 -m tests.benchmarks.state_io [--mib 512] [--rounds 5] [--tensors 20000] [--dir /tmp]

Queries, keys and values in shards of safetensors are joined in one parameter a layer, sharded over all ranks:

- ours: `load_model_state`,
- (a) `safetensors.torch.load_file` of each file, concatenation, slicing,
- (b) `torch.distributed.checkpoint`, loading the joined parameters from a checkpoint of its own,
- (c) preadv of the very bytes into the memory of the parameters: what the machine can do.

All with a warm page cache, into memory that is there already. Then the anonymous memory that loading takes, the bytes that a
rank reads, export against (d) writing the bytes of each shard to a file of its own, and what 20,000 tiny tensors cost.
"""

import argparse
import itertools
import json
import os
import shutil
import statistics
import struct
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from d9d.core.placement import local_tensor
from d9d.model_state.io import load_model_state, open_model_state, save_model_state, write_model_state_local
from d9d.model_state.io.boxes import local_boxes
from d9d.model_state.io.load import fill_model
from d9d.model_state.io.load_plan import plan_load
from d9d.model_state.io.model_tensors import Kept
from d9d.model_state.io.source import ModelStateSource, TensorInfo
from d9d.model_state.mapper.base import ModelStateMapper
from d9d.model_state.mapper.compose import ModelStateMapperParallel
from d9d.model_state.mapper.leaf import ModelStateMapperConcatenateTensors, ModelStateMapperRename
from d9d.model_state.mapper.pieces import Box

HIDDEN = 2048
PARTS = "qkv"
LAYER_BYTES = len(PARTS) * HIDDEN * HIDDEN * 4
LAYERS_PER_FILE = 5
MIB = 2**20


class CountingSource(ModelStateSource):
    """Counts the bytes that are asked for."""

    def __init__(self, source: ModelStateSource) -> None:
        self._source = source
        self.num_bytes = 0

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._source.tensors

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        values = self._source.read(name, box)
        self.num_bytes += values.nbytes
        return values

    def close(self) -> None:
        self._source.close()


def write_checkpoint(directory: Path, num_layers: int) -> None:
    """Write a model state in shards, as other tools do."""
    directory.mkdir()
    weight_map: dict[str, str] = {}
    for number, first in enumerate(range(0, num_layers, LAYERS_PER_FILE)):
        layers = range(first, min(first + LAYERS_PER_FILE, num_layers))
        names = [f"model.{layer}.{part}" for layer in layers for part in PARTS]
        save_file({name: torch.randn(HIDDEN, HIDDEN) for name in names}, directory / f"{number}.safetensors")
        weight_map.update(dict.fromkeys(names, f"{number}.safetensors"))
    index = {"metadata": {"total_size": num_layers * LAYER_BYTES}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def build_mapper(num_layers: int) -> ModelStateMapper:
    return ModelStateMapperParallel(
        [
            ModelStateMapperConcatenateTensors(
                [f"model.{layer}.{part}" for part in PARTS], f"layer{layer}", 0, sizes=[HIDDEN] * len(PARTS)
            )
            for layer in range(num_layers)
        ]
    )


def build_model(num_layers: int, mesh: DeviceMesh) -> nn.Module:
    """Return a model of fused parameters, sharded over all ranks, in memory that has been written to."""
    model = nn.Module()
    for layer in range(num_layers):
        rows = len(PARTS) * HIDDEN
        local = torch.ones(len(torch.arange(rows).tensor_split(mesh.size())[mesh.get_local_rank()]), HIDDEN)
        tensor = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size([rows, HIDDEN]), stride=(HIDDEN, 1)
        )
        model.register_parameter(f"layer{layer}", nn.Parameter(tensor))
    return model


def load_by_concatenation(directory: Path, model: nn.Module) -> None:
    """(a) Load each file, join the parts of its layers and take the slice."""
    for path in sorted(directory.glob("*.safetensors")):
        tensors = load_file(path)
        for layer in sorted({name.split(".")[1] for name in tensors}, key=int):
            parameter = model.get_parameter(f"layer{layer}")
            joined = torch.cat([tensors[f"model.{layer}.{part}"] for part in PARTS])
            local_tensor(parameter).detach().copy_(joined[local_boxes(parameter)[0].box.slices])


def read_ranges(directory: Path, model: nn.Module) -> list[tuple[int, memoryview, int]]:
    """Return for each range of bytes that this rank needs the file, the memory it goes to and its offset."""
    ranges: list[tuple[int, memoryview, int]] = []
    for path in sorted(directory.glob("*.safetensors")):
        file = os.open(path, os.O_RDONLY)
        (length,) = struct.unpack("<Q", os.pread(file, 8, 0))
        for name, entry in json.loads(os.pread(file, length, 8)).items():
            if name == "__metadata__":
                continue
            _, layer, part = name.split(".")
            parameter = model.get_parameter(f"layer{layer}")
            box = local_boxes(parameter)[0].box
            first_row = PARTS.index(part) * HIDDEN
            begin = max(box.start[0], first_row)
            end = min(box.start[0] + box.shape[0], first_row + HIDDEN)
            if begin < end:
                memory = local_tensor(parameter).detach()[begin - box.start[0] : end - box.start[0]].numpy()
                offset = 8 + length + entry["data_offsets"][0] + (begin - first_row) * HIDDEN * 4
                ranges.append((file, memoryview(memory).cast("B"), offset))
    return ranges


def read_raw(ranges: list[tuple[int, memoryview, int]]) -> None:
    """(c) Read ranges of files into memory."""
    for file, memory, offset in ranges:
        done = 0
        while done < len(memory):
            done += os.preadv(file, [memory[done:]], offset + done)


def time_all(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Let variants take turns, and return the seconds of the slowest rank in each round."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        names = list(runs) if number % 2 else list(runs)[::-1]
        for name in names:
            dist.barrier()
            start = time.perf_counter()
            runs[name]()
            seconds = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            # The first round warms caches.
            if number:
                times[name].append(seconds.item())
    return times


def anonymous_bytes() -> int:
    """Return the memory of this process that is not backed by files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not tell RssAnon")


@contextmanager
def watched_memory(most: list[int]) -> Generator[None]:
    """Append the most anonymous memory that the block takes beyond what there is."""
    before, stop, seen = anonymous_bytes(), threading.Event(), [0]

    def watch() -> None:
        while not stop.wait(0.002):
            seen[0] = max(seen[0], anonymous_bytes() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        most.append(max(seen[0], anonymous_bytes() - before))


def compare_loading(root: Path, mesh: DeviceMesh, arguments: argparse.Namespace) -> None:
    num_layers = max(1, arguments.mib * MIB // LAYER_BYTES)
    total = num_layers * LAYER_BYTES
    directory = root / "sharded"
    if mesh.get_rank() == 0:
        write_checkpoint(directory, num_layers)
    dist.barrier()
    mapper, model = build_mapper(num_layers), build_model(num_layers, mesh)
    ours = lambda: load_model_state(directory, mapper, "cpu", model, show_progress=False)  # noqa: E731
    most: list[int] = []
    with watched_memory(most):
        ours()
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    dcp.save(state, checkpoint_id=root / "dcp")
    expected = {name: local_tensor(value).clone() for name, value in state.items()}
    ranges = read_ranges(directory, model)
    runs = {
        "ours": ours,
        "(a) load_file, cat, slice": lambda: load_by_concatenation(directory, model),
        "(b) distributed checkpoint": lambda: dcp.load(state, checkpoint_id=root / "dcp"),
        "(c) preadv": lambda: read_raw(ranges),
    }
    for name, run in runs.items():
        for value in state.values():
            local_tensor(value).zero_()
        run()
        if not all(torch.equal(local_tensor(value), expected[name]) for name, value in state.items()):
            raise RuntimeError(f"{name} has read something else")
    times = time_all(runs, arguments.rounds)
    with open_model_state(directory) as opened:
        source = CountingSource(opened)
        fill_model(source, mapper, torch.device("cpu"), plan_load(source, mapper, model, Kept(), "the state"))
    share = source.num_bytes * mesh.size() / total
    if mesh.get_rank() == 0:
        print(f"{total / MIB:.0f} MiB on {mesh.size()} processes, seconds of the slowest:")
        for name, seconds in times.items():
            median = statistics.median(seconds)
            faster = statistics.median(other / mine for other, mine in zip(seconds, times["ours"], strict=True))
            print(
                f"  {name}: {median:.3f} s [{min(seconds):.3f} .. {max(seconds):.3f}], "
                f"{total / mesh.size() / median / 1e9:.1f} GB/s each; ours is {faster:.2f} x as fast, "
                f"{min(seconds) / min(times['ours']):.2f} x in the best rounds"
            )
        print(f"  anonymous memory beyond the model: {most[0] / MIB:.1f} MiB; bytes read: {share:.3f} of the share")
    for file in {file for file, _, _ in ranges}:
        os.close(file)
    compare_export(root, mesh, mapper.inverse(), model, arguments.rounds)


def write_raw(path: Path, model: nn.Module) -> None:
    """(d) Write the shards of this rank to a file, wait until it is on disk, and let it take the place of an older one."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("xb", buffering=0) as file:
        for parameter in model.parameters():
            content = memoryview(local_tensor(parameter).detach().numpy()).cast("B")
            while content:
                content = content[file.write(content) :]
        os.fsync(file.fileno())
    temporary.replace(path)


def compare_export(root: Path, mesh: DeviceMesh, mapper: ModelStateMapper, model: nn.Module, rounds: int) -> None:
    runs = {
        "export": lambda: save_model_state(root / "export", mapper, model, show_progress=False),
        "(d) write": lambda: write_raw(root / f"raw{mesh.get_rank()}", model),
    }
    total = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    times = time_all(runs, rounds)
    most: list[int] = []
    with watched_memory(most):
        runs["export"]()
    if mesh.get_rank() == 0:
        export, raw = times.values()
        ratio = statistics.median(other / mine for other, mine in zip(raw, export, strict=True))
        speeds = [total / statistics.median(seconds) / 1e9 for seconds in (export, raw)]
        print(
            f"  export: {statistics.median(export):.3f} s [{min(export):.3f} .. {max(export):.3f}], {speeds[0]:.2f} GB/s, with "
            f"{most[0] / MIB:.1f} MiB of anonymous memory; (d) writing each shard to a file of its own: {speeds[1]:.2f} GB/s; "
            f"export is {ratio:.2f} x as fast, {min(raw) / min(export):.2f} x in the best rounds"
        )


def time_many_tensors(root: Path, num_tensors: int) -> None:
    """Print on rank 0 what tiny tensors cost on one process: building the graph, loading, writing."""
    directory = root / "many"
    directory.mkdir()
    save_file({f"w{index}": torch.ones(2) for index in range(num_tensors)}, directory / "model.safetensors")
    model = nn.Module()
    for index in range(num_tensors):
        model.register_buffer(f"b{index}", torch.zeros(2))
    times, start = [time.process_time()], time.perf_counter()
    mapper = ModelStateMapperParallel([ModelStateMapperRename(f"w{i}", f"b{i}") for i in range(num_tensors)])
    times.append(time.process_time())
    load_model_state(directory, mapper, "cpu", model, show_progress=False)
    times.append(time.process_time())
    write_model_state_local(root / "many_export", mapper.inverse(), model.state_dict().items(), show_progress=False)
    times.append(time.process_time())
    build, load, write = (end - start for start, end in itertools.pairwise(times))
    print(
        f"{num_tensors} tensors of 8 bytes, seconds of CPU time: graph {build:.2f}, load {load:.2f}, write {write:.2f}, "
        f"together {times[-1] - times[0]:.2f}, in {time.perf_counter() - start:.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tensors", type=int, default=20_000)
    parser.add_argument("--dir", type=Path, default=None, help="where the files go; they are removed afterwards")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shared: list[object] = [tempfile.mkdtemp(dir=arguments.dir) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    root = Path(str(shared[0]))
    try:
        with torch.no_grad():
            compare_loading(root, mesh, arguments)
            dist.barrier()
            if arguments.tensors and dist.get_rank() == 0:
                time_many_tensors(root, arguments.tensors)
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(root, ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
