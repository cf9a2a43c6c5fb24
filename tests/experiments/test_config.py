"""Configs: every wrong value is refused by name, every accepted spelling means the same."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import ml_collections
import pytest

from experiments.config import QUICK, SMOKE, defaults, resolve
from experiments.registry import KEY, find, peek
from experiments.workloads.case import position_label
from jaxkv.errors import ConfigError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").rglob("[a-z]*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_resolves_documents_itself_and_offers_every_key(path: Path) -> None:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config()
    experiment = find(config)
    assert set(config.keys()) - {KEY} == set(experiment.known_keys) - {KEY}
    assert experiment.resolve(config).name == path.stem
    # `--config.key=` reads an attribute: a method of that name would hide the key.
    assert not [key for key in config if hasattr(ml_collections.ConfigDict, key)]
    for word in ("python -m experiments.launch", "Runtime", "Expected"):
        assert word in module.__doc__
    if "smoke" in config:
        config.smoke = True
        assert experiment.resolve(config).model == SMOKE["model"]


def test_an_unknown_experiment_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"experiment is 'prefix_tace'.*did you mean 'prefix_trace'"):
        find({"experiment": "prefix_tace"})


@pytest.mark.parametrize("form", [["--config={}"], ["--config", "{}"], ["-config={}"]])
def test_the_experiment_is_known_before_flags_are_parsed(form: list[str]) -> None:
    keys = {}
    for name in ("quickstart", "prefix_trace", "edit_cost"):
        path = str(CONFIGS[0].parent / f"{name}.py")
        keys[name] = peek(["launch", *(part.format(path) for part in form), "--config.seed=1"]).known_keys
    assert "policies" in keys["quickstart"]
    assert "tenants" in keys["prefix_trace"]
    assert "prices" in keys["edit_cost"]
    assert peek(["launch", "--config=no/such.py"]).known_keys == keys["quickstart"]


@pytest.mark.parametrize(
    "policies",
    [
        ("exact", "scr", "first_k(32)"),
        ("scr,first_k",),
        "scr, first_k(32)",
        ["exact", "scr,first_k(32)"],
    ],
)
def test_policies_have_many_spellings_and_one_meaning(policies: object) -> None:
    config = resolve({"policies": policies})
    assert config.policies == ("exact", "scr", "first_k(32)")


def test_commas_inside_a_policy_do_not_split_it() -> None:
    config = resolve({"policies": "scr(form=copy,max_spans=2)|first_k(4),sinks"})
    assert config.policies == ("exact", "scr(form=copy,max_spans=2)|first_k(4)", "sinks(4)")


def test_exact_always_runs_first_because_costs_are_relative_to_it() -> None:
    assert resolve({"policies": ("scr", "exact")}).policies == ("exact", "scr")


def test_numbers_are_read_from_text_too() -> None:
    config = resolve({"context": "512,1024", "positions": ("head", "25%", 0.5), "sizes": 16})
    assert config.context == (512, 1024)
    assert config.positions == (0.0, 0.25, 0.5)
    assert config.sizes == (16,)
    assert [position_label(p) for p in config.positions] == ["head", "25%", "50%"]


def test_smoke_replaces_what_the_user_did_not_set() -> None:
    values = defaults(smoke=True, context=(700,), model="m")
    assert resolve(values).context == SMOKE["context"]
    kept = resolve(values, given=("context", "model"))
    assert (kept.context, kept.model) == ((700,), "m")
    assert kept.sizes == SMOKE["sizes"]


def test_quick_replaces_too_and_smoke_beats_it() -> None:
    values = defaults(quick=True, sizes=(7,), policies="scr,budget(0.1)")
    assert resolve(values, given=("sizes",)).sizes == (7,)
    assert resolve(values).sizes == QUICK["sizes"]
    assert resolve(values).policies[-1] == "budget(0.1)"
    both = resolve({**values, "smoke": True})
    assert both.context == SMOKE["context"]
    assert both.policies == ("exact", "scr"), "random weights have no calibration"


def test_digest_depends_on_every_value() -> None:
    assert resolve({}).digest == resolve(defaults()).digest
    assert resolve({"seed": 1}).digest != resolve({}).digest


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"polices": "scr"}, "config key 'polices' is unknown; did you mean 'policies'?"),
        ({"zzz": 1}, "config key 'zzz' is unknown"),
        ({"edits": "delet"}, "config.edits holds 'delet', expected one of append"),
        ({"edits": "delet"}, "did you mean 'delete'?"),
        ({"workload": "edit"}, "config.workload holds 'edit'"),
        ({"implementation": "pallas"}, "config.implementation holds 'pallas', expected one of auto, xla,"),
        ({"dtype": "f32"}, "config.dtype holds 'f32', expected one of float32, bfloat16"),
        ({"policies": "scrr"}, "policy 'scrr' is unknown"),
        ({"policies": ()}, None),  # exact is there all the same
        ({"context": "many"}, "config.context holds 'many', expected a whole number"),
        ({"context": 0}, "config.context is 0, expected at least 2"),
        ({"context": ()}, "config.context is empty"),
        ({"context": (512, 512)}, "config.context is 512,512, expected each value once"),
        ({"sizes": (0,)}, "config.sizes is 0, expected at least 1"),
        ({"sizes": 1.5}, "config.sizes holds 1.5, expected a whole number"),
        ({"positions": 1.5}, "config.positions holds 1.5, expected shares from 0 to 1"),
        ({"positions": "middle"}, "config.positions holds 'middle', expected a number"),
        ({"seed": True}, "config.seed holds True, expected a whole number"),
        ({"smoke": "yes"}, "config.smoke holds 'yes', expected True or False"),
        ({"corpus": ""}, "config.corpus is empty, expected text"),
        ({"corpus": 3}, "config.corpus holds 3, expected text"),
        ({"name": "a/b"}, "config.name is 'a/b', expected a plain file name"),
        ({"noise_offset": 512}, "config.noise_offset is 512, expected no multiple of chunk_size"),
    ],
)
def test_bad_values_are_refused_by_name(values: dict, message: str | None) -> None:
    """CASE 42."""
    if message is None:
        assert resolve(values).policies == ("exact",)
        return
    with pytest.raises(ConfigError) as error:
        resolve(values)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
