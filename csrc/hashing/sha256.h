// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace hybrid_kv {

// Bytes that SHA-256 may write after a message.
constexpr std::size_t kSha256Padding = 72;

// SHA-256 (FIPS 180-4) of a message, which it pads in place: kSha256Padding bytes after the message
// must be writable. Uses the processor's SHA instructions if it has them.
std::array<std::uint8_t, 32> sha256_in_place(std::uint8_t* message, std::size_t length);

// The same without SHA instructions, for tests on processors that have them.
std::array<std::uint8_t, 32> sha256_in_place_portable(std::uint8_t* message, std::size_t length);

}  // namespace hybrid_kv
