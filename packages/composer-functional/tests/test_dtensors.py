"""The parts of DTensors that a process has."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from composer.functional.dtensors import (
    are_plain,
    is_dtensor,
    local_parts,
    own_region,
    region_of,
    shard_like,
    without_repeats,
)


@pytest.fixture(scope="module")
def mesh():
    """A mesh of one process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


class Mesh:
    """The sizes of a mesh, and the place of one of its processes."""

    def __init__(self, sizes, place):
        self.sizes, self.place = sizes, place

    def size(self, dimension):
        return self.sizes[dimension]

    def get_local_rank(self, dimension):
        return self.place[dimension]


def test_plain_tensors_are_their_parts():
    """Tensors and parameters are plain; subclasses may not be."""
    tensors = [torch.ones(2), nn.Parameter(torch.ones(2))]

    assert are_plain(tensors)
    assert local_parts(tensors) is tensors
    assert not any(map(is_dtensor, tensors))
    assert shard_like(tensors[0], tensors[1]) is tensors[0]


def test_parts_of_a_dtensor(mesh):
    """The part shares the memory of the DTensor; a complete tensor is split like it."""
    whole = torch.arange(6.0)
    split = distribute_tensor(whole, mesh, [Shard(0)])

    again = shard_like(whole + 1, split)

    assert is_dtensor(split)
    assert is_dtensor(again)
    assert local_parts([split])[0].data_ptr() == split.to_local().data_ptr()
    assert own_region(split) == ((0,), (6,))
    assert torch.equal(again.full_tensor(), whole + 1)


class TestBlocks:
    @pytest.mark.parametrize(
        ("placements", "place", "expected"),
        [
            ([Replicate(), Shard(0)], (1, 2), ((6, 0), (1, 5))),
            ([Shard(1), Shard(0)], (1, 0), ((0, 3), (3, 2))),
            ([Shard(0), Shard(0)], (1, 2), ((6, 0), (1, 5))),
            ([Replicate(), Replicate()], (0, 0), ((0, 0), (7, 5))),
        ],
    )
    def test_offset_and_shape(self, placements, place, expected):
        """Each dimension of the mesh splits what is left."""
        assert region_of((7, 5), Mesh((2, 3), place), placements) == expected

    def test_blocks_cover_the_tensor_once(self):
        """The blocks of all processes are disjoint, and together they are the tensor."""
        covered = torch.zeros(7, 5)
        for first in range(2):
            for second in range(3):
                (row, column), (rows, columns) = region_of((7, 5), Mesh((2, 3), (first, second)), [Shard(1), Shard(0)])
                covered[row : row + rows, column : column + columns] += 1

        assert torch.equal(covered, torch.ones(7, 5))

    def test_partial_sums_raise(self):
        """Partial sums are not a block; the error has the remedy."""
        with pytest.raises(RuntimeError, match=r"Redistribute it to placements of a weight"):
            region_of((7, 5), Mesh((2,), (0,)), [Partial()])


def test_without_repeats():
    """Writing into the view changes all elements of an expanded tensor; other tensors are returned as they are."""
    expanded, plain = torch.zeros(3, 1, 2).expand(3, 4, 2), torch.zeros(2, 3).t()
    without_repeats(expanded).copy_(torch.arange(6.0).view(3, 1, 2))

    assert torch.equal(expanded, torch.arange(6.0).view(3, 1, 2).expand(3, 4, 2))
    assert without_repeats(plain) is plain
