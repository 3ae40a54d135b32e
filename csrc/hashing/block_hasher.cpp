// SPDX-License-Identifier: Apache-2.0
#include "hashing/block_hasher.h"

#include <cstring>
#include <stdexcept>

#include "hashing/sha256.h"
#include "hashing/xxh3.h"

namespace hybrid_kv {
namespace {

using Byte = std::uint8_t;

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are written as they lie in memory");

constexpr std::size_t kMaxToken = 5, kMaxParent = 255;  // bytes

// Each writer writes at `at` and returns the position after what it wrote. put_word() stores eight
// bytes, of which the first `size` count. Sizes are computed without branches, because the
// processor would mispredict them.
Byte* put_word(Byte* at, std::uint64_t value, std::size_t size) {
  std::memcpy(at, &value, sizeof value);
  return at + size;
}

Byte* put_bytes(Byte* at, const void* data, std::size_t size) {
  std::memcpy(at, data, size);
  return at + size;
}

// Pickle protocol 5, as CPython's C pickler writes it.
struct Pickle {
  static constexpr std::size_t kFrameStart = 11;  // after protocol and frame opcodes

  // Writes what is before the tokens.
  static Byte* begin(Byte* at, const Byte* parent, std::size_t parent_size,
                     std::size_t num_tokens) {
    *at++ = 0x80, *at++ = 5;  // protocol
    *at++ = 0x95, at += 8;    // frame; end() fills in its size
    *at++ = 'C', *at++ = static_cast<Byte>(parent_size);
    at = put_bytes(at, parent, parent_size);
    *at++ = 0x94;  // memoize
    if (num_tokens > 3) *at++ = '(';
    return at;
  }

  static Byte* token(Byte* at, std::int32_t value) {
    const auto bits = static_cast<std::uint32_t>(value);
    const unsigned large = bits > 0xffff, small = bits <= 0xff;
    const unsigned opcode = 'M' - large * ('M' - 'J') - small * ('M' - 'K');
    return put_word(at, std::uint64_t{bits} << 8 | opcode, 3 + 2 * large - small);
  }

  // Writes what is after the tokens.
  static Byte* end(Byte* message, Byte* at, std::size_t num_tokens, const std::string& rest) {
    *at++ = num_tokens > 3 ? Byte{'t'} : static_cast<Byte>(0x84 + num_tokens);  // tuple
    *at++ = 0x94;                                                               // memoize
    at = put_bytes(at, rest.data(), rest.size());
    put_word(message + 3, static_cast<std::uint64_t>(at - message) - kFrameStart, 8);
    return at;
  }
};

// Canonical CBOR (RFC 8949).
struct Cbor {
  static constexpr Byte kUnsigned = 0, kNegative = 1, kBytes = 2, kArray = 4;

  // The head of an item: its major type, and a count or value in the fewest bytes.
  static Byte* head(Byte* at, Byte major, std::uint32_t value) {
    const unsigned one = value >= 24, two = value > 0xff, four = value > 0xffff;
    const unsigned follow = one + two + 2 * four;  // bytes that hold the value
    // Shifts out the value where no byte follows.
    const auto in_front = static_cast<std::uint32_t>(std::uint64_t{value} << (32 - 8 * follow));
    const unsigned info = value + one * (23 + one + two + four - value);
    return put_word(at,
                    std::uint64_t{__builtin_bswap32(in_front)} << 8 | unsigned{major} << 5 | info,
                    1 + follow);
  }

  static Byte* begin(Byte* at, const Byte* parent, std::size_t parent_size,
                     std::size_t num_tokens) {
    at = head(at, kArray, 3);
    at = head(at, kBytes, static_cast<std::uint32_t>(parent_size));
    at = put_bytes(at, parent, parent_size);
    return head(at, kArray, static_cast<std::uint32_t>(num_tokens));
  }

  static Byte* token(Byte* at, std::int32_t value) {
    // CBOR writes a negative value as -1 - value, which is its complement.
    const std::int32_t sign = value >> 31;
    return head(at, sign != 0 ? kNegative : kUnsigned, static_cast<std::uint32_t>(value ^ sign));
  }

  static Byte* end(Byte*, Byte* at, std::size_t, const std::string& rest) {
    return put_bytes(at, rest.data(), rest.size());
  }
};

std::size_t checked_block_size(std::int64_t block_size) {
  if (block_size < 1 || block_size > BlockHasher::kMaxBlockSize) {
    throw std::invalid_argument("block_size must be from 1 to " +
                                std::to_string(BlockHasher::kMaxBlockSize) + ", got " +
                                std::to_string(block_size));
  }
  return static_cast<std::size_t>(block_size);
}

void check_size(const char* what, std::size_t size, std::size_t most) {
  if (size >= 1 && size <= most) return;
  throw std::invalid_argument(std::string(what) + " must have 1 to " + std::to_string(most) +
                              " bytes, got " + std::to_string(size));
}

}  // namespace

BlockHasher::BlockHasher(const std::string& algorithm, std::int64_t block_size)
    : sha_(algorithm == "sha256" || algorithm == "sha256_cbor"),
      cbor_(algorithm == "sha256_cbor" || algorithm == "xxhash_cbor"),
      block_size_(checked_block_size(block_size)) {
  if (!sha_ && algorithm != "xxhash" && algorithm != "xxhash_cbor") {
    throw std::invalid_argument(
        "algorithm must be sha256, sha256_cbor, xxhash or xxhash_cbor, got " + algorithm);
  }
}

BlockHasher::Chain::Chain(const BlockHasher& hasher, const std::string& parent,
                          const std::string& rest)
    : hasher_(hasher), rest_(rest) {
  check_size("parent", parent.size(), kMaxParent);
  check_size("rest", rest.size(), kMaxRest);
  constexpr std::size_t kHeads = 64;  // includes the bytes that put_word may overrun
  const std::size_t size = hasher_.block_size();
  message_.resize(kHeads + kMaxParent + kMaxToken * size + rest.size() + kSha256Padding);
  const auto begin = hasher_.cbor_ ? Cbor::begin : Pickle::begin;
  const auto* bytes = reinterpret_cast<const Byte*>(parent.data());
  front_ = static_cast<std::size_t>(begin(message_.data(), bytes, parent.size(), size) -
                                    message_.data());
}

void BlockHasher::Chain::next(const std::int32_t* tokens, std::uint8_t* digest) {
  hasher_.cbor_ ? next_as<Cbor>(tokens, digest) : next_as<Pickle>(tokens, digest);
}

template <class Format>
void BlockHasher::Chain::next_as(const std::int32_t* tokens, std::uint8_t* digest) {
  const std::size_t num_tokens = hasher_.block_size_;
  Byte* const message = message_.data();
  Byte* at = message + front_;
  for (std::size_t i = 0; i < num_tokens; ++i) at = Format::token(at, tokens[i]);
  at = Format::end(message, at, num_tokens, rest_);
  const auto length = static_cast<std::size_t>(at - message);
  // Constant sizes make the copies fast; each hash waits for the one before.
  if (hasher_.sha_) {
    const auto hash = sha256_in_place(message, length);
    std::memcpy(digest, hash.data(), 32);
    at = Format::begin(message, hash.data(), 32, num_tokens);
  } else {
    const auto hash = xxh3_128(message, length);
    std::memcpy(digest, hash.data(), 16);
    at = Format::begin(message, hash.data(), 16, num_tokens);
  }
  front_ = static_cast<std::size_t>(at - message);
}

}  // namespace hybrid_kv
