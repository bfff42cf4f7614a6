"""Fine-tuning: a new head, rates by depth, layers that are trained later, a frozen norm, averages beside weights."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Evaluator, Trainer
from composer.algorithms import EMA
from composer.callbacks import GradualUnfreezing
from composer.models import ComposerClassifier


def main() -> dict:
    """Pretrain on the digits 0 to 4, and fine-tune on 100 images of the others."""
    pixels, digits = (torch.tensor(part) for part in load_digits(return_X_y=True))
    known, new = (TensorDataset(pixels[part].float() / 16, digits[part] % 5) for part in (digits < 5, digits > 4))
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()) for _ in range(3)]
    model = ComposerClassifier(network := nn.Sequential(*blocks, nn.Linear(64, 5)), num_classes=5)
    options = {"optimizers": torch.optim.AdamW(model.parameters(), lr=3e-3), "max_duration": "5ep"}
    Trainer(model=model, train_dataloader=DataLoader(known, batch_size=50, drop_last=True), **options).fit()
    network[-1] = nn.Linear(64, 5)
    network[0][1].eval().requires_grad_(False)  # keeps the statistics of the pretraining
    train, test = (DataLoader(TensorDataset(*part), batch_size=50) for part in (new[:100], new[100:]))
    evaluators = [Evaluator(label=one, dataloader=test, training_weights=one == "raw") for one in ("ema", "raw")]
    options = {"optimizers": torch.optim.AdamW(model.parameters(), lr=3e-3), "algorithms": EMA(half_life="5ba")}
    options |= {"callbacks": GradualUnfreezing(epochs=3, rates=0.5), "eval_interval": "1dur", "max_duration": "20ep"}
    trainer = Trainer(model=model, train_dataloader=train, eval_dataloader=evaluators, **options)
    trainer.fit()
    scores, targets = trainer.predict(test, join=True, with_targets=True)
    return {"metrics": trainer.eval(), "scores": scores, "targets": targets, "state": trainer.state, "test": new[100:]}


if __name__ == "__main__":
    print(main()["metrics"])
