"""Collectives run on every axis of a mesh, and wrong results are detected."""

import jax
import numpy as np
from jax.sharding import Mesh

from parallel import collectives


def test_a_chip_that_gives_wrong_numbers_is_found(monkeypatch):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "fsdp"))
    right = collectives.trips(mesh, bytes_per_chip=4096)
    assert len(right) == 10
    assert all(trip.is_right and trip.bytes_per_second > 0 for trip in right)
    gather = jax.lax.all_gather
    monkeypatch.setattr(jax.lax, "all_gather", lambda *args, **kwargs: gather(*args, **kwargs).at[0, 0].add(1))
    wrong = [trip for trip in collectives.trips(mesh, bytes_per_chip=4096) if not trip.is_right]
    assert {(trip.collective, trip.axis) for trip in wrong} == {("all-gather", "data"), ("all-gather", "fsdp")}
