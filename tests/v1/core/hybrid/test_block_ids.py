# SPDX-License-Identifier: Apache-2.0
"""The native stack of blank block ids."""

from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.core.hybrid._core import BlankBlockIds


def test_a_fresh_pool_hands_out_the_lowest_ids_first():
    blank = BlankBlockIds(6)
    assert blank.num_blocks == 6
    assert len(blank) == 5
    assert blank.to_list() == [1, 2, 3, 4, 5]
    assert blank.take(2) == [1, 2]
    assert blank.take(3) == [3, 4, 5]
    assert len(blank) == 0
    assert blank.to_list() == []


def test_the_last_ids_given_back_are_taken_first_and_in_the_given_order():
    blank = BlankBlockIds(8)
    blank.take(5)
    blank.give_back([4, 1, 3])
    assert blank.to_list() == [4, 1, 3, 6, 7]
    blank.give_back((5,))
    assert blank.take(3) == [5, 4, 1]


def test_contains_knows_blank_ids_only():
    blank = BlankBlockIds(130)  # more than two words of the bitmap
    assert 0 not in blank  # the null block
    assert all(id in blank for id in range(1, 130))
    taken = blank.take(64)
    assert not any(id in blank for id in taken)
    assert all(id in blank for id in range(65, 130))
    for outside in (-1, 130, 191, 192, 2**31, -(2**70), 2**70):
        assert outside not in blank


def test_a_pool_of_the_null_block_alone_is_empty():
    blank = BlankBlockIds(1)
    assert len(blank) == 0
    assert blank.take(0) == []
    blank.give_back([])
    with pytest.raises(ValueError, match=r"take 1 .* 0 are available"):
        blank.take(1)


@pytest.mark.parametrize("num_blocks", [0, -1, 2**31, 2**63, -(2**70)])
def test_a_pool_of_an_impossible_size_is_refused(num_blocks: int):
    with pytest.raises(ValueError, match="num_blocks"):
        BlankBlockIds(num_blocks)


@pytest.mark.parametrize("n", [-1, 4, 2**31, 2**70, -(2**70)])
def test_a_take_that_cannot_be_served_takes_nothing(n: int):
    blank = BlankBlockIds(5)
    blank.take(1)
    with pytest.raises(ValueError, match=r"3 are available") as error:
        blank.take(n)
    if abs(n) < 2**63:
        assert str(n) in str(error.value)
    assert blank.to_list() == [2, 3, 4]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 0], "id 0: it is not in 1 to 9"),
        ([1, -3], "id -3: it is not in 1 to 9"),
        ([1, 10], "id 10: it is not in 1 to 9"),
        ([1, 2**70], "is not in 1 to 9"),
        ([1, 7, 2], "id 7: it is blank already"),
        ([1, 2, 3, 2], "id 2: it comes twice"),
    ],
)
def test_a_wrong_id_is_named_and_nothing_is_given_back(ids: list[int], message: str):
    blank = BlankBlockIds(10)
    blank.take(5)
    with pytest.raises(ValueError, match=message):
        blank.give_back(ids)
    assert blank.to_list() == [6, 7, 8, 9]
    assert not any(id in blank for id in range(1, 6))
    blank.give_back([1, 2, 3, 4, 5])
    assert blank.to_list() == list(range(1, 10))


def test_what_is_not_a_number_is_a_type_error():
    blank = BlankBlockIds(4)
    blank.take(3)
    wrong: Any = "2"
    with pytest.raises(TypeError):
        blank.take(wrong)
    with pytest.raises(TypeError):
        blank.give_back([1, wrong])
    with pytest.raises(TypeError):
        assert wrong in blank
    wrong = 3
    with pytest.raises(TypeError, match="sequence"):
        blank.give_back(wrong)
    assert blank.to_list() == []


def test_numbers_with_an_index_are_numbers():
    blank = BlankBlockIds(numpy.int64(4))
    ids = numpy.array(blank.take(numpy.int32(3)), dtype=numpy.int32)
    blank.give_back(ids)
    assert blank.to_list() == [1, 2, 3]


def test_a_list_that_shrinks_while_it_is_read_is_safe():
    ids: list[Any] = []

    class Shrinking:
        def __index__(self) -> int:
            ids.clear()
            return 2

    blank = BlankBlockIds(5)
    blank.take(4)
    ids.extend([1, Shrinking(), 3, 4])
    blank.give_back(ids)
    assert blank.to_list() == [1, 2]


def test_a_large_pool():
    blank = BlankBlockIds(2_000_000)
    assert len(blank) == 1_999_999
    ids = blank.take(1_999_999)
    assert ids == list(range(1, 2_000_000))
    blank.give_back(ids)
    assert blank.to_list() == ids


class ModelOfBlankBlockIds:
    """What the native class must do, in the plainest Python: a list, next id first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ids = list(range(1, num_blocks))

    def take(self, n: int) -> list[int]:
        if not 0 <= n <= len(self.ids):
            raise ValueError
        taken, self.ids = self.ids[:n], self.ids[n:]
        return taken

    def give_back(self, ids: list[int]) -> None:
        wrong = any(not 0 < id < self.num_blocks or id in self.ids for id in ids)
        if wrong or len(set(ids)) < len(ids):
            raise ValueError
        self.ids = ids + self.ids


@given(num_blocks=st.integers(1, 150), data=st.data())
def test_random_operations_do_what_the_model_does(num_blocks: int, data: st.DataObject):
    blank, model = BlankBlockIds(num_blocks), ModelOfBlankBlockIds(num_blocks)
    used: list[int] = []
    for _ in range(data.draw(st.integers(1, 20))):
        action = data.draw(st.sampled_from(["take", "give_back", "give_back_anything"]))
        argument: int | list[int]
        if action == "take":
            argument = data.draw(st.integers(-1, num_blocks))
        elif action == "give_back":
            argument = data.draw(st.permutations(used))[: data.draw(st.integers(0, len(used)))]
        else:
            action = "give_back"
            argument = data.draw(st.lists(st.integers(-1, num_blocks), max_size=4))
        outcomes = []
        for pool in (blank, model):
            try:
                outcomes.append(getattr(pool, action)(argument))
            except ValueError:
                outcomes.append("refused")
        assert outcomes[0] == outcomes[1]
        assert blank.to_list() == model.ids
        assert len(blank) == len(model.ids)
        used = [id for id in range(1, num_blocks) if id not in model.ids]
        assert not any(id in blank for id in used)
        assert all(id in blank for id in model.ids)
