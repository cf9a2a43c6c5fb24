"""Several processes of one run, on one machine or on many, through `jax.distributed`.

    processes.join("10.0.0.1:1234", num_processes=2, process_id=0)   # before anything else of JAX
    mesh = jaxkv.parse_mesh("model:8")                                # over the devices of all of them

Every process runs the same program. Arrays on a mesh of all processes are computed by all of them together;
what is not computed together, such as cases of an evaluation, is dealt out by `Place`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
from jax.experimental import multihost_utils

from jaxkv.errors import ConfigError, ProcessError

JOIN_SECONDS = 60  # how long the first process waits for the last
HEARTBEAT_SECONDS = 10  # a process that is silent for longer is dead
LEAVE_SECONDS = 10  # how long one that ends waits for the others to end


@dataclasses.dataclass(frozen=True)
class Place:
    """Which of how many processes this one is."""

    index: int = 0
    count: int = 1

    def owns(self, case: int) -> bool:
        """Whether the case with this number is this process's: they are dealt out in turn."""
        return case % self.count == self.index

    def __str__(self) -> str:
        return f"process {self.index} of {self.count}"


def join(
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    *,
    join_seconds: int = JOIN_SECONDS,
    heartbeat_seconds: int = HEARTBEAT_SECONDS,
) -> Place:
    """Joins the run; with no argument given, this process is alone.

    Args:
      coordinator: "host:port" of process 0, reachable by all.
      num_processes: how many processes the run has.
      process_id: which of them this one is, from 0.
      join_seconds: fails if by then not all processes are there.
      heartbeat_seconds: after this time without a sign of life a process counts as dead.

    Raises:
      ConfigError: an argument is missing or out of range.
      ProcessError: the others are not there.
    """
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return Place()
    if coordinator is None or num_processes is None or process_id is None:
        raise ConfigError(f"{missing[0]} is missing, expected {', '.join(given)} together or none of them")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"coordinator is '{coordinator}', expected host:port of process 0")
    if num_processes < 1:
        raise ConfigError(f"num_processes is {num_processes}, expected at least 1")
    if not 0 <= process_id < num_processes:
        raise ConfigError(f"process_id is {process_id}, expected 0 to {num_processes - 1}")
    # Without it JAX aborts the survivors of a dead process in the middle of whatever they do; with it they
    # learn of it where they wait for each other, and end in order.
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            initialization_timeout=join_seconds,
            heartbeat_timeout_seconds=heartbeat_seconds,
            shutdown_timeout_seconds=LEAVE_SECONDS,
        )
    except Exception as error:  # of the RPC library, by its kind of failure
        reason = " ".join(str(error).split())[:200]
        raise ProcessError(
            f"process {process_id} could not join the {num_processes} processes at {coordinator} within "
            f"{join_seconds} s ({reason})"
        ) from error
    return Place(process_id, num_processes)


def here() -> Place:
    """This process's place in the run that it joined."""
    return Place(jax.process_index(), jax.process_count())


def wait_for_all(what: str) -> None:
    """Waits until every process has come here, however long they work, but for no dead one.

    Args:
      what: what they were doing, for the message.

    Raises:
      ProcessError: a process ended before it came here; found out within the heartbeat's time.
    """
    place = here()
    if place.count == 1:
        return
    everyone: list[Any] = jax.devices()
    try:
        with multihost_utils.live_devices(everyone) as live:
            missing = _processes(everyone) - _processes(live)
    except multihost_utils.ProcessFailureError as error:
        missing = _processes(error.failed_devices)
    except Exception as error:  # process 0 holds the list of who is alive
        reason = " ".join(str(error).split())[:200]
        raise ProcessError(
            f"{place} can't reach the coordinator, process 0, while {what} ({reason}): expected it to run"
        ) from error
    if missing:
        names = ", ".join(str(index) for index in sorted(missing))
        raise ProcessError(f"of {place.count} processes, {names} ended while {what}, expected all to run")


def leave() -> None:
    """Ends this process's part, process 0 after all others: it holds the list of who is alive."""
    if not jax.distributed.is_initialized():
        return
    if not here().index:
        # They come here no more: this returns when all have left or are dead.
        with contextlib.suppress(Exception), multihost_utils.live_devices(jax.devices()):
            pass
    with contextlib.suppress(Exception):  # one that is dead can't be told
        jax.distributed.shutdown()


def _processes(devices: Any) -> set[int]:
    return {device.process_index for device in devices}
