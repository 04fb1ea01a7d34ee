"""Find out that ranks which must read the same samples ask for different ones."""

from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist

from d9d.core.dist_context import DistributedContext
from d9d.dataset.pack_stream import sample_digest_of
from d9d.loop.component.job_schedule import JobSchedule
from d9d.loop.config import DataAgreementConfig, StepActionSpecial
from d9d.loop.event.catalogue.common import EventStepContext

__all__ = ["PeerAgreement"]


class PeerAgreement:
    """Compares digests of sample numbers of a step between ranks with one data-parallel coordinate: pp, cp and tp peers.

    Where a provider looks at the global rank, or ranks have other settings, shapes still fit, and nothing else would fail.
    What a dataset returns for a number is not looked at.

    Args:
        dist_context: Topology of the job.
        stream: Data stream of this rank.
        schedule: Steps of the job.
        config: When to compare.

    Raises:
        ValueError: The config asks for it, but the stream does not know which samples it reads.
    """

    def __init__(
        self, dist_context: DistributedContext, stream: object, schedule: JobSchedule, config: DataAgreementConfig
    ) -> None:
        digest = sample_digest_of(stream)
        if digest is None and config.period_steps != StepActionSpecial.disable:
            raise ValueError(
                f"data_agreement.period_steps ({config.period_steps}) needs a data stream that knows which samples it reads "
                "(SampleDigestStream), such as that of AutoDataProvider without packing. Set it to disable."
            )
        self._digest: Callable[[int], int] | None = digest
        self._schedule = schedule
        self._period_steps = config.period_steps
        self._dist_context = dist_context

    def check(self, context: EventStepContext) -> None:
        """Compare before a step that the config selects. All ranks must call it; then it blocks the host.

        All ranks exchange their digests, not only peers: if some differ, all must fail, and none wait for those that did.

        Raises:
            RuntimeError: On all ranks, if peers differ; names those that read something else than most.
        """
        if self._digest is None or not self._schedule.should_do_action(self._period_steps):
            return
        step = self._schedule.current_step
        peers: dict[int, dict[int, int]] = {}
        for rank, (dp_rank, digest) in enumerate(self._gather(self._digest(step))):
            peers.setdefault(dp_rank, {})[rank] = digest
        problems = [problem for digests in peers.values() for problem in _differences(digests)]
        if problems:
            raise RuntimeError(
                f"in step {step + 1}, {', '.join(problems)}, though these work on one batch. Give pipeline, context-parallel "
                "and tensor-parallel peers the same data settings (sizes, order, seed, skip_steps), and let a data provider "
                "look at dp_rank instead of the global rank."
            )

    def _gather(self, digest: int) -> list[list[int]]:
        """Return data-parallel rank and digest of each rank."""
        context = self._dist_context
        own = torch.tensor([context.dp_rank, digest], device=context.current_device)  # (2,), int64
        if not context.is_distributed:
            return [own.tolist()]
        rows = [torch.empty_like(own) for _ in range(context.world_size)]
        dist.all_gather(rows, own)
        return torch.stack(rows).tolist()


def _differences(digests: dict[int, int]) -> list[str]:
    """Name ranks whose digest is not the usual one, if there are any."""
    (usual, _), *others = Counter(digests.values()).most_common()
    if not others:
        return []
    different = sorted(rank for rank, digest in digests.items() if digest != usual)
    return [f"ranks {different} ask for other sample numbers than ranks {sorted(digests.keys() - different)}"]
