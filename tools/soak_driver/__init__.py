# SPDX-License-Identifier: Apache-2.0
"""What `tools/soak.py` is made of: questions, their reference answers, clients and checks."""
