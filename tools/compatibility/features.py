# SPDX-License-Identifier: Apache-2.0
"""The features of an engine, and the test that shows each of them with the hybrid manager.

Which manager serves a feature is not written here: the factory's own list decides that.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch

from tools.compatibility.architectures import CHECKPOINTS
from tools.compatibility.facts import (
    BLOCK_SIZE,
    EngineFacts,
    facts_of,
    facts_of_kinds,
    make_engine_config,
    spec_of,
)
from vllm.config import speculative
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_cache_interface import (
    HiSparseHotSpec,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    KVCacheSpec,
)

_UNIT = "tests/v1/core/hybrid/"
_ENGINE = "tests/v1/e2e/test_token_equality.py::"
_FEATURES = "tests/v1/e2e/test_engine_features.py::"
_SERVER = "tests/entrypoints/test_openai_server.py::"
_ORACLE = _UNIT + "test_oracle.py::"
_SHAPES = _UNIT + "test_oracle_shapes.py::"
_STATES = _UNIT + "test_oracle_mamba.py::"
_MANAGER = _UNIT + "test_kv_cache_manager.py::"
_COVERAGE = _UNIT + "test_coverage.py::"
_IMAGES = "tests/v1/e2e/test_multimodal.py::"
_DRAFTS = "tests/v1/e2e/test_speculative_decoding.py::"
_OFFLINE = "tests/v1/e2e/test_offline_llm.py::"

#: Shows for every feature that the factory builds the manager in the table.
FACTORY_TEST = _UNIT + "test_compatibility.py::test_the_factory_decides_as_the_table_says"


@dataclass(frozen=True)
class Feature:
    """A row of the table."""

    section: str
    name: str
    #: A function, because the configuration of an engine takes time to create.
    facts: Callable[[], EngineFacts]
    #: A pytest node, without parameters.
    test: str = FACTORY_TEST


def _full(**changes: Any) -> Callable[[], EngineFacts]:
    """An engine with these changes, whose model has full attention and windows."""
    return lambda: facts_of([spec_of("full"), spec_of("sliding")], make_engine_config(**changes))


def _kinds(*kinds: str, caching: bool = True) -> Callable[[], EngineFacts]:
    return lambda: facts_of_kinds(kinds, caching)


def _group(**changes: Any) -> Callable[[], EngineFacts]:
    """A KV cache group with these fields beside its spec."""
    group = KVCacheGroupSpec(["layer.0"], spec_of("full"), **changes)
    return lambda: facts_of([group], make_engine_config())


def _with(facts: Callable[[], EngineFacts], **changes: Any) -> Callable[[], EngineFacts]:
    return lambda: replace(facts(), **changes)


def _spec(spec: KVCacheSpec) -> Callable[[], EngineFacts]:
    return lambda: facts_of([spec], make_engine_config())


def _changed(kind: str, **changes: Any) -> KVCacheSpec:
    return replace(spec_of(kind), **changes)


ATTENTION = "KV cache of a layer"
_ATTENTION = [
    ("full attention", _kinds("full"), _ENGINE + "test_prefix_cache_without_windows"),
    ("MLA", _kinds("MLA"), _UNIT + "test_differential_cases.py::test_mla"),
    ("full attention in which prompt tokens see the whole prompt (prefix LM)",
     _spec(_changed("full", non_causal=True))),
    ("sliding window", _kinds("sliding"), _ENGINE + "test_prefix_cache"),
    ("the same window in all layers (Mistral, Starcoder 2)", _kinds("sliding"),
     "tests/v1/e2e/test_correctness_sliding_window.py::test_windows_alone"),
    ("sliding window in the cache format of MLA", _kinds("sliding MLA"),
     _COVERAGE + "test_sliding_window_in_the_cache_format_of_mla_is_covered"),
    ("sliding window that is replayed instead of cached (`bounded_replay`)",
     _spec(_changed("sliding MLA", bounded_replay=True))),
    ("chunked local attention", _kinds("chunked", "full"),
     _ENGINE + "test_prefix_cache_without_windows"),
    ("Mamba and other linear attention without prefix caching (mode `none`)",
     _kinds("Mamba", caching=False), _STATES + "test_random"),
    ("Mamba and other linear attention with prefix caching (mode `align`)", _kinds("Mamba"),
     "tests/v1/e2e/test_plamo2.py::test_states_from_the_prefix_cache"),
    ("Mamba 2 and KDA, which can keep a state in the middle of a step, without prefix caching",
     _kinds(CHECKPOINTS, caching=False), _ENGINE + "test_mamba_without_prefix_cache"),
    ("Mamba 2 and KDA with prefix caching", _kinds(CHECKPOINTS),
     _STATES + "test_a_state_in_the_middle_of_a_step"),
    ("Mamba layers of which only some can keep a state in the middle of a step",
     _kinds("Mamba", CHECKPOINTS),
     _COVERAGE + "test_base_serves_states_that_differ_in_where_they_are_kept"),
    ("Mamba with prefix hits inside of a block (`prefix_match_unit`, or a smaller block elsewhere)",
     _with(_kinds("Mamba", "full"), hash_block_size=BLOCK_SIZE // 2),
     _COVERAGE + "test_base_serves_hits_inside_of_a_block_of_states"),
    ("cross attention", _kinds("cross", "full"),
     _UNIT + "test_oracle_cross_attention.py::test_random"),
    ("full attention with sink tokens in blocks of their own", _kinds("sink")),
    ("R-SWA: the prompt and a window", _kinds("R-SWA")),
    ("a circular buffer for each request", _kinds("circular buffer")),
    ("HiSparse: hot blocks on the device",
     _spec(HiSparseHotSpec(block_size=BLOCK_SIZE, page_size=4096, blocks_per_request=1))),
    ("HiSparse: all blocks on the host",
     _group(role=KVCacheGroupRole.HISPARSE_SOURCE, host_resident=True)),
    ("a group that is left out of KV transfer", _group(enable_kv_transfer=False)),
]  # fmt: skip

MODELS = "Models"
_MODELS = [
    ("several kinds of KV cache in one model, in any number of groups",
     _kinds("full", "sliding", "chunked"), _SHAPES + "test_shape_in_a_small_pool"),
    ("several kinds of KV cache with unequal block sizes",
     lambda: facts_of([spec_of("full"), _changed("sliding", block_size=4 * BLOCK_SIZE)],
                      make_engine_config()),
     _SHAPES + "test_shape_in_a_small_pool"),
    ("KV caches in two precisions, whose new blocks are zeroed",
     lambda: facts_of([spec_of("full"), _changed("sliding", dtype=torch.float32)],
                      make_engine_config()),
     _MANAGER + "test_mixed_precision_caches_have_their_new_blocks_zeroed"),
    ("models without KV cache: pooling models with an encoder, attention-free models", _kinds(),
     _OFFLINE + "test_embedding_model_without_kv_cache"),
    ("encoder-decoder models", _kinds("cross", "full"), _ENGINE + "test_whisper"),
    ("encoder-decoder models with prefix caching requested",
     lambda: facts_of([spec_of("full"), spec_of("cross")],
                      make_engine_config(model={"is_encoder_decoder": True})),
     _ENGINE + "test_whisper_with_prefix_caching_requested"),
    ("vision models (Gemma 3 with its vision tower)", _kinds("sliding", "full"),
     _IMAGES + "test_images_with_preemption"),
    ("diffusion models", lambda: facts_of_kinds({"full"}, is_diffusion=True),
     _COVERAGE + "test_models"),
]  # fmt: skip

CACHING = "Prefix caching"
_CACHING = [
    ("prefix caching on", _full(), _ENGINE + "test_prefix_cache"),
    ("prefix caching off", _full(caching=False), _ENGINE + "test_no_prefix_cache"),
    ("retention `None`, 0, and an interval", _full(), _ENGINE + "test_prefix_cache"),
    ("cache salt and LoRA adapters in hashes", _full(),
     _ORACLE + "test_salts_and_adapters_do_not_share"),
    ("LoRA adapters on the engine", _full(), _FEATURES + "test_adapters"),
    ("images in hashes", _full(), _ORACLE + "test_images_do_not_share"),
    ("images on the engine", _full(), _IMAGES + "test_images"),
    ("prompt embeddings in hashes", _full(), _UNIT + "test_block_hasher.py::test_extra_keys"),
    ("reset of the prefix cache, also while requests run", _full(),
     _ORACLE + "test_reset_that_preempts_running_requests"),
    ("reset of the prefix cache when weights are reloaded", _full(),
     _FEATURES + "test_sleep_and_new_weights"),
    ("KV cache events", _with(_full(), enable_kv_cache_events=True),
     _ENGINE + "test_kv_cache_events"),
    ("KV cache events over ZMQ, as a subscriber sees them",
     _with(_full(), enable_kv_cache_events=True),
     _FEATURES + "test_kv_cache_events_over_zmq"),
    ("events where a full-attention block is larger than `hash_block_size`",
     _with(_full(), enable_kv_cache_events=True, hash_block_size=BLOCK_SIZE // 2),
     _COVERAGE + "test_arguments_that_are_not_covered"),
    ("KV cache residency metrics",
     _full(observability_config__kv_cache_metrics=True),
     _OFFLINE + "test_residency_metrics"),
]  # fmt: skip

SCHEDULING = "Scheduling"
_SCHEDULING = [
    ("chunked prefill", _full(), _ENGINE + "test_chunked_prefill"),
    ("preemption", _full(), _ENGINE + "test_preemption"),
    ("priority scheduling", _full(scheduler_config__policy="priority"),
     _ENGINE + "test_priority_scheduling"),
    ("async scheduling", _full(scheduler_config__async_scheduling=True),
     _ENGINE + "test_async_scheduling"),
    ("watermark", _full(scheduler_config__watermark=0.1), _ENGINE + "test_admission"),
    ("admission without room for the whole prompt",
     _full(scheduler_config__scheduler_reserve_full_isl=False), _ENGINE + "test_admission"),
    ("hybrid manager disabled (`--disable-hybrid-kv-cache-manager`)", _full(),
     _ENGINE + "test_one_type_of_attention"),
    ("sleep, pause and wake-up (on CPUs base does everything except release the memory)", _full(),
     _FEATURES + "test_sleep_and_new_weights"),
    ("structured output", _full(), _FEATURES + "test_structured_output"),
    ("requests that end or are aborted at any point", _full(),
     _ORACLE + "test_abort_at_every_point"),
]  # fmt: skip

PARALLELISM = "Parallelism"
_PARALLELISM = [
    ("tensor parallelism", _full(parallel_config__tensor_parallel_size=2),
     _ENGINE + "test_two_tensor_parallel_ranks"),
    ("pipeline parallelism, with a simulated worker",
     _full(parallel_config__pipeline_parallel_size=2), _ORACLE + "test_preemption_and_resumption"),
    ("data parallelism, tested in one of its engines",
     _full(parallel_config__data_parallel_size=2)),
    ("workers on Ray, which base does not start on CPUs",
     _full(parallel_config__distributed_executor_backend="ray")),
    ("decode context parallelism",
     _with(_full(parallel_config__decode_context_parallel_size=2), dcp_world_size=2),
     _COVERAGE + "test_context_parallelism_of_the_engine"),
    ("prefill context parallelism", _full(parallel_config__prefill_context_parallel_size=2),
     _COVERAGE + "test_context_parallelism_of_the_engine"),
]  # fmt: skip

SPECULATION = "Speculative decoding"
#: Tests of base's methods. For the others, only the factory's choice is tested.
_SPECULATION_TESTS = {
    "ngram": _DRAFTS + "test_ngram",
    "draft_model": _DRAFTS + "test_draft_model",
    "eagle": _DRAFTS + "test_eagle",
    "mtp": _DRAFTS + "test_mtp",
}


def _speculative_methods() -> list[str]:
    """Base's methods, with all variants of MTP as one."""

    def flatten(literal: Any) -> Iterator[str]:
        for value in get_args(literal):
            yield from flatten(value) if get_args(value) else [value]

    kinds_of_mtp = set(flatten(speculative.MTPModelTypes)) - {"mtp"}
    return sorted(set(flatten(speculative.SpeculativeMethod)) - kinds_of_mtp)


