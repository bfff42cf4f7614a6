"""Gyro dropout: train a fixed set of subnetworks (Lee et al., MLSys 2022)."""

from __future__ import annotations

from torch import nn

from composer.functional.checks import check_modules
from composer.functional.layers.gyro_dropout import GyroDropout
from composer.functional.surgery.activation_checkpointing import CheckpointedBlock, find_recomputed
from composer.functional.surgery.architectures import find_attention_dropouts
from composer.functional.surgery.replace import SurgeryReport, replace_layers


def apply_gyro_dropout(
    model: nn.Module, iters_per_epoch: int, max_epoch: int, p: float, sigma: int, tau: int
) -> SurgeryReport:
    """Replace every ``torch.nn.Dropout`` by :class:`GyroDropout`, in place (Lee et al., MLSys 2022).

    ``sigma`` masks are drawn at the start. ``tau`` of them are in use at a time, each for a part of the batch, for
    ``iters_per_epoch * max_epoch * tau / sigma`` forward passes. The layers draw their seeds from torch's default CPU
    generator. They have no parameters, so optimizers remain valid; the state dict gets two numbers per layer.

    Not replaced are layers with ``p=0``, subclasses and instances with a ``forward`` of their own, and functional
    dropout: inside ``torch.nn.MultiheadAttention``, and of attention weights in BERT, GPT-2 and Llama of Transformers,
    which only read ``p`` of their ``torch.nn.Dropout``. A second call changes nothing. ``torch.export`` works in
    evaluation mode.

    Args:
        model: The model; **changed in place**.
        iters_per_epoch: Forward passes of training in an epoch, at least 1: batches times microbatches.
        max_epoch: Epochs of training, at least 1.
        p: Probability of dropping a neuron, in ``[0, 1)``, for all layers, whatever their former ``p``.
        sigma: The number of masks, at least ``tau``.
        tau: The number of masks in use at a time, at least 1 and at most the (micro)batch size.

    Returns:
        A report of the replaced layers; empty if there are none.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: A number is out of range, the model itself is a dropout, or it computes layers again in the backward
            pass (gradient checkpointing), which would count forward passes twice and take other masks.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        >>> print(apply_gyro_dropout(model, iters_per_epoch=196, max_epoch=100, p=0.5, sigma=256, tau=16))
        1 module replaced
          1: Dropout -> GyroDropout
    """
    GyroDropout(iters_per_epoch, max_epoch, p, sigma, tau)  # checks the numbers before anything is changed
    check_modules(model=model)
    check_not_recomputed(model)
    read_by_attention = find_attention_dropouts(model)

    def is_wanted(module: nn.Module) -> bool:
        if not isinstance(module, nn.Dropout) or "forward" in vars(module) or module in read_by_attention:
            return False
        return type(module).forward is nn.Dropout.forward and module.p > 0

    def replace(_: nn.Dropout, __: int) -> nn.Module:
        return GyroDropout(iters_per_epoch, max_epoch, p, sigma, tau)

    return replace_layers(model, {nn.Dropout: replace}, is_wanted)


def check_not_recomputed(model: nn.Module) -> None:
    """Raise a ValueError for a model with gradient checkpointing."""
    blocks = (name for name, module in model.named_modules() if isinstance(module, CheckpointedBlock))
    name = next(blocks, None) or find_recomputed(model)
    if name is not None:
        raise ValueError(
            f"model must not use gradient checkpointing with GyroDropout, as {name!r} does: a forward pass in the "
            "backward pass would take other masks. Disable one of the two."
        )
