"""Chats, preferences, and batches whose samples are not rows: trainings, and the programs of examples/language."""

import functools
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from check_size import code_lines
from composer import Trainer, distributed
from composer import functional as cf
from composer.core import DataSpec
from composer.models import HuggingFaceModel, PreferenceModel
from fixtures.processes import run_processes

WORDS, PAD, IMAGE = 30, 0, 5
EXAMPLES = Path(__file__).parent.parent / "examples/language"
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
GENERATOR = torch.Generator().manual_seed(0)
DOCUMENTS = [torch.randint(6, WORDS, (size,), generator=GENERATOR) for size in (5, 3, 9, 2, 7, 4, 6, 8)]


def make_llama(cls=LlamaForCausalLM, **settings):
    torch.manual_seed(0)
    ids = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}
    return cls(LlamaConfig(vocab_size=WORDS, **ids, **SIZES, **settings)).double()


def train(model, data, **options):
    """Train for two epochs, and return the trainer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"max_duration": "2ep", "device": "cpu", "progress_bar": False, "seed": 0}
    with Trainer(model=model, train_dataloader=data, optimizers=optimizer, **(settings | options)) as trainer:
        trainer.fit()
    return trainer


def weights(trainer):
    return torch.cat([each.detach().flatten() for each in trainer.state.model.parameters()])


def collate_padded(documents):
    """Pad documents on the right, with a mask."""
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in documents], batch_first=True)
    ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask != 0, -100)}


@pytest.mark.parametrize("microbatch_size", [1, 3])
def test_flattened_rows_in_microbatches(microbatch_size):
    """A row of documents, split where they start, takes the steps of padded rows, and counts documents as samples."""
    collator = DataCollatorWithFlattening()

    def flatten(documents):
        return dict(collator([{"input_ids": one.tolist(), "labels": one.tolist()} for one in documents]))

    loader = DataLoader(DOCUMENTS, 4, collate_fn=flatten)
    spec = DataSpec(loader, split_batch=cf.split_documents, get_num_samples_in_batch=cf.count_documents)
    expected = train(HuggingFaceModel(make_llama()), DataLoader(DOCUMENTS, 4, collate_fn=collate_padded))

    trainer = train(HuggingFaceModel(make_llama()), spec, device_train_microbatch_size=microbatch_size)

    torch.testing.assert_close(weights(trainer), weights(expected), rtol=1e-6, atol=1e-7)
    assert trainer.state.timestamp.sample == 16
    assert trainer.state.timestamp.token == 2 * sum(map(len, DOCUMENTS))


def test_images_in_microbatches():
    """Texts with patches of images, split by rows, take the steps of the batch."""

    def make_model():
        torch.manual_seed(0)
        text = SIZES | {"vocab_size": WORDS, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
        rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
        vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 2, "mlp_ratio": 2}
        text |= {"rope_parameters": rope, "pad_token_id": PAD}
        config = Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=6)
        return HuggingFaceModel(Qwen2VLForConditionalGeneration(config).double())

    def collate(samples):
        batch = collate_padded([ids for ids, _, _ in samples])
        batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).long()
        batch["labels"] = batch["labels"].where(batch["input_ids"] != IMAGE, -100)
        grids = torch.tensor([grid for _, all_grids, _ in samples for grid in all_grids])
        return {**batch, "image_grid_thw": grids, "pixel_values": torch.cat([pixels for _, _, pixels in samples])}

    generator = torch.Generator().manual_seed(0)
    samples = []
    for grids in ([(1, 4, 4)], [(1, 2, 4), (1, 4, 2)], [], [(1, 4, 6)]):
        ids = [part for _, rows, columns in grids for part in (7, *[IMAGE] * (rows * columns // 4), 8)]
        patches = sum(rows * columns for _, rows, columns in grids)
        pixels = torch.randn(patches, 24, generator=generator, dtype=torch.float64)
        samples.append((torch.tensor([*ids, 10, 11, 12]), grids, pixels))
    loader = DataLoader(samples, 4, collate_fn=collate)
    split = functools.partial(cf.split_image_batch, image_token_id=IMAGE)
    spec = DataSpec(loader, split_batch=split, get_num_samples_in_batch=lambda batch: len(batch["input_ids"]))

    expected = train(make_model(), spec)
    trainer = train(make_model(), spec, device_train_microbatch_size=1)

    torch.testing.assert_close(weights(trainer), weights(expected), rtol=1e-6, atol=1e-7)
    assert trainer.state.timestamp.sample == 8


def test_clock_of_padded_rows():
    """With a function, the clock of padded rows counts real tokens, and a duration in tokens ends with these."""
    loader = DataLoader(DOCUMENTS, 4, collate_fn=collate_padded)
    spec = DataSpec(loader, get_num_tokens_in_batch=cf.count_real_tokens)

    with_padding, real = (train(HuggingFaceModel(make_llama()), data) for data in (loader, spec))
    short = train(HuggingFaceModel(make_llama()), spec, max_duration="20tok")

    assert real.state.timestamp.token == 2 * sum(map(len, DOCUMENTS)) == 88
    assert with_padding.state.timestamp.token == 2 * (4 * 9 + 4 * 8) == 136
    assert short.state.timestamp.token == 44
    assert short.state.timestamp.batch == 2
    assert torch.equal(weights(real), weights(with_padding))


def make_pairs():
    """Return pairs with a prompt of one token, of which each document is in two."""
    rows = [{"input_ids": one, "labels": one.where(torch.arange(len(one)) > 0, -100)} for one in DOCUMENTS]
    return [{"chosen": rows[place], "rejected": rows[place - 1]} for place in range(len(rows))]


def train_preferences(**options):
    """Train direct preference optimization for two epochs, with half of each batch in each of two processes."""
    model = PreferenceModel(make_llama())
    pairs = model.with_reference(make_pairs())
    sampler = distributed.get_sampler(pairs, shuffle=True)
    size = 4 // distributed.get_world_size()
    return train(model, DataLoader(pairs, size, sampler=sampler, collate_fn=cf.collate_pairs), **options)


def test_preferences_in_microbatches():
    """Microbatches of one and of three pairs take the steps of the batch."""
    expected = weights(train_preferences())

    for size in (1, 3):
        found = weights(train_preferences(device_train_microbatch_size=size))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_preferences_in_two_processes(tmp_path):
    """Two processes with half of each batch take the steps of one. Takes more than 5 seconds, as it starts them."""
    run_processes(__file__, 2, tmp_path)
    trainer = train_preferences()

    for rank in range(2):
        result = json.loads((tmp_path / f"{rank}.json").read_text())
        assert result["weights"] == pytest.approx(weights(trainer).tolist(), rel=1e-6, abs=1e-7)
        assert result["margin"] == pytest.approx(trainer.state.train_metric_values["RewardMargin"].item(), rel=1e-5)


@pytest.fixture
def load(monkeypatch):
    """A function that imports a program, with data of a few functions."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    stand_ins = importlib.import_module("stand_ins")
    monkeypatch.setattr(stand_ins, "FUNCTIONS", stand_ins.FUNCTIONS[:24])

    def load_program(name):
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load_program


