# SPDX-License-Identifier: Apache-2.0
"""The command ``doctor``: is the hybrid manager active here, and how would it serve a model?"""

from vllm.v1.core.hybrid.doctor.command import run

__all__ = ["run"]
