"""Tensors as bytes on the wire, and back."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fedsched.elastic.model import ModelSpec
from fedsched.pb import training_pb2 as pb


def encode(block: int, tensor: torch.Tensor, key: str = "") -> pb.Tensor:
    """A message with the tensor's own bytes; nothing is rounded."""
    plain = tensor.detach().cpu().contiguous()
    return pb.Tensor(
        block=block,
        key=key,
        dtype=dtype_name(plain),
        shape=list(plain.shape),
        data=plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"",
    )


def decode(message: pb.Tensor) -> torch.Tensor:
    """A tensor of its own, which may be changed, in the message's shape.

    Raises:
        ValueError: there is no such type.
        RuntimeError: the bytes do not fill the shape.
    """
    dtype = getattr(torch, message.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{message.dtype!r} is no type of tensor")
    if not message.data:
        return torch.empty(tuple(message.shape), dtype=dtype)
    return torch.frombuffer(bytearray(message.data), dtype=torch.uint8).view(dtype).reshape(tuple(message.shape))


def encode_sparse(block: int, gradient: torch.Tensor) -> list[pb.Tensor]:
    """A gradient of few rows as two messages: their numbers, of shape (rows,), and their values, (rows, *rest).

    Args:
        gradient: sparse in its first dimension only, and coalesced.
    """
    rows = gradient.indices()[0]
    return [encode(block, rows, "indices"), encode(block, gradient.values(), "values")]


def sparse_of(messages: Iterable[pb.Tensor], model: ModelSpec) -> dict[int, torch.Tensor]:
    """Gradients of few rows by block, each in the block's own shape, as `encode_sparse` sent them.

    Raises:
        ValueError, RuntimeError: see `decode`.
    """
    told: dict[int, dict[str, torch.Tensor]] = {}
    for message in messages:
        told.setdefault(message.block, {})[message.key] = decode(message)
    return {
        block: torch.sparse_coo_tensor(
            parts["indices"].unsqueeze(0), parts["values"], model.blocks[block].shape, is_coalesced=True
        )
        for block, parts in told.items()
    }


def dtype_name(tensor: torch.Tensor) -> str:
    """`float32` and so on."""
    return str(tensor.dtype).removeprefix("torch.")
