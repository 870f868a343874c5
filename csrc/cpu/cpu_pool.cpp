#include "cpu_pool.h"

#include <chrono>

namespace zero_inference::cpu {

namespace {

constexpr auto kNap = std::chrono::microseconds(50);

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

CpuPool::CpuPool(const std::vector<int>& cpus, int64_t spin_us, Flag* flags, int64_t ranks)
    : pool_(cpus, spin_us), spin_us_(spin_us), flags_(flags), ranks_(ranks) {
  if (flags_ == nullptr) return;
  for (int64_t flag = 0; flag < kArrived + ranks_; ++flag) flags_[flag].number.store(0);
  leader_ = std::thread([this] { lead(); });
}

CpuPool::~CpuPool() {
  if (!leader_.joinable()) return;
  flags_[kStop].number.store(1);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ends_.store(true);
  }
  woken_.notify_all();
  leader_.join();
}

int64_t CpuPool::add(std::unique_ptr<Task> task) {
  const std::lock_guard<std::mutex> lock(tasks_mutex_);
  tasks_.push_back(std::move(task));
  return static_cast<int64_t>(tasks_.size()) - 1;
}

void CpuPool::reserve(const Call& call) {
  while (leader_.joinable() && flags_[kDone].number.load() != last_.load()) std::this_thread::sleep_for(kNap);
  task_of(call).reserve(call, pool_, workspace_);
}

void CpuPool::run(const Call& call) { execute(call, task_of(call), now_ns()); }

void CpuPool::submit(const Call& call, uint32_t number) {
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

Statistics CpuPool::statistics() const { return {calls_.load(), busy_ns_.load(), late_ns_.load(), chosen_bytes_.load()}; }

void CpuPool::lead() {
  pool_.pin(0);
  Submitted submitted;
  while (next(submitted)) {
    const int64_t taken_ns = now_ns();
    Task& task = task_of(submitted.call);
    const int64_t arrived_ns = wait_for_input(submitted.number, task);
    if (arrived_ns == 0) return;
    late_ns_.fetch_add(arrived_ns - taken_ns);
    execute(submitted.call, task, arrived_ns);
    flags_[kDone].number.store(submitted.number, std::memory_order_release);
  }
}

// False at the end.
bool CpuPool::next(Submitted& submitted) {
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

Task& CpuPool::task_of(const Call& call) {
  const std::lock_guard<std::mutex> lock(tasks_mutex_);
  return *tasks_[call.task];
}

// Numbers may wrap at 2^32.
bool CpuPool::all_arrived(uint32_t number) const {
  for (int64_t rank = 0; rank < ranks_; ++rank) {
    if (static_cast<int32_t>(flags_[kArrived + rank].number.load(std::memory_order_acquire) - number) < 0) return false;
  }
  return true;
}

// Reads weights of a call ahead until its input arrives or the cache is full. Returns the time of arrival; 0: not yet.
int64_t CpuPool::read_ahead(uint32_t number, Task& task) {
  int64_t arrived_ns = 0;
  std::atomic<bool> over{false};
  std::atomic<int> others{pool_.threads() - 1};  // that still prefetch
  pool_.run([&](int thread) {
    if (thread > 0) {
      while (!over.load(std::memory_order_acquire) && task.read_ahead(thread)) {
      }
      others.fetch_sub(1);
      return;
    }
    for (bool more = true; (more || others.load() > 0) && !ends_.load(std::memory_order_relaxed);) {
      if (all_arrived(number)) {
        arrived_ns = now_ns();
        break;
      }
      more = more && task.read_ahead(0);
      pause_core();
    }
    over.store(true, std::memory_order_release);
  });
  return arrived_ns;
}

// Returns the time of arrival; 0 at the end. A pool that does not spin does not read ahead.
int64_t CpuPool::wait_for_input(uint32_t number, Task& task) {
  if (all_arrived(number)) return now_ns();
  const int64_t until = now_ns() + spin_us_ * 1000;
  if (spin_us_ > 0 && task.read_ahead(0)) {
    const int64_t arrived_ns = read_ahead(number, task);
    if (arrived_ns != 0) return arrived_ns;
  }
  for (int spins = 1; !all_arrived(number); ++spins) {
    if (ends_.load(std::memory_order_relaxed)) return 0;
    pause_core();
    if (spins % 64 == 0 && now_ns() >= until) std::this_thread::sleep_for(kNap);
  }
  return now_ns();
}

void CpuPool::execute(const Call& call, Task& task, int64_t since_ns) {
  task.prepare(call, pool_, workspace_);
  pool_.run([&](int thread) { task.run(call, pool_, thread); });
  busy_ns_.fetch_add(now_ns() - since_ns);
  chosen_bytes_.fetch_add(task.chosen_bytes());
  calls_.fetch_add(1);
}

}  // namespace zero_inference::cpu
