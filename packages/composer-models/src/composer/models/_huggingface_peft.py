"""Adapters of PEFT in a wrapped model: adding them, separating them from the base model, and saving them alone."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch.nn.functional import pad

from composer.functional.transformers_loss import IGNORED
from composer.models.names import import_extra

if TYPE_CHECKING:
    from collections.abc import Set

    from peft import PeftConfig, PeftModel
    from torch import Tensor, nn
    from transformers import PreTrainedModel


def is_peft_model(model: object) -> bool:
    """Return whether a model has adapters; this does not import PEFT, which a model with adapters has imported."""
    return any(cls.__name__ == "PeftModel" and cls.__module__.startswith("peft.") for cls in type(model).__mro__)


def base_of(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Return the Transformers model without the wrapper of PEFT."""
    return model.get_base_model() if is_peft_model(model) else model


def add_adapters(model: PreTrainedModel, config: PeftConfig) -> PeftModel:
    """Return the model with new adapters; only these are trainable.

    A base model that is entirely in evaluation mode, as ``from_pretrained`` returns it, is put into training mode, as
    the adapters are, except for norms with running statistics. Other modes stay as they are.

    Raises:
        ModuleNotFoundError: PEFT is not installed.
        TypeError: ``config`` is not a configuration of PEFT.
        ValueError: The model already has adapters.
    """
    peft = import_extra("peft", needed="peft_config needs PEFT", extra="peft")
    if not isinstance(config, peft.PeftConfig):
        raise TypeError(
            f"peft_config must be a configuration such as peft.LoraConfig(...), got {type(config).__name__}."
        )
    if is_peft_model(model):
        raise ValueError("model has adapters of PEFT already: omit peft_config, or pass the model without them.")
    for name in ("peft_type", "task_type"):  # which PEFT has in capitals
        if isinstance(given := getattr(config, name), str):
            setattr(config, name, given.upper())
    is_evaluating = not any(module.training for module in model.modules())
    adapted = with_adapters(model, config, "default")
    if is_evaluating:
        norms = [module for module in model.modules() if getattr(module, "running_mean", None) is not None]
        adapted.train()
        for norm in norms:
            norm.eval()
    return adapted


def with_adapters(model: PreTrainedModel, config: PeftConfig, name: str) -> PeftModel:
    """Add the first adapters to a model."""
    import peft  # noqa: PLC0415 (an extra)

    with warnings.catch_warnings():
        # PEFT uses a former name of a Transformers attribute.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        adapted: PeftModel = peft.get_peft_model(model, config, adapter_name=name)
    return adapted


def behind_prompt(model: PeftModel, labels: Tensor) -> Tensor:
    """Return labels with those of the virtual tokens before them, which do not count, if these have logits.

    Args:
        model: A model with adapters, such as one that trains a prompt.
        labels: Ids ``(N, L)`` or probabilities ``(N, L, C)``, in which rows of zeros do not count.
    """
    config: Any = model.active_peft_config
    has_logits = config.is_prompt_learning and config.task_type in {"CAUSAL_LM", "TOKEN_CLS"}
    if not has_logits or config.peft_type in {"PREFIX_TUNING", "CARTRIDGE"}:  # these are in the cache
        return labels
    count = config.num_virtual_tokens
    return pad(labels, (0, 0, count, 0)) if labels.is_floating_point() else pad(labels, (count, 0), value=IGNORED)


def save_adapters_alone(module: Any) -> None:
    """Restrict the state dict of a module, saved and loaded, to what the base model of ``module.model`` lacks.

    These are the adapters, layers that are added to the model later, and what is trained besides.
    """
    for layer in module.model.modules():
        layer.is_of_base = True  # modules remain when weights are sharded or renamed
    module.register_state_dict_post_hook(_keep_own)
    module.register_load_state_dict_post_hook(_allow_missing_base)


def _keep_own(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: object) -> None:
    kept = _saved_names(module, {name.removeprefix(prefix): value for name, value in state_dict.items()})
    for name in [name for name in state_dict if name.startswith(prefix)]:
        if name.removeprefix(prefix) not in kept:
            del state_dict[name]


def _allow_missing_base(module: nn.Module, incompatible_keys: Any) -> None:
    model: Any = module.model
    everything = {f"model.{name}": value for name, value in model.state_dict(keep_vars=True).items()}
    base = everything.keys() - _saved_names(module, everything)
    # Inside another module, names have a prefix that is unknown here.
    missing = [name for name in incompatible_keys.missing_keys if _ends_with_one_of(name, base)]
    if len(missing) == len(base):  # if only some are missing, it is an incomplete state of the entire model
        incompatible_keys.missing_keys[:] = [
            name for name in incompatible_keys.missing_keys if name not in set(missing)
        ]


def _saved_names(module: nn.Module, state_dict: dict[str, Any]) -> set[str]:
    """Return the names in the state of ``module`` of the tensors that are saved.

    PEFT renames the tensors that it saves for the adapters in ``model``, so they are compared by identity.
    """
    from peft import get_peft_model_state_dict  # noqa: PLC0415 (an extra)

    model: Any = module.model
    inside = {name.removeprefix("model."): value for name, value in state_dict.items() if name.startswith("model.")}
    saved: set[int] = set()
    for adapter in model.peft_config:
        of_adapter = get_peft_model_state_dict(model, inside, adapter, save_embedding_layers=False)
        saved |= {id(value) for value in of_adapter.values()}
    resized = set(getattr(module, "resized_embeddings", ()))
    own = {name for name, one in model.named_parameters(remove_duplicate=False) if one.requires_grad}
    own |= {
        f"{path}.{name}"
        for path, layer in model.named_modules(remove_duplicate=False)
        if not getattr(layer, "is_of_base", False)
        for name in (*vars(layer)["_parameters"], *vars(layer)["_buffers"])
    }
    return {
        f"model.{name}"
        for name, value in inside.items()
        if id(value) in saved
        or name in own
        or name.startswith("prompt_encoder.")  # PEFT saves the embeddings of prompts under another name
        or _ends_with_one_of(name.replace(".base_layer.", "."), resized)
    }


def _ends_with_one_of(name: str, endings: Set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[start:]) in endings for start in range(len(parts)))
