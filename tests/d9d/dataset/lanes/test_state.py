"""The saved position: its text, and which changes a resumed run may make."""

import dataclasses
import json

import pytest

from d9d.dataset.lanes import BatchSchedule, DataPlan, LaneState, RampPoint, StepRange, Tail, check_resume

RAMP = BatchSchedule(ramp=(RampPoint(0, 4), RampPoint(10, 8)), skips=(StepRange(3, 5), StepRange(20, 21)))


def state(num_steps: int = 6, fingerprint: str = "abc", **changes) -> LaneState:
    values = {"num_samples": 1000, "schedule": RAMP, "microbatch_size": 2, "seed": 3, **changes}
    return LaneState.of(DataPlan(**values), num_steps, fingerprint)


def test_a_state_is_numbers_and_strings():
    assert state().to_dict() == {
        "version": 1,
        "order": "feistel8-splitmix64-1",
        "num_samples": 1000,
        "seed": 3,
        "shuffle": True,
        "tail": "wrap",
        "global_batch_size": "4,10:8",
        "skip_steps": "3-5,20-21",
        "microbatch_size": 2,
        "num_lanes": 2,
        "num_chunks": 0,
        "num_steps": 6,
        "consumed": 32,  # 6 steps of 4, and 2 that were jumped over
        "fingerprint": "abc",
        "recipe": "",
    }


@pytest.mark.parametrize("num_steps", [0, 6, 30])
def test_a_state_comes_back_through_json(num_steps):
    text = json.dumps(state(num_steps).to_dict())
    assert len(text) < 1024
    assert LaneState.from_dict(json.loads(text)) == state(num_steps)


def test_other_values_beside_it_are_left_alone():
    assert LaneState.from_dict({**state().to_dict(), "dataset": {"more": 1}}) == state()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "format version 2, and this release reads 1"),
        ({"version": None}, "format version None"),
        ({"consumed": 33}, "6 steps end at sample 32, not 33"),
        ({"tail": "fold"}, "cannot be read.*fold"),
        ({"global_batch_size": "x"}, "cannot be read"),
        ({"skip_steps": "5-3"}, "cannot be read.*not a range"),
        ({"seed": None}, "cannot be read"),
    ],
)
def test_states_that_cannot_be_read_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        LaneState.from_dict({**state().to_dict(), **changes})


def test_a_state_of_another_kind_is_told_from_a_broken_one():
    # What `AutoDataProvider` saved before its data was elastic, and the state of PyTorch's own loader.
    for other in ({"version": 1, "consumed_steps": 3, "seed": 0}, {"_snapshot": {}}, {}):
        with pytest.raises(ValueError, match=r"is not one of this stream.*Resume with what saved it"):
            LaneState.from_dict(other)


def test_a_state_that_lacks_a_value_is_refused():
    values = state().to_dict()
    del values["num_samples"]
    with pytest.raises(ValueError, match="num_samples"):
        LaneState.from_dict(values)


@pytest.mark.parametrize(
    "own",
    [
        {},
        {"microbatch_size": 1},
        {"num_lanes": 1},
        {"num_epochs": None},
        {"fingerprint": ""},
        {"schedule": BatchSchedule.constant(16)},
        {"schedule": BatchSchedule(ramp=(RampPoint(0, 4),), skips=(StepRange(3, 5), StepRange(6, 9)))},
    ],
    ids=lambda own: ",".join(own) or "nothing",
)
def test_allowed_changes(own):
    check_resume(state(), state(0, **own))


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"num_samples": 1001}, r"num_samples \(checkpoint: 1000, now: 1001\)"),
        ({"seed": 4}, r"seed \(checkpoint: 3, now: 4\)"),
        ({"shuffle": False}, r"shuffle \(checkpoint: True, now: False\)"),
        (
            {"tail": Tail.drop, "schedule": BatchSchedule.constant(4)},
            r"tail \(checkpoint: wrap, now: drop\)",
        ),
        ({"fingerprint": "xyz"}, r"fingerprint \(checkpoint: abc, now: xyz\)"),
        ({"num_samples": 7, "seed": 4}, r"num_samples \(.*\), seed \(.*Restore the saved values"),
        (
            {"schedule": BatchSchedule(ramp=RAMP.ramp, skips=(StepRange(2, 5),))},
            r"skip_steps \(steps 3 to 5\) come too late: 6 steps are done",
        ),
        (
            {"seed": 4, "schedule": BatchSchedule(ramp=RAMP.ramp, skips=(StepRange(2, 5),))},
            r"seed .*skip_steps",
        ),
    ],
)
def test_changes_that_would_mean_other_samples_are_refused(own, message):
    with pytest.raises(ValueError, match=message):
        check_resume(state(), state(0, **own))


@pytest.mark.parametrize("tail", [Tail.drop, Tail.pad])
def test_epochs_that_end_with_a_step_keep_their_batch_size(tail):
    saved = state(tail=tail, schedule=BatchSchedule.constant(8))
    check_resume(saved, state(0, tail=tail, schedule=BatchSchedule.constant(8), microbatch_size=1))
    with pytest.raises(ValueError, match=r"global_batch_size \(checkpoint: 8, now: 16\)"):
        check_resume(saved, state(0, tail=tail, schedule=BatchSchedule.constant(16)))


def test_other_chunks_are_refused():
    schedule = BatchSchedule.constant(8)
    chunked = {"tail": Tail.short, "schedule": schedule, "is_chunked": True}
    saved = state(num_lanes=2, **chunked)
    check_resume(saved, state(0, num_lanes=2, **chunked, microbatch_size=1))
    with pytest.raises(
        ValueError, match=r"shard_indexing_mode \(checkpoint: chunked over 2 lanes, now: chunked over 4 lanes\)"
    ):
        check_resume(saved, state(0, num_lanes=4, **chunked))


def test_another_order_is_refused():
    saved = dataclasses.replace(state(), order="feistel7")
    with pytest.raises(ValueError, match=r"order \(checkpoint: feistel7, now: feistel8"):
        check_resume(saved, state(0))


def test_lanes_with_a_state_keep_their_number():
    with pytest.raises(ValueError, match=r"Changed: lanes \(checkpoint: 2, now: 1\)"):
        check_resume(state(), state(0, num_lanes=1), lanes_hold_state=True)
    check_resume(state(), state(0), lanes_hold_state=True)
