#include "cores.h"

#include <chrono>

namespace zero_inference::cpu {

namespace {

constexpr auto kNap = std::chrono::microseconds(50);

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Of a loop that waits: the core is held for a while, then the thread naps again and again.
class Spin {
 public:
  explicit Spin(int64_t spin_us) : until_(now_ns() + spin_us * 1000) {}
  void wait() {
    pause_core();
    if (++spins_ % 64 == 0 && now_ns() >= until_) std::this_thread::sleep_for(kNap);
  }

 private:
  const int64_t until_;
  int spins_ = 0;
};

}  // namespace

class Cores::OnPool : public Pool::Work {
 public:
  OnPool(Task& task, const Call& call) : task_(task), call_(call) {}
  void run(Pool& pool, int thread) override { task_.run(call_, pool, thread); }

 private:
  Task& task_;
  const Call& call_;
};

// The first thread waits for the input of a call; all ask for what they will read first.
class Cores::Waiting : public Pool::Work {
 public:
  Waiting(Cores& cores, uint32_t number, Task& task) : cores_(cores), number_(number), task_(task) {}
  bool arrived() const { return arrived_; }

  void run(Pool&, int thread) override {
    if (thread == 0) {
      arrived_ = cores_.wait_for(number_, [&] { task_.read_ahead(0); });
      over_.store(true, std::memory_order_release);
      return;
    }
    Spin spin(cores_.spin_us_);
    while (!over_.load(std::memory_order_acquire)) {
      if (!task_.read_ahead(thread)) spin.wait();
    }
  }

 private:
  Cores& cores_;
  const uint32_t number_;
  Task& task_;
  bool arrived_ = false;
  std::atomic<bool> over_{false};
};

Cores::Cores(const std::vector<int>& cpus, int64_t spin_us, Flag* flags, int64_t ranks)
    : pool_(cpus, spin_us), spin_us_(spin_us), flags_(flags), ranks_(ranks) {
  if (flags_ == nullptr) return;
  for (int64_t flag = 0; flag < kArrived + ranks_; ++flag) flags_[flag].number.store(0);
  leader_ = std::thread([this] { lead(); });
}

Cores::~Cores() {
  if (!leader_.joinable()) return;
  flags_[kStop].number.store(1);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ends_.store(true);
  }
  woken_.notify_all();
  leader_.join();
}

int64_t Cores::add(std::unique_ptr<Task> task) {
  const std::lock_guard<std::mutex> lock(tasks_mutex_);
  tasks_.push_back(std::move(task));
  return static_cast<int64_t>(tasks_.size()) - 1;
}

void Cores::reserve(const Call& call) {
  while (leader_.joinable() && flags_[kDone].number.load() != last_.load()) std::this_thread::sleep_for(kNap);
  tasks_[call.task]->reserve(call, pool_, workspace_);
}

void Cores::run(const Call& call) { execute(call, task_of(call)); }

void Cores::submit(const Call& call, uint32_t number) {
  const uint64_t place = submitted_.load();
  while (place - taken_.load() >= kPlaces) std::this_thread::sleep_for(kNap);
  queue_[place % kPlaces] = {call, number};
  last_.store(number);
  submitted_.store(place + 1);
  if (sleeps_.load()) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
    }
    woken_.notify_one();
  }
}

Statistics Cores::statistics() const { return {calls_.load(), busy_ns_.load(), late_ns_.load(), chosen_bytes_.load()}; }

void Cores::lead() {
  pool_.pin(0);
  Submitted submitted;
  while (next(submitted)) {
    const int64_t asked = now_ns();
    Task& task = task_of(submitted.call);
    if (!arrived(submitted.number, task)) return;
    late_ns_.fetch_add(now_ns() - asked);
    execute(submitted.call, task);
    flags_[kDone].number.store(submitted.number, std::memory_order_release);
  }
}

// False when this ends.
bool Cores::next(Submitted& submitted) {
  const uint64_t place = taken_.load();
  const int64_t until = now_ns() + spin_us_ * 1000;
  for (int spins = 1; submitted_.load(std::memory_order_acquire) == place; ++spins) {
    if (ends_.load()) return false;
    pause_core();
    if (spins % 64 == 0 && now_ns() >= until) {
      std::unique_lock<std::mutex> lock(mutex_);
      sleeps_.store(true);
      woken_.wait(lock, [&] { return ends_.load() || submitted_.load() != place; });
      sleeps_.store(false);
    }
  }
  submitted = queue_[place % kPlaces];
  taken_.store(place + 1);
  return true;
}

Task& Cores::task_of(const Call& call) {
  const std::lock_guard<std::mutex> lock(tasks_mutex_);
  return *tasks_[call.task];
}

// Waits for the input of a call, of all ranks; false when this ends first.
bool Cores::arrived(uint32_t number, Task& task) {
  if (!task.read_ahead(0)) {
    return wait_for(number, [] {});
  }
  Waiting waiting(*this, number, task);
  pool_.run(waiting);
  return waiting.arrived();
}

// Calls `meanwhile` again and again. The numbers may pass the end of 32 bits.
template <typename Meanwhile>
bool Cores::wait_for(uint32_t number, const Meanwhile& meanwhile) {
  Spin spin(spin_us_);
  int64_t rank = 0;
  while (rank < ranks_) {
    if (static_cast<int32_t>(flags_[kArrived + rank].number.load(std::memory_order_acquire) - number) >= 0) {
      ++rank;
      continue;
    }
    if (ends_.load(std::memory_order_relaxed)) return false;
    meanwhile();
    spin.wait();
  }
  return true;
}

void Cores::execute(const Call& call, Task& task) {
  const int64_t start = now_ns();
  task.prepare(call, pool_, workspace_);
  OnPool work(task, call);
  pool_.run(work);
  busy_ns_.fetch_add(now_ns() - start);
  chosen_bytes_.fetch_add(task.chosen_bytes());
  calls_.fetch_add(1);
}

}  // namespace zero_inference::cpu
