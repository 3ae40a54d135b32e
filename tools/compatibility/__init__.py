# SPDX-License-Identifier: Apache-2.0
"""Generates the tables of docs/compatibility.md."""
