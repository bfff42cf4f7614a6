"""BlurPool: layers are replaced at INIT, and the optimizer is updated."""

import pytest
import torch
from torch import nn

from composer.algorithms import BlurPool
from composer.core import Engine, Event, Logger, LoggerDestination, NoEffectWarning, Stage, State, explain
from fixtures import full_copy


def classes_of(model):
    return [type(layer).__name__ for layer in model.layers]


class TestSurgery:
    def test_strided_layers_are_blurred(self, conv_net, make_engine):
        """The strided convolution and the pool are replaced; the convolution without a stride is not."""
        model = conv_net()

        make_engine(model, BlurPool())

        assert classes_of(model) == ["Conv2d", "BatchNorm2d", "BlurConv2d", "BlurMaxPool2d", "Flatten", "Linear"]

    @pytest.mark.parametrize(
        ("settings", "blurred"),
        [
            ({"replace_convs": False}, ["BlurMaxPool2d"]),
            ({"replace_maxpools": False}, ["BlurConv2d"]),
            ({"min_channels": 17}, ["BlurMaxPool2d"]),
        ],
    )
    def test_settings_select_layers(self, conv_net, make_engine, settings, blurred):
        """Settings exclude convolutions, pools and narrow convolutions."""
        model = conv_net()

        make_engine(model, BlurPool(**settings))

        assert [name for name in classes_of(model) if name.startswith("Blur")] == blurred

    @pytest.mark.parametrize("blur_first", [True, False])
    def test_order_of_blur_and_convolution(self, watch, make_engine, blur_first):
        """The stride is applied by the second step: the convolution of a blurred image, or the blur of its output."""
        model = watch(nn.Sequential(nn.Conv2d(16, 4, 3, stride=2, padding=1)))

        make_engine(model, BlurPool(blur_first=blur_first))

        assert model.layers[0].conv.stride == ((2, 2) if blur_first else (1, 1))

    def test_matches_the_formula(self, watch, make_engine):
        """The input is blurred per channel with [1, 2, 1] x [1, 2, 1] / 16 and then convolved."""
        conv = nn.Conv2d(16, 4, 3, stride=2, padding=1)
        images = torch.randn(2, 16, 8, 8)
        row = torch.tensor([1.0, 2.0, 1.0])
        kernel = (torch.outer(row, row) / 16).expand(16, 1, 3, 3)
        expected = conv(nn.functional.conv2d(images, kernel, padding=1, groups=16))
        model = watch(nn.Sequential(conv))

        make_engine(model, BlurPool())

        assert torch.allclose(model((images, None)), expected, atol=1e-6)

    def test_parameters_are_the_same_objects(self, conv_net, make_engine):
        """Surgery preserves the parameter objects."""
        model = conv_net()
        before = set(model.parameters())

        make_engine(model, BlurPool())

        assert set(model.parameters()) == before

    def test_number_of_replacements_is_logged(self, conv_net):
        """The number of replaced layers is logged, also under the names of MosaicML Composer."""
        logged = {}

        class Store(LoggerDestination):
            def log_hyperparameters(self, hyperparameters):
                logged.update(hyperparameters)

        state = State(model=conv_net())
        Engine(state, Logger(state, Store()), algorithms=BlurPool()).run_event("init")

        assert logged == {
            "BlurPool/replaced_layers": 2,
            "blurpool/num_blurpool_layers": 1,
            "blurpool/num_blurconv_layers": 1,
        }


class TestOptimizers:
    def test_optimizer_updates_all_parameters(self, conv_net, make_engine, step, images):
        """One optimizer step after the surgery changes each parameter, but for a bias that a norm subtracts again."""
        model = conv_net()
        engine = make_engine(model, BlurPool())
        before = full_copy(model)

        step(engine, images)

        unchanged = {name for name, weight in model.named_parameters() if torch.equal(weight, before[name])}
        assert unchanged <= {"layers.0.bias"}

    def test_momentum_is_preserved(self, conv_net, make_engine, step, images):
        """Momentum accumulated before the surgery is used in the next step."""
        model = conv_net()
        step(make_engine(model), images)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        for parameter in model.parameters():
            optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
        state = State(model=model, optimizers=optimizer)
        engine = Engine(state, algorithms=BlurPool())
        engine.run_event("init")
        before = {name: weight.detach().clone() for name, weight in model.named_parameters()}

        step(engine, images)

        for name, weight in model.named_parameters():  # SGD: buffer = 0.5 * buffer + gradient; weight -= 0.1 * buffer
            assert torch.allclose(weight, before[name] - 0.1 * (0.5 + weight.grad), atol=1e-6)


class TestNoEffect:
    @pytest.mark.parametrize(
        ("settings", "text"),
        [
            ({}, "Watched has no strided Conv2d with at least 16 input channels and no strided MaxPool2d"),
            ({"replace_maxpools": False, "min_channels": 4}, "at least 4 input channels. Remove it, or lower"),
            ({"replace_convs": False}, "no strided MaxPool2d. Remove it, or set replace_convs=True"),
        ],
    )
    def test_warns_if_no_layer_matches(self, watch, make_engine, settings, text):
        """A model without matching layers gives a warning that names the layers the settings require."""
        with pytest.warns(NoEffectWarning, match=text):
            make_engine(watch(nn.Conv1d(16, 16, 3, stride=2)), BlurPool(**settings))

    def test_replacing_nothing_raises(self):
        """Settings that exclude all layers raise an error."""
        with pytest.raises(ValueError, match="replace_convs and replace_maxpools are both False"):
            BlurPool(replace_convs=False, replace_maxpools=False)


def test_plan():
    """The algorithm runs once, in the ARCHITECTURE stage, and is required on load."""
    entries = explain(BlurPool()).entries

    assert {event: [one.stage for one in entries[event]] for event in entries} == {Event.INIT: [Stage.ARCHITECTURE]}
    assert BlurPool.required_on_load()
