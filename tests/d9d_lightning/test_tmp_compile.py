import pytest, torch, torch.distributed as dist
from torch import nn
from tests.d9d_lightning.test_tensor_parallel import *
from tests.d9d_lightning.support import Regression, rank_loader, make_samples

class InPlace(Regression):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager")
class Wrapped(Regression):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([torch.compile(b, backend="aot_eager") for b in self.blocks])

@pytest.mark.world_size(2)
@pytest.mark.parametrize("cls", [InPlace, Wrapped])
@pytest.mark.parametrize("mesh", [{"data_parallel_replicate": 2}, {"data_parallel_shard": 2}, {"tensor_parallel": 2}], ids=str)
def test_compiled(mesh, cls):
    torch._dynamo.reset()
    m = seeded(cls); ref = seeded(Regression)
    samples = make_samples(24)
    tp = "tensor_parallel" in mesh
    plan = {"head": "rowwise_split"} 
    if tp: plan |= {"blocks.*.inner.0" if cls is InPlace else "blocks.*._orig_mod.inner.0": "colwise_gather"}
    trainer = build_trainer(mesh, strategy_options={"parallelize": plan if tp else None})
    trainer.fit(m, rank_loader(samples, 8, 0 if tp else dist.get_rank(), 1 if tp else 2))
    plain_trainer().fit(ref, rank_loader(samples, 8, 0, 1))
    got = {k.replace("_orig_mod.",""): v for k,v in full_state(m).items()}
    torch.testing.assert_close(got, dict(ref.state_dict()), **EXACT)
