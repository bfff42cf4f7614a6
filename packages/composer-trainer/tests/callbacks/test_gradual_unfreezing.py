"""Groups of layers are trained one after the other."""

import pytest
import torch
from torch import nn

from composer import functional as cf
from composer.algorithms import EMA
from composer.callbacks import GradualUnfreezing
from composer.optim import DecoupledAdamW, DecoupledSGDW, LinearScheduler, muon_with_adamw
from fixtures import make_classifier, small_run


def network():
    """Return three layers with a norm after the first one."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3)
    )


def make_trainer(layers=None, optimizer=None, unfreezing=None, **options):
    """Return a trainer with the callback."""
    model = make_classifier(network() if layers is None else layers)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    callbacks = [unfreezing or GradualUnfreezing()]
    return small_run(model=model, optimizers=optimizer, callbacks=callbacks, **{"max_duration": "4ep"} | options)


def changes(trainer, epochs):
    """Train epoch by epoch, and return the names of the modules that changed in each, also by statistics."""
    layers, found = trainer.state.model.module, []
    for _ in range(epochs):
        before = {name: value.clone() for name, value in layers.state_dict().items()}
        trainer.fit(duration="1ep")
        found.append(
            {name.split(".")[0] for name, value in layers.state_dict().items() if not value.equal(before[name])}
        )
    return found


@pytest.mark.parametrize(
    ("unfreezing", "expected"),
    [
        (GradualUnfreezing(), [{"6"}, {"3", "6"}, {"1", "3", "6"}, {"0", "1", "3", "6"}]),
        (GradualUnfreezing(epochs=2), [{"6"}, {"6"}, {"3", "6"}, {"3", "6"}]),
        (GradualUnfreezing(["6", ["1", "3"]]), [{"6"}, {"1", "3", "6"}, {"0", "1", "3", "6"}]),
        (GradualUnfreezing([["6", "3"]]), [{"3", "6"}, {"0", "1", "3", "6"}]),
        (GradualUnfreezing([]), [{"0", "1", "3", "6"}]),
    ],
)
def test_groups_begin_in_their_epochs(unfreezing, expected):
    """Weights and the statistics of norms change from the epoch of their group on, and not before."""
    assert changes(make_trainer(unfreezing=unfreezing), len(expected)) == expected


def test_frozen_before_stays_frozen():
    """What the program does not train is not trained later, either."""
    layers = network()
    layers[3].requires_grad_(False)

    assert changes(make_trainer(layers), 4)[-1] == {"0", "1", "6"}


@pytest.mark.parametrize("fails", [False, True])
def test_another_trainer_trains_what_was_not_reached(fails):
    """After the training, or an error in it, all groups can be trained, and what the program froze stays frozen."""
    layers = network()
    layers[3].bias.requires_grad_(False)
    first = make_trainer(layers, max_duration="1ep")
    if fails:
        first.engine.on("batch_end", lambda state, _: 1 / 0, every="2ba")
        with pytest.raises(ZeroDivisionError):
            first.fit()
        first.close()
    else:
        first.fit()

    assert [name for name, one in layers.named_parameters() if not one.requires_grad] == ["3.bias"]
    assert changes(make_trainer(layers), 4)[-1] == {"0", "1", "3", "6"}


def test_what_is_frozen_afterwards_stays_frozen():
    """Closing the trainer does not undo what the program did after the training."""
    trainer = make_trainer(max_duration="1ep")
    trainer.fit()
    trainer.state.model.requires_grad_(False)

    trainer.close()

    assert not any(one.requires_grad for one in trainer.state.model.parameters())


def test_norms_without_weights():
    """Their statistics change from the start, as nothing shows whether they are frozen."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3))

    assert changes(make_trainer(layers), 2) == [{"1", "2"}, {"0", "1", "2"}]


