# SPDX-License-Identifier: Apache-2.0
"""Which features base's manager serves, and which reason is given."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from support.kv_configs import KVSetup, chunked, cross, full, mamba, mla, sliding
from support.model_configs import write_config
from support.plugin_state import plugin_state_restored
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.hybrid import KVCacheManager
from vllm.v1.core.hybrid.attention_type import describe
from vllm.v1.core.hybrid.coordinators import KVCacheCoordinatorNoPrefixCache
from vllm.v1.core.hybrid.coverage import EngineFacts, find_uncovered_feature
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    HiSparseHotSpec,
    KVCacheConfig,
    KVCacheGroupRole,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_spec_registry import _REGISTRY_KVCACHESPEC_LIST, KVCacheSpecRegistry

SHAPE: dict[str, Any] = dict(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
MAMBA: dict[str, Any] = dict(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
FULL = KVCacheGroupSpec(["layer.0"], FullAttentionSpec(**SHAPE))


@pytest.fixture(autouse=True)
def _plugin():
    with plugin_state_restored():
        yield


def facts_of(*groups: KVCacheGroupSpec | KVCacheSpec, **changes: Any) -> EngineFacts:
    all_groups = [
        group if isinstance(group, KVCacheGroupSpec) else KVCacheGroupSpec(["layer.1"], group)
        for group in groups
    ]
    return EngineFacts(KVCacheConfig(100, [], all_groups), hash_block_size=16, **changes)


# ----------------------------------------------------------------------------- covered


@pytest.mark.parametrize(
    "kinds",
    [
        (),
        (full(16),),
        (mla(16, 2),),
        (sliding(64, 16, 3),),
        (full(16), sliding(64, 16, 5)),
        (full(32), sliding(64, 16), mla(8)),
        (full(16), chunked(64, 16, 3)),
        (chunked(64, 16), chunked(128, 16)),
        (mamba(16, 3),),
        (full(16), mamba(16, 3)),
        (mamba(16), sliding(64, 16, 2)),
        (full(16, dtype="float16"), full(16, variant=1)),
    ],
)
def test_covered(kinds):
    setup = KVSetup(kinds, num_blocks=100)
    facts = EngineFacts(
        setup.kv_cache_config(), setup.resolved_hash_block_size, vllm_config=VllmConfig()
    )
    assert find_uncovered_feature(facts) is None
    assert setup.build(KVCacheManager).num_kv_cache_groups == len(setup.groups)


def test_sliding_window_in_the_cache_format_of_mla_is_covered():
    assert (
        find_uncovered_feature(facts_of(SlidingWindowMLASpec(**SHAPE, sliding_window=64))) is None
    )


def test_mamba_without_prefix_caching_is_covered():
    assert find_uncovered_feature(facts_of(FULL, MambaSpec(**MAMBA))) is None


def test_base_serves_states_that_differ_in_where_they_are_kept():
    align = {**MAMBA, "mamba_cache_mode": "align"}
    kept = MambaSpec(**align, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1)
    assert find_uncovered_feature(facts_of(FULL, kept, kept)) is None
    assert find_uncovered_feature(facts_of(FULL, kept, MambaSpec(**align))) == (
        "Mamba layers that differ in whether they keep states in the middle of a step"
    )


def test_base_serves_states_in_the_middle_of_a_step_with_unequal_block_sizes():
    setup = KVSetup((full(32), mamba(16, checkpoint_alignment=1)), num_blocks=100)
    facts = EngineFacts(setup.kv_cache_config(), setup.resolved_hash_block_size)
    assert find_uncovered_feature(facts) == (
        "keeping Mamba states in the middle of a step with unequal block sizes "
        "(16 and, for hits, 32)"
    )
    setup = KVSetup((full(32), mamba(16)), num_blocks=100)
    facts = EngineFacts(setup.kv_cache_config(), setup.resolved_hash_block_size)
    assert find_uncovered_feature(facts) is None


@pytest.mark.parametrize("mode", ["none", "align"])
@pytest.mark.parametrize("drafts", [{"use_eagle": True}, {"num_prefill_lookahead": 2}])
def test_base_serves_states_with_drafts(drafts: dict, mode: str) -> None:
    """This includes specs without blocks for drafts, such as those of base's RecoverSSM."""
    facts = facts_of(FULL, MambaSpec(**MAMBA, mamba_cache_mode=mode))
    assert find_uncovered_feature(facts) is None
    assert find_uncovered_feature(replace(facts, **drafts)) == "Mamba with speculative decoding"


