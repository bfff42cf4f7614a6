"""A Transformers model and its tokenizer as plain data, and their reconstruction."""

from __future__ import annotations

import base64
import json
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch

from composer import functional as cf
from composer.functional.checks import few
from composer.functional.dtensors import is_dtensor, rank_and_processes, reshard
from composer.functional.surgery.activation_checkpointing import CheckpointedBlock
from composer.models._huggingface_peft import base_of, is_peft_model, with_adapters

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from peft import PeftModel
    from torch import Tensor, nn
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# In evaluation they compute what the replaced layers compute.
_PLAIN = (
    *(cf.GhostBatchNorm1d, cf.GhostBatchNorm2d, cf.GhostBatchNorm3d),
    *(cf.LowPrecisionGroupNorm, cf.LowPrecisionLayerNorm, cf.PatchDropout),
    *(CheckpointedBlock, cf.NoisyEmbedding),
)


def describe(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase | None, adapters: Mapping[str, bool]
) -> dict[str, Any]:
    """Return the data that is needed, besides the weights, to reconstruct both.

    Args:
        model: The model.
        tokenizer: The tokenizer, or None.
        adapters: Of a model with adapters, whether these are ``"saved_alone"``, and exported ``"with_embeddings"``.

    Returns:
        Strings in lists and dictionaries: the name of the class, and the files that ``save_pretrained`` would write for
        the configuration, the tokenizer and the adapters. Files that are not text are encoded in base64. ``"changed"``
        lists the classes of layers with which the model computes other outputs in evaluation than its class does.
    """
    base = base_of(model)
    described: dict[str, Any] = {"model": {"class": type(base).__name__}, "tokenizer": None, "peft": None}
    generation = getattr(base, "can_generate", bool)() and getattr(base, "generation_config", None)
    described["model"] |= {"files": _files_of(base.config, generation), "changed": changed_layers(base)}
    if tokenizer is not None:
        described["tokenizer"] = {"class": type(tokenizer).__name__, "files": _files_of(tokenizer)}
    if is_peft_model(model):
        described["peft"] = {"adapters": {name: _files_of(one) for name, one in model.peft_config.items()}, **adapters}
    return described