def test_tied_weights_are_in_the_first_group():
    """A weight that two groups have is trained with the one that is trained first."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    layers[0].weight = layers[1].weight

    before = [one.clone() for one in layers[0].parameters()]
    make_trainer(layers).fit(duration="2ep")

    assert [torch.equal(*pair) for pair in zip(before, layers[0].parameters(), strict=True)] == [False, True]


def test_rates():
    """Each group has a multiple of the rate of the group before, which a schedule multiplies."""
    model = make_classifier(network())
    optimizer = torch.optim.SGD(cf.parameter_groups(model, lr=0.1, weight_decay=0.1))
    trainer = make_trainer(
        model.module, optimizer, GradualUnfreezing(rates=0.5), schedulers=LinearScheduler(1.0, 0.5), max_duration="2ep"
    )
    rates = {parameter: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}

    assert [rates[trainer.state.model.module[place].weight] for place in (6, 3, 1, 0)] == [0.1, 0.05, 0.025, 0.0125]
    assert {len(group["params"]) > 0 for group in optimizer.param_groups} == {True}
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.1}
    trainer.fit()
    assert min(group["lr"] for group in optimizer.param_groups) == pytest.approx(0.0125 / 2)


@pytest.mark.parametrize("make", [DecoupledAdamW, DecoupledSGDW, muon_with_adamw])
@pytest.mark.parametrize("schedulers", [None, LinearScheduler(1.0, 0.5)])
def test_rates_of_optimizers_of_this_library(make, schedulers):
    """They record the rates from which schedules begin, which get the factors of the groups, too."""
    model = make_classifier(network())
    given = model if make is muon_with_adamw else model.parameters()
    unfreezing = GradualUnfreezing(rates=0.5)
    trainer = make_trainer(model.module, make(given, lr=0.1), unfreezing, schedulers=schedulers, max_duration="1ep")

    trainer.fit()

    rates = {one: group["lr"] for group in trainer.state.optimizers[0].param_groups for one in group["params"]}
    last = 0.5 if schedulers else 1.0
    found = [rates[model.module[place].weight] for place in (6, 3, 1, 0)]
    assert found == pytest.approx([0.1 * last, 0.05 * last, 0.025 * last, 0.0125 * last])


def test_rates_of_named_parameters():
    """Each group has the names of its own parameters."""
    model = make_classifier(network())
    optimizer = torch.optim.AdamW(model.named_parameters())
    make_trainer(model.module, optimizer, GradualUnfreezing(rates=0.5))

    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = optimizer.param_groups
    assert [group["param_names"] for group in groups] == [[names[one] for one in group["params"]] for group in groups]
    assert len(groups) == 4


def test_rates_with_a_scheduler_of_torch_raise():
    """Such a scheduler has a list of the rates, which must not get longer."""
    model = make_classifier(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)

    with pytest.raises(ValueError, match="rates must be 1 with a scheduler of torch"):
        make_trainer(model.module, optimizer, GradualUnfreezing(rates=0.5))


def test_rates_of_a_scheduler_of_torch_and_an_optimizer_of_this_library_raise():
    """Such an optimizer has rates from which schedules begin in any case; the scheduler is found by itself."""
    model = make_classifier(network())
    optimizer = DecoupledAdamW(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)

    with pytest.raises(ValueError, match="rates must be 1 with a scheduler of torch"):
        make_trainer(model.module, optimizer, GradualUnfreezing(rates=0.5))


@pytest.mark.parametrize("stop", ["3ba", "5ba", "8ba", "10ba", "13ba", "15ba"])
@pytest.mark.parametrize("rates", [1.0, 0.5])
def test_resume_is_exact(tmp_path, stop, rates):
    """A training that is resumed within an epoch or at its end equals an uninterrupted one, bit for bit."""
    expected = make_trainer(unfreezing=GradualUnfreezing(rates=rates))
    expected.fit()
    stopped = make_trainer(unfreezing=GradualUnfreezing(rates=rates))
    stopped.engine.on("batch_end", lambda state, _: state.stop_training(), every=stop)
    stopped.fit()
    path = stopped.save_checkpoint(str(tmp_path / "stopped"))

    resumed = make_trainer(unfreezing=GradualUnfreezing(rates=rates), load_path=path)
    resumed.fit()

    pairs = zip(resumed.state.model.state_dict().values(), expected.state.model.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_resume_from_the_end_is_exact(tmp_path):
    """A checkpoint of the end of a call of ``fit`` goes on, in another program or the same one, bit for bit."""
    expected = make_trainer(max_duration="3ep")
    expected.fit()
    first = make_trainer(max_duration="3ep")
    first.fit(duration="1ep")
    path = first.save_checkpoint(str(tmp_path / "end"))
    first.fit(duration="2ep")
    resumed = make_trainer(max_duration="3ep", load_path=path)
    resumed.fit()

    for each in (first, resumed):
        pairs = zip(each.state.model.state_dict().values(), expected.state.model.state_dict().values(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_unknown_module_raises():
    """The error has the names that exist."""
    with pytest.raises(ValueError, match=r"modules in the Sequential, got 'fc'. Its parts are 0, 1, 3, 6;"):
        make_trainer(unfreezing=GradualUnfreezing(["fc"]))


def test_string_raises():
    """One name is not a list."""
    with pytest.raises(TypeError, match="groups must be a list of names of modules"):
        GradualUnfreezing("fc")


def test_averages_begin_with_the_training(tmp_path):
    """EMA has averages of the groups that have been trained, also after a resume, with the same bits."""
    (first := make_trainer(algorithms=[EMA("2ba")], max_duration="1ep")).fit()
    names = first.state.algorithms[0].state_dict()["averaged_weights"].keys()
    assert names & dict(first.state.model.named_parameters()).keys() == {"module.6.weight", "module.6.bias"}
    run = {"save_folder": tmp_path, "save_interval": "1ep", "algorithms": [EMA("2ba")]}
    (whole := make_trainer(**run)).fit()
    for path in sorted(tmp_path.glob("ep*")):
        (resumed := make_trainer(algorithms=[EMA("2ba")], load_path=path)).fit()
        epoch = int(path.name.removeprefix("ep").split("-")[0])
        averages, expected = (one.state.algorithms[0].state_dict()["averaged_weights"] for one in (resumed, whole))
        assert averages.keys() == expected.keys()
        assert all(torch.equal(one, expected[name]) for name, one in averages.items()), epoch
