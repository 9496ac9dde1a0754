"""The scheduler of a simulated history: one task runs at a time, and a seed decides which one runs next.

A task is a greenlet in the place of a thread. Another one may run where a thread may lose the processor: at a lock, a
condition, a queue, a wait. The clock is virtual. It moves a little at each of these points, and jumps to the next timer
when all tasks wait.
"""

from __future__ import annotations

import heapq
import random
import sys
import traceback
from collections.abc import Callable
from itertools import count
from types import FrameType

from greenlet import GreenletExit, getcurrent, greenlet

_POINT_S = 1e-6
BEGINNING_S = 1e9
"""The time since the epoch at which each history begins."""


class Killed(GreenletExit):  # type: ignore[misc]
    """Ends the tasks of a process that is killed."""


class Stuck(Exception):
    """All tasks wait, and no timer will wake one."""


class Task:
    """A thread of a simulated process."""

    def __init__(self, name: str, process: object, work: Callable[[], object]) -> None:
        self.name, self.process, self.work = name, process, work
        self.is_killed = self.is_waiting = self.timed_out = False
        self.num_waits = 0
        """So that a timer knows the wait that it belongs to."""
        self.joining: list[Task] = []
        self.error = ""
        self.greenlet = greenlet(self._run)

    def _run(self) -> None:
        try:
            self.work()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 (it would end the history)
            self.error = f"{self.name} ended with {error!r}\n{traceback.format_exc()}"

    def where(self) -> str:
        """Returns the lines at which the task stands, the innermost first."""
        return lines_of(self.greenlet.gr_frame)


class TaskScheduler:
    """Runs the tasks of one history. `switches` is how often a point leads to another task, between 0 and 1."""

    def __init__(self, seed: int, switches: float, trace: Callable[[str], None] | None = None) -> None:
        self.random = random.Random(seed)
        self.now = BEGINNING_S
        self.current: Task | None = None
        self.tasks: list[Task] = []
        self.num_switches = 0
        self.errors: list[str] = []
        """What tasks died of, and what did not hold."""
        self.at_jumps: Callable[[], None] = lambda: None
        """Called before the clock jumps, when all tasks wait. It must take no lock."""
        self._switches, self._trace = switches, trace
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Task, int]] = []
        self._numbers = count()
        self._main = getcurrent()

    def set_switches(self, switches: float) -> None:
        self._switches = switches

    def say(self, text: str) -> None:
        """Adds a line to the trace."""
        if self._trace is not None:
            name = self.current.name if self.current else "-"
            self._trace(f"{self.now - BEGINNING_S:12.6f} {name:16} {text}")

    def number(self) -> int:
        """Returns the next of the numbers that the things of a history have."""
        return next(self._numbers)

    def spawn(self, name: str, process: object, work: Callable[[], object]) -> Task:
        """Adds a task, which may run from the next point on."""
        task = Task(name, process, work)
        # What runs when it ends.
        task.greenlet.parent = self._main
        self.tasks.append(task)
        self._ready.append(task)
        return task

    def run(self, work: Callable[[], object]) -> None:
        """Runs `work` as the first task, and all others until it has ended. Raises `Stuck`."""
        first = self.spawn("driver", None, work)
        while first in self.tasks:
            task = self._next()
            self.current = task
            task.greenlet.switch()
            # Here is who ended, not who was chosen.
            self._bury()
        self.current = None

    def point(self) -> None:
        """Lets another task run, or not."""
        self.now += _POINT_S
        current = self.current
        if current is None or current.is_killed or self.random.random() >= self._switches:
            return
        self._ready.append(current)
        self._leave(current)

    def block(self, timeout_s: float | None = None) -> bool:
        """Waits until another task wakes this one. Returns False if the time runs out first."""
        current = self.current
        assert current is not None
        if current.is_killed:
            raise Killed
        current.num_waits += 1
        current.is_waiting = True
        if timeout_s is not None:
            timer = (self.now + max(0.0, timeout_s), next(self._numbers), current, current.num_waits)
            heapq.heappush(self._timers, timer)
        self._leave(current)
        timed_out, current.timed_out = current.timed_out, False
        return not timed_out

    def wake(self, task: Task) -> None:
        """Ends the wait of a task. Does nothing if it does not wait."""
        if task.is_waiting:
            task.is_waiting = False
            self._ready.append(task)

    def sleep(self, seconds: float) -> None:
        self.block(seconds)

    def join(self, task: Task, timeout_s: float | None = None) -> bool:
        """Waits until a task has ended. Returns False if the time runs out first."""
        self.point()
        if task not in self.tasks:
            return True
        assert self.current is not None
        task.joining.append(self.current)
        has_ended = self.block(timeout_s)
        if not has_ended:
            task.joining.remove(self.current)
        return has_ended

    def kill(self, process: object) -> None:
        """Ends all tasks of a process, wherever they stand. The caller is none of them."""
        killer = self.current
        for task in [task for task in self.tasks if task.process is process]:
            task.is_killed, task.is_waiting = True, False
            if task in self._ready:
                self._ready.remove(task)
            self.current = task
            while not task.greenlet.dead:
                task.greenlet.parent = getcurrent()
                task.greenlet.throw(Killed)
            self._bury()
        self.current = killer

    def _bury(self) -> None:
        ended = self.current
        assert ended is not None
        self.tasks.remove(ended)
        if ended.error and not ended.is_killed:
            self.errors.append(ended.error)
        for task in ended.joining:
            self.wake(task)

    def _leave(self, leaving: Task) -> None:
        """Runs a task that is ready. Returns when `leaving` runs again."""
        task = self._next()
        if task is leaving:
            return
        self.num_switches += 1
        if self._trace is not None:
            self.say(f"stops at {lines_of(sys._getframe(2), 2)}")
        self.current = task
        task.greenlet.switch()
        if leaving.is_killed:
            raise Killed

    def _next(self) -> Task:
        while not self._ready:
            if not self._timers:
                # Raised by `run`, whoever waits last.
                self._main.throw(Stuck("all tasks wait for ever\n" + self.standing()))
            self.at_jumps()
            self.now = max(self.now, self._timers[0][0])
            self._wake_due()
        if self._timers and self._timers[0][0] <= self.now:
            self._wake_due()
        return self._ready.pop(int(self.random.random() * len(self._ready)))

    def standing(self) -> str:
        """Returns where each task stands."""
        return "\n".join(f"  {task.name}: {task.where()}" for task in self.tasks)

    def _wake_due(self) -> None:
        while self._timers and self._timers[0][0] <= self.now:
            _, _, task, number = heapq.heappop(self._timers)
            if task.is_waiting and task.num_waits == number:
                task.timed_out = True
                self.wake(task)


def lines_of(frame: FrameType | None, most: int = 6) -> str:
    """Returns the innermost lines of the package that a frame is in."""
    found: list[str] = []
    while frame is not None and len(found) < most:
        file = frame.f_code.co_filename
        if frame.f_code is Task._run.__code__:
            break
        if "/diskprefix/" in file and "/tests/" not in file:
            found.append(f"{file.rpartition('/diskprefix/')[2]}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(found) or "-"
