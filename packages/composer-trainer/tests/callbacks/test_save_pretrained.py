"""A small Llama is saved in Transformers' own layout during training, and uploaded to a local stand-in of the Hub."""

import base64
import contextlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from composer.algorithms import EMA, Alibi
from composer.callbacks import SavePretrained
from composer.core import Callback, evaluation_weights
from composer.models import HuggingFaceModel
from fixtures import small_run, weights

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
peft = pytest.importorskip("peft")

# PEFT asks Transformers by a former name whether activations are kept.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
ROWS = torch.arange(24).view(4, 6) % 9


def make_model(kind="Llama", **settings):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(token): token for token in range(9)}, "0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {
        "Llama": lambda: transformers.LlamaConfig(**sizes, intermediate_size=8, eos_token_id=1),
        "GPT2": lambda: transformers.GPT2Config(vocab_size=9, n_positions=8, n_embd=8, n_layer=1, n_head=2),
    }[kind]()
    network = transformers.AutoModelForCausalLM.from_config(config)
    return HuggingFaceModel(network, transformers.PreTrainedTokenizerFast(tokenizer_object=words), **settings)


def make_run(callback, model=None, algorithms=(), **settings):
    model = make_model() if model is None else model
    batch = {"input_ids": ROWS, "labels": ROWS}
    return small_run(
        model=model,
        train_dataloader=[batch] * 5,
        optimizers=torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.5),
        callbacks=callback,
        algorithms=list(algorithms),
        max_duration="1ep",
        **settings,
    )


def logits_of(model):
    with torch.no_grad():
        return model.eval()(input_ids=ROWS).logits


class TestFolder:
    def test_weights_of_evaluation(self, tmp_path):
        """Transformers reads the averages, which the model is evaluated with, and the tokenizer."""
        trainer = make_run(SavePretrained(tmp_path / "{run_name}"), algorithms=[EMA("2ba")], run_name="mine")

        trainer.fit()

        read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "mine")
        with evaluation_weights(trainer.state):
            assert torch.equal(logits_of(read), logits_of(trainer.state.model.model))
        assert not torch.equal(logits_of(read), logits_of(trainer.state.model.model))
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "mine")
        assert tokenizer("3 1 4")["input_ids"] == [3, 1, 4]

    @pytest.mark.parametrize(
        ("interval", "expected"), [("2ba", ["2", "4", "5"]), ("1ep", ["5"]), (0, ["5"]), ("5ba", ["5"])]
    )
    def test_intervals(self, tmp_path, interval, expected):
        """It is saved every interval, and once at the end."""
        make_run(SavePretrained(tmp_path / "{batch}", interval)).fit()

        assert sorted(path.name for path in tmp_path.iterdir()) == expected

    def test_does_not_change_training(self, tmp_path):
        """The training continues with bit-identical results."""
        plain, saving = make_run(None), make_run(SavePretrained(tmp_path, "1ba"), algorithms=[EMA("2ba")])

        plain.fit()
        saving.fit()

        assert torch.equal(weights(saving), weights(plain))

    def test_adapters(self, tmp_path):
        """Of a model with adapters these alone are saved, and PEFT adds them to the base model."""
        lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        trainer = make_run(SavePretrained(tmp_path), make_model(peft_config=lora))

        trainer.fit()

        assert (tmp_path / "adapter_model.safetensors").stat().st_size < 1000
        read = peft.PeftModel.from_pretrained(make_model().model, tmp_path)
        assert torch.equal(logits_of(read), logits_of(trainer.state.model.model))
        assert not torch.equal(logits_of(read), logits_of(make_model().model))

    def test_gathers_before_it_writes(self, tmp_path, monkeypatch):
        """The weights are gathered before the part that only the first process does, which must not communicate."""
        order, model = [], make_model()

        @contextlib.contextmanager
        def failing(doing):
            order.append(doing)
            yield
            order.append(f"{len(list(tmp_path.iterdir()))} files")

        monkeypatch.setattr("composer.callbacks.save_pretrained.failing_in_all_processes", failing)
        model.register_state_dict_post_hook(lambda *_: order.append("gathered"))
        make_run(SavePretrained(tmp_path), model).fit()

        assert order == ["gathered", f"Saving the model to {tmp_path}", f"{len(list(tmp_path.iterdir()))} files"]


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"folder": "s3://bucket/model"}, "folder must be local, got 's3://bucket/model'"),
            ({"folder": "{rnu_name}"}, "folder"),
            ({"interval": "-1ep"}, "interval must be 0"),
            ({"push_to_hub": True}, "push_to_hub must be the name of a repository"),
        ],
    )
    def test_bad_arguments(self, arguments, message):
        """A wrong argument raises an error that names it."""
        with pytest.raises((TypeError, ValueError), match=message):
            SavePretrained(**arguments)

    def test_other_models(self, tmp_path):
        """A model that is not of Transformers raises an error before the first batch."""
        with pytest.raises(TypeError, match=r"save_pretrained and get_metadata, and ComposerClassifier lacks"):
            small_run(callbacks=SavePretrained(tmp_path), max_duration="1ep").fit()

    def test_changed_layers(self, tmp_path):
        """Layers that Transformers cannot represent raise an error before the first batch, and nothing is written."""
        trainer = make_run(SavePretrained(tmp_path), make_model("GPT2"), [Alibi(max_sequence_length=8)])

        with pytest.raises(ValueError, match="cannot save a model with"):
            trainer.fit()
        with pytest.raises(ValueError, match="that a model of Transformers cannot represent"):
            trainer.state.model.save_pretrained(tmp_path)

        assert not any(tmp_path.iterdir())


