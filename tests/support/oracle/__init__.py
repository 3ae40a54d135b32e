# SPDX-License-Identifier: Apache-2.0
"""Content oracle: the real scheduler on a simulated device that checks every KV read."""

from .attention import total_reads_checked
from .engine import OracleEngine
from .engine_config import OracleSettings
from .faults import (
    InFlightFault,
    OracleFault,
    OutcomeFault,
    ProtocolFault,
    ReadFault,
    WriteFault,
)
from .identity import MultiModalItem, PrefixIdentity, expected_tokens
from .models import Chunked, Cross, Full, Mamba, Sliding, make_kv_cache_config, smallest_pool
from .simulated_worker import SimulatedWorker

__all__ = [
    "Chunked",
    "Cross",
    "Full",
    "InFlightFault",
    "Mamba",
    "MultiModalItem",
    "OracleEngine",
    "OracleFault",
    "OracleSettings",
    "OutcomeFault",
    "PrefixIdentity",
    "ProtocolFault",
    "ReadFault",
    "SimulatedWorker",
    "Sliding",
    "WriteFault",
    "expected_tokens",
    "make_kv_cache_config",
    "smallest_pool",
    "total_reads_checked",
]
