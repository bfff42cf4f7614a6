"""PostHocEMA: its snapshots, and the averages reconstructed from them."""

import copy

import pytest
import torch
from safetensors.torch import load_file

from composer import functional as cf
from composer.algorithms import EMA, PostHocEMA, post_hoc_ema
from composer.core import Algorithm, Event, Stage, State
from composer.core.testing import Training
from fixtures.models import WithLoss, make_network


class Recorded(Algorithm):
    """Records the weights after each batch."""

    runs_at = {Event.BATCH_END: Stage.WEIGHTS}

    def __init__(self):
        self.weights = []

    def apply(self, event, state, logger):
        self.weights.append(copy.deepcopy(state.model.state_dict()))


def make_state(dtype=torch.float32):
    model = WithLoss(torch.nn.Sequential(make_network(), torch.nn.BatchNorm1d(3))).to(dtype)
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(20, 8, 4, generator=generator), torch.randint(3, (20, 8), generator=generator)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = list(zip(inputs.to(dtype), targets, strict=True))
    return State(model, optimizers=optimizer, max_duration="20ep", train_dataloader=data)


def train(folder, *others, batches=400, interval="20ba", dtype=torch.float32, **settings):
    """Train, and return the algorithm and the state."""
    algorithm, state = PostHocEMA(folder, interval, **settings), make_state(dtype)
    training = Training(state, [*others, algorithm])
    training.run(batches)
    training.finish()
    return algorithm, state


def direct(weights, sigma_rel):
    """Return the average by the recurrence, in float64."""
    average = {name: value.double() for name, value in weights[0].items()}
    for count, values in enumerate(weights, start=1):
        smoothing = cf.power_ema_smoothing(count, sigma_rel)
        average = {name: smoothing * average[name] + (1 - smoothing) * value for name, value in values.items()}
    return {name: average[name] if value.is_floating_point() else value for name, value in weights[-1].items()}


class TestReconstruction:
    @pytest.mark.parametrize("num_updates", [400, 240])
    def test_is_the_average_computed_directly(self, tmp_path, num_updates):
        """In a training of 400 batches with 40 snapshots, averages of six widths are within 1e-3."""
        recorded = Recorded()
        train(tmp_path, recorded, EMA("10ba"), interval="10ba")

        for sigma_rel in (0.05, 0.07, 0.1, 0.12, 0.15, 0.2):
            found = post_hoc_ema(tmp_path, sigma_rel, num_updates)
            expected = direct(recorded.weights[:num_updates], sigma_rel)
            assert found.keys() == expected.keys()
            count = found.pop("network.1.num_batches_tracked")
            assert count == num_updates
            for name, value in found.items():
                assert (value - expected[name]).norm() <= 1e-3 * expected[name].norm(), name

    def test_loads_into_the_model(self, tmp_path):
        """The weights have the names and shapes of the model's, and are evaluated as any others."""
        _, state = train(tmp_path)

        averages = post_hoc_ema(tmp_path, 0.08)
        before = {name: value.clone() for name, value in state.model.state_dict().items()}

        state.model.load_state_dict(averages)

        loaded = state.model.state_dict()
        assert all(torch.equal(loaded[name], value.to(loaded[name].dtype)) for name, value in averages.items())
        assert any(not torch.equal(loaded[name], value) for name, value in before.items())

    def test_vectors_of_a_spectral_norm(self, tmp_path):
        """Buffers that are no statistics are those of the last snapshot: averages of unit vectors are none."""
        state = make_state()
        torch.nn.utils.parametrizations.spectral_norm(next(m for m in state.model.modules() if hasattr(m, "weight")))
        training = Training(state, [PostHocEMA(tmp_path, "20ba")])
        training.run(60)
        training.finish()

        averages = post_hoc_ema(tmp_path, 0.08)

        vectors = {name: one for name, one in state.model.state_dict().items() if name.endswith(("_u", "_v"))}
        assert len(vectors) == 2
        assert all(torch.equal(averages[name], vector) for name, vector in vectors.items())

    def test_models_in_16_bits_have_averages_in_32(self, tmp_path):
        """Averages of bfloat16 weights are saved in float32."""
        train(tmp_path, dtype=torch.bfloat16, batches=60, interval="10ba")

        assert {one.dtype for one in post_hoc_ema(tmp_path, 0.1).values()} == {torch.float32, torch.int64}

    def test_frozen_weights(self, tmp_path):
        """They are in the first snapshot alone, also if they are unfrozen later; all weights are reconstructed."""

        class Unfreeze(Algorithm):
            runs_at = {Event.BATCH_START: Stage.WEIGHTS}

            def apply(self, event, state, logger):
                if state.timestamp.batch == 200:
                    state.model.network[0][0].requires_grad_(True)

        state, recorded = make_state(torch.bfloat16), Recorded()
        state.model.network[0][0].requires_grad_(False)
        training = Training(state, [Unfreeze(), recorded, PostHocEMA(tmp_path, "10ba")])
        training.run(400)
        training.finish()

        names = {name for name, _ in state.model.network[0][0].named_parameters(prefix="network.0.0")}
        files = {count: {*load_file(tmp_path / f"updates-{count:09}-sigma-0.1.safetensors")} for count in (10, 20, 210)}
        assert [len(names & files[count]) for count in (10, 20, 210)] == [2, 0, 2]
        expected = direct(recorded.weights, 0.08)
        found = post_hoc_ema(tmp_path, 0.08)
        assert found.keys() == expected.keys()
        for name in names:
            assert found[name].dtype == torch.float32
            assert (found[name] - expected[name]).norm() <= 1e-2 * expected[name].norm(), name


