"""Detection: bright squares in dark images, some without one; the usual collate function, and microbatches."""

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator

from composer import Trainer
from composer.models import ComposerDetector


def draw(squares: int) -> tuple:
    """Return an image ``(3, 64, 64)``, and its target with so many boxes."""
    image, places = 0.2 * torch.rand(3, 64, 64), torch.randint(0, 48, (squares, 2))
    for x, y in places.tolist():
        image[:, y : y + 16, x : x + 16] = 1
    return image, {"boxes": torch.cat([places, places + 16], dim=1).float(), "labels": torch.zeros(squares).long()}


def main() -> dict:
    """Train, evaluate, and predict for images without targets; return what was computed."""
    torch.manual_seed(0)
    parts = [[draw(squares=number % 3) for number in range(count)] for count in (48, 16)]
    first = nn.Conv2d(3, 32, 5, stride=4, padding=2), nn.GroupNorm(4, 32), nn.ReLU()
    network = nn.Sequential(*first, nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GroupNorm(4, 64), nn.ReLU())
    network.out_channels = 64
    anchors = AnchorGenerator(sizes=((16,),), aspect_ratios=((1.0,),))
    model = ComposerDetector(RetinaNet(network, 1, min_size=64, max_size=64, anchor_generator=anchors))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    usual = {"batch_size": 4, "collate_fn": lambda samples: tuple(zip(*samples, strict=True))}
    train, test = DataLoader(parts[0], shuffle=True, **usual), DataLoader(parts[1], **usual)
    settings = {"max_duration": "8ep", "device_train_microbatch_size": 2, "seed": 0}
    trainer = Trainer(model=model, train_dataloader=train, optimizers=optimizer, **settings)
    trainer.fit()
    found = trainer.predict(DataLoader([image for image, _ in parts[1]], batch_size=4), join=True)
    return {"metrics": trainer.eval(test)["eval"], "found": found, "targets": [target for _, target in parts[1]]}


if __name__ == "__main__":
    print(main()["metrics"])
