"""Scikit-learn's handwritten digits as tensors, and how well a model reads them."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch.nn import Module
from torch.utils.data import TensorDataset

_HELD_OUT = 360


def load() -> tuple[TensorDataset, TensorDataset]:
    """1437 images of 8 by 8 to train on and 360 to test with, the same ones every time."""
    data = load_digits()
    images = torch.from_numpy(data.images).to(torch.float32).div(16.0).unsqueeze(1)
    labels = torch.from_numpy(data.target).to(torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[_HELD_OUT:], order[:_HELD_OUT]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def accuracy(model: Module, dataset: TensorDataset) -> float:
    """The part of the images that the model reads rightly."""
    images, labels = dataset.tensors
    was_training = model.training
    model.eval()
    with torch.no_grad():
        right = (model(images).argmax(dim=1) == labels).to(torch.float64).mean()
    model.train(was_training)
    return float(right)
