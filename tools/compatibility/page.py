# SPDX-License-Identifier: Apache-2.0
"""The generated parts of ``docs/compatibility.md``."""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

from tools.compatibility.architectures import (
    CHECKPOINTS,
    DIFFUSION,
    EXPLICIT,
    NEVER,
    NOT_FOLLOWED,
    PLAIN,
    Architecture,
    all_architectures,
)
from tools.compatibility.facts import facts_of_kinds, reason_for_base
from tools.compatibility.features import FACTORY_TEST, FEATURES, SECTIONS
from vllm.v1.core.hybrid.plamo2 import PLAMO2

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"

_ENGINE = "tests/v1/e2e/test_token_equality.py::"
CONTENT_TEST = "tests/v1/core/hybrid/test_architectures.py::test_content"

#: The architecture of each tiny checkpoint, and the test that runs it on the real engine.
ENGINE_TESTS = {
    "tiny-gemma3": ("Gemma3ForCausalLM", _ENGINE + "test_prefix_cache"),
    "tiny-gemma3-images": (
        "Gemma3ForConditionalGeneration",
        "tests/v1/e2e/test_multimodal.py::test_images",
    ),
    "tiny-gemma2": ("Gemma2ForCausalLM", _ENGINE + "test_prefix_cache"),
    "tiny-mistral": ("MistralForCausalLM", _ENGINE + "test_prefix_cache"),
    "tiny-llama": ("LlamaForCausalLM", _ENGINE + "test_prefix_cache_without_windows"),
    "tiny-llama4": ("Llama4ForCausalLM", _ENGINE + "test_prefix_cache_without_windows"),
    "tiny-granite4": (
        "GraniteMoeHybridForCausalLM",
        _ENGINE + "test_mamba_without_prefix_cache",
    ),
    "tiny-falcon-h1": ("FalconH1ForCausalLM", _ENGINE + "test_mamba_without_prefix_cache"),
    "tiny-whisper": ("WhisperForConditionalGeneration", _ENGINE + "test_whisper"),
    "tiny-plamo2": (PLAMO2, "tests/v1/e2e/test_plamo2.py::test_states_from_the_prefix_cache"),
}
_AND_OTHERS = ", and those of its language model"
#: Kinds of KV cache that `CONTENT_TEST` can simulate.
WITH_CONTENT = {"full", "MLA", "sliding", "sliding MLA", "chunked", "Mamba", CHECKPOINTS, "cross"}


# -------------------------------------------------------------------------------- who manages


@cache
def served_together(kinds: frozenset[str], caching: bool) -> tuple[frozenset[str], ...]:
    """The largest sets of an architecture's kinds that the hybrid manager serves in one model."""

    def is_served(some: frozenset[str]) -> bool:
        return bool(some - PLAIN) and reason_for_base(facts_of_kinds(some, caching)) is None

    alone = frozenset(
        kind for kind in kinds if reason_for_base(facts_of_kinds({kind}, caching)) is None
    )
    if is_served(alone):
        return (alone,)
    # Two of the kinds cannot be served together.
    fewer = [alone - {kind} for kind in sorted(alone)]
    return tuple(some for some in fewer if is_served(some))


def reason(architecture: Architecture, caching: bool) -> str | None:
    """Why base serves a model that has all of the kinds; None if the hybrid manager does."""
    is_diffusion = architecture.name in DIFFUSION
    return _reason(architecture.kinds, caching, is_diffusion)


@cache
def _reason(kinds: frozenset[str], caching: bool, is_diffusion: bool) -> str | None:
    return reason_for_base(facts_of_kinds(kinds, caching, is_diffusion))


def managed_by(architecture: Architecture, caching: bool) -> str:
    """``"hybrid"``, or base with the reason and, if base serves only some models, which ones."""
    why = reason(architecture, caching)
    if why is None:
        return "hybrid"
    served = served_together(architecture.kinds, caching)
    if architecture.name in DIFFUSION or not served:
        return f"base: {why}"
    others = sorted(architecture.kinds.difference(*served), key=str.lower)
    if not others:
        return f"base with all of these kinds in one model ({why}); else hybrid"
    return f"base with layers of these kinds: {', '.join(others)} ({why}); else hybrid"


