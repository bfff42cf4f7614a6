"""Sequences of different lengths: from which of two modules, torch.nn.init or inspect, a line of source is."""

import inspect

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, random_split

from composer import Trainer
from composer.models import ComposerClassifier


class Reader(nn.Module):
    """A recurrent network over the bytes of each line, read before the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.recurrent, self.out = nn.Embedding(256, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, 2)

    def forward(self, ids: Tensor) -> Tensor:
        """Return scores ``(N, 2)`` for ids ``(N, L)``, padded with 0."""
        outputs = self.recurrent(self.embed(ids))[0]
        return self.out(outputs[range(len(ids)), ids.count_nonzero(dim=1) - 1])


def collate(samples: list) -> tuple:
    """Return ids ``(N, L)``, padded with 0, and labels ``(N,)``."""
    ids = nn.utils.rnn.pad_sequence([torch.tensor(line) for line, _ in samples], batch_first=True)
    return ids, torch.tensor([label for _, label in samples])


def main() -> dict:
    """Train, evaluate and predict; return what was computed."""
    sources = [inspect.getsource(module).encode().split(b"\n")[:500] for module in (nn.init, inspect)]
    data = [([*line[:60]], label) for label, lines in enumerate(sources) for line in lines if line.strip()]
    parts = random_split(data, [0.8, 0.2], generator=torch.Generator().manual_seed(0))
    train, test = (DataLoader(part, 32, shuffle=part is parts[0], collate_fn=collate) for part in parts)
    torch.manual_seed(0)
    model = ComposerClassifier(Reader())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = Trainer(model=model, train_dataloader=train, optimizers=optimizer, max_duration="4ep", seed=0)
    trainer.fit()
    scores, targets = trainer.predict(test, join=True, with_targets=True)
    return {"metrics": trainer.eval(test)["eval"], "scores": scores, "targets": targets}


if __name__ == "__main__":
    print(main()["metrics"])
