"""The example ``examples/tables.py``: its tables, its model and its trainer. The study itself takes minutes."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sklearn.datasets import load_iris, load_wine
from sklearn.metrics import roc_auc_score
from torch.nn.functional import one_hot
from torch.utils.data import default_collate

from composer.trainer.reproducibility import seed_all

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from composer import Trainer

EXAMPLE = Path(__file__).parent.parent / "examples" / "tables.py"


@pytest.fixture(scope="module")
def example() -> Any:
    """The example as a module, with fewer splits."""
    spec = importlib.util.spec_from_file_location("tables", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    module.SPLITS = 2
    return module


@pytest.fixture
def batch(example: Any) -> dict[str, Tensor]:
    """Four drawn tables of the same shape."""
    tables = example.DrawnTables(4, 4, seed=0)
    return default_collate([tables[index] for index in range(4)])


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restore the number of torch's threads, which the example sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def trainer_with(example: Any, names: Sequence[str], seed: int = 0, **options: Any) -> Trainer:
    """Return the trainer of a run with methods, as a study constructs it, but with small sets for evaluation."""
    seed_all(seed)
    methods = [{**example.METHODS, **example.SETTINGS}[name] for name in names]
    algorithms = [method() for method in methods if callable(method)]
    for method in methods:
        options = options if callable(method) else {**method, **options}
    options = {"evaluations": 1, "sets": (load_iris, load_wine), "progress_bar": False, **options}
    return example.make_trainer(algorithms, seed, **options)


class TestDrawnTables:
    def test_shapes_agree_in_a_group(self, example: Any):
        """Tables of a group have the same numbers of features and known rows, which differ between groups."""
        tables = example.DrawnTables(64, 4, seed=0)
        shapes = [(*tables[index]["values"].shape, len(tables[index]["labels"])) for index in range(64)]

        groups = [shapes[start : start + 4] for start in range(0, 64, 4)]
        assert all(len({*group}) == 1 for group in groups)
        assert len({group[0] for group in groups}) > 8
        assert all(rows == 64 and 2 <= features <= 8 and 16 <= known <= 48 for rows, features, known in shapes)

    def test_tables_depend_on_seed_and_index(self, example: Any):
        """A table is the same each time, whatever was read before; another seed or index gives another one."""

        def values(seed: int, index: int) -> bytes:
            return example.DrawnTables(8, 1, seed)[index]["values"].numpy().tobytes()

        assert values(0, 5) == values(0, 5)
        assert len({values(seed, index) for seed in range(3) for index in range(8)}) == 24


class TestRealTables:
    def test_parts_do_not_overlap(self, example: Any):
        """Settings are selected on other rows than those of the test; iris has one flower twice."""
        for start in range(0, 5 * example.SPLITS, example.SPLITS):
            rows = [
                {row.numpy().tobytes() for table in part[start : start + example.SPLITS] for row in table["values"]}
                for part in (example.real_tables("validation"), example.real_tables("test"))
            ]

            assert min(map(len, rows)) > 70
            assert len(rows[0] & rows[1]) <= 1


class TestTableClassifier:
    @pytest.fixture
    def model(self, example: Any) -> Any:
        """A model with random weights, large enough that each input matters."""
        seed_all(0)
        return example.TableClassifier().eval()

    def test_targets_are_not_read(self, model: Any, batch: dict[str, Tensor]):
        """The classes to predict do not change the scores."""
        scores = model(batch)["logits"]

        assert model(batch | {"targets": 1 - batch["targets"]})["logits"].equal(scores)

    def test_rows_are_predicted_separately(self, model: Any, batch: dict[str, Tensor]):
        """The scores of a row are the same without the other rows whose class is not known."""
        known = batch["labels"].shape[1]

        alone = model(batch | {"values": torch.cat([batch["values"][:, :known], batch["values"][:, -1:]], dim=1)})

        torch.testing.assert_close(alone["logits"][:, 0], model(batch)["logits"][:, -1], rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("what", ["rows", "features", "units"])
    def test_symmetries(self, model: Any, batch: dict[str, Tensor], what: str):
        """The order of known rows with their classes, the order of features and their units do not matter."""
        values, labels, known = batch["values"], batch["labels"], batch["labels"].shape[1]
        order = torch.randperm(known)
        changed = {
            "rows": {"values": torch.cat([values[:, order], values[:, known:]], dim=1), "labels": labels[:, order]},
            "features": {"values": values.flip(2)},
            "units": {"values": 3 * values + 5},
        }[what]

        scores, expected = model(batch | changed)["logits"], model(batch)["logits"]
        torch.testing.assert_close(scores, expected, rtol=1e-3, atol=1e-3)

    def test_a_class_belongs_to_its_row(self, model: Any, batch: dict[str, Tensor]):
        """Exchanging the classes of known rows, without the rows, changes the scores."""
        exchanged = model(batch | {"labels": batch["labels"].roll(1, dims=1)})

        assert not torch.allclose(exchanged["logits"], model(batch)["logits"], atol=1e-2)

    @pytest.mark.parametrize("classes", [2, 4])
    def test_roc_auc(self, model: Any, classes: int):
        """The metric is scikit-learn's ROC AUC of one class against the others, with the classes of the table only."""
        targets, scores = torch.arange(40) % classes, torch.randn(40, 10) + one_hot(torch.arange(40) % classes, 10)
        metric = model.get_metrics()["RocAuc"]

        model.update_metric({"targets": targets[None]}, {"logits": scores[None]}, metric)

        probabilities = scores[:, :classes].softmax(dim=1)
        expected = roc_auc_score(targets, probabilities[:, 1] if classes == 2 else probabilities, multi_class="ovr")
        assert 0.6 < expected < 0.95
        assert float(metric.compute()) == pytest.approx(expected, abs=1e-6)


