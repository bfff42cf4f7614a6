"""What programs for MosaicML Composer read from a run, and pass to callbacks."""

import enum
import inspect
import time

import pytest
import torch
from torch.utils.data import DataLoader
from torchmetrics import Metric

import composer
import composer.functional
from composer import Trainer, distributed
from composer.callbacks import (
    CheckpointSaver,
    ExportForInferenceCallback,
    LoadCheckpoint,
    SpeedMonitor,
)
from composer.callbacks import load_checkpoint as module
from composer.checkpoint import CheckpointError
from composer.checkpoint.saving import Snapshot
from composer.compat.stores import RemoteUploaderDownloader
from composer.core import Callback, DataSpec, Evaluator, Time, TimeUnit
from composer.core.saving.saved_state import StateMismatchError
from composer.loggers import MLFlowLogger
from composer.models import ComposerClassifier, HuggingFaceModel
from fixtures import make_classifier, make_loader, small_run, trained


class Kind(enum.Enum):
    FIRST = "first"
    SECOND = "second"


class Remembers(Callback):
    """A callback whose state has an enumeration and a time."""

    def __init__(self, kind=Kind.FIRST):
        self.state = {"kind": kind, "unit": TimeUnit.BATCH, "times": [Time(1, "ba")], "n": 0}

    def batch_end(self, state, logger):
        self.state["kind"], self.state["times"] = Kind.SECOND, [state.timestamp.batch]

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class OfEvaluation(Callback):
    """Records the metric outputs of each batch."""

    def __init__(self):
        self.outputs = []

    def eval_batch_end(self, state, logger):
        self.outputs.append(state.metric_outputs)


@pytest.fixture
def folder(tmp_path):
    """Return a folder in which a run has saved a checkpoint, with Composer's default names asked for."""
    names = {"save_filename": "ep{epoch}.pt", "save_latest_filename": "latest-rank{rank}.pt"}
    with small_run(max_duration="2ep", save_folder=str(tmp_path), callbacks=Remembers(), **names) as trainer:
        trainer.fit()
    return tmp_path


@pytest.mark.parametrize("name", ["ep2.pt", "latest-rank{rank}.pt", "latest-rank0", ""])
def test_checkpoints_are_found_under_names_of_files(folder, name):
    """The name that was asked for, a link to it and the folder are found."""
    if name == "latest-rank0":
        (folder / "latest-rank0.pt").rename(folder / name)

    with small_run(max_duration="2ep", load_path=folder / name, callbacks=Remembers()) as trainer:
        assert trainer.state.timestamp.epoch == 2


@pytest.mark.parametrize("name", ["ep2.pt", "ep2-rank0.pt", "latest-rank0.pt", "latest.pt", "ep2"])
def test_folders_are_found_under_names_of_files(tmp_path, name):
    """Where a run here has saved a folder, Composer's names of files lead to it."""
    options = {"save_folder": str(tmp_path), "save_filename": "ep{epoch}", "callbacks": Remembers()}
    with small_run(max_duration="2ep", save_latest_filename="latest-rank{rank}", **options) as trainer:
        trainer.fit()
    if name == "latest.pt":
        (tmp_path / "latest-rank0").rename(tmp_path / "latest")

    with small_run(max_duration="2ep", load_path=tmp_path / name, callbacks=Remembers()) as trainer:
        assert trainer.state.timestamp.epoch == 2


def test_weights_are_loaded_by_a_callback(folder, monkeypatch):
    """``LoadCheckpoint`` takes Composer's arguments, and calls ``load_checkpoint`` of its module."""
    calls, load = [], module.load_checkpoint
    monkeypatch.setattr(module, "load_checkpoint", lambda *args, **named: calls.append(args[0]) or load(*args, **named))
    path = str(folder / "ep1.pt")
    callback = LoadCheckpoint(path, load_weights_only=True, strict_model_weights=True, event="AFTER_LOAD")

    with small_run(callbacks=callback) as trainer:
        assert trainer.state.timestamp.epoch == 0

    assert calls == [path]
    assert callback.loaded is not None


def test_enumerations_in_the_state_of_a_callback(folder):
    """Members of enumerations and times are saved as data, and loaded with the types that the callback has."""
    callback = Remembers()

    with small_run(max_duration="2ep", load_path=folder / "ep2.pt", callbacks=callback):
        assert callback.state == {"kind": Kind.SECOND, "unit": TimeUnit.BATCH, "times": [Time(10, "ba")], "n": 0}
        assert type(callback.state["kind"]) is Kind


def test_the_clock_in_the_state():
    """The saved clock is found as Composer nests it, and the state can be loaded."""
    with small_run(max_duration="3ba") as trainer:
        trainer.fit()
    saved = trainer.state.state_dict()

    assert saved["timestamp"]["Timestamp"]["batch"] == saved["timestamp"]["batch"] == 3
    with pytest.raises(KeyError):
        saved["timestamp"]["other"]
    with small_run(max_duration="3ba") as other:
        other.state.load_state_dict(saved)
        assert other.state.timestamp.batch == 3
        del saved["timestamp"]["batch"]
        with pytest.raises(StateMismatchError, match="batch"):
            other.state.load_state_dict(saved)


