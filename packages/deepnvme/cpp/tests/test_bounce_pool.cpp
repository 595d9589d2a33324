// Slots of every size: apart from each other, within the pool, and all of it free again once they are given back.

#include "bounce_pool.hpp"

#include <algorithm>
#include <map>
#include <random>

#include "check.hpp"

using namespace deepnvme;

int main() {
  constexpr size_t kPool = 2 << 20;
  BouncePool pool(kPool);
  std::mt19937 random(7);
  const auto pick = [&](size_t below) { return std::uniform_int_distribution<size_t>(0, below - 1)(random); };
  std::map<std::byte*, size_t> held;  // slot -> bytes
  std::byte* lowest = nullptr;
  for (int round = 0; round < 20'000; ++round) {
    if (pick(2)) {
      const size_t nbytes = 1 + pick(1 << 20);
      const bool room = pool.has_room(nbytes);
      std::byte* slot = pool.take(nbytes);
      CHECK(room == (slot != nullptr));
      if (!slot) continue;
      if (!lowest) lowest = slot;  // the first of an empty pool
      CHECK(slot >= lowest && slot + nbytes <= lowest + kPool);
      const auto next = held.lower_bound(slot);
      CHECK(next == held.end() || slot + nbytes <= next->first);
      CHECK(next == held.begin() || std::prev(next)->first + std::prev(next)->second <= slot);
      held[slot] = nbytes;
    } else if (!held.empty()) {
      const auto one = std::next(held.begin(), static_cast<std::ptrdiff_t>(pick(held.size())));
      pool.give_back(one->first, one->second);
      held.erase(one);
    }
    CHECK(held.size() <= pool.most_slots());
  }
  for (const auto& [slot, nbytes] : held) pool.give_back(slot, nbytes);
  CHECK(pool.take(kPool) == lowest);
  CHECK(!pool.has_room(1));
}
