"""TokenSelection in custom loops: the loss of selected tokens, the losses of a reference model, and errors."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from composer.algorithms import TokenSelection, with_reference_losses
from composer.core import Engine, NoEffectWarning, State
from fixtures.models import LanguageModel, WithLoss, make_transformer

KEEP = 0.3


def make_batch(rows=4, length=12, tokens=16):
    """Return ids, labels of which some are ignored, and losses of a reference."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(tokens, (rows, length), generator=generator)
    labels = ids.where(torch.rand(rows, length, generator=generator) < 0.8, -100)
    return {"input_ids": ids, "labels": labels, "reference_losses": torch.rand(rows, length, generator=generator) + 2}


def selected_mean(losses, reference, labels):
    """Return the mean over the selected tokens of all rows, by sorting."""
    total, weight = 0.0, 0.0
    for row in range(len(labels)):
        places = [place for place in range(len(labels[row])) if labels[row, place] != -100]
        left = KEEP * len(places)
        weight += left
        for place in sorted(places, key=lambda place: float((reference - losses.detach())[row, place])):
            total = total + min(max(left, 0.0), 1.0) * losses[row, place]
            left -= 1
    return total / weight


def loss_of(model, batch, algorithm, **options):
    """Return the state after the events of a step."""
    state = State(model, **options)
    state.batch = batch
    engine = Engine(state, algorithms=[algorithm])
    engine.run_event("fit_start")
    engine.run_event("before_forward")
    state.outputs = state.compute_outputs(state.batch)
    state.loss = state.compute_loss(state.outputs, state.batch)
    engine.run_event("after_loss")
    engine.run_event("batch_end")
    return state, engine


class TestLoss:
    def test_of_next_tokens(self):
        """With a causal model of Transformers, labels and losses of the reference are those of the next position."""
        torch.manual_seed(0)
        batch = make_batch()
        model = WithLoss(make_transformer("gpt2").eval())

        state, _ = loss_of(model, batch, TokenSelection(KEEP))

        logits, labels = state.outputs.logits[:, :-1], batch["labels"][:, 1:]
        losses = cross_entropy(logits.movedim(-1, 1), labels, reduction="none")
        expected = selected_mean(losses.double(), batch["reference_losses"][:, 1:].double(), labels)
        torch.testing.assert_close(state.loss.double(), expected)
        assert state.loss > state.outputs.loss  # the highest excess
        assert "reference_losses" not in state.batch
        assert "reference_losses" in batch

    @pytest.mark.parametrize("keep", [KEEP, 1.0])
    @pytest.mark.filterwarnings("ignore::composer.core.NoEffectWarning")
    def test_of_a_tuple(self, keep):
        """A model with logits (N, L, V) and labels of the same position; with all tokens it is their mean."""
        torch.manual_seed(0)
        batch = tuple(make_batch().values())
        model = LanguageModel()
        options = {"forward": lambda batch: model(batch[0]), "loss_function": lambda outputs, batch: outputs.mean()}

        state, _ = loss_of(model, batch, TokenSelection(keep, target_key=1, reference_key=2), **options)

        losses = cross_entropy(state.outputs.movedim(-1, 1), batch[1], reduction="none")
        expected = losses.sum() / (batch[1] >= 0).sum() if keep == 1 else selected_mean(losses, batch[2], batch[1])
        torch.testing.assert_close(state.loss, expected)

    def test_without_labels_it_is_zero(self):
        """A microbatch in which no label counts adds nothing, and no NaN."""
        batch = make_batch()
        batch["labels"].fill_(-100)
        model = WithLoss(make_transformer("gpt2"))

        state, _ = loss_of(model, batch, TokenSelection(KEEP))
        state.loss.backward()

        assert state.loss == 0
        assert not any(one.grad.any() for one in model.parameters())

    def test_counts_tokens(self):
        """The end of a training reports how many tokens had no weight, and warns if there was none."""
        batch = make_batch()
        counted = int((batch["labels"][:, 1:] != -100).sum())
        state, engine = loss_of(WithLoss(make_transformer("gpt2")), batch, TokenSelection(KEEP))
        state.timestamp = state.timestamp.to_next_batch()
        engine.run_event("fit_end")

        rows = (batch["labels"][:, 1:] != -100).sum(1)
        assert engine.explain().acted == {"TokenSelection": (counted - int((KEEP * rows).ceil().sum()), "tokens")}

        batch["labels"][:, 2:] = -100
        _, engine = loss_of(WithLoss(make_transformer("gpt2")), batch, TokenSelection(KEEP))
        with pytest.warns(NoEffectWarning, match="left out none of"):
            engine.run_event("fit_end")


