"""Training in several processes: the process group, DDP, FSDP2 and samplers."""

from composer.distributed.collectives import (
    all_agree,
    all_gather,
    all_gather_object,
    all_reduce,
    all_reduce_min,
    any_rank,
    barrier,
    broadcast,
    broadcast_buffers,
    broadcast_model,
    broadcast_object_list,
    from_rank_zero,
    run_local_rank_zero_first,
)
from composer.distributed.config import DDPSettings, DDPSyncStrategy
from composer.distributed.environment import (
    get_data_rank,
    get_data_world_size,
    get_global_rank,
    get_local_rank,
    get_local_world_size,
    get_node_rank,
    get_world_size,
    is_available,
    is_initialized,
)
from composer.distributed.global_batch import BatchShare, BatchWeights, GlobalBatch
from composer.distributed.mesh import MeshSettings, TensorParallelSettings
from composer.distributed.parallelism import Parallelism
from composer.distributed.process_group import check_timeout, close_dist, device_of_process, initialize_dist
from composer.distributed.samplers import (
    DistributedWeightedSampler,
    check_lengths,
    check_sampler,
    get_sampler,
    num_real_samples,
    num_real_samples_in_loader,
    real_parts,
    set_epoch,
)
from composer.distributed.sharding import FSDPSettings
from composer.functional.former_names import serve_former_names
from composer.functional.signatures import unquote_annotations

__all__ = [
    "BatchShare",
    "BatchWeights",
    "DDPSettings",
    "DDPSyncStrategy",
    "DistributedWeightedSampler",
    "FSDPSettings",
    "GlobalBatch",
    "MeshSettings",
    "Parallelism",
    "TensorParallelSettings",
    "all_agree",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_reduce_min",
    "any_rank",
    "barrier",
    "broadcast",
    "broadcast_buffers",
    "broadcast_model",
    "broadcast_object_list",
    "check_lengths",
    "check_sampler",
    "check_timeout",
    "close_dist",
    "device_of_process",
    "from_rank_zero",
    "get_data_rank",
    "get_data_world_size",
    "get_global_rank",
    "get_local_rank",
    "get_local_world_size",
    "get_node_rank",
    "get_sampler",
    "get_world_size",
    "initialize_dist",
    "is_available",
    "is_initialized",
    "num_real_samples",
    "num_real_samples_in_loader",
    "real_parts",
    "run_local_rank_zero_first",
    "set_epoch",
]

unquote_annotations(globals())
serve_former_names(__name__)
