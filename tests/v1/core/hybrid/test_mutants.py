# SPDX-License-Identifier: Apache-2.0
"""Each deliberate fault has its place in the sources.

`python -m tools.mutation_check` runs the tests on each fault, which takes too long here.
"""

from concurrent.futures import Future
from pathlib import Path

import pytest

from tools.mutation_check.__main__ import run_layers
from tools.mutation_check.layers import LAYERS, TESTS
from tools.mutation_check.mutants import MUTANTS
from tools.mutation_check.planting import PACKAGE, ROOT, NativeCore, plant, with_fault


def test_there_are_enough_faults_and_all_differ():
    assert len(MUTANTS) >= 20
    assert len({mutant.fault for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fault)
def test_each_fault_has_exactly_one_place(mutant):
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
    source: Future[Path] = Future()
    source.set_result(plant(mutant, tmp_path, native_core))
    # The layers after the one that catches it do not run.
    caught = run_layers((source, tuple(LAYERS)))
    assert caught == {"unit": "test_a_grouped_block_is_evicted_as_a_whole"}
