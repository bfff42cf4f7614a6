"""Gyro dropout: train a fixed set of subnetworks instead of ever new ones (Lee et al., MLSys 2022)."""

from __future__ import annotations

from torch import nn

from composer.functional.layers.gyro_dropout import GyroDropout
from composer.functional.surgery.architectures import find_attention_dropouts
from composer.functional.surgery.replace import SurgeryReport, replace_module_classes

__all__ = ["apply_gyro_dropout"]


def apply_gyro_dropout(
    model: nn.Module, iters_per_epoch: int, max_epoch: int, p: float, sigma: int, tau: int
) -> SurgeryReport:
    """Put :class:`GyroDropout` in the place of every ``torch.nn.Dropout``, in place (Lee et al., MLSys 2022).

    ``sigma`` masks are chosen at the start; ``tau`` are in use at a time, each for a part of the batch, and for
    ``iters_per_epoch * max_epoch * tau / sigma`` forward passes. The layers draw their seeds from torch's default CPU
    generator. There are no parameters, so optimizers need not be told; the state dict gets two numbers a layer.

    Left alone are layers with ``p=0``, which the model's author switched off, subclasses with a ``forward`` of their
    own or an exchanged one, and dropout by a function: inside ``torch.nn.MultiheadAttention``, and that of attention
    weights in BERT, GPT-2 and Llama of Transformers, which read no more than ``p`` of their ``torch.nn.Dropout``. The
    second time nothing is left to replace. ``torch.export`` works in evaluation.

    Args:
        model: The model; **changed in place**.
        iters_per_epoch: Forward passes of training in an epoch, at least 1: batches times microbatches.
        max_epoch: Epochs of training, at least 1.
        p: Probability of dropping a neuron, at least 0 and below 1; for all layers, whatever theirs was.
        sigma: The number of masks, at least ``tau``.
        tau: The number of masks in use at a time, at least 1 and at most the (micro)batch size.

    Returns:
        A report of what was replaced; empty if nothing matched.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: A number is not as above, or the model itself is a dropout.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        >>> print(apply_gyro_dropout(model, iters_per_epoch=196, max_epoch=100, p=0.5, sigma=256, tau=16))
        1 module replaced
          1: Dropout -> GyroDropout
    """
    GyroDropout(iters_per_epoch, max_epoch, p, sigma, tau)  # says what is wrong before anything is changed

    def replace(dropout: nn.Dropout, _: int) -> nn.Module | None:
        if dropout in read_by_attention or not _is_plain(dropout):
            return None
        return GyroDropout(iters_per_epoch, max_epoch, p, sigma, tau)

    if _is_plain(model):
        raise ValueError(
            "model must hold the layers to be replaced, got a Dropout that is one itself. "
            "Wrap it: torch.nn.Sequential(model)."
        )
    read_by_attention = find_attention_dropouts(model) if isinstance(model, nn.Module) else set()
    return replace_module_classes(model, {nn.Dropout: replace})


def _is_plain(module: nn.Module) -> bool:
    if not isinstance(module, nn.Dropout) or "forward" in vars(module):
        return False
    return type(module).forward is nn.Dropout.forward and module.p > 0