PROGRAM = """
import datetime, sys
from pathlib import Path

import torch
from composer.callbacks import SavePretrained
from composer.models import ComposerClassifier
from composer.trainer import Trainer


class Model(ComposerClassifier):
    def get_metadata(self):
        return {}

    def save_pretrained(self, folder):
        if torch.distributed.get_rank() == 0:
            Path(folder).mkdir()


rank, folder = int(sys.argv[1]), Path(sys.argv[2])
store = torch.distributed.FileStore(str(folder / "store"), 2)
timeout = datetime.timedelta(seconds=60)
torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
for callback in (SavePretrained(folder / "store" / "new"), SavePretrained(folder / "new", push_to_hub="user/model")):
    batches = [(torch.ones(2, 4) * rank, torch.zeros(2, dtype=torch.long))]
    model = Model(torch.nn.Linear(4, 2), num_classes=2)
    settings = {"optimizers": torch.optim.SGD(model.parameters()), "max_duration": "1ba", "progress_bar": False}
    try:
        Trainer(model=model, train_dataloader=batches, callbacks=callback, device="cpu", **settings).fit()
    except Exception as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0])
"""


def test_errors_in_two_processes(tmp_path):
    """If the first process cannot write or create the repository, the other one raises an error that describes it."""
    (tmp_path / "program.py").write_text(PROGRAM)
    settings = {"HF_HUB_OFFLINE": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "program.py", str(rank), "."],
            cwd=tmp_path,
            env={**os.environ, **settings, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    first, second = (process.communicate(timeout=240)[0].splitlines() for process in started)

    assert [line.partition(":")[0] for line in first] == ["NotADirectoryError", "OfflineModeIsEnabled"]
    assert second[0].startswith("RuntimeError: Saving the model to store/new failed in process 0: NotADirectoryError")
    assert second[1].startswith("RuntimeError: Creating the repository user/model failed in process 0: OfflineMode")


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the Hugging Face Hub, and records what is uploaded."""

    def do_POST(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        hub, answer = self.server, {}
        if "/commit/" in self.path and hub.is_full:
            self.send_error(507)
            return
        if self.path == "/api/repos/create":
            hub.created.append(json.loads(content))
            answer = {"url": f"{hub.url}/user/model"}
        elif "/preupload/" in self.path:
            paths = [file["path"] for file in json.loads(content)["files"]]
            answer["files"] = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
        elif "/commit/" in self.path:
            header, *files = [json.loads(line)["value"] for line in content.splitlines()]
            hub.commits.append((header["summary"], {one["path"]: base64.b64decode(one["content"]) for one in files}))
            answer = {"commitUrl": f"{hub.url}/user/model/commit/1", "commitOid": "1" * 40}
        hub.tokens.add(self.headers["authorization"])
        self.answer(answer)

    def do_GET(self):
        """Some releases of the client ask whether the repository stores its files with Xet."""
        self.answer({"id": "user/model", "xetEnabled": False, "siblings": [], "spaces": [], "tags": []})

    def answer(self, content):
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    """Run a local stand-in of the Hugging Face Hub, to which the client library is directed."""
    pytest.importorskip("huggingface_hub")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url, server.is_full = f"http://127.0.0.1:{server.server_port}", False
    server.created, server.commits, server.tokens = [], [], set()
    # What HF_ENDPOINT and HF_HUB_OFFLINE set when the library is imported.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "of-a-test")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with contextlib.closing(server.socket):
        yield server
        server.shutdown()
        thread.join()


class TestHub:
    def test_uploads_each_save(self, hub, tmp_path):
        """A private repository is created, and each save is a commit with all files of the folder."""
        make_run(SavePretrained(tmp_path, "2ba", push_to_hub="user/model"), run_name="mine").fit()

        assert [(one["organization"], one["name"]) for one in hub.created] == [("user", "model")]
        assert "private" in (hub.created[0].get("visibility"), *hub.created[0])
        assert [summary for summary, _ in hub.commits] == ["mine, batch 2", "mine, batch 4", "mine, batch 5"]
        assert hub.commits[-1][1] == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        assert hub.commits[0][1]["model.safetensors"] != hub.commits[1][1]["model.safetensors"]
        assert hub.tokens == {"Bearer of-a-test"}

    def test_failed_upload(self, hub, tmp_path):
        """An upload that fails gives a warning; the training ends as usual, with the folder."""
        hub.is_full = True
        trainer = make_run(SavePretrained(tmp_path, push_to_hub="user/model"))

        with pytest.warns(UserWarning, match=r"upload to user/model has failed .*507"):
            assert trainer.fit().steps == 5

        assert (tmp_path / "model.safetensors").exists()


class Interrupt(Callback):
    """Sends a SIGTERM in a batch."""

    def __init__(self, batch):
        self.batch = batch

    def batch_end(self, state, logger):
        if state.timestamp.batch == self.batch:
            signal.raise_signal(signal.SIGTERM)


class TestInterruption:
    def test_an_incomplete_model_is_not_saved(self, tmp_path, caplog):
        """After a signal nothing is written under the name of the model, and the log names the checkpoint."""
        runs = {"save_folder": str(tmp_path / "{run_name}"), "run_name": "first", "autoresume": True}

        with pytest.raises(SystemExit):
            make_run([SavePretrained(tmp_path / "model", 0), Interrupt(2)], **runs).fit()

        assert not (tmp_path / "model").exists()
        texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert "SavePretrained writes nothing: the training is not complete (stopped by a signal)." in texts
        assert texts[-1] == (
            f"The training was stopped by SIGTERM after batch 2. The checkpoint is {tmp_path}/first/ep0-ba2; start the "
            "same program again to continue."
        )
        make_run(SavePretrained(tmp_path / "model", 0), **runs).fit()
        assert (tmp_path / "model").exists()
