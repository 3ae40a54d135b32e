# SPDX-License-Identifier: Apache-2.0
"""Plants deliberate faults in copies of the package and runs the tests on them."""
