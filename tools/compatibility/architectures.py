# SPDX-License-Identifier: Apache-2.0
"""The architectures in base's registry, and the kinds of KV cache that their layers can have.

For each class in the registry, the tool follows the classes that its code names, down to the layers
with a KV cache (``get_kv_cache_spec``). The specs that these layers can make are the kinds of the
architecture. A kind counts if the code can make it for any configuration. For example, "Llama" can
have windows, because some checkpoints that run on its code have them.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tools.compatibility.sources import Found, Function, ancestry, load, methods, resolve
from vllm.v1.core.hybrid.plamo2 import PLAMO2

_REGISTRY = "vllm.model_executor.models.registry"
_SPEC_METHOD = "get_kv_cache_spec"
#: The function that builds the language model of a multimodal model.
_BACKBONE = "init_vllm_registered_model"
#: Models that draft for another model and share its manager.
_DRAFT_TABLE = "_SPECULATIVE_DECODING_MODELS"
_TRANSFORMERS_TABLE = "_TRANSFORMERS_SUPPORTED_MODELS"
_OUR_TABLE = "ours"

#: The names of the kinds, by the spec that base makes for a layer.
KIND_OF_SPEC = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "MLA",
    "SlidingWindowSpec": "sliding",
    "SlidingWindowMLASpec": "sliding MLA",
    "ChunkedLocalAttentionSpec": "chunked",
    "MambaSpec": "Mamba",
    "CrossAttentionSpec": "cross",
    "SinkFullAttentionSpec": "sink",
    "RSWASpec": "R-SWA",
    "CircularBufferSpec": "circular buffer",
}
#: Mamba layers that can keep a state in the middle of a step.
CHECKPOINTS = "Mamba with checkpoints"
_CHECKPOINTS_ARGUMENT = "num_prefill_checkpoint_blocks"
#: Kinds that do not make a model hybrid. Base's managers treat them alike.
PLAIN = frozenset({"full", "MLA"})
#: By class of attention layer, the argument that gives the layer a window. A plain name counts in
#: any call, because such arguments are often passed on. ``Layer.argument`` counts only in the call
#: of the layer.
_WINDOW_ARGUMENTS = {
    "Attention": "per_layer_sliding_window",
    "MLAAttention": "MLAAttention.sliding_window",
}
#: Methods that build no layers.
_WITHOUT_LAYERS = {"forward", "load_weights"}

#: Classes that are not followed, and the reason.
NOT_FOLLOWED = {
    "WhisperEncoderLayer": "attends only to the audio, but has a class that the decoder also uses",
}
#: Kinds that the code has but no checkpoint can select, and the reason.
NEVER = {
    "R-SWA": "only Unlimited-OCR's configuration has `rswa_window`",
}
#: Kinds of architectures whose code does not show them, and the reason.
EXPLICIT = {
    "UnlimitedOCRForCausalLM": (
        frozenset({"R-SWA"}),
        "base sets `rswa_window` in the configuration of its language model",
    ),
    "IQuestLoopCoderForCausalLM": (
        frozenset({"full", "sliding"}),
        "every loop except the first gets a configuration with a window",
    ),
}
#: Architectures that generate by diffusion (``canvas_length`` in their configuration).
DIFFUSION = {"DiffusionGemmaForBlockDiffusion"}


@dataclass(frozen=True)
class Architecture:
    """A name in base's registry and the kinds of KV cache that its layers can have."""

    name: str
    kinds: frozenset[str]
    #: Whether the configuration of a checkpoint names the language model inside of it.
    wraps_any_model: bool = False

    @property
    def is_hybrid(self) -> bool:
        """Whether a layer can have a kind of KV cache that is not plain."""
        return bool(self.kinds - PLAIN)


@cache
def registered() -> dict[str, tuple[str, str, str]]:
    """Table, module and class of each architecture in base's registry and of PLaMo 2."""
    from vllm.model_executor.models import registry

    source = load(_REGISTRY)
    assert source is not None
    result: dict[str, tuple[str, str, str]] = {}
    for table in source.definitions:
        entries = getattr(registry, table, None)
        if table.endswith("_MODELS") and table != "_VLLM_MODELS" and isinstance(entries, dict):
            for name in entries.keys() & registry._VLLM_MODELS.keys():
                result.setdefault(name, (table, *registry._VLLM_MODELS[name]))
    assert result.keys() == registry._VLLM_MODELS.keys()
    return result | {PLAMO2: (_OUR_TABLE, "plamo2", PLAMO2)}


@cache
def all_architectures() -> tuple[Architecture, ...]:
    """Every architecture that serves requests, in alphabetical order."""
    tables = registered()
    names = sorted(tables, key=lambda name: (name.lower(), name))
    found = tuple(examine(name) for name in names if tables[name][0] != _DRAFT_TABLE)
    # Frees hundreds of MiB of syntax trees, which are no longer needed.
    for cached in (_mentions, ancestry, resolve, load):
        cached.cache_clear()
    return found


