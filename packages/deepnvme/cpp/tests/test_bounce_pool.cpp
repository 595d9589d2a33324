// Slots of every size: apart from each other, and all of it free again once they are given back. On huge pages, where
// the pool is one stretch, and without them, where it is several.

#include "bounce_pool.hpp"

#include <sys/prctl.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>

#include "check.hpp"
#include "contiguous_memory.hpp"

using namespace deepnvme;

namespace {

void fill_and_empty(size_t pool_nbytes) {
  BouncePool pool(pool_nbytes);
  std::mt19937 random(7);
  const auto pick = [&](size_t below) { return std::uniform_int_distribution<size_t>(0, below - 1)(random); };
  std::map<std::byte*, size_t> held;  // slot -> bytes
  size_t taken = 0;
  for (int round = 0; round < 20'000; ++round) {
    if (pick(2)) {
      const size_t nbytes = 1 + pick(1 << 20);
      const bool room = pool.has_room(nbytes);
      std::byte* slot = pool.take(nbytes);
      CHECK(room == (slot != nullptr));
      if (!slot) continue;
      const auto next = held.lower_bound(slot);
      CHECK(next == held.end() || slot + nbytes <= next->first);
      CHECK(next == held.begin() || std::prev(next)->first + std::prev(next)->second <= slot);
      held[slot] = nbytes;
      taken += nbytes;
      CHECK(taken <= pool_nbytes);
      // Memory to its last byte: the sanitizer would know.
      std::memset(slot, round, nbytes);
    } else if (!held.empty()) {
      const auto one = std::next(held.begin(), static_cast<std::ptrdiff_t>(pick(held.size())));
      pool.give_back(one->first, one->second);
      taken -= one->second;
      held.erase(one);
    }
    CHECK(held.size() <= pool.most_slots());
  }
  for (const auto& [slot, nbytes] : held) pool.give_back(slot, nbytes);
  for (size_t left = pool_nbytes; left; left -= std::min(left, kContiguous)) {
    CHECK(pool.take(std::min(left, kContiguous)));
  }
  CHECK(!pool.has_room(1));
}

}  // namespace

int main() {
  for (const int without_huge_pages : {0, 1}) {
    CHECK(::prctl(PR_SET_THP_DISABLE, without_huge_pages, 0, 0, 0) == 0);
    for (const size_t nbytes : {1u << 20, 2u << 20, 5u << 20}) fill_and_empty(nbytes);
  }
}
