"""What is wrong with settings: all in one error, each with where it is, the value and what would be valid."""

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from d9d.core.config import Config, read_config
from d9d.core.module_names import did_you_mean


class Steps(Config):
    kind: Literal["steps"] = "steps"
    steps: int = Field(ge=1)


class Rest(Config):
    kind: Literal["rest"] = "rest"
    mode: Literal["hold", "decay"] = "hold"


class Loop(Config):
    num_workers: int = 0
    period: int | None = None
    phases: tuple[Annotated[Steps | Rest, Field(discriminator="kind")], ...] = ()

    @model_validator(mode="after")
    def _check(self) -> "Loop":
        if self.num_workers == 3:
            raise ValueError("num_workers (3) must be even: use {2} or 4.")
        if self.num_workers == 5:
            raise PydanticCustomError("five", "five is too much")
        return self


class Job(BaseModel):
    """As jobs write it: a model of their own around ours."""

    model_config = ConfigDict(extra="forbid")

    loop: Loop
    first: Annotated[Steps | Rest, Field(discriminator="kind")] | None = None
    name: str = "job"


def problems_of(text, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"job\.yaml: ") as error:
        read_config(path, Job)
    return str(error.value).removeprefix(f"{path}: ")


def test_settings_that_are_right(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("loop: {num_workers: 4, phases: [{kind: steps, steps: 3}]}\nname: mine\n")
    assert read_config(str(path), Job) == Job(loop=Loop(num_workers=4, phases=(Steps(steps=3),)), name="mine")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "loop: {num_workerz: 4}",
            "loop.num_workerz (4) is unknown. Did you mean 'num_workers'? Valid are num_workers, period, phases.",
        ),
        ("loop: {}\nx: 1", "x (1) is unknown. Valid are loop, first, name."),
        (
            "loop: {num_workers: many}",
            "loop.num_workers ('many') must be a valid integer, unable to parse string as an integer",
        ),
        ("loop:", "loop (None) is empty: give settings by name. Valid are num_workers, period, phases."),
        ("loop: 3", "loop (3) is no mapping: give settings by name. Valid are num_workers, period, phases."),
        ("name: mine", "loop is missing"),
        ("", "is empty: give settings by name. Valid are loop, first, name."),
        ("loop: {num_workers: 3}", "loop: num_workers (3) must be even: use {2} or 4."),
        ("loop: {num_workers: 5}", "loop: five is too much"),
        (
            "loop: {phases: [{kind: rest, mode: hodl}]}",
            "loop.phases[0].mode ('hodl') must be 'hold' or 'decay'. Did you mean 'hold'?",
        ),
        ("loop: {phases: [{kind: steps, steps: 0}]}", "loop.phases[0].steps (0) must be greater than or equal to 1"),
        ("loop: {phases: steps}", "loop.phases ('steps') must be a list"),
        ("loop: {phases: [{kind: steps}]}", "loop.phases[0].steps is missing"),
        (
            "loop: {}\nfirst: {kind: stepz}",
            "first: kind is 'stepz', which is unknown. Did you mean 'steps'? Valid are 'steps', 'rest'.",
        ),
        ("loop: {}\nfirst: {}", "first: kind is missing, which says what it is. Valid are 'steps', 'rest'."),
    ],
)
def test_one_problem(text, problem, tmp_path):
    assert problems_of(text, tmp_path) == problem


def test_all_problems_come_in_one_error(tmp_path):
    text = "loop: {num_workerz: 4, period: x, phases: [{kind: steps, step: 3}]}\nnam: job"
    problems = problems_of(text, tmp_path).split("\n- ")[1:]
    starts = ("loop.period ('x') must be", "loop.phases[0].steps is missing", "loop.phases[0].step (3) is unknown.")
    for start, problem in zip((*starts, "loop.num_workerz (4) is", "nam ('job') is"), problems, strict=True):
        assert problem.startswith(start)


def test_python_has_the_same_messages_in_the_error_of_pydantic():
    with pytest.raises(ValidationError) as error:
        Job.model_validate({"loop": {"num_workerz": 4, "phases": [{"kind": "rest", "mode": "hodl"}], "period": "x"}})
    found = {each["loc"]: (each["type"], each["msg"]) for each in error.value.errors()}
    assert found == {
        ("loop", "period"): ("int_parsing", "Input should be a valid integer, unable to parse string as an integer"),
        ("loop", "phases", 0, "rest", "mode"): (
            "literal_error",
            "Input should be 'hold' or 'decay'. Did you mean 'hold'?",
        ),
        ("loop", "num_workerz"): (
            "extra_forbidden",
            "is unknown. Did you mean 'num_workers'? Valid are num_workers, period, phases.",
        ),
    }
    with pytest.raises(ValidationError, match=r"Did you mean 'num_workers'\?"):
        Loop(num_worker=1)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(("word", "hint"), [("shrd", " Did you mean 'shard'?"), ("x", ""), (3, "")])
def test_nearest_word(word, hint):
    assert did_you_mean(word, ("replicate", "shard")) == hint
