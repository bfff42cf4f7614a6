"""A generative adversarial network (GAN): two networks, two optimizers, and a loss for each."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from composer import ComposerModel, Trainer


class GAN(ComposerModel):
    """Images ``(N, 64)`` in [-1, 1] of digits ``(N,)``."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(26, 256), nn.LeakyReLU(0.2), nn.Linear(256, 64), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(74, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return an image for each digit."""
        return self.generator(torch.cat([torch.randn(len(batch[1]), 16), nn.functional.one_hot(batch[1], 10)], dim=1))

    def loss(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Return the loss of each network, which gives no gradients to the other one (arXiv:1406.2661)."""
        real, drawn = (torch.cat([one, nn.functional.one_hot(batch[1], 10)], dim=1) for one in (batch[0], outputs))
        fixed = {name: weight.detach() for name, weight in self.discriminator.named_parameters()}
        scores = -self.discriminator(real), self.discriminator(drawn.detach())
        judged = nn.functional.softplus(-functional_call(self.discriminator, fixed, (drawn,)))
        return {"discriminator": nn.functional.softplus(torch.cat(scores)).mean() * 2, "generator": judged.mean()}


def main() -> dict:
    """Train and draw; return images before and after, with the digits that they should show."""
    torch.manual_seed(0)
    pixels, digits = (torch.tensor(part) for part in load_digits(return_X_y=True))
    data, model = TensorDataset(pixels.float() / 8 - 1, digits), GAN()
    train, test = DataLoader(data, batch_size=64, shuffle=True), DataLoader(data, batch_size=600)
    optimizers = [torch.optim.Adam(one.parameters(), lr=1e-3, betas=(0.5, 0.99)) for one in model.children()]
    trainer = Trainer(model=model, train_dataloader=train, optimizers=optimizers, max_duration="30ep", seed=0)
    before, result = trainer.predict(test, join=True), trainer.fit()
    return {"before": before, "after": trainer.predict(test, join=True), "data": data, "losses": result.metrics}


if __name__ == "__main__":
    print(main()["losses"])