@cache
def examine(name: str) -> Architecture:
    """The kinds of KV cache that the layers of one architecture can have.

    Raises:
        LookupError: if base's source lacks the class, or if a layer makes a spec that
            `KIND_OF_SPEC` does not list.
    """
    table, module, class_name = registered()[name]
    if name in EXPLICIT:
        return Architecture(name, EXPLICIT[name][0])
    if "." not in module:
        module = f"vllm.model_executor.models.{module}"
    roots = resolve(module, class_name)
    if not roots:
        raise LookupError(f"{name}: {module} has no source of {class_name}")
    reach = _Reach()
    for root in roots:
        _follow(root, reach)
    kinds = {kind for layer in reach.layers for kind in _kinds_of(layer, reach.arguments)}
    if table == _TRANSFORMERS_TABLE and not _has_windows_in_transformers(name):
        kinds.discard("sliding")
    wraps_any_model = False
    for inner_names, may_be_another in reach.backbones:
        wraps_any_model |= may_be_another or not inner_names - {name}
        for inner in inner_names - {name}:
            kinds |= examine(inner).kinds
    return Architecture(name, frozenset(kinds - NEVER.keys()), wraps_any_model)


# --------------------------------------------------------------------------- what is reached


@dataclass
class _Reach:
    """What the code of a class leads to."""

    seen: set[Found] = field(default_factory=set)
    layers: set[Found] = field(default_factory=set)
    #: Arguments that some call gives a value.
    arguments: set[str] = field(default_factory=set)
    #: Language models that are built by their name in the registry: the names in the code, and
    #: whether the checkpoint may name another one.
    backbones: set[tuple[frozenset[str], bool]] = field(default_factory=set)


@dataclass(frozen=True)
class _Mentions:
    """The names in the code of one definition."""

    names: frozenset[str]
    arguments: frozenset[str]
    backbone: tuple[frozenset[str], bool] | None


def _follow(found: Found, reach: _Reach) -> None:
    """Collect the layers that a class, function or value is made of."""
    if found in reach.seen:
        return
    reach.seen.add(found)
    if not isinstance(found.node, ast.ClassDef):
        _follow_mentions(found.module, [found.node], frozenset(), reach)
        return
    if any(ancestor.name in NOT_FOLLOWED for ancestor in ancestry(found)):
        return
    if any(_SPEC_METHOD in methods(ancestor) for ancestor in ancestry(found)):
        reach.layers.add(found)
    overridden = set(_WITHOUT_LAYERS)
    given: frozenset[str] = frozenset()
    for ancestor in ancestry(found):
        assert isinstance(ancestor.node, ast.ClassDef)
        own = methods(ancestor)
        body = [node for node in ancestor.node.body if not _names_defined(node) & overridden]
        _follow_mentions(ancestor.module, body, given, reach)
        overridden |= {name for node in body for name in _names_defined(node)}
        if "__init__" in own:
            arguments = _arguments_of_super(own["__init__"])
            if arguments is not None:
                # The constructor of the parent runs too, without the defaults of these arguments.
                overridden.discard("__init__")
                given |= arguments


def _names_defined(node: ast.stmt) -> set[str]:
    """The names that a statement in the body of a class defines."""
    if isinstance(node, Function):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _follow_mentions(
    module: str, nodes: Sequence[ast.AST], given: frozenset[str], reach: _Reach
) -> None:
    mentions = [_mentions(node, given) for node in nodes]
    names = {name for m in mentions for name in m.names}
    reach.arguments.update(*(m.arguments for m in mentions))
    reach.backbones.update(m.backbone for m in mentions if m.backbone is not None)
    for name in names:
        for found in resolve(module, name):
            _follow(found, reach)


@cache
def _mentions(node: ast.AST, given: frozenset[str]) -> _Mentions:
    """Collect names; the defaults of the parameters in ``given`` do not count."""
    names: set[str] = set()
    words: set[str] = set()
    arguments: set[str] = set()
    parameters: set[str] = set()
    architectures: list[ast.expr] | None = None
    for child in _evaluated(node, given):
        if isinstance(child, ast.Name):
            names.add(child.id)
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            words.add(child.value)
        elif isinstance(child, ast.arguments):
            parameters |= {a.arg for a in [*child.posonlyargs, *child.args, *child.kwonlyargs]}
        elif isinstance(child, ast.Call):
            callee = child.func.id if isinstance(child.func, ast.Name) else ""
            if callee == _BACKBONE:
                architectures = [k.value for k in child.keywords if k.arg == "architectures"]
            passed = {k.arg for k in child.keywords if k.arg and _gives(k, parameters)}
            arguments |= passed | {f"{callee}.{argument}" for argument in passed}
    arguments |= words & set(_WINDOW_ARGUMENTS.values())  # in a dict of arguments
    backbone = None
    if architectures is not None:
        may_be_another = not architectures or not _is_given(architectures[0], node)
        backbone = (frozenset(words & registered().keys()), may_be_another)
    return _Mentions(frozenset(names), frozenset(arguments), backbone)


