"""What is found in model states, whole and broken, and what mappers would make of them."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from d9d.model_state.inspection import (
    dry_run,
    format_dry_run,
    format_inspection,
    format_size,
    inspect_model_state,
)
from d9d.model_state.io.source import TensorInfo
from d9d.model_state.mapper import ModelStateMapper, StateGroup
from d9d.model_state.mapper.compose import ModelStateMapperParallel
from d9d.model_state.mapper.leaf import (
    ModelStateMapperChunkTensors,
    ModelStateMapperConcatenateTensors,
    ModelStateMapperDrop,
    ModelStateMapperRename,
    ModelStateMapperTranspose,
)

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX, MANIFEST = "model.safetensors.index.json", "model.sha256.json"
NUM_BYTES = 3 * 4 * 4 + 4 * 2 + 8  # float32 (3, 4), bfloat16 (4,), int64 ()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A model state in two files, without fault."""
    folder = tmp_path / "state"
    folder.mkdir()
    save_file({"layer.weight": torch.arange(12.0).view(3, 4), "layer.bias": torch.ones(4).bfloat16()}, folder / FIRST)
    save_file({"steps": torch.tensor(7)}, folder / SECOND)
    weight_map = {"layer.weight": FIRST, "layer.bias": FIRST, "steps": SECOND}
    write_json(folder / INDEX, {"metadata": {"total_size": NUM_BYTES}, "weight_map": weight_map})
    write_json(folder / MANIFEST, {name: digest(folder / name) for name in (FIRST, SECOND)})
    return folder


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def change_index(state: Path, **entries: object) -> None:
    index = json.loads((state / INDEX).read_text(encoding="utf-8"))
    write_json(state / INDEX, index | entries)


def weight_map(state: Path) -> dict[str, str]:
    return json.loads((state / INDEX).read_text(encoding="utf-8"))["weight_map"]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


TABLES = f"""\
3 tensors

file                              tensors  size
{FIRST}        2  56 B
{SECOND}        1   8 B

tensor        dtype     shape   size  file
layer.bias    bfloat16  (4)      8 B  {FIRST}
layer.weight  float32   (3, 4)  48 B  {FIRST}
steps         int64     ()       8 B  {SECOND}

dtype     tensors  parameters  size
bfloat16        1           4   8 B
float32         1          12  48 B
int64           1           1   8 B
all             3          17  64 B

no problems"""


def test_files_tensors_and_totals_are_shown(state: Path):
    inspection = inspect_model_state(state)
    assert inspection.problems == ()
    assert format_inspection(inspection) == f"{state}: {TABLES}"


def test_a_pattern_picks_what_is_shown_and_counted(state: Path):
    shown = format_inspection(inspect_model_state(state), "layer.*")
    assert shown.splitlines()[0] == f"{state}: 2 of 3 tensors"
    assert "steps" not in shown
    assert "all             2          16  56 B" in shown


def test_one_file_and_a_link_into_a_cache(state: Path, tmp_path: Path):
    assert [info.name for info in inspect_model_state(state / SECOND).tensors] == ["steps"]
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "model.safetensors").symlink_to(state / SECOND)
    assert "lies outside" in inspect_model_state(snapshot).problems[0]
    inspection = inspect_model_state(snapshot, cache_root=tmp_path)
    assert inspection.problems == ()
    assert f"steps   int64  ()      8 B  {'model.safetensors'}" in format_inspection(inspection)


