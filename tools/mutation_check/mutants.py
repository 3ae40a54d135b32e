# SPDX-License-Identifier: Apache-2.0
"""Deliberate faults for the mutation check. Each changes one place of the sources.

``old`` must occur exactly once in the file. If a change of the sources removes it,
`tests/v1/core/hybrid/test_mutants.py` fails.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A fault: in ``file``, of the package or of ``csrc/``, ``old`` becomes ``new``."""

    fault: str
    file: str
    old: str
    new: str

    @property
    def is_native(self) -> bool:
        return self.file.startswith("csrc/")


MANAGER = "kv_cache_manager.py"
POOL = "block_pool.py"
TYPES = "attention_type.py"
BASE = "managers/base.py"
CHUNKS = "managers/chunked_local.py"
FULL = "managers/full_attention.py"
RECENT = "managers/recent_blocks.py"
STATES = "managers/mamba.py"
WINDOW = "managers/sliding_window.py"
COORDINATOR = "coordinators/base.py"
HYBRID = "coordinators/hybrid.py"
ENCODER = "managers/cross_attention.py"
ADMISSION = "admission.py"
LOADS = "load_failures.py"
STEP = "step.py"
GATES = "gates.py"
BLOCKS = "kv_cache_blocks.py"
NATIVE_POOL = "csrc/pool/block_pool.cpp"
NATIVE_SEARCH = "csrc/pool/block_pool.h"
NATIVE_TABLE = "csrc/pool/block_table.cpp"
NATIVE_REQUEST = "csrc/pool/request_tables.cpp"
NATIVE_CACHE = "csrc/pool/block_table.h"
NATIVE_INDEX = "csrc/pool/prefix_index.cpp"
KEYED_HASH = "csrc/pool/keyed_hash.h"
NATIVE_GATE = "csrc/python/step_gate.cpp"

