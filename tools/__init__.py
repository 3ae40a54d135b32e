# SPDX-License-Identifier: Apache-2.0
"""Programs for developers. Each runs as ``python -m tools.NAME`` in the repository root."""
