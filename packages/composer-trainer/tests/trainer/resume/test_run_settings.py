"""A resumed run reports which settings its results depend on have changed."""

import logging
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from composer import Trainer
from fixtures import make_classifier

DATA = TensorDataset(torch.randn(20, 4, generator=torch.Generator().manual_seed(1)), torch.arange(20) % 3)


def loader(batch_size=4, **options):
    """Return a loader that shuffles by default."""
    return DataLoader(DATA, batch_size, **{"shuffle": True} | options)


def run(end, load_path=None, *, of_fit=None, frozen=False, loss_fn=None, dropout=0.1, steps=20, **options):
    """Train up to a batch, and return the trainer."""
    model = make_classifier()
    model.module.append(nn.Dropout(dropout))
    model.loss_fn = loss_fn or model.loss_fn
    model.module[0].requires_grad_(not frozen)
    defaults = {"train_dataloader": loader(), "seed": 7, "device": "cpu", "progress_bar": False}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    options = {"optimizers": optimizer, "schedulers": schedule, "max_duration": end, **defaults, **options}
    trainer = Trainer(model=model, load_path=load_path, step_schedulers_every_batch=True, **options)
    trainer.fit(**of_fit or {})
    return trainer


WEIGHTED = WeightedRandomSampler(torch.ones(20), 20)


@pytest.mark.parametrize("stop", ["3ba", "5ba"])  # within an epoch, and at its end
@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({"seed": 8}, "seed: 7 was saved, 8 is set."),
        ({"precision": "amp_fp16"}, "precision: fp32 was saved, amp_fp16 is set."),
        ({"of_fit": {"precision": "amp_fp16"}}, "precision: fp32 was saved, amp_fp16 is set."),
        ({"device_train_microbatch_size": 2}, "device_train_microbatch_size: None was saved, 2 is set."),
        ({"frozen": True}, "the number of parameters without requires_grad: 0 was saved, 2 is set."),
        ({"train_dataloader": loader(shuffle=False)}, "sampler: RandomSampler was saved, SequentialSampler is set."),
        (
            {"train_dataloader": loader(shuffle=False, sampler=WEIGHTED)},
            "sampler: RandomSampler was saved, WeightedRandomSampler is set.",
        ),
        ({"train_dataloader": list(loader(shuffle=False))}, "class: DataLoader was saved, list is set."),
        (
            {"train_dataloader": None, "of_fit": {"train_dataloader": loader(shuffle=False)}},
            "sampler: RandomSampler was saved, SequentialSampler is set.",
        ),
        ({"train_dataloader": loader(2)}, "samples a batch: 4 was saved, 2 is set."),
        ({"train_dataloader": loader(generator=torch.Generator().manual_seed(3))}, "None was saved, 3 is set."),
        ({"train_subset_num_batches": 4}, "subset_num_batches: -1 was saved, 4 is set."),
        ({"loss_fn": nn.CrossEntropyLoss(label_smoothing=0.1)}, "label_smoothing=0.1) is set."),
        ({"dropout": 0.5}, "dropout: 1 of 0.1 was saved, 1 of 0.5 is set."),
        ({"steps": 30}, "CosineAnnealingLR(T_max=20, eta_min=0.0, steps=20) was saved, CosineAnnealingLR(T_max=30"),
    ],
)
def test_changed_settings_warn(tmp_path, changes, row, stop):
    """One table has what has changed, what is the same, and what cannot be compared."""
    path = run(stop).save_checkpoint(str(tmp_path / "first"))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run("10ba", path, **changes)

    tables = [str(one.message) for one in caught if "with other settings" in str(one.message)]
    assert len(tables) == 1
    assert row in tables[0]
    assert "\n- the same: " in tables[0]
    assert "\n- not comparable: " in tables[0]


def test_equal_settings_are_logged(tmp_path, caplog):
    """Without a change there is no warning, and a message of the log has the table."""
    path = run("3ba").save_checkpoint(str(tmp_path / "first"))

    with caplog.at_level(logging.INFO, "composer"):
        run("10ba", path, seed=None)

    assert "the same: seed, precision, device_train_microbatch_size" in caplog.text