def _is_given(value: ast.expr, around: ast.AST) -> bool:
    """Whether the code itself lists the possible values."""
    if isinstance(value, ast.Name):
        values = [
            assignment.value
            for assignment in ast.walk(around)
            if isinstance(assignment, ast.Assign)
            and any(isinstance(t, ast.Name) and t.id == value.id for t in assignment.targets)
        ]
        return bool(values) and all(isinstance(v, ast.List) for v in values)
    return isinstance(value, ast.List)


def _gives(keyword: ast.keyword, parameters: set[str]) -> bool:
    """Whether this call gives an argument a value: neither None nor one handed on."""
    value = keyword.value
    if isinstance(value, ast.Constant):
        return value.value is not None
    return not (isinstance(value, ast.Name) and value.id == keyword.arg and value.id in parameters)


def _evaluated(node: ast.AST, given: frozenset[str]) -> Iterator[ast.AST]:
    """All nodes below a node that Python may evaluate to build layers.

    Skipped are annotations, the types in ``isinstance``, the defaults of ``given``, and a class
    of which only an attribute is read.
    """
    yield node
    if isinstance(node, ast.arguments):
        named = [*node.posonlyargs, *node.args]
        pairs = list(zip(named[len(named) - len(node.defaults) :], node.defaults, strict=True))
        pairs += [(a, d) for a, d in zip(node.kwonlyargs, node.kw_defaults, strict=True) if d]
        for parameter, default in pairs:
            if parameter.arg not in given:
                yield from _evaluated(default, given)
        return
    skipped: list[ast.AST | None] = []
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        skipped = [*node.args] if node.func.id in ("isinstance", "issubclass", "super") else []
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        skipped = [node.value]  # an attribute of a class, not the class
    elif isinstance(node, ast.AnnAssign):
        skipped = [node.annotation]
    elif isinstance(node, Function):
        skipped = [node.returns, *node.decorator_list]
    for child in ast.iter_child_nodes(node):
        if child not in skipped:
            yield from _evaluated(child, given)


def _arguments_of_super(init: Function) -> frozenset[str] | None:
    """The keyword arguments of ``super().__init__``; None if it is not called."""
    for node in ast.walk(init):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "__init__"
            and isinstance(node.func.value, ast.Call)
            and not node.func.value.args  # super(Parent, self) passes over the parent
        ):
            return frozenset(k.arg for k in node.keywords if k.arg)
    return None


# ------------------------------------------------------------------------- what a layer makes


def _kinds_of(layer: Found, arguments: set[str]) -> Iterator[str]:
    """The kinds of the specs that a layer can make if calls give it these ``arguments``."""
    has_checkpoints = False
    for ancestor in ancestry(layer):
        method = methods(ancestor).get(_SPEC_METHOD)
        if method is None:
            continue
        calls = [node for node in ast.walk(method) if isinstance(node, ast.Call)]
        has_checkpoints |= any(
            keyword.arg == _CHECKPOINTS_ARGUMENT for call in calls for keyword in call.keywords
        )
        specs = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
        unknown = {spec for spec in specs if spec.endswith("Spec")} - KIND_OF_SPEC.keys()
        if unknown:
            raise LookupError(f"{layer.name} makes {unknown}, which `KIND_OF_SPEC` does not list")
        for spec in specs & KIND_OF_SPEC.keys():
            kind = KIND_OF_SPEC[spec]
            needed = _WINDOW_ARGUMENTS.get(ancestor.name)
            if needed is None or "sliding" not in kind or needed in arguments:
                yield CHECKPOINTS if kind == "Mamba" and has_checkpoints else kind
        # A method that changes the spec of its parent has its kind; one that returns None, none.
        if specs & KIND_OF_SPEC.keys() or "super" not in specs:
            return


# ------------------------------------------------------------ models of the library transformers


def _has_windows_in_transformers(name: str) -> bool:
    """Whether the configuration of a model that runs on transformers' code has windows.

    Base's code for such models accepts any ``layer_types`` of the configuration.
    """
    from transformers.models.auto import modeling_auto

    root = find_spec("transformers")
    assert root is not None and root.submodule_search_locations
    for mapping in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    ):
        for model_type, architecture in mapping.items():
            if architecture == name:
                folder = Path(root.submodule_search_locations[0], "models", model_type)
                sources = folder.glob("configuration_*.py")
                return any("sliding_attention" in source.read_text() for source in sources)
    return False
