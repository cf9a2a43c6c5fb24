"""Time for the serving loop, as a value that can be replaced: seconds from an arbitrary zero."""

from __future__ import annotations

import time
from typing import Protocol, runtime_checkable

from jaxkv.errors import ConfigError


@runtime_checkable
class Clock(Protocol):
    """What the loop asks of time."""

    def now(self) -> float:
        """Seconds; never goes back."""

    def wait_until(self, moment: float) -> None:
        """Returns when `now()` is at least `moment`."""


class WallClock:
    """Real time from the moment it was made.

    Args:
      skip_idle: jump to the next arrival instead of sleeping. Everything measured while there is work
        stays real; a trace with long gaps needs no more time than its work.
    """

    def __init__(self, *, skip_idle: bool = False) -> None:
        self._zero = time.perf_counter()
        self._skip_idle = skip_idle

    def now(self) -> float:
        """Seconds since the clock was made, skipped ones included."""
        return time.perf_counter() - self._zero

    def wait_until(self, moment: float) -> None:
        """Sleeps, or jumps, until `moment`."""
        ahead = moment - self.now()
        if ahead <= 0:
            return
        if self._skip_idle:
            self._zero -= ahead
        else:
            time.sleep(ahead)


class ManualClock:
    """Time that passes only when it is told to: for tests and simulations."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = float(start)

    def now(self) -> float:
        """Seconds, as last set."""
        return self._now

    def wait_until(self, moment: float) -> None:
        """Sets the time to `moment` if that is later."""
        self._now = max(self._now, moment)

    def advance(self, seconds: float) -> None:
        """Lets time pass.

        Raises:
          ConfigError: a negative number of seconds.
        """
        if seconds < 0:
            raise ConfigError(f"seconds is {seconds}, expected 0 or more")
        self._now += seconds
