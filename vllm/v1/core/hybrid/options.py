# SPDX-License-Identifier: Apache-2.0
"""Options of one engine: ``--additional-config '{"hybrid_kv": {...}}'``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "hybrid_kv"


class HybridKVOptions(BaseModel):
    """Options of the hybrid KV cache; unknown keys and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    #: Off for this engine only; ``VLLM_HYBRID_KV=0`` turns the fork off altogether.
    enabled: bool = True
    #: What a feature that the fork does not cover does: base's manager, or no start.
    on_uncovered: Literal["fallback", "error"] = "fallback"
    #: Verify all bookkeeping at every scheduler step. Slow; for debugging.
    check_integrity: bool = False

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> HybridKVOptions:
        """Options from vLLM's additional config; defaults where it says nothing.

        Raises:
            ValueError: in one line, naming the setting, its value and what is accepted.
        """
        if not isinstance(additional_config, dict) or KEY not in additional_config:
            return cls()
        values = additional_config[KEY]
        if not isinstance(values, dict):
            raise ValueError(
                f"--additional-config: {KEY} is {values!r}; accepted is an object with any of "
                f"{', '.join(cls.model_fields)}"
            )
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ValueError(cls._describe(error)) from None

    @classmethod
    def from_vllm_config(cls, vllm_config: VllmConfig | None) -> HybridKVOptions:
        """Options of an engine; defaults without one. Raises as above."""
        return cls.from_additional_config(getattr(vllm_config, "additional_config", None))

    @classmethod
    def _describe(cls, error: ValidationError) -> str:
        problem = error.errors()[0]
        name = str(problem["loc"][0])
        if name not in cls.model_fields:
            return (
                f"--additional-config: {KEY}.{name} is not an option; accepted are "
                f"{', '.join(cls.model_fields)}"
            )
        # Options are switches or choices.
        choices = get_args(cls.model_fields[name].annotation)
        return (
            f"--additional-config: {KEY}.{name} is {problem['input']!r}; accepted are "
            f"{' and '.join(map(repr, choices)) or 'true and false'}"
        )
