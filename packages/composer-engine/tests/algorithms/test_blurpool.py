"""BlurPool: layers are replaced at INIT, and the optimizer is updated."""

import pytest
from torch import nn

from composer.algorithms import BlurPool
from composer.core import Engine, Logger, LoggerDestination, NoEffectWarning, State


def classes_of(model):
    return [type(layer).__name__ for layer in model.layers]


class TestSurgery:
    def test_strided_layers_are_blurred(self, conv_net, make_engine):
        """The strided convolution and the pool are replaced; the convolution without a stride is not."""
        model = conv_net()

        make_engine(model, BlurPool())

        assert classes_of(model) == ["Conv2d", "BatchNorm2d", "BlurConv2d", "BlurMaxPool2d", "Flatten", "Linear"]

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
