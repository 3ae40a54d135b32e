# SPDX-License-Identifier: Apache-2.0
"""What the oracle raises."""


class OracleFault(AssertionError):
    """A scheduler or KV cache manager did something that would corrupt an answer."""


class ReadFault(OracleFault):
    """Attention would read KV that is not the request's own prefix."""


class WriteFault(OracleFault):
    """A step would write KV where it must not."""


class InFlightFault(OracleFault):
    """A block was handed out while a step that has not finished can still read it."""


class ProtocolFault(OracleFault):
    """The scheduler's messages to the worker do not add up."""


class Unsafe(OracleFault):
    """A manager alone, without a scheduler, shows what contradicts its own bookkeeping."""


class OutcomeFault(OracleFault):
    """A request ended wrongly, never ended, or left blocks behind."""
