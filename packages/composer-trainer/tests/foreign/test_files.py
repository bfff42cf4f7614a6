"""From a path to a file of another library, or to a checkpoint."""

import fsspec
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from composer.checkpoint import CheckpointError, load_checkpoint
from composer.core import State
from composer.foreign import ForeignFile
from composer.foreign.files import source_of
from composer.models import ComposerClassifier, HuggingFaceModel


def test_names_with_the_ending_of_files(tmp_path):
    """Only a checkpoint takes the place of a file that is not there, also at a URL; one that cannot be read is none."""
    (tmp_path / "bert").mkdir()
    files = fsspec.filesystem("memory")
    files.pipe({"/names/ep1/manifest.json": b"", "/names/ep2.pt": b"", "/names/ep2/manifest.json": b""})

    assert source_of("nowhere://bucket/model.pt") == ForeignFile("nowhere://bucket/model.pt")
    assert source_of("s3://model.pt") == ForeignFile("s3://model.pt")
    assert source_of(tmp_path / "bert.pt") == ForeignFile(tmp_path / "bert.pt")

    (tmp_path / "bert" / "manifest.json").touch()

    assert source_of(tmp_path / "bert.pt") == source_of(tmp_path / "bert-rank0.pt") == str(tmp_path / "bert")
    assert source_of("memory://names/ep1-rank0.pt") == "memory://names/ep1"
    assert source_of("memory://names/ep2.pt") == ForeignFile("memory://names/ep2.pt")
    assert source_of("memory://names/ep3.pt") == ForeignFile("memory://names/ep3.pt")


def test_names_in_a_file_lead_nowhere_else(tmp_path):
    """A file with a name leads to what has it in the same folder: not out of the folder, and not in a circle."""
    (tmp_path / "runs" / "ep1").mkdir(parents=True)
    files = {name: tmp_path / "runs" / f"{name}.pt" for name in ("up", "ep", "one", "other")}
    for name, content in {"up": "..", "ep": "ep1\n", "one": "other.pt", "other": "one.pt"}.items():
        files[name].write_text(content)

    assert source_of(files["up"]) == ForeignFile(files["up"])
    assert source_of(files["ep"]) == str(tmp_path / "runs" / "ep1")
    assert source_of(files["one"]) == ForeignFile(files["other"])


def test_weights_of_a_compiled_model(tmp_path):
    """The names that torch.compile adds to weights are no others."""
    saved, model = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    torch.save({f"_orig_mod.{name}": one for name, one in saved.state_dict().items()}, tmp_path / "weights.pt")

    load_checkpoint(ForeignFile(tmp_path / "weights.pt"), State(model), weights_only=True)

    assert model[0].weight.equal(saved[0].weight)


def test_file_of_transformers(tmp_path):
    """A folder of save_pretrained has the names of the network, and tied weights once; the wrapper gets all."""
    config = GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    saved, model = GPT2LMHeadModel(config), HuggingFaceModel(GPT2LMHeadModel(config))
    saved.save_pretrained(tmp_path)

    load_checkpoint(ForeignFile(tmp_path / "model.safetensors"), State(model), weights_only=True)

    assert all(one.equal(saved.state_dict()[name]) for name, one in model.model.state_dict().items())


@pytest.mark.parametrize("prefix", ["", "model.", "module."])
def test_names_with_the_prefix_of_a_wrapper(prefix, tmp_path):
    """A network in another wrapper, such as a LightningModule, is loaded into ComposerClassifier."""
    saved, model = nn.Sequential(nn.Linear(2, 2)), ComposerClassifier(nn.Sequential(nn.Linear(2, 2)), num_classes=2)
    torch.save({"state_dict": {prefix + name: one for name, one in saved.state_dict().items()}}, tmp_path / "one.ckpt")

    load_checkpoint(ForeignFile(tmp_path / "one.ckpt"), State(model), weights_only=True)

    assert model.module[0].weight.equal(saved[0].weight)


def test_no_name_of_the_model(tmp_path):
    """Nothing would be loaded, also where differences are allowed."""
    torch.save({"features.weight": torch.ones(2)}, tmp_path / "weights.pt")

    options = {"weights_only": True, "strict_model_weights": False}
    with pytest.raises(CheckpointError, match=r"its names are features\.weight …, not weight, bias …"):
        load_checkpoint(ForeignFile(tmp_path / "weights.pt"), State(nn.Linear(2, 2)), **options)


def test_path_of_a_file_where_a_checkpoint_is_expected(tmp_path):
    """The error has the line that loads a file."""
    model = nn.Linear(2, 2)
    torch.save(model.state_dict(), tmp_path / "weights.pt")

    with pytest.raises(CheckpointError, match=r"weights\.pt is a file: .*composer\.foreign\.ForeignFile\(path\)"):
        load_checkpoint(tmp_path / "weights.pt", State(model), weights_only=True)
