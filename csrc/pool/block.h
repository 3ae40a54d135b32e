// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace hybrid_kv {

// A block's index in the pool's list of blocks. Index 0 is the null block, the placeholder in a
// block table where no block is held.
using BlockIndex = std::int32_t;
constexpr BlockIndex kNullBlock = 0;

// Loops over many blocks, hashes or index slots prefetch this many iterations ahead, because the
// items are scattered in memory.
constexpr std::size_t kAhead = 8;

// A block hash: the raw digest, of 1 to 32 bytes.
struct Digest {
  static constexpr std::size_t kMaxSize = 32;

  std::array<std::uint8_t, kMaxSize> bytes{};  // zeros after the digest
  std::uint8_t size = 0;                       // 0: no hash

  Digest() = default;
  // Throws std::invalid_argument unless 1 <= length <= kMaxSize.
  Digest(const char* data, std::size_t length) : size(static_cast<std::uint8_t>(length)) {
    if (length == kMaxSize) {
      std::memcpy(bytes.data(), data, kMaxSize);  // the compiler knows the length: no call
      return;
    }
    if (length == 0 || length > kMaxSize) {
      throw std::invalid_argument("a block hash must have 1 to " + std::to_string(kMaxSize) +
                                  " bytes, got " + std::to_string(length));
    }
    std::memcpy(bytes.data(), data, length);
  }

  bool operator==(const Digest& other) const {
    return size == other.size && std::memcmp(bytes.data(), other.bytes.data(), kMaxSize) == 0;
  }
};

// One grouped block: the physical blocks of all groups of an attention type for the same tokens.
// A block is exactly one cache line, because the processor cannot predict which block comes next.
struct alignas(64) Block {
  Digest digest;  // set while the block is in its type's prefix index
  std::uint8_t type_id = 0;
  bool is_live = false;               // owns physical ids
  std::uint32_t ref_cnt = 0;          // references of block tables, and detached ones
  std::uint32_t generation = 0;       // uses of this index so far; a stale handle has fewer
  BlockIndex previous = 0, next = 0;  // neighbours in the eviction order
  // A ring of the cached blocks with the same digest, in the order of insertion.
  BlockIndex previous_same = 0, next_same = 0;
  std::uint32_t ids = 0;  // where its physical ids begin in the pool's list of ids

  bool is_cached() const { return digest.size != 0; }
};
static_assert(sizeof(Block) == 64);

// Points to a block and holds no reference. It is stale once the block was freed or evicted.
struct BlockHandle {
  BlockIndex index = kNullBlock;
  std::uint32_t generation = 0;
};

// The evictable blocks (cached, not referenced) in the order of their eviction, as a linked list
// through the blocks.
class EvictionOrder {
 public:
  bool is_empty() const { return first_ == 0; }
  BlockIndex first() const { return first_; }
  BlockIndex last() const { return last_; }

  void append(std::vector<Block>& blocks, BlockIndex index) {
    Block& block = blocks[static_cast<std::size_t>(index)];
    block.previous = last_;
    block.next = 0;
    (last_ ? blocks[static_cast<std::size_t>(last_)].next : first_) = index;
    last_ = index;
  }

  void remove(std::vector<Block>& blocks, BlockIndex index) {
    Block& block = blocks[static_cast<std::size_t>(index)];
    (block.previous ? blocks[static_cast<std::size_t>(block.previous)].next : first_) = block.next;
    (block.next ? blocks[static_cast<std::size_t>(block.next)].previous : last_) = block.previous;
    block.previous = block.next = 0;
  }

 private:
  BlockIndex first_ = 0, last_ = 0;
};

}  // namespace hybrid_kv
