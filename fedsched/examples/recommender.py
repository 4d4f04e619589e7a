"""Matrix factorisation with a small network on top: nearly all parameters are embeddings, of which a step touches few.

Its gradients are sparse: workers send the rows they used, not the whole tables. USERS, ITEMS, RATINGS, EPOCHS, BATCH
and SEED come from the environment.
"""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedsched import elastic

TASTES = 4
"""Dimensions of the drawn truth."""
WIDTH = 16


class Recommender(nn.Module):
    """How much a user will like an item."""

    def __init__(self, users: int, items: int) -> None:
        super().__init__()
        self.users = nn.Embedding(users, WIDTH, sparse=True)
        self.items = nn.Embedding(items, WIDTH, sparse=True)
        self.judge = nn.Sequential(nn.Linear(3 * WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        """(N, 2) numbers of users and items to (N,) ratings."""
        user, item = self.users(pairs[:, 0]), self.items(pairs[:, 1])
        result: torch.Tensor = self.judge(torch.cat((user, item, user * item), dim=1)).squeeze(1)
        return result


def ratings(users: int, items: int, count: int, seed: int) -> TensorDataset:
    """Drawn pairs and how well their hidden tastes agree, from about -1 to 1."""
    chance = torch.Generator().manual_seed(seed)
    of_users = torch.randn(users, TASTES, generator=chance)
    of_items = torch.randn(items, TASTES, generator=chance)
    pairs = torch.stack(
        (torch.randint(users, (count,), generator=chance), torch.randint(items, (count,), generator=chance)), dim=1
    )
    agree = (of_users[pairs[:, 0]] * of_items[pairs[:, 1]]).sum(dim=1) / TASTES**0.5
    return TensorDataset(pairs, agree.tanh())


def main() -> None:
    """Train; the chief prints the error on ratings that were not trained on."""
    users, items, count, epochs, batch, seed = (int(os.environ.get(name, value)) for name, value in DEFAULTS)
    torch.manual_seed(seed)
    # Torch warns of those who did not choose.
    torch.sparse.check_sparse_tensor_invariants.enable()  # type: ignore[no-untyped-call]
    known = ratings(users, items, count + count // 10, seed)
    train, test = TensorDataset(*known[:count]), known[count:]
    model = Recommender(users, items)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)

    session = elastic.join(model, optimizer, seed=seed)
    for pairs, wanted in session.batches(train, batch_size=batch, epochs=epochs):
        session.step(nn.functional.mse_loss(model(pairs), wanted))

    if session.is_chief:
        with torch.no_grad():
            error = nn.functional.mse_loss(model(test[0]), test[1]).item()
        print(f"test error {error:.6f} after {epochs} epochs", flush=True)
        # The part of the ratings' variance that is explained.
        session.report(accuracy=max(0.0, 1.0 - error / test[1].var().item()))


DEFAULTS = (
    ("USERS", "2000"),
    ("ITEMS", "1000"),
    ("RATINGS", "40000"),
    ("EPOCHS", "10"),
    ("BATCH", "256"),
    ("SEED", "0"),
)

if __name__ == "__main__":
    main()
