"""What a callback changes of the model's modules and of the parameter groups is restored, or named."""

import pytest
import torch
from torch import nn

from composer.core import Callback
from fixtures import make_classifier, small_run


def network():
    """Return a network whose first layer is frozen."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)]
    layers[0].requires_grad_(False)
    return nn.Sequential(*layers)


class InSecondEpoch(Callback):
    """Changes the network, the optimizer or the model when the second epoch begins."""

    def __init__(self, change):
        self.change = change

    def epoch_start(self, state, logger):
        if state.timestamp.epoch == 1:
            self.change(state.model.module, state.optimizers[0], state.model)


def freeze(layers, optimizer, model):
    layers[4].requires_grad_(False)


def unfreeze(layers, optimizer, model):
    layers[0].requires_grad_(True)


def without_statistics(layers, optimizer, model):
    layers[1].eval()


def without_dropout(layers, optimizer, model):
    layers[3].eval()


def add_group(layers, optimizer, model):
    layers[0].requires_grad_(True)
    optimizer.add_param_group({"params": layers[0].parameters(), "lr": 0.01, "momentum": 0.5})


def add_two_groups(layers, optimizer, model):
    layers[0].requires_grad_(True)
    for parameter in layers[0].parameters():
        optimizer.add_param_group({"params": parameter, "lr": 0.3})


def run(change, duration, folder=None, load_path=None, **options):
    """Train with a change, and return the trainer."""
    layers = network()
    held = layers[1:].parameters() if change in (add_group, add_two_groups) else layers.parameters()
    trainer = small_run(
        model=make_classifier(layers),
        optimizers=torch.optim.SGD(held, lr=0.1, momentum=0.9),
        callbacks=InSecondEpoch(change),
        max_duration="3ep",
        load_path=load_path,
        **options,
    )
    trainer.engine.on("batch_end", lambda state, _: state.stop_training(), every=duration)
    trainer.fit()
    return trainer


def values(trainer):
    """Return all weights and buffers, the modes, and what is trained."""
    model = trainer.state.model
    tensors = torch.cat([tensor.flatten().double() for tensor in model.state_dict().values()])
    return tensors, [one.training for one in model.modules()], [one.requires_grad for one in model.parameters()]


@pytest.mark.parametrize("change", [freeze, unfreeze, without_statistics, without_dropout, add_group, add_two_groups])
def test_changes_are_restored(tmp_path, change):
    """A run that is stopped after a change, and resumed in a new program, equals the uninterrupted one."""
    expected = values(run(change, "15ba"))
    unchanged = values(run(lambda *_: None, "15ba"))
    stopped = run(change, "8ba").save_checkpoint(str(tmp_path / "stopped"))

    tensors, *others = values(run(change, "15ba", load_path=stopped))

    assert torch.equal(tensors, expected[0])
    assert others == [*expected[1:]]
    assert not torch.equal(tensors, unchanged[0])


def test_group_of_other_parameters_raises(tmp_path):
    """A group of a parameter that the model does not have cannot be added again."""
    stranger = nn.Parameter(torch.zeros(3))

    def add(layers, optimizer, model):
        optimizer.add_param_group({"params": [stranger]})

    stopped = run(add, "8ba").save_checkpoint(str(tmp_path / "stopped"))

    with pytest.raises(ValueError, match=r"SGD\.param_groups\[1\] was added in training.*no group 1 parameter 0"):
        run(add, "15ba", load_path=stopped)


def test_modes_before_a_training(tmp_path):
    """A checkpoint of a model that is evaluated before it is trained does not restore these modes."""
    trainer = small_run(max_duration="1ep")
    trainer.state.model.eval()
    saved = trainer.save_checkpoint(str(tmp_path / "saved"))

    resumed = small_run(max_duration="1ep", load_path=saved)
    resumed.fit()

    assert all(module.training for module in resumed.state.model.modules())


class Scaled(nn.Module):
    """A network of a user with a number that is not saved."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 3), 1.0

    def forward(self, inputs):
        return self.layer(inputs) * self.scale


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), "model.module.1.p"),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), "model.module.1.momentum"),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.GroupNorm(1, 3)), "model.module.1.eps"),
        (Scaled, "model.module.scale"),
        (lambda: nn.Linear(4, 3), "model.loss_fn.label_smoothing"),
    ],
)
def test_numbers_are_named_at_each_save(tmp_path, make, name):
    """A number that changes after the first save is named at the next one, once."""

    def change(layers, optimizer, model):
        path, _, attribute = name.removeprefix("model.").rpartition(".")
        setattr(model.get_submodule(path), attribute, 0.25)

    model = make_classifier(make(), loss_fn=nn.CrossEntropyLoss())
    folder = {"save_folder": str(tmp_path), "save_interval": "2ba"}
    trainer = small_run(model=model, callbacks=InSecondEpoch(change), max_duration="3ep", **folder)

    with pytest.warns(UserWarning, match="are not saved") as caught:
        trainer.fit()

    assert [str(one.message).count(f"{name}: changed since training began") for one in caught] == [1]