def test_weights_in_the_state(tmp_path):
    """The state is a dictionary with weights, optimizers and metadata, which a program takes out, and saves."""
    with small_run(max_duration="3ba", train_dataloader=make_loader()) as trainer:
        trainer.fit()
    state = trainer.state.state_dict()
    optimizers, weights = state.pop("optimizers"), state.pop("model")
    torch.save({"state": state | {"model": weights}}, tmp_path / "monolithic.pt")

    read = torch.load(tmp_path / "monolithic.pt", weights_only=True)["state"]

    assert read["model"].keys() == trainer.state.model.state_dict().keys()
    assert optimizers.keys() == {type(trainer.state.optimizers[0]).__name__}
    assert read["metadata"] == {
        "composer_env_info": {"composer_version": composer.__version__},
        "torch_version": torch.__version__,
        "device": "cpu",
        "precision": "fp32",
        "world_size": 1,
        "device_train_microbatch_size": None,
        "train_dataloader_batch_size": trainer.state.train_dataloader.batch_size,
    }
    with small_run(max_duration="3ba") as other:
        other.state.load_state_dict(state | {"model": weights, "optimizers": optimizers})
        assert all(torch.equal(one, weights[name]) for name, one in other.state.model.state_dict().items())


def test_hyperparameters_of_the_call():
    """The arguments of the trainer that are not defaults are plain data; components are logged by their settings."""
    with small_run(max_duration="2ba", callbacks=[SpeedMonitor()], seed=3, auto_log_hparams=False) as trainer:
        given = trainer.local_hparams

    assert given == {
        "max_duration": "2ba",
        "seed": 3,
        "auto_log_hparams": False,
        "progress_bar": False,
        "device": "cpu",
    }


@pytest.mark.parametrize(
    ("argument", "replacement"),
    [
        ("load_object_store", "use load_path with a URL"),
        ("save_object_store", "use a URL as the path"),
        ("load_progress_bar", "it is replaced by nothing, as what was loaded is logged"),
        ("load_fsdp_monolith_rank0_only", "it is replaced by nothing, as each process reads only its part"),
    ],
)
def test_arguments_without_effect(argument, replacement):
    """Composer's arguments that would have no effect raise an error with their replacement, also if they are None."""
    with pytest.raises(TypeError, match=f"has no argument '{argument}': {replacement}"):
        small_run(**{argument: None})


def test_outputs_of_metrics():
    """What ``update_metric`` returns is in the state at the end of each batch; nothing is an empty dictionary."""

    class Reports(ComposerClassifier):
        def update_metric(self, batch, outputs, metric):
            super().update_metric(batch, outputs, metric)
            return {"result": [len(batch[1])]}

    network = make_classifier().module
    results = []
    for model in (Reports(network, num_classes=3), ComposerClassifier(network, num_classes=3)):
        callback = OfEvaluation()
        with small_run(model=model, callbacks=callback, eval_dataloader=make_loader(6)) as trainer:
            trainer.eval()
        results.append(callback.outputs)

    assert results == [[{"result": [4]}, {"result": [2]}], [{}, {}]]


