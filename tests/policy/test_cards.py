"""What files of weights say of themselves."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedsched.cli.main import app
from fedsched.core.speeds import SpeedCell, SpeedStatistics, SpeedSums
from fedsched.errors import CorruptCheckpoint
from fedsched.policy import cards, checkpoint
from fedsched.policy.dl2 import Dl2Shape, initial
from fedsched.policy.speed_checkpoint import SpeedCheckpoint, from_bytes


@pytest.mark.parametrize("policy", sorted(cards.SHIPPED))
def test_every_shipped_file_says_what_made_it_from_what_how_well_and_at_what_price(policy: str) -> None:
    """Weights that nobody can make again, or of which nobody knows how good they are, are a risk."""
    done = CliRunner().invoke(app, ["policy", "card", policy, "-o", "json"], catch_exceptions=False)
    card = json.loads(done.stdout)

    assert card["policy"] == policy
    assert card["size_bytes"] < 1_000_000
    made = card["made"]
    assert made["command"].startswith("fedsched train ")
    assert "--seed" in made["command"]
    assert made["cpu_s"] > 0
    assert {"data", "experiments"} & set(made), "what it was made from"
    assert any("jct" in name or name == "results" for name in made), "how well it does"


def test_the_card_of_ones_own_weights_is_shown_and_a_broken_file_is_no_card(tmp_path: Path) -> None:
    mine = tmp_path / "mine.safetensors"
    shape = Dl2Shape(3, (8,))
    checkpoint.Checkpoint(initial(shape, 1), shape, {"command": "by hand"}).save(mine)
    done = CliRunner().invoke(app, ["policy", "card", str(mine)], catch_exceptions=False)
    assert "by hand" in done.stdout

    mine.write_bytes(mine.read_bytes()[:-5])
    with pytest.raises(CorruptCheckpoint, match="is no whole checkpoint"):
        cards.read(mine)
    with pytest.raises(CorruptCheckpoint, match="cannot read checkpoint nowhere"):
        cards.read(Path("nowhere"))


def test_statistics_of_very_many_types_take_no_longer_than_they_are_many() -> None:
    """Whoever sends statistics names as many types as it likes, and its cluster is not the only one that waits."""
    types = 40_000
    sums = SpeedSums(1, 0, 0)
    many = SpeedStatistics((SpeedCell(f"type {number}", "", 1, 0, 0), sums) for number in range(types))
    began_s = time.process_time()
    data = SpeedCheckpoint(many, {}).to_bytes()
    assert len(from_bytes(data).statistics) == types
    assert time.process_time() - began_s < 8.0
