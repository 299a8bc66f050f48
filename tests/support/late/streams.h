// Streams of the late device: a queue and a thread each. Work runs later than it is queued, in the order of its stream.
//
// Every stream, event and host thread has a vector clock. So it is known what is done before what by order alone, and
// not by luck of timing.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include <unistd.h>

namespace late {

constexpr int kDevices = 2;
constexpr int kStreamsEach = 33;  // of a device; the first is its default stream
constexpr int kStreams = kDevices * kStreamsEach;

// How much of each stream's work is done before a point of a stream or of a host thread.
using Clock = std::array<int64_t, kStreams>;

inline void join(Clock& known, const Clock& other) {
  for (int i = 0; i < kStreams; ++i) known[i] = std::max(known[i], other[i]);
}

// Guards clocks and the records of memory. What orders work is queued under it, so that queues agree with clocks.
inline std::mutex& ledger() {
  static auto* mutex = new std::mutex;  // never destroyed: threads of streams outlive the end of main
  return *mutex;
}

// What the calling host thread knows to be done.
inline thread_local Clock host_clock{};

// A point of a stream that others wait for: an event's recording.
class Mark {
 public:
  Clock clock{};
  std::chrono::steady_clock::time_point at{};  // when the stream came there

  void set() {
    { std::lock_guard<std::mutex> guard(mutex_); at = std::chrono::steady_clock::now(); done_ = true; }
    changed_.notify_all();
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
  }

  bool is_set() {
    std::lock_guard<std::mutex> guard(mutex_);
    return done_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
};

using MarkPtr = std::shared_ptr<Mark>;

// Called first in the thread of a stream.
void prepare_thread();

class Stream {
 public:
  Clock clock{};                     // what is done before the next work; guarded by ledger()
  std::atomic<int64_t> delay_us{0};  // mean time that each work is later

  // Append work; the caller holds ledger().
  void push(int id, std::function<void()> work) {
    std::lock_guard<std::mutex> guard(mutex_);
    queue_.push_back(std::move(work));
    if (!started_) {
      started_ = true;
      std::thread([this, id] { run(id); }).detach();
    }
    changed_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool started_ = false;

  void run(int id) {
    std::mt19937 random(1234 + id);
    prepare_thread();
    while (true) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [this] { return !queue_.empty(); });
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      if (const int64_t mean = delay_us) std::this_thread::sleep_for(std::chrono::microseconds(random() % (2 * mean)));
      try {
        work();
      } catch (const std::exception& error) {
        std::fprintf(stderr, "late: a kernel failed: %s\n", error.what());
        std::abort();
      }
    }
  }
};

inline Stream& stream_of(int id) {
  static auto* all = new std::array<Stream, kStreams>;
  return (*all)[id];
}

// Record a point of a stream.
inline MarkPtr record(int id) {
  std::lock_guard<std::mutex> guard(ledger());
  Stream& stream = stream_of(id);
  auto mark = std::make_shared<Mark>();
  join(stream.clock, host_clock);
  mark->clock = stream.clock;
  stream.push(id, [mark] { mark->set(); });
  return mark;
}

// Let later work of a stream wait for a mark.
inline void wait_on_stream(int id, const MarkPtr& mark) {
  std::lock_guard<std::mutex> guard(ledger());
  Stream& stream = stream_of(id);
  join(stream.clock, mark->clock);
  stream.push(id, [mark] { mark->wait(); });
}

inline void wait_on_host(const MarkPtr& mark) {
  mark->wait();
  join(host_clock, mark->clock);
}

inline void wait_on_host(int stream) { wait_on_host(record(stream)); }

// Host waits by what waited. Another thread than the main one may ask to wait: such waits of it are not counted.
inline std::map<std::string, int64_t>& host_waits() {
  static auto* waits = new std::map<std::string, int64_t>;
  return *waits;
}

inline std::atomic<bool> waits_are_errors{false};

inline void count_asked_wait(const std::string& reason) {
  if (gettid() != getpid()) return;
  std::lock_guard<std::mutex> guard(ledger());
  ++host_waits()[reason];
}

// A wait that another request includes. An error shows who made it.
inline void count_hidden_wait(const std::string& reason) {
  if (waits_are_errors) throw std::runtime_error("the host waits for the late device: " + reason);
  std::lock_guard<std::mutex> guard(ledger());
  ++host_waits()[reason];
}

// The calling host thread's device and streams.
inline thread_local int current_device = 0;
inline thread_local std::array<int, kDevices> current_streams = [] {
  std::array<int, kDevices> defaults{};
  for (int device = 0; device < kDevices; ++device) defaults[device] = device * kStreamsEach;
  return defaults;
}();

inline int current_stream() { return current_streams[current_device]; }

inline int new_stream(int device) {
  static std::array<std::atomic<int>, kDevices> made{};
  return device * kStreamsEach + 1 + made[device]++ % (kStreamsEach - 1);
}

}  // namespace late
