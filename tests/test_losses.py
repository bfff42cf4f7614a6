"""The losses of models with labels that algorithms change are those of torch."""

from functools import partial

import pytest
import torch
import transformers
from torch import nn

from composer import functional as cf
from composer.algorithms import LabelSmoothing, MixUp
from composer.core import Engine, State
from composer.models import ComposerClassifier, ComposerSegmenter, HuggingFaceModel

WEIGHT = torch.tensor([1.0, 3.0, 0.5])
LOSSES = {
    "torch": nn.CrossEntropyLoss(),
    "ignored": nn.CrossEntropyLoss(ignore_index=1),
    "weighted": nn.CrossEntropyLoss(weight=WEIGHT),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "function": nn.functional.cross_entropy,
    "smoothed already": nn.CrossEntropyLoss(label_smoothing=0.2),
    "ours": cf.soft_cross_entropy,
    "ours, weighted": partial(cf.soft_cross_entropy, weight=WEIGHT),
}


def smoothed_loss(model, batch, *algorithms):
    """Return the loss of a model with algorithms that change its labels."""
    state = State(model)
    engine = Engine(state, algorithms=algorithms)
    state.batch, state.outputs = batch, model(batch)
    engine.run_event("before_loss")
    loss = model.loss(state.outputs, state.batch)
    engine.run_event("after_loss")
    return loss


