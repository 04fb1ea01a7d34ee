"""The topology of a job: one set of ranks, seen as several device meshes (domains)."""

import contextlib
import logging
import math
import os
import sys
from collections.abc import Generator
from datetime import timedelta
from functools import cached_property
from typing import Self

import torch
import torch.distributed as dist
from pydantic import ConfigDict, Field, model_validator
from torch.distributed.device_mesh import DeviceMesh

from d9d.core.agreement import agree_on
from d9d.core.config import Config
from d9d.core.device import communication_backend, local_device, resolve_device_type, synchronize
from d9d.core.failures.activity import Activity
from d9d.core.launch import LaunchEnvironment
from d9d.core.mesh_groups import GroupPool, RankLayout
from d9d.core.participants import Participants

REGULAR_DOMAIN = "regular"
"""Every degree a dimension of its own: ``pp, dp_replicate, dp_shard, cp_shard, cp_replicate, tp``."""
DENSE_DOMAIN = "dense"
"""For dense layers: ``pp, dp_replicate, dp_cp_shard, cp_replicate, tp``."""
EXPERT_DOMAIN = "expert"
"""For experts: ``pp, ep_replicate, ep_shard, tp``."""
BATCH_DOMAIN = "batch"
"""For data: ``pp, dp, cp, tp``. Ranks with the same ``dp`` coordinate read the same samples."""
FLAT_DOMAIN = "flat"
"""All ranks in one dimension: ``world``."""

_MERGED_DIMENSIONS: dict[str, dict[str, tuple[str, ...]]] = {
    REGULAR_DOMAIN: {
        "pp": ("pp",),
        "dp_replicate": ("dp_replicate",),
        "dp_shard": ("dp_shard",),
        "cp_shard": ("cp_shard",),
        "cp_replicate": ("cp_replicate",),
        "tp": ("tp",),
    },
    DENSE_DOMAIN: {
        "pp": ("pp",),
        "dp_replicate": ("dp_replicate",),
        "dp_cp_shard": ("dp_shard", "cp_shard"),
        "cp_replicate": ("cp_replicate",),
        "tp": ("tp",),
    },
    BATCH_DOMAIN: {
        "pp": ("pp",),
        "dp": ("dp_replicate", "dp_shard"),
        "cp": ("cp_shard", "cp_replicate"),
        "tp": ("tp",),
    },
    FLAT_DOMAIN: {"world": ("pp", "dp_replicate", "dp_shard", "cp_shard", "cp_replicate", "tp")},
}
"""Domains whose dimensions are unions of root dimensions. The expert domain cuts the ranks of dp and cp anew."""

_SHORT_NAMES = {
    "pp": "pp",
    "dp_replicate": "dpr",
    "dp_shard": "dps",
    "cp_shard": "cps",
    "cp_replicate": "cpr",
    "tp": "tp",
}
"""Labels of the mesh coordinates in log lines."""


