// SPDX-License-Identifier: Apache-2.0
#include "hashing/xxh3.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace hybrid_kv {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are read as they lie in memory");

constexpr std::uint64_t kPrime32_1 = 0x9e3779b1, kPrime32_2 = 0x85ebca77, kPrime32_3 = 0xc2b2ae3d;
constexpr std::uint64_t kPrime64_1 = 0x9e3779b185ebca87, kPrime64_2 = 0xc2b2ae3d27d4eb4f;
constexpr std::uint64_t kPrime64_3 = 0x165667b19e3779f9, kPrime64_4 = 0x85ebca77c2b2ae63;
constexpr std::uint64_t kPrime64_5 = 0x27d4eb2f165667c5;
constexpr std::uint64_t kAvalanche = 0x165667919e3779f9;

constexpr std::size_t kSecretSize = 192, kStripe = 64;
constexpr std::size_t kStripesPerBlock = (kSecretSize - kStripe) / 8;
constexpr std::uint8_t kSecret[kSecretSize] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

struct Hash128 {
  std::uint64_t low, high;
};

std::uint64_t read64(const std::uint8_t* bytes) {
  std::uint64_t value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

std::uint64_t fold_product(std::uint64_t a, std::uint64_t b) {
  __extension__ using Wide = unsigned __int128;
  const Wide product = Wide{a} * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

std::uint64_t avalanche(std::uint64_t hash) {
  hash = (hash ^ (hash >> 37)) * kAvalanche;
  return hash ^ (hash >> 32);
}

std::uint64_t mix_16(const std::uint8_t* in, const std::uint8_t* secret) {
  return fold_product(read64(in) ^ read64(secret), read64(in + 8) ^ read64(secret + 8));
}

void mix_32(Hash128& acc, const std::uint8_t* first, const std::uint8_t* second,
            const std::uint8_t* secret) {
  acc.low = (acc.low + mix_16(first, secret)) ^ (read64(second) + read64(second + 8));
  acc.high = (acc.high + mix_16(second, secret + 16)) ^ (read64(first) + read64(first + 8));
}

Hash128 finish(const Hash128& acc, std::size_t length) {
  const std::uint64_t high = acc.low * kPrime64_1 + acc.high * kPrime64_4 + length * kPrime64_2;
  return {avalanche(acc.low + acc.high), 0 - avalanche(high)};
}

// 17 to 128 bytes: pairs of 16 bytes from both ends, the innermost first.
Hash128 hash_short(const std::uint8_t* in, std::size_t length) {
  Hash128 acc{length * kPrime64_1, 0};
  for (std::size_t i = (length - 1) / 32 + 1; i-- > 0;) {
    mix_32(acc, in + 16 * i, in + length - 16 * (i + 1), kSecret + 32 * i);
  }
  return finish(acc, length);
}

// 129 to 240 bytes.
Hash128 hash_medium(const std::uint8_t* in, std::size_t length) {
  Hash128 acc{length * kPrime64_1, 0};
  for (std::size_t i = 0; i < 4; ++i) {
    mix_32(acc, in + 32 * i, in + 32 * i + 16, kSecret + 32 * i);
  }
  acc = {avalanche(acc.low), avalanche(acc.high)};
  for (std::size_t i = 4; i < length / 32; ++i) {
    mix_32(acc, in + 32 * i, in + 32 * i + 16, kSecret + 3 + 32 * (i - 4));
  }
  mix_32(acc, in + length - 16, in + length - 32, kSecret + 103);
  return finish(acc, length);
}

using Lanes = std::array<std::uint64_t, 8>;

void accumulate(Lanes& acc, const std::uint8_t* stripe, const std::uint8_t* secret) {
  for (std::size_t i = 0; i < 8; ++i) {
    const std::uint64_t data = read64(stripe + 8 * i), key = data ^ read64(secret + 8 * i);
    acc[i ^ 1] += data;
    acc[i] += (key & 0xffffffff) * (key >> 32);
  }
}

std::uint64_t merge(const Lanes& acc, const std::uint8_t* secret, std::uint64_t start) {
  for (std::size_t i = 0; i < 4; ++i) {
    start += fold_product(acc[2 * i] ^ read64(secret + 16 * i),
                          acc[2 * i + 1] ^ read64(secret + 16 * i + 8));
  }
  return avalanche(start);
}

// 241 bytes and more.
Hash128 hash_long(const std::uint8_t* in, std::size_t length) {
  Lanes acc = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
               kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  const std::uint8_t* last_secret = kSecret + kSecretSize - kStripe;
  const std::size_t num_stripes = (length - 1) / kStripe;
  for (std::size_t n = 0; n < num_stripes; ++n) {
    const std::size_t place = n % kStripesPerBlock;
    accumulate(acc, in + kStripe * n, kSecret + 8 * place);
    if (place + 1 == kStripesPerBlock) {
      for (std::size_t i = 0; i < 8; ++i) {
        acc[i] = (acc[i] ^ (acc[i] >> 47) ^ read64(last_secret + 8 * i)) * kPrime32_1;
      }
    }
  }
  accumulate(acc, in + length - kStripe, last_secret - 7);
  return {merge(acc, kSecret + 11, length * kPrime64_1),
          merge(acc, last_secret - 11, ~(length * kPrime64_2))};
}

}  // namespace

std::array<std::uint8_t, 16> xxh3_128(const std::uint8_t* message, std::size_t length) {
  if (length <= 16) {
    throw std::invalid_argument("message must have at least 17 bytes, got " +
                                std::to_string(length));
  }
  Hash128 hash;
  if (length <= 128) {
    hash = hash_short(message, length);
  } else if (length <= 240) {
    hash = hash_medium(message, length);
  } else {
    hash = hash_long(message, length);
  }
  std::array<std::uint8_t, 16> digest;
  for (std::size_t i = 0; i < 8; ++i) {
    digest[i] = static_cast<std::uint8_t>(hash.high >> (56 - 8 * i));
    digest[8 + i] = static_cast<std::uint8_t>(hash.low >> (56 - 8 * i));
  }
  return digest;
}

}  // namespace hybrid_kv
