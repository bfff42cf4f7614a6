"""Print the peaks of a plain loop and of the Trainer in MiB, on the stand-in for a CUDA device, by task.

Torch's cache of memory counts them as on a device: a kernel that does nothing has the same outputs and workspaces.
"""

import gc
import json

import torch
from torch.nn.functional import cross_entropy
from torchvision.models import resnet18
from transformers import GPT2Config, GPT2LMHeadModel

from composer import Callback, Trainer
from composer.models import ComposerClassifier, HuggingFaceModel

torch.backends.cudnn.enabled = False  # it has its own copy of the runtime
torch.backends.cuda.enable_cudnn_sdp(False)


class Reads(Callback):
    """May read the outputs at the end of a batch."""

    def batch_end(self, state, logger):
        """Do nothing."""


def images():
    """Return a model for the Trainer, its network, a batch, and the loss of the network."""
    network, batch = resnet18(), (torch.rand(16, 3, 128, 128), torch.randint(1000, (16,)))
    model = ComposerClassifier(network, num_classes=1000, train_metrics=[])
    return model, network, batch, lambda images, labels: cross_entropy(network(images), labels)


def texts():
    """Return the same of a language model, whose logits have most of the memory."""
    network = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=128, n_head=2, use_cache=False))
    batch = dict.fromkeys(("input_ids", "labels"), torch.randint(256, (8, 256)))
    return HuggingFaceModel(network, metrics=[]), network, batch, lambda *ids: network(ids[0], labels=ids[1]).loss


def train_loop(model, network, batch, compute_loss):
    """Train in a plain loop."""
    network.cuda()
    optimizer = torch.optim.AdamW(network.parameters())
    for _ in range(4):
        parts = [part.cuda() for part in (batch.values() if isinstance(batch, dict) else batch)]
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = compute_loss(*parts)
        loss.backward()
        optimizer.step()


def train_ours(model, network, batch, compute_loss, **options):
    """Train with the Trainer."""
    optimizer = torch.optim.AdamW(model.parameters())
    options |= {"precision": "amp_bf16", "progress_bar": False}
    Trainer(model=model, train_dataloader=[batch] * 4, optimizers=optimizer, max_duration="1ep", **options).fit()


def peak(train, make, **options):
    """Return the memory that a training has at most."""
    parts = make()
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train(*parts, **options)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


if __name__ == "__main__":
    found = {make.__name__: (peak(train_loop, make), peak(train_ours, make)) for make in (images, texts)}
    print(json.dumps({**found, "texts that are read": peak(train_ours, texts, callbacks=Reads())}))