@pytest.mark.parametrize("name", ["chat", "dpo", "reward"])
class TestPrograms:
    def test_length(self, name):
        """A program has at most 30 lines of code."""
        assert len(code_lines((EXAMPLES / f"{name}.py").read_text())) <= 30

    def test_resumed_equals_uninterrupted(self, name, load, tmp_path):
        """Stopped after an epoch, and again within the next one, the weights are those of an uninterrupted run."""
        program = load(name)
        expected = program.main(str(tmp_path / "whole"), "2ep")

        program.main(str(tmp_path / "stopped"), "1ep")
        program.main(str(tmp_path / "stopped"), "3ba")
        assert list((tmp_path / "stopped").glob("ep1-ba3*"))  # of two batches in an epoch
        result = program.main(str(tmp_path / "stopped"), "2ep")

        pairs = zip(result["model"].parameters(), expected["model"].parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_chat_answers(load, tmp_path, monkeypatch):
    """After the training, the model answers the first question of its data."""
    program, stand_ins = load("chat"), sys.modules["stand_ins"]
    monkeypatch.setattr(stand_ins, "FUNCTIONS", stand_ins.FUNCTIONS[:3])

    result = program.main(str(tmp_path), "40ep")

    assert result["answer"].replace(" ", "").startswith(result["expected"].replace(" ", "")[:30]), result["answer"]


@pytest.mark.parametrize("name", ["dpo", "reward"])
def test_preferences_of_other_functions(load, tmp_path, name):
    """Nearly all held-back descriptions are preferred, and the metrics are those of the rewards."""
    result = load(name).main(str(tmp_path), "3ep")

    model, batch = result["model"].eval(), cf.collate_pairs(result["pairs"])
    with torch.no_grad():
        rewards = model(batch)["rewards"]
    margins = rewards[:, 0] - rewards[:, 1]
    assert result["metrics"]["PreferenceAccuracy"].item() == pytest.approx((margins > 0).float().mean().item())
    assert result["metrics"]["PreferenceAccuracy"] >= 0.9
    assert result["metrics"]["RewardMargin"].item() == pytest.approx(margins.mean().item(), rel=1e-4)


class TestStepOfTRL:
    """The loss and the gradients of TRL's trainers, on the batches that they collate. Takes long, as it imports TRL."""

    @pytest.fixture
    def data(self, monkeypatch):
        """TRL, the pairs of the programs as its data set, and their tokenizer."""
        trl = pytest.importorskip("trl", reason="it has the trainers to compare with")
        datasets = pytest.importorskip("datasets", reason="of TRL's data sets")
        monkeypatch.syspath_prepend(str(EXAMPLES))
        stand_ins = importlib.import_module("stand_ins")
        return trl, datasets.Dataset.from_list(stand_ins.load_pairs()[:6]), stand_ins.load_tokenizer()

    def compare(self, trainer, model, batch, step):
        """Compare one step: ``step`` makes our batch of TRL's."""
        own = step(batch)
        model.loss(model(own), own).backward()
        found = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        model.zero_grad()
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        expected = torch.cat([each.grad.flatten() for each in trainer.model.parameters() if each.grad is not None])
        assert model.loss(model(own), own).item() == pytest.approx(loss.item(), rel=1e-6)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)
        assert found.abs().max() > 1e-3

    @pytest.mark.filterwarnings("ignore")
    def test_dpo(self, data, tmp_path):
        """The step of DPOTrainer with cached log-probabilities, after the weights have left the reference."""
        trl, dataset, tokenizer = data
        network = make_llama().float()
        network.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        options = {"output_dir": str(tmp_path), "report_to": "none", "use_cpu": True, "bf16": False, "beta": 0.3}
        arguments = trl.DPOConfig(precompute_ref_log_probs=True, per_device_train_batch_size=6, **options)
        trainer = trl.DPOTrainer(network, args=arguments, train_dataset=dataset, processing_class=tokenizer)
        batch = next(iter(trainer.get_train_dataloader()))

        def step(batch):
            paired = {name: torch.stack(batch[name].chunk(2), dim=1) for name in ("input_ids", "attention_mask")}
            completion = torch.stack(batch["completion_mask"].chunk(2), dim=1)
            reference = torch.stack([batch["ref_chosen_logps"], batch["ref_rejected_logps"]], dim=1)
            return {**paired, "labels": paired["input_ids"].where(completion != 0, -100), "reference": reference}

        model = PreferenceModel(network, beta=0.3)
        own = step(batch)
        rows = [
            {side: {name: own[name][place, number] for name in ("input_ids", "labels")} for number, side in sides}
            for place in range(6)
            for sides in [[*enumerate(("chosen", "rejected"))]]
        ]
        cached = cf.collate_pairs(model.with_reference(rows))["reference"]
        torch.testing.assert_close(cached, own["reference"], rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            for each in network.parameters():
                each.add_(0.02 * torch.randn(each.shape, generator=torch.Generator().manual_seed(1)))

        self.compare(trainer, model, batch, step)

    @pytest.mark.filterwarnings("ignore")
    def test_reward(self, data, tmp_path):
        """The step of RewardTrainer."""
        trl, dataset, tokenizer = data
        network = make_llama(LlamaForSequenceClassification, num_labels=1).float()
        network.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        network.config.pad_token_id = tokenizer.pad_token_id
        options = {"output_dir": str(tmp_path), "report_to": "none", "use_cpu": True, "bf16": False}
        arguments = trl.RewardConfig(per_device_train_batch_size=6, disable_dropout=True, **options)
        trainer = trl.RewardTrainer(network, args=arguments, train_dataset=dataset, processing_class=tokenizer)
        batch = next(iter(trainer.get_train_dataloader()))

        def step(batch):
            paired = {name: torch.stack(batch[name].chunk(2), dim=1) for name in ("input_ids", "attention_mask")}
            return {**paired, "labels": paired["input_ids"]}

        self.compare(trainer, PreferenceModel(network), batch, step)


if __name__ == "__main__":
    trainer = train_preferences()
    values = trainer.state.train_metric_values
    result = {"weights": weights(trainer).tolist(), "margin": values["RewardMargin"].item()}
    (Path(sys.argv[1]) / f"{distributed.get_global_rank()}.json").write_text(json.dumps(result))