def rebuild_tokenizer(
    hf_state: Mapping[str, Any], trust_remote_code: bool = False, tokenizer_save_dir: str | Path | None = None
) -> PreTrainedTokenizerBase | None:
    """Reconstruct the tokenizer that was saved with a model.

    Args:
        hf_state: ``get_metadata()["huggingface"]``, or ``["state"]["integrations"]["huggingface"]`` of a file.
        trust_remote_code: Whether code that was saved with the tokenizer may run.
        tokenizer_save_dir: A folder in which to save the tokenizer; it is not saved if ``None``.

    Returns:
        The tokenizer, or ``None`` if none was saved.

    Raises:
        ValueError: The state was not written by this library, or needs code that may not run.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415 (an extra)

    if not hf_state.get("tokenizer"):
        return None
    saved = hf_state["tokenizer"]
    with _folder_with(saved["files"] if "files" in saved else _files_of_contents(saved)) as folder:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, local_files_only=True
        )
        tokenizer.name_or_path = ""  # not the temporary folder
        # Written by the tokenizer, because the checkpoint must not determine which files are written.
        if tokenizer_save_dir is not None:
            tokenizer.save_pretrained(str(tokenizer_save_dir))
    return tokenizer


def rebuild_model(
    hf_state: Mapping[str, Any],
    loaded_state_dict: Mapping[str, Tensor],
    model_instantiation_class: type | str | None = None,
    model_config_kwargs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    base_model: str | Path | None = None,
) -> PreTrainedModel | PeftModel:
    """Reconstruct a saved model.

    Args:
        hf_state: ``get_metadata()["huggingface"]``.
        loaded_state_dict: The weights by their names in the Transformers model, without the prefix ``"model."`` of a
            wrapper.
        model_instantiation_class: Another class to build: a class of Transformers or your own, an ``AutoModelFor…``,
            or a name in ``transformers``; the class of the saved model if ``None``.
        model_config_kwargs: Changes to the configuration.
        trust_remote_code: Whether code that was saved with the configuration may run.
        base_model: Folder or name of the base model, if only the adapters were saved. What is saved does not choose it.

    Returns:
        The model, in evaluation mode.

    Raises:
        ValueError: The class is not one of Transformers', the weights do not fit, or only adapters were saved and
            there is no ``base_model``; or algorithms have changed layers in a way that Transformers cannot represent.
    """
    if changed := hf_state["model"].get("changed"):
        raise ValueError(
            f"The saved model has layers that a model of Transformers cannot represent: {', '.join(changed)}. Build "
            "the model, change it by the same algorithm, and load the checkpoint into it."
        )
    cls = _model_class(hf_state["model"]["class"] if model_instantiation_class is None else model_instantiation_class)
    with _folder_with(hf_state["model"]["files"]) as folder:
        config = _load_config(cls, folder, trust_remote_code=trust_remote_code)
        for name, value in (model_config_kwargs or {}).items():
            setattr(config, name, value)
        if hf_state.get("peft"):
            return _rebuild_adapters(hf_state["peft"], loaded_state_dict, cls, config, folder, base_model)
        model = _build(cls, config, folder)
    if model_instantiation_class is None:
        _load_weights(model, loaded_state_dict)
    else:
        _load_shared_weights(model, loaded_state_dict)
    return model


def write_pretrained(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: str | Path,
    weights: Mapping[str, Tensor] | None = None,
    *,
    with_embeddings: bool = False,
) -> None:
    """Write the files that ``from_pretrained`` reads: of a model with adapters those of the adapters.

    Args:
        model: The model.
        tokenizer: The tokenizer, or None.
        folder: Where; files of an earlier save are replaced.
        weights: The weights by their names in the model; its own if None.
        with_embeddings: Whether the embeddings are saved with adapters, as those of the base model have another size.
    """
    options: dict[str, Any] = {} if weights is None else {"state_dict": dict(weights)}
    if is_peft_model(model):
        options["save_embedding_layers"] = with_embeddings
    model.save_pretrained(str(folder), **options)
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))


@torch.no_grad()
def complete_weights(module: nn.Module, prefix: str) -> dict[str, Tensor] | None:
    """Return the weights whose names begin with ``prefix``, without it; all processes of a sharded model call it.

    Returns:
        Complete tensors, sharded ones on the CPU, and tied ones once in memory. None in all processes but the first.
    """
    reshard(module)  # after the forward pass of an evaluation
    is_first = rank_and_processes()[0] == 0
    named = {name: one for name, one in module.state_dict(keep_vars=True).items() if name.startswith(prefix)}
    complete: dict[int, Tensor] = {}
    for one in named.values():
        if is_dtensor(one) and id(one) not in complete:
            gathered = one.full_tensor()  # one after the other
            complete[id(one)] = gathered.cpu() if is_first else one
    return {name.removeprefix(prefix): complete.get(id(one), one) for name, one in named.items()} if is_first else None


def changed_layers(model: PreTrainedModel) -> list[str]:
    """Return the classes of layers of this library with which the model is not its class in evaluation."""
    return sorted({type(layer).__name__ for layer in model.modules() if _is_changed(layer)})


def _is_changed(layer: nn.Module) -> bool:
    if isinstance(layer, cf.StochasticDepthBlock):
        return layer.stochastic_method == "block" and layer.drop_rate > 0
    if isinstance(layer, cf.ChunkedHead):
        return layer.softcap is not None
    return type(layer).__module__.startswith("composer.functional.") and not isinstance(layer, _PLAIN)


def _files_of(*objects: Any) -> dict[str, Any]:
    """Return the files that the objects' ``save_pretrained`` writes."""
    files: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for each in objects:
            if hasattr(each, "save_pretrained"):  # of a model that is none of Transformers, it is any object
                each.save_pretrained(folder)
        for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
            name, content = path.relative_to(folder).as_posix(), path.read_bytes()
            try:
                files[name] = content.decode("utf-8")
            except UnicodeDecodeError:
                files[name] = {"base64": base64.b64encode(content).decode("ascii")}
    return files


