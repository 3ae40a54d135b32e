# SPDX-License-Identifier: Apache-2.0
"""Reads the Grafana dashboard, and evaluates its queries on what a server's ``/metrics`` gave."""
