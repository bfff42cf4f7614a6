"""Which regions a process reads; meshes of several processes are in ``test_sharded.py``."""

from composer.checkpoint.finding import open_checkpoint
from composer.checkpoint.resharding import is_reference, sharded_likes


def test_model_that_is_not_sharded(runs, saved):
    """Without DTensors in the run, every tensor is read completely."""
    opened = open_checkpoint(saved)

    likes = sharded_likes(opened, runs.make().get_model_state_dict(), opened.data())

    assert likes.keys() == opened.layout.tensors.keys()
    assert not any(likes.values())


def test_references():
    """Only a dictionary with the name of a tensor is one."""
    assert is_reference({"$tensor": "weight"})
    assert not any(map(is_reference, ({"$tensor": 1}, {"tensor": "weight"}, "weight", None)))
