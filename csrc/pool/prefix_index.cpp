// SPDX-License-Identifier: Apache-2.0
#include "pool/prefix_index.h"

#include <new>

namespace hybrid_kv {

PrefixIndex::PrefixIndex(std::vector<Block>& blocks, std::size_t max_blocks) : blocks_(blocks) {
  std::size_t num_slots = 8;
  while (num_slots < 2 * max_blocks) num_slots *= 2;
  mask_ = num_slots - 1;
  // Not a vector: calloc's zeroed pages cost nothing until they are touched.
  slots_.reset(static_cast<Slot*>(std::calloc(num_slots, sizeof(Slot))));
  if (!slots_) throw std::bad_alloc();
}

void PrefixIndex::insert(BlockIndex index, std::uint32_t hash) {
  Block& block = at(index);
  Slot& slot = slots_[locate(block.digest, hash)];
  if (slot.block == kNullBlock) {
    slot = {hash, index};
    block.previous_same = block.next_same = index;
    return;
  }
  // At the end of the ring, which is just before its first block.
  Block& first = at(slot.block);
  block.previous_same = first.previous_same;
  block.next_same = slot.block;
  at(first.previous_same).next_same = index;
  first.previous_same = index;
}

void PrefixIndex::remove(BlockIndex index, std::uint32_t hash) {
  const Block& block = at(index);
  const std::size_t slot = locate(block.digest, hash);
  if (block.next_same == index) {
    erase(slot);
    return;
  }
  at(block.previous_same).next_same = block.next_same;
  at(block.next_same).previous_same = block.previous_same;
  if (slots_[slot].block == index) slots_[slot].block = block.next_same;
}

// Closes the gap: each later entry of the run moves back as far as its home slot allows, so that no
// search stops at a gap before the entry that it looks for.
void PrefixIndex::erase(std::size_t gap) {
  for (std::size_t slot = next(gap); slots_[slot].block != kNullBlock; slot = next(slot)) {
    const std::size_t home = slots_[slot].hash & mask_;
    if (((slot - home) & mask_) >= ((slot - gap) & mask_)) {
      slots_[gap] = slots_[slot];
      gap = slot;
    }
  }
  slots_[gap] = {0, kNullBlock};
}

std::vector<BlockIndex> PrefixIndex::all() const {
  std::vector<BlockIndex> found;
  for (std::size_t slot = 0; slot <= mask_; ++slot) {
    const BlockIndex first = slots_[slot].block;
    if (first == kNullBlock) continue;
    BlockIndex index = first;
    do {
      found.push_back(index);
      index = at(index).next_same;
    } while (index != first);
  }
  return found;
}

std::vector<std::size_t> PrefixIndex::probe_lengths() const {
  std::vector<std::size_t> lengths;
  for (std::size_t slot = 0; slot <= mask_; ++slot) {
    if (slots_[slot].block == kNullBlock) continue;
    lengths.push_back(((slot - slots_[slot].hash) & mask_) + 1);
  }
  return lengths;
}

}  // namespace hybrid_kv
