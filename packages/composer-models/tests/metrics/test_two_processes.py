"""Two processes with unequal parts of the data compute the same values as one process."""

import json
import subprocess
import sys

import pytest
import torch

from composer.metrics import MAP, Dice, MIoU

PROGRAM = """
import json, sys
import torch
from composer.metrics import MAP, Dice, MIoU
rank, rendezvous, data = int(sys.argv[1]), sys.argv[2], torch.load(sys.argv[3])
torch.distributed.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=2)
share = slice(0, 1) if rank == 0 else slice(1, None)
metrics = {"MIoU": MIoU(3), "Dice": Dice(3), "MAP": MAP()}
metrics["MIoU"].update(data["scores"][share], data["ignoring"][share])
metrics["Dice"].update(data["scores"][share], data["masks"][share])
metrics["MAP"].update(data["predictions"][share], data["targets"][share])
values = {"MIoU": metrics["MIoU"].compute().item(), "Dice": metrics["Dice"].compute().item()}
values |= {name: value.item() for name, value in metrics["MAP"].compute().items()}
seen_here = len(metrics["MAP"].detection_box)
print(json.dumps([values, seen_here]))
torch.distributed.destroy_process_group()
"""


@pytest.fixture
def data():
    """Return masks and boxes of four images, one for the first process and three for the second."""
    generator = torch.Generator().manual_seed(0)
    masks = torch.randint(3, (4, 5, 5), generator=generator)
    ignoring = masks.clone()
    ignoring[0, :2], ignoring[3] = -1, -1
    targets = [
        {"boxes": torch.tensor([[0.0, 0, 10, 10 + place]]), "labels": torch.tensor([place % 2])} for place in range(4)
    ]
    predictions = [
        {"boxes": target["boxes"] + place, "labels": target["labels"], "scores": torch.tensor([0.9 - place / 10])}
        for place, target in enumerate(targets)
    ]
    return {
        "scores": torch.randn(4, 3, 5, 5, generator=generator),
        "masks": masks,
        "ignoring": ignoring,
        "predictions": predictions,
        "targets": targets,
    }


def test_unequal_shards(data, tmp_path):
    """Both processes compute the value over all four images, and then continue with their own state."""
    pytest.importorskip("pycocotools", reason="MAP is computed by pycocotools")
    torch.save(data, tmp_path / "data.pt")
    alone = {"MIoU": MIoU(3), "Dice": Dice(3), "MAP": MAP()}
    alone["MIoU"].update(data["scores"], data["ignoring"])
    alone["Dice"].update(data["scores"], data["masks"])
    alone["MAP"].update(data["predictions"], data["targets"])
    expected = {"MIoU": alone["MIoU"].compute().item(), "Dice": alone["Dice"].compute().item()}
    expected |= {name: value.item() for name, value in alone["MAP"].compute().items()}

    commands = [
        [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "rendezvous"), str(tmp_path / "data.pt")]
        for rank in range(2)
    ]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    try:
        printed = [json.loads(one.communicate(timeout=240)[0]) for one in running]
    finally:
        for one in running:
            one.kill()

    assert 0 < expected["map"] < 1
    assert [values for values, _ in printed] == [pytest.approx(expected, rel=1e-6)] * 2
    assert [seen_here for _, seen_here in printed] == [1, 3]
