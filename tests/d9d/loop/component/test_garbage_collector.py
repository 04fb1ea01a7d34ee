"""Manual garbage collection, and what it leaves behind."""

import gc
import weakref

import pytest

from d9d.core.dist_context import DeviceMeshParameters
from d9d.loop.component.garbage_collector import ManualGarbageCollector
from d9d.loop.component.job_schedule import JobSchedule
from d9d.loop.config import GarbageCollectionConfig, JobScheduleConfig


class Cycle:
    def __init__(self) -> None:
        self.self = self


class Stream:
    total_steps = 4


def build(period) -> tuple[ManualGarbageCollector, JobSchedule]:
    schedule = JobSchedule(JobScheduleConfig(), Stream())  # type: ignore[arg-type]
    config = GarbageCollectionConfig(period_steps=period)
    return ManualGarbageCollector(DeviceMeshParameters().build(), config, schedule), schedule


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_state_before_is_restored_also_after_an_exception(was_enabled):
    collector, _ = build(2)
    (gc.enable if was_enabled else gc.disable)()
    try:
        with pytest.raises(KeyError, match="False"), collector:
            raise KeyError(gc.isenabled())
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()


def test_without_a_period_python_collects_by_itself():
    collector, _ = build("disable")
    with collector:
        assert gc.isenabled()


def test_a_cycle_lives_until_its_period():
    collector, schedule = build(2)
    with collector:
        cycle = weakref.ref(Cycle())
        collector.collect_periodic()
        assert cycle() is not None
        schedule.step()
        collector.collect_periodic()
        assert cycle() is None


def test_a_forced_collection_does_not_wait():
    collector, _ = build("last_step")
    with collector:
        cycle = weakref.ref(Cycle())
        collector.collect_forced()
        assert cycle() is None