def from_composer(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a model in a file of MosaicML Composer as :func:`describe` returns it."""
    config, adapters = saved["model"]["config"], saved["model"].get("peft_config")
    described = {"class": config["class"].rpartition(".")[2], "files": _files_of_contents({"config.json": config})}
    if adapters:
        raise ValueError("it has adapters: load it into a HuggingFaceModel with them, by Trainer(load_path=...)")
    return {"model": described, "tokenizer": saved.get("tokenizer")}


def _files_of_contents(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Return files of which MosaicML Composer has saved the data of JSON, lists of lines, or the text."""
    files = {}
    for name, one in contents.items():
        content, suffix = one["content"], one["file_extension"]
        text = "\n".join(content) if suffix == ".txt" else content
        files[name] = json.dumps(content) if suffix == ".json" else text
    return files


@contextmanager
def _folder_with(files: Mapping[str, Any]) -> Iterator[Path]:
    """Write files into a temporary folder."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name, content in files.items():
            # The names are read from a checkpoint, which must not determine where files are written.
            parts = PurePosixPath(name).parts
            if not parts or ".." in parts or PurePosixPath(name).is_absolute() or "\\" in name or ":" in name:
                raise ValueError(
                    f"The saved data names a file outside its folder: {name!r}. It was not written by this library."
                )
            path = Path(folder, *parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else base64.b64decode(content["base64"]))
        yield Path(folder)


def _model_class(named: Any) -> Any:
    """Return a class of Transformers by name, or the class that is passed."""
    import transformers  # noqa: PLC0415 (an extra)

    if not isinstance(named, str | type):
        raise TypeError(f"model_instantiation_class must be a class or a name in transformers, got {named!r}.")
    cls = getattr(transformers, named.removeprefix("transformers."), None) if isinstance(named, str) else named
    if not isinstance(cls, type) or not (issubclass(cls, transformers.PreTrainedModel) or hasattr(cls, "from_config")):
        raise ValueError(
            f"{named} is not a model of transformers {transformers.__version__}. "
            "If it is your own PreTrainedModel, pass it as model_instantiation_class. Construct any other model, "
            "wrap it in HuggingFaceModel(...), and load the checkpoint by Trainer(load_path=...)."
        )
    return cls


def _load_config(cls: Any, folder: Path, *, trust_remote_code: bool) -> PreTrainedConfig:
    from transformers import AutoConfig  # noqa: PLC0415 (an extra)

    # Your own class may have its own configuration class, which is not registered in Transformers.
    own = getattr(cls, "config_class", None)
    model_type = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    if own is not None and getattr(own, "model_type", None) == model_type:
        return own.from_pretrained(str(folder), local_files_only=True)
    return AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)


def _build(cls: Any, config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    from transformers import GenerationConfig  # noqa: PLC0415 (an extra)

    make = getattr(cls, "from_config", cls)  # AutoModelFor… cannot be called
    model: PreTrainedModel = make(config)
    if (folder / "generation_config.json").exists() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    return model.eval()


def _rebuild_adapters(
    described: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    cls: Any,
    config: PreTrainedConfig,
    folder: Path,
    base_model: str | Path | None,
) -> PeftModel:
    """Add adapters with their weights to the base model, which was saved with them or is read from a folder."""
    from peft import PeftConfig  # noqa: PLC0415 (an extra)

    configs: dict[str, PeftConfig] = {}
    for name, files in described["adapters"].items():
        with _folder_with(files) as adapter:
            configs[name] = PeftConfig.from_pretrained(str(adapter))
    first, *others = configs
    alone = described["saved_alone"]
    if alone and base_model is None:
        raise ValueError(
            "The checkpoint holds adapters alone, trained on the base model "
            f"{configs[first].base_model_name_or_path!r}. Pass its folder or name as base_model=..., as a checkpoint "
            "does not choose what is read; or wrap the model in HuggingFaceModel(model, peft_config=...) and load the "
            "checkpoint into it."
        )
    base = _load_base(cls, config, base_model) if alone and base_model else _build(cls, config, folder)
    configs[first].base_model_name_or_path = None  # PEFT sets that of the base, and warns if it was another
    model = with_adapters(base, configs[first], first)
    for name in others:
        model.add_adapter(name, configs[name])
    _load_weights(model, weights, has_base=alone)
    return model.eval()


def _load_base(cls: Any, config: PreTrainedConfig, base_model: str | Path) -> PreTrainedModel:
    base: PreTrainedModel = cls.from_pretrained(base_model, use_safetensors=True)
    vocab_size = getattr(config, "vocab_size", None)
    if vocab_size is not None and vocab_size != base.get_input_embeddings().weight.shape[0]:
        base.resize_token_embeddings(vocab_size, mean_resizing=False)
    return base


@torch.no_grad()
def _load_weights(model: PreTrainedModel | PeftModel, weights: Mapping[str, Tensor], *, has_base: bool = False) -> None:
    """Copy the weights into the model, and convert it to their dtypes.

    Raises:
        ValueError: A weight has another shape, is missing (and is not tied to an existing one), or is unexpected.
    """
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in weights:
            # load_state_dict would convert the saved values to the dtype of a new model, which is float32.
            parameter.data = parameter.data.to(weights[name].dtype)
    own = model.state_dict()
    wrong = [name for name, value in weights.items() if name not in own or own[name].shape != value.shape]
    # Tied weights are saved once, under one of their names; the others share its memory.
    loaded: dict[int, str] = {}
    for name in weights.keys() & own.keys():
        other = loaded.setdefault(own[name].data_ptr(), name)
        if own[name].numel() and not torch.equal(weights[other], weights[name]):
            raise ValueError(
                f"{type(model).__name__} has {other} and {name} tied, and the saved weights of both differ: one would "
                "overwrite the other. Set tie_word_embeddings=False in the configuration."
            )
    missing = [name for name, value in own.items() if name not in weights and value.data_ptr() not in loaded]
    if wrong or (missing and not has_base):
        raise ValueError(
            f"The saved weights do not fit {type(model).__name__}: missing {few(missing)}, unknown or of another "
            f"shape {few(wrong)}. If an algorithm changed the model's layers, it is no longer a model of "
            "Transformers: build it, change it in the same way, and load the checkpoint into it."
        )
    model.load_state_dict(dict(weights), strict=False)


def _load_shared_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Copy the weights that a model of another class has, too, and warn about the others.

    Raises:
        ValueError: There are none.
    """
    prefix, own = f"{model.base_model_prefix}.", model.state_dict()
    if not any(name.startswith(prefix) for name in own):  # the model without a head has no prefix
        weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    elif not any(name.startswith(prefix) for name in weights):
        weights = {prefix + name: value for name, value in weights.items()}
    shared = {name: value for name, value in weights.items() if name in own and own[name].shape == value.shape}
    loaded = {own[name].data_ptr() for name in shared}
    new = [name for name, value in own.items() if name not in shared and value.data_ptr() not in loaded]
    if not shared:
        raise ValueError(
            f"{type(model).__name__} shares no weight with the checkpoint, which has {few(list(weights))}. Pass a "
            "class of the same architecture as model_instantiation_class."
        )
    if new or len(shared) < len(weights):
        warnings.warn(
            f"{type(model).__name__} is not the class that was saved. New weights, to be trained: {few(new)}. Saved "
            f"weights that it does not have: {few([name for name in weights if name not in shared])}.",
            stacklevel=5,
        )
    _load_weights(model, {**{name: own[name] for name in new}, **shared})
