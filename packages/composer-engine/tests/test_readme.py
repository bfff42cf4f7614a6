"""The README's code and output are correct."""

import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"


def blocks(language):
    """Return the README's code blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def executed(capsys):
    """Run all Python blocks in order; return their names and output."""
    # A class in the README is a part of a module: its annotations and docstring are looked up there.
    namespace = {"__name__": "readme"}
    exec(compile("\n".join(blocks("python")), str(README), "exec"), namespace)
    return namespace, capsys.readouterr().out


def test_code_blocks_run(executed):
    """The README's loop trains for its duration and prints the values in its comment."""
    _, printed = executed

    said = re.search(r"print\(state.timestamp.*\)  # (.*)", README.read_text()).group(1)
    assert printed.splitlines()[0] == said


def test_plan_matches(executed):
    """The plan in the README is the output of explain()."""
    _, printed = executed

    assert printed.split("\n", 1)[1] == blocks("text")[0]


def test_pass_of_the_readme_works(executed):
    """With the pass that is registered last, the noise is applied first."""
    namespace, _ = executed

    first, second = namespace["engine"].explain().entries[namespace["Event"].AFTER_DATALOADER]

    assert (first.key, second.why) == ("AddNoise", "ordered by noise_first")


def test_mixup_of_the_readme_blends_input_and_loss(executed):
    """The README's MixUp gives the loss of the formula for its draw."""
    namespace, _ = executed
    inputs, targets = torch.randn(6, 8), torch.randint(3, (6,))
    model, mixup = namespace["Classifier"](), namespace["MixUp"]()
    state = namespace["State"](model, algorithms=[mixup])
    engine = namespace["Engine"](state)

    state.batch = (inputs, targets)
    engine.run_event("after_dataloader")
    state.outputs = model(state.batch)
    state.loss = model.loss(state.outputs, state.batch)
    engine.run_event("after_loss")

    fraction = mixup.mixing
    expected = (1 - fraction) * model.loss(state.outputs, (None, targets)) + fraction * model.loss(
        state.outputs, (None, mixup.partners)
    )
    assert not torch.equal(state.batch[0], inputs)
    torch.testing.assert_close(state.loss, expected)
