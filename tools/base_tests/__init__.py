# SPDX-License-Identifier: Apache-2.0
"""Base vLLM's own tests, run with base's manager and with the hybrid manager."""
