// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace hybrid_kv {

// What SHA-256 may write after a message.
constexpr std::size_t kSha256Padding = 72;

// SHA-256 (FIPS 180-4) of a message in memory, in one call. Pads the message where it lies: there
// must be room for kSha256Padding bytes after it. Uses the processor's SHA instructions where it
// has them.
std::array<std::uint8_t, 32> sha256_in_place(std::uint8_t* message, std::size_t length);

// The same with plain instructions only, for tests on processors that have the others.
std::array<std::uint8_t, 32> sha256_in_place_portable(std::uint8_t* message, std::size_t length);

}  // namespace hybrid_kv