def test_base_serves_hits_inside_of_a_block_of_states():
    setup = KVSetup((full(16), mamba(16)), num_blocks=100, hash_block_size=8)
    facts = EngineFacts(setup.kv_cache_config(), setup.resolved_hash_block_size)
    assert find_uncovered_feature(facts) == (
        "prefix hits inside of a Mamba block (prefix match unit 8)"
    )


def test_events_with_blocks_of_the_size_of_hashes_are_covered():
    facts = facts_of(FULL, SlidingWindowSpec(**SHAPE, sliding_window=64))
    assert find_uncovered_feature(replace(facts, enable_kv_cache_events=True)) is None


def test_cross_attention_is_covered_and_caches_nothing():
    facts = facts_of(FULL, CrossAttentionSpec(**SHAPE))
    assert find_uncovered_feature(facts) is None
    for caching in (False, True):
        manager = KVSetup((full(16), cross(16)), 100, caching=caching).build(KVCacheManager)
        assert type(manager.coordinator) is KVCacheCoordinatorNoPrefixCache
        assert describe(manager.attention_types) == (
            "2 managers for 2 KV cache groups: full_attention (1 group, block size 16); "
            "cross_attention (1 group, block size 16)"
        )


def test_base_gives_encoder_only_attention_no_kv_cache_group():
    """Its layers have no spec, so BERT has no groups. Only workers add a group, for themselves."""
    assert KVCacheSpecRegistry.get_manager_class(EncoderOnlyAttentionSpec(**SHAPE)) is None


@pytest.mark.parametrize("caching", [False, True])
def test_a_model_without_kv_cache_groups_is_covered(caching):
    """For example BERT, or Prithvi, which has no attention layers of base."""
    assert find_uncovered_feature(facts_of()) is None
    manager = KVSetup((), 1, caching=caching).build(KVCacheManager)
    assert type(manager.coordinator) is KVCacheCoordinatorNoPrefixCache
    assert describe(manager.attention_types) == "no KV cache groups"


# ------------------------------------------------------------------ kinds of KV cache groups


@dataclass(frozen=True, kw_only=True)
class PlatformSpec(FullAttentionSpec):
    """A spec that a platform plugin registers with its own manager."""


class PlatformManager(FullAttentionManager):
    pass


@pytest.fixture
def platform_spec():
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(PlatformSpec, PlatformManager)
    yield PlatformSpec(**SHAPE)
    del _REGISTRY_KVCACHESPEC_LIST[PlatformSpec]


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (MambaSpec(**MAMBA, mamba_cache_mode="new"), "the Mamba cache mode new"),
        (MambaSpec(**MAMBA, num_speculative_blocks=2), "Mamba with speculative decoding"),
        (EncoderOnlyAttentionSpec(**SHAPE), "encoder-only attention"),
        (SinkFullAttentionSpec(**SHAPE, sink_len=4), "full attention with a sink"),
        (RSWASpec(**SHAPE, rswa_window=64), "KV cache spec RSWASpec"),
        (CircularBufferSpec(**SHAPE), "KV cache spec CircularBufferSpec"),
        (
            HiSparseHotSpec(block_size=16, page_size=4096, blocks_per_request=1),
            "KV cache spec HiSparseHotSpec",
        ),
        (
            SlidingWindowMLASpec(**SHAPE, sliding_window=64, bounded_replay=True),
            "SlidingWindowMLASpec that opts out of prefix caching",
        ),
    ],
)
def test_kinds_that_are_not_covered_are_named_with_their_group(spec, name):
    facts = facts_of(FULL, spec)
    assert find_uncovered_feature(facts) == f"{name} (KV cache group 1)"


