"""Loading: everything is checked before anything is changed."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from composer.algorithms import EMA, SWA, BlurPool, SqueezeExcite
from composer.checkpoint import (
    CheckpointError,
    CheckpointMismatchError,
    load_checkpoint,
    save_checkpoint,
)
from composer.core import Callback, Engine, Event, StateMismatchError, evaluation_weights
from composer.foreign import ForeignFile


@pytest.fixture
def later(runs):
    """Return another run of the same program with other weights."""
    return runs.make(seed=1, rank_zero_seed=0, batch=0, steps=1)


class TestCompleteCheckpoints:
    def test_round_trip(self, runs, saved, later):
        """Weights, optimizer, clock, seed and the trainer's extra data are restored."""
        loaded = load_checkpoint(saved, later)

        assert runs.same(runs.make(), later)
        assert loaded.extra == {"data": {"position": 7}}
        assert loaded.report.differences == ()
        assert {"timestamp", "model", "optimizers"} <= set(loaded.report.restored)
        assert loaded.manifest.run_name == "blur"

    def test_next_step_is_bit_identical(self, runs, saved, later):
        """The next step of the loaded and the saved run are bit-identical."""
        first = runs.make()
        load_checkpoint(saved, later)

        for state in (first, later):
            state.optimizers[0].zero_grad()
            state.model(torch.ones(2, 4)).square().sum().backward()
            state.optimizers[0].step()

        assert runs.same(first, later)

    def test_buffers_that_the_model_does_not_save(self, runs, tmp_path):
        """Those that a checkpoint has, as the weights of a loss from earlier releases, stay those of the program."""

        def make(value, *, persistent):
            model = nn.Linear(4, 2)
            model.register_buffer("balance", torch.full((2,), value), persistent=persistent)
            return runs.make(model=model)

        saved = save_checkpoint(make(1.0, persistent=True), tmp_path / "saved")
        later = make(5.0, persistent=False)
        load_checkpoint(saved, later)

        assert later.model.balance.tolist() == [5.0, 5.0]

    def test_optimizer_strides_are_preserved(self, runs, tmp_path):
        """The optimizer's tensors have the saved strides, as kernels round differently with others."""

        def make(seed):
            torch.manual_seed(seed)
            model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
            optimizer = torch.optim.Adam(model.parameters())
            model(torch.rand(2, 3, 8, 8)).sum().backward()
            optimizer.step()
            return runs.make(model=model, optimizer=lambda *_, **__: optimizer, steps=0)

        state, other = make(0), make(1)

        load_checkpoint(save_checkpoint(state, tmp_path / "one"), other)

        strides = [one.optimizers[0].state[one.model.weight]["exp_avg"].stride() for one in (state, other)]
        assert strides[0] == strides[1] != torch.empty(4, 3, 3, 3).stride()

    def test_files_may_be_removed_after_loading(self, runs, saved, later):
        """No loaded tensor is backed by the files: they may be truncated during training."""
        load_checkpoint(saved, later)

        for file in saved.iterdir():
            os.truncate(file, 0)

        assert runs.same(runs.make(), later)

    @pytest.mark.parametrize("path", ["latest", "runs", "link", "slash"])
    def test_path_forms(self, runs, saved, later, path):
        """A checkpoint is found by a link, its folder, as the latest and with a trailing slash."""
        save_checkpoint(runs.make(batch=2), saved.parent / "ep0-ba2")
        (saved.parent / "link").symlink_to("ep1-ba5")
        value = {"latest": "latest", "runs": saved.parent, "link": saved.parent / "link", "slash": f"{saved}/"}[path]

        loaded = load_checkpoint(value, later, folder=saved.parent)

        assert loaded.path == str(saved)

    def test_latest_file_stays_in_its_folder(self, saved, later):
        """A file that names the newest checkpoint cannot name one outside its folder."""
        (saved.parent / "inner").mkdir()
        (saved.parent / "inner" / "latest").write_text("..")

        with pytest.raises(CheckpointError, match=r"latest is a file: torch.load reads it"):
            load_checkpoint(saved.parent / "inner" / "latest", later)

    def test_missing_path_raises(self, later, tmp_path):
        """The errors for a missing path and for a folder without checkpoints differ."""
        with pytest.raises(CheckpointError, match="nowhere does not exist"):
            load_checkpoint(tmp_path / "nowhere", later)
        with pytest.raises(CheckpointError, match=r"manifest\.json is missing, so this is no checkpoint"):
            load_checkpoint(tmp_path, later)
        with pytest.raises(CheckpointError, match=r"manifest\.json is missing, so this is no checkpoint"):
            load_checkpoint("latest", later, folder=tmp_path)

    def test_other_software_warns(self, runs, saved, later):
        """A checkpoint of other software versions gives a warning on reproducibility."""
        runs.edit(saved, lambda data: data["environment"].update(torch="1.0", machine="abacus"))

        with pytest.warns(UserWarning, match="may not be bit-identical: torch was 1.0, and is .*abacus"):
            load_checkpoint(saved, later)

    def test_a_missing_callback_with_a_state_alone(self, runs, tmp_path, later):
        """A callback without settings that has saved something is reported if the run lacks it."""

        class Count(Callback):
            def state_dict(self):
                return {"seen": 3}

        path = save_checkpoint(runs.make(callbacks=Count()), tmp_path / "one")

        with pytest.warns(UserWarning, match=r"callbacks\.Count is saved, and this run has none"):
            load_checkpoint(path, later)