def test_nothing_there(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        inspect_model_state(tmp_path / "nowhere")
    assert len(inspect_model_state(tmp_path).problems) == 1


def remove_a_shard(state: Path) -> None:
    (state / SECOND).unlink()


def truncate(state: Path) -> None:
    (state / FIRST).write_bytes((state / FIRST).read_bytes()[:-1])


def flip_a_bit(state: Path) -> None:
    content = bytearray((state / FIRST).read_bytes())
    content[-1] ^= 1
    (state / FIRST).write_bytes(content)


def name_a_key_that_is_not_there(state: Path) -> None:
    change_index(state, weight_map=weight_map(state) | {"layer.wieght": FIRST})


def forget_a_key(state: Path) -> None:
    change_index(state, weight_map={name: file for name, file in weight_map(state).items() if name != "layer.bias"})


def add_a_file(state: Path) -> None:
    save_file({"more": torch.zeros(2)}, state / "model-00003-of-00003.safetensors")


def claim_another_size(state: Path) -> None:
    change_index(state, metadata={"total_size": 63})


def repeat_a_key(state: Path) -> None:
    save_file({"steps": torch.tensor(7), "layer.bias": torch.ones(4).bfloat16()}, state / SECOND)


def leave_a_temporary_file(state: Path) -> None:
    (state / ".tmp-rank0-shard-3.safetensors").touch()


def lose_the_index(state: Path) -> None:
    (state / INDEX).unlink()


def expect_a_third_file(state: Path) -> None:
    content = json.loads((state / MANIFEST).read_text(encoding="utf-8"))
    write_json(state / MANIFEST, content | {"model-00003-of-00003.safetensors": "0" * 64})


def break_the_manifest(state: Path) -> None:
    (state / MANIFEST).write_text("{", encoding="utf-8")


BREAK: dict[Callable[[Path], None], tuple[str, ...]] = {
    remove_a_shard: (SECOND, "missing"),
    truncate: (FIRST, "cannot be read"),
    flip_a_bit: (FIRST, "has the digest"),
    name_a_key_that_is_not_there: (FIRST, "layer.wieght", "nearest: 'layer.weight'"),
    forget_a_key: (FIRST, "does not name", "layer.bias"),
    add_a_file: ("model-00003-of-00003.safetensors is not in the index",),
    claim_another_size: ("total_size is 63", "64 bytes"),
    repeat_a_key: ("layer.bias", FIRST, SECOND),
    leave_a_temporary_file: (".tmp-rank0-shard-3.safetensors", "killed"),
    lose_the_index: (FIRST, SECOND, "not complete"),
    expect_a_third_file: ("model-00003-of-00003.safetensors is missing",),
    break_the_manifest: (MANIFEST,),
}


@pytest.mark.parametrize("break_state", BREAK)
def test_what_is_wrong_is_named(state: Path, break_state: Callable[[Path], None]):
    break_state(state)
    problems = inspect_model_state(state).problems
    assert any(all(word in problem for word in BREAK[break_state]) for problem in problems), problems
    assert all(problem in format_inspection(inspect_model_state(state)) for problem in problems)


def test_everything_wrong_is_named_at_once(state: Path):
    broken = [truncate, forget_a_key, add_a_file, leave_a_temporary_file, expect_a_third_file]
    for break_state in broken:
        break_state(state)
    text = "\n".join(inspect_model_state(state).problems)
    for words in (
        (FIRST, "cannot be read"),
        ("model-00003-of-00003.safetensors is not in the index",),
        (".tmp-rank0-shard-3.safetensors",),
        (f"{FIRST} has the digest", "model-00003-of-00003.safetensors has the digest"),
    ):
        assert all(word in text for word in words), (words, text)


def test_shards_of_a_stopped_export_are_listed_all_the_same(state: Path):
    lose_the_index(state)
    assert [info.name for info in inspect_model_state(state).tensors] == ["layer.bias", "layer.weight", "steps"]


def test_names_cannot_control_the_terminal(tmp_path: Path):
    save_file({"a\x1b[31m\nb": torch.zeros(2)}, tmp_path / "model.safetensors")
    inspection = inspect_model_state(tmp_path)
    [info] = inspection.tensors
    mapper = ModelStateMapperRename(info.name, "c\x1b[31m")
    for text in (format_inspection(inspection), format_dry_run(mapper, dry_run(mapper, {info.name: info}))):
        assert "\x1b" not in text
        assert r"\x1b[31m" in text


def test_checksums_can_be_left_out(state: Path):
    flip_a_bit(state)
    assert inspect_model_state(state, verify=False).problems == ()


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 KB"),
        (999_949, "999.9 KB"),
        (999_950, "1.0 MB"),
        (4_200_000_000, "4.2 GB"),
        (5 * 10**15, "5000.0 TB"),
    ],
)
def test_sizes_are_readable(num_bytes: int, text: str):
    assert format_size(num_bytes) == text


# ---- Mappers ---------------------------------------------------------------------------------------------------------


def infos(**shapes: tuple[int, ...]) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo(name, Path("file"), shape, torch.float32, 4 * torch.Size(shape).numel())
        for name, shape in shapes.items()
    }


