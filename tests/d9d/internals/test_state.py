"""State that the main rank keeps for the job."""

from typing import Any

import pytest

from d9d.core.dist_context import DeviceMeshParameters
from d9d.internals.state import load_state_dict_main_process, state_dict_main_process


class Box:
    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


@pytest.mark.world_size(2)
def test_only_the_main_rank_saves_and_loads():
    dist_context = DeviceMeshParameters(data_parallel_replicate=2).build()
    saved = state_dict_main_process(dist_context, Box(3))
    assert saved == ({"main_process": {"value": 3}} if dist_context.rank == 0 else {})
    box = Box(0)
    load_state_dict_main_process(dist_context, box, saved)
    assert box.value == (3 if dist_context.rank == 0 else 0)
