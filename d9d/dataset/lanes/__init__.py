"""Elastic, deterministic data: the same samples in the same order on any number of ranks, resumed in constant time."""

from d9d.dataset.lanes.fingerprint import FingerprintedDataset, dataset_fingerprint
from d9d.dataset.lanes.lane_pack_stream import ElasticLaneStream
from d9d.dataset.lanes.lane_stream import LaneRecords, LaneStream
from d9d.dataset.lanes.loader_processes import LoaderOptions
from d9d.dataset.lanes.map_stream import ElasticMapStream
from d9d.dataset.lanes.microbatch_loading import AttachWeights, BatchedDataset, MicrobatchRequest, add_weights
from d9d.dataset.lanes.mixture import LaneMixture, MixtureDataset, MixtureSchedule
from d9d.dataset.lanes.order import SampleOrder, Tail
from d9d.dataset.lanes.permutation import ORDER_VERSION, Permutation
from d9d.dataset.lanes.plan import DataPlan
from d9d.dataset.lanes.record_loading import RecordLoader
from d9d.dataset.lanes.sample_loading import MapDataset, SampleError, SeededDataset
from d9d.dataset.lanes.schedule import BatchSchedule, RampPoint, StepRange
from d9d.dataset.lanes.state import STATE_VERSION, LaneState, check_resume
from d9d.dataset.lanes.token_packing import (
    BestFitPacker,
    Documents,
    ExpectedDocuments,
    PackedSequence,
    WrapPacker,
)

__all__ = [
    "ORDER_VERSION",
    "STATE_VERSION",
    "AttachWeights",
    "BatchSchedule",
    "BatchedDataset",
    "BestFitPacker",
    "DataPlan",
    "Documents",
    "ElasticLaneStream",
    "ElasticMapStream",
    "ExpectedDocuments",
    "FingerprintedDataset",
    "LaneMixture",
    "LaneRecords",
    "LaneState",
    "LaneStream",
    "LoaderOptions",
    "MapDataset",
    "MicrobatchRequest",
    "MixtureDataset",
    "MixtureSchedule",
    "PackedSequence",
    "Permutation",
    "RampPoint",
    "RecordLoader",
    "SampleError",
    "SampleOrder",
    "SeededDataset",
    "StepRange",
    "Tail",
    "WrapPacker",
    "add_weights",
    "check_resume",
    "dataset_fingerprint",
]
