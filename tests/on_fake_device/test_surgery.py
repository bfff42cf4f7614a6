"""A step of each architecture on the device with each surgery, before and after the model has moved there."""

import inspect

import pytest
import torch

import composer.algorithms
from composer import functional as cf
from on_fake_device.guards import cases_of, devices, standard_attention

MODULE = cases_of("composer-functional/tests/surgery/test_models.py")
# resnet18 stands for resnet50, too. The singular values of its filters would take most of the time.
PAIRS = [
    (surgery, name)
    for surgery, name in MODULE.PAIRS
    if (name != "resnet50" or surgery == "stochastic_depth") and (surgery, name) != ("factorization", "resnet18")
]


def train(model, inputs):
    """Compute a loss and its gradients."""
    outputs = model.train()(**inputs)
    outputs = outputs if torch.is_tensor(outputs) else outputs.logits
    outputs.float().square().mean().backward()


@pytest.mark.parametrize("moves_first", [True, False], ids=["moved before", "moved after"])
@pytest.mark.parametrize(("surgery", "name"), PAIRS)
def test_surgery(surgery, name, moves_first, step):
    """New layers are on the device of those that they replace, and train there."""
    (model, inputs), (apply, _) = MODULE.MODELS[name](), MODULE.SURGERIES[surgery]
    if moves_first and surgery != "factorization":  # the stand-in computes no singular values
        model.to("cuda")
    standard_attention(model)
    if name == "gpt2":  # looks for packed rows in batches without a mask, and BERT reads each mask
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    takes_optimizers = "optimizers" in inspect.signature(apply).parameters

    apply(model, **{"optimizers": optimizer} if takes_optimizers else {})
    model.to("cuda")

    inputs = {name: value.cuda() for name, value in inputs.items()}
    with step():
        train(model, inputs)
        optimizer.step()

    assert devices([*model.parameters(), *model.buffers()]) == {"cuda"}


def test_each_surgery_is_here():
    """Each surgery has a case here, or its algorithm has one in test_algorithms.py."""
    names = {name.removeprefix("apply_") for name in cf.__all__ if name.startswith("apply_")}

    algorithms = {name.lower() for name in composer.algorithms.__all__}
    assert {name for name in names if name.replace("_", "") not in algorithms} <= {*MODULE.SURGERIES}
