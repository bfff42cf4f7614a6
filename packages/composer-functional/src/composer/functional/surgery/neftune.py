"""NEFTune: let a model's embedding add noise in training (Jain et al. 2023, arXiv:2310.05914)."""

from __future__ import annotations

from torch import nn

from composer.functional.checks import check_modules
from composer.functional.layers.noisy_embedding import NoisyEmbedding
from composer.functional.surgery.replace import SurgeryReport, replace_layers


def apply_neftune(model: nn.Module, embedding: str | None = None) -> SurgeryReport:
    """Replace a model's embedding of tokens by a :class:`NoisyEmbedding`, in place (arXiv:2310.05914).

    It adds the noise that is assigned to its attribute ``noise`` for each batch, see :func:`draw_embedding_noise`. The
    weight keeps its name, also where the head shares it, so optimizers remain valid. A second call changes nothing.

    Args:
        model: The model; **changed in place**.
        embedding: The name of the ``torch.nn.Embedding``; if ``None``, that which ``get_input_embeddings()`` of a model
            of Transformers, or of its encoder if it has a decoder, too, returns, or else the only one.

    Returns:
        A report of the replaced embedding.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: The embedding cannot be found, or is the model itself.

    Example:
        >>> model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 100))
        >>> print(apply_neftune(model))
        1 module replaced
          0: Embedding -> NoisyEmbedding
    """
    check_modules(model=model)
    found = find_embedding(model, embedding)
    is_new = not isinstance(found, NoisyEmbedding)
    size = next(module.embedding_dim for module in found.modules() if isinstance(module, nn.Embedding))

    def replace(layer: nn.Module, _: int) -> nn.Module:
        return NoisyEmbedding.take_over(layer, noise=None, embedding_dim=size)

    return replace_layers(model, {type(found): replace}, lambda layer: is_new and layer is found)


def find_embedding(model: nn.Module, name: str | None) -> nn.Module:
    """Return the embedding of tokens with this name, or that of a model of Transformers, or the only one.

    Around that of Transformers may be a module of PEFT, which trains a copy of it, or some of its rows.

    Raises:
        ValueError: There is none, or there are several.
    """
    all_of_them = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    if name is not None:
        found = all_of_them.get(name)
    else:
        methods = (getattr(_encoder_of(module), "get_input_embeddings", None) for module in model.modules())
        own = next((method() for method in methods if method is not None), None)
        found = next(iter(all_of_them.values())) if own is None and len(all_of_them) == 1 else own
    if found is None or not any(isinstance(module, nn.Embedding) for module in found.modules()):
        raise ValueError(
            f"embedding must be the name of a torch.nn.Embedding of tokens, got {name!r}, which determines none. "
            f"The embeddings of {type(model).__name__} are {', '.join(map(repr, all_of_them)) or 'none'}."
        )
    return found


def _encoder_of(module: nn.Module) -> nn.Module:
    """Return the encoder of a model of Transformers with an encoder and a decoder, which embed tokens by themselves."""
    get_encoder = getattr(module, "get_encoder", None)
    has_both = getattr(getattr(module, "config", None), "is_encoder_decoder", False) is True
    encoder: nn.Module = get_encoder() if get_encoder is not None and has_both else module
    return encoder
