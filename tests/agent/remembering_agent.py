"""The deciding part of an agent as a process: questions come as lines, answers leave as lines; killed by its test."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fedsched.agent.deciding import DecidingPolicy
from fedsched.agent.remembering import PolicyMemory
from fedsched.config import PolicyConfig
from fedsched.core.commands import AskPolicy
from fedsched.core.events import Event
from fedsched.policy import registry
from fedsched.runtime.codec import dump_tagged, load_tagged


def main() -> None:
    path, config = Path(sys.argv[1]), PolicyConfig.model_validate(json.loads(sys.argv[2]))
    policy = registry.make(config)
    port = DecidingPolicy(
        _answer,
        policy,
        registry.heuristic("fifo"),
        decision_s_max=60.0,
        remember=PolicyMemory(path, policy).keep,
        clock=lambda: 0.0,
    )
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        question = load_tagged(json.loads(line))
        assert isinstance(question, AskPolicy)
        port.ask(question)
    port.close()


def _answer(event: Event) -> None:
    sys.stdout.write(json.dumps(dump_tagged(event)) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
