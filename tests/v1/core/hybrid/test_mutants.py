# SPDX-License-Identifier: Apache-2.0
"""The list of deliberate faults fits the sources.

`tools/mutation_check.py` runs the tests on each fault, which takes too long for here.
"""

import pytest

from mutants import MUTANTS
from mutation_check import LAYERS, PACKAGE, TESTS, plant, run_layer


def test_there_are_enough_faults_and_all_differ():
    assert len(MUTANTS) >= 20
    assert len({mutant.fault for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fault)
def test_each_fault_has_its_place(mutant, tmp_path):
    copy = plant(mutant, tmp_path)
    original = (PACKAGE / mutant.file).read_text()
    changed = (copy / mutant.file).read_text()
    assert changed != original
    compile(changed, mutant.file, "exec")


def test_the_layers_name_test_files():
    assert all((TESTS / name).is_file() for names in LAYERS.values() for name in names)


def test_a_fault_is_caught_and_named(tmp_path):
    (mutant,) = (m for m in MUTANTS if m.fault == "the watermark is ignored")
    caught_by = run_layer(plant(mutant, tmp_path), "unit")
    assert caught_by == "test_watermark_holds_back_newcomers_only"
