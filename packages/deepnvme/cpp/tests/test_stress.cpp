// Many threads, every backend, little room: reads, writes, order, cancellation and closing, for the sanitizers.
//
// usage: test_stress DIRECTORY

#include <fcntl.h>
#include <sys/stat.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "aligned_memory.hpp"
#include "check.hpp"
#include "crc32c.hpp"
#include "engine.hpp"
#include "probe.hpp"

using namespace deepnvme;

namespace {

std::shared_ptr<File> open_file(const std::string& path, bool direct) {
  FileMember member;
  member.path = path;
  member.cached = UniqueFd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  CHECK(member.cached);
  const auto alignment = direct_alignment(member.cached.get());
  if (direct && alignment) member.direct = UniqueFd(::open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC));
  std::vector<FileMember> members;
  members.push_back(std::move(member));
  return std::make_shared<File>(std::move(members), 1 << 20, alignment.value_or(Alignment{}));
}

void await(const Request& request) {
  while (!request.completion.wait_for(std::chrono::seconds(1))) {
  }
}

// One thread owns [region, region + kRegion) of the file and checks that it reads what it wrote last.
constexpr size_t kRegion = 700'001;

void work(Engine& engine, const std::shared_ptr<File>& file, unsigned seed) {
  std::mt19937 rng(seed);
  const uint64_t region = seed * kRegion;
  AlignedMemory source(kRegion + 4096), target(kRegion + 4096);
  for (int turn = 0; turn < 12; ++turn) {
    const size_t shift = rng() % 3 ? 64 * (rng() % 64) : 0;
    const size_t start = rng() % 2 ? rng() % 5000 : 0;
    const size_t nbytes = 1 + rng() % (kRegion - start);
    std::byte* from = source.data() + shift;
    std::byte* to = target.data() + (rng() % 2 ? shift : 0);
    std::memset(from, turn + static_cast<int>(seed), nbytes);
    const auto address = [](std::byte* p) { return reinterpret_cast<uintptr_t>(p); };
    auto write = engine.submit(Direction::write, file, address(from), nbytes, region + start, true, {});
    // Ordered behind the write, though both are under way.
    auto read = engine.submit(Direction::read, file, address(to), nbytes, region + start, true, {{write, true}});
    if (rng() % 8 == 0) {
      engine.cancel(write);
      await(*read);
      CHECK(write->completion.is_set());
      continue;
    }
    await(*read);
    CHECK(!read->failed() && !write->failed());
    CHECK(std::memcmp(from, to, nbytes) == 0);
    CHECK(read->crc() == write->crc() && read->crc() == crc32c(0, from, nbytes));
  }
  // Beyond the end: fails, and only this one.
  auto beyond = engine.submit(Direction::read, file, reinterpret_cast<uintptr_t>(target.data()), 4096, 1ull << 40, false, {});
  await(*beyond);
  CHECK(beyond->failed() && beyond->error().code == ENODATA);
}

void stress(const std::string& backend, const std::string& directory, bool direct, unsigned rings) {
  const auto file = open_file(directory + "/stress-" + backend, direct);
  Engine engine({backend, 3, 64 << 10, rings, 128 << 10});
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < 6; ++i) threads.emplace_back(work, std::ref(engine), std::cref(file), i);
  std::thread sweeper([&engine] {
    for (int i = 0; i < 200; ++i) {
      engine.take_finished();
      engine.wait_idle(std::chrono::microseconds(50));
    }
  });
  for (auto& t : threads) t.join();
  sweeper.join();

  // Closed while busy: everything submitted before still ends.
  AlignedMemory memory(8 << 20);
  std::vector<std::shared_ptr<Request>> last;
  for (int i = 0; i < 64; ++i) {
    last.push_back(engine.submit(Direction::write, file, reinterpret_cast<uintptr_t>(memory.data()), 100'000 + i,
                                 static_cast<uint64_t>(i) << 17, false, {}));
  }
  std::thread closer([&engine] { engine.close(); });
  for (const auto& request : last) await(*request);
  closer.join();
  CHECK(engine.under_way() == 0);
  for (const auto& request : last) CHECK(!request->failed() && request->moved() == request->transfer.nbytes);
  CHECK(engine.counters().requests == engine.counters().finished);
  bool refused = false;
  try {
    engine.submit(Direction::read, file, reinterpret_cast<uintptr_t>(memory.data()), 1, 0, false, {});
  } catch (const SystemError& e) {
    refused = e.code() == ESHUTDOWN;
  }
  CHECK(refused);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string directory = argc > 1 ? argv[1] : ".";
  for (const BackendKind& kind : backend_kinds()) {
    try {
      kind.make({.depth = 1, .threads = 1});
    } catch (const SystemError& e) {
      std::printf("%s: skipped: %s\n", kind.name, e.what());
      continue;
    }
    for (bool direct : {true, false}) {
      for (unsigned rings : {1u, 3u}) stress(kind.name, directory, direct, rings);
    }
    std::remove((directory + "/stress-" + kind.name).c_str());
    std::printf("%s: passed\n", kind.name);
  }
}
