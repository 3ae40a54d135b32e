// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace hybrid_kv {

// SHA-256 (FIPS 180-4) of a message in memory, in one call. Uses the processor's SHA instructions
// where it has them.
std::array<std::uint8_t, 32> sha256(const std::uint8_t* message, std::size_t length);

// The same with plain instructions only, for tests on processors that have the others.
std::array<std::uint8_t, 32> sha256_portable(const std::uint8_t* message, std::size_t length);

}  // namespace hybrid_kv