class TestMemory:
    """Tensors that share memory, or have none, in the run or when it was saved."""

    def test_unstepped_optimizer(self, runs, saved):
        """Missing optimizer state is allocated."""
        fresh = runs.make(seed=1, rank_zero_seed=0, batch=0, steps=0)

        load_checkpoint(saved, fresh)

        assert runs.same(runs.make(), fresh)

    @pytest.mark.parametrize("weights_only", [False, True])
    def test_other_dtypes(self, runs, saved, weights_only):
        """Weights in another dtype are converted to separate memory."""
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
        other = runs.make(model=model, steps=0)

        with pytest.warns(UserWarning, match=r"torch.float32 was saved, torch.float64 is set"):
            load_checkpoint(saved, other, weights_only=weights_only, strict_model_weights=not weights_only)

        assert torch.equal(model[0].weight.float(), runs.make().model[0].weight)
        assert model[0].weight.dtype is torch.float64

    def test_file_memory_is_released(self, runs, tmp_path):
        """Weights are loaded once, and no memory of the file remains."""
        calls, later = [], runs.make(seed=1)
        path = Path(save_checkpoint(runs.make(), tmp_path / "one"))
        later.model.register_load_state_dict_post_hook(lambda *_: calls.append(1))

        load_checkpoint(path, later)

        assert calls == [1]
        maps = Path("/proc/self/maps")
        assert not maps.exists() or str(path) not in maps.read_text()


class TestChangedFiles:
    """Files that change before, during or after loading."""

    def test_damage_is_reported_before_mismatches(self, runs, saved):
        """A changed file is reported first, also if the run does not match."""
        other = runs.make(model=nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3)))
        damage(saved / "optimizers.safetensors")

        with pytest.raises(CheckpointError, match=r"optimizers\.safetensors has been changed since it was written"):
            load_checkpoint(saved, other)


