"""Checkpoints that are one file: what programs read of it, how it is written, and that a run resumes from it."""

import contextlib
import copy
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.algorithms import EMA, SWA, GradientClipping
from composer.callbacks import CheckpointSaver
from composer.checkpoint import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointSaveError,
    find_checkpoints,
    load_checkpoint,
)
from composer.core import Callback, evaluation_weights
from composer.diagnostics import check_exact_resume
from composer.foreign import ForeignFile
from composer.foreign.pt_files import open_files
from composer.models import ComposerClassifier, HuggingFaceModel
from composer.optim import MultiStepScheduler
from fixtures import full_copy, same_bits
from fixtures.processes import run_processes

PROGRAM = Path(__file__).with_name("pt_program.py")
NAMES = {"save_filename": "ep{epoch}-ba{batch}-rank{rank}.pt", "save_latest_filename": "latest-rank{rank}.pt"}


class Tied(nn.Module):
    """A network whose last weights are those of the first layer, with dropout."""

    def __init__(self, width=4):
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.norm, self.last.weight = nn.BatchNorm1d(width), self.first.weight

    def forward(self, x):
        return self.last(nn.functional.dropout(self.norm(self.first(x)).relu(), 0.2, self.training))


def make_trainer(workers=0, width=4, duration="2ep", algorithms=(), dtype=torch.float32, names=NAMES, **settings):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, width, dtype=dtype), torch.arange(24) % width)
    model = ComposerClassifier(Tied(width).to(dtype), num_classes=width)
    return Trainer(
        model=model,
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        schedulers=MultiStepScheduler(["2ba", "9ba"]),
        train_dataloader=DataLoader(data, batch_size=4, shuffle=True, num_workers=workers),
        algorithms=algorithms or GradientClipping(clipping_type="norm", clipping_threshold=0.5),
        max_duration=duration,
        seed=3,
        progress_bar=False,
        **{**names, **settings},
    )


@pytest.fixture
def saved(tmp_path):
    """Return the folder of a run that has saved a file in each of two epochs."""
    with make_trainer(save_folder=str(tmp_path), algorithms=EMA(half_life="2ba"), run_name="run") as trainer:
        trainer.fit()
    return tmp_path


