// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace hybrid_kv {

// Base vLLM's hashes of full blocks of tokens, each chained to the one before:
// hash((parent, tokens, None)) of a serialized Python tuple.
class BlockHasher {
 public:
  // `algorithm` is one of base's names: sha256, sha256_cbor, xxhash, xxhash_cbor.
  // Throws std::invalid_argument for another, or unless 1 <= block_size <= kMaxBlockSize.
  BlockHasher(const std::string& algorithm, std::int64_t block_size);

  // Above it pickle would split its output into frames.
  static constexpr std::int64_t kMaxBlockSize = 8192;

  std::size_t block_size() const { return block_size_; }
  std::size_t digest_size() const { return sha_ ? 32 : 16; }

  // The hashes of `num_tokens / block_size` blocks, one after the other. `parent` is the hash of the
  // block before the first, of any length up to 255 bytes. Needs no Python.
  std::vector<std::uint8_t> hash(const std::string& parent, const std::int32_t* tokens,
                                 std::size_t num_tokens) const;

 private:
  bool sha_, cbor_;
  std::size_t block_size_;
};

}  // namespace hybrid_kv