class TestErrors:
    def test_no_reference(self):
        """Batches without losses of a reference raise an error that names the function for them."""
        batch = make_batch()
        del batch["reference_losses"]

        with pytest.raises(ValueError, match="with_reference_losses"):
            loss_of(WithLoss(make_transformer("gpt2")), batch, TokenSelection())

    def test_classifier(self):
        """Logits of samples instead of tokens raise an error."""
        batch = (torch.rand(4, 3), torch.arange(4) % 3, torch.rand(4))
        model = WithLoss(nn.Linear(3, 3))

        with pytest.raises(ValueError, match=r"logits of the shape \(N, L, V\).*got \(4, 3\)"):
            loss_of(model, batch, TokenSelection(target_key=1, reference_key=2))

    def test_several_losses(self):
        """A model with several losses raises an error."""
        model = WithLoss(LanguageModel())
        model.loss = lambda outputs, batch: {"first": outputs.mean(), "second": outputs.mean()}
        batch = tuple(make_batch().values())

        with pytest.raises(TypeError, match="one loss, a tensor, got dict"):
            loss_of(model, batch, TokenSelection(target_key=1, reference_key=2))

    def test_no_logits(self):
        """Outputs without logits raise an error that names what there is."""
        model = WithLoss(make_transformer("gpt2"))
        options = {"forward": lambda batch: {"scores": model(batch).logits}, "loss_function": lambda *_: torch.ones(())}

        with pytest.raises(ValueError, match=r"logits of the shape \(N, L, V\).*no 'logits'.*'scores'"):
            loss_of(model, make_batch(), TokenSelection(), **options)

    def test_sum(self):
        """A loss that is a sum raises an error when the training begins: means must not be added."""
        model = WithLoss(make_transformer("gpt2"))
        model.loss_is_sum = True

        with pytest.raises(ValueError, match="loss_is_sum=True"):
            loss_of(model, make_batch(), TokenSelection())

    def test_other_parts(self):
        """A loss with parts that are no mean over tokens raises an error when the training begins."""
        model = WithLoss(make_transformer("gpt2"))
        model.loss_needs_whole_batch = True

        with pytest.raises(ValueError, match="output_router_logits=False"):
            loss_of(model, make_batch(), TokenSelection())


