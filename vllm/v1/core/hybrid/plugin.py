# SPDX-License-Identifier: Apache-2.0
"""The plugin ``hybrid_kv``: base's scheduler builds its KV cache manager through our factory.

While it is active, names of base are replaced:

- ``KVCacheManager`` in the scheduler's module, by a class that builds the hybrid manager or base's;
- ``Scheduler.__init__``, by a wrapper that gives the factory the engine's configuration;
- ``EngineArgs.create_engine_config``, by a wrapper that checks our options first;
- those that `load_failures` and `metrics.patches` list.

`activation` also wraps ``Platform.validate_environ``.
"""

import functools
from typing import Any

from vllm.v1.core.hybrid.activation import Patches, Plugin, find_native_obstacle


def _find_obstacle() -> str | None:
    if obstacle := find_native_obstacle():
        return obstacle
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched import scheduler

    if scheduler.KVCacheManager is not KVCacheManager:
        return "another plugin has replaced the scheduler's KVCacheManager"
    return None


def _apply(patches: Patches) -> None:
    # These imports take 0.1 s at most, because vLLM has loaded or will load most of them.
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.hybrid import load_failures
    from vllm.v1.core.hybrid.factory import EitherKVCacheManager, current_engine
    from vllm.v1.core.hybrid.metrics import patches as metrics_patches
    from vllm.v1.core.hybrid.options import HybridKVOptions
    from vllm.v1.core.sched import scheduler

    init, create = scheduler.Scheduler.__init__, EngineArgs.create_engine_config

    @functools.wraps(init)
    def scheduler_init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        token = current_engine.set(vllm_config)
        try:
            init(self, vllm_config, *args, **kwargs)
        finally:
            current_engine.reset(token)

    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        HybridKVOptions.from_additional_config(self.additional_config)
        return create(self, *args, **kwargs)

    patches.replace(scheduler, "KVCacheManager", EitherKVCacheManager)
    patches.replace(scheduler.Scheduler, "__init__", scheduler_init)
    patches.replace(EngineArgs, "create_engine_config", create_engine_config)
    load_failures.apply(patches, scheduler.Scheduler)
    metrics_patches.apply(patches)


_plugin = Plugin(_apply, _find_obstacle)
activate, deactivate, is_active = _plugin.activate, _plugin.deactivate, _plugin.is_active
find_obstacle = _plugin.find_obstacle