def _drafts(*kinds: str, method: str = "eagle", **changes: Any) -> Callable[[], EngineFacts]:
    """A model with draft layers in the last group."""

    def facts() -> EngineFacts:
        groups = [KVCacheGroupSpec([f"layer.{i}"], spec_of(kind)) for i, kind in enumerate(kinds)]
        groups[-1] = replace(groups[-1], is_eagle_group=True)
        return facts_of(groups, make_engine_config(speculation=method, **changes))

    return facts


_SPECULATION = [
    (f"`{method}`", _full(speculation=method), _SPECULATION_TESTS.get(method, FACTORY_TEST))
    for method in _speculative_methods()
] + [
    ("draft layers in a group of their own", _drafts("full", "full"),
     _UNIT + "test_speculation.py::test_a_draft_group_is_of_the_type_with_its_spec"),
    ("draft layers with windows", _drafts("full", "sliding"),
     _UNIT + "test_oracle_speculation.py::test_branches_of_a_prefix"),
    ("draft layers with chunked local attention", _drafts("full", "chunked"),
     _COVERAGE + "test_drafting_from_hidden_states_beside_chunks_is_not_covered"),
    ("`ngram` with Mamba layers",
     lambda: facts_of([spec_of("full"), _changed("Mamba", num_speculative_blocks=2)],
                      make_engine_config(speculation="ngram")), FACTORY_TEST),
    ("several drafts at once (`parallel_drafting`)",
     _full(speculation="eagle3", speculative_config__parallel_drafting=True), FACTORY_TEST),
    ("a number of drafts that depends on the batch size",
     _full(speculation="ngram",
           speculative_config__num_speculative_tokens_per_batch_size=[(1, 4, 2)]), FACTORY_TEST),
]  # fmt: skip

