"""Names of files and checkpoints under former names."""

import functools
from datetime import timedelta

import pytest
import torch

from composer.checkpoint import CheckpointError
from composer.compat.files import (
    PartialFilePath,
    ensure_folder_has_no_conflicting_files,
    ensure_folder_is_empty,
    ensure_valid_checkpoint,
    format_name_with_dist,
    format_name_with_dist_and_time,
    get_hf_config_from_composer_state_dict,
    get_save_filename,
    partial_format,
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


def test_a_file_is_loaded_to_a_device(tmp_path):
    """``map_location`` is the device of all tensors."""
    torch.save({"state": {"model": {"weight": torch.ones(2)}}}, tmp_path / "a.pt")

    weight = safe_torch_load(tmp_path / "a.pt", map_location="meta")["state"]["model"]["weight"]

    assert weight.is_meta


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


@pytest.mark.parametrize(
    ("filename", "name", "is_later"),
    [
        ("ep{epoch}-ba{batch}.pt", "ep1-ba6.pt", True),
        ("ep{epoch}-ba{batch}.pt", "ep1-ba5.pt", False),
        ("ep{epoch}-ba{batch}.pt", "ep9-ba9.txt", False),
        ("{epoch}-{batch_in_epoch}", "0-9", False),  # of an earlier epoch
        ("{epoch}-{batch_in_epoch}", "1-3", True),
        ("{epoch}-{epoch}-{rank}", "2-2-0", True),
        ("{epoch}-{epoch}-{rank}", "2-1-0", False),
    ],
)
def test_later_checkpoints(tmp_path, filename, name, is_later):
    """A checkpoint that is later than the clock raises; counts in the epoch are compared in the same epoch."""
    (tmp_path / name).touch()
    check = functools.partial(
        ensure_folder_has_no_conflicting_files, tmp_path, filename, state_at_batch_five().timestamp
    )

    if is_later:
        with pytest.raises(FileExistsError, match="is later than the run"):
            check()
    else:
        check()


def test_hidden_files(tmp_path):
    """A folder that has only hidden files is empty."""
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "one").touch()

    ensure_folder_is_empty(tmp_path)

    (tmp_path / "two").touch()
    with pytest.raises(FileExistsError, match="two exists"):
        ensure_folder_is_empty(tmp_path)


def test_formats_of_fields_that_remain():
    """A field without a value keeps its format; the others are filled in."""
    assert partial_format("{run_name}/ba{batch:04d}-{:>3}-{}", "a", run_name="mine") == "mine/ba{batch:04d}-  a-{}"
