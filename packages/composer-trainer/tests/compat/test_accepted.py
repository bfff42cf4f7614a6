"""Arguments that programs for MosaicML Composer train with are accepted, with a warning that says what happens."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from composer import distributed
from composer.callbacks import EarlyStopper
from composer.core import Evaluator
from composer.loggers import FileLogger
from composer.models import HuggingFaceModel
from composer.optim import ComposerScheduler, DecoupledAdamW, DecoupledSGDW
from composer.optim import scheduler as schedules
from fixtures import make_loader, small_run, trained


@pytest.mark.parametrize("kind", ["Constant", "Linear", "CosineAnnealing", "Polynomial"])
def test_a_warmup_longer_than_the_training(kind):
    """The rate grows until the training ends."""
    schedule = getattr(schedules, f"{kind}WithWarmupScheduler")(t_warmup="100ba")

    with pytest.warns(UserWarning, match="t_warmup=100ba is longer than the training of 4ba"):
        trainer = trained(max_duration="4ba", schedulers=schedule)

    assert trainer.state.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 4 / 100)


@pytest.mark.parametrize("optimizer", [DecoupledSGDW, DecoupledAdamW])
def test_a_group_ascends(optimizer):
    """A negative rate of a group moves its parameters the other way, as multipliers of constraints need it."""
    moved = []
    for rate in (0.01, -0.01):
        parameter = torch.nn.Parameter(torch.zeros(1))
        with pytest.warns(UserWarning, match="lr=-0.01 of a group is negative"):
            steps = optimizer([{"params": [parameter], "lr": rate}, {"params": [], "lr": -0.01}], lr=0.1)
        parameter.sum().backward()
        steps.step()
        moved.append(parameter.item())

    assert moved == pytest.approx([-0.01, 0.01])


def test_an_unknown_metric_of_an_evaluator():
    """The metrics that the model has are computed."""
    evaluator = Evaluator(label="eval", dataloader=make_loader(), metric_names=["MulticlassAccuracy", "F1"])

    with pytest.warns(UserWarning, match=r"'F1', which is not computed: the model has .*MulticlassAccuracy"):
        trainer = trained(eval_dataloader=evaluator)

    assert list(trainer.state.eval_metric_values["eval"]) == ["MulticlassAccuracy"]


def test_a_stopper_of_data_that_are_not_evaluated():
    """The training runs to its end."""
    stopper = EarlyStopper("MulticlassAccuracy", "other")

    with pytest.warns(UserWarning, match=r"has no effect.*labelled 'other'.*did you mean 'eval/MulticlassAccuracy'"):
        trainer = trained(max_duration="2ep", eval_dataloader=make_loader(), callbacks=stopper)

    assert trainer.state.timestamp.epoch == 2


def test_an_evaluator_without_data():
    """It can be constructed; the error is raised where it would be evaluated."""
    evaluator = Evaluator(label="eval", dataloader=None, metric_names=["MulticlassAccuracy"])

    with pytest.raises(ValueError, match=r"loader of 'eval' has no batches to evaluate on: it is empty or None\."):
        small_run(eval_dataloader=evaluator)
    trainer = trained(eval_dataloader=evaluator, eval_interval=0)
    assert trainer.state.timestamp.epoch == 1
    with pytest.raises(ValueError, match="There is nothing to evaluate on: the loader of 'eval' returned no batch"):
        small_run(eval_dataloader=evaluator, eval_interval=0).eval()


@pytest.mark.parametrize(("samples", "cause"), [(0, "is empty"), (3, "has fewer samples than a batch, with drop_last")])
def test_a_loader_without_batches(samples, cause):
    """The error has the one cause that applies."""
    data = torch.utils.data.TensorDataset(torch.rand(samples, 4))
    loader = torch.utils.data.DataLoader(data, batch_size=4, drop_last=True)

    with pytest.raises(ValueError, match=f"has no batches to evaluate on: its data set {cause}"):
        small_run(eval_dataloader=loader)


def test_a_file_logger_without_a_store(tmp_path):
    """The name of a copy has no effect, with a warning, and the file is written."""
    logger = FileLogger(filename=str(tmp_path / "log"), remote_file_name="{run_name}/log")

    with pytest.warns(UserWarning, match="no logger of this run stores files: there will be no copy"):
        trained(loggers=logger)

    assert (tmp_path / "log").is_file()


def test_an_empty_save_interval(tmp_path):
    """Without a folder to save to, the interval is not read; with one nothing is saved, with a warning."""
    assert trained(save_interval="").state.timestamp.epoch == 1
    with pytest.warns(UserWarning, match="save_interval='' saves no checkpoints: write '1ep'"):
        trained(save_folder=tmp_path, save_interval="")
    assert [path.name for path in tmp_path.glob("[!.]*")] == []


def test_processes_without_a_device():
    """``initialize_dist`` chooses the device itself, as three programs for discrete diffusion call it."""
    distributed.initialize_dist(timeout=600)

    assert not distributed.is_initialized()  # there is one process
    with pytest.raises(
        ValueError, match=r"timeout \(dist_timeout\) must be a number of seconds above 0, got .*timedelta"
    ):
        distributed.initialize_dist("cpu", timedelta(seconds=30))


def test_a_schedule_with_a_warmup_of_its_own():
    """A schedule of the program has strings as times, and is asked for each batch."""

    class Grows(ComposerScheduler):
        t_warmup, scale_warmup = "100ba", False

        def __call__(self, state, ssr=1.0):
            return int(state.timestamp.batch) / 100

    with pytest.warns(UserWarning, match="t_warmup=100ba is longer than the training of 4ba"):
        trainer = trained(max_duration="4ba", schedulers=Grows())

    assert trainer.state.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 4 / 100)


def test_a_loader_beside_evaluators():
    """It is evaluated under the label that it has alone; two of them have one label, which is an error."""
    small = Evaluator(label="small", dataloader=make_loader())

    trainer = trained(eval_dataloader=[make_loader(), small])

    assert list(trainer.state.eval_metrics) == ["eval", "small"]
    with pytest.raises(ValueError, match=r"must have a label of its own, got \['eval', 'eval'\]"):
        small_run(eval_dataloader=[make_loader(), make_loader()])


@pytest.mark.parametrize("name", ["m.pt", "m"])
@pytest.mark.parametrize("config", [SimpleNamespace(hidden=3), None], ids=["own", "transformers"])
def test_a_model_that_is_none_of_transformers(config, name, tmp_path):
    """Its own class with a ``config`` trains, is saved and resumed; only Transformers' classes can be built again."""
    transformers = pytest.importorskip("transformers")

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.config = torch.nn.Embedding(11, 11), config or transformers.GPT2Config()

        def forward(self, input_ids, labels=None):
            logits = self.embedding(input_ids)
            return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

        def generate(self, input_ids):
            return input_ids + 1

    def start(**options):
        with pytest.warns(UserWarning, match="Its forward and its config are used as of one of Transformers"):
            model = HuggingFaceModel(Net(), tokenizer=None)
        ids = [{"input_ids": torch.tensor([row, 1]), "labels": torch.tensor([2, row])} for row in range(8)]
        loader = torch.utils.data.DataLoader(ids, batch_size=2)
        return small_run(model=model, train_dataloader=loader, max_duration="1ep", **options)

    trainer = start(save_folder=tmp_path / "run")
    trainer.fit()
    path = trainer.save_checkpoint(tmp_path / name)

    again = start(load_path=path)
    assert torch.equal(again.state.model.model.embedding.weight, trainer.state.model.model.embedding.weight)
    assert trainer.state.model.generate(torch.tensor([1])) == 2
    with pytest.raises(ValueError, match=r"Net is no transformers\.PreTrainedModel: save a checkpoint"):
        trainer.state.model.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"Net is not a model of transformers .* load the checkpoint by Trainer\(load_p"
    ):
        HuggingFaceModel.hf_from_composer_checkpoint(path)
    with pytest.raises(
        ValueError, match=r"Net.* is not a model of transformers .*\. If it is your own PreTrainedModel"
    ):
        HuggingFaceModel.hf_from_composer_checkpoint(path, model_instantiation_class=Net)
