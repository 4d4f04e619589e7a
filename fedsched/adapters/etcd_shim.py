"""Imports etcd3 0.12 under a protobuf that its generated code is too old for.

That code registers its messages in a way that protobuf 4 and newer refuse. Here the same messages are made from the
descriptors that its files contain, in a pool of their own, so that they clash with no other etcd package either.
`etcdrpc` is then the module that etcd3 itself would have built: all messages and the gRPC stubs.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

_PACKAGE = "etcd3.etcdrpc"
# Each after those that it imports.
_FILES = ("kv", "auth", "rpc")


def _serialized(source: Path) -> bytes:
    """The file descriptor that a generated module holds, read as text: running the module is what fails."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "serialized_pb" and isinstance(node.value, ast.Call):
            text = ast.literal_eval(node.value.args[0])
            return str(text).encode("latin-1")
    raise ImportError(f"{source} holds no file descriptor; fedsched needs etcd3 0.12.0 exactly")


def _messages(name: str, source: Path, pool: descriptor_pool.DescriptorPool) -> ModuleType:
    proto = descriptor_pb2.FileDescriptorProto.FromString(_serialized(source))
    pool.Add(proto)
    file = pool.FindFileByName(proto.name)
    module = ModuleType(name)
    module.__file__ = str(source)
    contents: dict[str, Any] = {"DESCRIPTOR": file}
    for message_name, message in file.message_types_by_name.items():
        contents[message_name] = message_factory.GetMessageClass(message)
    for enum_name, enum in file.enum_types_by_name.items():
        contents[enum_name] = EnumTypeWrapper(enum)
        contents.update({value.name: value.number for value in enum.values})
    vars(module).update(contents)
    return module


def _install() -> ModuleType:
    found = importlib.util.find_spec("etcd3")
    if found is None or not found.submodule_search_locations:
        raise ImportError("etcd3 is not installed; install fedsched with its dependencies")
    folder = Path(next(iter(found.submodule_search_locations))) / "etcdrpc"
    package = ModuleType(_PACKAGE)
    package.__path__ = [str(folder)]
    sys.modules[_PACKAGE] = package
    pool = descriptor_pool.DescriptorPool()
    for name in _FILES:
        module = _messages(f"{_PACKAGE}.{name}_pb2", folder / f"{name}_pb2.py", pool)
        sys.modules[module.__name__] = module
        setattr(package, f"{name}_pb2", module)
    stubs = importlib.import_module(f"{_PACKAGE}.rpc_pb2_grpc")
    for source in (sys.modules[f"{_PACKAGE}.rpc_pb2"], stubs):
        vars(package).update({key: value for key, value in vars(source).items() if not key.startswith("_")})
    return package


etcdrpc: Any = sys.modules.get(_PACKAGE) or _install()
