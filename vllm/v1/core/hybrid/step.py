# SPDX-License-Identifier: Apache-2.0
"""One step of a request, as everything below the scheduler sees it."""

import msgspec

#: Larger than every position and count: the position of what never happens, the count of all.
NEVER = ALL = 1 << 62


class Step(msgspec.Struct, frozen=True, gc=False):
    """What one step does to one request. A struct, since one is made for each event.

    Positions count tokens from the beginning of the request's sequence::

        |  computed before  |  hit  |  loaded  |  computed in the step  |  lookahead  |
                                 hit_end  computed_end              step_end      slots_end

    A request without a prefix hit or a load has ``hit_end == computed_end``.
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


#: What a block table must hold after a step: its length in blocks, and how many of the new blocks
#: get physical ids. The last new blocks get ids; the others are null.
Target = tuple[int, int]
