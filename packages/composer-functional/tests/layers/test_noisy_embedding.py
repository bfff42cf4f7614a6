"""Noise on the embeddings of tokens."""

import copy
import pickle

import pytest
import torch
from torch import nn

from composer import functional as cf

IDS = torch.zeros(2, 6, dtype=torch.long)
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]])


def draw(seed=0, **options):
    return cf.draw_embedding_noise(IDS, 400, generator=torch.Generator().manual_seed(seed), **options)


class TestDraw:
    @pytest.mark.parametrize("alpha", [5.0, 15.0])
    def test_uniform_of_the_stated_size(self, alpha):
        """Values are uniform in ``alpha / sqrt(L D)`` times [-1, 1)."""
        noise = draw(alpha=alpha).double() / (alpha / (6 * 400) ** 0.5)

        assert noise.abs().max() <= 1
        assert noise.abs().max() > 0.99
        torch.testing.assert_close(noise.mean(), torch.tensor(0.0).double(), atol=0.05, rtol=0)
        torch.testing.assert_close(noise.var(), torch.tensor(1 / 3).double(), atol=0.03, rtol=0)

    def test_mask(self):
        """Padding gets no noise, and the size depends on the number of real tokens, as in the authors' code."""
        masked, plain = draw(mask=MASK), draw()

        torch.testing.assert_close(masked[0], plain[0])
        torch.testing.assert_close(masked[1, :2], plain[1, :2] * (6 / 2) ** 0.5)
        assert not masked[1, 2:].any()

    def test_draws_depend_on_the_generator(self):
        """Equal generators draw equal noise."""
        assert torch.equal(draw(3), draw(3))
        assert not torch.equal(draw(3), draw(4))


class TestLayer:
    @pytest.fixture
    def layer(self):
        return cf.NoisyEmbedding.take_over(nn.Embedding(10, 4), noise=None)

    def test_noise_is_added_once(self, layer):
        """The next outputs in training get the noise, and the ones after them do not."""
        noise, plain = torch.rand(2, 6, 4), layer(IDS)

        layer.noise = noise

        assert torch.equal(layer(IDS), plain + noise)
        assert torch.equal(layer(IDS), plain)

    def test_no_noise_in_evaluation(self, layer):
        """Evaluation does not use the noise; neither do outputs of another shape, such as those of a decoder."""
        layer.noise = torch.rand(2, 6, 4)
        plain = layer.weight[IDS]

        assert torch.equal(layer(IDS[:, :3]), plain[:, :3])
        assert torch.equal(layer.eval()(IDS), plain)

    def test_copies(self, layer):
        """The layer can be copied and pickled, and is an embedding with the same names."""
        for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert isinstance(again, nn.Embedding)
            assert list(again.state_dict()) == ["weight"]
