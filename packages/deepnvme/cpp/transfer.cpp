#include "transfer.hpp"

#include <algorithm>

#include "aligned_memory.hpp"

namespace deepnvme {

Location locate(uint64_t offset, unsigned members, uint64_t stripe) {
  if (members == 1) return {0, offset, UINT64_MAX - offset};
  const uint64_t turn = offset / stripe;
  const uint64_t within = offset % stripe;
  return {static_cast<unsigned>(turn % members), turn / members * stripe + within, stripe - within};
}

uint64_t member_nbytes(uint64_t nbytes, unsigned member, unsigned members, uint64_t stripe) {
  if (members == 1) return nbytes;
  const uint64_t round = stripe * members;
  const uint64_t rest = nbytes % round;
  const uint64_t before = static_cast<uint64_t>(member) * stripe;
  return nbytes / round * stripe + (rest > before ? std::min(rest - before, stripe) : 0);
}

Piece Transfer::piece_at(size_t position) const {
  const Location where = locate(offset + position, members, stripe);
  const size_t available = static_cast<size_t>(std::min<uint64_t>(nbytes - position, where.contiguous));
  Piece piece;
  piece.member = where.member;
  piece.file_offset = where.file_offset;
  piece.position = position;
  if (!direct) return cut_cached(piece, available);
  return direction == Direction::write ? cut_write(piece, available) : cut_read(piece, available);
}

Piece Transfer::cut_cached(Piece piece, size_t available) const {
  piece.route = Route::cached;
  // The first piece ends at a multiple of the block, so that all later ones are whole pages of the cache.
  piece.nbytes = piece.useful = std::min(available, block - static_cast<size_t>(piece.file_offset % block));
  return piece;
}

Piece Transfer::cut_write(Piece piece, size_t available) const {
  const size_t page = std::max(alignment.offset, kPage);
  const size_t into_page = static_cast<size_t>(piece.file_offset % page);
  if (into_page || available < page) {
    piece.route = Route::cached;
    piece.nbytes = piece.useful = std::min(available, page - into_page);
    return piece;
  }
  const bool aligned = (address + piece.position) % alignment.memory == 0;
  piece.route = aligned ? Route::direct : Route::bounced;
  piece.nbytes = piece.useful = std::min(round_down(available, page), aligned ? block : slot);
  return piece;
}

Piece Transfer::cut_read(Piece piece, size_t available) const {
  const size_t unit = alignment.offset;
  const size_t into_block = static_cast<size_t>(piece.file_offset % unit);
  const size_t to_boundary = into_block ? unit - into_block : 0;
  // Where the first whole block of this stretch would land in memory: if the drive accepts that address, only the
  // ends bounce.
  const bool agrees = (address + piece.position + to_boundary) % alignment.memory == 0;
  if (agrees && !into_block && available >= unit) {
    piece.route = Route::direct;
    piece.nbytes = piece.useful = std::min(round_down(available, unit), block);
    return piece;
  }
  const bool only_the_end = agrees && available > to_boundary;
  piece.route = Route::bounced;
  piece.file_offset -= into_block;
  piece.skip = into_block;
  piece.useful = std::min(available, only_the_end && into_block ? to_boundary : slot - into_block);
  piece.nbytes = round_up(into_block + piece.useful, unit);
  return piece;
}

bool is_complete(const Piece& piece, Direction direction, size_t moved) {
  // A block read at the end of a file comes back shorter than asked; it need only reach the last useful byte.
  return moved >= (direction == Direction::read ? piece.skip + piece.useful : piece.nbytes);
}

std::optional<size_t> resume_at(const Piece& piece, const Alignment& alignment, size_t before, size_t moved) {
  // O_DIRECT can only continue at a whole block, so the started block is moved again.
  const size_t start = piece.route == Route::cached ? moved : round_down(moved, alignment.offset);
  if (start <= before) return std::nullopt;
  return start;
}

}  // namespace deepnvme
