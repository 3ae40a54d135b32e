# SPDX-License-Identifier: Apache-2.0
"""The list of deliberate faults fits the sources.

`tools/mutation_check.py` runs the tests on each fault, which takes too long for here.
"""

import pytest

from mutants import MUTANTS
from mutation_check import (
    LAYERS,
    PACKAGE,
    ROOT,
    TESTS,
    NativeCore,
    plant,
    run_layer,
    with_fault,
)


def test_there_are_enough_faults_and_all_differ():
    assert len(MUTANTS) >= 20
    assert len({mutant.fault for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fault)
def test_each_fault_has_its_place(mutant):
    original = ((ROOT if mutant.is_native else PACKAGE) / mutant.file).read_text()
    changed = with_fault(mutant, original)
    assert changed != original
    if not mutant.is_native:
        compile(changed, mutant.file, "exec")


def test_the_layers_name_test_files():
    assert all((TESTS / name).is_file() for names in LAYERS.values() for name in names)


def test_a_fault_is_caught_and_named(tmp_path):
    (mutant,) = (m for m in MUTANTS if m.fault == "evict half a grouped block")
    native_core = NativeCore(tmp_path / "core")
    caught_by = run_layer(plant(mutant, tmp_path, native_core), "unit")
    assert caught_by == "test_a_grouped_block_is_evicted_as_a_whole"
