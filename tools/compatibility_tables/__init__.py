# SPDX-License-Identifier: Apache-2.0
"""What `tools/compatibility.py` makes its tables from."""
