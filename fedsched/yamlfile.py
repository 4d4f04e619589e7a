"""Reads the YAML that people write: bounded in every direction, and whatever is wrong with a file is one error."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer

from fedsched.errors import InvalidConfiguration, InvalidInput

SIZE_MAX_BYTES = 1024 * 1024
SHOWN_CHARS_MAX = 80
"""A wrong text is quoted up to here: enough to find it, however much it holds."""
DEPTH_MAX = 50
INT_MAX = 2**63 - 1
"""Larger numbers have no place in any record."""


def read(path: Path, error: type[InvalidInput] = InvalidConfiguration, size_max_bytes: int = SIZE_MAX_BYTES) -> Any:
    """The plain data in a YAML file; None where the file is empty.

    Args:
        error: raised with one clear message when the file cannot be read.
        size_max_bytes: no more than this is read, whatever the file is.
    """
    try:
        with path.open("rb") as file:
            data = file.read(size_max_bytes + 1)
    except OSError as problem:
        raise error(f"cannot read {path}: {problem.strerror}", "check the path") from problem
    if len(data) > size_max_bytes:
        raise error(f"{path} is larger than {size_max_bytes // 1024} KiB", "check the path")
    try:
        return yaml.load(data.decode("utf-8-sig"), _Loader)
    except UnicodeDecodeError as problem:
        raise error(f"{path} is not text; YAML in UTF-8 was expected", "check the path") from problem
    except (yaml.YAMLError, ValueError, OverflowError, LookupError, AttributeError, TypeError) as problem:
        # Values that look like dates or numbers, or carry the tag of such, and are none leave the parser as they come.
        where = str(problem).replace('in "<unicode string>", line', "at line")
        raise error(f"{path} is not YAML: {where}", "check the file there") from problem


def shown(value: object) -> str:
    """A value as an error quotes it: short, also where aliases make it endless."""
    text = _short.repr(value)
    return text if len(text) <= 2 * SHOWN_CHARS_MAX else f"{text[: 2 * SHOWN_CHARS_MAX]}..."


class _Short(reprlib.Repr):
    """Cuts nested and long values; numbers need no cutting, `read` lets none through that do."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, SHOWN_CHARS_MAX, SHOWN_CHARS_MAX


_short = _Short()


class _Loader(Composer, yaml.CSafeLoader):
    """Plain data only; refuses what a file says twice, and numbers and depths that no record can hold.

    The text is parsed by libyaml, which is five times as fast; nodes are composed here, where depths are looked at.
    """

    depth = 0

    def __init__(self, stream: str) -> None:
        yaml.CSafeLoader.__init__(self, stream)
        Composer.__init__(self)

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        if self.depth > DEPTH_MAX:
            raise yaml.composer.ComposerError(None, None, "it is nested too deeply")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{shown(key.value)} is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> int:
        value = super().construct_yaml_int(node)
        if abs(value) > INT_MAX:
            raise yaml.constructor.ConstructorError(None, None, "a number is too large", node.start_mark)
        return int(value)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
