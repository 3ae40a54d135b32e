# SPDX-License-Identifier: Apache-2.0
"""Base's model code, read but not run: the classes that a class is made of.

Few machines can import, let alone build, all of base's models; any machine can read their source.
"""

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.ClassDef | Function

#: Where layers and models come from; names from elsewhere are not followed.
_MODEL_CODE = (
    "vllm.model_executor.models.",
    "vllm.models.",
    "vllm.model_executor.layers.attention",
    "vllm.model_executor.layers.mamba",
    "vllm.model_executor.layers.mla",
    "vllm.v1.attention.backends.mla.sparse_swa",
)
#: Models that base does not have.
_OURS = str(Path(__file__).parents[2] / "vllm")
_NOT_FOLLOWED = {
    "vllm.model_executor.models.interfaces",
    "vllm.model_executor.models.interfaces_base",
    "vllm.model_executor.models.registry",
    "vllm.model_executor.models.utils",
}


@dataclass(frozen=True)
class Found:
    """A class, a function or the value of a global name, with its module."""

    module: str
    name: str
    node: ast.AST


class Module:
    """The global names that one module defines or imports."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.is_package = path.name == "__init__.py"
        self.definitions: dict[str, ast.AST] = {}
        #: Several sources, if a module imports a name from another one per platform.
        self.imports: dict[str, list[tuple[str, str | None]]] = {}
        source = path.read_text()
        # Modules of kernels take long to parse and have no layers.
        tree = ast.parse(source if "class " in source or self.is_package else "")
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname:
                        self.imports.setdefault(alias.asname, []).append((alias.name, None))
            elif isinstance(node, ast.ImportFrom):
                source = self._absolute(node)
                for alias in node.names:
                    target = (source, alias.name)
                    self.imports.setdefault(alias.asname or alias.name, []).append(target)
        for node in _global_statements(tree.body):
            if isinstance(node, Definition):
                self.definitions[node.name] = node
            elif isinstance(node, ast.Assign):
                for assigned in node.targets:
                    if isinstance(assigned, ast.Name):
                        self.definitions[assigned.id] = node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                self.definitions[node.target.id] = node.value or node.target

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parents = self.name.split(".")
        parents = parents[: len(parents) - node.level + self.is_package]
        return ".".join([*parents, *filter(None, [node.module])])


def _global_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _global_statements([*node.body, *node.orelse])


@cache
def load(name: str) -> Module | None:
    """The source of a module of vLLM or of this package; None if there is none."""
    root = importlib.util.find_spec("vllm")
    assert root is not None and root.submodule_search_locations
    for folder in (*root.submodule_search_locations, _OURS):
        path = Path(folder, *name.split(".")[1:])
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return Module(name, candidate)
    return None


@cache
def resolve(module_name: str, name: str) -> tuple[Found, ...]:
    """The definitions of a global name of a module; several where platforms differ."""
    followed = f"{module_name}.".startswith(_MODEL_CODE) or module_name.startswith(_MODEL_CODE)
    if not followed or module_name in _NOT_FOLLOWED:
        return ()
    module = load(module_name)
    if module is None:
        return ()
    if name in module.definitions:
        return (Found(module_name, name, module.definitions[name]),)
    found: list[Found] = []
    for source, source_name in module.imports.get(name, []):
        if source_name is not None and (source, source_name) != (module_name, name):
            found += resolve(source, source_name)
    if not found and module.is_package and name in _lazy_names(module):
        # A package that imports its model lazily.
        for platform in ("nvidia", "amd"):
            found += resolve(f"{module_name}.{platform}.model", name)
    return tuple(dict.fromkeys(found))


def _lazy_names(module: Module) -> set[str]:
    exported = module.definitions.get("__all__")
    values = exported.elts if isinstance(exported, ast.List | ast.Tuple) else []
    return {str(value.value) for value in values if isinstance(value, ast.Constant)}


def parents(found: Found) -> list[Found]:
    """The base classes of a class that are model code, in order."""
    assert isinstance(found.node, ast.ClassDef)
    # Names in calls count too: a function may make the base class from its argument.
    bases = [node for base in found.node.bases for node in ast.walk(base)]
    names = [node.id for node in bases if isinstance(node, ast.Name)]
    return [
        parent
        for name in names
        for parent in resolve(found.module, name)
        if isinstance(parent.node, ast.ClassDef) and parent != found
    ]


@cache
def ancestry(found: Found) -> tuple[Found, ...]:
    """A class and its ancestors, roughly in method resolution order."""
    result = [found]
    for parent in parents(found):
        result += [ancestor for ancestor in ancestry(parent) if ancestor not in result]
    return tuple(result)


def methods(found: Found) -> dict[str, Function]:
    """The methods that a class defines itself."""
    assert isinstance(found.node, ast.ClassDef)
    return {node.name: node for node in found.node.body if isinstance(node, Function)}
