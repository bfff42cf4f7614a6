"""Use the four installed packages together: import all public modules, run the command, and train.

``nox -s installed`` and ``tests/test_namespace.py`` run this program in a folder outside the repository.
"""

import importlib
import importlib.metadata
import pkgutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import composer
from composer import Trainer
from composer.algorithms import EMA, LabelSmoothing
from composer.models import ComposerClassifier

PACKAGES = ["composer-functional", "composer-engine", "composer-models", "composer-trainer"]
ONLY_WITH_AN_EXTRA = {"lightning", "transformers"}

versions = {importlib.metadata.version(package) for package in PACKAGES}
assert versions == {composer.__version__}, versions

repository = Path(__file__).resolve().parents[1] / "packages"
modules = [module.name for module in pkgutil.walk_packages(composer.__path__, "composer.") if "._" not in module.name]
for name in modules:
    try:
        file = importlib.import_module(name).__file__
    except ModuleNotFoundError as error:
        if error.name not in ONLY_WITH_AN_EXTRA:
            raise
    else:
        assert not Path(file).resolve().is_relative_to(repository), f"{name} is not installed, but in the repository"
assert len(modules) > 300, modules

command = Path(sysconfig.get_path("scripts")) / "composer"
for arguments in (["--help"], ["--version"], ["train", "--help"]):
    shown = subprocess.run([command, *arguments], capture_output=True, text=True, check=True).stdout
    assert "usage: composer" in shown or shown == f"composer-trainer {composer.__version__}\n", shown

torch.manual_seed(0)
inputs = torch.randn(128, 8)
data = DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(dim=1)), batch_size=16)
model = ComposerClassifier(torch.nn.Linear(8, 3), num_classes=3)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
algorithms = [LabelSmoothing(0.1), EMA("5ba")]
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model=model,
        train_dataloader=data,
        eval_dataloader=data,
        optimizers=optimizer,
        algorithms=algorithms,
        max_duration="3ep",
        device="cpu",
        save_folder=folder,
    )
    trainer.fit()
    trainer.close()
    assert list(Path(folder).iterdir())
accuracy = trainer.state.eval_metric_values["MulticlassAccuracy"]
assert accuracy > 0.8, accuracy
sys.stdout.write(f"composer {composer.__version__}: {len(modules)} modules, an accuracy of {accuracy:.2f}\n")