def kinds_with_content(page: str) -> list[frozenset[str]]:
    """The distinct sets of kinds in a page's table of architectures that the hybrid manager serves,
    in whole or in part, with prefix caching on or off.
    """
    table = page.partition("<!-- generated: architectures -->")[2].partition("<!-- end -->")[0]
    rows = re.findall(r"^\| `\w+` \| (.*?) \| (.*?) \|", table, flags=re.MULTILINE)
    served = {kinds.removesuffix(_AND_OTHERS) for kinds, by in rows if re.search(r"\bhybrid\b", by)}
    return sorted({frozenset(kinds.split(", ")) for kinds in served}, key=sorted)


# ------------------------------------------------------------------------------------- tables


def feature_tables() -> str:
    parts = []
    for section in SECTIONS:
        rows = []
        for feature in FEATURES:
            if feature.section == section:
                why = reason_for_base(feature.facts())
                by = "hybrid" if why is None else f"base: {why}"
                rows.append((feature.name, by, _link(feature.test)))
        parts.append(f"### {section}\n\n{_table(('', 'managed by', 'shown by'), rows)}")
    return "\n\n".join(parts)


def architecture_table() -> str:
    rows = []
    for architecture in all_architectures():
        if architecture.is_hybrid:
            off, on = (managed_by(architecture, caching) for caching in (False, True))
            by = on if on == off else f"prefix caching on: {on}; off: {off}"
            kinds = ", ".join(sorted(architecture.kinds, key=str.lower))
            if architecture.wraps_any_model:
                kinds += _AND_OTHERS
            rows.append((f"`{architecture.name}`", kinds, by, _link(_test_of(architecture))))
    return _table(("architecture", "KV cache of its layers", "managed by", "shown by"), rows)


def _test_of(architecture: Architecture) -> str:
    for name, test in ENGINE_TESTS.values():
        if name == architecture.name:
            return test
    served = {
        some for caching in (True, False) for some in served_together(architecture.kinds, caching)
    }
    if architecture.name not in DIFFUSION and served and all(s <= WITH_CONTENT for s in served):
        return CONTENT_TEST
    return FACTORY_TEST


def wrappers() -> str:
    names = [a.name for a in all_architectures() if a.wraps_any_model and not a.is_hybrid]
    return f"There are {len(names)} of them: {_code(names)}."


def counts() -> str:
    everything = [a for a in all_architectures() if a.name != PLAMO2]
    hybrid = sum(a.is_hybrid for a in everything)
    wrap = sum(a.wraps_any_model and not a.is_hybrid for a in everything)
    return (
        f"The registry has {len(everything)} architectures: {hybrid} are hybrid, {wrap} take any "
        f"language model, and the other {len(everything) - hybrid - wrap} have no KV cache, or "
        "have only layers with full attention or MLA."
    )


def exceptions() -> str:
    """Exceptions that base's code does not show."""
    lines = [f"- `{name}` is not followed: it {why}." for name, why in NOT_FOLLOWED.items()]
    lines += [
        f"- {kind} is left out although the code has it: {why}." for kind, why in NEVER.items()
    ]
    lines += [
        f"- `{name}` ({', '.join(sorted(kinds))}): {why}."
        for name, (kinds, why) in EXPLICIT.items()
    ]
    lines += [f"- {_code(sorted(DIFFUSION))} generates by diffusion."]
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _link(test: str) -> str:
    """File and function of a test, or ``the factory's choice``."""
    return "the factory's choice" if test == FACTORY_TEST else f"`{test.removeprefix('tests/')}`"


PARTS: dict[str, Callable[[], str]] = {
    "features": feature_tables,
    "counts": counts,
    "architectures": architecture_table,
    "wrappers": wrappers,
    "exceptions": exceptions,
}


def fill(page: str) -> str:
    """A page with new generated parts. The rest is written by hand.

    A part is between ``<!-- generated: NAME -->`` and ``<!-- end -->``.

    Raises:
        ValueError: if a part is missing, unknown or repeated.
    """
    found = re.findall(r"<!-- generated: (\w+) -->", page)
    if sorted(found) != sorted(PARTS):
        raise ValueError(f"the parts of the page must be {sorted(PARTS)}, each once, got {found}")
    return re.sub(
        r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}\n{PARTS[match[2]]()}\n\n{match[3]}",
        page,
        flags=re.DOTALL,
    )