MUTANTS = (
    Mutant(
        "free a block while steps in flight still read it",
        COORDINATOR,
        "computed_end - request.num_in_flight_tokens",
        "computed_end",
    ),
    Mutant(
        "free a block one token early",
        RECENT,
        "num_skipped = num_computed_tokens - self.num_tokens_before",
        "num_skipped = num_computed_tokens - self.num_tokens_before + 1",
    ),
    Mutant(
        "off by one in the window",
        WINDOW,
        "spec.sliding_window - 1)",
        "spec.sliding_window - 2)",
    ),
    Mutant(
        "a hit of a window lacks its first, partly read block",
        RECENT,
        "cdiv(num_tokens_before, self.block_size)",
        "num_tokens_before // self.block_size",
    ),
    Mutant(
        "a hit of a window is not checked to its beginning",
        NATIVE_SEARCH,
        "const std::size_t first = found.size() > length ? found.size() - length : 0;",
        "const std::size_t first = found.size() > length ? found.size() - length + 1 : 0;",
    ),
    Mutant(
        "a hit of a chunk is not checked again in the chunk before",
        CHUNKS,
        "// self.block_size >= first:",
        "// self.block_size >= 0:",
    ),
    Mutant(
        "a chunk is released before it is over",
        CHUNKS,
        "        return num_computed_tokens // self.chunk_size * self.chunk_size\n",
        "        return -(-num_computed_tokens // self.chunk_size) * self.chunk_size\n",
    ),
    Mutant(
        "a state is hit in the step that writes it",
        STATES,
        "not in self._cached_this_step",
        "not in ()",
    ),
    Mutant(
        "a state is released while the next step reads it",
        STATES,
        "num_tokens_before=1)",
        "num_tokens_before=0)",
    ),
    Mutant(
        "a step takes a state for each of its blocks",
        NATIVE_REQUEST,
        "std::min(num_new, target.num_written)",
        "num_new",
    ),
    Mutant(
        "hits end inside another type's block",
        RECENT,
        "num_blocks, length, alignment",
        "num_blocks, length, 1",
    ),
    Mutant(
        "junctions of shared prefixes are not kept",
        COORDINATOR,
        "boundaries.append(request.shared_prefix_boundary // alignment * alignment)",
        "pass",
    ),
    Mutant(
        "full attention skips over a missing block",
        NATIVE_SEARCH,
        "      if (index == kNullBlock) break;\n      found",
        "      if (index == kNullBlock) continue;\n      found",
    ),
    Mutant(
        "full attention hits end at any block",
        FULL,
        "num_blocks, self.hit_alignment_blocks",
        "num_blocks, 1",
    ),
    Mutant(
        "types are not searched again after one shortened the hit",
        HYBRID,
        "or len(self._to_verify) <= 1",
        "or len(self._to_verify) <= 9",
    ),
    Mutant(
        "blocks are not kept back for the other types while one allocates",
        NATIVE_REQUEST,
        "i < tables_.size(); ++i) {\n"
        "    const NewBlocks added = new_blocks(targets[i], tables_[i]->size());",
        "i < 1 && i < tables_.size(); ++i) {\n"
        "    const NewBlocks added = new_blocks(targets[i], tables_[i]->size());",
    ),
    Mutant(
        "an encoder gets slots for as many tokens as the decoder",
        ENCODER,
        "-(-step.num_encoder_tokens // self.block_size)",
        "-(-(step.num_encoder_tokens and step.slots_end) // self.block_size)",
    ),
    Mutant(
        "an encoder's blocks grow with the request",
        ENCODER,
        "-(-step.num_encoder_tokens // self.block_size)",
        "-(-max(step.num_encoder_tokens, step.slots_end) // self.block_size)",
    ),
    Mutant(
        "an encoder's slots are not due in the step that brings them",
        MANAGER,
        "step.slots_end >= blocks.allocate_at or step.num_encoder_tokens:",
        "step.slots_end >= blocks.allocate_at:",
    ),
    Mutant(
        "admission does not count the encoder",
        ADMISSION,
        "coordinator.peak_targets(whole, ",
        "coordinator.peak_targets(type(whole)(0, 0, whole.step_end, whole.slots_end, 0, 0), ",
    ),
    Mutant(
        "no token is left to compute",
        MANAGER,
        "find_hit(request.block_hashes, request.num_tokens - 1)",
        "find_hit(request.block_hashes, request.num_tokens)",
    ),
    Mutant(
        "forget the null padding of an adopted hit",
        NATIVE_TABLE,
        "  blocks_.assign(num_skipped, kNullBlock);\n",
        "",
    ),
    Mutant(
        "released blocks stay in the block table",
        NATIVE_TABLE,
        "  std::fill(first, last, kNullBlock);\n",
        "",
    ),
    Mutant(
        "only the first type's hit is referenced",
        NATIVE_POOL,
        "  if (index == kNullBlock) return;\n  Block& block = at(index);\n  if (block.ref_cnt",
        "  if (index == kNullBlock || at(index).type_id > 0) return;\n"
        "  Block& block = at(index);\n  if (block.ref_cnt",
    ),
    Mutant(
        "allocate for one type before another's hit is adopted",
        NATIVE_REQUEST,
        "hits[i].num_skipped);\n  }",
        "hits[i].num_skipped);\n    tables_[i]->grow(0, 1);\n  }",
    ),
    Mutant(
        "blocks that must stay free are allocated",
        NATIVE_REQUEST,
        "num_ids > num_free - num_kept_free",
        "num_ids > num_free",
    ),
    Mutant(
        "a touched block stays counted as free",
        NATIVE_POOL,
        "  if (block.ref_cnt == 0) remove_from_evictable(index);\n  ++block",
        "  if (block.ref_cnt == 0) evictable_.remove(blocks_, index);\n  ++block",
    ),
    Mutant(
        "evict half a grouped block",
        NATIVE_POOL,
        "hash_of(oldest));\n    dissolve(oldest);\n",
        "hash_of(oldest));\n    blank_.give_back(ids(at(oldest)), 1);\n",
    ),
    Mutant(
        "an evicted block can still be hit",
        NATIVE_POOL,
        "  indexes_[block.type_id]->remove(index, hash);\n  block.digest = Digest{};\n",
        "",
    ),
    Mutant(
        "a client can compute the slots of its hashes",
        KEYED_HASH,
        "(std::uint64_t{source()} << 32) | source()",
        "0x9E3779B97F4A7C15u",
    ),
    Mutant(
        "a cached block is blank when it is released",
        NATIVE_POOL,
        "    if (block.is_cached()) {\n",
        "    if (false) {\n",
    ),
    Mutant(
        "a block is reused while another request holds it",
        NATIVE_POOL,
        "if (--block.ref_cnt > 0) continue;",
        "--block.ref_cnt;",
    ),
    Mutant(
        "the most recently used block is evicted first",
        NATIVE_POOL,
        "const BlockIndex oldest = evictable_.first();",
        "const BlockIndex oldest = evictable_.last();",
    ),
    Mutant(
        "the head of a request is reused before its tail",
        NATIVE_TABLE,
        "  std::reverse(blocks_.begin(), blocks_.end());\n",
        "",
    ),
    Mutant(
        "a hit that was evicted since the lookup is adopted",
        NATIVE_POOL,
        "if (found.generation != handle.generation) {",
        "if (handle.index < 0) {",
    ),
    Mutant(
        "the prefix cache is reset under running requests",
        POOL,
        "        if num_used:\n",
        "        if num_used < 0:\n",
    ),
    Mutant(
        "a duplicate is lost when the first of its hash is evicted",
        NATIVE_INDEX,
        "if (slots_[slot].block == index) slots_[slot].block = block.next_same;",
        "if (slots_[slot].block == index) erase(slot);",
    ),
    Mutant(
        "a search stops at the gap that an evicted block left",
        NATIVE_INDEX,
        "if (((slot - home) & mask_) >= ((slot - gap) & mask_)) {",
        "if (home > mask_) {",
    ),
    Mutant(
        "hits that are evictable are not counted in admission",
        ADMISSION,
        "num_hit_free = pool.count_evictable_ids(hits, num_skipped)",
        "num_hit_free = 0",
    ),
    Mutant(
        "admission counts a window as if it kept everything",
        ADMISSION,
        "coordinator.peak_targets(whole, blocks.tables, num_skipped)",
        "coordinator.targets(whole)",
    ),
    Mutant(
        "the watermark is ignored",
        MANAGER,
        "self.watermark_blocks if is_waiting and has_scheduled_reqs else 0",
        "0",
    ),
    Mutant(
        "a block that is not full is cached",
        BASE,
        "begin, end = table.num_decided, self.num_cacheable_blocks(num_tokens)",
        "begin, end = table.num_decided, min(len(table), len(request.block_hashes)"
        " * self.settings.hash_block_size // self.block_size)",
    ),
    Mutant(
        "draft tokens of a running request are cached",
        MANAGER,
        "min(step_end, request.num_tokens)",
        "step_end",
    ),
    Mutant(
        "draft tokens of an admitted request are cached",
        STEP,
        "self.sequence_end if self.sequence_end < self.step_end else self.step_end",
        "self.step_end",
    ),
    Mutant(
        "a block is cached under its neighbour's hash",
        NATIVE_CACHE,
        "hashes(static_cast<std::size_t>(i))",
        "hashes(static_cast<std::size_t>(i > 0 ? i - 1 : i))",
    ),
    Mutant(
        "a request sleeps past the need for a block",
        COORDINATOR,
        "// self._slots_unit) * self._slots_unit + 1",
        "// self._slots_unit) * self._slots_unit + 2",
    ),
    Mutant(
        "a request sleeps past a block that leaves the window",
        RECENT,
        "return (num_released + 1) * self.block_size",
        "return (num_released + 2) * self.block_size",
    ),
    Mutant(
        "a request sleeps past a block that can be cached",
        COORDINATOR,
        "cache_at = position\n",
        "cache_at = position + self.scheduler_block_size\n",
    ),
    Mutant(
        "the gate is closed for one token too long",
        NATIVE_GATE,
        "if (num_computed + num_tokens < event) return",
        "if (num_computed + num_tokens <= event) return",
    ),
    Mutant(
        "the gate does not count lookahead slots",
        NATIVE_GATE,
        "  *num_tokens += num_lookahead;\n",
        "",
    ),
    Mutant(
        "a resumed request keeps its old wake-up time",
        MANAGER,
        "        self._gates.wake(request.request_id)\n        self.coordinator.free(",
        "        self.coordinator.free(",
    ),
    Mutant(
        "the last block that matches is not dropped for EAGLE",
        FULL,
        "max(len(found) - 1, 0)",
        "len(found)",
    ),
    Mutant(
        "the last block that matches in a window is not dropped for EAGLE",
        RECENT,
        "max(len(run) - 1, 0)",
        "len(run)",
    ),
    Mutant(
        "a hit of a window takes the block after it for its first block",
        RECENT,
        "self.num_blocks_around = self.num_blocks_before + self.num_peeked",
        "self.num_blocks_around = max(self.num_blocks_before, self.num_peeked)",
    ),
    Mutant(
        "the block that hits peek at is not cached",
        BASE,
        "            num_blocks += 1\n",
        "            num_blocks += 0\n",
    ),
    Mutant(
        "a window does not cache the block that hits peek at",
        RECENT,
        "b // self.block_size + peeked for b",
        "b // self.block_size for b",
    ),
    Mutant(
        "no type drops a block if no group is marked as the drafter's",
        TYPES,
        "if use_eagle and not flagged else",
        "if use_eagle and flagged else",
    ),
    Mutant(
        "a draft group is taken for one of the target's",
        TYPES,
        "is_eagle=not eagle.isdisjoint(ids)",
        "is_eagle=eagle.issuperset(range(len(kv_cache_config.kv_cache_groups)))",
    ),
    Mutant(
        "tokens that a drafter computes again are cached",
        BASE,
        "num_full = max(num_tokens - self.num_not_final, 0) // self.block_size",
        "num_full = num_tokens // self.block_size",
    ),
    Mutant(
        "tokens that a drafter reads again leave the window",
        BASE,
        "num_processed_tokens - self.num_reread_tokens",
        "num_processed_tokens",
    ),
    Mutant(
        "all groups of a type get the first group's ids",
        BLOCKS,
        "[ids[type_id][place] for",
        "[ids[type_id][0] for",
    ),
    Mutant(
        "the window of a prompt's last token is given up where the whole prompt is loaded",
        ADMISSION,
        "resume_at = min(step.computed_end, request.num_tokens - 1)",
        "resume_at = step.computed_end",
    ),
    Mutant(
        "what a load leaves out of a window is released for the token after the prompt",
        MANAGER,
        "        if step.step_end > step.computed_end:\n",
        "        if step.computed_end:\n",
    ),
    Mutant(
        "blocks are cached while they are loaded",
        MANAGER,
        "        if delay_cache_blocks:",
        "        if delay_cache_blocks and step.step_end < 0:",
    ),
    Mutant(
        "blocks are zeroed while they are loaded",
        BASE,
        "if group_id not in skip_group_ids:",
        "if group_id not in ():",
    ),
    Mutant(
        "tokens that are loaded get no slots",
        MANAGER,
        "min(hit_end + num_external_computed_tokens, self.max_model_len)",
        "min(hit_end + min(num_external_computed_tokens, 1), self.max_model_len)",
    ),
    Mutant(
        "a connector sees the first group's blocks in all groups of a type",
        BLOCKS,
        "(ids[type_id][place], hashes[type_id])",
        "(ids[type_id][0], hashes[type_id])",
    ),
    Mutant(
        "a request sleeps a token too long",
        GATES,
        "self._next_events[request_id] = num_tokens",
        "self._next_events[request_id] = num_tokens + 1",
    ),
    Mutant(
        "a session's next input does not wake its request",
        MANAGER,
        "            self._gates.wake(request.request_id)\n",
        "",
    ),
    Mutant(
        "null blocks count as blocks that a parked load has",
        BASE,
        "num_null + self.max_blocks_per_request",
        "self.max_blocks_per_request",
    ),
    Mutant(
        "a load begins though it does not fit beside others to its end",
        MANAGER,
        "full_sequence_must_fit or delay_cache_blocks",
        "full_sequence_must_fit",
    ),
    Mutant(
        "a lone load leaves blocks for draft tokens that the pool does not have",
        MANAGER,
        "delay_cache_blocks and blocks.is_new and not self.coordinator.requests",
        "False",
    ),
    Mutant(
        "a request whose load failed stays before others",
        LOADS,
        "return has_room(self, request)",
        "return True",
    ),
    Mutant(
        "blocks are kept free for a request whose load failed",
        LOADS,
        "self._inflight_prefills.discard(request)",
        "pass",
    ),
    Mutant(
        "a request goes on after a window that was not loaded",
        COORDINATOR,
        "return end if holds_all else 0",
        "return end",
    ),
    Mutant(
        "what was computed from a block that failed to load stays",
        LOADS,
        "invalid |= manager.coordinator.ids_from(request.request_id, position)",
        "pass",
    ),
    Mutant(
        "blocks that failed to load stay in the prefix cache",
        LOADS,
        "manager.evict_blocks(invalid)",
        "pass",
    ),
    Mutant(
        "the worker is not told of a request that lost its blocks",
        LOADS,
        "scheduler.prev_step_scheduled_req_ids.discard(request.request_id)",
        "pass",
    ),
    Mutant(
        "a load that always fails is repeated for ever",
        LOADS,
        "num_failed >= MOST_FAILED_LOADS",
        "False",
    ),
)
