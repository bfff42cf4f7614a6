"""What a load has read; complete loads are in ``test_loading.py``."""

from composer.checkpoint.finding import open_checkpoint
from composer.checkpoint.saved_run import SavedRun


def test_parts(runs, saved):
    """What is beside the state is no part of it, and weights have no data until they are read."""
    state = runs.make()
    read = SavedRun.read(open_checkpoint(saved), state, weights_only=False)

    assert read.beside("extra") == {"data": {"position": 7}}
    assert not {"extra", "modules", "environment", "integrations"} & read.state.keys()
    assert all(weight.is_meta for weight in read.data["model"].values())

    read.read_weights()
    assert runs.same_tensors(read.data["model"], state.get_model_state_dict())


def test_ignored_weights_are_those_of_the_run(runs, saved):
    """In place of what is ignored, there is what the run has."""
    state = runs.make(seed=3)
    read = SavedRun.read(open_checkpoint(saved), state, weights_only=False)
    name = next(iter(read.data["model"]))

    read.ignore([f"model/{name}"], state)

    assert read.ignored == (f"model/{name}",)
    assert read.data["model"][name] is state.get_model_state_dict()[name] or not read.data["model"][name].is_meta
