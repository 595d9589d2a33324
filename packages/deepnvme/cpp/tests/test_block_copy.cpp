// Copies of every length and alignment, with and without the sum, and nothing around them touched.

#include "block_copy.hpp"

#include <algorithm>
#include <vector>

#include "check.hpp"
#include "crc32c.hpp"

using namespace deepnvme;

int main() {
  std::vector<std::byte> from(300'000), to(300'000);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 131 + i / 256);
  for (size_t nbytes : {0, 1, 63, 64, 65, 4096, 16'384, 65'535, 65'536, 65'537, 131'072, 262'147}) {
    for (size_t shift_from : {0, 1, 16, 40}) {
      for (size_t shift_to : {1, 8, 64, 129}) {
        for (int form = 0; form < 4; ++form) {
          const bool sum = form % 2;
          const Target target = form / 2 ? Target::slot : Target::memory;
          std::fill(to.begin(), to.end(), std::byte{0xA5});
          if (sum) {
            CHECK(copy_block_and_sum(&to[shift_to], &from[shift_from], nbytes, target) ==
                  crc32c_raw(0, &from[shift_from], nbytes));
          } else {
            copy_block(&to[shift_to], &from[shift_from], nbytes, target);
          }
          CHECK(std::equal(&from[shift_from], &from[shift_from] + nbytes, &to[shift_to]));
          const auto untouched = [](std::byte b) { return b == std::byte{0xA5}; };
          CHECK(std::all_of(to.begin(), to.begin() + shift_to, untouched));
          CHECK(std::all_of(to.begin() + shift_to + nbytes, to.end(), untouched));
        }
      }
    }
  }
}
