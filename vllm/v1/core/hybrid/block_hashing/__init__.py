# SPDX-License-Identifier: Apache-2.0
"""Block hashes in native code. Works with either manager."""
