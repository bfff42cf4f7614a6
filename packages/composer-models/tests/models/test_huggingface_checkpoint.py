"""Tests of HuggingFaceModel checkpoints: tokenizer and configuration are saved and restored."""

import inspect
import json

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.bert.modeling_bert import BertOutput

from composer import functional as cf
from composer.models import HuggingFaceModel, write_huggingface_pretrained_from_composer_checkpoint

RULE = cf.ResidualRule(branch=lambda block, x: block.dropout(block.dense(x)))
KINDS = ["classifier", "masked", "gpt2", "t5", "llama"]
TIED = "model.transformer.wte.weight", "model.lm_head.weight"


@pytest.fixture
def save(tmp_path, sign):
    """Return a function that writes a model as a checkpoint folder, optionally without some weights."""

    def write(model, *, without=(), **changes):
        folder = tmp_path / "ep1-ba10"
        folder.mkdir(exist_ok=True)
        weights = {name: value.clone() for name, value in model.state_dict().items() if name not in without}
        save_file(weights, folder / "model.safetensors")
        state = {"clock": {"batch": 10}, "integrations": model.get_metadata()}
        (folder / "state.json").write_text(json.dumps(state | changes))
        sign(folder)
        return folder

    return write


def _logits(model, batch):
    with torch.no_grad():
        saved_state = inspect.signature(model.forward).parameters
        return model.eval()(**{name: value for name, value in batch.items() if name in saved_state})["logits"]


