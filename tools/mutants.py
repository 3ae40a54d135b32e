# SPDX-License-Identifier: Apache-2.0
"""Deliberate faults for `tools/mutation_check.py`: each is a change of one place.

``old`` must occur exactly once in the file, so a change of the sources that moves it
is noticed (`tests/v1/core/hybrid/test_mutants.py`).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A fault: in ``file`` of the package, ``old`` becomes ``new``."""

    fault: str
    file: str
    old: str
    new: str


MANAGER = "kv_cache_manager.py"
POOL = "block_pool.py"
INDEX = "prefix_index.py"
BASE = "managers/base.py"
FULL = "managers/full_attention.py"
WINDOW = "managers/sliding_window.py"
COORDINATOR = "coordinators/base.py"
HYBRID = "coordinators/hybrid.py"
BLOCKS = "kv_cache_blocks.py"

MUTANTS = (
    Mutant(
        "free a block while steps in flight still read it",
        MANAGER,
        "num_computed - request.num_in_flight_tokens)",
        "num_computed)",
    ),
    Mutant(
        "free a block one token early",
        WINDOW,
        "return max(0, num_computed_tokens - self.num_tokens_before)",
        "return max(0, num_computed_tokens - self.num_tokens_before + 1)",
    ),
    Mutant(
        "off by one in the window",
        WINDOW,
        "self.num_tokens_before = spec.sliding_window - 1",
        "self.num_tokens_before = spec.sliding_window - 2",
    ),
    Mutant(
        "a hit of a window lacks its first, partly read block",
        WINDOW,
        "cdiv(self.num_tokens_before, self.block_size)",
        "self.num_tokens_before // self.block_size",
    ),
    Mutant(
        "a hit of a window is not checked to its beginning",
        WINDOW,
        "for i in range(end - 1, first - 1, -1):",
        "for i in range(end - 1, first, -1):",
    ),
    Mutant(
        "hits end inside another type's block",
        WINDOW,
        "return round_down(num_blocks, alignment)",
        "return num_blocks",
    ),
    Mutant(
        "junctions of shared prefixes are not kept",
        COORDINATOR,
        "boundaries.append(request.shared_prefix_boundary)",
        "pass",
    ),
    Mutant(
        "full attention skips over a missing block",
        FULL,
        "                break\n",
        "                continue\n",
    ),
    Mutant(
        "full attention hits end at any block",
        FULL,
        "round_down(len(hits) * self.block_size, self.settings.scheduler_block_size)",
        "len(hits) * self.block_size",
    ),
    Mutant(
        "types are not asked again after one shortened the hit",
        HYBRID,
        "or self._num_to_verify <= 1",
        "or self._num_to_verify <= 9",
    ),
    Mutant(
        "no token is left to compute",
        MANAGER,
        "request.num_tokens - 1)",
        "request.num_tokens)",
    ),
    Mutant(
        "forget the null padding of an adopted hit",
        BASE,
        "table.blocks = [self.null_block] * num_skipped",
        "table.blocks = []",
    ),
    Mutant(
        "released blocks stay in the block table",
        BASE,
        "= [self.null_block] * len(left)",
        "= left",
    ),
    Mutant(
        "only the first type's hit is referenced",
        POOL,
        "if block.is_null:\n                continue\n            if block.ref_cnt == 0:\n"
        "                del",
        "if block.is_null or block.type_id > 0:\n                continue\n"
        "            if block.ref_cnt == 0:\n                del",
    ),
    Mutant(
        "allocate for one type before another's hit is adopted",
        COORDINATOR,
        "            manager.adopt_hits(request_id, blocks, num_computed_tokens)\n",
        "            manager.adopt_hits(request_id, blocks, num_computed_tokens)\n"
        "            manager.allocate(request_id, num_computed_tokens + manager.block_size)\n",
    ),
    Mutant(
        "a touched block stays counted as free",
        POOL,
        "    self._num_evictable_ids -= len(block.block_ids)\n            block.ref_cnt += 1",
        "    pass\n            block.ref_cnt += 1",
    ),
    Mutant(
        "evict half a grouped block",
        POOL,
        "self._uncache(block)\n            self._blank.give_back(block.block_ids)\n",
        "self._uncache(block)\n            self._blank.give_back(block.block_ids[:1])\n",
    ),
    Mutant(
        "an evicted block can still be hit",
        POOL,
        "        self.prefix_indexes[block.type_id].remove(block)\n",
        "        block.block_hash = None\n",
    ),
    Mutant(
        "a cached block is blank when it is released",
        POOL,
        "            if block.block_hash is None:\n                blank_ids",
        "            if True:\n                blank_ids",
    ),
    Mutant(
        "a block is reused while another request holds it",
        POOL,
        "            if block.ref_cnt > 0:\n                continue\n",
        "",
    ),
    Mutant(
        "the most recently used block is evicted first",
        POOL,
        "self._evictable.popitem(last=False)",
        "self._evictable.popitem(last=True)",
    ),
    Mutant(
        "the prefix cache is reset under running requests",
        POOL,
        "        if num_used:\n",
        "        if num_used < 0:\n",
    ),
    Mutant(
        "a duplicate is lost when the first of its hash is evicted",
        INDEX,
        "            self._blocks[block_hash] = others.pop(0)\n",
        "            others.pop(0)\n            del self._blocks[block_hash]\n",
    ),
    Mutant(
        "hits that are evictable are not counted in admission",
        BASE,
        "return num_new + num_evictable",
        "return num_new",
    ),
    Mutant(
        "admission counts a window as if it kept everything",
        MANAGER,
        "                recycled=True,\n",
        "",
    ),
    Mutant(
        "the watermark is ignored",
        MANAGER,
        "            watermark = self.watermark_blocks\n",
        "            watermark = 0\n",
    ),
    Mutant(
        "a block that is not full is cached",
        BASE,
        "span = range(table.num_cached, num_tokens // self.block_size)",
        "span = range(table.num_cached, min(len(table.blocks),"
        " len(self.block_hashes_of(request))))",
    ),
    Mutant(
        "tokens that are not final are cached",
        MANAGER,
        "request, min(num_computed + num_new_tokens, request.num_tokens)",
        "request, num_computed + num_new_tokens",
    ),
    Mutant(
        "a block is cached under its neighbour's hash",
        BASE,
        "self.block_pool.cache(table.blocks[i], block_hashes[i],",
        "self.block_pool.cache(table.blocks[i], block_hashes[max(i - 1, 0)],",
    ),
    Mutant(
        "a request sleeps past the need for a block",
        BASE,
        "event = len(table.blocks) * self.block_size + 1",
        "event = len(table.blocks) * self.block_size + 2",
    ),
    Mutant(
        "a request sleeps past a block that leaves the window",
        WINDOW,
        "return (table.num_released + 1) * self.block_size + self.num_tokens_before",
        "return (table.num_released + 2) * self.block_size + self.num_tokens_before",
    ),
    Mutant(
        "a resumed request keeps its old wake-up time",
        MANAGER,
        "        self._next_event.pop(request.request_id, None)\n        self.coordinator.free(",
        "        self.coordinator.free(",
    ),
    Mutant(
        "all groups of a type get the first group's ids",
        BLOCKS,
        "            [block.block_ids[place] for block in self.blocks[type_id]] for type_id, place",
        "            [block.block_ids[0] for block in self.blocks[type_id]] for type_id, place",
    ),
)
