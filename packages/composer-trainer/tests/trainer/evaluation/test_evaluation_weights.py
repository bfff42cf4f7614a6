"""All saved weights are the evaluation weights."""

import pytest
import torch
from safetensors.torch import load_file

from composer.algorithms import EMA, SAM, SWA
from composer.callbacks import CheckpointSaver, ExportForInferenceCallback
from composer.core import Callback, Evaluator
from fixtures import make_classifier, make_loader, small_run


class Averaging(torch.optim.SGD):
    """Evaluates with the mean of all previous weights, as schedule-free optimizers do."""

    train_mode = True

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for parameter in self._parameters():
            average = self.state[parameter].setdefault("held", torch.zeros_like(parameter))
            average.lerp_(parameter, 0.25)

    def eval(self):
        self._switch(train_mode=False)

    def train(self):
        self._switch(train_mode=True)

    def _parameters(self):
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def _switch(self, *, train_mode):
        for group in self.param_groups:
            if group.get("train_mode", True) != train_mode:
                for parameter in group["params"]:
                    average = self.state[parameter]["held"]
                    original = parameter.clone()
                    parameter.copy_(average)
                    average.copy_(original)
            group["train_mode"] = train_mode


class Observer(Callback):
    """Records the weights of the last evaluation."""

    seen = None

    def state_dict(self):
        return {}

    def eval_batch_start(self, state, logger):
        self.seen = {name: value.clone() for name, value in state.model.state_dict().items()}


RUNS = {
    "EMA": lambda: [EMA(half_life=None, smoothing=0.9)],
    "SWA": lambda: [SWA(swa_start="1ba", swa_end="8ba", update_interval="1ba")],
    "schedule-free": list,
}


@pytest.fixture(params=[False, True], ids=["alone", "SAM"])
def with_sam(request):
    """Whether the optimizer is wrapped by SAM."""
    return request.param


@pytest.fixture(params=RUNS, ids=str)
def trained(request, with_sam, tmp_path):
    """A trainer whose training and evaluation weights differ, and the latter."""
    look, model = Observer(), make_classifier()
    optimizer = Averaging if request.param == "schedule-free" else torch.optim.SGD
    trainer = small_run(
        model=model,
        optimizers=optimizer(model.parameters(), lr=0.1),
        algorithms=RUNS[request.param]() + ([SAM()] if with_sam else []),
        callbacks=[
            look,
            CheckpointSaver(tmp_path / "saver", "final", weights_only=True),
            ExportForInferenceCallback("torchexport", tmp_path / "model.pt2"),
        ],
        eval_dataloader=make_loader(),
        max_duration="5ba",
    )
    trainer.fit()
    assert not torch.equal(look.seen["module.0.weight"], model.state_dict()["module.0.weight"])
    return trainer, look.seen


def same(one, other):
    """Return whether two sets of weights are bit-identical."""
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("order", [("average", "trained"), ("trained", "average", "again")])
def test_training_weights_beside_averages(run, order):
    """An evaluator evaluates the weights that are trained; the metrics of each are those of its weights."""

    class Record(Callback):
        def eval_end(self, state, logger):
            seen[state.dataloader_label] = state.model.state_dict()["module.0.weight"].clone()

    seen, loader = {}, make_loader()
    evaluators = [Evaluator(label=label, dataloader=loader, training_weights=label != "average") for label in order]
    model, options = make_classifier(), {"callbacks": Record(), "eval_dataloader": evaluators, "max_duration": "1ep"}
    optimizer = (Averaging if run == "schedule-free" else torch.optim.SGD)(model.parameters(), lr=0.1)
    trainer = small_run(model=model, optimizers=optimizer, algorithms=RUNS[run](), **options)
    trainer.fit()

    trained = trainer.state.model.state_dict()["module.0.weight"]
    assert [torch.equal(seen[label], trained) for label in order] == [label != "average" for label in order]
    values = {float(trainer.state.eval_metric_values[label]["CrossEntropy"]) for label in order}
    assert len(values) == 2


class TestSavedWeights:
    def test_checkpoint_saver(self, trained, tmp_path):
        """CheckpointSaver with save_weights_only writes the evaluation weights."""
        assert same(load_file(tmp_path / "saver" / "final" / "model.safetensors"), trained[1])

    def test_export(self, trained, tmp_path):
        """The callback and the trainer's method export them."""
        trainer, evaluated = trained
        trainer.export_for_inference("torchexport", tmp_path / "other.pt2")
        reference = make_classifier()
        reference.load_state_dict(evaluated)

        inputs = torch.rand(3, 4)
        with torch.no_grad():
            expected = reference.eval()((inputs, None))

        for name in ("model.pt2", "other.pt2"):
            exported = torch.export.load(tmp_path / name).module()
            torch.testing.assert_close(exported(inputs), expected)

    @pytest.mark.filterwarnings("ignore:A run that is resumed:UserWarning")  # of the weights that Observer records
    def test_full_checkpoint(self, trained, tmp_path):
        """A resumable checkpoint has the training weights."""
        trainer, _ = trained

        path = trainer.save_checkpoint(tmp_path / "one")

        assert same(load_file(f"{path}/model.safetensors"), trainer.state.model.state_dict())
