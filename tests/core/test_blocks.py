"""Where parameters live: balanced, with few bytes moved, and in stages where they travel."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsched.core.blocks import Block, assign, stage, travelling
from fedsched.core.ids import TaskName


def names(*tasks: str) -> tuple[TaskName, ...]:
    return tuple(TaskName(task) for task in tasks)


servers_drawn = st.integers(1, 6).map(lambda count: names(*(f"ps-{i}" for i in range(count))))


@given(
    sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=30),
    before=servers_drawn,
    after=servers_drawn,
)
def test_blocks_are_balanced_and_only_those_move_that_have_a_reason_to(
    sizes: list[int], before: tuple[TaskName, ...], after: tuple[TaskName, ...]
) -> None:
    """Each moved byte lengthens a switch; each unbalanced one slows every step."""
    blocks = [Block(f"b{index}", size) for index, size in enumerate(sizes)]
    old = assign(blocks, before)
    new = assign(blocks, after, old)
    load = {
        server: sum(b.size_bytes for b, owner in zip(blocks, new, strict=True) if owner == server) for server in after
    }

    assert set(new) <= set(after)
    fair = sum(sizes) / len(after)
    assert max(load.values()) <= fair * 1.05 + max(sizes)
    assert assign(blocks, after, new) == new, "what is balanced stays"
    if before == after:
        assert new == old


@given(seed=st.integers(0, 2**32), count=st.integers(200, 600), after=st.integers(2, 9))
def test_many_small_blocks_are_shared_evenly_with_hardly_more_bytes_moved_than_must_be(
    seed: int, count: int, after: int
) -> None:
    """Each move gained so little by itself that none was made: a new server stood idle beside a full one."""
    chance = random.Random(seed)
    blocks = [Block(f"b{index}", int(1000 * chance.random() ** 3) + 1) for index in range(count)]
    servers = names(*(f"ps-{index}" for index in range(after)))
    old = assign(blocks, servers[:1])
    new = assign(blocks, servers, old)
    fair = sum(block.size_bytes for block in blocks) / after
    load = [sum(b.size_bytes for b, owner in zip(blocks, new, strict=True) if owner == server) for server in servers]
    moved = sum(load[1:])

    assert max(load) <= 1.05 * fair + max(block.size_bytes for block in blocks) / 2
    assert moved <= fair * (after - 1) * 1.05


@pytest.mark.parametrize(
    ("after", "moved"),
    [(("ps-0", "ps-1", "ps-2"), 2), (("ps-0",), 3), (("ps-0", "ps-1"), 0)],
)
def test_few_blocks_move(after: tuple[str, ...], moved: int) -> None:
    """Six equal blocks on two servers: a third one takes exactly its share, a leaver gives exactly what it has."""
    blocks = [Block(f"b{index}", 100) for index in range(6)]
    old = assign(blocks, names("ps-0", "ps-1"))
    new = assign(blocks, names(*after), old)

    assert sum(a != b for a, b in zip(old, new, strict=True)) == moved


@given(
    sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=30),
    before=servers_drawn,
    after=servers_drawn,
    together=st.sets(st.sampled_from(names(*(f"ps-{i}" for i in range(6))))),
    stage_bytes=st.floats(0, 3000),
)
def test_stages_come_to_the_same_end_and_none_moves_more_than_it_may(
    sizes: list[int],
    before: tuple[TaskName, ...],
    after: tuple[TaskName, ...],
    together: set[TaskName],
    stage_bytes: float,
) -> None:
    """Workers wait for the blocks of a switch, and would wait for all of them at once."""
    blocks = [Block(f"b{index}", size) for index, size in enumerate(sizes)]
    here = assign(blocks, before)
    end = assign(blocks, after, here)
    switches = 0
    while here != end:
        there = stage(blocks, here, end, together, stage_bytes)
        moved = travelling(here, there, together)
        assert there != here, "each comes nearer to the end"
        assert (
            len([index for index in moved if sizes[index]]) <= 1 or sum(sizes[index] for index in moved) <= stage_bytes
        )
        assert all(new in (old, last) for old, new, last in zip(here, there, end, strict=True)), "no block moves twice"
        here, switches = there, switches + 1
    assert switches <= 1 or travelling(assign(blocks, before), end, together), "only what travels needs several"
