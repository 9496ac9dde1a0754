// The threads that compute operators. Each thread that calls operators has a team of helpers. The caller takes parts of the
// work as the helpers do, so it waits only for helpers that are computing.

#include <pthread.h>

#include <atomic>
#include <chrono>

#include "control_word.h"
#include "interface.h"

// glibc 2.34 gave these functions a new symbol version. Every glibc has the old one.
#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver pthread_create, pthread_create@GLIBC_2.2.5\n.symver pthread_join, pthread_join@GLIBC_2.2.5");
#elif defined(__GLIBC__) && defined(__aarch64__)
__asm__(".symver pthread_create, pthread_create@GLIBC_2.17\n.symver pthread_join, pthread_join@GLIBC_2.17");
#endif

namespace diskprefix {
namespace {

constexpr int64_t MAX_THREADS = 1024, PARTS_OF_THREAD = 4, PART_BITS = 16, PART_MASK = (1 << PART_BITS) - 1;

// Slightly longer than the usual gap between two operators. A thread that waits longer sleeps: then other processes get its
// CPU, and the kernel schedules it at once when it is woken.
constexpr auto SPIN = std::chrono::microseconds(35);

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <class Condition>
bool comes_soon(const Condition& is_met) {
  typedef std::chrono::steady_clock Clock;
  for (const auto end = Clock::now() + SPIN; Clock::now() < end;)
    for (int64_t i = 0; i < 16; ++i) {
      if (is_met()) return true;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      __asm__ volatile("yield");
#endif
    }
  return is_met();
}

// Threads that sleep until a condition is met. A thread that meets it changes the condition first, and then wakes them.
class Sleepers {
 public:
  template <class Condition>
  void sleep_until(const Condition& is_met) {
    pthread_mutex_lock(&mutex_);
    ++count_;
    while (!is_met()) pthread_cond_wait(&woken_, &mutex_);
    --count_;
    pthread_mutex_unlock(&mutex_);
  }

  int64_t count() const { return count_; }

  void wake(int64_t count) {
    if (count <= 0) return;
    // A thread that has not seen the change is asleep once this thread has the lock.
    pthread_mutex_lock(&mutex_);
    pthread_mutex_unlock(&mutex_);
    while (count-- > 0) pthread_cond_signal(&woken_);
  }

 private:
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t woken_ = PTHREAD_COND_INITIALIZER;
  std::atomic<int64_t> count_{0};
};

class Team {
 public:
  ~Team() {
    ends_ = true;
    idle_.wake(num_helpers_);
    for (int64_t i = 0; i < num_helpers_; ++i) pthread_join(helpers_[i], nullptr);
  }

  void compute(int64_t num_threads, int64_t num_parts, int64_t count, Work work, void* context) {
    // If the system creates no more threads, fewer compute.
    while (num_helpers_ < num_threads - 1 && !pthread_create(&helpers_[num_helpers_], nullptr, help, this)) ++num_helpers_;
    num_parts_ = num_parts, count_ = count, work_ = work, context_ = context, num_done_ = 0;
    open_ = (++job_ << PART_BITS) + num_parts;
    const int64_t asleep = idle_.count(), awake = num_helpers_ - asleep;
    idle_.wake(least(asleep, num_parts - 1 - awake));
    take_parts();
    const auto is_done = [=] { return num_done_ == num_parts; };
    if (!comes_soon(is_done)) waiting_.sleep_until(is_done);
  }

 private:
  pthread_t helpers_[MAX_THREADS];
  int64_t num_helpers_ = 0, job_ = 0, num_parts_ = 0, count_ = 0;
  Work work_ = nullptr;
  void* context_ = nullptr;
  // The number of the job; its last bits count the parts not taken yet. A thread that takes a part belongs to this job: the
  // next job begins only when all parts are done.
  alignas(64) std::atomic<int64_t> open_{0};
  alignas(64) std::atomic<int64_t> num_done_{0};
  std::atomic<bool> ends_{false};
  Sleepers idle_, waiting_;

  static void* help(void* team) {
    Team& self = *(Team*)team;
    const UsualRounding usual;
    const auto is_needed = [&] { return self.open_ & PART_MASK || self.ends_; };
    while (!self.ends_) {
      if (!comes_soon(is_needed)) self.idle_.sleep_until(is_needed);
      self.take_parts();
    }
    return nullptr;
  }

  void take_parts() {
    for (int64_t open = open_; open & PART_MASK;) {
      if (!open_.compare_exchange_weak(open, open - 1)) continue;
      const int64_t num_parts = num_parts_, part = num_parts - (open & PART_MASK);
      work_(count_ * part / num_parts, count_ * (part + 1) / num_parts, context_);
      if (++num_done_ == num_parts) waiting_.wake(waiting_.count());
      open = open_;
    }
  }
};

// A forked process has none of its parent's threads.
int64_t num_forks = 0;
[[maybe_unused]] const int counts_forks = pthread_atfork(nullptr, nullptr, [] { ++num_forks; });

struct OwnTeam {
  Team* team = nullptr;
  int64_t fork = 0;

  ~OwnTeam() {
    if (fork == num_forks) delete team;
  }
};

}  // namespace

void share(int64_t num_threads, int64_t count, int64_t grain, Work work, void* context) {
  static thread_local OwnTeam own;
  if (!own.team || own.fork != num_forks) own.team = new Team, own.fork = num_forks;
  num_threads = least(num_threads, MAX_THREADS);
  own.team->compute(num_threads, least(PARTS_OF_THREAD * num_threads, (count + grain - 1) / grain), count, work, context);
}

}  // namespace diskprefix
