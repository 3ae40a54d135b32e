# SPDX-License-Identifier: Apache-2.0
"""The same random programs on base's manager and the hybrid manager, with encoders.

Nothing is cached, so nothing is ever evicted, and the two must agree to the end.
"""

from typing import Any

import pytest

from support.differential import Difference, Totals, explore, run_program
from support.kv_configs import KVSetup, cross, full
from support.oracle.faults import Unsafe, WriteFault
from support.programs import Program, encoder_decoder_programs
from support.requests import RequestPlan
from vllm.v1.core.hybrid import KVCacheManager
from vllm.v1.core.kv_cache_manager import KVCacheManager as BaseKVCacheManager
from vllm.v1.request import Request


def run_exactly(program: Program, candidate: Any = KVCacheManager) -> Totals:
    return run_program(program, candidate, exact=True)


@pytest.mark.parametrize(("tight", "examples"), [(False, 25), (True, 80)])
def test_random_programs(tight: bool, examples: int) -> None:
    totals = explore(encoder_decoder_programs(tight=tight), run_exactly, examples)
    print(f"\ntight={tight}: {totals}")
    # The length of programs depends on the imported modules. Each program has operations.
    assert totals["compared"] == totals["ops"] >= 10 * totals["programs"]
    assert min(totals.both("slots_checked")) > 0
    assert totals.both("hits") == totals.both("evictions") == [0, 0]
    assert not tight or min(totals.both("preemptions")) > 0


#: The second request's encoder states would overwrite the first's.
PROGRAM = Program(
    KVSetup((full(16), cross(16)), 60, caching=False),
    (RequestPlan(((0, 40),), encoder=40), RequestPlan(((1, 40),), encoder=33)),
    (("serve", 0, 5), ("serve", 1, 5), ("decode", 0, 9), ("preempt", 1), ("step", 64)),
)


def test_the_faultless_program_passes() -> None:
    totals = run_exactly(PROGRAM)
    assert totals["compared"] == totals["ops"] == 6
    assert totals.both("slots_checked")[0] > 0


def test_encoder_blocks_that_are_shared_are_found() -> None:
    class Sharing(BaseKVCacheManager):
        def get_block_ids(self, request_id: str) -> Any:
            own, encoder = super().get_block_ids(request_id)
            self.first = getattr(self, "first", encoder)
            return own, self.first[: len(encoder)]

    with pytest.raises(Unsafe, match=r"group 1: .* is not the end of"):
        run_exactly(PROGRAM, Sharing)


def test_encoder_blocks_that_are_lost_are_found() -> None:
    class Losing(BaseKVCacheManager):
        def allocate_slots(self, request: Request, *args: Any, **kwargs: Any) -> Any:
            if request.num_computed_tokens:
                self.coordinator.single_type_managers[1].free(request.request_id)
            return super().allocate_slots(request, *args, **kwargs)

    with pytest.raises(WriteFault, match=r"groups \[1\]"):
        run_exactly(PROGRAM, Losing)


def test_encoder_blocks_by_decoder_tokens_are_found() -> None:
    class Mistaken(BaseKVCacheManager):
        def allocate_slots(self, request: Request, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("num_encoder_tokens"):
                kwargs["num_encoder_tokens"] = args[0] + 16
            return super().allocate_slots(request, *args, **kwargs)

    with pytest.raises(Difference, match="new_blocks"):
        run_exactly(PROGRAM, Mistaken)
