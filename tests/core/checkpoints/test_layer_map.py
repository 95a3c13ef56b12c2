"""Mappings of layers: what they list, and their errors, which come before an array is read."""

import re

import jax
import numpy as np
import pytest

from core.checkpoints import layer_map, warm_start
from core.errors import UserError
from core.parameters import ParamSpec

SOURCE = warm_start.GivenParameters(
    {"layers": {"w": np.zeros((2, 3, 5)), "b": np.zeros((2, 5))}, "~": {"e": np.ones(7)}}
)
MATRIX, BIAS = ParamSpec(("embed", "mlp")).in_stack("layers"), ParamSpec(("mlp",)).in_stack("layers")
SPECS = {"layers": {"w": MATRIX, "b": BIAS}, "~": {"e": ParamSpec(("vocab",))}, "experts": {"x": ParamSpec((None,))}}


def of(layers):
    shapes = {"layers": {"w": (4, 3, 5), "b": (4, 5)}, "~": {"e": (7,)}, "experts": {"x": (4,)}}
    kinds = {
        module: {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in entries.items()}
        for module, entries in shapes.items()
    }
    return layer_map.of(layers, SOURCE, kinds, SPECS)


def test_copied_initialized_and_other_layers_are_listed():
    found = of({"layers/w": (0, 0, None, 0), "layers/*": (0, 1, 1, 1)})
    assert found.notes == (
        "layers/w: layers 0 from 0, 1 from 0, 3 from 0; initialized: 2; not taken from the source: 1",
        "layers/*: layers 0 from 0, 1 from 1, 2 from 1, 3 from 1",
    )
    assert found.initializes
    assert not found.needs_fresh("layers/b")
    assert of({}) == layer_map.LayerMap()


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ({"layers/*": (0, 1)}, "'layers/*': 2 entries, but layers/b has 4 layers in the model"),
        (
            {"layers/*": (0, 0, 2, 1)},
            "'layers/*': names layer 2, but layers/b has 2 layers, counted from 0, in 3 parameters in memory",
        ),
        ({"layer/*": (0, 0, 1, 1)}, "no parameter matches 'layer/*'"),
        ({"*": (0, 0, 1, 1)}, "'*': experts/x has no layers"),
        ({"experts/*": (0, 0, 1, 1)}, "'experts/*': experts/x has no layers"),
    ],
)
def test_mappings_that_do_not_fit_are_errors(layers, said):
    with pytest.raises(UserError, match=f"INIT_LAYERS.*{re.escape(said)}") as caught:
        of(layers)
    assert "\n" not in str(caught.value)