def damage(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


class TestMismatches:
    def test_all_mismatches_are_reported(self, runs, saved):
        """Each mismatched weight is reported, and the run does not change."""
        model = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3), nn.Linear(3, 3))
        other = runs.make(model=model, batch=0)
        before = {name: value.clone() for name, value in model.state_dict().items()}

        with pytest.raises(CheckpointMismatchError, match="nothing of it has been loaded") as caught:
            load_checkpoint(saved, other)

        problems = "\n".join(caught.value.problems)
        assert "model.0.weight: must be a tensor of shape (9, 4), got a tensor of shape (8, 4);" in problems
        assert "model.3.weight is not saved." in problems
        assert runs.same_tensors(model.state_dict(), before)
        assert int(other.timestamp.batch) == 0

    def test_another_head(self, runs, saved):
        """With what the errors name as ``load_ignore_keys``, all other weights are loaded."""
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 5))
        other = runs.make(model=model, batch=0, steps=0)
        head = model[2].weight.detach().clone()

        with pytest.raises(CheckpointMismatchError) as caught:
            load_checkpoint(saved, other, weights_only=True)
        keys = re.findall("load_ignore_keys='(.*?)'", str(caught.value))
        load_checkpoint(saved, other, weights_only=True, ignore_keys=keys)

        assert keys == ["model/2.bias", "model/2.weight"]
        assert torch.equal(model[0].weight, load_file(saved / "model.safetensors")["0.weight"])
        assert torch.equal(model[2].weight, head)

    def test_missing_and_unexpected_weights(self, runs, saved):
        """Weights on one side only raise with a suggestion, or warn; modules are compared too."""
        model = nn.Sequential()
        for name, module in zip(("0", "1", "two"), runs.make().model, strict=True):
            model.add_module(name, module)
        other = runs.make(model=model, batch=0, steps=0)

        with pytest.raises(CheckpointMismatchError) as caught:
            load_checkpoint(saved, other)
        with pytest.warns(UserWarning, match=r"model\.two\.weight is not saved"):
            load_checkpoint(saved, other, strict_model_weights=False)

        assert "model.two.weight is not saved; did you mean '2.weight'?" in caught.value.problems
        assert any(
            "model.2.weight is saved" in problem and "two.weight" in problem for problem in caught.value.problems
        )
        assert int(other.timestamp.batch) == 5

    def test_optimizer_rejects_its_state(self, runs, saved):
        """A state with fitting names and shapes that ``load_state_dict`` of the optimizer rejects changes nothing."""
        later, untouched = runs.make(seed=1, batch=0), runs.make(seed=1, batch=0)

        def rename(data):
            held = data["optimizers"]["Adam"]["state"]["2.bias"]
            held["st p"] = held.pop("step")

        runs.edit(saved, rename)

        with pytest.raises(
            CheckpointMismatchError, match=r"ep1-ba5 does .* loaded:\n- optimizers\.Adam cannot load .*'step'"
        ):
            load_checkpoint(saved, later)

        assert runs.same(later, untouched)

    def test_extra_is_checked_first(self, saved, later):
        """Invalid extra data prevent loading."""
        with pytest.raises(CheckpointMismatchError, match="position 7 is beyond the data"):
            load_checkpoint(
                saved, later, check_extra=lambda extra, _: [f"position {extra['data']['position']} is beyond the data."]
            )

        assert int(later.timestamp.batch) == 0

    def test_weights_only_checkpoint_cannot_resume(self, runs, later, tmp_path):
        """The error states how a weights-only checkpoint can be loaded."""
        path = save_checkpoint(runs.make(), tmp_path / "one", weights_only=True)

        with pytest.raises(CheckpointError, match=r"holds only weights.*weights_only"):
            load_checkpoint(path, later)


