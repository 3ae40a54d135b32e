// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace hybrid_kv {

// Base vLLM's hashes of full blocks of tokens. Each is the hash of a serialized Python tuple,
// (parent, tokens, keys), where parent is the hash of the block before. Needs no Python.
class BlockHasher {
 public:
  // `algorithm` is one of base's names: sha256, sha256_cbor, xxhash, xxhash_cbor.
  // Throws std::invalid_argument for another, or unless 1 <= block_size <= kMaxBlockSize.
  BlockHasher(const std::string& algorithm, std::int64_t block_size);

  // These limits keep a message below 64 KiB: pickle writes larger ones in several frames.
  static constexpr std::int64_t kMaxBlockSize = 8192;
  static constexpr std::size_t kMaxRest = 16384;

  std::size_t block_size() const { return block_size_; }
  std::size_t digest_size() const { return sha_ ? 32 : 16; }

  // Hashes one block after the other.
  class Chain {
   public:
    // `parent`, of 1 to 255 bytes, is the hash of the block before the first. `rest`, of 1 to
    // kMaxRest bytes, follows the tokens in each serialized tuple. Throws std::invalid_argument for
    // other sizes. The hasher must outlive the chain.
    Chain(const BlockHasher& hasher, const std::string& parent, const std::string& rest);

    // Writes the hash of the next block, of digest_size() bytes, to `digest`.
    void next(const std::int32_t* tokens, std::uint8_t* digest);

   private:
    template <class Format>
    void next_as(const std::int32_t* tokens, std::uint8_t* digest);

    const BlockHasher& hasher_;
    std::string rest_;
    std::vector<std::uint8_t> message_;
    std::size_t front_;  // bytes of the message before the tokens, already written
  };

 private:
  bool sha_, cbor_;
  std::size_t block_size_;
};

}  // namespace hybrid_kv
