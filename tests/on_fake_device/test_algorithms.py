"""A training of each algorithm on the device by the engine, with the cases of the contract suite."""

import pytest
import torch

from composer.core.data.batches import move_batch
from composer.core.testing import Training
from on_fake_device.guards import cases_of, devices, standard_attention

MODULE = cases_of("composer-engine/tests/algorithms/test_contract.py")
# Factorize computes singular values, which are zeros here; test_surgery.py trains its layers. The teacher of the cases
# of Distillation computes in float64 itself, except for that of features.
LABELS = [label for label in MODULE.VARIANTS if label not in ("Distillation", "Factorize")]


class OnDevice(Training):
    """Trains in steps that are guarded."""

    guard = None

    def _train_batch(self, batch):
        batch = move_batch(batch, self.state.device)
        with self.guard():
            super()._train_batch(batch)

    def _watch(self, what, batch):
        super()._watch(what, move_batch(batch, self.state.device))


@pytest.mark.filterwarnings("ignore")  # of settings that have no effect on so few batches
@pytest.mark.parametrize("label", LABELS)
def test_algorithm(label, step):
    """All that an algorithm creates and computes is on the device, and no step waits for it."""
    case = MODULE.VARIANTS[label]
    state = case.new_state()
    standard_attention(state.model.to("cuda"))
    if label == "GatedLinearUnits":  # BERT reads each mask
        state.train_dataloader = [
            {"input_ids": one["input_ids"], "labels": one["labels"]} for one in case.new_state().train_dataloader
        ]
    state.device = torch.device("cuda")

    training = OnDevice(state, [case.make()])
    training.guard = step
    training.run(case.batches)
    training.finish()

    assert devices([*state.model.parameters(), *state.model.buffers()]) == {"cuda"}