def pooled():
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def optimizer(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


class TestSurgery:
    @pytest.fixture
    def blurred(self, runs, tmp_path):
        state = runs.make(model=pooled(), optimizer=optimizer, steps=0, algorithms=BlurPool())
        Engine(state).run_event("init")
        return state, save_checkpoint(state, tmp_path / "one")

    @pytest.mark.parametrize("weights_only", [False, True])
    def test_algorithm_is_reconstructed(self, runs, blurred, weights_only):
        """A required algorithm is reconstructed before the weights are loaded."""
        state, path = blurred
        other = runs.make(seed=1, model=pooled(), optimizer=optimizer, steps=0)

        load_checkpoint(path, other, weights_only=weights_only)

        assert [type(one) for one in other.algorithms] == [BlurPool]
        assert runs.same_tensors(other.model.state_dict(), state.model.state_dict())

    def test_algorithm_is_excluded(self, runs, blurred):
        """Without it, the mismatched modules are reported, and nothing changes."""
        other = runs.make(seed=1, model=pooled(), optimizer=optimizer, steps=0)
        before = {name: value.clone() for name, value in other.model.state_dict().items()}

        for weights_only in (False, True):
            with pytest.raises(CheckpointMismatchError) as caught:
                load_checkpoint(blurred[1], other, exclude_algorithms=["BlurPool"], weights_only=weights_only)
            assert "model.1.weight is not saved; did you mean '1.conv.weight'?" in caught.value.problems

        assert runs.same_tensors(other.model.state_dict(), before)

    def test_unknown_algorithm(self, runs, blurred):
        """An algorithm without a known class is reported, and nothing changes."""
        runs.edit(blurred[1], lambda data: data["algorithms"][0].update(name="BlurPoole", key="BlurPoole"))

        with pytest.raises(CheckpointMismatchError, match="No algorithm is named 'BlurPoole'; did you mean 'BlurPool'"):
            load_checkpoint(blurred[1], runs.make(model=pooled(), optimizer=optimizer, steps=0))


class TestHostileSettings:
    """A checkpoint may name algorithms with any settings, and have any weights."""

    @pytest.fixture
    def changed(self, runs, tmp_path):
        def save(algorithm, **settings):
            state = runs.make(model=pooled(), optimizer=optimizer, steps=0, algorithms=algorithm)
            Engine(state).run_event("init")
            path = save_checkpoint(state, tmp_path / "one")
            runs.edit(path, lambda data: data["algorithms"][0]["settings"].update(settings))
            return path

        return save

    @pytest.mark.parametrize("weights_only", [False, True])
    def test_weights_that_do_not_fit_after_surgery(self, runs, changed, weights_only):
        """All mismatches with the changed model are in one error, which states that the model has changed."""
        path = changed(SqueezeExcite(min_channels=1), latent_channels=7)
        other = runs.make(seed=1, model=pooled(), optimizer=optimizer, steps=0)
        before = {name: value.clone() for name, value in other.model.named_parameters()}

        with pytest.raises(CheckpointMismatchError, match=r"must be a tensor of shape \(16, 7\)") as caught:
            load_checkpoint(path, other, weights_only=weights_only)

        assert "The weights need SqueezeExcite, and the model has its layers now: create it again." in str(caught.value)
        assert "and nothing of it has been loaded" in str(caught.value)
        assert len(caught.value.problems) > 4
        assert any("excite" in type(module).__name__.lower() for module in other.model.modules())
        after = {id(value): value for value in other.model.parameters()}
        assert sum(any(torch.equal(one, value) for one in after.values()) for value in before.values()) == len(before)

    @pytest.mark.parametrize("weights_only", [False, True])
    def test_layers_that_no_memory_can_hold(self, runs, changed, weights_only):
        """A layer of 30 TB cannot be created."""
        path = changed(SqueezeExcite(min_channels=1), latent_channels=10**12)

        with pytest.raises(CheckpointMismatchError, match=r"algorithms, which the weights need: .*memory"):
            load_checkpoint(path, runs.make(model=pooled(), optimizer=optimizer, steps=0), weights_only=weights_only)

    def test_surgery_follows_all_other_checks(self, runs, changed):
        """The model does not change if something else does not fit."""
        path = changed(BlurPool())
        runs.edit(path, lambda data: data.update(scaler=[]))
        other = runs.make(model=pooled(), optimizer=optimizer, steps=0)

        with pytest.raises(CheckpointMismatchError, match="scaler: must be a dictionary"):
            load_checkpoint(path, other)

        assert type(other.model[1]) is nn.Conv2d
        assert not other.algorithms


class Switching(torch.optim.SGD):
    """Has separate evaluation weights, as schedule-free optimizers do."""

    def eval(self):
        self.param_groups[0]["train_mode"] = False

    def train(self):
        self.param_groups[0]["train_mode"] = True


class Tied(nn.Module):
    """Two layers with one weight, which has two names."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.two.weight = self.one.weight
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.two(self.norm(self.one(x)))


class TestTiedWeights:
    @pytest.mark.parametrize("weights_only", [False, True])
    def test_are_loaded(self, runs, tmp_path, weights_only):
        """One weight with two names, of which both are saved."""
        saved = runs.make(model=Tied(), steps=0)
        path = save_checkpoint(saved, tmp_path / "one")
        later = runs.make(seed=1, model=Tied(), steps=0)

        load_checkpoint(path, later, weights_only=weights_only)

        assert runs.same_tensors(later.model.state_dict(), saved.model.state_dict())


class TestAverages:
    """Loading weights gives those that the run was evaluated with."""

    @pytest.fixture
    def averaged(self, runs, tmp_path):
        def save(algorithm, **options):
            state = runs.make(algorithms=algorithm, **options)
            engine = Engine(state)
            for _ in range(2):
                with torch.no_grad():
                    for weight in state.model.parameters():
                        weight.add_(torch.rand_like(weight))
                algorithm.apply(Event.BATCH_END, state, engine.logger)
            path = save_checkpoint(state, tmp_path / "one")
            trained = {name: value.clone() for name, value in state.model.state_dict().items()}
            with evaluation_weights(state):
                return path, {name: value.clone() for name, value in state.model.state_dict().items()}, trained

        return save

    @pytest.mark.parametrize("own", [list, lambda: [EMA("1ba")], lambda: [SWA("0ba", "9ba")]])
    @pytest.mark.parametrize("make", [lambda: EMA("2ba"), lambda: SWA("0ba", "9ba", "1ba")])
    def test_are_the_weights(self, runs, averaged, make, own, caplog):
        """Averages are loaded as the weights, whatever averages the run has, and a message says so."""
        algorithm = make()
        path, expected, trained = averaged(algorithm)
        later = runs.make(seed=1, algorithms=own())

        loaded = load_checkpoint(path, later, weights_only=True)

        assert runs.same_tensors(later.model.state_dict(), expected)
        assert not runs.same_tensors(later.model.state_dict(), trained)
        assert loaded.averages_of == type(algorithm).__name__
        assert f"\nweights: the averages of {loaded.averages_of}" in str(loaded)
        assert f"are the averages of {loaded.averages_of}" in caplog.text

    @pytest.mark.parametrize("own", [list, lambda: [EMA("1ba")]])
    def test_training_weights_on_request(self, runs, averaged, own, caplog):
        """Without the averages, the training weights are loaded."""
        path, _, trained = averaged(EMA("2ba"))
        later = runs.make(seed=1, algorithms=own())

        assert not load_checkpoint(path, later, weights_only=True, ignore_keys="algorithms/EMA").averages_of

        assert runs.same_tensors(later.model.state_dict(), trained)
        assert not caplog.text

    def test_of_a_run_without_them(self, runs, averaged):
        """A run that continues without the algorithm keeps the training weights, and the warning says so."""
        path, _, trained = averaged(EMA("2ba"))
        later = runs.make(seed=1)

        with pytest.warns(UserWarning, match="EMA had averages to evaluate with, and this run"):
            load_checkpoint(path, later)

        assert runs.same_tensors(later.model.state_dict(), trained)


class TestIgnoreKeys:
    def test_ignored_weights(self, runs, saved, later):
        """Ignored weights do not change, also if the saved ones have another shape."""
        head = nn.Linear(8, 5)
        other = runs.make(seed=1, model=nn.Sequential(nn.Linear(4, 8), nn.ReLU(), head), steps=0)
        before = head.weight.detach().clone()

        loaded = load_checkpoint(saved, other, ignore_keys=["model/2.*", "optimizers"])

        assert torch.equal(head.weight, before)
        assert torch.equal(other.model[0].weight, runs.make().model[0].weight)
        assert set(loaded.ignored) == {"model/2.weight", "model/2.bias", "optimizers"}
        assert "ignored: model/2" in str(loaded)

    def test_ignored_clock_and_seed(self, saved, later):
        """Ignored clock and seed do not change."""
        load_checkpoint(saved, later, ignore_keys="timestamp")

        assert int(later.timestamp.batch) == 0
        assert later.rank_zero_seed == 17

    def test_ignored_algorithm(self, runs, tmp_path):
        """An ignored algorithm keeps its state, without a warning."""
        path = save_checkpoint(runs.make(algorithms=EMA(half_life="1ba")), tmp_path / "one")
        other = runs.make(seed=1, algorithms=EMA(half_life="1ba"))

        loaded = load_checkpoint(path, other, ignore_keys="algorithms/EMA")

        assert loaded.report.differences == ()
        assert loaded.ignored == ("algorithms/EMA",)

    @pytest.mark.parametrize(
        "ignore", [lambda one: one["extra"].pop("data"), lambda one: one["state"]["extra"].clear()]
    )
    def test_function(self, saved, later, ignore):
        """A function removes entries, also where it finds them in MosaicML Composer."""
        loaded = load_checkpoint(saved, later, ignore_keys=ignore)

        assert loaded.extra == {}
        assert loaded.ignored == ("extra/data",)

    def test_unmatched_pattern_warns(self, saved, later):
        """A pattern without matches gives a warning with the available keys."""
        with pytest.warns(UserWarning, match=r"holds nothing that ignore_keys='modle/\*' would leave out.*model"):
            load_checkpoint(saved, later, ignore_keys="modle/*")

    def test_invalid_ignore_keys_raise(self, saved, later):
        """Other values raise."""
        with pytest.raises(TypeError, match="ignore_keys must be strings"):
            load_checkpoint(saved, later, ignore_keys=[3])


class TestLeftOutWhenSaved:
    """Checkpoints without parts that ignore_keys had left out when they were saved."""

    PARTS = [
        "algorithms",
        "callbacks",
        "eval_metric_values",
        "extra",
        "max_duration",
        "model",
        "optimizers",
        "rank_zero_seed",
        "run_name",
        "scaler",
        "schedulers",
        "timestamp",
        "train_metric_values",
    ]

    @pytest.mark.parametrize("part", PARTS)
    def test_part(self, runs, tmp_path, later, part):
        """The run keeps its own values of the part, with a warning, and loads all others."""
        path = save_checkpoint(runs.make(), tmp_path / "one", extra={"data": 1}, ignore_keys=part)
        own = later.model[0].weight.detach().clone()

        with pytest.warns(UserWarning, match=f"was saved without {part}, so that this run keeps its own values"):
            loaded = load_checkpoint(path, later)

        assert loaded.ignored == (part,)
        assert part not in loaded.report.restored
        assert torch.equal(later.model[0].weight, own) is (part == "model")
        assert int(later.timestamp.batch) == (0 if part == "timestamp" else 5)


class TestWeightsOnly:
    def test_only_weights_are_loaded(self, runs, saved, later):
        """Only the model's weights change."""
        load_checkpoint(saved, later, weights_only=True)

        assert runs.same_tensors(later.model.state_dict(), runs.make().model.state_dict())
        assert (int(later.timestamp.batch), later.rank_zero_seed) == (0, 0)

    def test_optimizer_is_not_read(self, saved, later):
        """The optimizer's file is not read, so it may be damaged."""
        path = saved / "optimizers.safetensors"
        path.write_bytes(bytes(path.stat().st_size))

        assert load_checkpoint(saved, later, weights_only=True).report.restored == ("model",)

    def test_mismatch_raises(self, runs, saved):
        """Mismatched weights raise an error with the checkpoint's path."""
        with pytest.raises(CheckpointMismatchError, match="ep1-ba5 does not fit this run") as caught:
            load_checkpoint(saved, runs.make(model=nn.Linear(4, 4)), weights_only=True)

        assert not isinstance(caught.value, StateMismatchError)

    @pytest.mark.parametrize("prefix", ["", "module."])
    def test_safetensors_file(self, runs, later, prefix, tmp_path):
        """A plain weights file is loaded, with or without a wrapper's prefix."""
        from safetensors.torch import save_file

        weights = runs.make().model.state_dict()
        save_file({prefix + name: value for name, value in weights.items()}, tmp_path / "weights.safetensors")

        load_checkpoint(ForeignFile(tmp_path / "weights.safetensors"), later, weights_only=True)

        assert runs.same_tensors(later.model.state_dict(), weights)
        with pytest.raises(CheckpointError, match="is a file of weights, not a checkpoint; set weights_only"):
            load_checkpoint(ForeignFile(tmp_path / "weights.safetensors"), later)

    def test_missing_file_raises(self, later):
        """A missing file raises an error."""
        with pytest.raises(CheckpointError, match=r"nowhere\.pt does not exist"):
            load_checkpoint(ForeignFile("nowhere.pt"), later, weights_only=True)


class TestContents:
    def test_errors_have_the_given_path(self, runs, saved, later):
        """Errors have the checkpoint's path."""
        (saved / "state.json").write_text("{")
        runs.sign(saved)

        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(saved, later)

        assert caught.value.path == str(Path(saved) / "state.json")
        assert json.loads((saved / "manifest.json").read_text())["files"]
