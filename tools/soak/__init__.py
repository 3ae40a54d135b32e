# SPDX-License-Identifier: Apache-2.0
"""A soak of a real server: questions, their reference answers, clients and checks."""