class TestContent:
    def test_what_programs_read(self, saved):
        """Each checkpoint is a file that ``torch.load`` reads, and a link leads to the newest."""
        path = saved / "latest-rank0.pt"

        assert {one.name for one in saved.glob("[!.]*")} == {"ep1-ba6-rank0.pt", "ep2-ba12-rank0.pt", path.name}
        assert (saved / "ep1-ba6-rank0.pt").is_file()
        assert path.resolve().name == "ep2-ba12-rank0.pt"
        content = torch.load(path, weights_only=True)
        state = content["state"]
        assert state["timestamp"]["Timestamp"]["batch"] == 12
        model = ComposerClassifier(Tied(), num_classes=4)
        model.load_state_dict(state["model"])
        assert {"schedulers", "integrations", "run_name", "rank_zero_seed"} <= state.keys()
        assert len(content["rng"]) == 1
        [(name, clock)] = state["callbacks"]["CheckpointSaver"]["all_saved_checkpoints_to_timestamp"]
        assert (name, clock["epoch"]) == (str(saved / "ep2-ba12-rank0.pt"), 2)
        assert state["metadata"]["torch_version"] == torch.__version__
        [(name, ema)] = state["algorithms"]
        assert (name, ema["repr"][:4]) == ("EMA", "EMA(")
        trained = ema["ema_model"]["named_parameters_dict"]
        assert trained.keys() >= dict(model.named_parameters()).keys()
        assert ema["ema_weights_active"]
        assert not torch.equal(trained["module.last.weight"], state["model"]["module.last.weight"])
        assert state["optimizers"]["AdamW"]["state"]["module.first.weight"]["exp_avg"].shape == (4, 4)
        assert torch.equal(
            torch.load(path, weights_only=True, mmap=True)["state"]["model"]["module.last.bias"], model.module.last.bias
        )

    @pytest.mark.filterwarnings("ignore:AdamW updates 5 parameters in bfloat16")
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_the_model_of_the_file_is_the_one_that_was_evaluated(self, tmp_path, dtype):
        """EMA's averages are the model's weights, as in Composer; a change of them is one of the averages."""
        with make_trainer(save_folder=str(tmp_path), algorithms=EMA(half_life="2ba"), dtype=dtype) as trainer:
            trainer.fit()
            with evaluation_weights(trainer.state):
                expected = copy.deepcopy(trainer.state.model.state_dict())
        path = tmp_path / "latest-rank0.pt"
        content = torch.load(path, weights_only=True)
        content["state"]["model"]["module.first.bias"] = torch.full((4,), 5.0, dtype=dtype)
        torch.save(content, tmp_path / "changed.pt")

        resumed = make_trainer(load_path=tmp_path / "changed.pt", algorithms=EMA(half_life="2ba"), dtype=dtype)

        loaded = torch.load(path, weights_only=True)["state"]["model"]
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(weight, loaded[name]) for name, weight in expected.items())
        weights, trained = resumed.state.model.state_dict(), trainer.state.model.state_dict()
        assert all(torch.equal(weight, trained[name]) for name, weight in weights.items())
        with evaluation_weights(resumed.state):
            now = resumed.state.model.state_dict()
            changed = {name for name in now if not torch.equal(now[name], expected[name])}
        assert changed == {"module.first.bias"}

    def test_weights_of_the_evaluation(self, saved):
        """A checkpoint of weights is a file, too, and the averages of a complete one are loaded as the weights."""
        averaged, plain = (
            make_trainer(load_path=saved / "ep2-ba12-rank0.pt", load_weights_only=True),
            make_trainer(
                load_path=saved / "latest-rank{rank}.pt", load_weights_only=True, load_ignore_keys="algorithms/EMA"
            ),
        )
        path = averaged.save_checkpoint(f"{saved}/weights.pt", weights_only=True)

        content = torch.load(path, weights_only=True)["state"]
        weight, average = plain.state.model.module.first.weight, averaged.state.model.module.first.weight
        assert "optimizers" not in content
        assert torch.equal(content["model"]["module.first.weight"], average)
        assert not torch.equal(weight, average)
        with pytest.raises(CheckpointError, match=r"weights\.pt holds only weights, from which training cannot resume"):
            make_trainer(load_path=path)

    def test_a_tokenizer(self, tmp_path):
        """The files of a tokenizer are found by name as data or lines, and the tokenizer is constructed from them."""
        transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "one": 1, "two": 2}, unk_token="?"))
        words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()

        class Tokenizer(transformers.PreTrainedTokenizerFast):
            def save_pretrained(self, folder):
                super().save_pretrained(folder)
                Path(folder, "vocab.txt").write_text("one\ntwo\n", encoding="utf-8")

        Tokenizer.__name__ = "PreTrainedTokenizerFast"  # Transformers 4 looks for the class
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        network = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=3, **sizes))
        model = HuggingFaceModel(network, tokenizer=Tokenizer(tokenizer_object=words, unk_token="?"))

        path = Trainer(model=model).save_checkpoint(f"{tmp_path}/model.pt")

        saved = torch.load(path, weights_only=True)["state"]["integrations"]["huggingface"]
        assert saved["tokenizer"]["vocab.txt"] == {"file_extension": ".txt", "content": ["one", "two"]}
        content = saved["tokenizer"]["tokenizer.json"]["content"]
        assert content["model"]["vocab"] == {"?": 0, "one": 1, "two": 2}
        tokenizer = HuggingFaceModel.load_huggingface_tokenizer_from_saved_state(saved)
        again, other = HuggingFaceModel.hf_from_composer_checkpoint(path)
        assert tokenizer("two one none")["input_ids"] == other("two one none")["input_ids"] == [2, 1, 0]
        assert again.config.hidden_size == saved["model"]["config"]["content"]["hidden_size"] == 8


