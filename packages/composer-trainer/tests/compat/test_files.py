"""Names of files and checkpoints under former names."""

from datetime import timedelta

import pytest
import torch

from composer.checkpoint import CheckpointError
from composer.compat.files import (
    PartialFilePath,
    ensure_valid_checkpoint,
    format_name_with_dist,
    format_name_with_dist_and_time,
    get_hf_config_from_composer_state_dict,
    get_save_filename,
    safe_torch_load,
)
from composer.core import State, Timestamp
from fixtures import small_run


def state_at_batch_five():
    state = State(model=None, run_name="mine")
    state.timestamp = Timestamp(epoch=1, batch=5, batch_in_epoch=2, total_wct=timedelta(seconds=90))
    return state


def test_fields_of_the_process(monkeypatch):
    """The numbers of the process are filled in, and further values."""
    monkeypatch.setenv("NODE_RANK", "2")

    name = format_name_with_dist("{run_name}-{rank}-{local_rank}-{world_size}-{node_rank}-{x}", "a", x=3)

    assert name == "a-0-0-1-2-3"


def test_fields_of_the_clock():
    """Counts are whole numbers, and times are in seconds."""
    timestamp = state_at_batch_five().timestamp

    name = format_name_with_dist_and_time("{epoch}-{batch:03}-{batch_in_epoch}-{total_wct}", "mine", timestamp)

    assert name == "1-005-2-90.0"


def test_partial_paths():
    """The folder has the fields of the process, the name also those of the clock; both can be kept."""
    path = PartialFilePath("ep{epoch}-rank{rank}.pt", "out/{run_name}")

    assert path.format(state_at_batch_five()) == "out/mine/ep1-rank0.pt"
    assert path.format(state_at_batch_five(), True) == "out/{run_name}/ep{epoch}-rank{rank}.pt"
    assert PartialFilePath("ep{epoch}").format(state_at_batch_five()) == "ep1"
    assert get_save_filename(state_at_batch_five()) == "ep1-ba5-rank0"


def test_a_checkpoint_of_a_run_is_loaded(tmp_path):
    """A saved checkpoint is read with its weights under the keys of Composer's files."""
    with small_run(max_duration="1ep", save_folder=str(tmp_path)) as trainer:
        trainer.fit()

    loaded = safe_torch_load(tmp_path / "ep1-ba5")

    weights = trainer.state.model.state_dict()
    assert loaded["state"]["model"].keys() == weights.keys()
    assert all(torch.equal(loaded["state"]["model"][name], weight) for name, weight in weights.items())
    assert ensure_valid_checkpoint(tmp_path / "ep1-ba5") == tmp_path / "ep1-ba5"


def test_damaged_checkpoints(tmp_path):
    """A file that was cut off, a folder that was changed, and a file with code raise an error."""
    torch.save({"model": torch.ones(100)}, tmp_path / "whole.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:500])
    with small_run(max_duration="1ep", save_folder=str(tmp_path / "run")) as trainer:
        trainer.fit()
    (tmp_path / "run" / "ep1-ba5" / "model.safetensors").write_bytes(b"")
    torch.save({"run": print}, tmp_path / "code.pt")

    assert ensure_valid_checkpoint(tmp_path / "whole.pt") == tmp_path / "whole.pt"
    for path in ("cut.pt", "run/ep1-ba5", "code.pt", "none.pt"):
        with pytest.raises(CheckpointError):
            ensure_valid_checkpoint(tmp_path / path)


def test_the_configuration_of_a_saved_model(tmp_path):
    """The configuration of a model of Transformers is that of the saved model, with the changes."""
    transformers = pytest.importorskip("transformers", reason="transformers is in the test group")
    from composer import Trainer
    from composer.models import HuggingFaceModel

    config = transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=16)
    model = HuggingFaceModel(transformers.GPT2LMHeadModel(config))
    with Trainer(model=model, device="cpu", progress_bar=False, optimizers=torch.optim.SGD(model.parameters())) as one:
        one.save_checkpoint(str(tmp_path / "saved"))

    read = get_hf_config_from_composer_state_dict(safe_torch_load(tmp_path / "saved"), {"n_positions": 32})

    assert type(read) is type(config)
    assert (read.n_embd, read.n_layer, read.vocab_size, read.n_positions) == (8, 1, 20, 32)
    with pytest.raises(ValueError, match="not a HuggingFaceModel"):
        get_hf_config_from_composer_state_dict({"state": {"model": {}}})