class TestLabelSmoothing:
    SCORES = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    IDS = torch.tensor([0, 1, -100, 2, 1])

    @pytest.mark.parametrize("name", LOSSES)
    def test_equals_that_of_torch(self, name):
        """Also with class weights, ignored ids and every reduction."""
        loss_fn = LOSSES[name]
        settings = {"weight": WEIGHT} if "weighted" in name else {}
        settings |= {"ignore_index": 1} if name == "ignored" else {}
        settings |= {"reduction": "sum"} if name == "sum" else {}
        smoothing = 1 - 0.7 * 0.8 if name == "smoothed already" else 0.3
        model = ComposerClassifier(nn.Identity(), num_classes=3, loss_fn=loss_fn)

        ids = self.IDS.clamp(min=0) if name == "ignored" else self.IDS
        loss = smoothed_loss(model, (self.SCORES, ids), LabelSmoothing(0.3))

        expected = nn.functional.cross_entropy(self.SCORES, ids, label_smoothing=smoothing, **settings)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(model.loss(self.SCORES, (self.SCORES, ids)), loss_fn(self.SCORES, ids))

    def test_probabilities_of_ignored_ids_do_not_count(self):
        """After other algorithms have made probabilities of ids, a loss of torch ignores rows of zeros."""
        model = ComposerClassifier(nn.Identity(), num_classes=3, loss_fn=nn.CrossEntropyLoss())
        probabilities = cf.ensure_targets_one_hot(self.SCORES, self.IDS)

        loss = smoothed_loss(model, (self.SCORES, probabilities), LabelSmoothing(0.3))

        expected = nn.functional.cross_entropy(self.SCORES, self.IDS, label_smoothing=0.3)
        torch.testing.assert_close(loss, expected)

    def test_segmentation_with_two_heads(self):
        """The labels of both heads are smoothed."""
        heads = {"out": torch.randn(2, 3, 4, 4), "aux": torch.randn(2, 3, 4, 4)}
        masks = torch.randint(-1, 3, (2, 4, 4))
        model = ComposerSegmenter(TwoHeads(heads), num_classes=3)

        loss = smoothed_loss(model, (torch.zeros(2, 3, 4, 4), masks), LabelSmoothing(0.3))

        main, auxiliary = (
            nn.functional.cross_entropy(scores, masks, label_smoothing=0.3, ignore_index=-1)
            for scores in heads.values()
        )
        torch.testing.assert_close(loss, main + 0.5 * auxiliary)

    def test_language_model_keeps_ids(self):
        """The labels of a large vocabulary are not expanded to probabilities."""
        config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=8, bos_token_id=0)
        model = HuggingFaceModel(transformers.GPT2LMHeadModel(config).eval(), metrics=[])
        ids = torch.randint(40, (2, 8))
        batch = {"input_ids": ids, "labels": ids.where(torch.arange(8) < 5, -100)}
        state = State(model)
        engine = Engine(state, algorithms=[LabelSmoothing(0.3, target_key="labels")])
        state.batch, state.outputs = batch, model(batch)

        engine.run_event("before_loss")

        assert state.batch["labels"] is batch["labels"]
        logits, labels = state.outputs["logits"][:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        expected = nn.functional.cross_entropy(logits, labels, label_smoothing=0.3)
        torch.testing.assert_close(model.loss(state.outputs, state.batch), expected)
        engine.run_event("after_loss")
        torch.testing.assert_close(model.loss(state.outputs, state.batch), state.outputs["loss"], rtol=0, atol=0)


class TestMixUp:
    def test_scores_of_each_token(self):
        """Of a dictionary's logits (N, L, C) the last dimension is the classes, also where L equals C."""
        state = State(nn.Identity())
        engine = Engine(state, algorithms=[MixUp(alpha=5.0, target_key="labels", input_key="inputs")])
        labels = torch.tensor([[0, 1, 1], [2, 2, 2]])
        state.batch = {"inputs": torch.eye(2), "labels": labels}
        engine.run_event("before_forward")
        state.outputs = {"logits": torch.zeros(2, 3, 3)}

        engine.run_event("before_loss")

        one_hot = nn.functional.one_hot(labels, 3).float()
        expected = torch.einsum("nm,mlc->nlc", state.batch["inputs"], one_hot)  # as the samples were mixed
        torch.testing.assert_close(state.batch["labels"], expected)

    @pytest.mark.parametrize("shape", [(2, 5, 4, 6), (2, 5, 4)])
    def test_scores_of_each_pixel(self, shape):
        """Of a dictionary's logits (N, C, ...), the second dimension is the classes where the labels show it."""
        state = State(nn.Identity())
        engine = Engine(state, algorithms=[MixUp(alpha=5.0)])
        labels = torch.randint(5, (2, *shape[2:]))
        state.batch = torch.eye(2), labels
        engine.run_event("before_forward")
        state.outputs = {"logits": torch.zeros(shape)}

        engine.run_event("before_loss")

        one_hot = nn.functional.one_hot(labels, 5).movedim(-1, 1).float()
        expected = torch.einsum("nm,m...->n...", state.batch[0], one_hot)  # as the samples were mixed
        torch.testing.assert_close(state.batch[1], expected)

    def test_regression(self):
        """Numbers are blended as the samples are."""
        state = State(nn.Identity())
        engine = Engine(state, algorithms=[MixUp(alpha=5.0)])
        state.batch = torch.eye(2), torch.tensor([[3.0], [5.0]])
        engine.run_event("before_forward")
        state.outputs = torch.zeros(2, 1)

        engine.run_event("before_loss")

        torch.testing.assert_close(state.batch[1], state.batch[0] @ torch.tensor([[3.0], [5.0]]))

    def test_whole_numbers_of_a_regression_raise(self):
        """The error names the algorithm and both remedies."""
        state = State(nn.Identity())
        engine = Engine(state, algorithms=[MixUp(alpha=5.0)])
        state.batch = torch.eye(2), torch.tensor([3, 5])
        engine.run_event("before_forward")
        state.outputs = torch.zeros(2)

        with pytest.raises(
            ValueError, match=r"MixUp blends class ids.*set interpolate_loss=True, pass targets in floating point"
        ):
            engine.run_event("before_loss")


class TestOutputsInDictionaries:
    def smooth(self, outputs, ids):
        """Return the labels of a loss of a model without its own smoothing."""
        state = State(nn.Identity())
        engine = Engine(state, algorithms=[LabelSmoothing(0.3)])
        state.batch, state.outputs = (None, ids), outputs
        engine.run_event("before_loss")
        return state.batch[1]

    @pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (2, 3, 4, 5)])
    def test_classes_in_the_second_dimension_of_logits(self, shape):
        """The loss is torch's with ``label_smoothing``, also for probabilities as labels of pixels."""
        ids, logits = torch.randint(3, (2, *shape[2:])), torch.randn(shape)
        expected = nn.functional.cross_entropy(logits, ids, label_smoothing=0.3)

        smoothed = [self.smooth({"logits": logits}, ids)]
        if len(shape) == 4:
            one_hot = nn.functional.one_hot(ids, 3).movedim(-1, 1).float()
            smoothed.append(self.smooth({"logits": logits}, one_hot))

        for labels in smoothed:
            torch.testing.assert_close(nn.functional.cross_entropy(logits, labels), expected)

    @pytest.mark.parametrize("shapes", [{"out": (2, 7)}, {"a": (2, 3, 4, 5), "b": (2, 6, 4, 5)}])
    def test_no_or_several_shapes_raise(self, shapes):
        """The error lists the tensors."""
        outputs = {name: torch.zeros(shape) for name, shape in shapes.items()}

        with pytest.raises(KeyError, match=r"without 'logits', and of its tensors .* targets of shape \(2, 4, 5"):
            self.smooth(outputs, torch.randint(3, (2, 4, 5)))


class TwoHeads(nn.Module):
    """Returns constant scores of two heads."""

    def __init__(self, heads):
        super().__init__()
        self.heads = heads

    def forward(self, images):
        return self.heads
