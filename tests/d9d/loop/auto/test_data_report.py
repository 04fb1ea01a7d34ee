"""The plan of a job's data as text."""

import pytest

from d9d.loop.auto import AutoDataConfig
from d9d.loop.auto.data_report import describe_data


def config(**changes: object) -> AutoDataConfig:
    return AutoDataConfig.model_validate({"global_batch_size": 8, "microbatch_size": 2, "num_workers": 0, **changes})


def test_a_short_step():
    # 13 samples: a step of 8, and one of 5 in 3 microbatches. Of 4 ranks, the last is idle then and reads 2 samples less,
    # in each of 2 epochs.
    assert (
        describe_data(config(drop_last=False, num_epochs=2), 13, [1, 2, 3, 4])
        == """\
samples  13, in the order of the dataset
step     8 samples in 4 microbatches of 2
epoch    2 steps, the last one with 5 samples; no padding
run      4 steps, 2 epochs
lanes    4: starts and resumes on one of 1, 2, 4 data-parallel ranks

ranks    microbatches per step   samples per rank
1        4, 3 in the last        26
2        2, 2 in the last, 1 idle 10 to 16
3        global_batch_size (8) is not a multiple of data_parallel * microbatch_size (3 * 2 = 6). Use 6 or 12.
4        1, 1 in the last, 1 idle 4 to 8

first samples, by microbatch
step 1   1: 0 1
step 1   2: 2 3
step 1   3: 4 5
step 1   4: 6 7
step 2   1: 8 9
step 2   2: 10 11
step 2   3: 12"""
    )


# 21 samples in steps of 8.
@pytest.mark.parametrize(
    ("changes", "total_steps", "lines"),
    [
        (
            {},
            None,
            ["epoch    2 steps; no padding, 5 samples are left out", "run      2 steps, 1 epochs", "2 * 8 = 16 each"],
        ),
        (
            {"tail": "pad"},
            2,
            ["epoch    3 steps; 3 samples come twice, the second time with weight 0", "run      2 steps, "],
        ),
        (
            {"tail": "wrap", "num_epochs": None},
            None,
            ["epoch    2.625 steps; no padding", "run      no end: set schedule."],
        ),
        ({"tail": "wrap", "num_epochs": 8}, 20, ["run      20 steps, 7.61905 epochs", "20 * 8 = 160 each"]),
        (
            {"tail": "wrap", "num_epochs": 4, "global_batch_ramp": {3: 16}},
            4,
            ["of 2, 16 from step 3", "epoch    21 samples", "2, 4                    24", "8 + 8 + 16 + 16 = 48 each"],
        ),
        ({"skip_steps": [[2, 2]], "num_epochs": 3}, None, ["skipped  steps 2 to 2", "run      5 steps, 3 epochs"]),
        # Steps of 8, 8 and 5 samples; the short one is jumped over once, and read once.
        (
            {"drop_last": False, "skip_steps": [[3, 3]], "num_epochs": 2},
            None,
            ["run      5 steps, 2 epochs", "5 = 37 each"],
        ),
        # The first epoch begins with a jump of a step, so its short step is the second one. 8 + 5 + 8 + 8 + 5 samples.
        (
            {"drop_last": False, "skip_steps": [[1, 1]], "num_epochs": 2},
            None,
            ["4, 3 in the last        ", "= 34 each"],
        ),
        ({"shard_indexing_mode": "chunked", "lanes": 2}, None, ["chunks   2 blocks of neighbours"]),
        ({"shuffle": True, "seed": 4}, None, ["samples  21, shuffled anew in each epoch (seed 4)"]),
    ],
    ids=str,
)
def test_what_is_said_of_other_runs(changes, total_steps, lines):
    text = describe_data(config(**changes), 21, [1, 2], total_steps)
    for line in lines:
        # A hand count of all samples: what one rank reads.
        expected = line.partition("= ")[2].removesuffix(" each") if line.endswith("each") else line
        assert expected in text, text


# Without the number of samples: what does not depend on it, and formulas.
@pytest.mark.parametrize(
    ("changes", "total_steps", "lines"),
    [
        (
            {},
            None,
            ["samples  N (give num_samples", "epoch    floor(N / 8) steps; no padding, N mod 8 samples are left out"],
        ),
        (
            {},
            None,
            [
                "run      1 epochs",
                "lanes    4: starts and resumes on one of 1, 2, 4",
                "2        2                       4 per step",
            ],
        ),
        (
            {},
            5,
            [
                "run      5 steps, 40 / (floor(N / 8) * 8) epochs",
                "1        4                       40",
                "2        2                       20",
            ],
        ),
        (
            {"tail": "wrap", "num_epochs": None, "global_batch_ramp": {3: 16}},
            4,
            ["48 / (N) epochs", "24", "epoch    N samples"],
        ),
        ({"tail": "pad"}, None, ["ceil(N / 8) steps; -N mod 8 samples come twice"]),
        ({"tail": "short"}, 3, ["ceil(N / 8) steps, the last one with N mod 8", "at most 24", "at most 12"]),
    ],
)
def test_what_is_said_without_the_number_of_samples(changes, total_steps, lines):
    text = describe_data(config(**changes), None, [1, 2, 3], total_steps)
    for line in [*lines, "(3 * 2 = 6). Use 6 or 12."]:
        assert line in text, text
    assert "first samples" not in text


def test_nothing_is_said_of_the_short_step_without_the_number_of_samples():
    # 2**40 samples, which stand for an unknown number, leave 2**40 mod 12 = 4 to the last step.
    text = describe_data(config(tail="short", global_batch_size=12), None, [1, 3])
    assert text.endswith("1        6                       12 per step\n3        2                       4 per step")


ENDLESS = {"tail": "wrap", "num_epochs": None}


@pytest.mark.parametrize("num_samples", [None, 21])
def test_mixtures_and_packed_sequences_have_no_number(num_samples):
    text = describe_data(config(**ENDLESS, mixture={"web": 3, "code": 1}), num_samples, [2], 6)
    assert text.startswith("samples  1 of 4 from code and 3 of 4 from web, in the order of the dataset\n")
    assert "epoch    each dataset goes through epochs of its own\nrun      6 steps\n" in text
    assert text.endswith("2        2                       24")
    packed = config(**ENDLESS, packing={"kind": "wrap", "num_tokens": 64})
    text = describe_data(packed, num_samples, [2])
    assert text.startswith("samples  sequences of 64 tokens (wrap) out of documents, in the order of the dataset\n")
    assert "run      no end: set schedule.total_steps" in text


def test_more_steps_than_there_are_are_refused():
    with pytest.raises(
        ValueError, match=r"total_steps \(3\) is more than the data has \(2\)\. Lower it, .*or raise num_epochs"
    ):
        describe_data(config(), 21, [1], total_steps=3)


def test_long_microbatches_and_steps_are_cut_short():
    text = describe_data(config(global_batch_size=64, microbatch_size=10 + 6), 640, [1])
    assert "step 1   1: 0 1 2 3 4 5 6 7 ...\n" in text
    text = describe_data(config(global_batch_size=64), 640, [1])
    assert text.endswith("step 2   4: 70 71\nstep 2   ...")