class DeviceMeshParameters(Config):
    """The parallelism degrees of a job.

    The job runs on as many ranks as the product of all degrees except `expert_parallel`, which only regroups the ranks
    of data and context parallelism.
    """

    model_config = ConfigDict(frozen=True)

    pipeline_parallel: int = Field(default=1, ge=1)
    """Number of pipeline ranks. 1: the whole model on every rank."""
    data_parallel_replicate: int = Field(default=1, ge=1)
    """Number of data-parallel replicas that hold full parameters."""
    data_parallel_shard: int = Field(default=1, ge=1)
    """Number of data-parallel ranks that share one copy of the parameters."""
    context_parallel_replicate: int = Field(default=1, ge=1)
    """Number of ranks that split a sequence and hold full parameters."""
    context_parallel_shard: int = Field(default=1, ge=1)
    """Number of ranks that split a sequence and share one copy of the parameters."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Number of ranks that split single layers."""
    expert_parallel: int = Field(default=1, ge=1)
    """Number of ranks that share the experts of a layer; regroups data- and context-parallel ranks."""

    @model_validator(mode="after")
    def _check_expert_parallel(self) -> Self:
        replicas = self.data_ranks
        if replicas % self.expert_parallel != 0:
            valid = [degree for degree in range(1, replicas + 1) if replicas % degree == 0]
            raise ValueError(
                f"expert_parallel ({self.expert_parallel}) must divide data_parallel x context_parallel = "
                f"{self.data_parallel_replicate} x {self.data_parallel_shard} x {self.context_parallel_shard} x "
                f"{self.context_parallel_replicate} = {replicas}. Valid values: {', '.join(map(str, valid))}."
            )
        return self

    @property
    def data_ranks(self) -> int:
        """Number of ranks that hold different data: data parallel x context parallel."""
        return (
            self.data_parallel_replicate
            * self.data_parallel_shard
            * self.context_parallel_shard
            * self.context_parallel_replicate
        )

    @property
    def root_shape(self) -> dict[str, int]:
        """Degree of each dimension of the regular domain, outermost first."""
        return {
            "pp": self.pipeline_parallel,
            "dp_replicate": self.data_parallel_replicate,
            "dp_shard": self.data_parallel_shard,
            "cp_shard": self.context_parallel_shard,
            "cp_replicate": self.context_parallel_replicate,
            "tp": self.tensor_parallel,
        }

    @property
    def world_size(self) -> int:
        """Number of ranks that the mesh needs."""
        return self.pipeline_parallel * self.data_ranks * self.tensor_parallel

    @property
    def data_parallel(self) -> int:
        """Number of ranks that read different samples: replicate x shard."""
        return self.data_parallel_replicate * self.data_parallel_shard

    @property
    def context_parallel(self) -> int:
        """Number of ranks that split a sequence: shard x replicate."""
        return self.context_parallel_shard * self.context_parallel_replicate

    @property
    def has_pipeline_parallel(self) -> bool:
        """Whether the model is cut into pipeline stages."""
        return self.pipeline_parallel > 1

    @property
    def has_data_parallel_replicate(self) -> bool:
        """Whether there are data-parallel replicas with full parameters."""
        return self.data_parallel_replicate > 1

    @property
    def has_data_parallel_shard(self) -> bool:
        """Whether data-parallel ranks share one copy of the parameters."""
        return self.data_parallel_shard > 1

    @property
    def has_context_parallel_replicate(self) -> bool:
        """Whether a sequence is split over ranks that hold full parameters."""
        return self.context_parallel_replicate > 1

    @property
    def has_context_parallel_shard(self) -> bool:
        """Whether a sequence is split over ranks that share one copy of the parameters."""
        return self.context_parallel_shard > 1

    @property
    def has_tensor_parallel(self) -> bool:
        """Whether single layers are split over ranks."""
        return self.tensor_parallel > 1

    @property
    def has_expert_parallel(self) -> bool:
        """Whether experts are shared by several ranks."""
        return self.expert_parallel > 1

    @property
    def is_distributed(self) -> bool:
        """Whether the job needs more than one rank."""
        return self.world_size > 1

    def check_world_size(self, world_size: int) -> None:
        """Refuse a number of processes that does not fit the degrees.

        Raises:
            ValueError: With both numbers and each degree that would fit instead.
        """
        if world_size == self.world_size:
            return
        fits = self._single_changes_for(world_size)
        degrees = " x ".join(
            f"{name} {value}" for name, value in self.model_dump().items() if value > 1 and name != "expert_parallel"
        )
        mend = f", or set {' or '.join(fits)}" if fits else ""
        raise ValueError(
            f"The mesh needs {self.world_size} processes ({degrees or 'all degrees are 1'}), but the job runs "
            f"{world_size}. Start {self.world_size} (torchrun --nproc-per-node {self.world_size}){mend}."
        )

    def _single_changes_for(self, world_size: int) -> list[str]:
        """Return the degrees that would make the mesh fit if they alone were changed."""
        fits: list[str] = []
        for name, degree in self.model_dump().items():
            others = self.world_size // degree
            if name == "expert_parallel" or world_size % others != 0:
                continue
            changed = self.model_copy(update={name: world_size // others})
            if changed.data_ranks % self.expert_parallel == 0:
                fits.append(f"{name}: {world_size // others}")
        return fits

    def build(self, log_level: int = logging.INFO) -> "DistributedContext":
        """Build the context of this process. All ranks of the job must call it."""
        return DistributedContext(self, log_level)


class DistributedContext:
    """The ranks of a job and the meshes over them; passed to every component, never read from global state.

    With all degrees 1 there is no process group and no mesh: the job is a plain Python process.

    [Note: one set of groups]
    Each domain is a mesh of its own, but all are built over the same process groups: `GroupPool` hands out one group
    for one set of ranks, so that ``dp_shard`` of the regular domain and ``dp_cp_shard`` of the dense domain are the
    same communicator when context parallelism is off. The ``cp`` dimension of the batch domain alone has a group that no
    other dimension shares, see [Note: a group for attention].
    """

    def __init__(self, params: DeviceMeshParameters, log_level: int, *, device: torch.device | None = None) -> None:
        """Join the job. All ranks must call it, in the same order relative to other collectives.

        A default process group that exists already is used and stays its owner's; otherwise one is created from the
        environment that torchrun sets, and destroyed at exit.

        Args:
            params: Parallelism degrees; their product must be the number of processes.
            log_level: Level of `logger`.
            device: Device of this rank; None resolves it from the local rank.

        Raises:
            ValueError: If the degrees do not fit the number of processes, or the environment is malformed. Raised
                before any process group exists. Also if ranks have other degrees, on all of them.
        """
        self._params = params
        self._launch = LaunchEnvironment.read()
        params.check_world_size(self._launch.world_size)
        if device is None:
            device = local_device(resolve_device_type(), self._launch.local_rank)
        self._device = device
        self._layout = RankLayout(shape=params.root_shape, rank=self._launch.rank)
        self._pool: GroupPool | None = None
        self._meshes: dict[str, DeviceMesh] = {}
        self._data_group: dist.ProcessGroup | None = None
        self._replica_group: dist.ProcessGroup | None = None
        self._activity = Activity()
        if params.is_distributed:
            self._launch.ensure_process_group(communication_backend(device.type))
            self._pool = GroupPool()
            # Before there are groups: ranks with other degrees would wait for groups that nobody else makes.
            agree_on(Participants(self._pool.groups), "the mesh", params.model_dump(), "Give all ranks the same mesh.")
            self._meshes = _build_meshes(params, self._layout, self._pool, device.type)
            data_ranks = self._layout.peers(tuple(name for name in params.root_shape if name != "tp"))
            self._data_group = self._pool.group(data_ranks, "data")
            replicas = tuple(name for name in params.root_shape if name not in ("pp", "tp"))
            self._replica_group = self._pool.group(self._layout.peers(replicas), "replicas")
        self._logger = build_dist_logger(self._qualifier(), log_level)

    def _qualifier(self) -> str:
        if not self.is_distributed:
            return "local"
        return "-".join(f"{label}:{self._layout.coordinate(name)}" for name, label in _SHORT_NAMES.items())

    @property
    def mesh_params(self) -> DeviceMeshParameters:
        """The degrees that the context was built from."""
        return self._params

    @property
    def is_distributed(self) -> bool:
        """Whether the job has more than one rank, so that meshes and groups exist."""
        return self._pool is not None

    @property
    def activity(self) -> Activity:
        """Where the thread that runs the job is. That thread writes it."""
        return self._activity

    @property
    def logger(self) -> logging.Logger:
        """Logger that prefixes each line with the mesh coordinates of this rank."""
        return self._logger

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self._launch.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self._params.world_size

    @property
    def local_rank(self) -> int:
        """Index of this process on its node."""
        return self._launch.local_rank

    @property
    def node_rank(self) -> int:
        """Index of the node of this process."""
        return self._launch.node_rank

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the job."""
        return self._launch.num_nodes

    @property
    def master_addr(self) -> str:
        """Address of the node with rank 0."""
        return self._launch.master_addr

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0, which owns files, trackers and progress bars."""
        return self._launch.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its node."""
        return self._launch.local_rank == 0

    @property
    def current_device(self) -> torch.device:
        """Device that this rank computes on."""
        return self._device

    @property
    def dp_size(self) -> int:
        """Number of ranks that read different samples."""
        return self._params.data_parallel

    @cached_property
    def dp_rank(self) -> int:
        """Index among the ranks that read different samples; equal for all pp, cp and tp peers."""
        shard_size = self._params.data_parallel_shard
        return self._layout.coordinate("dp_replicate") * shard_size + self._layout.coordinate("dp_shard")

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """Group that sums losses, loss weights and metrics: all ranks with this tp coordinate. None on one rank.

        Tensor-parallel peers compute the same loss, so summing over them would count it twice.
        """
        return self._data_group

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """Group of the ranks that run the same stages on different data. None on one rank."""
        return self._replica_group

    @cached_property
    def pipeline_group(self) -> dist.ProcessGroup:
        """Group of this rank's pipeline for transfers between stages, by ``pp`` coordinate. All ranks must ask for it.

        A group of its own, created when first asked for: transfers are ordered among themselves alone, and a failing
        rank can end them without touching the collectives of the job.

        Raises:
            RuntimeError: If the job runs on one rank, where no group exists.
        """
        if self._pool is None:
            raise RuntimeError("pipeline_group: all parallelism degrees are 1, so there is no process group.")
        return self._pool.separate_group(self._layout.peers(("pp",)), "pipeline")

    def pipeline_subgroup(self, coordinates: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the group of some ranks of this rank's pipeline, creating it on first use.

        All ranks of the job must call it, those left out too, and in the same order relative to other new groups.

        Args:
            coordinates: Their ``pp`` coordinates, ascending.

        Returns:
            The group; None if this rank is left out.

        Raises:
            RuntimeError: If the job runs on one rank, where no group exists.
        """
        if self._pool is None:
            raise RuntimeError("pipeline_subgroup: all parallelism degrees are 1, so there is no process group.")
        pipeline = self._layout.peers(("pp",))
        ranks = tuple(pipeline[coordinate] for coordinate in coordinates)
        if self._layout.rank in ranks:
            return self._pool.group(ranks, "pipeline subgroup")
        self._pool.skip_group(ranks)
        return None

    def separate_host_group(self, description: str, timeout_s: float) -> dist.ProcessGroup | None:
        """Create a further group of all ranks for tensors and objects on the host. None on one rank.

        All ranks must call it, in the same order relative to other new groups. Time limits of the job do not apply to it.

        Args:
            description: Shown by PyTorch's debugging tools.
            timeout_s: Time limit of an operation on the group in seconds.
        """
        if self._pool is None:
            return None
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc=description)
        assert isinstance(group, dist.ProcessGroup)  # only non-members get a placeholder
        return group

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """All process groups of this rank; empty on one rank."""
        return () if self._pool is None else self._pool.groups

    def mesh_for(self, domain: str) -> DeviceMesh:
        """Return the mesh of a domain.

        Args:
            domain: One of the ``*_DOMAIN`` constants of this module.

        Raises:
            RuntimeError: If the job runs on one rank, where no mesh exists.
            ValueError: If there is no such domain.
        """
        if not self._meshes:
            raise RuntimeError(f"mesh_for({domain!r}): all parallelism degrees are 1, so there is no device mesh.")
        if domain not in self._meshes:
            raise ValueError(f"there is no domain {domain!r}. Valid: {', '.join(self._meshes)}.")
        return self._meshes[domain]

    def wait_world(self) -> None:
        """Block the host until all ranks are here and this device is idle. All ranks must call it."""
        if self.is_distributed:
            dist.barrier()
        synchronize(self._device)

    def set_timeout(self, timeout_seconds: float) -> None:
        """Set the time limit of collectives on every group, sub-groups included. All ranks must call it.

        Args:
            timeout_seconds: Limit in seconds, for collectives that start from now on.
        """
        if self._pool is None:
            return
        # A rank with the shorter limit must not wait for one that still does setup work under the longer limit.
        self.wait_world()
        self._pool.set_timeout(timedelta(seconds=timeout_seconds))

    @contextlib.contextmanager
    def main_process_first(self) -> Generator[None]:
        """Run the block on rank 0, then on all others. All ranks must enter it."""
        with self._first(self.is_main_process):
            yield

    @contextlib.contextmanager
    def local_main_process_first(self) -> Generator[None]:
        """Run the block on the first process of each node, then on all others. All ranks must enter it."""
        with self._first(self.is_local_main_process):
            yield

    @contextlib.contextmanager
    def _first(self, is_first: bool) -> Generator[None]:
        if not is_first:
            self.wait_world()
        try:
            yield
        finally:
            # Also when the block raised: the others would wait for ever.
            if is_first:
                self.wait_world()


def _build_meshes(
    params: DeviceMeshParameters, layout: RankLayout, pool: GroupPool, device_type: str
) -> dict[str, DeviceMesh]:
    world = torch.arange(params.world_size, dtype=torch.int)
    domains = {domain: (layout, dimensions) for domain, dimensions in _MERGED_DIMENSIONS.items()}
    expert_shape = {
        "pp": params.pipeline_parallel,
        "ep_replicate": params.data_ranks // params.expert_parallel,
        "ep_shard": params.expert_parallel,
        "tp": params.tensor_parallel,
    }
    expert_layout = RankLayout(shape=expert_shape, rank=layout.rank)
    domains[EXPERT_DOMAIN] = (expert_layout, {name: (name,) for name in expert_shape})
    meshes: dict[str, DeviceMesh] = {}
    for domain, (domain_layout, dimensions) in domains.items():
        sizes = [math.prod(domain_layout.shape[part] for part in parts) for parts in dimensions.values()]
        groups: list[dist.ProcessGroup] = []
        for (name, parts), size in zip(dimensions.items(), sizes, strict=True):
            has_own_group = domain == BATCH_DOMAIN and name == "cp" and size > 1
            build_group = pool.separate_group if has_own_group else pool.group
            groups.append(build_group(domain_layout.peers(parts), name))
        meshes[domain] = DeviceMesh.from_group(
            groups,
            device_type,
            world.view(sizes),
            mesh_dim_names=tuple(dimensions),
        )
    return meshes


def build_dist_logger(qualifier: str, level: int) -> logging.Logger:
    """Return a logger to standard output that prefixes lines with ``[d9d] [qualifier]``.

    Args:
        qualifier: Text that tells ranks apart, such as mesh coordinates.
        level: Level of `logging`.
    """
    logger = logging.getLogger(f"d9d.{os.getpid()}.{qualifier}")
    logger.setLevel(level)
    logger.propagate = False
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(f"[d9d] [{qualifier}] %(asctime)s - %(levelname)s - %(message)s"))
    logger.addHandler(handler)
    return logger