class TestMakeTrainer:
    @pytest.mark.parametrize("recipe", [False, True], ids=["baseline", "recipe"])
    def test_training_classifies_real_tables(self, example: Any, recipe: bool):
        """After a short training on drawn tables, real ones are classified much better than by chance."""
        with trainer_with(example, example.RECIPE if recipe else [], tables=800, length=1.0, batch_size=4) as trainer:
            trainer.fit()

        assert trainer.state.eval_metric_values["RocAuc"] > 0.75

    @pytest.mark.skipif(os.environ.get("RESUME_MATRIX") != "all", reason="takes ten seconds; nox -s resume_matrix")
    @pytest.mark.filterwarnings("ignore::composer.core.NoEffectWarning")  # some begin after the first batch
    def test_every_method_trains(self, example: Any):
        """Each method alone, and what the search compares, is a training that the trainer accepts."""
        for name in {*example.METHODS, *(name for trial in example.TRIALS for name in trial)}:
            with trainer_with(example, [name], tables=64) as trainer:
                trainer.fit(duration="1ba")
            assert trainer.state.timestamp.batch == 1

    def test_the_seed_determines_the_training(self, example: Any):
        """The same seed gives the same weights after two steps, bit for bit; another seed gives others."""

        def weights(seed: int) -> Tensor:
            with trainer_with(example, [], seed, tables=64) as trainer:
                trainer.fit(duration="2ba")
                return trainer.state.model.head.weight.detach().clone()

        first, again, other = map(weights, (0, 0, 1))
        assert first.equal(again)
        assert not first.equal(other)

    def test_length(self, example: Any):
        """A shorter training has the first tables of the longer one."""
        with trainer_with(example, [], tables=64) as long, trainer_with(example, [], tables=64, length=0.5) as short:
            first, second = (next(iter(one.state.train_dataloader)) for one in (long, short))
            assert len(long.state.train_dataloader) == 2 * len(short.state.train_dataloader)

        assert first["values"].equal(second["values"])


@pytest.mark.slow
def test_study(tmp_path: Path):
    """The command of a study compares the recipe with the baseline; here on eight tables."""
    program = (
        "import functools, tables; tables.SPLITS = 1; "
        "tables.make_trainer = functools.partial(tables.make_trainer, tables=8, evaluations=1); tables.main()"
    )
    command = [sys.executable, "-c", program, "--study", "repeat", "--seeds", "0", "--output", str(tmp_path)]

    result = subprocess.run(command, cwd=EXAMPLE.parent, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stderr
    assert "RocAuc (higher is better)" in result.stdout
    assert [*re.findall(r"^(baseline|Muon \+ Half) ", result.stdout, re.MULTILINE)] == ["baseline", "Muon + Half"]
