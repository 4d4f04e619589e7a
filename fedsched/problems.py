"""Says in a reader's words what pydantic found wrong with a file: the field's path, what it is, what was expected."""

from __future__ import annotations

import difflib
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, Tag, ValidationError

from fedsched.core.ids import NAME_PATTERN
from fedsched.yamlfile import shown

KIND = "kind "
"""Tags of a union's members begin so: they tell which member a problem is in, and are left out of its path."""

NAME = f"^{NAME_PATTERN}$"
LABEL = r"^[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?$"
NODE = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?$"
ADDRESS = r"^[^:\s]+:\d{1,5}$"
ABSOLUTE = r"^/"
ABSOLUTE_OR_EMPTY = r"^(/.*)?$"
PATTERNS = {
    NAME: "at most 63 of a to z, 0 to 9 and -, neither first nor last a -, were expected",
    LABEL: "at most 63 of a to z, 0 to 9, _ and -, first and last a letter or digit, were expected",
    NODE: "at most 253 of A to Z, a to z, 0 to 9, ., _ and -, first and last a letter or digit, were expected",
    ADDRESS: "host:port was expected",
    ABSOLUTE: "a path from / on was expected",
    ABSOLUTE_OR_EMPTY: "a path from / on, or nothing, was expected",
}
"""What texts of a certain form look like; who writes a job file need not read regular expressions."""
SURE = 0.75
"""So alike, a field of the same part is meant rather than one of just that name elsewhere."""
TYPES = {
    "string_type": "text was expected",
    "list_type": "a list was expected",
    "tuple_type": "a list was expected",
    "dict_type": "names with values, as in {a: 1}, were expected",
}


def kind_or(default: str) -> Callable[[Any], str]:
    """Makes what gives the tag of the member that is meant, by its `kind`; without one it is the default."""

    def tag(value: Any) -> str:
        kind = value.get("kind", default) if isinstance(value, Mapping) else getattr(value, "kind", default)
        return f"{KIND}{kind}"

    return tag


def problems(kind: type[BaseModel], error: ValidationError) -> list[str]:
    """One line per problem: the field's path, what it is, what was expected, and a near name for a mistyped one."""
    return [_line(kind, dict(item)) for item in error.errors() if not _only_follows(dict(item))]


def _only_follows(item: dict[str, Any]) -> bool:
    """Whether a list is called too short only because items of it have problems, which are told by themselves."""
    return item["type"] == "too_short" and len(item["input"]) >= int(item["ctx"]["min_length"])


def _line(kind: type[BaseModel], item: dict[str, Any]) -> str:
    path = ".".join(part for part in map(str, item["loc"]) if not part.startswith(KIND)) or "the file"
    message = str(item["msg"]).removeprefix("Value error, ")
    match item["type"]:
        case "extra_forbidden":
            return f"{path} is not a known field{_guess(kind, item['loc'])}"
        case "missing":
            return f"{path} is missing"
        case "value_error":
            return f"{path}: {message}"
    return f"{path} is {shown(item['input'])}; {_expected(kind, item) or message[0].lower() + message[1:]}"


def _expected(kind: type[BaseModel], item: dict[str, Any]) -> str:
    """What should be there, where pydantic says it in words of Python; empty where its own will do."""
    match item["type"]:
        case "too_short":
            least = int(item["ctx"]["min_length"])
            return f"at least {least} item{'s were' if least > 1 else ' was'} expected"
        case "string_pattern_mismatch":
            return PATTERNS.get(item["ctx"]["pattern"], "")
        case "model_type" | "model_attributes_type":
            fields = list(dict.fromkeys(name for model in _models_at(kind, item["loc"]) for name in model.model_fields))
            return f"fields were expected: {', '.join(fields)}" if fields else "fields were expected"
        case "string_type" if isinstance(item["input"], int | float):
            return f"{TYPES['string_type']}; quotes make it one"
    return TYPES.get(item["type"], "")


def _guess(kind: type[BaseModel], loc: Sequence[int | str]) -> str:
    """Which field an unknown one may stand for: one of the same part, or the path of one elsewhere in the file."""
    name, elsewhere = str(loc[-1]), _paths(kind)
    here = sorted({field for model in _models_at(kind, loc[:-1]) for field in model.model_fields})
    near = (
        difflib.get_close_matches(name, here, n=1, cutoff=SURE)
        or [path for field, path in elsewhere.items() if field == name]
        or difflib.get_close_matches(name, here, n=1)
        or [elsewhere[field] for field in difflib.get_close_matches(name, elsewhere, n=1)]
    )
    return f"; did you mean {near[0]}?" if near else ""


def _paths(kind: type[BaseModel]) -> dict[str, str]:
    """Where each field is found first, the outermost parts before those within; a list's items go without numbers."""
    found: dict[str, str] = {}
    waiting: deque[tuple[str, type[BaseModel]]] = deque([("", kind)])
    seen: set[type[BaseModel]] = set()
    while waiting:
        prefix, model = waiting.popleft()
        if model in seen:
            continue
        seen.add(model)
        for name, field in model.model_fields.items():
            found.setdefault(name, f"{prefix}{name}")
            waiting += [(f"{prefix}{name}.", part) for part in _models([field.annotation])]
    return found


def _models_at(kind: type[BaseModel], loc: Sequence[int | str]) -> list[type[BaseModel]]:
    """The models that may stand where a path leads."""
    there: list[Any] = [kind]
    for part in loc:
        there = [found for annotation in there for found in _within(annotation, part)]
    return _models(there)


def _within(annotation: Any, part: int | str) -> list[Any]:
    """What one step of a path leads to: a model's field, an item, or the member of a union that a tag names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        field = annotation.model_fields.get(str(part))
        return [] if field is None else [field.annotation]
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        return _within(arguments[0], part)
    if get_origin(annotation) in (Union, types.UnionType):
        tagged = [member for member in arguments if part in _tags(member)]
        # Without tags pydantic names the member of a union by its type; all of them may be meant then.
        return tagged or [found for member in arguments for found in _within(member, part)] or list(arguments)
    return list(arguments)


def _tags(annotation: Any) -> list[str]:
    return [extra.tag for extra in getattr(annotation, "__metadata__", ()) if isinstance(extra, Tag)]


def _models(annotations: Iterable[Any]) -> list[type[BaseModel]]:
    found: list[type[BaseModel]] = []
    for annotation in annotations:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            found.append(annotation)
        else:
            found += _models(get_args(annotation))
    return found
