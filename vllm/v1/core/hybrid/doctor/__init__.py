# SPDX-License-Identifier: Apache-2.0
"""The command ``doctor``: is the hybrid manager active here, and how would it serve a model?"""