def test_a_platforms_spec_stays_with_the_platforms_manager(platform_spec):
    reason = find_uncovered_feature(facts_of(platform_spec))
    assert reason == "KV cache spec PlatformSpec (KV cache group 0)"


def test_a_spec_of_an_unexpected_kind_is_not_covered_whatever_its_manager():
    @dataclass(frozen=True)
    class ForeignSpec(KVCacheSpec):
        pass

    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(ForeignSpec, FullAttentionManager)
    try:
        reason = find_uncovered_feature(facts_of(ForeignSpec(block_size=16)))
    finally:
        del _REGISTRY_KVCACHESPEC_LIST[ForeignSpec]
    assert reason == "KV cache spec ForeignSpec (KV cache group 0)"


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"host_resident": True}, "a KV cache on the host"),
        ({"enable_kv_transfer": False}, "a KV cache that is left out of KV transfer"),
        ({"role": KVCacheGroupRole.HISPARSE_SOURCE}, "the role hisparse_source"),
        ({"role": KVCacheGroupRole.HISPARSE_INDEXER}, "the role hisparse_indexer"),
    ],
)
def test_groups_with_a_special_part_are_not_covered(changes, name):
    facts = facts_of(FULL, replace(FULL, **changes))
    assert find_uncovered_feature(facts) == f"{name} (KV cache group 1)"


# --------------------------------------------------------------------- speculative decoding


def test_drafters_of_all_kinds_are_covered():
    window = SlidingWindowSpec(**SHAPE, sliding_window=64, extra_retained_tokens=2)
    draft = KVCacheGroupSpec(["draft.0"], window, is_eagle_group=True)
    assert find_uncovered_feature(facts_of(FULL, draft)) is None
    facts = facts_of(FULL, draft, use_eagle=True, num_prefill_lookahead=3)
    assert find_uncovered_feature(facts) is None


@pytest.mark.parametrize("flagged", [False, True])
def test_drafting_from_hidden_states_beside_chunks_is_not_covered(flagged):
    """Base's manager also refuses such a group, in its first lookup."""
    chunks = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)
    draft = KVCacheGroupSpec(["layer.1"], chunks, is_eagle_group=flagged)
    reason = "speculative decoding from hidden states with chunked local attention"
    facts = facts_of(FULL, draft, use_eagle=not flagged)
    assert find_uncovered_feature(facts) == f"{reason} (KV cache group 1)"
    # With the draft layer in another group, the chunks are covered.
    facts = facts_of(chunks, replace(FULL, is_eagle_group=True), use_eagle=True)
    assert find_uncovered_feature(facts) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"method": "eagle3"}, None),
        ({"method": "mtp"}, None),
        ({"method": "draft_model"}, None),
        ({"method": "suffix"}, None),
        ({"method": "dflash"}, "speculative decoding with dflash"),
        ({"method": "dspark"}, "speculative decoding with dspark"),
        ({"method": "extract_hidden_states"}, "speculative decoding with extract_hidden_states"),
        ({"method": "custom_class"}, "speculative decoding with custom_class"),
        ({"parallel_drafting": True}, "speculative decoding with parallel drafting"),
        (
            {"num_speculative_tokens_per_batch_size": [(1, 4, 2)]},
            "speculative decoding with a number of drafts that depends on the batch size",
        ),
    ],
)
def test_speculative_methods(tmp_path, changes, reason):
    speculation = {"method": "ngram", "num_speculative_tokens": 2}
    model = str(write_config(tmp_path, "gemma3"))
    args = EngineArgs(
        model, skip_tokenizer_init=True, load_format="dummy", speculative_config=speculation
    )
    config = args.create_engine_config()
    for name, value in changes.items():
        assert hasattr(config.speculative_config, name)
        setattr(config.speculative_config, name, value)
    assert reason_for(config) == reason


# ---------------------------------------------------- arguments of the manager's constructor


UNCOVERED_ARGUMENTS = [
    ({"dcp_world_size": 2}, "decode context parallelism (world size 2)"),
    ({"pcp_world_size": 4}, "prefill context parallelism (world size 4)"),
    (
        {"enable_kv_cache_events": True, "hash_block_size": 8},
        "publishing KV cache events for parts of blocks",
    ),
]


