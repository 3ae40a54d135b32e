// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>

#include "pool/block.h"
#include "pool/prefix_index.h"

namespace hybrid_kv {

// Looks up the hashes `hashes(i)` one after the other, for i in [begin, end), forward or backward.
//
// Hashes, slots of the index and blocks are scattered in memory. A pipeline prefetches each of them
// some lookups before it is read: first the hash, then its slot, then the slot's block.
template <typename Hashes>
class Lookups {
 public:
  enum Direction { kForward, kBackward };

  Lookups(const PrefixIndex& index, const Hashes& hashes, std::size_t begin, std::size_t end,
          Direction direction)
      : index_(index),
        hashes_(hashes),
        begin_(begin),
        num_hashes_(end > begin ? end - begin : 0),
        direction_(direction) {
    for (std::size_t n = 0; n < 3 * kStage; ++n) load_hash(n);
    for (std::size_t n = 0; n < 2 * kStage; ++n) load_slot(n);
    for (std::size_t n = 0; n < kStage; ++n) load_block(n);
  }

  // The block with the next hash, or the null block. Call it at most once per hash.
  BlockIndex next() {
    const std::size_t n = num_done_++;
    const BlockIndex found = index_.find(digests_[n % kRing], slots_[n % kRing]);
    load_hash(n + 3 * kStage);
    load_slot(n + 2 * kStage);
    load_block(n + kStage);
    return found;
  }

 private:
  static constexpr std::size_t kStage = 8, kRing = 32;
  static_assert(kRing >= 2 * kStage + 1);

  std::size_t position(std::size_t n) const {
    return begin_ + (direction_ == kForward ? n : num_hashes_ - 1 - n);
  }
  void load_hash(std::size_t n) const {
    if (n < num_hashes_) hashes_.prefetch(position(n));
  }
  void load_slot(std::size_t n) {
    if (n >= num_hashes_) return;
    digests_[n % kRing] = hashes_(position(n));
    slots_[n % kRing] = index_.hash(digests_[n % kRing]);
    index_.prefetch_slot(slots_[n % kRing]);
  }
  void load_block(std::size_t n) const {
    if (n < num_hashes_) index_.prefetch_block(slots_[n % kRing]);
  }

  const PrefixIndex& index_;
  const Hashes& hashes_;
  std::size_t begin_, num_hashes_;
  Direction direction_;
  std::size_t num_done_ = 0;
  std::array<Digest, kRing> digests_;
  std::array<std::uint32_t, kRing> slots_;  // the digests' hashes in the index
};

}  // namespace hybrid_kv
