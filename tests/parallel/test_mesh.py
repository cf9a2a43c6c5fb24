"""Texts of meshes, routes and the reading of collectives: nothing here needs several devices."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import jaxkv
from experiments.collectives import Collective, collectives, counts
from jaxkv.parallel import as_mesh, one_replica, split_replicas
from jaxkv.serving.routing import ROUTES, check_route, choose, common_prefix


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data:2,modle:4", "axis 'modle', expected axes of data, model; did you mean 'model'"),
        ("model:2,model:4", "axis 'model' twice"),
        ("model:zwei", "size 'zwei' of axis 'model', expected a positive number"),
        ("model:0", "size '0' of axis 'model'"),
        ("model", "size '' of axis 'model'"),
        ("model:3", "takes 3 devices, expected the 8 there are"),
        ("data:2,model:8", "takes 16 devices, expected the 8 there are"),
        ("", "axis '', expected axes of data, model"),
    ],
)
def test_bad_meshes_are_refused(text: str, message: str) -> None:
    with pytest.raises(jaxkv.ConfigError, match=message):
        jaxkv.parse_mesh(text, list(range(8)))


def test_other_things_are_no_mesh() -> None:
    devices = np.array(jax.devices()[:1])
    with pytest.raises(jaxkv.ConfigError, match="mesh is a int, expected a"):
        as_mesh(4)
    with pytest.raises(jaxkv.ConfigError, match="mesh has axis 'rows'"):
        as_mesh(jax.sharding.Mesh(devices, ("rows",)))
    assert as_mesh(None) is None
    assert one_replica(None) is None
    mesh = jaxkv.parse_mesh("model:1", jax.devices()[:1])
    assert mesh.shape == {"model": 1}
    assert [m.shape for m in split_replicas(mesh)] == [{"model": 1}]
    both = jaxkv.parse_mesh("model:1,data:1", jax.devices()[:1])
    assert [m.axis_names for m in split_replicas(both)] == [("model",)]


def test_an_engine_on_a_mesh_of_one_device_is_an_engine(model: jaxkv.Model) -> None:
    engine = jaxkv.Engine(model, num_pages=16, page_size=8, chunk_size=32, mesh="model:1")
    assert engine.prefill([1, 2, 3]).logits.shape == (model.config.vocab_size,)
    engine.check()


def test_routes() -> None:
    def at(route: str, matched: list[int], work: list[int], number: int = 0) -> int:
        return choose(route, matched, work, 100, number=number, seed=3)

    assert at("longest_match", [10, 40, 40], [0, 9, 5]) == 2, "of equal matches the one with less to do"
    assert at("longest_match", [0, 0, 0], [4, 2, 2]) == 1
    assert at("least_work", [10, 40, 40], [0, 200, 20]) == 2, "20 + 60 before 0 + 90"
    assert at("least_work", [10, 40, 40], [0, 200, 40]) == 0
    assert [at("round_robin", [9, 0], [0, 9], n) for n in range(4)] == [0, 1, 0, 1]
    drawn = [at("random", [0] * 4, [0] * 4, n) for n in range(200)]
    assert drawn == [at("random", [5] * 4, [7] * 4, n) for n in range(200)]
    assert min(drawn.count(i) for i in range(4)) > 25
    assert common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4, 5])) == 2
    assert common_prefix(np.array([1, 2]), np.array([1, 2, 4])) == 2
    for route in ROUTES:
        assert check_route(route) == route
    with pytest.raises(jaxkv.ConfigError, match=r"route is 'longest_mtach'.*did you mean 'longest_match'"):
        check_route("longest_mtach")


HLO = """
ENTRY %main (a: f32[8,4]) -> f32[8,4] {
  %r = f32[8,4]{1,0} all-reduce(f32[8,4]{1,0} %a), channel_id=1, to_apply=%add
  %t = (f32[2,4]{1,0}, bf16[8]{0}) all-reduce(%r, %b), channel_id=2, to_apply=%add
  %s = (f32[2,4]{1,0:T(8,128)}, f32[8,4]{1,0:T(8,128)S(1)}) all-gather-start(%x), dimensions={0}
  %d = f32[8,4]{1,0} all-gather-done(%s)
  ROOT %g = s32[16]{0} all-gather(s32[4]{0} %y), dimensions={0}
  %n = f32[8,4]{1,0} add(%r, %all-reduce.3)
}
"""


def test_collectives_are_read_from_the_program_text() -> None:
    found = collectives(HLO)
    assert [(c.kind, c.nbytes) for c in found] == [
        ("all-reduce", 128),
        ("all-reduce", 32 + 16),
        ("all-gather", 128),
        ("all-gather", 64),
    ]
    assert counts(found) == {"all-reduce": 2, "all-gather": 2}
    assert Collective("all-reduce", 100).link_bytes(4) == 150
    assert Collective("all-gather", 100).link_bytes(4) == 75
    assert Collective("reduce-scatter", 25).link_bytes(4) == 75
