# SPDX-License-Identifier: Apache-2.0
"""Options of one engine: ``--additional-config '{"hybrid_kv": {...}}'``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "hybrid_kv"
EXAMPLE = '{"hybrid_kv": {"enabled": true}}'


class HybridKVOptions(BaseModel):
    """Options of the plugin; unknown keys and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    #: False turns the hybrid manager off for this engine only. ``VLLM_HYBRID_KV=0`` turns off the
    #: whole package.
    enabled: bool = True
    #: What happens if a feature is not covered: base's manager serves the engine, or the engine
    #: refuses to start.
    on_uncovered: Literal["fallback", "error"] = "fallback"
    #: Verify all bookkeeping at every scheduler step. Slow; for debugging.
    check_integrity: bool = False

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> HybridKVOptions:
        """Options from vLLM's additional config, with defaults for those that are not set.

        Raises:
            ValueError: in one line that names the setting, what is accepted, and its value.
        """
        if isinstance(additional_config, str):  # vLLM keeps the text of invalid JSON.
            raise ValueError(
                f"additional_config must be a JSON object such as {EXAMPLE}, "
                f"got {additional_config!r}"
            )
        if not isinstance(additional_config, dict) or KEY not in additional_config:
            return cls()
        values = additional_config[KEY]
        if not isinstance(values, dict):
            raise ValueError(
                f"additional_config: {KEY} must be an object with any of "
                f"{', '.join(cls.model_fields)}, got {values!r}"
            )
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ValueError(cls._describe(error)) from None

    @classmethod
    def from_vllm_config(cls, vllm_config: VllmConfig | None) -> HybridKVOptions:
        """Options of an engine, or the defaults for None. Raises like `from_additional_config`."""
        return cls.from_additional_config(getattr(vllm_config, "additional_config", None))

    @classmethod
    def _describe(cls, error: ValidationError) -> str:
        problem = error.errors()[0]
        name = str(problem["loc"][0])
        if name not in cls.model_fields:
            return (
                f"additional_config: options of {KEY} must be among "
                f"{', '.join(cls.model_fields)}, got {name!r}"
            )
        # Each option is a bool or a choice.
        choices = get_args(cls.model_fields[name].annotation)
        accepted = " or ".join(map(repr, choices)) or "true or false"
        return f"additional_config: {KEY}.{name} must be {accepted}, got {problem['input']!r}"
