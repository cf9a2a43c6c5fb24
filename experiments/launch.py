"""Runs one experiment:

python -m experiments.launch --config=configs/quickstart.py
python -m experiments.launch --config=configs/quickstart.py --config.context=4096 --workdir=runs/a

Parses flags and runs the experiment that the config names, see `experiments.registry`. Exit codes:
0 done, 1 failed, 2 bad flags, 130 interrupted (the same command resumes).

Several processes share a run of the default experiment: each is given the same command and workdir, and

    --coordinator=host:port --num_processes=2 --process_id=0    # and 1
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

from jaxkv.errors import ConfigError, JaxkvError

_CONFIG = config_flags.DEFINE_config_file("config", help_string="Experiment, a file of configs/.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Run directory; runs/<config name>-<digest> if not given.")
_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "Of a run of several processes: host:port of process 0."
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many processes the run has.")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Which of them this one is, from 0.")
_OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]+)")


def main(_: Sequence[str]) -> int:
    """Runs the experiment that the parsed flags name; returns the exit code."""
    logging.set_verbosity(logging.WARNING)  # JAX and matplotlib tell how they start
    from experiments import registry
    from jaxkv import processes
    from jaxkv.io.compilation import enable_compilation_cache

    try:
        place = processes.join(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
        try:
            enable_compilation_cache()
        except OSError as error:  # slower, not wrong
            print(f"warning: compiled steps are not kept: {error}", file=sys.stderr)
        given = config_flags.get_override_values(flags.FLAGS["config"])
        experiment = registry.find(_CONFIG.value)
        experiment.require_place(place)
        result = experiment.run(_CONFIG.value, _WORKDIR.value, given=tuple(given))
    except KeyboardInterrupt:
        return 130
    except JaxkvError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except OSError as error:  # a full disk, a directory that can't be written
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        processes.leave()
    return 0 if result.finished and not result.failed else 1


def parse_flags(argv: list[str]) -> list[str]:
    """Parses flags; a bad one is one sentence on stderr and exit code 2."""
    from experiments import registry

    try:
        registry.peek(argv).check_keys([m[1] for arg in argv[1:] if (m := _OVERRIDE.match(arg))])
        rest = flags.FLAGS(argv)
        if len(rest) > 1:
            raise ConfigError(f"argument '{rest[1]}' is unexpected, expected --flags only")
        if _CONFIG.value is None:
            raise ConfigError("--config is missing, expected a file such as configs/quickstart.py")
        name = config_flags.get_config_filename(flags.FLAGS["config"])
        if not Path(name.partition(":")[0]).is_file():
            raise ConfigError(f"--config is '{name}', expected a file such as configs/quickstart.py")
        _CONFIG.value.keys()  # ml_collections tells of a fault in the file only when it is used
        return rest
    except Exception as error:  # a config file is code: anything may go wrong in it
        # Of a fault inside the config file, the first line says where and the last one what.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        text = " ".join(dict.fromkeys([lines[0], lines[-1]])) if lines else "no message"
        kind = "" if isinstance(error, flags.Error | JaxkvError) else f"{type(error).__name__}: "
        print(f"error: {kind}{text}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    try:
        app.run(main, flags_parser=parse_flags)
    except KeyboardInterrupt:  # before or after the run itself, which says how to resume
        sys.exit(130)