@pytest.mark.parametrize(("arguments", "reason"), UNCOVERED_ARGUMENTS)
def test_arguments_that_are_not_covered(arguments, reason):
    assert find_uncovered_feature(replace(facts_of(FULL), **arguments)) == reason


@pytest.mark.parametrize(("arguments", "reason"), UNCOVERED_ARGUMENTS)
def test_the_manager_itself_refuses_uncovered_arguments(arguments, reason):
    with pytest.raises(ValueError) as error:
        KVSetup((full(16),), num_blocks=100).build(KVCacheManager, **arguments)
    assert reason in str(error.value)


def test_parts_of_sliding_window_blocks_are_not_published_by_base_either():
    spec = SlidingWindowSpec(**SHAPE, sliding_window=64)
    facts = replace(facts_of(spec), enable_kv_cache_events=True, hash_block_size=8)
    assert find_uncovered_feature(facts) is None


# --------------------------------------------------------------- the engine's configuration


def reason_for(vllm_config: VllmConfig) -> str | None:
    return find_uncovered_feature(facts_of(FULL, vllm_config=vllm_config))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, None),
        ({"tensor_parallel_size": 2}, None),
        ({"enable_prefix_caching": False}, None),
        (
            {"kv_transfer_config": KVTransferConfig("LMCacheConnectorV1", kv_role="kv_both")},
            "KV connector LMCacheConnectorV1",
        ),
        ({"kv_cache_metrics": True}, None),
    ],
)
def test_engines(tmp_path, arguments, reason):
    model = str(write_config(tmp_path, "gemma3"))
    args = EngineArgs(model, skip_tokenizer_init=True, load_format="dummy", **arguments)
    assert reason_for(args.create_engine_config()) == reason


def connectors(name: str, *children: str, module_path: str | None = None) -> KVTransferConfig:
    options = {"connectors": [{"kv_connector": child, "kv_role": "kv_both"} for child in children]}
    return KVTransferConfig(
        name,
        kv_role="kv_both",
        kv_connector_module_path=module_path,
        kv_connector_extra_config=options if children else {},
    )


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (connectors("NixlConnector"), None),
        (connectors("MultiConnector", "NixlConnector", "OffloadingConnector"), None),
        (
            connectors("MultiConnector", "NixlConnector", "SimpleCPUOffloadConnector"),
            "KV connector SimpleCPUOffloadConnector (in a MultiConnector)",
        ),
        (connectors("SimpleCPUOffloadConnector"), "KV connector SimpleCPUOffloadConnector"),
        # A connector from outside of vLLM, whatever its name.
        (connectors("NixlConnector", module_path="my.own"), "KV connector NixlConnector"),
    ],
)
def test_kv_connectors(config, reason):
    vllm_config = VllmConfig()
    vllm_config.kv_transfer_config = config
    assert reason_for(vllm_config) == reason


def test_base_serves_states_with_a_kv_connector():
    vllm_config = VllmConfig()
    vllm_config.kv_transfer_config = connectors("NixlConnector")
    facts = facts_of(FULL, MambaSpec(**MAMBA), vllm_config=vllm_config)
    assert find_uncovered_feature(facts) == "Mamba with KV connector NixlConnector"


def test_context_parallelism_of_the_engine():
    for kind in ("decode", "prefill"):
        config = VllmConfig()
        setattr(config.parallel_config, f"{kind}_context_parallel_size", 2)
        assert reason_for(config) == f"{kind} context parallelism (world size 2)"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_encoder_decoder": True}, None),
        ({"canvas_length": 32}, "a diffusion model"),
    ],
)
def test_models(tmp_path, changes, reason):
    model = str(write_config(tmp_path, "gemma3"))
    args = EngineArgs(model, skip_tokenizer_init=True, load_format="dummy")
    config = args.create_engine_config()
    for name, value in changes.items():
        setattr(config.model_config.hf_config, name, value)
    config.model_config.__dict__.pop("is_diffusion", None)  # It is cached.
    config.model_config.__dict__.pop("is_encoder_decoder", None)
    assert reason_for(config) == reason
