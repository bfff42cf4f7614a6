"""Translates settings of MosaicML Composer's FSDP1 and tensor parallelism to those of FSDP2 and a mesh.

The strategy becomes ``reshard_after_forward``, and the degrees become a mesh. Other settings of FSDP1 are left out,
with a warning if that costs memory or changes what is trained.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from composer.distributed.environment import get_local_world_size, get_world_size
from composer.functional.checks import check_whole

FSDP1_DEFAULTS: Mapping[str, Any] = {
    "activation_checkpointing": False,
    "activation_checkpointing_reentrant": True,
    "activation_cpu_offload": False,
    "te_checkpoint_wrapper": False,
    "te_shard_fp8_weight": False,
    "backward_prefetch": "BACKWARD_POST",
    "backward_prefetch_limit": 1,
    "data_parallel_shard_degree": -1,
    "data_parallel_replicate_degree": None,
    "forward_prefetch": False,
    "forward_prefetch_limit": 1,
    "ignored_modules": None,
    "keep_low_precision_grads": False,
    "limit_all_gathers": True,
    "load_monolith_rank0_only": False,
    "load_planner": None,
    "process_group": None,
    "save_planner": None,
    "sharded_ckpt_prefix_dir": "ep{epoch}-ba{batch}",
    "sharding_strategy": "FULL_SHARD",
    "state_dict_type": "full",
    "sync_module_states": False,
    "use_orig_params": True,
    "verbose": False,
}
"""MosaicML Composer's settings of FSDP1 that are none of FSDP2, and their defaults."""

_DEGREES = ("data_parallel_replicate_degree", "data_parallel_shard_degree")
_LOST = "activation_checkpointing", "activation_cpu_offload", "ignored_modules", "process_group", "te_shard_fp8_weight"
"""Settings without an equal that save memory or change what is trained; the others have no effect on a training."""
_RESHARDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "_HYBRID_SHARD_ZERO2": False}
"""Whether weights are released after the forward pass, by the strategy of FSDP1."""


def translate_sections(config: Any) -> Any:
    """Return a ``parallelism_config`` in the terms of FSDP2, with a mesh in place of degrees.

    What is not a dictionary is left as it is, and rejected where the settings are checked.

    Raises:
        TypeError: A degree is no integer.
        ValueError: The strategy of FSDP1 has no equal, or a degree is less than 1.

    Example:
        >>> translate_sections({"fsdp": {"sharding_strategy": "FULL_SHARD", "data_parallel_shard_degree": 1}})
        {'mesh': {'replicate': 1, 'shard': 1}, 'fsdp': {'reshard_after_forward': True}}
    """
    if not isinstance(config, Mapping):
        return config
    sections = {name: one for name, one in config.items() if isinstance(one, Mapping)}
    translated, mesh = dict(config), dict[str, int]()
    tp = sections.get("tp", {})
    degree = tp.get("tensor_parallel_degree")
    if degree is not None:
        meaning = "It is the number of processes that compute a layer together."
        check_whole("parallelism_config['tp']['tensor_parallel_degree']", degree, 1, meaning)
        del translated["tp"]
    if "fsdp" in sections:
        translated["fsdp"], mesh = from_fsdp1(sections["fsdp"], degree or 1)
    if degree is not None and degree > 1:
        across = "shard" if "fsdp" in sections else "replicate"
        mesh = {"tp": degree} | (mesh or {across: max(get_world_size() // degree, 1)})
        translated["tp"] = {"plan": tp.get("layer_plan")}
    return {"mesh": mesh} | translated if mesh else translated


def from_fsdp1(config: Mapping[str, Any], layer_size: int = 1) -> tuple[dict[str, Any], dict[str, int]]:
    """Return settings of FSDP2, and of the mesh, for a section ``"fsdp"`` that may contain settings of FSDP1.

    Args:
        config: The section.
        layer_size: How many processes share a layer.

    Raises:
        TypeError: A degree is no integer.
        ValueError: The strategy is another one than ``"FULL_SHARD"``, ``"SHARD_GRAD_OP"`` and their hybrids, in capital
            or small letters; or a degree is less than 1.

    Example:
        >>> from_fsdp1({"sharding_strategy": "SHARD_GRAD_OP", "use_orig_params": True})
        ({'reshard_after_forward': False}, {})
    """
    former = {name: config.get(name, default) for name, default in FSDP1_DEFAULTS.items()}
    settings = {name: value for name, value in config.items() if name not in former}
    replicas, shards = (former[name] for name in _DEGREES)
    strategy = str(former["sharding_strategy"]).upper()
    if strategy not in _RESHARDS:
        raise ValueError(
            f"parallelism_config['fsdp']['sharding_strategy'] must be one of {', '.join(_RESHARDS)}, got "
            f"{former['sharding_strategy']!r}. Leave out parallelism_config['fsdp'] for 'NO_SHARD'."
        )
    for name in _DEGREES:
        if former[name] != FSDP1_DEFAULTS[name]:
            meaning = f"It is a number of processes; {FSDP1_DEFAULTS[name]} is the default."
            check_whole(f"parallelism_config['fsdp'][{name!r}]", former[name], 1, meaning)
    if lost := [name for name in _LOST if former[name]]:
        warnings.warn(
            f"parallelism_config['fsdp'] has settings of FSDP1 that have no effect in FSDP2: {', '.join(lost)}. Remove "
            "them; in place of activation_checkpointing use the algorithm ActivationCheckpointing.",
            stacklevel=2,
        )
    if "sharding_strategy" in config:
        settings = {"reshard_after_forward": _RESHARDS[strategy]} | settings
    processes = max(get_world_size() // layer_size, 1)
    if "HYBRID" in strategy and replicas is None:
        on_machine = max(get_local_world_size() // layer_size, 1)
        replicas = max(processes // (on_machine if shards == -1 else shards), 1)
    if replicas is None and shards == -1:
        return settings, {}
    replicas = replicas or 1
    return settings, {"replicate": replicas, "shard": max(processes // replicas, 1) if shards == -1 else shards}
