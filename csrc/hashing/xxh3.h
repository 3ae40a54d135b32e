// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace hybrid_kv {

// XXH3 with 128 bits, seed 0 and the default secret, most significant byte first, as in the xxHash
// specification 0.2.0. Throws std::invalid_argument for messages of at most 16 bytes. They
// need another algorithm, and every serialized block is longer.
std::array<std::uint8_t, 16> xxh3_128(const std::uint8_t* message, std::size_t length);

}  // namespace hybrid_kv
