// How a request becomes pieces that a drive accepts, and what is left of a piece after a short one. Pure arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace deepnvme {

enum class Direction : uint8_t { read, write };

// Note: three routes.
//   direct   the drive moves the bytes between itself and the person's memory (O_DIRECT).
//   bounced  the drive moves whole blocks to or from a slot of our bounce pool, and we copy: for memory that does
//            not start where the drive wants it, and for reads that begin or end inside a block.
//   cached   the kernel's page cache moves the bytes. It is the only route of a file without O_DIRECT, and the one
//            for the ends of a write that begins or ends inside a page: the kernel alone can merge such bytes with
//            their neighbours without losing a neighbour's concurrent write, also from another process, and it
//            leaves the file exactly as long as the bytes say.
//   A write's direct part therefore consists of whole *pages*, not of the drive's smaller blocks: were a page
//   written through the cache in one half and directly in the other, writing the page back would undo the latter.
enum class Route : uint8_t { direct, bounced, cached };

// What O_DIRECT asks of a file (statx: dio_mem_align, dio_offset_align). Powers of two.
struct Alignment {
  size_t memory = 4096;  // of the address
  size_t offset = 4096;  // of file offset and length
};

// A piece goes to or comes from one file (a member of a striped one) in one system call.
struct Piece {
  Route route = Route::direct;
  unsigned member = 0;       // which file of a striped one
  uint64_t file_offset = 0;  // where the kernel starts in that file
  size_t nbytes = 0;         // what the kernel is asked to move
  size_t skip = 0;           // bounced reads: the useful bytes start here within the block
  size_t useful = 0;         // bytes of the request that this piece brings
  size_t position = 0;       // where they lie in the request
};

class Transfer {
 public:
  Direction direction = Direction::read;
  uintptr_t address = 0;
  uint64_t offset = 0;  // in the (striped) file
  size_t nbytes = 0;
  bool direct = true;     // the file is open with O_DIRECT
  Alignment alignment;
  unsigned members = 1;   // files that the bytes are striped over ...
  uint64_t stripe = 0;    // ... in turns of so many bytes, a multiple of 4096
  size_t block = 1 << 20;  // largest piece, a multiple of 4096
  size_t slot = 1 << 20;   // largest bounced piece, a multiple of 4096

  // The piece that begins at `position` < nbytes of the request. Following `position + useful` from 0 visits every
  // byte once.
  Piece piece_at(size_t position) const;

 private:
  Piece cut_cached(Piece piece, size_t available) const;
  Piece cut_write(Piece piece, size_t available) const;
  Piece cut_read(Piece piece, size_t available) const;
};

// Where a striped file's byte lies, and how many bytes follow it in the same member.
struct Location {
  unsigned member;
  uint64_t file_offset;
  uint64_t contiguous;
};
Location locate(uint64_t offset, unsigned members, uint64_t stripe);

// How many bytes of a striped file of `nbytes` lie in `member`.
uint64_t member_nbytes(uint64_t nbytes, unsigned member, unsigned members, uint64_t stripe);

// Whether a piece has all its useful bytes once the kernel moved `moved` bytes of it.
bool is_complete(const Piece& piece, Direction direction, size_t moved);

// Where within the piece the next attempt starts when the kernel moved it from `before` to `moved` only; nothing
// when trying again cannot help: a read that gained no whole block has met the end of the file.
std::optional<size_t> resume_at(const Piece& piece, const Alignment& alignment, size_t before, size_t moved);

}  // namespace deepnvme
