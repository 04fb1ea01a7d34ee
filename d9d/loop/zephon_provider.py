"""Feed a job from a pipeline of Zephon: `ZephonDataProvider`. Needs the extra ``d9d-lightning[zephon]``."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Self

import torch.distributed as dist
from pydantic import Field, model_validator

from d9d.core.config import Config
from d9d.core.dist_context import DeviceMeshParameters, DistributedContext
from d9d.core.protocol import MicrobatchPackStream
from d9d.dataset.lanes.plan import divisors
from d9d.dataset.zephon import ZephonPackStream, pipeline_identity
from d9d.loop.control import InitializeDataProviderContext

if TYPE_CHECKING:
    from zephon import Pipeline

__all__ = ["ZephonConfig", "ZephonDataProvider"]

_UNKNOWN_OPTION = "Unknown pipeline option"


class ZephonConfig(Config):
    """Sets how a pipeline of Zephon is dealt out to the ranks of a job."""

    lanes: int = Field(
        ge=1,
        description=(
            "Lanes of the data, Zephon's canonical_replicas; fixed for the whole run. Each number of data-parallel ranks "
            "that divides it can start or resume the run."
        ),
    )
    microbatches_per_step: int = Field(
        ge=1, description="Batches of the pipeline that make a step, over all ranks. A multiple of lanes."
    )
    run_id: str = Field(
        min_length=1,
        description=(
            "Name under which the ranks exchange their positions. Jobs that run at the same time and share the location "
            "need different ones."
        ),
    )
    coordination: Literal["store", "dir"] = Field(
        default="store",
        description=(
            "Where the ranks exchange their positions for a checkpoint. Default 'store': the key-value store of torchrun, "
            "for which nothing has to be set up. 'dir': a folder that all machines share."
        ),
    )
    location: str | None = Field(
        default=None,
        description="Folder or URL for 'dir'. For 'store', torch://host:port, or null for that of torchrun.",
    )
    timeout_s: float = Field(default=180.0, gt=0, description="Seconds that ranks wait for each other in a checkpoint.")
    total_steps: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Steps of the run. null: until the data of some rank end, which all agree on before each step; schedule "
            "total_steps of the job must be set then."
        ),
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems: list[str] = []
        if self.microbatches_per_step % self.lanes:
            valid = ", ".join(str(number) for number in divisors(self.microbatches_per_step))
            problems.append(
                f"microbatches_per_step ({self.microbatches_per_step}) is not a multiple of lanes ({self.lanes}): a "
                f"checkpoint between two steps would be in the middle of a round over the lanes, and another number of ranks "
                f"would read other steps. Use {self.lanes} lanes with {self._multiples()} microbatches, or one of {valid} lanes."
            )
        if self.coordination == "dir" and not self.location:
            problems.append("coordination 'dir' needs a location: a folder that all machines share, or a URL.")
        if problems:
            raise ValueError(" ".join(problems))
        return self

    def _multiples(self) -> str:
        count = self.microbatches_per_step // self.lanes
        return " or ".join(str(number * self.lanes) for number in (count, count + 1) if number)

    def mesh_problems(self, dp_size: int) -> list[str]:
        """Return why the lanes cannot be dealt out to a number of data-parallel ranks, if they cannot."""
        if self.lanes % dp_size == 0:
            return []
        valid = ", ".join(map(str, divisors(self.lanes)))
        return [
            f"lanes ({self.lanes}) is not a multiple of the {dp_size} data-parallel ranks. Use one of {valid} ranks."
        ]


class ZephonDataProvider:
    """Builds the stream of a job from a pipeline of Zephon.

    Each rank runs a pipeline of its own. Ranks that differ in other dimensions of the mesh only read the same lanes. A
    checkpoint holds the positions of all lanes, so that a run resumes on any number of data-parallel ranks that divides
    their number, with the same microbatches in each step. All ranks must call it.

    Args:
        build: Builds the pipeline up to its batches, with ``Pipeline(work_source). ... .batch(size)``, and sets none of the
            options that say which rank it is on and how ranks exchange positions.
        config: How it is dealt out.
        to_microbatch: Makes a microbatch from what the pipeline yields, such as ``SampleBatch.to_training``. None: as it is.
    """

    def __init__(
        self,
        build: Callable[[], "Pipeline"],
        config: ZephonConfig,
        to_microbatch: Callable[[Any], Any] | None = None,
    ) -> None:
        self._build = build
        self._config = config
        self._to_microbatch = to_microbatch or _as_it_is

    def mesh_problems(self, mesh: DeviceMeshParameters) -> list[str]:
        """Return why the lanes cannot be dealt out to a mesh, if they cannot."""
        return self._config.mesh_problems(mesh.data_parallel)

    def __call__(self, context: InitializeDataProviderContext) -> MicrobatchPackStream:
        """Build the stream of this rank. All ranks must call it; rank 0 reads parts of the files.

        Raises:
            ValueError: With all that is wrong with lanes and options.
        """
        config, job = self._config, context.dist_context
        options = self._options(job)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pipeline = self._build()
        unknown = [str(each.message) for each in caught if _UNKNOWN_OPTION in str(each.message)]
        problems = [*config.mesh_problems(job.dp_size), *unknown, *_problems_of_options(pipeline, options)]
        if problems:
            raise ValueError(" ".join(problems))
        for each in caught:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        agrees = job.is_distributed and config.total_steps is None
        return ZephonPackStream(
            pipeline.options(**options),
            microbatches_per_pack=config.microbatches_per_step // job.dp_size,
            to_microbatch=self._to_microbatch,
            total_steps=config.total_steps,
            identity={
                "lanes": config.lanes,
                "microbatches_per_step": config.microbatches_per_step,
                **_identity_of(pipeline, job),
            },
            end_group=_host_group() if agrees else None,
        )

    def _options(self, job: DistributedContext) -> dict[str, Any]:
        config = self._config
        options: dict[str, Any] = {
            "world_size": job.world_size,
            "global_rank": job.rank,
            "dp_degree": job.dp_size,
            "dp_group_id": job.dp_rank,
            "canonical_replicas": config.lanes,
            "run_id": config.run_id,
            "aggregate_timeout_s": config.timeout_s,
        }
        if job.is_distributed:
            is_store = config.coordination == "store"
            options["aggregate_store" if is_store else "aggregate_dir"] = config.location or "torch://"
        return options


def _host_group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError("this rank is not in the group of all ranks.")
    return group


def _as_it_is(batch: Any) -> Any:  # noqa: ANN401  # of any type
    return batch


def _problems_of_options(pipeline: "Pipeline", own: dict[str, Any]) -> list[str]:
    """Return which options the builder has set that follow from the job."""
    from zephon.options import RuntimeOptions

    defaults = {field.name: field.default for field in dataclasses.fields(RuntimeOptions)}
    current = vars(vars(pipeline)["_options"])  # introspection: Zephon has no public way to read them
    owned = {*own, "aggregate_dir", "aggregate_store"}
    return [
        f"the pipeline sets {name}={current[name]!r}, which follows from the job and its ZephonConfig: leave it out."
        for name in sorted(owned)
        if current[name] != defaults[name]
    ]


def _identity_of(pipeline: "Pipeline", job: DistributedContext) -> dict[str, str | int]:
    """Return rank 0's view of the data on all ranks, or raise its error on all of them."""
    found: list[Any] = [None]
    if job.rank == 0:
        try:
            found = [pipeline_identity(pipeline)]
        except Exception as error:  # noqa: BLE001  # raised below, on all ranks
            found = [error]
    if job.is_distributed:
        dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], Exception):
        raise RuntimeError(f"rank 0 could not read the data of the Zephon pipeline: {found[0]!r}") from found[0]
    return found[0]
