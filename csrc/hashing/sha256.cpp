// SPDX-License-Identifier: Apache-2.0
#include "hashing/sha256.h"

#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace hybrid_kv {
namespace {

constexpr std::size_t kBlock = 64;

using State = std::array<std::uint32_t, 8>;
// Mixes `count` blocks of 64 bytes into the state.
using Compress = void (*)(State& state, const std::uint8_t* data, std::size_t count);

// FIPS 180-4, 5.3.3: the fractional parts of the square roots of the first 8 primes.
constexpr State kInitial = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                            0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

// FIPS 180-4, 4.2.2: the fractional parts of the cube roots of the first 64 primes.
alignas(16) constexpr std::uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::uint32_t rotate_right(std::uint32_t value, int bits) {
  return (value >> bits) | (value << (32 - bits));
}

std::uint32_t load_big_endian(const std::uint8_t* bytes) {
  return std::uint32_t{bytes[0]} << 24 | std::uint32_t{bytes[1]} << 16 |
         std::uint32_t{bytes[2]} << 8 | std::uint32_t{bytes[3]};
}

void store_big_endian(std::uint8_t* bytes, std::uint64_t value, int size) {
  for (int i = 0; i < size; ++i) {
    bytes[i] = static_cast<std::uint8_t>(value >> (8 * (size - 1 - i)));
  }
}

void compress_portable(State& state, const std::uint8_t* data, std::size_t count) {
  for (; count > 0; --count, data += kBlock) {
    std::uint32_t w[64];
    for (int t = 0; t < 16; ++t) w[t] = load_big_endian(data + 4 * t);
    for (int t = 16; t < 64; ++t) {
      const std::uint32_t x = w[t - 15], y = w[t - 2];
      w[t] = w[t - 16] + (rotate_right(x, 7) ^ rotate_right(x, 18) ^ (x >> 3)) + w[t - 7] +
             (rotate_right(y, 17) ^ rotate_right(y, 19) ^ (y >> 10));
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (int t = 0; t < 64; ++t) {
      const std::uint32_t t1 = h +
                               (rotate_right(e, 6) ^ rotate_right(e, 11) ^ rotate_right(e, 25)) +
                               ((e & f) ^ (~e & g)) + kRound[t] + w[t];
      const std::uint32_t t2 = (rotate_right(a, 2) ^ rotate_right(a, 13) ^ rotate_right(a, 22)) +
                               ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const State mixed = {a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; ++i) state[i] += mixed[i];
  }
}

#if defined(__x86_64__)

bool has_sha_instructions() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0 || (ebx >> 29 & 1) == 0) return false;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx >> 19 & 1) != 0;  // SSE4.1
}

// The instructions keep the state as (a, b, e, f) and (c, d, g, h), and do two rounds each.
__attribute__((target("sha,sse4.1"))) void compress_with_instructions(State& state,
                                                                      const std::uint8_t* data,
                                                                      std::size_t count) {
  const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  auto* words = reinterpret_cast<__m128i*>(state.data());
  const __m128i badc = _mm_shuffle_epi32(_mm_loadu_si128(words), 0xb1);
  const __m128i hgfe = _mm_shuffle_epi32(_mm_loadu_si128(words + 1), 0x1b);
  __m128i abef = _mm_alignr_epi8(badc, hgfe, 8);
  __m128i cdgh = _mm_blend_epi16(hgfe, badc, 0xf0);
  for (; count > 0; --count, data += kBlock) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w[16];  // four words of the message schedule each
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      if (i < 4) {
        const auto* source = reinterpret_cast<const __m128i*>(data + 16 * i);
        w[i] = _mm_shuffle_epi8(_mm_loadu_si128(source), swap);
      } else {
        const __m128i seven_back = _mm_alignr_epi8(w[i - 1], w[i - 2], 4);
        const __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(w[i - 4], w[i - 3]), seven_back);
        w[i] = _mm_sha256msg2_epu32(sum, w[i - 1]);
      }
      const auto* constants = reinterpret_cast<const __m128i*>(kRound + 4 * i);
      const __m128i wk = _mm_add_epi32(w[i], _mm_load_si128(constants));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, wk);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(wk, 0x0e));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  _mm_storeu_si128(words, _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128(words + 1, _mm_alignr_epi8(dchg, feba, 8));
}

const Compress kFastest = has_sha_instructions() ? compress_with_instructions : compress_portable;

#else

const Compress kFastest = compress_portable;

#endif

std::array<std::uint8_t, 32> digest(Compress compress, std::uint8_t* message, std::size_t length) {
  // A one bit, zeros, and the length in bits make whole blocks of the message.
  const std::size_t count = (length + 9 + kBlock - 1) / kBlock;
  std::memset(message + length, 0, count * kBlock - length);
  message[length] = 0x80;
  store_big_endian(message + count * kBlock - 8, std::uint64_t{length} * 8, 8);
  State state = kInitial;
  compress(state, message, count);

  std::array<std::uint8_t, 32> result;
  for (std::size_t i = 0; i < 8; ++i) store_big_endian(result.data() + 4 * i, state[i], 4);
  return result;
}

}  // namespace

std::array<std::uint8_t, 32> sha256_in_place(std::uint8_t* message, std::size_t length) {
  return digest(kFastest, message, length);
}

std::array<std::uint8_t, 32> sha256_in_place_portable(std::uint8_t* message, std::size_t length) {
  return digest(compress_portable, message, length);
}

}  // namespace hybrid_kv
