# SPDX-License-Identifier: Apache-2.0
"""Programs for developers; each runs as ``python -m tools.NAME`` in the repository root."""