class TestLoading:
    @pytest.mark.parametrize(
        ("workers", "algorithms"), [(0, lambda: EMA(half_life="2ba")), (2, lambda: SWA("3ba", "2ep", "1ba", False))]
    )
    def test_resume_is_exact(self, tmp_path, workers, algorithms):
        """A run that resumes from a file equals an uninterrupted one, bit for bit."""
        make = lambda **settings: make_trainer(workers, algorithms=algorithms(), **settings)  # noqa: E731

        check_exact_resume(make, stops=["4ba", "1ep"], folder=tmp_path)

        assert (tmp_path / "stop0" / "ep0-ba4-rank0.pt").is_file()

    @pytest.mark.parametrize("given", NAMES)
    def test_one_of_the_names_is_enough(self, tmp_path, given):
        """The other one has Composer's default, and a run resumes exactly, by the link and by ``autoresume``."""
        make = partial(make_trainer, names={given: NAMES[given]})
        check_exact_resume(make, stops=["4ba"], folder=tmp_path)
        options = {"save_folder": str(tmp_path / "run"), "run_name": "run"}
        with make(duration="1ep", **options) as trainer:
            trainer.fit()

        link, own = tmp_path / "run" / "latest-rank0.pt", {"latest"} if given == "save_filename" else set()
        assert {one.name for one in link.parent.glob("[!.]*")} == {"ep1-ba6-rank0.pt", link.name, *own}
        assert torch.load(link, weights_only=True)["state"]["timestamp"]["Timestamp"]["batch"] == 6
        ends = []
        for settings in ({}, {"load_path": link}, {"autoresume": True, **options}):
            with make(**settings) as trainer:
                trainer.fit()
            ends.append(full_copy(trainer.state.model))
        assert same_bits(ends[0], ends[1])
        assert same_bits(ends[0], ends[2])
        assert link.resolve().name == "ep2-ba12-rank0.pt"

    @pytest.mark.parametrize("given", [{}, {"save_latest_filename": "latest"}])
    def test_both_links_are_of_the_newest(self, tmp_path, given):
        """The link of Composer is one more beside the default one, which a program or an earlier run may have."""
        options = {"save_folder": str(tmp_path), "names": {"save_filename": "ep{epoch}.pt", **given}}
        with make_trainer(duration="1ep", **options) as trainer:
            trainer.fit()
        (tmp_path / "latest-rank0.pt").unlink()
        with make_trainer(load_path=tmp_path / "latest", **options) as trainer:
            trainer.fit()

        links = {one.name: one.resolve().name for one in tmp_path.glob("[!.]*") if one.is_symlink()}
        assert links == {"latest": "ep2.pt", "latest-rank0.pt": "ep2.pt"}

    @pytest.mark.parametrize("name", ["latest-rank{rank}.pt", "ep{epoch}.pt"])
    def test_the_link_replaces_no_checkpoint(self, tmp_path, name):
        """A file that has the name of Composer's link remains, also if it is the checkpoint itself."""
        torch.save(torch.ones(2000), tmp_path / "latest-rank0.pt")
        options = {"save_folder": str(tmp_path), "save_overwrite": True, "names": {"save_filename": name}}
        with make_trainer(duration="1ep", **options) as trainer:
            trainer.fit()

        assert not (tmp_path / "latest-rank0.pt").is_symlink()
        assert "state" in torch.load(tmp_path / "latest", weights_only=True)

    def test_a_link_to_a_folder_that_is_named_like_a_file(self, tmp_path):
        """With another name of checkpoints there is a warning."""
        with pytest.warns(
            DeprecationWarning, match=r"'latest\.pt' is a folder .* a link to 'ba{batch}' \(save_filename\)"
        ):
            make_trainer(save_folder=str(tmp_path), save_filename="ba{batch}", save_latest_filename="latest.pt")

    def test_two_processes(self, tmp_path):
        """Each process of DDP resumes from the file with what belongs to it; sharded runs keep a folder, and say so."""
        assert "complete" in run_processes(PROGRAM, 2, "processes", tmp_path)[0]

    @pytest.mark.filterwarnings("ignore:The saved state was loaded")  # schedulers are created when a training begins
    def test_scaler(self, tmp_path):
        """The scale of gradients in half precision is in the file."""
        first, later = (make_trainer(duration="3ba", precision="amp_fp16") for _ in range(2))
        for trainer in (first, later):
            trainer.state.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        first.fit()

        load_checkpoint(ForeignFile(first.save_checkpoint(f"{tmp_path}/model.pt")), later.state)

        assert later.state.scaler.state_dict() == first.state.scaler.state_dict()
        assert first.state.scaler.get_scale() == 128

    def test_other_model(self, saved):
        """What does not fit is one error, as for a folder."""
        with pytest.raises(CheckpointMismatchError, match=r"(?s)ep2-ba12-rank0\.pt does not fit.*first\.weight.*norm"):
            make_trainer(width=5, load_path=saved / "ep2-ba12-rank0.pt", algorithms=EMA(half_life="2ba"))

    @pytest.mark.parametrize("change", ["cut", "flip"])
    def test_damaged_file_is_skipped(self, saved, change):
        """A damaged file is an error, and autoresume takes the one before and replaces it."""
        path, options = saved / "ep2-ba12-rank0.pt", {"algorithms": EMA(half_life="2ba")}
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content[:-500] if change == "cut" else content)

        with pytest.raises(CheckpointError, match=r"ep2-ba12-rank0\.pt"):
            make_trainer(load_path=path, **options)
        warns = pytest.warns(UserWarning, match=r"Skipped a checkpoint that is .*ep2-ba12-rank0\.pt")
        with warns if change == "flip" else contextlib.nullcontext():  # of one without a manifest the time is unknown
            trainer = make_trainer(save_folder=str(saved), autoresume=True, run_name="run", **options)
        with trainer:
            assert trainer.state.timestamp.batch == 6
            trainer.fit()
        assert torch.load(path, weights_only=True)["state"]["timestamp"]["Timestamp"]["batch"] == 12


