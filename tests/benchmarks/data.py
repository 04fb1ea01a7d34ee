"""The elastic stream against PyTorch's loader, torchdata's and Zephon: records per second, start-up, state, and restoring.

Needs torchdata and zephon, which no test needs; a peer that is not installed is left out.

Run: python -m tests.benchmarks.data [--rounds 5] [--records 16000] [--restore-step 100000] [--workers 0 2]
"""

import argparse
import importlib.util
import itertools
import json
import pickle
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from d9d.dataset.lanes import BatchSchedule, DataPlan, ElasticMapStream, LoaderOptions

NUM_TOKENS = 64
BATCH = 8
BATCHES_PER_STEP = 8
BASELINE = "DataLoader"


class Rows(Dataset):
    """Rows of one tensor, the cheapest samples there are: what is measured is the loader."""

    def __init__(self, num_samples: int) -> None:
        self.tokens = torch.arange(num_samples, dtype=torch.int32)[:, None].expand(num_samples, NUM_TOKENS)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tokens[index]


class JsonLines(Dataset):
    """Lines of a folder of .jsonl files, read one by one."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.jsonl"))
        offsets: list[np.ndarray] = []
        for number, path in enumerate(self.paths):
            ends = np.cumsum([len(line) for line in path.open("rb")])
            offsets.append(np.stack([np.full(len(ends), number), np.r_[0, ends[:-1]], ends], axis=1))
        self.places = np.concatenate(offsets)
        self.files: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> torch.Tensor:
        file, start, end = self.places[index].tolist()
        if file not in self.files:
            self.files[file] = self.paths[file].open("rb")
        self.files[file].seek(start)
        return torch.tensor(json.loads(self.files[file].read(end - start))["tokens"], dtype=torch.int32)


def write_json_lines(folder: Path, num_samples: int, num_files: int = 4) -> None:
    for number in range(num_files):
        with (folder / f"{number}.jsonl").open("w") as file:
            for index in range(number, num_samples, num_files):
                file.write(json.dumps({"tokens": list(range(index % 50, index % 50 + NUM_TOKENS))}) + "\n")


class Loader:
    """A way to load batches: how it begins, what it saves, and how it goes on from there."""

    def batches(self) -> Iterator[Any]:
        raise NotImplementedError

    def state(self) -> bytes:
        raise NotImplementedError

    def restore(self, state: bytes) -> None:
        raise NotImplementedError


class Elastic(Loader):
    def __init__(self, dataset: Any, workers: int, **options: Any) -> None:
        plan = DataPlan(
            num_samples=len(dataset),
            schedule=BatchSchedule.constant(BATCH * BATCHES_PER_STEP),
            microbatch_size=BATCH,
            num_epochs=None,
        )
        self.stream = ElasticMapStream(
            dataset, torch.stack, plan, dp_size=1, dp_rank=0, loader=LoaderOptions(num_workers=workers), **options
        )

    def batches(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self.stream)

    def state(self) -> bytes:
        return json.dumps(self.stream.state_dict()).encode()

    def restore(self, state: bytes) -> None:
        self.stream.load_state_dict(json.loads(state))


class Torch(Loader):
    """Has no state: the position is a number of batches, and whatever is before it is read again."""

    def __init__(self, dataset: Any, workers: int) -> None:
        self.sampler = DistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True)
        self.loader = DataLoader(dataset, BATCH, sampler=self.sampler, collate_fn=torch.stack, num_workers=workers)
        self.num_batches = 0

    def batches(self) -> Iterator[Any]:
        skipped, self.num_batches = self.num_batches, 0
        for batch in itertools.islice(self.loader, skipped, None):
            self.num_batches += 1
            yield batch

    def state(self) -> bytes:
        return str(self.num_batches).encode()

    def restore(self, state: bytes) -> None:
        self.num_batches = int(state)


class TorchData(Loader):
    def __init__(self, dataset: Any, workers: int) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        sampler = StatefulDistributedSampler(dataset, num_replicas=1, rank=0, shuffle=True)
        self.loader = StatefulDataLoader(dataset, BATCH, sampler=sampler, collate_fn=torch.stack, num_workers=workers)

    def batches(self) -> Iterator[Any]:
        return iter(self.loader)

    def state(self) -> bytes:
        return pickle.dumps(self.loader.state_dict())

    def restore(self, state: bytes) -> None:
        self.loader.load_state_dict(pickle.loads(state))  # noqa: S301 - our own


class Zephon(Loader):
    """Reads the files itself; without collation of its own, so batches are stacked here."""

    def __init__(self, folder: Path) -> None:
        import zephon

        source = zephon.StaticMixtureWorkSource(
            [zephon.Dataset.from_path("lines", str(folder), fmt="jsonl")],
            zephon.MixtureSpec({"lines": 1.0}),
            shuffle_within_shard=True,
        )
        self.pipeline = zephon.Pipeline(source).batch(BATCH)

    def batches(self) -> Iterator[Any]:
        for batch in self.pipeline:
            yield torch.stack([torch.tensor(record.payload["tokens"], dtype=torch.int32) for record in batch.records])

    def state(self) -> bytes:
        return pickle.dumps(self.pipeline.checkpoint())

    def restore(self, state: bytes) -> None:
        self.pipeline.restore(pickle.loads(state))  # noqa: S301 - our own


Builders = dict[str, Callable[[], Loader]]


def measure_throughput(title: str, builders: Builders, num_records: int, num_rounds: int) -> None:
    """Print records per second: medians over rounds in which all take turns, in alternating order."""
    times: dict[str, list[float]] = {name: [] for name in builders}
    for index in range(num_rounds):
        for name in list(builders)[:: 1 if index % 2 == 0 else -1]:
            batches = builders[name]().batches()
            next(batches)  # start-up is measured for itself
            start = time.perf_counter()
            for _ in itertools.islice(batches, num_records // BATCH):
                pass
            times[name].append(time.perf_counter() - start)
            del batches
    print(title)
    for name, measured in times.items():
        ratios = sorted(base / own for base, own in zip(times[BASELINE], measured, strict=True))
        print(
            f"  {name:28s} {num_records / statistics.median(measured):9.0f} records/s   x {BASELINE} "
            f"{statistics.median(ratios):5.2f}  [{ratios[0]:.2f} .. {ratios[-1]:.2f}]"
        )


def measure_restore(title: str, builders: Builders, step: int) -> None:
    """Print the size of the state after some batches, and the time from it to the next batch."""
    print(f"{title}, after {step} batches of {BATCH}")
    for name, build in builders.items():
        loader = build()
        batches = loader.batches()
        next(itertools.islice(batches, step - 1, None))
        state = loader.state()
        expected = next(batches)
        del batches
        start = time.perf_counter()
        resumed = build()
        resumed.restore(state)
        found = next(resumed.batches())
        duration_s = time.perf_counter() - start
        same = "same batch" if torch.equal(found, expected) else "ANOTHER BATCH"
        print(f"  {name:28s} state {len(state):9d} bytes   first batch {1e3 * duration_s:10.1f} ms   {same}")


def measure_start(builders: dict[str, Callable[[int], Loader]], sizes: list[int]) -> None:
    """Print time and memory from nothing to the first batch, over the number of samples."""
    for num_samples in sizes:
        for name, build in builders.items():
            tracemalloc.start()
            start = time.perf_counter()
            next(build(num_samples).batches())
            duration_s = time.perf_counter() - start
            peak_bytes = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            print(
                f"  {name:28s} {num_samples:13d} samples   {1e3 * duration_s:9.1f} ms   {peak_bytes / 2**20:8.1f} MiB"
            )


class Computed(Dataset):
    """As many samples as one likes."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


