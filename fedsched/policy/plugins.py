"""Finds policies by name among the entry points of all installed packages, and reads their options.

A package offers a policy under the group `fedsched.policies`:

    [project.entry-points."fedsched.policies"]
    cautious = "their_package.cautious:Cautious"

`Cautious` is a class with what `fedsched.core.decision.Policy` asks for. It is made without arguments or, where it has
options, with an object of the pydantic class that its attribute `Options` names, made from the configuration's
`options`. Listing policies imports none of them.
"""

from __future__ import annotations

import difflib
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, distributions
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from fedsched.core.decision import Policy
from fedsched.errors import FedschedError, InvalidConfiguration

GROUP = "fedsched.policies"
BEGIN_S_MAX = 60.0
"""A policy must be imported within this, and made within as much; libraries that it loads count."""

T = TypeVar("T")


def available() -> dict[str, str]:
    """Names of all policies that can be configured, sorted, with the package that each comes from."""
    return {name: ", ".join(_packages(found)) for name, found in _entries(tuple(sys.path)).items()}


def load(name: str) -> type[Policy]:
    """The class of the policy.

    Raises:
        InvalidConfiguration: nobody offers the name, several do, or what they offer cannot be imported.
    """
    found = _entries(tuple(sys.path)).get(name, ())
    if not found:
        raise InvalidConfiguration(unknown(name), "list them with `fedsched policy list`")
    packages = _packages(found)
    if len(found) > 1:
        raise InvalidConfiguration(
            f"policy {name} is offered by {' and by '.join(packages)}; one of them was expected",
            "uninstall one, or ask its authors for another name",
        )
    entry = found[0]
    try:
        kind = _in_time(f"policy {name} of package {packages[0]} was not imported", entry.load)
    except FedschedError:
        raise
    except (Exception, SystemExit) as problem:  # Somebody else's module can fail in any way while it is imported.
        raise InvalidConfiguration(
            f"policy {name} of package {packages[0]} cannot be imported from {entry.value}: "
            f"{type(problem).__name__}: {problem}",
            f"install what {packages[0]} needs, or correct its entry point",
        ) from problem
    if not callable(getattr(kind, "decide", None)):
        raise InvalidConfiguration(
            f"policy {name} of package {packages[0]}: {entry.value} has no method decide; a policy class was expected",
            "let the entry point name the class",
        )
    return cast("type[Policy]", kind)


def unknown(name: str) -> str:
    """What is wrong with a name that nobody offers, with the nearest known one and all of them."""
    known = list(available())
    near = difflib.get_close_matches(name, known, n=1)
    guess = f"; did you mean {near[0]}?" if near else ""
    return f"there is no policy {name!r}{guess} (known are {', '.join(known)})"


def options_of(name: str, plain: Mapping[str, Any]) -> BaseModel | None:
    """The policy's options made from plain data; None for a policy without any.

    Raises:
        InvalidConfiguration: the policy cannot be loaded, or these are not its options.
    """
    from fedsched.problems import problems

    kind: type[BaseModel] | None = getattr(load(name), "Options", None)
    if kind is None:
        if plain:
            raise InvalidConfiguration(f"policy {name} has no options, but {', '.join(plain)} is given", "leave it out")
        return None
    try:
        return kind.model_validate(dict(plain))
    except ValidationError as problem:
        lines = "; ".join(problems(kind, problem))
        raise InvalidConfiguration(f"{lines} (of policy {name})", "correct the policy's options") from problem


def make(name: str, plain: Mapping[str, Any]) -> Policy:
    """A new policy with these options.

    Raises:
        InvalidConfiguration: the policy cannot be loaded, or these are not its options.
    """
    kind: Callable[..., Policy] = load(name)
    options = options_of(name, plain)
    try:
        return _in_time(f"policy {name} was not made", kind if options is None else lambda: kind(options))
    except FedschedError:
        raise
    except (Exception, SystemExit) as problem:  # Somebody else's class can fail in any way, too.
        why = f"{type(problem).__name__}: {problem}"
        raise InvalidConfiguration(f"policy {name} cannot be made: {why}", "report it to its authors") from problem


def _in_time(problem: str, work: Callable[[], T]) -> T:
    """Do somebody else's work, which may never end.

    Raises:
        InvalidConfiguration: it did not, in time. Its thread is left behind and keeps no process from ending.
    """
    done: queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((work(), None))
        except BaseException as raised:
            done.put((None, raised))

    threading.Thread(target=run, name="policy", daemon=True).start()
    try:
        made, raised = done.get(timeout=BEGIN_S_MAX)
    except queue.Empty:
        raise InvalidConfiguration(
            f"{problem} within {BEGIN_S_MAX:g} s", "report it to its authors; what takes long belongs before a run"
        ) from None
    if isinstance(raised, Exception | SystemExit):
        raise raised
    if raised is not None:  # such as an interruption: it is none of the user's, who interrupts the main thread
        raise InvalidConfiguration(f"{problem}: {type(raised).__name__}: {raised}", "report it to its authors")
    return cast(T, made)


@lru_cache(maxsize=8)
def _entries(path: tuple[str, ...]) -> dict[str, tuple[EntryPoint, ...]]:
    """All entry points by name, one for each package; looked up once for each search path of the interpreter.

    A checkout may hold older metadata of a package beside the installed one, and `entry_points` would read only the
    older; so all are read, and of a package that offers a name twice the first one counts. Only texts that name the
    group are worth parsing; most packages have none.
    """
    found: dict[str, dict[str, EntryPoint]] = {}
    for package in distributions(path=list(path)):
        if GROUP not in (package.read_text("entry_points.txt") or ""):
            continue
        package_name = package.name  # parses the package's whole description, each time
        for entry in package.entry_points.select(group=GROUP):
            found.setdefault(entry.name, {}).setdefault(package_name, entry)
    return {name: tuple(found[name][package] for package in sorted(found[name])) for name in sorted(found)}


def _packages(found: tuple[EntryPoint, ...]) -> list[str]:
    return [entry.dist.name if entry.dist else "?" for entry in found]
