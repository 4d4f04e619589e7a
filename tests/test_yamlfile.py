"""Files that people write: whatever they hold, reading one ends soon, with its data or with one clear error."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsched import yamlfile
from fedsched.errors import InvalidConfiguration, InvalidJobFile

ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"\x00\x01", "not YAML"),
        (b"\xb9\x17v\xc8\x9b\xff" * 11, "not text"),
        (b"a: [", "not YAML"),
        (b"day: 2020-99-99", "month must be in"),
        (b"a: 1" + b"0" * 5000, "not YAML"),
        (b"a: 0x1" + b"0" * 5000, "too large"),
        (b"a: " + b"[" * 60 + b"]" * 60, "nested too deeply"),
        (b"a: " + b"[" * 5000, "maximum nesting depth"),
        (b'a: "\\ud800"', "invalid Unicode"),
        (b"a: 1\nb: 2\na: 3\n", "'a' is given twice"),
        (b"? [a]\n: b\n", "unhashable"),
        (b"a: !!python/object/apply:os.getcwd []", "not YAML"),
        (b"a" * (yamlfile.SIZE_MAX_BYTES + 1), "larger than"),
    ],
)
def test_what_cannot_be_read_is_one_error(tmp_path: Path, data: bytes, told: str) -> None:
    """A stack trace says "fault of ours" to somebody who mistyped a date."""
    path = tmp_path / "file.yaml"
    path.write_bytes(data)
    for error in (InvalidConfiguration, InvalidJobFile):
        with pytest.raises(error, match=told):
            yamlfile.read(path, error)


@pytest.mark.parametrize("path", ["/dev/zero", "/", "/nowhere"])
def test_what_is_no_file_is_one_error(path: str) -> None:
    """An endless device must not fill the memory."""
    with pytest.raises(InvalidConfiguration, match=r"larger than|cannot read"):
        yamlfile.read(Path(path))


def test_aliases_that_multiply_are_quoted_in_a_line(tmp_path: Path) -> None:
    """Written out, this value has a billion parts."""
    path = tmp_path / "file.yaml"
    path.write_text(ALIASES)
    assert len(yamlfile.shown(yamlfile.read(path)["a9"])) < 200


def test_a_merge_may_be_overridden_and_a_mark_of_the_byte_order_is_no_text(tmp_path: Path) -> None:
    """Editors on other systems write such a mark; a key beside a merge is what merges are for."""
    path = tmp_path / "file.yaml"
    path.write_bytes(b"\xef\xbb\xbfbase: &base {a: 1, b: 2}\nmine: {<<: *base, a: 3}\n")
    assert yamlfile.read(path)["mine"] == {"a": 3, "b": 2}