def on_map_dataset(dataset: Any, workers: int) -> Builders:
    builders: Builders = {
        BASELINE: lambda: Torch(dataset, workers),
        "elastic": lambda: Elastic(dataset, workers),
        "elastic, without seeding": lambda: Elastic(dataset, workers, seeds_generators=False),
    }
    if importlib.util.find_spec("torchdata"):
        builders["StatefulDataLoader"] = lambda: TorchData(dataset, workers)
    return builders


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--records", type=int, default=16_000)
    parser.add_argument("--restore-step", type=int, default=100_000)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 2], help="none: no throughput")
    args = parser.parse_args()
    torch.set_num_threads(1)
    num_samples = max(args.restore_step * BATCH + BATCH, 2 * args.records)
    rows = Rows(num_samples)
    for workers in args.workers:
        measure_throughput(f"rows, {workers} workers", on_map_dataset(rows, workers), args.records, args.rounds)
    with tempfile.TemporaryDirectory() as folder:
        write_json_lines(Path(folder), num_samples)
        lines = JsonLines(Path(folder))
        has_zephon = importlib.util.find_spec("zephon") is not None
        for workers in args.workers:
            builders = on_map_dataset(lines, workers)
            if has_zephon and workers == args.workers[0]:
                builders["Zephon"] = lambda: Zephon(Path(folder))
            measure_throughput(f"JSON lines, {workers} workers", builders, args.records, args.rounds)
        builders = on_map_dataset(rows, 0)
        if has_zephon:
            builders["Zephon (JSON lines)"] = lambda: Zephon(Path(folder))
        measure_restore("rows", builders, args.restore_step)
    print("start-up")
    measure_start({"elastic": lambda n: Elastic(Computed(n), 0)}, [10**3, 10**6, 10**9])
    measure_start({BASELINE: lambda n: Torch(Computed(n), 0)}, [10**3, 10**6, 10**7])


if __name__ == "__main__":
    main()
