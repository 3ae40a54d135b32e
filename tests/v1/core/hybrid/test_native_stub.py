# SPDX-License-Identifier: Apache-2.0
"""The arguments in the stub `_core.pyi` are those of the native core.

`make types` checks with mypy.stubtest that both have the same names and kinds of members; it
cannot see the arguments of nanobind's functions.
"""

import ast
from pathlib import Path
from typing import Any

import pytest

from vllm.v1.core.hybrid import _core

STUB = Path(_core.__file__).with_name("_core.pyi")
#: The functions of the module and the methods of its classes, without properties.
FUNCTIONS = [
    (owner, node)
    for owner in ast.walk(ast.parse(STUB.read_text()))
    if isinstance(owner, ast.Module | ast.ClassDef)
    for node in owner.body
    if isinstance(node, ast.FunctionDef) and not node.decorator_list
]
NO_DEFAULT = object()


def name_of(function: tuple[ast.Module | ast.ClassDef, ast.FunctionDef]) -> str:
    owner, node = function
    return f"{owner.name}.{node.name}" if isinstance(owner, ast.ClassDef) else node.name


def stub_arguments(node: ast.FunctionDef) -> list[tuple[str, Any]]:
    """Names and defaults."""
    arguments, defaults = node.args.args, [ast.literal_eval(d) for d in node.args.defaults]
    padded = [NO_DEFAULT] * (len(arguments) - len(defaults)) + defaults
    return [(argument.arg, default) for argument, default in zip(arguments, padded, strict=True)]


def native_arguments(signature: str, defaults: tuple[object, ...]) -> list[tuple[str, Any]]:
    """The same for a nanobind signature, which writes a default as a backslash and its index."""
    node = ast.parse(f"{signature.replace(chr(92), '')}: ...").body[0]
    assert isinstance(node, ast.FunctionDef)
    return [
        (name, defaults[index] if isinstance(index, int) else index)
        for name, index in stub_arguments(node)
    ]


def test_functions_are_found():
    assert len(FUNCTIONS) >= 40


@pytest.mark.parametrize("function", FUNCTIONS, ids=name_of)
def test_the_stub_has_the_arguments_of_the_native_core_and_all_documentation(function):
    _, node = function
    native: Any = _core
    for name in name_of(function).split("."):
        native = getattr(native, name)
    ((signature, documentation, defaults),) = native.__nb_signature__
    assert native_arguments(signature, defaults) == stub_arguments(node)
    assert documentation is None
