"""The elastic stream against PyTorch's loader, torchdata's and Zephon: records per second, start-up, state, and restoring.

All on the same rows of tokens, as a tensor in memory and as JSON lines. A peer that is not installed is left out. Ends with
the goals, and whether they are met. Takes three minutes on two idle cores, of which Zephon takes one.

Run: python -m tests.benchmarks.data [--rounds 11] [--records 16000] [--restore-step 100000] [--workers 0 2]
"""

import argparse
import gc
import importlib.util
import itertools
import json
import pickle
import resource
import statistics
import tempfile
import time
import tracemalloc
import warnings
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
ELASTIC = "elastic"
MAX_RESTORE_S = 10.0
"""Restoring is not measured again after this time."""
ZEPHON_CHUNK = 2 * 16_384
"""Samples that Zephon must have, and may leave out at the end, by its default chunk size."""


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


def measure_throughput(
    builders: Builders, num_records: int, num_rounds: int, *, has_own_processes: bool = False
) -> float:
    """Print records per second, in turns of alternating order, and return the ratio of `ELASTIC` to `BASELINE`.

    Ratios are those of neighbouring turns, since other processes disturb them alike; the median is told with the quartiles and
    the ends. Those of CPU time, loader processes with their start and end included, are hardly disturbed.

    Args:
        builders: Ways to load, by name.
        num_records: Records of a turn.
        num_rounds: Turns of each way.
        has_own_processes: Whether one has processes that are not its loader's, whose CPU time is not known.
    """
    walls: dict[str, list[float]] = {name: [] for name in builders}
    cpus: dict[str, list[float]] = {name: [] for name in builders}
    for index in range(num_rounds):
        for name in list(builders)[:: 1 if index % 2 == 0 else -1]:
            cpu_s = cpu_time()
            batches = builders[name]().batches()
            next(batches)  # start-up is measured for itself
            wall_s = time.perf_counter()
            for _ in itertools.islice(batches, num_records // BATCH):
                pass
            walls[name].append(time.perf_counter() - wall_s)
            del batches
            gc.collect()  # ends loader processes, whose time counts then
            cpus[name].append(cpu_time() - cpu_s)
    for name in builders:
        cpu = "" if has_own_processes else f"   by CPU time {_spread(cpus[BASELINE], cpus[name])}"
        print(
            f"  {name:28s} {num_records / statistics.median(walls[name]):9.0f} records/s   x {BASELINE} "
            f"{_spread(walls[BASELINE], walls[name])}{cpu}"
        )
    return statistics.median(_ratios(walls[BASELINE], walls[ELASTIC]))


def cpu_time() -> float:
    """Return the seconds of CPU time of this process and of those that it has started and that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def _ratios(base: list[float], own: list[float]) -> list[float]:
    return sorted(each / of_own for each, of_own in zip(base, own, strict=True))


def _spread(base: list[float], own: list[float]) -> str:
    """Return the median of paired ratios, with quartiles, and least and most in brackets."""
    ratios = _ratios(base, own)
    median = statistics.median(ratios)
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else (median,) * 3
    return f"{median:5.2f} ({low:.2f} .. {high:.2f}; [{ratios[0]:.2f} .. {ratios[-1]:.2f}])"


def measure_restore(builders: Builders, step: int, num_rounds: int = 5) -> dict[str, float]:
    """Print the size of the state after some batches and the median time from it to the next batch; return the times."""
    times: dict[str, float] = {}
    for name, build in builders.items():
        loader = build()
        batches = loader.batches()
        next(itertools.islice(batches, step - 1, None))
        state = loader.state()
        expected = next(batches)
        del batches
        durations: list[float] = []
        is_same = True
        while len(durations) < num_rounds and sum(durations) < MAX_RESTORE_S:
            start = time.perf_counter()
            resumed = build()
            resumed.restore(state)
            found = next(resumed.batches())
            durations.append(time.perf_counter() - start)
            is_same = is_same and torch.equal(found, expected)
            del resumed
        times[name] = statistics.median(durations)
        same = "same batch" if is_same else "ANOTHER BATCH"
        print(
            f"  {name:28s} state {len(state):9d} bytes   first batch {1e3 * times[name]:10.1f} ms   {same}, "
            f"after {step} batches of {BATCH}"
        )
    return times


def measure_start(builders: dict[str, Callable[[int], Loader]], sizes: list[int]) -> tuple[float, float]:
    """Print time and memory from nothing to the first batch over the number of samples; return those of the last one."""
    duration_s = peak_mib = 0.0
    for num_samples in sizes:
        for name, build in builders.items():
            start = time.perf_counter()
            next(build(num_samples).batches())
            duration_s = time.perf_counter() - start
            # Once more, since counting allocations takes time.
            tracemalloc.start()
            next(build(num_samples).batches())
            peak_mib = tracemalloc.get_traced_memory()[1] / 2**20
            tracemalloc.stop()
            print(f"  {name:28s} {num_samples:13d} samples   {1e3 * duration_s:9.1f} ms   {peak_mib:8.1f} MiB")
    return duration_s, peak_mib


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
        ELASTIC: lambda: Elastic(dataset, workers),
        f"{ELASTIC}, without seeding": lambda: Elastic(dataset, workers, seeds_generators=False),
    }
    if importlib.util.find_spec("torchdata"):
        builders["StatefulDataLoader"] = lambda: TorchData(dataset, workers)
    return builders


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--records", type=int, default=16_000)
    parser.add_argument("--restore-step", type=int, default=100_000)
    parser.add_argument("--zephon-restore-step", type=int, default=2_000, help="it reads some thousand records/s")
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 2], help="none: no throughput")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # torchdata uses what torch has deprecated
    torch.set_num_threads(1)
    rows = Rows(args.restore_step * BATCH + 2 * args.records)
    ratios: dict[str, float] = {}
    for workers in args.workers:
        title = f"rows, {workers} workers"
        print(title)
        builders = on_map_dataset(rows, workers)
        ratios[title] = measure_throughput(builders, args.records, args.rounds)
    print("restoring")
    restored = measure_restore(on_map_dataset(rows, 0), args.restore_step)
    with tempfile.TemporaryDirectory() as folder:
        write_json_lines(Path(folder), 2 * args.records + ZEPHON_CHUNK)
        zephon: Builders = {}
        if importlib.util.find_spec("zephon"):
            zephon["Zephon (JSON lines)"] = lambda: Zephon(Path(folder))
        measure_restore(zephon, args.zephon_restore_step)
        for workers in args.workers:
            title = f"JSON lines, {workers} workers"
            print(title)
            # Anew, since loader processes that are forked share the position in files that are open.
            builders = on_map_dataset(JsonLines(Path(folder)), workers)
            ratios[title] = measure_throughput(builders, args.records // 2, args.rounds)
        if zephon and args.workers:
            print("JSON lines, Zephon with processes of its own")
            in_process = on_map_dataset(JsonLines(Path(folder)), 0)
            both = {name: in_process[name] for name in (BASELINE, ELASTIC)}
            measure_throughput({**both, **zephon}, args.records // 2, min(3, args.rounds), has_own_processes=True)
    print("start-up")
    duration_s, peak_mib = measure_start({ELASTIC: lambda n: Elastic(Computed(n), 0)}, [10**3, 10**6, 10**9])
    measure_start({BASELINE: lambda n: Torch(Computed(n), 0)}, [10**3, 10**6])
    print_goals(ratios, restored, duration_s, peak_mib)


def print_goals(ratios: dict[str, float], restored: dict[str, float], duration_s: float, peak_mib: float) -> None:
    """Print what the project aims at, and whether it is met."""
    best = min(duration for name, duration in restored.items() if ELASTIC not in name)
    speedup = best / restored[ELASTIC]
    goals = [(f"{title}: x {BASELINE} {ratio:.2f} (goal 1.0)", ratio >= 1) for title, ratio in ratios.items()]
    goals.append((f"restoring: {speedup:.1f} times as fast as the best of the others (goal 10)", speedup >= 10))
    goals.append((f"start with 10^9 samples: {duration_s:.3f} s, {peak_mib:.1f} MiB (goal 1 s, 50 MB)", duration_s < 1))
    print("goals")
    for text, is_met in goals:
        print(f"  {'met' if is_met else 'MISSED':8s} {text}")


if __name__ == "__main__":
    main()