class OnlyIds(nn.Module):
    """A model of Transformers that is called with ids only."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids, **others):
        return self.model(input_ids=input_ids)


class TestReference:
    def samples(self, count=5):
        return [{"input_ids": ids, "labels": ids} for ids in torch.randint(16, (count, 7))]

    def test_values(self):
        """They are the losses of the next tokens in evaluation mode, at the places of their labels."""
        model, samples = make_transformer("gpt2").train(), self.samples()
        samples[1]["labels"] = samples[1]["labels"].where(torch.arange(7) > 3, -100)

        found = with_reference_losses(model, samples, batch_size=2)

        assert model.training
        model.eval()
        for sample, one in zip(samples, found, strict=True):
            logits = model(input_ids=sample["input_ids"][None]).logits[0, :-1]
            expected = cross_entropy(logits, sample["labels"][1:], reduction="none")
            torch.testing.assert_close(one["reference_losses"], torch.cat([torch.zeros(1), expected.detach()]))
            assert one["labels"] is sample["labels"]

    def test_lengths(self):
        """Padded batches give each sample the losses of its own tokens."""

        def pad(rows):
            ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True)
            return {"input_ids": ids, "labels": pad_sequence([row["labels"] for row in rows], True, -100)}

        model, samples = make_transformer("gpt2"), self.samples(2)
        samples[0] = {name: ids[:4] for name, ids in samples[0].items()}

        together = with_reference_losses(model, samples, collate_fn=pad)

        for row, sample in zip(together, samples, strict=True):
            (alone,) = with_reference_losses(model, [sample])
            torch.testing.assert_close(row["reference_losses"], alone["reference_losses"])

    def test_file(self, tmp_path):
        """The second call reads the file; other samples and another model raise an error."""
        model, samples, path = make_transformer("gpt2"), self.samples(), tmp_path / "new" / "losses.safetensors"
        first = with_reference_losses(model, samples, path)
        model.forward = None  # not called again

        second = with_reference_losses(model, samples, path)

        assert all(map(torch.equal, *([one["reference_losses"] for one in each] for each in (first, second))))
        assert [one.name for one in path.parent.iterdir()] == ["losses.safetensors"]
        with pytest.raises(ValueError, match="is of another data set"):
            with_reference_losses(model, samples[:-1], path)
        with torch.no_grad():
            model.transformer.wte.weight[0, 0] += 1
        with pytest.raises(ValueError, match="is of another model"):
            with_reference_losses(model, samples, path)

    def test_settings_of_a_file(self, tmp_path):
        """A file is not read for another key of labels, or another configuration with the same weights."""
        model, path = make_transformer("gpt2"), tmp_path / "losses"
        samples = [{**one, "others": one["labels"].flip(0)} for one in self.samples()]
        with_reference_losses(OnlyIds(model), samples, path)

        with pytest.raises(ValueError, match="losses is of another target_key"):
            with_reference_losses(OnlyIds(model), samples, path, target_key="others")
        model.config.layer_norm_epsilon = 0.1
        with pytest.raises(ValueError, match="losses is of another model"):
            with_reference_losses(OnlyIds(model), samples, path)

    @pytest.mark.parametrize("kind", [np.asarray, lambda row: [torch.tensor(row)]], ids=["array", "list of tensors"])
    def test_middle_of_a_row(self, tmp_path, kind):
        """A token in the middle of a long row, which is left out where arrays are printed, is of another data set."""
        model, path = OnlyIds(make_transformer("gpt2")), tmp_path / "losses"
        sample, row = dict.fromkeys(("input_ids", "labels"), torch.arange(7)), [1] * 2000
        options = {"path": path, "collate_fn": lambda rows: {name: row[None] for name, row in sample.items()}}
        with_reference_losses(model, [{**sample, "row": kind(row)}], **options)
        row[1000] = 2

        with pytest.raises(ValueError, match="losses is of another data set"):
            with_reference_losses(model, [{**sample, "row": kind(row)}], **options)

    def test_no_file_of_losses(self, tmp_path):
        """A file with other tensors, and one that is damaged, raise an error with the path."""
        model, samples, path = make_transformer("gpt2"), self.samples(), tmp_path / "losses"
        save_file({"weight": torch.ones(2)}, path)
        with pytest.raises(ValueError, match="losses is of another data set"):
            with_reference_losses(model, samples, path)
        path.unlink()
        with_reference_losses(model, samples, path)
        path.write_bytes(path.read_bytes()[:-8])
        with pytest.raises(ValueError, match="losses is damaged"):
            with_reference_losses(model, samples, path)

    def test_failed_write(self, tmp_path, monkeypatch):
        """A write that fails leaves no file."""

        def fail(_, path, __):
            path.touch()
            raise OSError

        monkeypatch.setattr("composer.algorithms.token_selection.save_file", fail)
        with pytest.raises(OSError):  # noqa: PT011  (it has no message)
            with_reference_losses(make_transformer("gpt2"), self.samples(), tmp_path / "losses")
        assert not [*tmp_path.iterdir()]

    def test_infinite(self):
        """A model with NaN in its weights raises an error."""
        model = make_transformer("gpt2")
        nn.init.constant_(model.transformer.wte.weight, torch.nan)

        with pytest.raises(ValueError, match="finite losses"):
            with_reference_losses(model, self.samples())
