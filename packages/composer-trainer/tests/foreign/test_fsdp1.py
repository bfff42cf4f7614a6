"""Settings of FSDP1 are translated, or raise an error or a warning that names them."""

import pytest

from composer.compat.replacements import FSDPConfig
from composer.foreign.fsdp1 import from_fsdp1, translate_sections


@pytest.mark.parametrize(
    ("setting", "value", "expected"),
    [
        ("data_parallel_replicate_degree", "2", (TypeError, r"must be an int, got '2'")),
        ("data_parallel_replicate_degree", 0, (ValueError, "must be at least 1, got 0. It is a number of processes")),
        ("data_parallel_shard_degree", [4], (TypeError, "must be an int")),
        ("data_parallel_shard_degree", None, (TypeError, "must be an int.*; -1 is the default")),
        ("sharding_strategy", ["FULL_SHARD"], (ValueError, r"must be one of FULL_SHARD.* got \['FULL_SHARD'\]")),
        ("sharding_strategy", None, (ValueError, "must be one of FULL_SHARD.* got None")),
    ],
)
def test_wrong_settings_of_fsdp1(setting, value, expected):
    """A wrong degree or strategy of FSDP1 raises an error that names it."""
    error, message = expected
    with pytest.raises(error, match=rf"parallelism_config\['fsdp'\]\['{setting}'\] {message}"):
        translate_sections({"fsdp": {setting: value}})


def test_settings_without_an_equal():
    """Settings of FSDP1 that save memory give a warning, the others none; an unknown strategy is an error."""
    plain = {"use_orig_params": False, "limit_all_gathers": True, "state_dict_type": "sharded", "verbose": True}

    assert from_fsdp1(plain) == ({}, {})
    with pytest.warns(UserWarning, match="no effect in FSDP2: activation_checkpointing. Remove"):
        from_fsdp1({**plain, "activation_checkpointing": True})
    with pytest.raises(ValueError, match=r"HYBRID_SHARD.* got 'NO_SHARD'\. Leave out"):
        from_fsdp1(FSDPConfig("NO_SHARD"))
