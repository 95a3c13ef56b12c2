"""A stack of layers is the same function under every runner, and refuses what a runner could not split."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from core import logical, stack
from core.errors import UserError
from core.parameters import ParamSpec
from core.rematerialization import REMAT_CHOICES, OnHost

# B batch 4, D width 3, L layers 5.
KEY, LAYERS = jax.random.key(3), 5
X = jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)
SIDE = {"bias": jnp.arange(4.0)[:, None]}


class Layer(hk.Module):
    def __init__(self, *, drops: bool = False):
        super().__init__(name="layer")
        self.drops = drops

    def __call__(self, x, side):
        init = hk.initializers.RandomNormal(0.3)
        w = logical.param("w", (3, 3), ("embed", None), init)
        x = checkpoint_name(jnp.tanh(x @ w + side["bias"]), "activation")
        if self.drops:
            x = x * jax.random.bernoulli(hk.next_rng_key(), 0.5, x.shape)
        return x


def network(*, drops=False, **options):
    return hk.transform(
        lambda x, side: stack.layer_stack(lambda *a: Layer(drops=drops)(*a), LAYERS, **options)(x, side)
    )


@functools.cache
def initialized():
    return jax.jit(network().init)(KEY, X, SIDE)


def by_loop(fn, stacked, x, side, tail):
    """Another runner: a Python loop over layers, on one half of the rows after the other."""
    halves = []
    for rows in (slice(0, 2), slice(2, 4)):
        part, part_side = x[rows], jax.tree.map(lambda a, r=rows: a[r], side)
        for i in range(LAYERS):
            part, _ = fn(jax.tree.map(lambda a, i=i: a[i], stacked), part, part_side)
        halves.append(part if tail is None else tail.fn(tail.params, part, part_side, ()))
    return (jnp.concatenate(halves) if tail is None else jax.tree.map(jnp.add, *halves)), stack.Outputs()


@pytest.fixture(params=[stack.scan_runner, stack.unrolled_runner])
def runner(request):
    """Runs a test under each of the runners of one device."""
    with stack.use_runner(request.param):
        yield


@pytest.fixture(
    params=[
        (stack.scan_runner, "full"),
        (stack.unrolled_runner, "none"),
        pytest.param((stack.scan_runner, "none"), marks=pytest.mark.slow),
        pytest.param((stack.unrolled_runner, "full"), marks=pytest.mark.slow),
    ],
    ids=["scan, full", "unrolled, none", "scan, none", "unrolled, full"],
)
def remat(request):
    """Runs a test under a runner of one device, and says what to recompute."""
    runner, remat = request.param
    with stack.use_runner(runner):
        yield remat


def with_gradient(loss, apply, params):
    """Returns the gradient of `loss(x, out)` and what `apply` gives, both of one compiled program."""

    def value(params):
        found = apply(params)
        return loss(*found), found

    return jax.jit(jax.grad(value, has_aux=True))(params)


def test_parameters_are_stacked_named_and_different():
    init = network().init
    params = jax.jit(init)(KEY, X, SIDE)
    assert list(params) == ["layers/layer"]
    w = params["layers/layer"]["w"]
    assert w.shape == (LAYERS, 3, 3)
    assert len(np.unique(np.asarray(w))) == w.size
    _, specs = logical.abstract_init(init, KEY, X, SIDE)
    assert specs["layers/layer"]["w"] == ParamSpec(("layers", "embed", None), kind="matrix", stacked=1)


def test_scan_is_the_composition_of_the_layers():
    params = initialized()
    want = np.asarray(X)
    for w in np.asarray(params["layers/layer"]["w"]):
        want = np.tanh(want @ w + SIDE["bias"])
    np.testing.assert_allclose(jax.jit(network().apply)(params, None, X, SIDE), want, atol=1e-6)


@pytest.mark.parametrize(
    "remat",
    [*REMAT_CHOICES, ("activation",), ("nothing", "has", "these", "names"), OnHost(("activation",))],
)
def test_value_and_gradient_do_not_depend_on_runner_or_remat(remat):
    params = initialized()

    def value(params, runner):
        with stack.use_runner(runner):
            return jnp.sum(network(remat=remat).apply(params, None, X, SIDE) ** 2)

    both = jax.jit(jax.value_and_grad(value), static_argnums=1)
    (want, want_grad), (got, got_grad) = both(params, stack.scan_runner), both(params, by_loop)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), got_grad, want_grad)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("query",), r"OnHost.on_host = 'query': expected a tuple of checkpoint names"),
        ((("a", "b"), ("b",)), r"\['b'\] are on the host and on the device"),
    ],
)
def test_names_for_the_host_are_checked(arguments, message):
    with pytest.raises(UserError, match=message):
        OnHost(*arguments)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_jitted_function_follows_the_runner_in_force(order):
    runs = []

    def counting(fn, stacked, x, side, tail):
        runs.append("counting")
        return stack.scan_runner(fn, stacked, x, side, tail)

    params = initialized()
    apply = jax.jit(lambda params: network().apply(params, None, X, SIDE))
    for i in order * 2:
        with stack.use_runner((stack.scan_runner, counting)[i]):
            apply(params)
    assert runs == ["counting"]  # traced once under each, whichever came first


def test_weights_that_a_layer_casts_go_through_the_loop_as_narrow_as_it_uses_them():
    def block(x, side):
        wide = hk.get_parameter("wide", (3, 3), init=jnp.ones)
        narrow = hk.get_parameter("narrow", (3, 3), init=jnp.ones).astype(jnp.bfloat16)
        return x @ wide + (x.astype(jnp.bfloat16) @ narrow).astype(x.dtype)

    net = hk.transform(lambda x, side: stack.layer_stack(block, LAYERS, remat="full")(x, side))
    params = net.init(KEY, X, SIDE)
    loss = lambda params: jnp.sum(net.apply(params, None, X, SIDE))  # noqa: E731
    loops = [e for e in jax.make_jaxpr(jax.grad(loss))(params).eqns if e.primitive.name == "scan"]
    assert len(loops) == 2  # forward and backward
    for loop in loops:
        moved = [v.aval for v in (*loop.invars, *loop.outvars) if v.aval.shape == (LAYERS, 3, 3)]
        assert sorted(str(a.dtype) for a in moved) in (["bfloat16", "float32"], ["bfloat16"] * 2 + ["float32"] * 2)
    assert {a.dtype for a in jax.tree.leaves(jax.grad(loss)(params))} == {jnp.dtype("float32")}


def test_the_tail_sees_its_parameters_and_the_last_layer():
    tail = stack.Tail(lambda scale, x, side: jnp.sum(scale * x + side["bias"]), jnp.float32(2.0))
    params = initialized()
    want = jnp.sum(2.0 * network().apply(params, None, X, SIDE) + SIDE["bias"])
    np.testing.assert_allclose(network(tail=tail).apply(params, None, X, SIDE), want, rtol=1e-6)
    with stack.use_runner(by_loop):  # microbatches of sums add up
        np.testing.assert_allclose(network(tail=tail).apply(params, None, X, SIDE), want, rtol=1e-6)


@pytest.mark.covers("T12")
def test_each_layer_has_a_key_of_its_own_equal_under_every_runner():
    seen = []

    def recording(fn, stacked, x, side, tail):
        seen.append(np.asarray(jax.random.key_data(stacked.key)))
        return stack.scan_runner(fn, stacked, x, side, tail)

    def whole(fn, stacked, x, side, tail):  # the keys belong to layers, so a loop over layers draws the same bits
        for i in range(LAYERS):
            x, out = fn(jax.tree.map(lambda a, i=i: a[i], stacked), x, side)
        return x, out

    net = network(drops=True)
    apply = jax.jit(net.apply)
    params = jax.jit(net.init)(KEY, X, SIDE)
    want = apply(params, KEY, X, SIDE)
    for runner, applied in ((recording, net.apply), (whole, apply)):
        with stack.use_runner(runner):
            np.testing.assert_allclose(applied(params, KEY, X, SIDE), want, rtol=1e-6)
    assert len(np.unique(seen[0], axis=0)) == LAYERS
    assert not np.array_equal(apply(params, jax.random.key(4), X, SIDE), want)


@pytest.mark.parametrize("jitted", [False, True])
def test_a_block_that_closes_over_an_array_is_refused(jitted):
    def apply(params, table):
        block = lambda x, side: Layer()(x, side) + table  # noqa: E731
        return hk.transform(lambda x, s: stack.layer_stack(block, LAYERS)(x, s)).apply(params, None, X, SIDE)

    params = initialized()
    call = jax.jit(apply) if jitted else apply
    with pytest.raises(ValueError, match=r"the block closes over 1 array \(float32\[4,3\]|\(float32\[4, 3\]\)"):
        call(params, jnp.ones((4, 3)))


def test_constants_made_inside_a_block_are_its_own():
    block = lambda x, side: Layer()(x, side) + jnp.arange(3.0) * np.float32(0.5)  # noqa: E731
    net = hk.transform(lambda x, s: stack.layer_stack(block, LAYERS)(x, s))
    assert net.apply(net.init(KEY, X, SIDE), None, X, SIDE).shape == X.shape


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (lambda x, side: x[:, :2], r"maps float32\[4, 3\] to float32\[4, 2\]; a stack needs blocks that keep shape"),
        (lambda x, side: x.astype(jnp.bfloat16), r"maps float32\[4, 3\] to bfloat16\[4, 3\]"),
        (
            lambda x, side: (x, None),
            r"returns a tuple, \(float32\[4, 3\], None\); a block returns x of the next layer, .*outputs='stacked'",
        ),
        (lambda x, side: None, r"the block returns None; a block returns x of the next layer, here float32\[4, 3\]"),
    ],
)
def test_a_block_that_changes_the_shape_or_dtype_is_refused(block, message):
    net = hk.transform(lambda x, s: stack.layer_stack(block, LAYERS)(x, s))
    with pytest.raises(ValueError, match=message):
        net.apply({}, None, X, SIDE)


def test_unknown_remat_is_refused():
    with pytest.raises(ValueError, match="remat = 'all': expected one of none, dots, full"):
        stack.layer_stack(lambda x, side: x, 2, remat="all")


# A stack whose layers have inputs, outputs and kinds; layers by hand are what it must equal.

STREAM = {"hidden": X, "scores": jnp.zeros(4)}  # [B, D], [B]
FLAGS = jnp.asarray([1.0, 0.5, -1.0, 2.0, 0.0])  # [L]


def weighted(x, side, flag):
    """A layer of a stream of two arrays that reads its flag, and returns its input and a sum over rows."""
    w = logical.param("w", (3, 3), ("embed", None), hk.initializers.RandomNormal(0.3))
    hidden = jnp.tanh(x["hidden"] @ w + flag * side["bias"])
    after = {"hidden": hidden, "scores": x["scores"] + hidden[:, 0]}
    return after, {"cache": x["hidden"], "loss": jnp.sum(hidden**2)}


OUTPUTS = {"cache": "stacked", "loss": "summed"}


def weighted_by_hand(params):
    x, losses, cache = STREAM, 0.0, []
    for w, flag in zip(params["layers/~"]["w"], FLAGS, strict=True):
        cache.append(x["hidden"])
        hidden = jnp.tanh(x["hidden"] @ w + flag * SIDE["bias"])
        x, losses = {"hidden": hidden, "scores": x["scores"] + hidden[:, 0]}, losses + jnp.sum(hidden**2)
    return x, {"cache": jnp.stack(cache), "loss": losses}


def weighted_stack(**options):
    return hk.without_apply_rng(
        hk.transform(lambda: stack.layer_stack(weighted, LAYERS, outputs=OUTPUTS, **options)(STREAM, SIDE, FLAGS))
    )


def close(got, want):
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), got, want)


def test_a_layer_has_a_tree_as_stream_an_input_of_its_own_and_outputs_stacked_or_summed(remat):
    net = weighted_stack(remat=remat)
    params = jax.jit(net.init)(KEY)

    def loss(x, out):
        return jnp.sum(x["scores"]) + 3 * out["loss"] + jnp.sum(out["cache"] ** 2)

    close(with_gradient(loss, net.apply, params), with_gradient(loss, weighted_by_hand, params))


@pytest.mark.usefixtures("runner")
def test_the_tail_sees_the_summed_outputs():
    tail = stack.Tail(lambda scale, x, side, out: jnp.sum(x["scores"]) + scale * out["loss"], jnp.float32(2.0))
    net = weighted_stack(tail=tail)
    params = jax.jit(net.init)(KEY)
    x, out = jax.jit(weighted_by_hand)(params)
    close(jax.jit(net.apply)(params), (jnp.sum(x["scores"]) + 2 * out["loss"], out))


@pytest.mark.usefixtures("runner")
def test_a_cache_is_read_and_written_layer_by_layer():
    """A stack of running sums: what a layer returns is its input at the next call."""

    def block(x, side, cache):
        cache = cache + x
        return x + cache, cache

    layers = lambda cache: stack.layer_stack(block, LAYERS, outputs="stacked")(X, (), cache)  # noqa: E731
    net = hk.without_apply_rng(hk.transform(layers))
    want, cache = np.zeros((LAYERS, *X.shape)), jnp.zeros((LAYERS, *X.shape))
    for _ in range(2):
        got, cache = net.apply({}, cache)
        x = np.asarray(X)
        for i in range(LAYERS):
            want[i] += x
            x = x + want[i]
        close((got, cache), (x, want))


# Layers of unlike kinds.

DEPTH, PATTERN = 8, ("local",) * 2 + ("global",)


def of_a_kind(x, side, *, kind):
    w = logical.param("w", (3, 3), ("embed", None), hk.initializers.RandomNormal({"local": 0.2, "global": 0.4}[kind]))
    return (jnp.sin if kind == "local" else jnp.tanh)(x @ w) + x, {"seen": x, "sum": jnp.sum(x)}


def patterned(pattern, remat="none"):
    outputs = {"seen": "stacked", "sum": "summed"}
    return hk.transform(lambda x: stack.layer_stack(of_a_kind, DEPTH, pattern=pattern, outputs=outputs, remat=remat)(x))


def of_all(x, out):
    """A loss that depends on all outputs."""
    return jnp.sum(x) + out["sum"] + jnp.sum(out["seen"] ** 2)


def patterned_by_hand(params):
    x, every = X, []
    for i, w in enumerate(params["layers/~"]["w"]):
        every.append(x)
        x = (jnp.tanh if i % 3 == 2 else jnp.sin)(x @ w) + x
    return x, {"seen": jnp.stack(every), "sum": sum(map(jnp.sum, every))}


@pytest.mark.parametrize("pattern", [PATTERN, (PATTERN * 5)[:DEPTH]], ids=["a group", "every layer"])
def test_layers_follow_a_pattern_with_a_remainder(pattern):
    net = patterned(pattern, "full")
    params = jax.jit(net.init)(KEY, X)
    assert params["layers/~"]["w"].shape == (DEPTH, 3, 3)
    got, found = with_gradient(of_all, lambda params: net.apply(params, None, X), params)
    want, by_hand = with_gradient(of_all, patterned_by_hand, params)
    close(found, by_hand)
    np.testing.assert_allclose(*jax.tree.leaves((got, want)), rtol=1e-4, atol=1e-4)
    (loop,) = (e for e in jax.make_jaxpr(net.apply)(params, None, X).eqns if e.primitive.name == "scan")
    assert loop.params["length"] == DEPTH // 3  # groups; the two layers that are left over are unrolled


def test_a_layer_is_initialized_by_its_own_kind_and_key():
    both, local = (jax.jit(patterned(p).init)(KEY, X)["layers/~"]["w"] for p in (PATTERN, ("local",)))
    is_global = np.arange(DEPTH) % 3 == 2
    np.testing.assert_array_equal(both[~is_global], local[~is_global])
    np.testing.assert_allclose(both[is_global], 2 * local[is_global], rtol=1e-6)


# Groups: kinds "a" and "b" have different parameters, and stacked ("a", "b", "a") is one layer of the runner's stack.


def of_a_group(x, side, flag, *, kind):
    place, kind = kind
    with hk.experimental.name_scope(f"at_{place}"):
        shape = (3, 3) if kind == "a" else (3,)
        w = logical.param("w", shape, ("embed", None)[: len(shape)], hk.initializers.RandomNormal(0.5), kind="table")
        keep = jax.random.bernoulli(hk.next_rng_key(), 0.7, x.shape)
    after = jnp.where(keep, x + flag * (jnp.tanh(x @ w) if kind == "a" else jnp.sin(x * w)), x)
    return after, {"seen": x, "sum": jnp.sum(after**2)}


def grouped(remat="none", layers=6):
    pattern, outputs = ((0, "a"), (1, "b"), (2, "a")), {"seen": "stacked", "sum": "summed"}
    stacked = stack.layer_stack(of_a_group, layers, pattern=pattern, group=3, outputs=outputs, remat=remat)
    return hk.transform(lambda x: stacked(x, (), jnp.arange(layers) / 4))


@jax.jit
def kept(key, layer):
    """The elements that the layer with this number keeps: it draws them with a key of its own."""
    return jax.random.bernoulli(next(hk.PRNGSequence(jax.random.fold_in(key, layer))), 0.7, X.shape)


def grouped_by_hand(params):
    with jax.ensure_compile_time_eval():
        key = next(hk.PRNGSequence(KEY))
        keep = [kept(key, layer) for layer in range(6)]
    x, every = X, []
    for layer in range(6):
        group, place = divmod(layer, 3)
        w = params[f"layers/at_{place}"]["w"][group]
        every.append(x)
        new = jnp.tanh(x @ w) if place != 1 else jnp.sin(x * w)
        x = jnp.where(keep[layer], x + layer / 4 * new, x)
    return x, {"seen": jnp.stack(every), "sum": sum(jnp.sum(a**2) for a in [*every[1:], x])}


def test_layers_of_a_group_have_parameters_of_their_own(remat):
    net = grouped(remat)
    params = jax.jit(net.init)(KEY, X)
    shapes = {name: leaves["w"].shape for name, leaves in params.items()}
    assert shapes == {"layers/at_0": (2, 3, 3), "layers/at_1": (2, 3), "layers/at_2": (2, 3, 3)}
    got = with_gradient(of_all, lambda params: net.apply(params, KEY, X), params)
    close(got, with_gradient(of_all, grouped_by_hand, params))


def test_layers_that_do_not_divide_into_groups_are_refused():
    with pytest.raises(ValueError, match=r"5 layers do not divide into groups of 3 .* nearest numbers that do: 3, 6"):
        grouped(layers=5)
    for group in (0, -2, 1.0):
        with pytest.raises(ValueError, match=f"group = {group}: expected an integer of at least 1"):
            stack.layer_stack(of_a_group, 6, group=group)


def after_others(remat="none"):
    """Two layers of kind "b", then four of kind "a"."""

    def block(x, side, flag, *, kind):
        x, out = of_a_group(x, side, flag, kind=kind)
        return x, out if kind == (0, "a") else {**out, "sum": ()}

    first, outputs = stack.First(((0, "b"), (0, "b"))), {"seen": "stacked", "sum": "summed"}
    pattern = ((0, "a"),)
    stacked = stack.layer_stack(block, 6, pattern=pattern, first=first, outputs=outputs, remat=remat)
    return hk.transform(lambda x: stacked(x, (), jnp.arange(6) / 4))


def after_others_by_hand(params):
    with jax.ensure_compile_time_eval():
        keys = hk.PRNGSequence(KEY)
        of_first, of_others = next(keys), next(keys)
        keep = [kept(of_first, 0), kept(of_first, 1), *(kept(of_others, i) for i in range(4))]
    x, every = X, []
    for layer in range(6):
        is_first, place = layer < 2, layer if layer < 2 else layer - 2
        w = params[f"{'first_' if is_first else ''}layers/at_0"]["w"][place]
        every.append(x)
        x = jnp.where(keep[layer], x + layer / 4 * (jnp.sin(x * w) if is_first else jnp.tanh(x @ w)), x)
    return x, {"seen": jnp.stack(every), "sum": sum(jnp.sum(a**2) for a in [*every[3:], x])}


def test_first_layers_have_parameters_and_kinds_of_their_own(remat):
    net = after_others(remat)
    params = jax.jit(net.init)(KEY, X)
    shapes = {name: leaves["w"].shape for name, leaves in params.items()}
    assert shapes == {"first_layers/at_0": (2, 3), "layers/at_0": (4, 3, 3)}
    _, specs = logical.abstract_init(net.init, KEY, X)
    assert [specs[name]["w"].axes[0] for name in params] == ["first_layers", "layers"]
    got = with_gradient(of_all, lambda params: net.apply(params, KEY, X), params)
    close(got, with_gradient(of_all, after_others_by_hand, params))


def handing_over(x, side, *, kind):
    """A first layer keeps its input for the layers after the first ones, which add it."""
    if kind == "first":
        after = Layer()(x[0], side[0])
        return after, x[0]
    return Layer()(x + side[1], side[0])


def test_first_layers_hand_over_what_later_layers_read(remat):
    first = stack.First(("first", "first"), hands_over=True)
    stacked = stack.layer_stack(handing_over, LAYERS, pattern=("other",), first=first, remat=remat)
    net = hk.transform(lambda x: stacked((x, jnp.zeros_like(x)), (SIDE,)))
    params = jax.jit(net.init)(KEY, X)

    def by_hand(params):
        x = kept = X
        for w in params["first_layers/layer"]["w"]:
            kept, x = x, jnp.tanh(x @ w + SIDE["bias"])
        for w in params["layers/layer"]["w"]:
            x = jnp.tanh((x + kept) @ w + SIDE["bias"])
        return jnp.sum(x**2)

    got = jax.jit(jax.value_and_grad(lambda params: jnp.sum(net.apply(params, None, X) ** 2)))(params)
    want = jax.jit(jax.value_and_grad(by_hand))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


@pytest.mark.parametrize("count", [0, 5, 6])
def test_first_layers_and_others_are_needed(count):
    with pytest.raises(UserError, match=f"first has {count} layers, and num_layers = 5"):
        stack.layer_stack(of_a_group, 5, pattern=((0, "a"),), first=stack.First(((0, "b"),) * count))
    with pytest.raises(UserError, match="needs a pattern"):
        stack.layer_stack(of_a_group, 5, first=stack.First(((0, "b"),)))


def test_layers_of_a_group_need_names_of_their_own():
    net = hk.transform(lambda: stack.layer_stack(weighted, 4, outputs=OUTPUTS, group=2)(STREAM, SIDE, FLAGS[:4]))
    with pytest.raises(ValueError, match="two layers of a group have parameters of a module '~'"):
        net.init(KEY)


def typed(kind):
    return logical.param("w", (3, 3) if kind == "a" else (3, 4), ("embed", None), jnp.ones)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: stack.layer_stack(weighted, 5, outputs="sum"), "outputs has 'sum'; expected 'stacked' or 'summed'"),
        (lambda: stack.layer_stack(weighted, 5, pattern="local"), r"pattern = 'local'; expected a tuple of kinds"),
        (
            lambda: stack.layer_stack(lambda x, side: x, 5, outputs="summed")(X),
            r"returns float32\[4, 3\]; with outputs = 'summed' a block returns a pair",
        ),
        (
            lambda: stack.layer_stack(lambda x, side: (x, x), 5, outputs={"loss": "summed"})(X),
            r"outputs = {'loss': 'summed'} is not a prefix of the outputs of the block, float32\[4, 3\]",
        ),
        (
            lambda: stack.layer_stack(lambda x, side: (x, jnp.sum(x > 0)), 5, outputs="summed")(X),
            r"summed output is int32\[\]; sums over rows and layers are float32",
        ),
        (
            lambda: stack.layer_stack(weighted, 5, outputs=OUTPUTS)(STREAM, SIDE, FLAGS[:4]),
            r"layer_in is float32\[4\], but the stack has 5 layers: layer_in has one entry for each",
        ),
        (
            lambda: stack.layer_stack(lambda x, side: x, 5)({"a": X, "b": jnp.ones(3)}),
            r"x\['b'\] is float32\[3\], but x has 4 rows",
        ),
        (
            lambda: stack.layer_stack(lambda x, side, kind: x + typed(kind)[0, :3], 2, pattern=("a", "b"))(X),
            r"kind 'a' has the parameters .*w: float32\[3, 3\].*, one of kind 'b' .*float32\[3, 4\]",
        ),
    ],
)
def test_malformed_inputs_and_outputs_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        hk.transform(call).init(KEY)
