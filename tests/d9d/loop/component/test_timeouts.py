"""Time limits of collectives."""

import pytest
import torch.distributed as dist

from d9d.core.dist_context import DeviceMeshParameters
from d9d.loop.component.timeouts import TimeoutManager
from d9d.loop.config import TimeoutConfig


@pytest.mark.world_size(2)
def test_limits_change_once_and_only_when_asked():
    manager = TimeoutManager(
        DeviceMeshParameters(data_parallel_replicate=2).build(), TimeoutConfig(init_timeout=77, step_timeout=33)
    )
    manager.set_init()
    # The limit itself is kept inside the backend; what can be seen from here is that all ranks pass together.
    manager.set_periodic()
    if dist.get_rank() == 0:
        # A change is collective, so that a rank that is alone can only return if nothing changes.
        manager.set_periodic()


def test_one_process_has_no_limits_to_set():
    manager = TimeoutManager(DeviceMeshParameters().build(), TimeoutConfig())
    manager.set_init()
    manager.set_periodic()
