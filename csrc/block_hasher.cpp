// SPDX-License-Identifier: Apache-2.0
#include "block_hasher.h"

#include <cstring>
#include <stdexcept>

#include "sha256.h"
#include "xxh3.h"

namespace hybrid_kv {
namespace {

// Writes to memory that has room.
class Writer {
 public:
  explicit Writer(std::uint8_t* begin) : at_(begin) {}

  std::uint8_t* at() const { return at_; }
  void byte(std::uint8_t value) { *at_++ = value; }
  void bytes(const void* data, std::size_t size) {
    std::memcpy(at_, data, size);
    at_ += size;
  }
  void little_endian(std::uint64_t value, int size) {
    for (int i = 0; i < size; ++i) byte(static_cast<std::uint8_t>(value >> (8 * i)));
  }
  void big_endian(std::uint64_t value, int size) {
    for (int i = size - 1; i >= 0; --i) byte(static_cast<std::uint8_t>(value >> (8 * i)));
  }

 private:
  std::uint8_t* at_;
};

// Parent and tokens take 5 bytes each at most; the rest is a few dozen.
std::size_t max_serialized_size(std::size_t parent_size, std::size_t num_tokens) {
  return 64 + parent_size + 5 * num_tokens;
}

// Python's pickle protocol 5 of (parent, tokens, None), as CPython's C pickler writes it.
std::size_t write_pickle(std::uint8_t* out, const std::uint8_t* parent, std::size_t parent_size,
                         const std::int32_t* tokens, std::size_t num_tokens) {
  constexpr std::uint8_t kProto = 0x80, kFrame = 0x95, kMemoize = 0x94, kShortBinBytes = 'C';
  constexpr std::uint8_t kMark = '(', kTuple = 't', kNone = 'N', kStop = '.';
  constexpr std::uint8_t kBinInt1 = 'K', kBinInt2 = 'M', kBinInt = 'J';
  constexpr std::uint8_t kTupleOf[] = {0, 0x85, 0x86, 0x87};
  constexpr std::size_t kFrameStart = 11;  // after protocol and frame opcodes

  Writer to(out + kFrameStart);
  to.byte(kShortBinBytes);
  to.byte(static_cast<std::uint8_t>(parent_size));
  to.bytes(parent, parent_size);
  to.byte(kMemoize);
  if (num_tokens > 3) to.byte(kMark);
  for (std::size_t i = 0; i < num_tokens; ++i) {
    const std::int32_t token = tokens[i];
    if (0 <= token && token <= 0xff) {
      to.byte(kBinInt1);
      to.byte(static_cast<std::uint8_t>(token));
    } else if (0 <= token && token <= 0xffff) {
      to.byte(kBinInt2);
      to.little_endian(static_cast<std::uint32_t>(token), 2);
    } else {
      to.byte(kBinInt);
      to.little_endian(static_cast<std::uint32_t>(token), 4);
    }
  }
  to.byte(num_tokens > 3 ? kTuple : kTupleOf[num_tokens]);
  to.byte(kMemoize);
  to.byte(kNone);
  to.byte(kTupleOf[3]);
  to.byte(kMemoize);
  to.byte(kStop);

  Writer header(out);
  header.byte(kProto);
  header.byte(5);
  header.byte(kFrame);
  header.little_endian(static_cast<std::uint64_t>(to.at() - out) - kFrameStart, 8);
  return static_cast<std::size_t>(to.at() - out);
}

// The head of a CBOR item (RFC 8949): its major type, and a count or value in the fewest bytes.
void write_cbor_head(Writer& to, std::uint8_t major, std::uint64_t value) {
  const auto type = static_cast<std::uint8_t>(major << 5);
  if (value < 24) {
    to.byte(static_cast<std::uint8_t>(type | value));
    return;
  }
  const int log_size = value <= 0xff ? 0 : value <= 0xffff ? 1 : 2;
  to.byte(static_cast<std::uint8_t>(type | (24 + log_size)));
  to.big_endian(value, 1 << log_size);
}

// Canonical CBOR of (parent, tokens, None).
std::size_t write_cbor(std::uint8_t* out, const std::uint8_t* parent, std::size_t parent_size,
                       const std::int32_t* tokens, std::size_t num_tokens) {
  constexpr std::uint8_t kUnsigned = 0, kNegative = 1, kBytes = 2, kArray = 4, kNull = 0xf6;
  Writer to(out);
  write_cbor_head(to, kArray, 3);
  write_cbor_head(to, kBytes, parent_size);
  to.bytes(parent, parent_size);
  write_cbor_head(to, kArray, num_tokens);
  for (std::size_t i = 0; i < num_tokens; ++i) {
    const std::int64_t token = tokens[i];
    if (token >= 0) {
      write_cbor_head(to, kUnsigned, static_cast<std::uint64_t>(token));
    } else {
      write_cbor_head(to, kNegative, static_cast<std::uint64_t>(-1 - token));
    }
  }
  to.byte(kNull);
  return static_cast<std::size_t>(to.at() - out);
}

std::size_t checked_block_size(std::int64_t block_size) {
  if (block_size < 1 || block_size > BlockHasher::kMaxBlockSize) {
    throw std::invalid_argument("block_size must be from 1 to " +
                                std::to_string(BlockHasher::kMaxBlockSize) + ", not " +
                                std::to_string(block_size));
  }
  return static_cast<std::size_t>(block_size);
}

}  // namespace

BlockHasher::BlockHasher(const std::string& algorithm, std::int64_t block_size)
    : sha_(algorithm == "sha256" || algorithm == "sha256_cbor"),
      cbor_(algorithm == "sha256_cbor" || algorithm == "xxhash_cbor"),
      block_size_(checked_block_size(block_size)) {
  if (!sha_ && algorithm != "xxhash" && algorithm != "xxhash_cbor") {
    throw std::invalid_argument("algorithm must be sha256, sha256_cbor, xxhash or xxhash_cbor, not " +
                                algorithm);
  }
}

std::vector<std::uint8_t> BlockHasher::hash(const std::string& parent, const std::int32_t* tokens,
                                            std::size_t num_tokens) const {
  if (parent.empty() || parent.size() > 255) {
    throw std::invalid_argument("parent must have from 1 to 255 bytes, not " +
                                std::to_string(parent.size()));
  }
  const std::size_t count = num_tokens / block_size_, size = digest_size();
  std::vector<std::uint8_t> digests(count * size);
  std::vector<std::uint8_t> message(max_serialized_size(parent.size() + size, block_size_));
  const auto* previous = reinterpret_cast<const std::uint8_t*>(parent.data());
  std::size_t previous_size = parent.size();
  for (std::size_t i = 0; i < count; ++i) {
    const auto write = cbor_ ? write_cbor : write_pickle;
    const std::size_t length =
        write(message.data(), previous, previous_size, tokens + i * block_size_, block_size_);
    std::uint8_t* digest = digests.data() + i * size;
    if (sha_) {
      std::memcpy(digest, sha256(message.data(), length).data(), size);
    } else {
      std::memcpy(digest, xxh3_128(message.data(), length).data(), size);
    }
    previous = digest;
    previous_size = size;
  }
  return digests;
}

}  // namespace hybrid_kv
