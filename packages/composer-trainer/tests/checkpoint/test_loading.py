"""Loading: everything is checked before anything is changed."""

import json
import os
import subprocess
import sys
import tracemalloc
import warnings
from pathlib import Path

import attrs
import pytest
import torch
from torch import nn

from composer.algorithms import EMA, SWA, BlurPool, SqueezeExcite
from composer.callbacks import LRMonitor, SpeedMonitor
from composer.checkpoint import (
    CheckpointError,
    CheckpointMismatchError,
    load_checkpoint,
    save_checkpoint,
)
from composer.checkpoint.finding import open_checkpoint
from composer.checkpoint.loading import SavedRun
from composer.core import Algorithm, Callback, Engine, Event, StateMismatchError, evaluation_weights
from composer.core import saved as saved_field


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

    def test_default_device_does_not_matter(self, runs, tmp_path):
        """Files are written from and read to host memory, for any default device."""

        def momentum(parameters, lr):
            optimizer = torch.optim.SGD(parameters, lr, momentum=0.9)
            for parameter in optimizer.param_groups[0]["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.rand_like(parameter)
            return optimizer

        def make(seed):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
            return runs.make(seed=seed, model=model, optimizer=momentum, steps=0)

        state, other = make(0), make(1)
        with torch.device("meta"):
            load_checkpoint(save_checkpoint(state, tmp_path / "one"), other)

        assert runs.same(state, other)

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

    def test_folder_with_a_file_extension(self, runs, later, tmp_path):
        """A checkpoint may have any name, also one that ends like a file's, as in Composer."""
        path = save_checkpoint(runs.make(), tmp_path / "ep1-ba5-rank0.pt")

        load_checkpoint(path, later)

        assert runs.same(runs.make(), later)

    def test_latest_file_stays_in_its_folder(self, saved, later):
        """A file that names the newest checkpoint cannot name one outside its folder."""
        (saved.parent / "inner").mkdir()
        (saved.parent / "inner" / "latest").write_text("..")

        with pytest.raises(CheckpointError, match=r"latest/manifest\.json is missing, so this is no checkpoint"):
            load_checkpoint(saved.parent / "inner" / "latest", later)

    def test_link_loop_raises(self, later, tmp_path):
        """A loop of links raises."""
        (tmp_path / "one").symlink_to("two")
        (tmp_path / "two").symlink_to("one")

        with pytest.raises(CheckpointError, match="one is a symbolic link that leads to itself"):
            load_checkpoint(tmp_path / "one", later)

    def test_missing_path_raises(self, later, tmp_path):
        """The errors for a missing path and for a folder without checkpoints differ."""
        with pytest.raises(CheckpointError, match="nowhere does not exist"):
            load_checkpoint(tmp_path / "nowhere", later)
        with pytest.raises(CheckpointError, match=r"manifest\.json is missing, so this is no checkpoint"):
            load_checkpoint(tmp_path, later)
        with pytest.raises(CheckpointError, match="contains no complete checkpoint"):
            load_checkpoint("latest", later, folder=tmp_path)

    def test_other_software_warns(self, runs, saved, later):
        """A checkpoint of other software versions gives a warning on reproducibility."""
        runs.edit(saved, lambda data: data["environment"].update(torch="1.0", machine="abacus"))

        with pytest.warns(UserWarning, match="may not be bit-identical: torch was 1.0, and is .*abacus"):
            load_checkpoint(saved, later)

    def test_callbacks_without_state(self, runs, tmp_path, later):
        """A missing or additional callback gives a warning only if it has settings or state."""
        path = save_checkpoint(runs.make(callbacks=[LRMonitor(), SpeedMonitor()]), tmp_path / "one")

        with pytest.warns(UserWarning, match=r"callbacks\.SpeedMonitor is saved") as warned:
            load_checkpoint(path, later)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load_checkpoint(save_checkpoint(runs.make(), tmp_path / "two"), runs.make(callbacks=LRMonitor()))

        assert "LRMonitor" not in str(warned[0].message)

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

    def test_aliased_tensors_are_separated(self, runs, saved, later):
        """An average that aliases the weight receives its own memory, and both have their saved values."""
        weight = later.model[0].weight
        later.optimizers[0].state[weight]["exp_avg"] = weight.detach()

        load_checkpoint(saved, later)

        assert runs.same(runs.make(), later)

    def test_shared_tensor(self, runs, tmp_path, later):
        """A tensor that two parameters share when saved is loaded into both."""
        state = runs.make()
        first = state.optimizers[0].state[state.model[0].weight]
        first["exp_avg"] = first["exp_avg_sq"]

        load_checkpoint(save_checkpoint(state, tmp_path / "one"), later)

        loaded = later.optimizers[0].state[later.model[0].weight]
        assert torch.equal(loaded["exp_avg"], first["exp_avg_sq"])
        assert torch.equal(loaded["exp_avg_sq"], first["exp_avg_sq"])

    @pytest.mark.parametrize("weights_only", [False, True])
    def test_other_dtypes(self, runs, saved, weights_only):
        """Weights in another dtype are converted to separate memory."""
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
        other = runs.make(model=model, steps=0)

        with pytest.warns(UserWarning, match=r"torch.float32 was saved, torch.float64 is set"):
            load_checkpoint(saved, other, weights_only=weights_only, strict_model_weights=not weights_only)

        assert torch.equal(model[0].weight.float(), runs.make().model[0].weight)
        assert model[0].weight.dtype is torch.float64

    def test_function_receives_the_values(self, runs, saved, later):
        """A function that removes entries receives the saved values, and may store them."""
        recorded, first = [], runs.make()

        def look(entries):
            recorded.append(
                {**entries, "average": entries["optimizers"]["Adam"]["state"]["0.weight"]["exp_avg"].clone()}
            )

        load_checkpoint(saved, later, ignore_keys=look)
        os.truncate(saved / "model.safetensors", 0)

        assert torch.equal(recorded[0]["model"]["0.weight"], first.model[0].weight)
        assert torch.equal(recorded[0]["average"], first.optimizers[0].state[first.model[0].weight]["exp_avg"])
        assert runs.same(first, later)

    def test_extra_shared_with_the_optimizer(self, runs, tmp_path):
        """A tensor saved in the optimizer and in the extra data has its values when checked."""
        state, recorded = runs.make(), []
        average = state.optimizers[0].state[state.model[0].weight]["exp_avg"]
        path = save_checkpoint(state, tmp_path / "one", extra={"mine": average})

        load_checkpoint(
            path, runs.make(seed=1), check_extra=lambda extra, _: recorded.append(extra["mine"].clone()) or []
        )

        assert torch.equal(recorded[0], average)

    @pytest.mark.parametrize("weights_only", [False, True])
    @pytest.mark.parametrize("odd", ["first", "all", "hook", "whole"])
    def test_modules_that_store_loaded_tensors(self, runs, tmp_path, weights_only, odd):
        """Tensors that a module stores have their own memory, so that the file may be removed."""
        path = Path(save_checkpoint(runs.make(model=Keeping(odd)), tmp_path / "one"))
        later = runs.make(model=Keeping(odd), seed=1)

        load_checkpoint(path, later, weights_only=weights_only)
        os.truncate(path / "model.safetensors", 0)

        assert torch.equal(later.model.kept[0], later.model.linear.weight)

    @pytest.mark.parametrize("weights_only", [False, True])
    def test_modules_of_a_reconstructed_algorithm(self, runs, tmp_path, weights_only):
        """The same applies to modules that an algorithm inserts while loading."""
        state = runs.make(model=nn.Sequential(nn.Linear(4, 3)), algorithms=PutKeeping())
        Engine(state).run_event("init")
        path = Path(save_checkpoint(state, tmp_path / "one"))
        later = runs.make(model=nn.Sequential(nn.Linear(4, 3)), seed=1)

        load_checkpoint(path, later, weights_only=weights_only)
        os.truncate(path / "model.safetensors", 0)

        assert torch.equal(later.model[0].kept[-1], state.model[0].linear.weight)

    @pytest.mark.parametrize("weights_only", [False, True])
    def test_ignored_tensors_are_unchanged(self, runs, tmp_path, weights_only):
        """Ignored tensors do not change, also if a module stores loaded ones."""
        path = save_checkpoint(runs.make(model=nn.Sequential(Keeping("all"), nn.Linear(3, 2))), tmp_path / "one")
        later = runs.make(model=nn.Sequential(Keeping("all"), nn.Linear(3, 5)), seed=1, steps=0)
        head, ignored = later.model[1].weight.clone(), ["model/1.*", "optimizers/*"]

        load_checkpoint(path, later, weights_only=weights_only, ignore_keys=ignored)

        assert torch.equal(later.model[1].weight, head)
        assert torch.equal(later.model[0].kept[0], later.model[0].linear.weight)

    def test_file_memory_is_released(self, runs, tmp_path):
        """Weights are loaded once, and no memory of the file remains."""
        calls, later = [], runs.make(seed=1)
        path = Path(save_checkpoint(runs.make(), tmp_path / "one"))
        later.model.register_load_state_dict_post_hook(lambda *_: calls.append(1))

        load_checkpoint(path, later)

        assert calls == [1]
        maps = Path("/proc/self/maps")
        assert not maps.exists() or str(path) not in maps.read_text()

    def test_under_inference_mode(self, runs, tmp_path):
        """Tensors with other strides can be loaded in inference mode."""

        def make(seed):
            model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
            sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            sgd.state[model.weight]["momentum_buffer"] = model.weight.detach().clone()
            return runs.make(model=model, optimizer=lambda *_, **__: sgd, steps=0, seed=seed)

        state, later = make(0), make(1)

        with torch.inference_mode():
            load_checkpoint(save_checkpoint(state, tmp_path / "one"), later)

        loaded = later.optimizers[0].state[later.model.weight]["momentum_buffer"]
        assert torch.equal(loaded, state.model.weight)
        assert loaded.stride() == state.model.weight.stride() != torch.empty(4, 3, 3, 3).stride()


CUT_OFF = """
import os, sys
from composer.checkpoint import CheckpointError, load_checkpoint, merge_weights, save_checkpoint
from composer.checkpoint.local import LocalFolder
from composer.core import State
import torch

folder, name, function = sys.argv[1:]
state = State(torch.nn.Linear(2000, 1000), optimizers=torch.optim.SGD([torch.zeros(1)]))
path = save_checkpoint(state, folder + "/one", extra={"more": torch.zeros(1 << 20)})
reader = LocalFolder.reader

def cut_off(folder, checkpoint, file):
    if file == name:
        os.truncate(f"{path}/{name}", 8)
    return reader(folder, checkpoint, file)

LocalFolder.reader = cut_off
before = state.model.weight.clone()
try:
    if function == "load":
        load_checkpoint(path, state)
    elif function == "weights":
        load_checkpoint(path, state, weights_only=True)
    else:
        merge_weights(path, folder + "/all.safetensors")
except CheckpointError as error:
    print("unchanged" if torch.equal(state.model.weight, before) else "changed", error)
"""


class TestChangedFiles:
    """Files that change before, during or after loading."""

    def test_damage_is_reported_before_mismatches(self, runs, saved):
        """A changed file is reported first, also if the run does not match."""
        other = runs.make(model=nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3)))
        damage(saved / "optimizers.safetensors")

        with pytest.raises(CheckpointError, match=r"optimizers\.safetensors has been changed since it was written"):
            load_checkpoint(saved, other)

    def test_interrupt_propagates(self, saved, later):
        """A KeyboardInterrupt propagates."""

        def stop(*_):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            load_checkpoint(saved, later, check_extra=stop)

    @pytest.mark.parametrize("weights_only", [False, True])
    @pytest.mark.parametrize("change", ["written", "cut off"])
    def test_changed_after_reading(self, runs, saved, later, change, weights_only):
        """Files that change while the weights are loaded do not matter: they were read before."""

        def interfere(*_):
            for file in saved.iterdir():
                with file.open("r+b") as opened:
                    opened.truncate(8) if change == "cut off" else opened.write(b"x")

        later.model.register_load_state_dict_pre_hook(interfere)
        load_checkpoint(saved, later, weights_only=weights_only)

        assert runs.same_tensors(later.model.state_dict(), runs.make().model.state_dict())

    @pytest.mark.parametrize(
        ("name", "function"),
        [
            ("model.safetensors", "load"),
            ("extra.safetensors", "load"),
            ("state.json", "load"),
            ("model.safetensors", "weights"),
            ("model.safetensors", "merge"),
        ],
    )
    def test_truncated_while_reading(self, tmp_path, name, function):
        """A file truncated after its size was checked raises, and does not end the process."""
        command = [sys.executable, "-c", CUT_OFF, str(tmp_path), name, function]

        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"unchanged {tmp_path / 'one' / name} ")


