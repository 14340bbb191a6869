"""Layout of arguments in memory, and arrays over it."""

from __future__ import annotations

import numpy as np

from nnfmq.base.memory import Memory
from nnfmq.client.model import arrays
from nnfmq.hal.tensor_info import TensorInfo
from nnfmq.hal.types import DataLocation, RequestArgument

IMAGE = TensorInfo("image", (1, 2, 3), "float32")
PIXELS = TensorInfo("pixels", (5,), "uint8")
OPEN = TensorInfo("open", (0, 3), "float32")


def test_every_argument_starts_at_a_multiple_of_64_and_ends_with_its_last_element() -> None:
    placed, size_bytes = arrays.layout([IMAGE, PIXELS, PIXELS], [(1, 2, 3), (5,), (5,)], 3)
    assert [argument.location for argument in placed] == [
        DataLocation(3, 0, 24),
        DataLocation(3, 64, 5),
        DataLocation(3, 128, 5),
    ]
    assert size_bytes == 128 + 5


def test_arguments_of_exactly_64_bytes_leave_no_gap() -> None:
    block = TensorInfo("block", (16,), "float32")
    placed, size_bytes = arrays.layout([block, block], [(16,), (16,)], 0)
    assert [argument.location.offset for argument in placed] == [0, 64]
    assert size_bytes == 128


def test_a_layout_without_arguments_has_a_pool() -> None:
    assert arrays.layout([], [], 0) == ((), 1)


def test_dimensions_are_given_only_if_the_model_does_not_specify_them() -> None:
    placed, _ = arrays.layout([IMAGE, OPEN], [(1, 2, 3), (7, 3)], 0)
    assert [argument.dimensions for argument in placed] == [(), (7, 3)]


def test_an_output_of_unknown_size_has_a_positive_length() -> None:
    """A length of 0 would be an invalid argument (N-RQX-4) rather than an insufficient one."""
    placed, size_bytes = arrays.layout([OPEN], [OPEN.shape], 0)
    assert placed[0].location.length > 0
    assert size_bytes == placed[0].location.length


def test_a_view_is_the_memory_itself() -> None:
    argument = RequestArgument(location=DataLocation(0, 64, 24))
    with Memory.create(88) as memory:
        array = arrays.view(memory, argument, IMAGE, (1, 2, 3))
        array[0, 1, 2] = 1.0
        assert bytes(memory.view[84:88]) == np.float32(1.0).tobytes()


def test_the_bytes_of_a_huge_shape_do_not_overflow() -> None:
    assert arrays.size_bytes(IMAGE, (2**32, 2**32)) == 2**66
