"""DepthStacking in the Trainer: growth at its time, exact resume, schedules, averages, and grown checkpoints."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer import functional as cf
from composer.algorithms import EMA, SWA, DepthStacking, PostHocEMA
from composer.checkpoint import CheckpointMismatchError
from composer.core import AlgorithmConflictError, NoEffectWarning, evaluation_weights
from composer.core.saving.codec import equal
from composer.distributed import close_dist
from composer.models import ComposerClassifier, HuggingFaceModel
from composer.optim import LinearScheduler
from fixtures import weights

STEPS = 15  # of three epochs
IDS = torch.randint(32, (20, 8), generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """A residual block with an attribute of its own and dropout."""

    def __init__(self):
        super().__init__()
        self.scale = 0.5
        self.first, self.drop, self.last = nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 8)

    def forward(self, inputs):
        return inputs + self.scale * self.last(self.drop(self.first(inputs).tanh()))


def plain():
    """Return a classifier with a list of two blocks, its data, and no algorithm."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(32, 8), nn.Sequential(Block(), Block()), nn.Flatten(), nn.Linear(64, 3))
    return ComposerClassifier(network, num_classes=3), TensorDataset(IDS, IDS[:, 0] % 3)


def gpt2():
    """Return a GPT-2 of two layers with dropout, and its data."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, n_positions=8, vocab_size=32)
    data = [{"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)} for ids in IDS]
    return HuggingFaceModel(transformers.GPT2LMHeadModel(config), shift_labels=True), data


def run(*algorithms, make=plain, fits=(None,), idle="error", **options):
    """Train, and return the closed trainer; ``idle`` is for warnings of a first fit that ends before the growth."""
    model, data = make()
    settings = {
        "optimizers": torch.optim.AdamW(model.parameters(), lr=0.01),
        "schedulers": LinearScheduler(alpha_f=0.1),
        "max_duration": "3ep",
        "algorithms": list(algorithms),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # also of state that would not be saved
        warnings.simplefilter(idle, NoEffectWarning)
        warnings.filterwarnings(idle, "The learning rate rises")
        loader = DataLoader(data, 4, shuffle=True)
        trainer = Trainer(model=model, train_dataloader=loader, seed=3, progress_bar=False, **settings | options)
        for length in fits:
            trainer.fit(duration=length)
        trainer.close()
    return trainer


def saved(trainer):
    """Return all that two trainings are compared by, without the times of EMA on the wall clock."""
    state = trainer.state.state_dict()
    for algorithm in state["algorithms"]:
        algorithm["state"].pop("updated_at", None)
    return {name: state[name] for name in ("model", "optimizers", "algorithms", "schedulers")}


CASES = {
    "within an epoch": (plain, lambda: [DepthStacking("7ba"), EMA("3ba")], 7),
    "at an epoch": (plain, lambda: [DepthStacking("1ep", 3, "interleave"), SWA("2ba", "13ba", "1ba")], 5),
    "twice": (plain, lambda: [DepthStacking("0.2dur"), DepthStacking("7ba", zero_layers=["last"])], 7),
    "GPT-2": (gpt2, lambda: [DepthStacking("7ba")], 7),
}


class TestResume:
    @pytest.mark.parametrize("case", CASES)
    def test_before_at_and_after(self, tmp_path, case):
        """Runs that stop before the growth, right before the batch of it, and after it end with the same bits."""
        make, algorithms, grows_at = CASES[case]
        saving = {"save_interval": "1ba", "run_name": "run", "make": make}
        whole = run(*algorithms(), save_folder=str(tmp_path / "whole"), **saving)

        for stop in (grows_at - 2, grows_at, grows_at + 1, grows_at + 4):
            (path,) = (tmp_path / "whole").glob(f"ep*-ba{stop}")
            resumed = run(*algorithms(), load_path=str(path), save_folder=str(tmp_path / f"{stop}"), **saving)

            assert int(resumed.state.timestamp.batch) == STEPS
            assert equal(saved(resumed), saved(whole)), f"resumed after {stop} batches"

    def test_without_the_algorithm(self, tmp_path):
        """A checkpoint of a grown model grows the shallow one of a program that does not pass the algorithm."""
        whole = run(DepthStacking("7ba"), save_folder=str(tmp_path / "whole"), run_name="run")
        path = tmp_path / "whole" / "latest"

        evaluated = Trainer(model=plain()[0], load_path=str(path), load_weights_only=True)

        assert torch.equal(weights(evaluated), weights(whole))
        assert len(evaluated.state.model.module[1]) == 4

    def test_a_new_training_of_a_grown_model(self, tmp_path):
        """The same program from weights that have grown would make the model deeper again, which raises a warning."""
        run(DepthStacking("7ba"), save_folder=str(tmp_path / "whole"), run_name="run")
        options = {"load_path": str(tmp_path / "whole" / "latest"), "load_weights_only": True}

        with pytest.raises(UserWarning, match=r"made deeper before, by DepthStacking\(at=None.* will grow again"):
            run(DepthStacking("7ba"), **options)

    def test_a_deep_model_in_the_program(self, tmp_path):
        """If the program grows the model itself, the checkpoint loads without the saved growth."""
        whole = run(DepthStacking("7ba"), save_folder=str(tmp_path / "whole"), run_name="run")
        path, model = str(tmp_path / "whole" / "latest"), plain()[0]
        cf.apply_depth_stacking(model)
        options = {"load_path": path, "load_weights_only": True}

        with pytest.raises(CheckpointMismatchError, match=r"module\.1\.4"):
            Trainer(model=model, **options)
        model = plain()[0]
        cf.apply_depth_stacking(model)
        loaded = Trainer(model=model, load_exclude_algorithms="DepthStacking", **options)

        assert torch.equal(weights(loaded), weights(whole))


class TestGrowth:
    def test_two_fits(self):
        """A growth at the second call of fit equals a call of the function between them."""
        within = run(DepthStacking("7ba"))
        model, data = plain()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        two = run(DepthStacking("7ba"), fits=("7ba", None), idle="ignore")
        loader = DataLoader(data, 4, shuffle=True)
        called = Trainer(
            model=model,
            train_dataloader=loader,
            optimizers=optimizer,
            schedulers=LinearScheduler(alpha_f=0.1),
            max_duration="3ep",
            seed=3,
            progress_bar=False,
        )
        called.fit(duration="7ba")
        cf.apply_depth_stacking(model, optimizers=optimizer)
        with pytest.warns(UserWarning, match="The learning rate rises"):
            called.fit()

        assert torch.equal(weights(two), weights(called))
        called.close()
        assert len(weights(within)) == len(weights(two))

    def test_it_differs_from_its_absence(self):
        """Growth changes the weights of the first blocks, but not the schedule; both are counted."""
        grown, other = run(DepthStacking("7ba")), run()

        assert not torch.equal(grown.state.model.module[1][0].last.weight, other.state.model.module[1][0].last.weight)
        assert [group["lr"] for group in grown.state.optimizers[0].param_groups] == [
            group["lr"] for group in other.state.optimizers[0].param_groups
        ]
        assert grown.engine.explain().acted == {"DepthStacking": (2, "layers"), "DepthStacking.1": (2, "layers")}

    def test_until_then_nothing_changes(self):
        """Up to the growth the weights are those of a training without it."""
        settings = {"max_duration": "7ba"}
        with pytest.raises(NoEffectWarning, match="has not added blocks before the fit ended at 7"):
            run(DepthStacking("7ba"), **settings)
        later, without = run(DepthStacking("7ba"), idle="ignore", **settings), run(**settings)

        pairs = zip(later.state.model.state_dict().items(), without.state.model.state_dict().items(), strict=True)
        assert all(name == other and torch.equal(one, two) for (name, one), (other, two) in pairs)

    @pytest.mark.parametrize("average", [lambda: EMA("3ba"), lambda: SWA("2ba", "1dur", "1ba")])
    def test_averages_begin_again(self, average):
        """Averages of a model that has grown one batch before the end are its last weights."""
        alone, trainer = run(DepthStacking("14ba")), run(DepthStacking("14ba"), average(), idle="ignore")

        with evaluation_weights(trainer.state):
            assert torch.equal(weights(trainer), weights(alone))

    def test_snapshots_of_two_sizes_conflict(self, tmp_path):
        """PostHocEMA, whose snapshots would have other weights, raises an error before the training begins."""
        with pytest.raises(AlgorithmConflictError, match="use EMA, which begins again"):
            run(DepthStacking("7ba"), PostHocEMA(str(tmp_path), "2ba"))

    def test_a_sharded_model(self, request):
        """A model that FSDP2 has split raises an error before the first batch; growth at construction trains."""
        batches = []
        request.addfinalizer(close_dist)
        options = {"parallelism_config": {"fsdp": {}}, "max_duration": "2ba"}

        def make():
            model, data = plain()
            model.register_forward_hook(lambda *_: batches.append(1))
            return model, data

        with pytest.raises(ValueError, match="must not be sharded yet"):
            run(DepthStacking("1ba"), make=make, **options)
        assert not batches
        grown = run(DepthStacking(None), make=make, **options)
        assert len(grown.state.model.module[1]) == 4
        assert batches

    def test_a_model_without_blocks(self):
        """A wrong name is an error, and a model without blocks a warning, before the first batch."""
        steps = []
        model, _ = plain()
        model.register_forward_hook(lambda *_: steps.append(1))

        with pytest.raises(ValueError, match="zero_layers must be names within a block, got 'x'"):
            run(DepthStacking("7ba", zero_layers=["x"]), make=lambda: (model, plain()[1]))
        assert not steps
        network = nn.Sequential(nn.Embedding(32, 8), nn.Flatten(), nn.Linear(64, 3))
        with pytest.raises(NoEffectWarning, match="has no list of equal blocks"):
            run(DepthStacking("7ba"), make=lambda: (ComposerClassifier(network, num_classes=3), plain()[1]))