def damage(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


class Keeping(nn.Module):
    """A module that stores loaded tensors, as some libraries' do: the first, all, or those of a hook."""

    def __init__(self, odd):
        super().__init__()
        self.linear, self.odd, self.kept = nn.Linear(4, 3), odd, []
        if odd == "hook":
            self.register_load_state_dict_pre_hook(lambda _, entries, prefix, *__: self.keep(entries, prefix))

    def forward(self, x):
        return self.linear(x)

    def keep(self, entries, prefix=""):
        self.kept.append(entries[f"{prefix}linear.weight"].detach())

    def load_state_dict(self, state_dict, *others, **options):
        if self.odd == "whole":
            self.keep(state_dict)
        return super().load_state_dict(state_dict, *others, **options)

    def _load_from_state_dict(self, state_dict, prefix, *others):
        super()._load_from_state_dict(state_dict, prefix, *others)
        if self.odd == "all" or (self.odd == "first" and not self.kept):
            self.keep(state_dict, prefix)


class PutKeeping(Algorithm):
    """Inserts such a module into the model; parameters do not change."""

    runs_at = BlurPool.runs_at
    reads = writes = frozenset({"model"})

    @staticmethod
    def required_on_load():
        """Return True: names of weights change."""
        return True

    def apply(self, event, state, logger):
        """Insert the module."""
        keeping = Keeping("all")
        keeping.linear, state.model[0] = state.model[0], keeping


class TestMismatches:
    def test_all_mismatches_are_reported(self, runs, saved):
        """Each mismatched weight is reported, and the run does not change."""
        model = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3), nn.Linear(3, 3))
        other = runs.make(model=model, batch=0)
        before = {name: value.clone() for name, value in model.state_dict().items()}

        with pytest.raises(CheckpointMismatchError, match="nothing of it has been loaded") as caught:
            load_checkpoint(saved, other)

        problems = "\n".join(caught.value.problems)
        assert "model.0.weight: must be a tensor of shape (9, 4), got a tensor of shape (8, 4)." in problems
        assert "model.3.weight is not saved." in problems
        assert "module '3' was not there, and is Linear." in problems
        assert runs.same_tensors(model.state_dict(), before)
        assert int(other.timestamp.batch) == 0

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
        assert "module 'two' was not there, and is Linear." in caught.value.problems
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

        assert [type(one) for one in other.made_on_load] == [BlurPool]
        assert runs.same_tensors(other.model.state_dict(), state.model.state_dict())

    def test_algorithm_is_excluded(self, runs, blurred):
        """Without it, the mismatched modules are reported, and nothing changes."""
        other = runs.make(seed=1, model=pooled(), optimizer=optimizer, steps=0)
        before = {name: value.clone() for name, value in other.model.state_dict().items()}

        for weights_only in (False, True):
            with pytest.raises(CheckpointMismatchError) as caught:
                load_checkpoint(blurred[1], other, exclude_algorithms=["BlurPool"], weights_only=weights_only)
            assert "module '1' was BlurConv2d, and is Conv2d." in caught.value.problems

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

    @pytest.mark.parametrize("weights_only", [False, True])
    def test_surgery_that_fails(self, runs, changed, weights_only):
        """An algorithm that cannot change the model is a mismatch, and nothing changes."""
        path = changed(BlurPool())
        record = {"name": "StochasticDepth", "key": "StochasticDepth", "settings": {"target_layer_name": "Nothing"}}
        runs.edit(path, lambda data: data["algorithms"][0].update(record))
        other = runs.make(seed=1, model=pooled(), optimizer=optimizer, steps=0)
        before = {name: value.clone() for name, value in other.model.state_dict().items()}

        with pytest.raises(CheckpointMismatchError, match="algorithms, which the weights need: target_layer_name must"):
            load_checkpoint(path, other, weights_only=weights_only)

        assert runs.same_tensors(other.model.state_dict(), before)

    @pytest.mark.parametrize("weights_only", [False, True])
    def test_weights_are_read_when_their_names_and_shapes_fit(self, runs, saved, weights_only):
        """Weights of other names are reported without reading them: here, they are damaged as well."""
        damage(saved / "model.safetensors")
        other = runs.make(model=nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)))

        with pytest.raises(CheckpointMismatchError, match=r"model\.2\.weight: must be a tensor of shape \(4, 8\)"):
            load_checkpoint(saved, other, weights_only=weights_only)
        with pytest.raises(CheckpointError, match="has been changed since it was written"):
            load_checkpoint(saved, runs.make(), weights_only=weights_only)

    def test_thousands_of_mismatches(self, runs, saved):
        """The error states the first mismatches and the number of the others; its attribute has all of them."""
        other = runs.make(model=nn.ParameterList(torch.zeros(1) for _ in range(5000)), steps=0)

        with pytest.raises(CheckpointMismatchError) as caught:
            load_checkpoint(saved, other)

        assert len(caught.value.problems) > 5000
        assert len(str(caught.value).splitlines()) == 202
        assert str(caught.value).endswith(f"- ... and {len(caught.value.problems) - 200:,} more.")

    def test_tensors_are_read_when_their_names_fit(self, runs, saved):
        """Tensors without a place in the state are reported without reading any: here, they are damaged as well."""
        damage(saved / "optimizers.safetensors")
        runs.edit(saved, lambda data: data["optimizers"]["Adam"]["state"].pop("0.weight"))

        with pytest.raises(CheckpointError, match="These tensors have no place in the data"):
            load_checkpoint(saved, runs.make())


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

    @pytest.mark.parametrize("weights_only", [False, True])
    def test_other_values_raise(self, runs, tmp_path, weights_only):
        """Saved weights of a model that has them apart do not overwrite each other."""
        apart = Tied()
        apart.two = nn.Linear(4, 4, bias=False)
        path = save_checkpoint(runs.make(model=apart, steps=0), tmp_path / "one")
        later = runs.make(seed=1, model=Tied(), steps=0)
        before = later.model.one.weight.clone()

        with pytest.raises(CheckpointMismatchError, match=r"two\.weight is tied to model\.one\.weight"):
            load_checkpoint(path, later, weights_only=weights_only)

        assert torch.equal(later.model.one.weight, before)


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

    def test_of_tied_weights_in_bfloat16(self, runs, averaged):
        """A tied weight has one average for all its names, and averages in float32 are rounded."""
        path, expected, _ = averaged(EMA("2ba"), model=Tied().to(torch.bfloat16), steps=0)
        later = runs.make(seed=1, model=Tied().to(torch.bfloat16), steps=0)

        load_checkpoint(path, later, weights_only=True)

        assert runs.same_tensors(later.model.state_dict(), expected)

    def test_of_ignored_weights(self, runs, averaged):
        """Weights that ignore_keys leaves out keep the values of the run."""
        path, expected, _ = averaged(EMA("2ba"))
        later = runs.make(seed=1)
        before = later.model[2].weight.clone()

        load_checkpoint(path, later, weights_only=True, ignore_keys="model/2.*")

        assert torch.equal(later.model[2].weight, before)
        assert torch.equal(later.model[0].weight, expected["0.weight"])

    def test_of_a_run_without_them(self, runs, averaged):
        """A run that continues without the algorithm keeps the training weights, and the warning says so."""
        path, _, trained = averaged(EMA("2ba"))
        later = runs.make(seed=1)

        with pytest.warns(UserWarning, match="EMA had averages to evaluate with, and this run"):
            load_checkpoint(path, later)

        assert runs.same_tensors(later.model.state_dict(), trained)

    def test_of_a_schedule_free_optimizer(self, runs, tmp_path):
        """Only the optimizer can compute its weights for evaluation: a warning names what to save."""
        state = runs.make(optimizer=Switching)
        state.optimizers[0].train()
        complete, weights = (save_checkpoint(state, tmp_path / str(only), weights_only=only) for only in (False, True))
        later = runs.make(seed=1)

        load_checkpoint(weights, later, weights_only=True)
        with pytest.warns(UserWarning, match="training weights of a schedule-free optimizer.*save_weights_only=True"):
            load_checkpoint(complete, later, weights_only=True)

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            (lambda _: 7, "averaged_weights: must be"),
            (lambda _: [], "averaged_weights: must be"),
            (lambda averages: averages | {"0.weight": 7}, "averaged_weights.*: must be Tensor, got 7"),
            (lambda averages: averages | {"0.weight": averages["0.bias"]}, r"model\.0\.weight: must be a tensor"),
        ],
    )
    def test_damaged_ones(self, runs, averaged, change, problem):
        """Averages that are no dictionary of tensors of the right shapes are an error, and nothing changes."""
        path, _, _ = averaged(EMA("2ba"))

        def edit(data):
            state = data["algorithms"][0]["state"]
            state["averaged_weights"] = change(state["averaged_weights"])

        runs.edit(path, edit)
        later = runs.make(seed=1)
        before = {name: value.clone() for name, value in later.model.state_dict().items()}

        with pytest.raises(CheckpointError, match=problem):
            load_checkpoint(path, later, weights_only=True)

        assert runs.same_tensors(later.model.state_dict(), before)


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

    def test_one_of_several_callbacks_stays(self, runs, tmp_path):
        """Only the ignored callback keeps its own state; the others are loaded."""

        @attrs.define(eq=False)
        class First(Callback):
            seen: int = saved_field(default=0)

        @attrs.define(eq=False)
        class Second(First):
            pass

        one, other = [First(), Second()], [First(), Second()]
        one[0].seen = one[1].seen = 3
        path = save_checkpoint(runs.make(callbacks=one), tmp_path / "one")

        load_checkpoint(path, runs.make(callbacks=other), ignore_keys="callbacks/First")

        assert [callback.seen for callback in other] == [0, 3]

    def test_function(self, saved, later):
        """A function removes entries."""
        loaded = load_checkpoint(saved, later, ignore_keys=lambda state: state["extra"].pop("data"))

        assert loaded.extra == {}
        assert loaded.ignored == ("extra/data",)

    def test_unmatched_pattern_warns(self, saved, later):
        """A pattern without matches gives a warning with the available keys."""
        with pytest.warns(UserWarning, match=r"holds nothing that ignore_keys='modle/\*' would leave out.*model"):
            load_checkpoint(saved, later, ignore_keys="modle/*")

    @pytest.mark.parametrize("keys", ["optimizers/*", "extra", "timestamp"])
    def test_patterns_of_what_is_not_loaded(self, saved, later, keys):
        """If only weights are loaded, a pattern of something else that the checkpoint contains gives no warning."""
        loaded = load_checkpoint(saved, later, weights_only=True, ignore_keys=keys)

        assert loaded.ignored == ()

    @pytest.mark.parametrize("weights_only", [True, False])
    def test_warnings_point_to_the_caller(self, saved, later, weights_only):
        """Warnings point to the caller's line."""
        with pytest.warns(UserWarning, match="holds nothing that ignore_keys") as warned:
            load_checkpoint(saved, later, ignore_keys="modle/*", weights_only=weights_only)

        assert [one.filename for one in warned] == [__file__]

    @pytest.mark.parametrize("weights_only", [True, False])
    def test_dtype_warnings_point_to_the_caller(self, runs, saved, weights_only):
        """The warning of weights in another dtype does too."""
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()

        with pytest.warns(UserWarning, match=r"float32 was saved, torch.float64 is set") as warned:
            load_checkpoint(
                saved, runs.make(model=model, steps=0), weights_only=weights_only, strict_model_weights=not weights_only
            )

        assert [one.filename for one in warned] == [__file__]

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

    def test_parts_that_are_ignored_again(self, runs, tmp_path, later, recwarn):
        """Parts that ignore_keys names again are left out without a warning."""
        keys = ["timestamp", "callbacks"]
        path = save_checkpoint(runs.make(), tmp_path / "one", ignore_keys=keys)

        load_checkpoint(path, later, ignore_keys=keys)

        assert [str(one.message) for one in recwarn] == []

    def test_everything(self, runs, tmp_path, later):
        """A checkpoint without any part loads nothing, and states that."""
        path = save_checkpoint(runs.make(), tmp_path / "one", ignore_keys="*")
        before = {name: value.clone() for name, value in later.model.state_dict().items()}

        with pytest.warns(UserWarning, match="was saved without"):
            assert load_checkpoint(path, later).report.restored == ()

        assert runs.same_tensors(later.model.state_dict(), before)


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

    def test_ignoring_all_weights_raises(self, saved, later):
        """Ignoring all weights raises."""
        with pytest.raises(CheckpointError, match="ignore_keys leaves all of them out"):
            load_checkpoint(saved, later, weights_only=True, ignore_keys="model")

    @pytest.mark.parametrize("prefix", ["", "module."])
    def test_safetensors_file(self, runs, later, prefix, tmp_path):
        """A plain weights file is loaded, with or without a wrapper's prefix."""
        from safetensors.torch import save_file

        weights = runs.make().model.state_dict()
        save_file({prefix + name: value for name, value in weights.items()}, tmp_path / "weights.safetensors")

        load_checkpoint(tmp_path / "weights.safetensors", later, weights_only=True)

        assert runs.same_tensors(later.model.state_dict(), weights)
        with pytest.raises(CheckpointError, match="is a file of weights, not a checkpoint; set weights_only"):
            load_checkpoint(tmp_path / "weights.safetensors", later)

    def test_unsupported_dtype_raises(self, later, tmp_path):
        """A file with a dtype that torch does not support raises with its name."""
        header = b'{"0.weight": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}'
        (tmp_path / "six.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))

        with pytest.raises(CheckpointError, match=r"six\.safetensors (holds a tensor that cannot|is not a complete)"):
            load_checkpoint(tmp_path / "six.safetensors", later, weights_only=True)

    def test_missing_file_raises(self, later):
        """A missing file raises an error."""
        with pytest.raises(CheckpointError, match=r"nowhere\.pt does not exist"):
            load_checkpoint("nowhere.pt", later, weights_only=True)


class TestContents:
    @pytest.mark.parametrize(
        "change",
        [
            lambda data: data.clear(),
            lambda data: data.update(version=99),
            lambda data: data.pop("version"),
            lambda data: data.update(timestamp={"$tensor": "nothing"}),
            lambda data: data.update(algorithms=3),
            lambda data: data.update(algorithms=[3]),
            lambda data: data.update(callbacks=[{"key": []}]),
            lambda data: data.update(optimizers=[1]),
            lambda data: data["optimizers"].update(Adam=None),
            lambda data: data.update(model=[]),
            lambda data: data.update(model={"0.weight": 3}),
            lambda data: data.update(surprise=1),
            lambda data: data.update(rank_zero_seed="seven"),
            lambda data: data["timestamp"].update(batch=-1),
            lambda data: data["timestamp"].update(batch=1.5),
            lambda data: data.update({"$what": 1}),
            lambda data: data.update(run_name={"$float": "big"}),
            lambda data: data.update(train_metric_values={"$dict": [[[1], 2]]}),
        ],
    )
    def test_invalid_state_with_valid_checksum(self, runs, saved, later, change):
        """An invalid state with a valid checksum raises; nothing changes."""
        runs.edit(saved, change)

        with pytest.raises(CheckpointError, match="ep1-ba5"):
            load_checkpoint(saved, later)

        assert int(later.timestamp.batch) == 0

    @pytest.mark.parametrize(
        "text", ["", "[]", "[" * 100000, '{"a": 1, "a": 2}', '{"a": NaN}', '{"a": ' + "9" * 5000 + "}"]
    )
    def test_invalid_json_with_valid_checksum(self, runs, saved, later, text):
        """A state that is not strict JSON raises with the file's name."""
        (saved / "state.json").write_text(text)
        runs.sign(saved)

        with pytest.raises(CheckpointError, match=r"state\.json (is not the JSON|must hold)"):
            load_checkpoint(saved, later)

    def test_unreferenced_tensor_raises(self, runs, saved, later):
        """A tensor that the state does not reference raises."""
        runs.edit(saved, lambda data: data["optimizers"]["Adam"]["state"].pop("0.weight"))

        with pytest.raises(CheckpointError, match="have no place in the data"):
            load_checkpoint(saved, later)

    def test_nested_long_names(self, runs, saved, later):
        """Nested long names do not use memory quadratic in the file's size."""
        inner = 0
        for _ in range(100):
            inner = {"k" * 50_000: inner}
        runs.edit(saved, lambda data: data["extra"].update(more=inner))

        tracemalloc.start()
        loaded = load_checkpoint(saved, later)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()

        assert loaded.extra["more"] == inner
        assert peak < 12 * (saved / "state.json").stat().st_size

    def test_duplicate_among_many_names(self, runs, saved, later):
        """A duplicate among many names is found quickly."""
        names = ", ".join(f'"{number}": 0' for number in range(300_000))
        (saved / "state.json").write_text(f'{{{names}, "299999": 1}}')
        runs.sign(saved)

        with pytest.raises(CheckpointError, match="'299999' is there twice"):
            load_checkpoint(saved, later)

    def test_ignore_keys_with_a_malformed_list(self, runs, saved, later):
        """A malformed list raises, also with ignored keys."""
        runs.edit(saved, lambda data: data.update(callbacks=[{"key": "LRMonitor"}, "x"]))

        with pytest.raises(CheckpointError, match=r"callbacks\[0\]: must be CallbackRecord"):
            load_checkpoint(saved, later, ignore_keys="callbacks/LRMonitor")

    def test_errors_have_the_given_path(self, runs, saved, later):
        """Errors have the checkpoint's path."""
        (saved / "state.json").write_text("{")
        runs.sign(saved)

        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(saved, later)

        assert caught.value.path == str(Path(saved) / "state.json")
        assert json.loads((saved / "manifest.json").read_text())["files"]


def test_parts(runs, saved):
    """What is beside the state is no part of it, and weights have no data until they are read."""
    state = runs.make()
    read = SavedRun.read(open_checkpoint(saved), state, weights_only=False)

    assert read.beside("extra") == {"data": {"position": 7}}
    assert not {"extra", "modules", "environment", "integrations"} & read.state.keys()
    assert all(weight.is_meta for weight in read.data["model"].values())

    read.read_weights()
    assert runs.same_tensors(read.data["model"], state.get_model_state_dict())


def test_references_are_not_searched_without_need(runs, saved, monkeypatch):
    """If no weight is sharded, nothing depends on where the data refers to a tensor."""
    monkeypatch.setattr("composer.checkpoint.loading.references", None)
    monkeypatch.setattr("composer.checkpoint.reading.references", None)

    assert load_checkpoint(saved, runs.make()).report.restored