class TestFromCheckpoint:
    @pytest.mark.parametrize("kind", KINDS)
    def test_same_logits(self, kind, make_model, make_batch, tokenizer, save):
        """Class, configuration and weights are restored: bit-identical logits, in evaluation mode."""
        bare, batch = make_model(kind), make_batch(kind)
        folder = save(HuggingFaceModel(bare, tokenizer))

        model, _ = HuggingFaceModel.hf_from_composer_checkpoint(folder)

        assert not model.training
        assert type(model) is type(bare)
        assert torch.equal(_logits(model, batch), _logits(bare, batch))

    def test_same_tokens(self, make_model, tokenizer, lines, save):
        """The tokenizer is restored: equal ids, padding and text."""
        folder = save(HuggingFaceModel(make_model("gpt2"), tokenizer))

        _, again = HuggingFaceModel.hf_from_composer_checkpoint(str(folder))

        before, after = tokenizer(lines[:5], padding=True), again(lines[:5], padding=True)
        assert after["input_ids"] == before["input_ids"]
        assert again.pad_token == "[PAD]"
        assert again.decode(after["input_ids"][0], skip_special_tokens=True) == tokenizer.decode(
            before["input_ids"][0], skip_special_tokens=True
        )

    @pytest.mark.parametrize("name", ["model.safetensors", "state.json", "extra.safetensors", "manifest.json"])
    def test_changed_files(self, make_model, save, sign, name):
        """A modified file raises, with its name."""
        folder = save(HuggingFaceModel(make_model("gpt2")))
        (folder / "extra.safetensors").write_bytes(b"averages")
        sign(folder)
        content = bytearray((folder / name).read_bytes())
        content[-5] ^= 1  # of the manifest, a digit of its own checksum
        (folder / name).write_bytes(content)

        with pytest.raises(ValueError, match=rf"{name} has been changed since it was written, and nothing was loaded"):
            HuggingFaceModel.hf_from_composer_checkpoint(folder)

    def test_other_format(self, make_model, save):
        """A checkpoint of a later format raises, as its checksums and files may have another meaning."""
        folder = save(HuggingFaceModel(make_model("gpt2")))
        manifest = json.loads((folder / "manifest.json").read_text()) | {"format_version": 4}
        (folder / "manifest.json").write_text(json.dumps(manifest))

        with pytest.raises(ValueError, match="is of format 4, and this release reads format 3"):
            HuggingFaceModel.hf_from_composer_checkpoint(folder)

    @pytest.mark.parametrize("damage", [None, "files", "part"])
    def test_parts_of_several_processes(self, make_model, make_batch, save, sign, damage):
        """Weights that each process has saved a part of are joined: rows of matrices, and entire vectors."""
        bare, batch = make_model("gpt2"), make_batch("gpt2")
        folder = save(HuggingFaceModel(bare))
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        cut = {name: value.shape[0] // 3 if value.ndim > 1 else 0 for name, value in tensors.items()}
        first = {name: value[: cut[name]] for name, value in tensors.items() if cut[name]}
        layout = {
            name: {
                "shape": list(value.shape),
                "dtype": "float32",
                "cuts": [[0, cut[name]] if cut[name] else [0], *[[0]] * (value.ndim - 1)],
                "files": [0, 1] if cut[name] else [1],
            }
            for name, value in tensors.items()
        }
        files = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
        save_file(first, folder / files[0])
        if damage != "part":
            save_file({name: value[cut[name] :].contiguous() for name, value in tensors.items()}, folder / files[1])
        content = {"files": files if damage != "files" else files[:1], "tensors": {"model.safetensors": layout}}
        (folder / "layout.json").write_text(json.dumps(content))
        sign(folder)

        if damage is not None:
            with pytest.raises(ValueError, match=r"layout\.json is not the layout of the files with tensors"):
                HuggingFaceModel.hf_from_composer_checkpoint(folder)
            return
        fsspec.filesystem("memory").put(str(folder), "/bucket/sharded", recursive=True)
        for path in (folder, "memory://bucket/sharded"):
            model, _ = HuggingFaceModel.hf_from_composer_checkpoint(path)
            assert torch.equal(_logits(model, batch), _logits(bare, batch))

    @pytest.mark.parametrize(
        "changes",
        [
            {"algorithms": [5]},
            {"algorithms": [{"state": {"averaged_weights": {"model.lm_head.weight": 5}}}]},
            {"optimizers": []},
            {"optimizers": {"AdamW": {"param_groups": [5]}}},
            {"integrations": []},
        ],
    )
    def test_invalid_state(self, make_model, save, changes):
        """An invalid state raises."""
        folder = save(HuggingFaceModel(make_model("gpt2")), **changes)

        with pytest.raises(ValueError, match=r"state\.json is not the state of a run"):
            HuggingFaceModel.hf_from_composer_checkpoint(folder)

    @pytest.mark.parametrize("without", [(), TIED[:1], TIED[1:]])
    def test_tied_weights(self, without, make_model, make_batch, save):
        """Tied weights saved under either or both names are tied again."""
        bare, batch = make_model("gpt2"), make_batch("gpt2")
        folder = save(HuggingFaceModel(bare), without=without)

        model, _ = HuggingFaceModel.hf_from_composer_checkpoint(folder)

        assert torch.equal(_logits(model, batch), _logits(bare, batch))
        assert model.transformer.wte.weight is model.lm_head.weight

    @pytest.mark.parametrize("name", TIED)
    def test_averages_of_trained_weights(self, make_model, save, sign, name):
        """Weights without an average were frozen, and are loaded; tied weights have one average."""
        bare = make_model("gpt2")
        state = {"algorithms": [{"state": {"averaged_weights": {name: {"$tensor": "average"}}}}]}
        folder = save(HuggingFaceModel(bare), **state)
        save_file({"average": torch.ones_like(bare.lm_head.weight)}, folder / "extra.safetensors")
        sign(folder)

        model, _ = HuggingFaceModel.hf_from_composer_checkpoint(folder)

        assert (model.lm_head.weight == 1).all()
        assert torch.equal(model.transformer.h[0].attn.c_attn.weight, bare.transformer.h[0].attn.c_attn.weight)

    def test_training_weights_of_a_schedule_free_optimizer(self, make_model, save):
        """They are not the evaluation weights, and raise an error that states what to save."""
        groups = [{"params": ["model.lm_head.weight"], "train_mode": True}]
        folder = save(HuggingFaceModel(make_model("gpt2")), optimizers={"AdamW": {"state": {}, "param_groups": groups}})

        with pytest.raises(ValueError, match=r"training weights of a schedule-free optimizer.*weights_only=True"):
            HuggingFaceModel.hf_from_composer_checkpoint(folder)

    def test_settings_of_generation(self, make_model, save):
        """The generation config is restored."""
        bare = make_model("gpt2")
        bare.generation_config.max_new_tokens = 7

        model, _ = HuggingFaceModel.hf_from_composer_checkpoint(save(HuggingFaceModel(bare)))

        assert model.generation_config.max_new_tokens == 7

    def test_other_class_and_config(self, make_model, save):
        """The class may be an AutoModel, a name or a custom class, and the configuration may be changed."""
        from transformers import AutoModelForCausalLM, GPT2LMHeadModel

        class CustomModel(GPT2LMHeadModel):
            pass

        folder = save(HuggingFaceModel(make_model("gpt2")))
        read = HuggingFaceModel.hf_from_composer_checkpoint

        auto, _ = read(folder, AutoModelForCausalLM, model_config_kwargs={"attn_pdrop": 0.5})
        named, _ = read(folder, "transformers.GPT2LMHeadModel")
        own, _ = read(folder, CustomModel)

        assert [type(auto), type(named), type(own)] == [GPT2LMHeadModel, GPT2LMHeadModel, CustomModel]
        assert auto.config.attn_pdrop == 0.5

    @pytest.mark.parametrize("cls", ["BertForTokenClassification", "AutoModelForTokenClassification"])
    def test_other_head(self, cls, make_model, make_batch, save):
        """Weights of a new head are initialized and named, and those of the former head too; all others are loaded."""
        import transformers

        bare, batch = make_model("masked"), make_batch("masked")
        folder = save(HuggingFaceModel(bare))

        with pytest.warns(UserWarning, match=r"New weights.*classifier\.weight.*does not have: cls\.") as caught:
            model, _ = HuggingFaceModel.hf_from_composer_checkpoint(folder, getattr(transformers, cls))

        assert len(caught) == 1
        assert type(model) is transformers.BertForTokenClassification
        hidden = [one.bert(input_ids=batch["input_ids"]).last_hidden_state for one in (model.eval(), bare.eval())]
        assert torch.equal(*hidden)
        assert model.classifier.weight.std().item() == pytest.approx(model.config.initializer_range, rel=0.5)

    def test_without_a_head(self, make_model, make_batch, save):
        """The model without a head, whose weights have no prefix, and back."""
        from transformers import GPT2LMHeadModel, GPT2Model

        bare, batch = make_model("gpt2"), make_batch("gpt2")
        ids = batch["input_ids"]
        read = HuggingFaceModel.hf_from_composer_checkpoint

        with pytest.warns(UserWarning, match=r"to be trained: none.*does not have: lm_head.weight"):
            body, _ = read(save(HuggingFaceModel(bare)), GPT2Model)

        assert torch.equal(body(ids).last_hidden_state, bare.eval().transformer(ids).last_hidden_state)
        again, _ = read(save(HuggingFaceModel(body)), GPT2LMHeadModel)  # the head's weights are the embedding's
        assert torch.equal(_logits(again, batch), _logits(bare, batch))

    def test_custom_configuration(self, make_model, save):
        """A custom class must be passed, and its configuration class is used."""
        from transformers import GPT2Config, GPT2LMHeadModel

        class CustomConfig(GPT2Config):
            model_type = "mine"

        class CustomModel(GPT2LMHeadModel):
            config_class = CustomConfig

        tiny = {"vocab_size": 8, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
        bare = CustomModel(CustomConfig(**tiny, bos_token_id=1, eos_token_id=1))
        folder = save(HuggingFaceModel(bare))

        with pytest.raises(ValueError, match=r"CustomModel is not a model of transformers.*model_instantiation_class"):
            HuggingFaceModel.hf_from_composer_checkpoint(folder)
        model, _ = HuggingFaceModel.hf_from_composer_checkpoint(folder, CustomModel)

        assert type(model.config) is CustomConfig

    def test_a_file_of_composer(self, make_model, make_batch, tokenizer, tmp_path):
        """The same logits and tokens; configuration and tokenizer are the data of their files."""
        bare, batch, path = make_model("gpt2"), make_batch("gpt2"), tmp_path / "ep1-ba2-rank0.pt"
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        files = {
            one.name: {"file_extension": ".json", "content": json.loads(one.read_text())}
            for one in (tmp_path / "tokenizer").glob("*.json")
        }
        named = f"{type(bare).__module__}.{type(bare).__qualname__}"
        config = {"file_extension": ".json", "content": bare.config.to_dict(), "class": named}
        described = {"model": {"config": config}, "tokenizer": files}
        weights = {f"model.{name}": value for name, value in bare.state_dict().items()}
        state = {"model": weights, "optimizers": {"AdamW": {"param_groups": [{}]}}, "algorithms": [("EMA", {})]}
        torch.save({"state": {**state, "integrations": {"huggingface": described}}, "rng": []}, path)

        model, tokens = HuggingFaceModel.hf_from_composer_checkpoint(path)

        assert torch.equal(_logits(model, batch), _logits(bare, batch))
        assert tokens.get_vocab() == tokenizer.get_vocab()
        described["model"]["peft_config"] = {"r": 4}
        torch.save({"state": {**state, "integrations": {"huggingface": described}}, "rng": []}, path)
        with pytest.raises(ValueError, match=r"rank0.pt is no checkpoint .*: it has adapters: load it into"):
            HuggingFaceModel.hf_from_composer_checkpoint(path)

    def test_remote(self, make_model, make_batch, tokenizer, save, tmp_path):
        """A remote folder is downloaded to the given path."""
        bare, batch = make_model("gpt2"), make_batch("gpt2")
        folder = save(HuggingFaceModel(bare, tokenizer))
        fsspec.filesystem("memory").put(str(folder), "/bucket/ep1-ba10", recursive=True)

        model, _ = HuggingFaceModel.hf_from_composer_checkpoint(
            "memory://bucket/ep1-ba10", local_checkpoint_save_location=tmp_path / "fetched"
        )

        assert torch.equal(_logits(model, batch), _logits(bare, batch))
        assert (tmp_path / "fetched" / "model.safetensors").exists()

    def test_two_remote_ones(self, make_model, make_batch, tokenizer, save, tmp_path):
        """Files that the manifest of an earlier checkpoint in the folder lists are deleted, no others."""
        bare, batch = make_model("gpt2"), make_batch("gpt2")
        fsspec.filesystem("memory").put(str(save(HuggingFaceModel(bare, tokenizer))), "/bucket/second", recursive=True)
        former = [tmp_path / f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
        for path in (*former, tmp_path / "model.bin"):
            path.write_bytes(b"0")
        listed = {path.name: {} for path in (*former, tmp_path / "../outside.json", tmp_path / "model.bin")}
        (tmp_path / "manifest.json").write_text(json.dumps({"files": listed}))

        model, _ = HuggingFaceModel.hf_from_composer_checkpoint(
            "memory://bucket/second", local_checkpoint_save_location=tmp_path
        )

        assert torch.equal(_logits(model, batch), _logits(bare, batch))
        assert ([path.exists() for path in former], (tmp_path / "model.bin").exists()) == ([False, False], True)

    @pytest.mark.parametrize("wrong", ["runs", "runs/transformers", "nothing"])
    def test_wrong_url(self, make_model, tokenizer, save, tmp_path, wrong):
        """A URL of no checkpoint raises an error, and changes nothing in the local folder: neither read nor deleted."""
        bare, files = make_model("gpt2"), fsspec.filesystem("memory")
        files.put(str(save(HuggingFaceModel(bare, tokenizer))), "/runs/ep1-ba10", recursive=True)
        files.pipe({"/runs/transformers/model.safetensors": b"0", "/runs/notes.txt": b"0"})
        HuggingFaceModel.hf_from_composer_checkpoint(
            "memory://runs/ep1-ba10", local_checkpoint_save_location=tmp_path / "fetched"
        )
        before = {path.name: path.read_bytes() for path in (tmp_path / "fetched").iterdir()}

        with pytest.raises(FileNotFoundError, match=r"It has no manifest\.json"):
            HuggingFaceModel.hf_from_composer_checkpoint(
                f"memory://{wrong}", local_checkpoint_save_location=tmp_path / "fetched"
            )

        assert {path.name: path.read_bytes() for path in (tmp_path / "fetched").iterdir()} == before

    def test_from_state_and_weights(self, make_model, make_batch, tokenizer, tmp_path):
        """Model and tokenizer are created from a loaded state and weights."""
        bare, batch = make_model("masked"), make_batch("masked")
        state = HuggingFaceModel(bare, tokenizer).get_metadata()["huggingface"]

        model = HuggingFaceModel.load_huggingface_model_from_saved_state(state, bare.state_dict())
        again = HuggingFaceModel.load_huggingface_tokenizer_from_saved_state(state, tokenizer_save_dir=tmp_path / "t")

        assert torch.equal(_logits(model, batch), _logits(bare, batch))
        assert len(again) == len(tokenizer)
        assert (tmp_path / "t" / "tokenizer.json").exists()


class TestChangedLayers:
    """Algorithms change layers; what a model of Transformers computes in evaluation may be something else then."""

    @pytest.mark.parametrize(
        ("kind", "change", "layers"),
        [
            ("llama", lambda model: cf.apply_alibi(model, 64), "AlibiBias, NoRotaryEmbedding"),
            (
                "classifier",
                lambda model: cf.apply_stochastic_depth(model, {BertOutput: RULE}, "block", 0.3),
                "StochasticBertOutput",
            ),
            ("llama", lambda model: cf.apply_chunked_cross_entropy(model, softcap=30.0), "ChunkedHead"),
            ("llama", cf.apply_qk_norm, "NormalizedHeads"),
            ("llama", cf.apply_gated_attention, "GatedLlamaAttention"),
        ],
    )
    def test_other_outputs_raise(self, kind, change, layers, make_model, save):
        """The error names the layers, which have no weights of other names."""
        bare = make_model(kind)
        change(bare)
        folder = save(HuggingFaceModel(bare))

        with pytest.raises(ValueError, match=f"a model of Transformers cannot represent: {layers}. Build the model"):
            HuggingFaceModel.hf_from_composer_checkpoint(folder)

    @pytest.mark.parametrize(
        "change",
        [
            lambda model: cf.apply_stochastic_depth(model, {BertOutput: RULE}, "sample", 0.3),
            lambda model: cf.apply_stochastic_depth(model, {BertOutput: RULE}, "block", 0.0),
            lambda model: cf.apply_chunked_cross_entropy(model, head="classifier", z_loss=1e-4),
            cf.apply_neftune,
            lambda model: cf.apply_activation_checkpointing(model, BertOutput),
        ],
    )
    def test_layers_that_change_only_training(self, change, make_model, make_batch, save):
        """The model in evaluation is that of the checkpoint."""
        bare, batch = make_model("classifier"), make_batch("classifier")
        change(bare)
        folder = save(HuggingFaceModel(bare))

        model, _ = HuggingFaceModel.hf_from_composer_checkpoint(folder)

        torch.testing.assert_close(_logits(model, batch), _logits(bare, batch))


class TestErrors:
    def test_tied_weights_of_an_untied_checkpoint(self, make_model, save):
        """Of two saved tensors neither overwrites the other."""
        folder = save(HuggingFaceModel(make_model("llama")))

        with pytest.raises(ValueError, match="tied, and the saved weights of both differ: one would overwrite"):
            HuggingFaceModel.hf_from_composer_checkpoint(folder, model_config_kwargs={"tie_word_embeddings": True})

    def test_no_checkpoint(self, tmp_path):
        """The error states which files the folder lacks."""
        (tmp_path / "state.json").write_text("{}")

        with pytest.raises(
            FileNotFoundError, match=r"must be a checkpoint: .* It has no manifest.json and no model.safetensors\."
        ):
            HuggingFaceModel.hf_from_composer_checkpoint(tmp_path)

    def test_other_model(self, make_model, save):
        """A checkpoint of a non-Transformers model raises."""
        folder = save(HuggingFaceModel(make_model("gpt2")), integrations={})

        with pytest.raises(ValueError, match=r"contains no description of a Transformers model"):
            HuggingFaceModel.hf_from_composer_checkpoint(folder)

    def test_missing_weights(self, make_model, save):
        """Missing and unexpected weights are listed."""
        folder = save(HuggingFaceModel(make_model("llama")), without=["model.lm_head.weight"])
        with pytest.raises(ValueError, match=r"do not fit LlamaForCausalLM: missing lm_head.weight, unknown .* none\."):
            HuggingFaceModel.hf_from_composer_checkpoint(folder)

        model = HuggingFaceModel(make_model("llama"))
        model.model.extra = torch.nn.Linear(1, 1, bias=False)
        with pytest.raises(ValueError, match=r"missing none, .* shape extra.weight\. If an algorithm changed"):
            HuggingFaceModel.hf_from_composer_checkpoint(save(model))

    @pytest.mark.parametrize("name", ["../evil.txt", "/tmp/evil.txt", "a/../../evil.txt", "..\\evil.txt", ""])
    def test_files_outside_the_folder(self, name, make_model, tokenizer, save):
        """A checkpoint cannot write files elsewhere."""
        integrations = HuggingFaceModel(make_model("gpt2"), tokenizer).get_metadata()
        integrations["huggingface"]["tokenizer"]["files"][name] = "evil"
        folder = save(HuggingFaceModel(make_model("gpt2")), integrations=integrations)

        with pytest.raises(ValueError, match=r"names a file outside its folder"):
            HuggingFaceModel.hf_from_composer_checkpoint(folder)

    @pytest.mark.parametrize("name", ["os.system", "pipeline", "GPT2Config", "transformers.utils"])
    def test_non_model_classes(self, name, make_model, save):
        """Only Transformers models are built by name."""
        integrations = HuggingFaceModel(make_model("gpt2")).get_metadata()
        integrations["huggingface"]["model"]["class"] = name
        folder = save(HuggingFaceModel(make_model("gpt2")), integrations=integrations)

        with pytest.raises(ValueError, match=rf"{name} is not a model of transformers"):
            HuggingFaceModel.hf_from_composer_checkpoint(folder)

    def test_code_in_a_checkpoint(self, make_model, save, tmp_path):
        """A configuration that refers to its own code does not execute it."""
        integrations = HuggingFaceModel(make_model("gpt2")).get_metadata()
        files = integrations["huggingface"]["model"]["files"]
        config = json.loads(files["config.json"]) | {"model_type": "x", "auto_map": {"AutoConfig": "evil.Evil"}}
        files["config.json"] = json.dumps(config)
        files["evil.py"] = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n"
        folder = save(HuggingFaceModel(make_model("gpt2")), integrations=integrations)

        with pytest.raises(ValueError, match="trust_remote_code"):
            HuggingFaceModel.hf_from_composer_checkpoint(folder)

        assert not (tmp_path / "ran").exists()


class TestSavePretrained:
    @pytest.mark.parametrize("kind", KINDS)
    def test_same_logits(self, kind, make_model, make_batch, tokenizer, tmp_path):
        """Transformers reads the folder: the class, bit-identical logits, and the tokenizer."""
        bare, batch = make_model(kind), make_batch(kind)
        HuggingFaceModel(bare, tokenizer).save_pretrained(tmp_path)

        again = type(bare).from_pretrained(tmp_path)

        assert torch.equal(_logits(again, batch), _logits(bare, batch))
        assert type(tokenizer).from_pretrained(tmp_path).get_vocab() == tokenizer.get_vocab()

    def test_changed_layers(self, make_model, tmp_path):
        """Layers that Transformers cannot represent raise, and nothing is written."""
        model = HuggingFaceModel(make_model("classifier"))
        cf.apply_stochastic_depth(model, {BertOutput: RULE}, "block", 0.3)

        with pytest.raises(ValueError, match="cannot represent: StochasticBertOutput"):
            model.save_pretrained(tmp_path / "saved")

        assert not (tmp_path / "saved").exists()


class TestExport:
    @pytest.mark.parametrize("kind", ["classifier", "gpt2", "t5"])
    def test_from_pretrained_reads_it(self, kind, make_model, make_batch, tokenizer, lines, save, tmp_path):
        """Transformers loads the export with equal logits and tokens."""
        import transformers

        bare, batch = make_model(kind), make_batch(kind)
        folder = save(HuggingFaceModel(bare, tokenizer))

        write_huggingface_pretrained_from_composer_checkpoint(folder, tmp_path / "exported")

        again = type(bare).from_pretrained(tmp_path / "exported", local_files_only=True)
        assert torch.equal(_logits(again, batch), _logits(bare, batch))
        tokens = transformers.AutoTokenizer.from_pretrained(tmp_path / "exported", local_files_only=True)
        assert tokens(lines[:3])["input_ids"] == tokenizer(lines[:3])["input_ids"]
