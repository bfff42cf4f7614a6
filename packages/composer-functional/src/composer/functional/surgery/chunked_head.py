"""Compute the loss of a model's head in chunks of logits (arXiv:2411.09009)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from composer.functional.checks import check_modules
from composer.functional.layers.chunked_head import ChunkedHead
from composer.functional.linear_cross_entropy import check_head_settings
from composer.functional.surgery.replace import SurgeryReport, as_class, is_untouched, replace_layers

if TYPE_CHECKING:
    from collections.abc import Iterator


def apply_chunked_cross_entropy(
    model: nn.Module,
    head: str | None = None,
    chunk_size: int | None = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> SurgeryReport:
    """Replace a model's head by a :class:`ChunkedHead`, in place (arXiv:2411.09009).

    In training the cross entropy is computed from the inputs of the head, a chunk of logits at a time. The head keeps
    its parameters and their names, also those that it shares with an embedding, so optimizers remain valid. A second
    call changes nothing.

    Args:
        model: The model; **changed in place**.
        head: The name of the head, a ``torch.nn.Linear``; if ``None``, that which ``get_output_embeddings()`` of a
            model of Transformers, or ``get_classifier()`` of one of timm, returns.
        chunk_size: The number of rows, such as tokens, whose logits are in memory at a time; see
            :func:`linear_cross_entropy`.
        z_loss: The factor of the z-loss in training.
        softcap: The limit of the logits, in training and in evaluation.

    Returns:
        A report of the replaced head.

    Raises:
        TypeError: ``model`` is not a module, or a number is none.
        ValueError: The head cannot be found, is the model itself or no plain ``torch.nn.Linear``, or a setting is
            out of range.

    Example:
        >>> model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 100))
        >>> print(apply_chunked_cross_entropy(model, head="1"))
        1 module replaced
          1: Linear -> ChunkedHead
    """
    check_modules(model=model)
    check_head_settings(chunk_size, z_loss, softcap)
    found = _find_head(model, head)
    has_loss = any(found in set(head.modules()) for head in _heads(model, "get_output_embeddings"))  # of Transformers

    def replace(linear: nn.Module, _: int) -> nn.Module:
        settings = {"chunk_size": chunk_size, "z_loss": z_loss, "softcap": softcap}
        return as_class(ChunkedHead, linear, **settings, has_loss_in_forward=has_loss)

    is_new = not isinstance(found, ChunkedHead)
    return replace_layers(model, {nn.Linear: replace}, lambda layer: is_new and layer is found)


def _find_head(model: nn.Module, name: str | None) -> nn.Module:
    if name is not None:
        found = dict(model.named_modules()).get(name)
    else:
        found = next(_heads(model, "get_output_embeddings", "get_classifier"), None)
    trained = getattr(found, "modules_to_save", None)  # PEFT's copy of the head, which is trained beside adapters
    if isinstance(trained, nn.ModuleDict) and len(trained) == 1:
        [found] = trained.values()
    is_plain = isinstance(found, nn.Linear) and type(found).forward is nn.Linear.forward and is_untouched(found)
    if found is None or not (is_plain or isinstance(found, ChunkedHead)):
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        raise ValueError(
            f"head must be the name of a plain torch.nn.Linear that computes the logits, got {name!r}, with which the "
            f"head of {type(model).__name__} is {'not found' if found is None else f'of {type(found)}'}. Its last "
            f"linear layers are {', '.join(map(repr, linear[-3:])) or 'none'}. Leave the head out of adapters."
        )
    return found  # type: ignore[no-any-return]


def _heads(model: nn.Module, *names: str) -> Iterator[nn.Module]:
    """Yield the modules that methods of a model's parts return."""
    methods = (getattr(module, name, None) for module in model.modules() for name in names)
    return (head for method in methods if method and isinstance(head := method(), nn.Module))
