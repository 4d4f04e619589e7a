"""A small transformer that learns to continue text, letter by letter, from Python's own reference manual.

STEPS_PER_EPOCH, EPOCHS, BATCH and SEED come from the environment. Runs in bfloat16 where AMP is 1.
"""

from __future__ import annotations

import os
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.utils.data import Dataset

from fedsched import elastic
from fedsched.core.ids import stream

CONTEXT = 32
WIDTH, HEADS, LAYERS = 64, 4, 2


class Passages(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Drawn passages of the manual, each with the same passage one letter on."""

    def __init__(self, count: int, seed: int) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        self.letters = sorted(set(text))
        number = {letter: index for index, letter in enumerate(self.letters)}
        self._text = torch.tensor([number[letter] for letter in text])
        self._count, self._seed = count, seed

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = int(stream(self._seed, f"passage/{index}").random() * (len(self._text) - CONTEXT - 1))
        passage = self._text[start : start + CONTEXT + 1]
        return passage[:-1], passage[1:]


class Transformer(nn.Module):
    """Layers of causal attention over embedded letters and places (Vaswani et al. 2017)."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, letters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """(N, length) numbers of letters to (N, length, letters) scores of the next ones."""
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        inputs = self.letters(text) + self.places(torch.arange(length))
        result: torch.Tensor = self.out(self.layers(inputs, mask=mask, is_causal=True))
        return result


def main() -> None:
    """Train with a warm-up of the learning rate; the chief prints the mean loss of each epoch's last steps."""
    steps, epochs, batch, seed = (int(os.environ.get(name, value)) for name, value in DEFAULTS)
    torch.manual_seed(seed)
    data = Passages(steps * batch, seed)
    model = Transformer(len(data.letters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)

    session = elastic.join(model, optimizer, seed=seed, scheduler=scheduler)
    half = os.environ.get("AMP") == "1"
    losses: list[float] = []
    for text, following in session.batches(data, batch_size=batch, epochs=epochs):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            scores = model(text)
        loss = nn.functional.cross_entropy(scores.float().flatten(0, 1), following.flatten())
        session.step(loss)
        losses.append(loss.item())
        if session.is_chief and session.steps % steps == 0:
            print(f"epoch {session.epoch}: loss {sum(losses[-10:]) / len(losses[-10:]):.4f}", flush=True)


DEFAULTS = (("STEPS_PER_EPOCH", "50"), ("EPOCHS", "4"), ("BATCH", "16"), ("SEED", "0"))

if __name__ == "__main__":
    main()
