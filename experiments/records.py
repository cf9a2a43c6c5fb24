"""The run directory: `config.json`, and `cases.jsonl`, one durable line a measurement.

A line is appended, flushed and synced before the next measurement starts. A line that a killed
process left torn is cut off, and its measurement done again. Of several processes that share a run each
appends to a file of its own, `cases-1.jsonl` and so on; together they are what `cases.jsonl` is when all
are done and process 0 has merged them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from jaxkv.errors import ConfigError, FormatError

try:
    import fcntl
except ImportError:  # not a Unix: two runs in one directory are then up to the user
    fcntl = None  # type: ignore[assignment]

NOISE = "noise_floor"  # stands where a policy's name stands in a record
Record = dict[str, Any]
Key = tuple[str, str]  # case id and policy


def _are_keys(value: Any) -> bool:
    """Whether `value` is a list of (case, policy) names."""
    return isinstance(value, list) and all(
        isinstance(key, list) and len(key) == 2 and all(isinstance(name, str) for name in key)
        for key in value
    )


class RunDirectory:
    """An open run directory; a context manager that keeps other runs out.

    Args:
      path: the directory.
      process, processes: which of the run's processes this one is, and how many there are.
    """

    def __init__(self, path: Path, process: int = 0, processes: int = 1) -> None:
        self.path = path
        self.cases_path = path / (f"cases-{process}.jsonl" if process else "cases.jsonl")
        self.config_path = path / "config.json"
        self._process, self._processes = process, processes
        self._lock: Any = None

    def __enter__(self) -> RunDirectory:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(f"workdir '{self.path}' is a file, expected a directory") from error
        except PermissionError as error:
            raise ConfigError(f"workdir '{self.path}' can't be made: no permission") from error
        self._lock = self._take_lock(self._process)
        try:
            self._refuse_others()
            self._cut_torn_line()
        except BaseException:
            self._lock.close()
            raise
        return self

    def _refuse_others(self) -> None:
        """Refuses a directory in which a process of an earlier run, of more processes, is still at work."""
        for lock in () if self._process else self.path.glob(".lock-*"):
            number = int(lock.name.partition("-")[2])
            if number >= self._processes:
                self._take_lock(number).close()
                lock.unlink(missing_ok=True)

    def _take_lock(self, process: int) -> Any:
        lock = (self.path / (f".lock-{process}" if process else ".lock")).open("w")
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                lock.close()
                raise ConfigError(
                    f"workdir '{self.path}' is in use by another run, expected one at a time"
                ) from error
        return lock

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.close()  # the lock goes with it, after a kill too

    def read_config(self) -> dict[str, Any] | None:
        """`config.json`, or None in a new directory."""
        try:
            text = self.config_path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            if (self.path / "cases.jsonl").exists() or self._parts():
                raise ConfigError(
                    f"workdir '{self.path}' holds cases.jsonl without config.json, expected both"
                ) from None
            return None
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise FormatError(f"'{self.config_path}' is not JSON at line {error.lineno}") from error
        if (
            not isinstance(data, dict)
            or not isinstance(data.get("config"), dict)
            or not _are_keys(data.get("measurements", []))
        ):
            raise FormatError(f"'{self.config_path}' is not the config.json of a run")
        return data

    def write_config(self, data: dict[str, Any]) -> None:
        """Writes `config.json` in one step."""
        self.write("config.json", json.dumps(data, indent=2, allow_nan=False) + "\n")

    def write(self, name: str, text: str) -> None:
        """Writes a text file in one step: aside first, then renamed."""
        aside = self.path / f".{name}.tmp"
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self.path / name)

    def append(self, record: Record) -> None:
        """Appends one line and waits until it is on disk."""
        line = json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"
        with self.cases_path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def records(self) -> list[Record]:
        """All measurements, in the order of their first line; of two lines the later one counts."""
        latest: dict[Key, Record] = {}
        for record in self._lines():
            latest[record["case"], record["policy"]] = record
        return list(latest.values())

    def finished(self) -> set[Key]:
        """Measurements that need not be done again. Failed ones are not among them."""
        return {(r["case"], r["policy"]) for r in self.records() if r["status"] == "ok"}

    def merge(self, order: list[Key]) -> None:
        """Puts the lines of all processes into `cases.jsonl`, in the order in which one would write them."""
        if not self._parts():
            return
        place = {key: number for number, key in enumerate(order)}
        records = sorted(self.records(), key=lambda r: place.get((r["case"], r["policy"]), len(place)))
        lines = [json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n" for record in records]
        self.write("cases.jsonl", "".join(lines))
        for part in self._parts():
            part.unlink()

    def _parts(self) -> list[Path]:
        """Files of the other processes, of this run or of one that was broken off."""
        return sorted(self.path.glob("cases-*.jsonl"))

    def _lines(self) -> Iterator[Record]:
        for path in [self.path / "cases.jsonl", *self._parts()]:
            yield from self._lines_of(path)

    def _lines_of(self, path: Path) -> Iterator[Record]:
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if path != self.cases_path and not line.endswith(b"\n"):
                    return  # torn, or another process is about to end it
                try:
                    record = json.loads(line)
                    known = all(isinstance(record[key], str) for key in ("case", "policy", "status"))
                except (ValueError, TypeError, KeyError):
                    known = False
                if not known:
                    raise FormatError(f"'{path}' line {number} is not a measurement")
                yield record

    def _cut_torn_line(self) -> None:
        with contextlib.suppress(FileNotFoundError), self.cases_path.open("r+b") as file:
            data = file.read()
            whole = data.rfind(b"\n") + 1
            if whole < len(data):
                file.truncate(whole)
                os.fsync(file.fileno())


_FIGURES = ("divergence", "kl_tokens", "edit", "position", "distance")
_POLICY_FIGURES = ("kind", "reuse", "flops", "ledger", "timings_ms", "layers", "greedy")


def require_complete(records: Sequence[Record], path: Path) -> None:
    """Raises FormatError for the first "ok" record of a divergence run that lacks one of its figures."""
    for record in records:
        if record["status"] != "ok":
            continue
        policy = record["policy"]
        names = _FIGURES if policy == NOISE else (*_FIGURES, *_POLICY_FIGURES)
        missing = next((name for name in names if name not in record), None)
        if missing is None and not isinstance(record["divergence"], dict):
            missing = "divergence"
        if missing is not None:
            raise FormatError(
                f"'{path}' holds case '{record['case']}' under {policy} as ok without '{missing}', expected "
                "all figures of a finished measurement: remove the line to measure it again"
            )


def refuse_changes(workdir: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raises ConfigError, naming the first key in which a run directory differs from this run."""
    for key in [*wanted, *(k for k in found if k not in wanted)]:
        if found.get(key) != wanted.get(key):
            raise ConfigError(
                f"workdir '{workdir}' holds a run with {key}={_show(found.get(key))}, this run has "
                f"{_show(wanted.get(key))}: choose another --workdir or repeat the old command"
            )


def _show(value: Any) -> str:
    return ",".join(str(x) for x in value) if isinstance(value, list) else str(value)
