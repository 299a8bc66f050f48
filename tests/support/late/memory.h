// Memory of the late device, and page-locked memory of the host: who used which bytes, and whether they raced.
//
// As a caching allocator does, this one reuses a freed block at once on the stream that it was allocated for. It poisons
// the block in the order of that stream. A block that `record_stream` named another stream for waits for that stream.
#pragma once

#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "streams.h"

namespace late {

// Bytes [from, to) that work reads or writes.
struct Bytes {
  uintptr_t from, to;
  bool written;
};

struct Access {
  Bytes bytes;
  int stream;
  int64_t time;  // of the stream's clock
  std::string what;
};

struct Block {
  uintptr_t address;
  size_t size;
  int stream;  // that it was allocated for; -1 in the host's memory
  std::set<int> used_on;  // other streams, which its reuse waits for
  std::vector<Access> accesses;
};

constexpr int kHost = -1;
constexpr unsigned char kPoison = 0xA5;

// All memory that is in use, what waits for a stream, and what is free, by stream and size. Guarded by ledger().
struct Memory {
  std::map<uintptr_t, Block> used;
  std::vector<std::pair<Block, std::vector<MarkPtr>>> waiting;
  std::map<std::pair<int, size_t>, std::vector<Block>> free;
  std::vector<std::string> races;
  int64_t reserved = 0, most_waiting = 0;

  Block* find(uintptr_t address) {
    auto after = used.upper_bound(address);
    if (after == used.begin()) return nullptr;
    Block& block = std::prev(after)->second;
    return address < block.address + block.size ? &block : nullptr;
  }
};

inline Memory& memory() {
  static auto* all = new Memory;
  return *all;
}

inline void report_race(const Access& first, const Access& second) {
  const auto verb = [](const Access& one) { return one.bytes.written ? " writes" : " reads"; };
  const auto bytes = std::min(first.bytes.to, second.bytes.to) - std::max(first.bytes.from, second.bytes.from);
  std::string text = second.what + " on stream " + std::to_string(second.stream) + verb(second) + " " +
      std::to_string(bytes) + " bytes that " + first.what + " on stream " + std::to_string(first.stream) + verb(first) +
      ", and does not wait for it";
  std::fprintf(stderr, "late: race: %s\n", text.c_str());
  memory().races.push_back(std::move(text));
}

// Note an access of the stream's newest work. It races with an earlier one that its clock does not know to be done.
inline void note_access(Block& block, Access access) {
  const Clock& clock = stream_of(access.stream).clock;
  const Bytes& now = access.bytes;
  std::vector<Access> kept;
  for (Access& earlier : block.accesses) {
    const Bytes& then = earlier.bytes;
    const bool overlaps = then.from < now.to && now.from < then.to;
    if (overlaps && (then.written || now.written) && clock[earlier.stream] < earlier.time) report_race(earlier, access);
    // Who is ordered behind the new one is ordered behind these.
    const bool covered = now.from <= then.from && then.to <= now.to;
    const bool replaced = covered && (now.written || (!then.written && earlier.stream == access.stream));
    if (!replaced) kept.push_back(std::move(earlier));
  }
  kept.push_back(std::move(access));
  block.accesses = std::move(kept);
}

// Queue work that uses these bytes.
inline void launch(int id, const std::string& what, const std::vector<Bytes>& uses, std::function<void()> work) {
  std::lock_guard<std::mutex> guard(ledger());
  Stream& stream = stream_of(id);
  join(stream.clock, host_clock);
  const int64_t time = ++stream.clock[id];
  for (const Bytes& bytes : uses) {
    Block* block = memory().find(bytes.from);
    if (!block || bytes.from == bytes.to) continue;
    note_access(*block, {bytes, id, time, what});
    if (block->stream == kHost) block->used_on.insert(id);
  }
  stream.push(id, std::move(work));
}

// Take memory for a stream; for the host with kHost.
inline void* take_memory(size_t bytes, int stream) {
  const size_t size = std::max<size_t>(1, (bytes + 511) / 512) * 512;
  Block block{0, size, stream, {}, {}};
  {
    std::lock_guard<std::mutex> guard(ledger());
    Memory& all = memory();
    for (auto one = all.waiting.begin(); one != all.waiting.end();) {
      const bool passed = std::all_of(one->second.begin(), one->second.end(), [](auto& mark) { return mark->is_set(); });
      if (!passed) { ++one; continue; }
      one->first.accesses.clear();  // the allocator has seen that they are done
      all.free[{one->first.stream, one->first.size}].push_back(std::move(one->first));
      one = all.waiting.erase(one);
    }
    auto& fitting = all.free[{stream, size}];
    if (!fitting.empty()) {
      block = std::move(fitting.back());
      fitting.pop_back();
    } else {
      void* made = nullptr;
      if (posix_memalign(&made, 4096, size)) throw std::bad_alloc();
      block.address = reinterpret_cast<uintptr_t>(made);
      all.reserved += size;
    }
    all.used[block.address] = block;
  }
  void* address = reinterpret_cast<void*>(block.address);
  if (stream == kHost) std::memset(address, kPoison, size);
  else launch(stream, "the next owner of freed memory", {{block.address, block.address + size, true}},
              [address, size] { std::memset(address, kPoison, size); });
  return address;
}

inline void free_memory(void* address) {
  std::set<int> used_on;
  {
    std::lock_guard<std::mutex> guard(ledger());
    Block* found = memory().find(reinterpret_cast<uintptr_t>(address));
    if (!found) return;
    used_on = found->used_on;
  }
  std::vector<MarkPtr> marks;
  for (int stream : used_on) marks.push_back(record(stream));
  std::lock_guard<std::mutex> guard(ledger());
  Memory& all = memory();
  auto place = all.used.find(reinterpret_cast<uintptr_t>(address));
  Block block = std::move(place->second);
  all.used.erase(place);
  block.used_on.clear();
  if (marks.empty()) {
    all.free[{block.stream, block.size}].push_back(std::move(block));
    return;
  }
  all.waiting.emplace_back(std::move(block), std::move(marks));
  int64_t waiting = 0;
  for (const auto& one : all.waiting) if (one.first.stream != kHost) waiting += one.first.size;
  all.most_waiting = std::max(all.most_waiting, waiting);
}

// Let reuse of the memory at an address wait for a stream.
inline void record_use(const void* address, int stream) {
  std::lock_guard<std::mutex> guard(ledger());
  Block* block = memory().find(reinterpret_cast<uintptr_t>(address));
  if (block && block->stream != stream) block->used_on.insert(stream);
}

// Page-lock memory that someone else owns.
inline void lock_pages(uintptr_t address, size_t size) {
  std::lock_guard<std::mutex> guard(ledger());
  memory().used[address] = Block{address, size, kHost, {}, {}};
}

inline bool unlock_pages(uintptr_t address) {
  std::lock_guard<std::mutex> guard(ledger());
  return memory().used.erase(address) > 0;
}

inline bool is_page_locked(const void* address) {
  std::lock_guard<std::mutex> guard(ledger());
  Block* block = memory().find(reinterpret_cast<uintptr_t>(address));
  return block && block->stream == kHost;
}

}  // namespace late