class TestSnapshots:
    def test_files(self, tmp_path):
        """There is a file for each width at each interval and at the end; its tensors are the average."""
        recorded = Recorded()
        algorithm, _ = train(tmp_path / "{run_name}", recorded, batches=50)

        folder = tmp_path / "run"
        names = [f"updates-{count:09}-sigma-{sigma}.safetensors" for count in (20, 40, 50) for sigma in (0.05, 0.1)]
        assert sorted(path.name for path in folder.iterdir()) == sorted(names)
        expected = direct(recorded.weights, 0.1)
        for name, value in load_file(folder / names[-1]).items():
            torch.testing.assert_close(value.double(), expected[name].double(), rtol=1e-5, atol=1e-7)
        assert algorithm.state_dict()["num_updates"] == 50

    def test_epochs(self, tmp_path):
        """By default a snapshot is saved after each epoch."""
        train(tmp_path, batches=60, interval="1ep")

        assert sorted({path.name[8:17] for path in tmp_path.iterdir()}) == ["000000020", "000000040", "000000060"]

    def test_folder_of_another_training(self, tmp_path):
        """A new training does not mix its snapshots with others: it raises an error, or deletes them."""
        train(tmp_path, batches=60)
        (tmp_path / "notes.txt").write_text("mine")

        with pytest.raises(ValueError, match=r"PostHocEMA.* has 6 snapshots of another training"):
            train(tmp_path, batches=40)
        train(tmp_path, batches=40, overwrite=True)

        assert len([*tmp_path.iterdir()]) == 5
        assert (tmp_path / "notes.txt").exists()

    def test_resumed_training_writes_the_same(self, tmp_path):
        """A training that was stopped between two snapshots continues with bit-identical ones."""
        train(tmp_path / "whole", batches=60)
        stopped = Training(make_state(), [PostHocEMA(tmp_path / "parts", "20ba")])
        stopped.run(33)
        resumed = Training(make_state(), [PostHocEMA(tmp_path / "parts", "20ba")], loaded=stopped.save())
        resumed.run(60)
        resumed.finish()

        files = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
        assert len(files) == 6
        assert {path.name: path.read_bytes() for path in (tmp_path / "parts").iterdir()} == files


class TestErrors:
    def test_damaged_snapshot(self, tmp_path):
        """A file that is cut off is an error with its name."""
        train(tmp_path, batches=60)
        path = tmp_path / "updates-000000040-sigma-0.1.safetensors"
        path.write_bytes(path.read_bytes()[:-5])

        with pytest.raises(ValueError, match=r"updates-000000040-sigma-0.1.safetensors cannot be read"):
            post_hoc_ema(tmp_path)

    def test_snapshot_of_another_model(self, tmp_path):
        """Files with other weights are not added up."""
        from safetensors.torch import save_file

        train(tmp_path, batches=60)
        save_file({"weight": torch.ones(2)}, tmp_path / "updates-000000070-sigma-0.1.safetensors")

        with pytest.raises(ValueError, match=r"updates-000000070-sigma-0.1.safetensors is of another model"):
            post_hoc_ema(tmp_path, 0.08)