class TestWriting:
    def test_kill_while_a_file_is_written(self, saved):
        """After a kill the former file is complete, and the next run deletes what is left of the new one."""
        before = (saved / "ep2-ba12-rank0.pt").read_bytes()
        killed = subprocess.run([sys.executable, PROGRAM, "kill", saved], check=False)

        assert killed.returncode == -signal.SIGKILL
        assert [*saved.glob(".*.tmp")]
        assert (saved / "ep2-ba12-rank0.pt").read_bytes() == before
        options = {"algorithms": EMA(half_life="2ba"), "run_name": "run", "autoresume": True}
        with make_trainer(save_folder=str(saved), duration="13ba", **options) as trainer:
            trainer.fit()
        assert not [*saved.glob(".*.tmp")]

    def test_old_files_are_deleted(self, tmp_path):
        """Only the last and the best files are kept, also if another file is there or one was removed."""
        torch.save(torch.ones(2), tmp_path / "other.pt")
        options = {"save_num_checkpoints_to_keep": 1, "save_interval": "1ba", "save_folder": str(tmp_path)}
        with make_trainer(duration="5ba", callbacks=_Removes(tmp_path / "ep0-ba3-rank0.pt"), **options) as trainer:
            trainer.fit()

        assert {one.name for one in tmp_path.glob("*.pt")} == {"other.pt", "ep0-ba5-rank0.pt", "latest-rank0.pt"}
        assert [one.name for one in find_checkpoints(open_files(tmp_path))] == ["ep0-ba5-rank0.pt"]

    def test_files_that_have_the_name(self, tmp_path):
        """A saver replaces a file that is no checkpoint only with ``overwrite``; ``save_checkpoint`` replaces it."""
        torch.save(torch.ones(2), tmp_path / "ba2.pt")
        options = {"save_folder": str(tmp_path), "save_filename": "ba{batch}.pt"}
        with make_trainer(duration="2ba", **options) as trainer, pytest.raises(CheckpointSaveError, match="elsewhere"):
            trainer.fit()
        assert torch.load(tmp_path / "ba2.pt", weights_only=True).tolist() == [1, 1]

        path = trainer.save_checkpoint(tmp_path / "ba2.pt")
        with make_trainer(duration="2ba", **options, save_overwrite=True) as again:
            again.fit()

        assert path == str(tmp_path / "ba2.pt")
        assert torch.load(path, weights_only=True)["state"]["timestamp"]["Timestamp"]["batch"] == 2

    def test_savers_that_are_added_later(self, tmp_path):
        """A saver that a program adds to a trainer that has been constructed writes files, too."""
        trainer = make_trainer(duration="2ba", callbacks=CheckpointSaver(str(tmp_path / "first"), "ba{batch}.pt"))
        trainer.state.callbacks.append(CheckpointSaver(str(tmp_path / "second"), "ba{batch}.pt"))
        with trainer:
            trainer.fit()

        assert (tmp_path / "first" / "ba2.pt").is_file()
        assert (tmp_path / "second" / "ba2.pt").is_file()

    def test_copies_at_a_url_are_folders(self, tmp_path):
        """With copies at a URL the checkpoints are folders, with a warning."""
        saver = CheckpointSaver(str(tmp_path), "ba{batch}.pt", f"memory://pt{tmp_path}/ba{{batch}}.pt")

        with pytest.warns(DeprecationWarning, match=r"'ba{batch}.pt' is a folder and no file, because memory://.* URL"):
            trainer = make_trainer(duration="2ba", callbacks=saver)
        with trainer:
            trainer.fit()

        assert (tmp_path / "ba2.pt").is_dir()
        with make_trainer(load_path=f"memory://pt{tmp_path}/ba2.pt") as later:
            assert later.state.timestamp.batch == 2


class _Removes(Callback):
    """Deletes a file after a batch, as programs do."""

    def __init__(self, path):
        self.path = path

    def batch_end(self, state, logger):
        self.path.unlink(missing_ok=True)
