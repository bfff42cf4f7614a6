"""WeightStandardization: weights of convolutions with mean 0 and variance 1."""

from torch import nn

from composer import functional as cf
from composer.algorithms import WeightStandardization
from fixtures.surgery import Surgery


class TestWeightStandardization(Surgery):
    make = WeightStandardization
    inserted = cf.WeightStandardizer
    former_names = {"WeightStandardization/num_weights_standardized": nn.Conv2d}
