"""What goes with blocks that change hands and does not lie in an arena: messages that say it."""

from __future__ import annotations

import json
from collections.abc import Mapping

from fedsched.elastic.arena import Arena
from fedsched.elastic.shard import BlockState, Shard
from fedsched.elastic.tensors import decode, encode
from fedsched.pb import training_pb2 as pb


def pack(shard: Shard, blocks: Mapping[int, BlockState]) -> pb.Handover:
    """Which parts of these blocks lie in the shard's arena, and all the others."""
    held = {
        index: [key for key, tensor in sorted(block.tensors.items()) if shard.lies_in_arena(index, key, tensor)]
        for index, block in blocks.items()
    }
    return pb.Handover(
        held=json.dumps(held),
        tensors=[
            encode(index, tensor, key)
            for index, block in blocks.items()
            for key, tensor in sorted(block.tensors.items())
            if key not in held[index]
        ],
        scalars=json.dumps({index: block.scalars for index, block in blocks.items()}),
        hyperparameters=json.dumps(shard.hyperparameters),
    )


def unpack(arena: Arena, given: pb.Handover) -> dict[int, BlockState]:
    """The blocks again, once their other parts lie in the arena."""
    scalars = json.loads(given.scalars)
    blocks = {
        int(index): BlockState(
            arena.value(int(index)), {key: arena.state(int(index), key) for key in keys}, scalars.get(index, {})
        )
        for index, keys in json.loads(given.held).items()
    }
    for message in given.tensors:
        blocks[message.block].tensors[message.key] = decode(message)
    return blocks