class Doubled(ModelStateMapper):
    """Computes, so only shapes and dtypes can be told without data."""

    def state_dependency_groups(self) -> frozenset[StateGroup]:
        return frozenset([StateGroup(inputs=frozenset(["a"]), outputs=frozenset(["b"]))])

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"b": 2 * group["a"]}


class Halved(Doubled):
    """Looks at values, so nothing can be told without data."""

    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"b": group["a"][: int(group["a"].sum())]}


class Failing(Doubled):
    def apply(self, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"b": group["hidden"]}


class Forgetful(Doubled):
    def trace(self, group: object) -> dict[str, object]:
        return {}


class FailingTrace(Doubled):
    def trace(self, group: object) -> dict[str, object]:
        raise KeyError("hidden")


def test_a_mapper_that_fits():
    mapper = ModelStateMapperParallel(
        [ModelStateMapperConcatenateTensors(["q", "k"], "qk", dim=0), ModelStateMapperTranspose("o", (0, 1))]
    )
    run = dry_run(mapper, infos(q=(3, 5), k=(2, 5), o=(7, 11), rest=(1,)))
    assert (run.problems, run.unread) == ((), ("rest",))
    assert {name: pieces and pieces.shape for name, pieces in run.outputs.items()} == {"qk": (5, 5), "o": (11, 7)}
    text = format_dry_run(mapper, run)
    assert mapper.explain() in text
    assert "o      float32  (11, 7)  308 B\nqk     float32  (5, 5)   100 B" in text
    assert "not read: 1 tensor: 'rest'" in text
    assert text.endswith("the mapper fits")


def test_shapes_that_do_not_fit_are_found_without_data():
    mapper = ModelStateMapperParallel(
        [
            ModelStateMapperConcatenateTensors(["q", "k"], "qk", dim=0),
            ModelStateMapperChunkTensors("o", ["left", "right"], dim=0),
            ModelStateMapperRename("a", "b"),
        ]
    )
    run = dry_run(mapper, infos(q=(3, 5), k=(2, 4), o=(7, 11), a=(2,)))
    chunk, cat = sorted(run.problems, key=lambda problem: "'qk'" in problem)
    assert chunk.startswith("'o' cannot be mapped to 'left', 'right': ")
    assert cat.startswith("'k', 'q' cannot be mapped to 'qk': ")
    assert format_dry_run(mapper, run).endswith(f"the mapper does not fit:\n  {run.problems[0]}\n  {run.problems[1]}")


def test_names_that_are_not_there_are_named_with_the_nearest():
    run = dry_run(ModelStateMapperRename("layer.wieght", "b"), infos(**{"layer.weight": (2,)}))
    assert run.unread == ("layer.weight",)
    assert any("layer.wieght" in problem and "layer.weight" in problem for problem in run.problems)


def test_mappers_of_other_people():
    run = dry_run(Doubled(), infos(a=(2,)))
    assert run.problems == ()
    assert "b      float32  (2)     8 B" in format_dry_run(Doubled(), run)
    run = dry_run(Halved(), infos(a=(2,)))
    assert (run.problems, run.outputs) == ((), {"b": None})
    assert "b             known with data only" in format_dry_run(Halved(), run)
    [problem] = dry_run(Forgetful(), infos(a=(2,))).problems
    assert problem == "Forgetful returned nothing for the group of 'a'; it has declared 'b'."


@pytest.mark.parametrize("mapper", [Failing(), FailingTrace()])
def test_whatever_a_mapper_raises_is_a_problem(mapper: ModelStateMapper):
    [problem] = dry_run(mapper, infos(a=(2,))).problems
    assert problem.startswith("'a' cannot be mapped to 'b': KeyError: 'hidden' (")


class Optional(Doubled):
    def optional_inputs(self) -> frozenset[str]:
        return frozenset(["a"])


def test_a_group_of_which_nothing_is_there():
    mapper = ModelStateMapperParallel([Optional(), ModelStateMapperDrop(["gone"])])
    assert dry_run(mapper, infos(a=(2,))).problems == ()
    [problem] = dry_run(mapper, infos(aa=(2,))).problems
    assert problem.startswith("a -> b has nothing to be made of: 1 tensors are not in it: 'a' (nearest: 'aa').")
