"""Buffers of tensors, filled through shared memory or by streams: a job's parameters, a worker's gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch

from fedsched.elastic.memory import ALIGNMENT, Layout, Segment
from fedsched.elastic.model import ModelSpec
from fedsched.pb import training_pb2 as pb

CHUNK_BYTES = 1 << 20
"""Of one message of a stream: large enough for its costs to vanish, small enough to keep both ends busy."""


class Arena:
    """A segment seen as the model's blocks."""

    def __init__(self, model: ModelSpec, segment: Segment) -> None:
        self.model = model
        self.layout = Layout.of(model)
        self._segment = segment
        self._map = segment.map

    @staticmethod
    def of_parameters(model: ModelSpec, handle: str = "") -> Arena:
        """Values and optimiser state: somebody's, or, without a handle, this process' own.

        Raises:
            OSError: there is no memory for it, or that process is gone.
        """
        size_bytes = Layout.of(model).total_bytes
        return Arena(model, Segment.attach(handle) if handle else Segment.create("parameters", size_bytes))

    @staticmethod
    def of_gradients(model: ModelSpec, handle: str = "") -> Arena:
        """One region that a worker's gradients are written to.

        Raises:
            OSError: there is no memory for it, or that process is gone.
        """
        size_bytes = Layout.of(model).region_bytes
        return Arena(model, Segment.attach(handle) if handle else Segment.create("gradients", size_bytes))

    @property
    def handle(self) -> str:
        """For others of this machine."""
        return self._segment.handle

    def value(self, block: int) -> torch.Tensor:
        """A block's value, or gradient; writing to it writes to the buffer."""
        return self._tensor(block, 0)

    def state(self, block: int, key: str) -> torch.Tensor:
        """Part of a block's optimiser state, in the form of its value."""
        return self._tensor(block, 1 + self.layout.keys.index(key))

    def whole(self, block: int, like: torch.Tensor) -> torch.Tensor:
        """The tensor that begins with this block, all blocks of it together.

        Args:
            like: has the tensor's shape and type.
        """
        return self._view(self.layout.span(block)[0], like.dtype, tuple(like.shape))

    def stretches(self, blocks: Sequence[int], regions: int = 1) -> Iterator[torch.Tensor]:
        """Flat tensors that cover these blocks, in order, in each of the first regions; neighbours of one type as one.

        What lies between neighbours for the sake of alignment belongs to nobody and is zero.
        """
        types = [self.model.blocks[block].dtype for block in blocks]
        for region in range(regions):
            spans = [self.layout.span(block, region) for block in blocks]
            for dtype, run in itertools.groupby(zip(types, spans, strict=True), key=lambda item: item[0]):
                kind: torch.dtype = getattr(torch, dtype)
                for first, last in _runs((span for _, span in run), gap=ALIGNMENT - 1):
                    yield self._view(first, kind, ((last - first) // kind.itemsize,))

    def copy_values(self, other: Arena) -> None:
        """Take all values of an arena of the same form."""
        mine, theirs = (
            torch.frombuffer(arena._map, dtype=torch.uint8, count=self.layout.region_bytes) for arena in (self, other)
        )
        mine.copy_(theirs)

    def close(self) -> None:
        """No other process can attach any more."""
        self._segment.close()

    def _tensor(self, block: int, region: int) -> torch.Tensor:
        spec = self.model.blocks[block]
        return self._view(self.layout.span(block, region)[0], getattr(torch, spec.dtype), spec.shape)

    def _view(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(shape, dtype=dtype)
        # A storage of its own: whoever saves one tensor must not save the whole buffer with it.
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).reshape(shape)

    # Streams.

    def read(self, blocks: Sequence[int], regions: Sequence[int] = (), gradients_of: str = "") -> Iterator[bytes]:
        """The messages of a stream with these blocks.

        Args:
            regions: of each block, the region that is read; without them that of the values.
            gradients_of: the worker whose gradients they are, if they are any.
        """
        yield _pieces_message(pb.Pieces(blocks=blocks, regions=regions, gradients_of=gradients_of))
        with memoryview(self._map) as bytes_here:
            for first, last in _runs(self.layout.span(*piece) for piece in _located(blocks, regions)):
                for start in range(first, last, CHUNK_BYTES):
                    yield _data_message(bytes_here[start : min(start + CHUNK_BYTES, last)])

    def write(self, pieces: pb.Pieces, chunks: Iterable[memoryview]) -> None:
        """Fill these blocks from a stream.

        Raises:
            ValueError: the stream holds more or less than they do.
        """
        with memoryview(self._map) as bytes_here:
            spans = _runs(self.layout.span(*piece) for piece in _located(pieces.blocks, pieces.regions))
            first, last = next(spans, (0, 0))
            for chunk in chunks:
                while len(chunk):
                    if first == last:
                        first, last = next(spans, (0, 0))
                    taken = min(len(chunk), last - first)
                    if not taken:
                        raise ValueError("the stream holds more than its blocks")
                    bytes_here[first : first + taken] = chunk[:taken]
                    chunk, first = chunk[taken:], first + taken
            if first != last or next(spans, None) is not None:
                raise ValueError("the stream ended before its blocks were complete")


def _located(blocks: Sequence[int], regions: Sequence[int]) -> Iterator[tuple[int, int]]:
    return zip(blocks, regions or [0] * len(blocks), strict=True)


def _runs(spans: Iterable[tuple[int, int]], gap: int = 0) -> Iterator[tuple[int, int]]:
    """Neighbours that are no further apart than `gap` joined; empty ones left out."""
    here: tuple[int, int] | None = None
    for first, last in spans:
        if first == last:
            continue
        if here is not None and here[1] <= first <= here[1] + gap:
            here = (here[0], last)
            continue
        if here is not None:
            yield here
        here = (first, last)
    if here is not None:
        yield here


# `Part` on the wire, written and read without the copies that the generated code would make.

_PIECES, _DATA = b"\x0a", b"\x12"
"""Fields 1 and 2, each with a length."""


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _pieces_message(pieces: pb.Pieces) -> bytes:
    body = pieces.SerializeToString()
    return b"".join((_PIECES, _varint(len(body)), body))


def _data_message(data: memoryview) -> bytes:
    return b"".join((_DATA, _varint(len(data)), data))


def parts(messages: Iterable[bytes]) -> tuple[pb.Pieces, Iterator[memoryview]]:
    """What a stream of `Part` is about, and its bytes.

    Raises:
        ValueError: it does not begin as it must.
    """
    stream = iter(messages)
    first = next(stream, b"")
    if first[:1] != _PIECES:
        raise ValueError("a stream of tensors must say first which ones it holds")
    return pb.Part.FromString(first).pieces, (_data_of(message) for message in stream)


def _data_of(message: bytes) -> memoryview:
    if message[:1] != _DATA:
        raise ValueError("a stream of tensors holds something else")
    end = 1
    while message[end] & 0x80:
        end += 1
    return memoryview(message)[end + 1 :]
