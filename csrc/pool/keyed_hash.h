// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <random>

#include "pool/block.h"

namespace hybrid_kv {

// A hash of digests with a random key, so that nobody outside of the process can choose digests
// that share the slots of a hash table. Digests themselves are no secret: a client can compute
// those of its own prompts, and try tokens until the digests have a pattern.
//
// The first step is NH: for any two digests of the same length, at most one key in 2^64 gives them
// the same sum (Black, Halevi, Krawczyk, Krovetz, Rogaway: UMAC, 1999). The second multiplies the
// halves of the sum, after other parts of the key were added, and mixes the product: each bit of
// the digest changes each bit of the result with probability 1/2.
class KeyedHash {
 public:
  // Takes the key from the system's source of randomness.
  KeyedHash() {
    std::random_device source;
    for (std::uint64_t& part : key_) {
      part = (std::uint64_t{source()} << 32) | source();
    }
  }

  std::uint32_t operator()(const Digest& digest) const {
    std::array<std::uint64_t, 4> word;
    static_assert(sizeof word == Digest::kMaxSize);
    std::memcpy(word.data(), digest.bytes.data(), sizeof word);
    const Wide sum = multiply(word[0] + key_[0], word[1] + key_[1]) +
                     multiply(word[2] + key_[2], word[3] + key_[3]);
    const Wide product = multiply((low(sum) ^ key_[4]) + digest.size, high(sum) ^ key_[5]);
    std::uint64_t mixed = low(product) ^ high(product);
    mixed = (mixed ^ (mixed >> 32)) * 0x9E3779B97F4A7C15u;
    return static_cast<std::uint32_t>(mixed >> 32);
  }

 private:
  __extension__ using Wide = unsigned __int128;
  static Wide multiply(std::uint64_t a, std::uint64_t b) { return Wide{a} * b; }
  static std::uint64_t low(Wide value) { return static_cast<std::uint64_t>(value); }
  static std::uint64_t high(Wide value) { return static_cast<std::uint64_t>(value >> 64); }

  std::array<std::uint64_t, 6> key_;
};

}  // namespace hybrid_kv
