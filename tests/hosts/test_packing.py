"""Packed sequences train in each host as in the Trainer, beside an algorithm that shortens them."""

import warnings

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from ignite.engine import Engine
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, SequentialSampler
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import composer
from composer import functional as cf
from composer.algorithms import SeqLengthWarmup
from composer.core import pack_sequences
from composer.integrations.accelerate import accelerate_algorithms
from composer.integrations.ignite import attach_algorithms
from composer.integrations.transformers import composer_trainer
from composer.models import HuggingFaceModel

lightning = pytest.importorskip("lightning", reason="Lightning is not installed")

LENGTH, TOKENS = 16, 30
GENERATOR = torch.Generator().manual_seed(0)
DOCUMENTS = [torch.randint(TOKENS, (size,), generator=GENERATOR) for size in [3, 9, 16, 5, 7, 1, 20, 11] * 4]
PACKED = pack_sequences(DOCUMENTS, LENGTH)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def _new_state(monkeypatch):
    """Accelerate and Transformers keep settings of the process; each test starts without them."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def make_model(kind=LlamaForCausalLM):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return kind(LlamaConfig(vocab_size=TOKENS, use_cache=False, **sizes))


def load():
    return DataLoader(PACKED, batch_size=2, collate_fn=cf.collate_packed)


def warmup():
    return SeqLengthWarmup(0.5, 4, LENGTH, 4)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def outputs_of(model, batch):
    return model(**{name: value for name, value in batch.items() if name != "document_lengths"})


def in_lightning(folder, kind=LlamaForCausalLM):
    from composer.integrations.lightning import ComposerCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = make_model(kind)

        def training_step(self, batch, batch_idx):
            return outputs_of(self.network, batch).loss

        def configure_optimizers(self):
            return sgd(self)

    module, callback = Module(), ComposerCallback([warmup()])
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning's own, about workers
        lightning.Trainer(callbacks=[callback], max_epochs=1, accelerator="cpu", default_root_dir=folder, **quiet).fit(
            module, load()
        )
    return module.network, callback.adapter.state


def in_transformers(folder, kind=LlamaForCausalLM):
    class Ordered(Trainer):
        def _get_train_sampler(self, *_):
            return SequentialSampler(self.train_dataset)

    model = make_model(kind)
    settings = {"max_grad_norm": 0, "lr_scheduler_type": "constant", "report_to": [], "save_strategy": "no"}
    trainer = composer_trainer(Ordered)(
        model=model,
        args=TrainingArguments(
            folder,
            per_device_train_batch_size=2,
            num_train_epochs=1,
            remove_unused_columns=False,
            use_cpu=True,
            disable_tqdm=True,
            **settings,
        ),
        train_dataset=PACKED,
        data_collator=cf.collate_packed,
        optimizers=(sgd(model), None),
        algorithms=[warmup()],
    )
    trainer.train()
    return model, trainer.algorithm_adapter.state


def in_accelerate(folder, kind=LlamaForCausalLM):
    del folder
    accelerator, model, loader = Accelerator(cpu=True), make_model(kind), load()
    optimizer = sgd(model)

    def loss(outputs, batch):
        return outputs.loss

    algorithms = accelerate_algorithms(
        accelerator, model, optimizer, loader, [warmup()], loss=loss, max_duration="1ep", forward=outputs_of
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(algorithms.compute_loss(batch))
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.unwrap_model(model), algorithms.state


def in_ignite(folder, kind=LlamaForCausalLM):
    del folder
    model = make_model(kind)
    optimizer = sgd(model)

    def loss_fn(outputs, labels):
        return cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def process(engine, batch):
        optimizer.zero_grad()
        algorithms.compute_loss(batch).backward()
        optimizer.step()

    trainer = Engine(process)
    algorithms = attach_algorithms(trainer, model, optimizer, loss_fn, [warmup()])
    trainer.run(load(), max_epochs=1)
    return model, algorithms.state


@pytest.mark.parametrize("train", [in_lightning, in_transformers, in_accelerate, in_ignite])
def test_weights_and_tokens_are_those_of_the_trainer(train, tmp_path):
    """In each host, the steps and the counted tokens are those of the Trainer."""
    expected = HuggingFaceModel(make_model())
    ours = composer.Trainer(
        model=expected,
        train_dataloader=load(),
        optimizers=sgd(expected),
        algorithms=warmup(),
        max_duration="1ep",
        device="cpu",
        progress_bar=False,
    )
    ours.fit()

    model, state = train(str(tmp_path))

    assert 0 < int(state.timestamp.token) == int(ours.state.timestamp.token) < sum(map(len, DOCUMENTS))
    for name, weight in expected.model.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("train", [in_transformers, in_accelerate, in_ignite])
def test_a_model_that_ignores_the_mask_is_rejected(train, tmp_path):
    """The first batch checks a model that takes token ids, as in the Trainer: this one starts no position again."""

    class Unaware(LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, position_ids=None, **kwargs):
            del position_ids
            return super().forward(input_ids=input_ids, labels=labels, **kwargs)

    with pytest.raises(ValueError, match="Unaware must not attend across documents"):
        train(str(tmp_path), kind=Unaware)
