"""Imports run downward only, and what is meant to be host code never loads jax by itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# From the bottom up. A module may import from its own floor and from those below it.
FLOORS = (
    ("typing", "errors"),
    ("model.config",),
    ("cache",),
    ("reuse",),
    ("model",),
    ("steps",),
    (
        "arrays",
        "checks",
        "parallel",
        "processes",
        "memory",
        "recurrent",
        "carry",
        "results",
        "schedule",
        "windows",
        "readback",
        "execute",
        "generation",
        "stats",
        "transfer",
        "tiering",
        "persistence",
        "probing",
        "signals",
        "trials",
        "healing",
        "io",
    ),
    ("serving",),
    ("core", "continuing", "caching", "batching", "revising", "warming"),
    ("engine",),
    ("replicas",),
    ("",),  # the package itself: the public names
)
# Plain NumPy beside everything: these may import only the lowest floor.
ASIDE = ("divergence", "summary")
# Device modules of the cache: everything else in cache and reuse is host code.
DEVICE = ("cache.pages", "cache.states")
HOST = ("cache", "reuse", "model.config", "typing", "errors", "divergence", "schedule")
JAX = ("jax", "jaxlib", "flax", "optax", "orbax")
ALLOWED_ON_HOST = {"cache.table": ("flax",)}  # NumPy tables in a pytree container


def modules(package: str = "jaxkv") -> dict[str, Path]:
    """Dotted name below the package -> file."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT / package).with_suffix("").parts
        found[".".join(p for p in parts if p != "__init__")] = path
    return found


def imported(path: Path, package: str) -> Iterator[str]:
    """Absolute names that a file imports, anywhere in it, but not for type checking only."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            base = node.module or ""
            yield base
            for alias in node.names:  # `from jaxkv.model import layers` is a module too
                if base.startswith(package):
                    yield f"{base}.{alias.name}"


def floor(name: str) -> int:
    matches = [
        (len(prefix), number)
        for number, prefixes in enumerate(FLOORS)
        for prefix in prefixes
        if name == prefix or (prefix and name.startswith(prefix + "."))
    ]
    assert matches, f"jaxkv.{name} stands on no floor: add it to FLOORS"
    return max(matches)[1]


def inside(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in prefixes)


@pytest.mark.parametrize("name", [m for m in modules() if not inside(m, ASIDE)])
def test_a_module_imports_only_from_its_floor_and_below(name: str) -> None:
    known = modules()
    for target in imported(known[name], "jaxkv"):
        if target.split(".")[0] != "jaxkv":
            continue
        other = target.removeprefix("jaxkv").removeprefix(".")
        if other not in known or (other == "" and name == ""):
            continue  # a name within a module, whose module was yielded too
        if other in ("cache", "model", "reuse", "io"):
            continue  # the package's own name: empty inits
        if inside(other, ASIDE):
            assert floor(name) >= floor("engine"), f"jaxkv.{name} imports jaxkv.{other}"
            continue
        assert floor(other) <= floor(name), f"jaxkv.{name} imports upward from jaxkv.{other}"


@pytest.mark.parametrize("name", [m for m in modules() if inside(m, ASIDE)])
def test_modules_aside_import_only_types_and_errors(name: str) -> None:
    for target in imported(modules()[name], "jaxkv"):
        if target.startswith("jaxkv"):
            assert inside(target, ("jaxkv.typing", "jaxkv.errors", *(f"jaxkv.{a}" for a in ASIDE)))
        assert not inside(target, JAX)


@pytest.mark.parametrize("name", [m for m in modules() if inside(m, HOST) and m not in DEVICE])
def test_host_modules_do_not_import_jax(name: str) -> None:
    allowed = ALLOWED_ON_HOST.get(name, ())
    for target in imported(modules()[name], "jaxkv"):
        assert not inside(target, JAX) or inside(target, allowed), f"jaxkv.{name}: {target}"
        # Nor through a module of ours that is device code.
        assert not inside(target, tuple(f"jaxkv.{d}" for d in DEVICE)), f"jaxkv.{name}: {target}"


def test_kernels_never_import_jaxkv_or_experiments() -> None:
    for name, path in modules("pallas_kernels").items():
        for target in imported(path, "pallas_kernels"):
            assert not inside(target, ("jaxkv", "experiments", "tests")), f"{name}: {target}"


def test_the_library_never_imports_experiments_or_tests() -> None:
    for name, path in modules().items():
        for target in imported(path, "jaxkv"):
            assert not inside(target, ("experiments", "configs", "tests", "pytest")), name


def test_the_reference_is_independent() -> None:
    for name in ("reference.py", "recurrent_reference.py"):
        targets = list(imported(Path(__file__).parent / name, "jaxkv"))
        assert not [t for t in targets if inside(t, ("jaxkv", *JAX))]


def test_every_public_name_exists_and_is_listed_once() -> None:
    import jaxkv

    assert len(jaxkv.__all__) == len(set(jaxkv.__all__))
    assert list(jaxkv.__all__) == sorted(jaxkv.__all__, key=lambda n: (not n.isupper(), n))
    for name in jaxkv.__all__:
        assert getattr(jaxkv, name) is not None
