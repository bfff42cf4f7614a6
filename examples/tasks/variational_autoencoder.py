"""A variational autoencoder (VAE): a loss of two parts, and the best checkpoint by it, without a metric."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader

from composer import ComposerModel, Trainer


class VAE(ComposerModel):
    """Images ``(N, 64)`` in [0, 1], and 8 normally distributed numbers for each."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores of the pixels, and the mean and the logarithm of the variance of the code."""
        mean, log_variance = self.encoder(batch).chunk(2, dim=1)
        noise = torch.randn_like(mean) * self.training
        return self.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance

    def loss(self, outputs: tuple[Tensor, Tensor, Tensor], batch: Tensor) -> dict[str, Tensor]:
        """Return the two parts of the negative evidence lower bound (arXiv:1312.6114)."""
        scores, mean, log_variance = outputs
        pixels = 64 * nn.functional.binary_cross_entropy_with_logits(scores, batch)
        return {"pixels": pixels, "kl": (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2}


def main() -> dict:
    """Train, evaluate and predict; return what was computed."""
    images = torch.tensor(load_digits().data).float() / 16
    train, test = DataLoader(images[:1400], batch_size=64, shuffle=True), DataLoader(images[1400:], batch_size=64)
    torch.manual_seed(0)
    options = {"optimizers": torch.optim.Adam((model := VAE()).parameters(), lr=3e-3), "max_duration": "10ep"}
    options |= {"save_folder": "checkpoints", "save_best": "eval/loss", "save_num_checkpoints_to_keep": 1}
    trainer = Trainer(model=model, train_dataloader=train, eval_dataloader=test, seed=0, **options)
    result = trainer.fit()
    outputs = trainer.predict(test, join=True)
    return {"metrics": trainer.eval()["eval"], "outputs": outputs, "images": images[1400:], "result": result}


if __name__ == "__main__":
    print(main()["metrics"])
