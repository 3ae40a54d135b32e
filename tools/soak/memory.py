# SPDX-License-Identifier: Apache-2.0
"""Whether the memory of a server's processes stays flat."""

import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

MIB = 1 << 20
#: Growth that is allowed from the end of the warm-up to the end of the soak, along a straight line
#: through all samples. Over 30 minutes that is 0.3 MiB a minute.
MAX_GROWTH = 8 * MIB
#: The share of the soak that is warm-up, and the longest warm-up in seconds.
WARM_UP = (0.4, 180.0)
#: Growth that is allowed if the warm-up was shorter. On some CPUs a worker then still allocates
#: memory for kernels that it runs for the first time.
MAX_GROWTH_SHORT = 24 * MIB


@dataclass(frozen=True)
class Growth:
    """The memory of a process after the warm-up, in bytes."""

    process: str
    num_samples: int
    first: int
    last: int
    peak: int
    per_minute: float
    #: Along the fitted line.
    total: float
    #: All samples, with those of the warm-up: seconds since the first, and bytes.
    samples: Sequence[tuple[float, int]] = field(repr=False)

    @property
    def allowed(self) -> int:
        share, limit = WARM_UP
        return MAX_GROWTH if share * self.samples[-1][0] >= limit else MAX_GROWTH_SHORT


class MemoryWatch:
    """Samples the resident memory of a server's processes.

    Args:
        processes: The API server, followed by the processes that it started. Only those that
            vLLM has named are sampled, not Python's resource tracker for instance.
    """

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self._processes = {"API server": processes[0]}
        for process in processes[1:]:
            if process.name().startswith("VLLM::"):
                self._processes[process.name().removeprefix("VLLM::")] = process
        self._samples: dict[str, list[tuple[float, int]]] = {n: [] for n in self._processes}

    def sample(self) -> None:
        """Take one sample of each process that still runs."""
        now = time.monotonic()
        for name, process in self._processes.items():
            with suppress(psutil.NoSuchProcess):
                self._samples[name].append((now, process.memory_info().rss))

    def growths(self) -> list[Growth]:
        return [growth_of(name, samples) for name, samples in self._samples.items()]


def growth_of(process: str, samples: Sequence[tuple[float, int]]) -> Growth:
    """Fit a line through the samples (seconds, bytes) after the warm-up.

    Raises:
        ValueError: if fewer than three samples are left.
    """
    start, end = samples[0][0], samples[-1][0]
    share, limit = WARM_UP
    after = start + min(share * (end - start), limit)
    kept = [(at, size) for at, size in samples if at >= after]
    if len(kept) < 3:
        raise ValueError(f"too few samples of {process}: there must be 3 or more, got {len(kept)}")
    times, sizes = [at for at, _ in kept], [size for _, size in kept]
    slope = statistics.linear_regression(times, sizes).slope
    return Growth(
        process=process,
        num_samples=len(kept),
        first=sizes[0],
        last=sizes[-1],
        peak=max(sizes),
        per_minute=slope * 60,
        total=slope * (times[-1] - times[0]),
        samples=[(round(at - start, 1), size) for at, size in samples],
    )
