# SPDX-License-Identifier: Apache-2.0
"""How the checkpoints for tests and demonstrations are made, and where they are kept."""
