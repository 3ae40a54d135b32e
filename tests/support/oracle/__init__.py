# SPDX-License-Identifier: Apache-2.0
"""Content oracle: the real scheduler on a simulated device that checks every KV read."""

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

__all__ = [
    "InFlightFault",
    "OracleEngine",
    "OracleFault",
    "OracleSettings",
    "OutcomeFault",
    "ProtocolFault",
    "ReadFault",
    "WriteFault",
]