CONNECTORS = "KV connectors"
_LOADS = _UNIT + "test_oracle_connector.py::"
_ON_CONNECTORS = "tests/v1/e2e/test_kv_connectors.py::"
#: Tests of base's connectors. For the others, only the factory's choice is tested.
_CONNECTOR_TESTS = {
    "DecodeBenchConnector": _ON_CONNECTORS + "test_decode_bench_connector",
    "ExampleConnector": _ON_CONNECTORS + "test_example_connector",
    "LMCacheConnectorV1": _COVERAGE + "test_engines",
    "MultiConnector": _COVERAGE + "test_kv_connectors",
    "OffloadingConnector": (
        _UNIT + "test_kv_connectors.py::test_offloading_is_not_divided_by_the_number_of_groups"
    ),
}


def _connector(name: str, module_path: str | None = None, **options: Any) -> Any:
    facts = _full(connector=name)

    def with_options() -> EngineFacts:
        engine = facts()
        assert engine.vllm_config is not None
        config = engine.vllm_config.kv_transfer_config
        assert config is not None
        config.kv_connector_module_path = module_path
        config.kv_connector_extra_config = options
        return engine

    return with_options


_CONNECTORS = [
    (f"`{name}`", _full(connector=name), _CONNECTOR_TESTS.get(name, FACTORY_TEST))
    for name in sorted(KVConnectorFactory._registry)
] + [
    ("`MultiConnector` that includes a connector that base serves",
     _connector("MultiConnector", connectors=[{"kv_connector": "LMCacheConnectorV1"}])),
    ("a connector from outside of vLLM (`kv_connector_module_path`)",
     _connector("MyConnector", module_path="my.connectors"),
     _ON_CONNECTORS + "test_connector_from_outside_falls_back"),
    ("loads that are part of a step (`num_external_computed_tokens`)",
     _full(connector="NixlConnector"), _LOADS + "test_the_same_as_base_in_a_large_pool"),
    ("loads beside the steps, delayed caching, blocks that are sent after their request has ended",
     _full(connector="NixlConnector"), _LOADS + "test_small_pools"),
    ("loads that fail, as a whole or for some blocks", _full(connector="NixlConnector"),
     _LOADS + "test_blocks_that_failed_to_load_are_computed"),
    ("Mamba layers with a KV connector",
     lambda: facts_of([spec_of("full"), spec_of("Mamba")],
                      make_engine_config(connector="NixlConnector"))),
]  # fmt: skip

SECTIONS: dict[str, list[Any]] = {
    ATTENTION: _ATTENTION,
    MODELS: _MODELS,
    CACHING: _CACHING,
    SCHEDULING: _SCHEDULING,
    PARALLELISM: _PARALLELISM,
    SPECULATION: _SPECULATION,
    CONNECTORS: _CONNECTORS,
}
FEATURES = [Feature(section, *row) for section, rows in SECTIONS.items() for row in rows]
