# SPDX-License-Identifier: Apache-2.0
"""One step of a request, as everything below the scheduler sees it."""

import msgspec

from vllm.v1.request import RequestStatus

#: Statuses of requests that do not run. Admitting one leaves the watermark free if others run.
WAITING_STATUSES = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
#: Larger than every position and count: where what never happens would, a count that means all,
#: and one that limits nothing.
NEVER = ALL = NO_LIMIT = 1 << 62


class Step(msgspec.Struct, frozen=True, gc=False):
    """What one step does to one request. A struct, since one is made for each event.

    Positions count tokens from the beginning of the request's sequence::

        |  computed before  |  hit  |  loaded  |  computed in the step  |  lookahead  |
                                 hit_end  computed_end              step_end      slots_end

    Without a load, ``computed_end`` is ``hit_end``. Without a hit, ``hit_end`` is the number of
    tokens computed before.
    """

    hit_end: int
    #: Includes what a KV connector loads.
    computed_end: int
    #: Includes draft tokens.
    step_end: int
    slots_end: int
    #: End of the request's own tokens. Draft tokens come after it.
    sequence_end: int
    prompt_end: int
    #: Tokens that an encoder computes in the step, for cross attention.
    num_encoder_tokens: int = 0
    #: Physical blocks that must stay free.
    num_kept_free: int = 0

    @property
    def final_end(self) -> int:
        """Tokens before it are final once the step has run."""
        return self.sequence_end if self.sequence_end < self.step_end else self.step_end

    @property
    def prefill_end(self) -> int:
        """End of the prefill: the prompt, and the output of a preempted request."""
        return max(self.prompt_end, self.sequence_end - 1)


#: What a block table must hold after a step: ``(num_blocks, num_written)``, its length in blocks,
#: and at most how many of the new blocks, counted from the end, get physical ids. The others are
#: null.
Target = tuple[int, int]
