// Pieces tile a request exactly, keep to the rules of their route, and carry the right bytes of a simulated file.

#include "transfer.hpp"

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "aligned_memory.hpp"
#include "check.hpp"

using namespace deepnvme;

namespace {

constexpr size_t kSpace = 60'000;

Transfer random_transfer(std::mt19937& rng) {
  const auto pick = [&rng](size_t limit) { return std::uniform_int_distribution<size_t>(0, limit)(rng); };
  Transfer t;
  t.direction = pick(1) ? Direction::read : Direction::write;
  t.direct = pick(3) != 0;
  t.alignment = {size_t{1} << pick(12), size_t{512} << pick(3)};
  t.alignment.memory = std::max<size_t>(t.alignment.memory, 4);
  t.offset = pick(1) ? pick(kSpace / 2) : pick(20) * 4096;
  t.nbytes = 1 + (pick(1) ? pick(kSpace / 2 - 1) : pick(10'000));
  t.address = 0x10000000 + (pick(1) ? pick(8192) : pick(16) * 512);
  t.members = 1 + static_cast<unsigned>(pick(3));
  t.stripe = 4096 * (1 + pick(3));
  t.block = 4096 << pick(4);
  t.slot = 4096 << pick(4);
  return t;
}

void check_rules(const Transfer& t, const Piece& p) {
  const size_t page = std::max<size_t>(t.alignment.offset, 4096);
  CHECK(p.useful > 0 && p.nbytes >= p.skip + p.useful);
  if (!t.direct) CHECK(p.route == Route::cached);
  switch (p.route) {
    case Route::direct:
      CHECK((t.address + p.position) % t.alignment.memory == 0);
      CHECK(p.nbytes == p.useful && p.skip == 0 && p.nbytes <= t.block);
      CHECK(p.file_offset % t.alignment.offset == 0 && p.nbytes % t.alignment.offset == 0);
      break;
    case Route::bounced:
      CHECK(p.nbytes <= t.slot);
      CHECK(p.file_offset % t.alignment.offset == 0 && p.nbytes % t.alignment.offset == 0);
      if (t.direction == Direction::write) CHECK(p.nbytes == p.useful && p.skip == 0);
      break;
    case Route::cached:
      CHECK(p.nbytes == p.useful && p.skip == 0);
      // Beside direct pieces only within one page, so that no page is written both ways.
      if (t.direct) {
        CHECK(t.direction == Direction::write);
        CHECK(p.file_offset / page == (p.file_offset + p.nbytes - 1) / page);
      }
      break;
  }
  if (t.direct && t.direction == Direction::write && p.route != Route::cached) {
    CHECK(p.file_offset % page == 0 && p.nbytes % page == 0);
  }
}

// Carries the transfer out on members that are plain arrays, and compares with a plain copy.
void check_bytes(const Transfer& t, std::mt19937& rng) {
  std::vector<std::vector<unsigned char>> members(t.members, std::vector<unsigned char>(2 * kSpace));
  for (auto& m : members) {
    for (auto& byte : m) byte = static_cast<unsigned char>(rng());
  }
  const auto at = [&](uint64_t logical) -> unsigned char& {
    const uint64_t turn = logical / t.stripe;
    return t.members == 1 ? members[0][logical]
                          : members[turn % t.members][turn / t.members * t.stripe + logical % t.stripe];
  };
  auto expected = members;
  std::vector<unsigned char> memory(t.nbytes);
  for (auto& byte : memory) byte = static_cast<unsigned char>(rng());
  const auto before = memory;

  size_t position = 0;
  while (position < t.nbytes) {
    const Piece p = t.piece_at(position);
    CHECK(p.position == position && p.position + p.useful <= t.nbytes);
    check_rules(t, p);
    unsigned char* file = members[p.member].data() + p.file_offset;
    if (t.direction == Direction::read) {
      std::memcpy(memory.data() + position, file + p.skip, p.useful);
    } else {
      std::memcpy(file, memory.data() + position, p.useful);
    }
    position += p.useful;
  }
  for (size_t i = 0; i < t.nbytes; ++i) {
    CHECK(at(t.offset + i) == (t.direction == Direction::read ? memory[i] : before[i]));
  }
  if (t.direction == Direction::write) {  // and nothing else has changed
    for (size_t i = 0; i < t.nbytes; ++i) at(t.offset + i) = 0;
    std::swap(members, expected);
    for (size_t i = 0; i < t.nbytes; ++i) at(t.offset + i) = 0;
    CHECK(members == expected);
  }
}

void test_short_pieces() {
  Piece block;
  block.nbytes = block.useful = 8192;
  const Alignment alignment{512, 512};
  CHECK(!is_complete(block, Direction::read, 8191));
  CHECK(is_complete(block, Direction::read, 8192));
  CHECK(resume_at(block, alignment, 0, 1000) == 512u);
  CHECK(!resume_at(block, alignment, 0, 500));
  CHECK(!resume_at(block, alignment, 512, 512));
  // The last block of a file: shorter than asked for, but all of the useful bytes are there.
  Piece end;
  end.route = Route::bounced;
  end.nbytes = 512;
  end.skip = 10;
  end.useful = 90;
  CHECK(is_complete(end, Direction::read, 100));
  CHECK(!is_complete(end, Direction::read, 99));
  Piece cached;
  cached.route = Route::cached;
  cached.nbytes = cached.useful = 100;
  CHECK(resume_at(cached, alignment, 0, 7) == 7u);
  CHECK(!resume_at(cached, alignment, 7, 7));
}

void test_shares_of_members() {
  for (unsigned members = 1; members <= 4; ++members) {
    for (uint64_t nbytes : {0, 1, 4095, 4096, 4097, 20'000, 65'536}) {
      std::vector<uint64_t> counted(members, 0);
      for (uint64_t i = 0; i < nbytes; ++i) ++counted[locate(i, members, 4096).member];
      for (unsigned m = 0; m < members; ++m) CHECK(member_nbytes(nbytes, m, members, 4096) == counted[m]);
    }
  }
}

}  // namespace

int main() {
  std::mt19937 rng(1);
  for (int i = 0; i < 200; ++i) check_bytes(random_transfer(rng), rng);
  test_short_pieces();
  test_shares_of_members();
}
