"""Lightning advises to log with `sync_dist` where ranks have different data, and not where they all have the same."""

import os
import warnings

import pytest
from lightning.pytorch.trainer.connectors.logger_connector.result import warning_cache

from tests.d9d_lightning.differential import WORLD_2, Case, Probe, run_ours


class LogsOnItsOwn(Probe):
    def validation_step(self, batch, batch_idx):
        self.log("val", self.errors(batch)[1].sum())


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", WORLD_2)
def test_only_ranks_with_different_data_are_advised(name, tmp_path):
    # Lightning says it once for each key in a process.
    warning_cache.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        run_ours(Case(module=LogsOnItsOwn), WORLD_2[name], tmp_path)
        assert warnings.filters == before
    advised = [str(each.message) for each in caught if "sync_dist=True" in str(each.message)]
    # Rank 0 speaks for all.
    assert len(advised) == (1 if name == "replicate" and os.environ["RANK"] == "0" else 0)
    assert all("'val'" in message for message in advised)
