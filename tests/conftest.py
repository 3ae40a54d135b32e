# SPDX-License-Identifier: Apache-2.0
"""What Hypothesis draws from, for all tests."""

import pytest
from hypothesis.internal.conjecture import providers

# Hypothesis draws integers from the source of this repository's modules, too, as far as they are
# loaded. Then a test's random programs would depend on which tests ran before it in its process.
# `setattr` raises if a new version of Hypothesis has no such function.
pytest.MonkeyPatch().setattr(providers, "_get_local_constants", lambda: providers._local_constants)
