"""Memory that processes share: where blocks lie in it, what streams do to it, and that nothing of it is left behind."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedsched.elastic import optimizers
from fedsched.elastic.arena import Arena, parts
from fedsched.elastic.memory import Layout, Segment
from fedsched.elastic.model import ModelSpec

HOLDER = """
import sys
from fedsched.elastic.memory import Segment
segment = Segment.create("test", 8192)
segment.map[:5] = b"hello"
print(segment.handle, flush=True)
sys.stdin.read()
"""


def spec_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> ModelSpec:
    blocks, _ = optimizers.blocks_of(model, optimizer)
    keys = optimizers.state_keys(optimizer)
    settings = optimizers.hyperparameters(optimizer)
    return ModelSpec(optimizers.name_of(optimizer), settings, blocks, 10, 2, 5, 20, 0, state_keys=keys)


def test_shared_memory_outlives_the_killed_process_that_made_it_and_leaves_no_name() -> None:
    """A machine whose memory fills with what killed jobs left has to be restarted by somebody."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        handle = holder.stdout.readline().strip()
        mine = Segment.attach(handle)
        mine.map[5:11] = b" there"
        again = Segment.attach(handle)
        holder.send_signal(signal.SIGKILL)
        holder.wait(20)
    assert again.map[:11] == b"hello there"
    assert not list(Path("/dev/shm").glob("*fedsched*"))
    with pytest.raises(OSError, match=r"No such file|No such process"):
        Segment.attach(handle)


def test_the_handle_of_a_process_whose_number_was_given_to_another_is_refused() -> None:
    """Parameters written into a stranger's file would be found much later, or never."""
    segment = Segment.create("test", 4096)
    pid, number, inode, size = segment.handle.split(":")
    with pytest.raises(FileNotFoundError, match="not the one that made the segment"):
        Segment.attach(f"{pid}:{number}:{int(inode) + 1}:{size}")


def test_large_tensors_are_cut_into_rows_and_every_byte_has_one_place() -> None:
    """One embedding that is most of a model would leave all servers but one without work."""
    model = nn.Sequential(nn.Embedding(50_000, 16), nn.Linear(16, 100), nn.BatchNorm1d(100))
    spec = spec_of(model, torch.optim.Adam(model.parameters()))
    layout = Layout.of(spec)
    total = sum(block.size_bytes for block in spec.blocks)
    tensors = [*model.parameters(), *model.buffers()]

    assert max(block.size_bytes for block in spec.blocks) <= total / 40
    assert spec.state_keys == ("exp_avg", "exp_avg_sq")
    spans = sorted(layout.span(index, region) for index in range(len(spec.blocks)) for region in range(3))
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    assert spans[-1][1] <= layout.total_bytes
    arena = Arena.of_parameters(spec)
    for number, tensor in enumerate(tensors):
        mine = [index for index, block in enumerate(spec.blocks) if block.tensor == number]
        arena.whole(mine[0], tensor).copy_(tensor.detach())
        rows = [arena.value(index) for index in mine]
        assert torch.equal(torch.cat(rows) if tensor.shape else rows[0], tensor)


def test_an_optimiser_that_looks_at_whole_tensors_gets_whole_tensors() -> None:
    """The norm of half a matrix is another norm: the result would depend on how many servers there are."""
    model = nn.Linear(3000, 400)
    blocks, _ = optimizers.blocks_of(model, torch.optim.Adafactor(model.parameters()))
    assert [block.name for block in blocks] == ["weight", "bias"]


@pytest.mark.parametrize(
    ("kind", "settings", "keys"),
    [
        (torch.optim.SGD, {"lr": 0.1}, ()),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, ("momentum_buffer",)),
        (torch.optim.Adam, {"amsgrad": True}, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
        (torch.optim.Adagrad, {}, ("sum",)),
        (torch.optim.RMSprop, {"centered": True}, ("grad_avg", "square_avg")),
        (torch.optim.SparseAdam, {}, ("exp_avg", "exp_avg_sq")),
        (torch.optim.Adafactor, {}, ()),
    ],
)
def test_what_an_optimiser_will_keep_is_known_before_it_has_taken_a_step(
    kind: type[torch.optim.Optimizer], settings: dict[str, Any], keys: tuple[str, ...]
) -> None:
    """Its place must be there when a block moves, for to make room then would hold the workers up."""
    found = optimizers.state_keys(kind([nn.Parameter(torch.ones(4, 2))], **settings))
    assert tuple(key for key in found if not key.startswith(("row", "col"))) == keys


@given(data=st.data(), cuts=st.lists(st.integers(1, 5000), max_size=8))
def test_a_stream_fills_exactly_the_blocks_it_names_however_it_is_cut(data: st.DataObject, cuts: list[int]) -> None:
    """A byte too far is another block's parameter."""
    model = nn.Sequential(nn.Embedding(700, 24), nn.Linear(24, 1), nn.LayerNorm(3))
    spec = spec_of(model, torch.optim.Adam(model.parameters()))
    count = len(spec.blocks)
    pieces = data.draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(0, 2)), unique=True, max_size=12))
    giver, taker = Arena.of_parameters(spec), Arena.of_parameters(spec)
    giver._map[:] = os.urandom(len(giver._map))
    blocks, regions = [block for block, _ in pieces], [region for _, region in pieces]

    named, chunks = parts(giver.read(blocks, regions))
    recut: list[memoryview] = []
    for chunk in chunks:
        for cut in cuts:
            recut.append(chunk[:cut])
            chunk = chunk[cut:]
        recut.append(chunk)
    taker.write(named, recut)

    expected = bytearray(len(taker._map))
    for piece in pieces:
        first, last = giver.layout.span(*piece)
        expected[first:last] = giver._map[first:last]
    assert taker._map[:] == bytes(expected)
    with pytest.raises(ValueError, match="holds more"):
        taker.write(named, [*recut, memoryview(b"x")])
    if any(recut):
        with pytest.raises(ValueError, match="ended before"):
            taker.write(named, [chunk for chunk in recut if len(chunk)][:-1])