class LastToken(Metric):
    """The fraction of sequences whose last token has the highest logit, as in-context metrics compute it."""

    needs_batch, full_state_update = True, False

    def __init__(self):
        super().__init__()
        self.add_state("correct", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def _wrap_update(self, update):  # torchmetrics' discards what update returns
        def run(*args, **named):
            self._computed, self._update_count = None, self._update_count + 1
            return update(*args, **named)

        return run

    def update(self, batch, outputs, labels):
        guesses = outputs[:, -2].argmax(dim=-1)
        self.correct += (guesses == labels[:, -1]).sum()
        self.total += len(guesses)
        return {"guesses": guesses.tolist(), "keys": sorted(batch)}

    def compute(self):
        return self.correct / self.total


def test_metrics_that_want_the_batch():
    """An evaluator with an in-context metric computes it, and callbacks see its results."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=16, n_embd=8, n_layer=1, n_head=1, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    network = transformers.GPT2LMHeadModel(config)
    model = HuggingFaceModel(network, metrics=[], eval_metrics=[LastToken()], use_logits=True)
    rows = [{"input_ids": one, "labels": one} for one in torch.arange(24).view(4, 6) % 16]
    callback = OfEvaluation()
    evaluator = Evaluator(label="tasks/0-shot", dataloader=DataLoader(rows, batch_size=2), metric_names=["LastToken"])

    with small_run(
        model=model, train_dataloader=DataLoader(rows, batch_size=2), eval_dataloader=[evaluator], callbacks=callback
    ) as trainer:
        trainer.eval()

    guesses = [guess for one in callback.outputs for guess in one["guesses"]]
    expected = sum(guess == int(row["labels"][-1]) for guess, row in zip(guesses, rows, strict=True)) / 4
    assert callback.outputs[0]["keys"] == ["input_ids", "labels"]
    assert float(trainer.state.eval_metric_values["tasks/0-shot"]["LastToken"]) == expected


def test_counts_of_tokens():
    """A loader's function may return a number, a tensor, or the numbers of kinds of tokens."""
    batch = {"input_ids": torch.ones(2, 8), "labels": torch.full((2, 8), -100)}
    kinds = DataSpec([batch], get_num_tokens_in_batch=lambda _: {"total": 16, "loss_generating": 5})

    assert DataSpec([batch]).get_num_tokens_in_batch(batch) == 16
    assert DataSpec([batch], get_num_tokens_in_batch=lambda _: torch.tensor(7)).get_num_tokens_in_batch(batch) == 7
    assert [kinds.get_num_tokens_in_batch(batch, token_type=one) for one in ("total", "loss_generating")] == [16, 5]


_POSITIONS = {
    CheckpointSaver: "folder filename remote_file_name latest_filename latest_remote_file_name save_interval",
    ExportForInferenceCallback: "save_format save_path save_object_store sample_input transforms",
    LoadCheckpoint: "load_path load_weights_only strict_model_weights ignore_keys event",
    MLFlowLogger.register_model: "self model_uri name await_registration_for tags",
    RemoteUploaderDownloader: "bucket_uri backend_kwargs file_path_format_string num_concurrent_uploads",
    Trainer.export_for_inference: "self save_format save_path save_object_store sample_input transforms",
    composer.functional.count_module_instances: "module module_class",
    distributed.all_gather: "tensor group",
    distributed.all_gather_object: "obj group",
    distributed.all_reduce: "tensor reduce_operation group",
    distributed.barrier: "group",
    distributed.broadcast: "tensor src group",
    distributed.broadcast_object_list: "object_list src group",
}
"""The order of parameters in MosaicML Composer 0.32.1, of which ours is a part or has other keywords."""


@pytest.mark.parametrize(("function", "former"), _POSITIONS.items(), ids=lambda one: getattr(one, "__qualname__", ""))
def test_positions_of_arguments(function, former):
    """An argument without a name is the same one as in MosaicML Composer, or an error."""
    kinds = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    ours = [name for name, one in inspect.signature(function).parameters.items() if one.kind in kinds]

    assert ours[: len(former.split())] == former.split()[: len(ours)]


def test_arguments_of_a_model_of_transformers():
    """A ``forward`` that passes on what the model takes, by Composer's name of it, computes the same."""
    transformers = pytest.importorskip("transformers")

    class Own(HuggingFaceModel):
        def forward(self, batch):
            return self.model(**{name: one for name, one in batch.items() if name in self.model_forward_args})

    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    network = transformers.BertForSequenceClassification(config).eval()
    batch = {"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([1]), "index": torch.tensor([7])}

    assert torch.equal(Own(network)(batch).logits, HuggingFaceModel(network)(batch).logits)


@pytest.mark.parametrize("path", ["no/such/checkpoint", "no/such/ep1.pt"])
def test_a_checkpoint_that_does_not_exist(path):
    """It is an error of a file that does not exist, as in Composer, and of a checkpoint."""
    with pytest.raises(FileNotFoundError, match=f"{path} does not exist") as caught:
        small_run(load_path=path)

    assert isinstance(caught.value, CheckpointError)


def test_a_trainer_that_is_not_closed():
    """Its callbacks are closed when nothing refers to it any more."""
    closed = []

    class Closes(Callback):
        def close(self, state, logger):
            closed.append(int(state.timestamp.batch))

    model = make_classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(
        model=model, train_dataloader=make_loader(), optimizers=optimizer, max_duration="2ba", callbacks=Closes()
    )
    trainer.fit()
    assert closed == []
    del trainer

    assert closed == [2]


def test_the_loader_and_the_metrics_of_a_state():
    """A callback reads the loader itself, and a program prints the metrics in the order in which the model has them."""
    loader = make_loader()
    trainer = trained(train_dataloader=loader, eval_dataloader=make_loader())

    with pytest.warns(DeprecationWarning, match="state._train_dataloader is a former name: read state.train_dataload"):
        assert trainer.state._train_dataloader is loader
    printed = [f"{name}: {value.item():0.4f}" for name, value in trainer.state.eval_metric_values.items()]
    assert [one.partition(":")[0] for one in printed] == list(trainer.state.eval_metrics["eval"])


@pytest.mark.parametrize("name", ["ep{epoch}-ba{batch}", "ep{epoch}-ba{batch}.pt"])
def test_a_program_saves_to_its_folder(name, tmp_path, monkeypatch):
    """The checkpoint is complete when the call returns, however long it takes to write."""
    write = Snapshot.write
    monkeypatch.setattr(Snapshot, "write", lambda *args, **kwargs: time.sleep(0.3) or write(*args, **kwargs))
    trainer = small_run(save_folder=tmp_path, save_filename=name)

    trainer.save_checkpoint_to_save_folder()

    assert (tmp_path / name.format(epoch=0, batch=0)).exists()
    trainer.close()
