# SPDX-License-Identifier: Apache-2.0
"""Metrics of the hybrid manager on vLLM's ``/metrics``, named ``vllm:hybrid_kv_*``.

engine core:  counters.py  events are counted where they happen
              stats.py     what changed in a step travels with base's SchedulerStats
front end:    prometheus.py  the metrics, made and updated by base's Prometheus logger
both:         patches.py   how this is connected to base
"""
