"""Describes the arrays of a state, reads a step on all hosts, and tells damage from failures to read.

A wrong checksum, a missing file or bytes that cannot be decoded prove damage. A lack of memory, a missing permission or
an unreachable bucket do not.

A fingerprint has 32 bits and does not depend on the sharding. Each element is hashed with its index in the global array
(the finalizer of MurmurHash3), and the hashes are summed modulo 2^32.
"""

import contextlib
import json
import math
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from core import library_errors, parameters
from core.checkpoints import steps
from core.checkpoints.steps import DamagedError
from core.errors import Problem, UserError
from core.files import paths
from core.hosts import distributed

_SPREAD = 0x9E3779B9  # multiplier of the index
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
SLOW_SECONDS = 3600  # timeout for the slowest host: hosts may read different amounts at different speeds
RETRY_SECONDS = 5.0  # pause before the single retry of a read that may succeed later
# Exceptions that wrong or missing bytes cause in checksums, JSON, zarr and zstd. TensorStore raises ValueError for
# every error, with the status first: too many open files are RESOURCE_EXHAUSTED, an input or output error of a disk is
# UNKNOWN. A read is retried if a file is missing: where listings are cached, another host's file may appear later.
_PROOFS = (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError, EOFError, zlib.error)


class Misfit(UserError):
    """A checkpoint does not fit the requested state."""


def by_name(tree: Any) -> dict[str, Any]:
    """Returns leaves by name, such as "params/decoder/linear/w"."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        "/".join(str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path): leaf
        for path, leaf in flat
    }


def without(state: Any, names: Collection[str]) -> Any:
    """Returns the tree with None in place of the leaves with these names."""
    found, absent = by_name(state), frozenset(names)
    assert found.keys() >= absent, f"no leaves {sorted(absent - found.keys())}"
    return jax.tree.unflatten(jax.tree.structure(state), [None if n in absent else leaf for n, leaf in found.items()])


def host_bytes(state: Any) -> int:
    """Returns the bytes of all arrays on this host, counting equal shards once.

    `state` may be of jax.ShapeDtypeStruct with shardings.
    """
    total = 0
    for leaf in by_name(state).values():
        places = {str(place) for place in leaf.sharding.addressable_devices_indices_map(leaf.shape).values()}
        total += len(places) * math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return total


def require_arrays(state: Any) -> None:
    """Raises TypeError if a leaf is not a jax.Array."""
    wrong = {name: type(leaf).__name__ for name, leaf in by_name(state).items() if not isinstance(leaf, jax.Array)}
    if wrong:
        raise TypeError(f"a checkpoint holds jax.Arrays; these leaves are not: {wrong}; put them on the devices first")


class Unused(Problem):
    """A problem: the source has an array that the model does not have."""


def differences(saved: Mapping[str, str], abstract_state: Any, *, where: str = "in the checkpoint") -> list[Problem]:
    """Returns a problem for each leaf that is missing, extra, or of another shape or dtype.

    `saved` has texts of `kind` by name.
    """
    wanted = {name: kind(leaf) for name, leaf in by_name(abstract_state).items()}
    lines = [Problem(f"not {where}", setting=name, expected=wanted[name]) for name in wanted if name not in saved]
    lines += [Unused(f"{saved[name]} {where}, not expected", setting=name) for name in saved if name not in wanted]
    both = [name for name in wanted if name in saved and saved[name] != wanted[name]]
    return lines + [Problem(f"{saved[name]} {where}", setting=name, expected=wanted[name]) for name in both]


def advice(saved: Mapping[str, str], abstract_state: Any) -> list[str]:
    """Returns lines of advice about differences."""
    wanted = set(by_name(abstract_state))
    plain = set(map(parameters.outside_layers, wanted))
    if plain == wanted or plain != saved.keys():
        return []
    return [
        "its optimizer was applied to stacks as they are, and is now applied to each layer separately: set "
        "optimizers.from_optax.by_layer = False, with OPTIMIZER = @optimizers.from_optax() "
        "(docs/how-to/own-optimizer.md)"
    ]


def kind(leaf: Any) -> str:
    """Formats dtype and shape: `float32[8, 6]`."""
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"


def shape_of(described: str) -> tuple[int, ...]:
    """Returns the shape from a text that `kind` formatted."""
    return tuple(json.loads(described[described.index("[") :]))


def require_shardings(abstract_state: Any) -> None:
    """Raises Misfit if a leaf has no sharding."""
    without = [name for name, leaf in by_name(abstract_state).items() if getattr(leaf, "sharding", None) is None]
    if without:
        raise Misfit(f"restore needs the sharding of every leaf; missing: {', '.join(without[:20])}")


def describe(state: Any) -> dict[str, list]:
    """Returns the kind and fingerprint of every leaf: `{"params/w": ["float32[8, 6]", 2864434397]}`.

    All hosts must call it.
    """
    leaves = by_name(state)
    contents = fingerprints(leaves)
    return {name: [kind(leaf), contents[name]] for name, leaf in leaves.items()}


@jax.jit
def _all(leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: fingerprint(leaf) for name, leaf in leaves.items()}


def fingerprints(leaves: Mapping[str, jax.Array]) -> dict[str, int]:
    """Returns the fingerprint of each array; all hosts must call it.

    The arrays must be on the same devices.
    """
    return {name: int(found) for name, found in jax.device_get(_all(dict(leaves))).items()}


def checksum(leaves: Mapping[str, jax.Array]) -> int:
    """Returns the sum of the arrays' fingerprints modulo 2^32; all hosts must call it."""
    return sum(fingerprints(leaves).values()) % 2**32


def fingerprint_of_block(values: np.ndarray, *, origin: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Returns what a block adds to an array's fingerprint, a sum over blocks modulo 2^32.

    `origin` is the index of the block's first element in the array.
    """
    words = _host_words(values)
    if words.ndim > values.ndim:  # of 8 bytes, two
        origin, shape = (*origin, 0), (*shape, 2)
    place = np.zeros(words.shape, np.uint32)
    for axis, (begin, size) in enumerate(zip(origin, shape, strict=True)):
        here = (np.arange(begin, begin + words.shape[axis]) % 2**32).astype(np.uint32)
        place *= np.uint32(size % 2**32)
        place += here.reshape([-1 if other == axis else 1 for other in range(words.ndim)])
    place *= np.uint32(_SPREAD)
    with np.errstate(over="ignore"):
        return int(np.sum(_mixed(words ^ place), dtype=np.uint32))


def _host_words(values: np.ndarray) -> np.ndarray:
    size = values.dtype.itemsize
    plain = np.ascontiguousarray(values).reshape(-1).view(np.dtype(f"u{min(size, 4)}"))
    return plain.astype(np.uint32).reshape(values.shape if size <= 4 else (*values.shape, 2))


def fingerprint(x: jax.Array) -> jax.Array:
    """Returns the fingerprint of one array, [] uint32; for jitted functions."""
    words = _words(x)
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        place = place * jnp.uint32(size % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    return jnp.sum(_mixed(words ^ (place * jnp.uint32(_SPREAD))), dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """Returns the bits as uint32; elements of 8 bytes give two."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize]).astype(jnp.uint32)


def _mixed(h: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


class UnreadableError(RuntimeError):
    """A step could not be read, which does not prove damage."""


class _Try(NamedTuple):
    found: Any
    says: str = ""
    is_proof: bool = False
    is_lasting: bool = True


def on_all_hosts(read: Callable[[], Any]) -> tuple[Any, str]:
    """Runs `read` on all hosts, which must all call this; `read` must not wait for other hosts.

    A read that fails without proof of damage, or because a file is missing, is retried once.

    Returns:
      This host's result (None if its read failed), and the damage found by any host, or "".

    Raises:
      UnreadableError: on all hosts, if a read failed without proof of damage.
    """
    tried = _tried(read)
    if not tried.is_lasting:
        print(f"reading a checkpoint failed, once more in {RETRY_SECONDS:g} s: {tried.says}", flush=True)
        time.sleep(RETRY_SECONDS)
        tried = _tried(read)
    answer = json.dumps([tried.says, tried.is_proof])
    answers = distributed.all_gather_text("checkpoints/read", answer, timeout_seconds=SLOW_SECONDS)
    failed = {host: answer for host, answer in enumerate(map(json.loads, answers)) if answer[0]}
    listed = _listed({host: says for host, (says, _) in failed.items()})
    if not all(is_proof for _, is_proof in failed.values()):
        raise UnreadableError(listed)
    return tried.found, listed


def agreed(says: str) -> str:
    """Returns the problems of all hosts as one text; all hosts must call it."""
    answers = distributed.all_gather_text("checkpoints/agreed", says, timeout_seconds=SLOW_SECONDS)
    if len(set(answers)) == 1:
        return says
    return _listed({host: answer for host, answer in enumerate(answers) if answer})


def _listed(says: Mapping[int, str]) -> str:
    return "; ".join(f"host {host}: {text}" for host, text in says.items())


def _tried(read: Callable[[], Any]) -> _Try:
    """Runs `read`; an exception becomes text, so that its traceback keeps nothing in memory."""
    try:
        return _Try(read())
    except Exception as error:  # files, formats, buckets and devices raise many types
        reason = _first_cause(error)
        is_proof = is_proof_of_damage(reason)
        is_lasting = is_proof and not library_errors.is_not_found(reason)
        return _Try(None, steps.said(reason), is_proof, is_lasting=is_lasting)


def is_proof_of_damage(error: BaseException) -> bool:
    """Returns whether an error proves that a step is damaged."""
    if isinstance(error, DamagedError):
        return True
    return isinstance(error, _PROOFS) and not library_errors.is_of_reader(error)


@contextlib.contextmanager
def refusing_damage(*step_folders: paths.Path) -> Iterator[None]:
    """Context in which proven damage of these steps is raised as a `UserError`, and so is their removal."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = _first_cause(error)
        if not is_proof_of_damage(reason):
            raise
        if removed := [folder for folder in step_folders if not steps.is_complete(folder)]:
            named = " and ".join(f"step {folder.name} of {folder.parent}" for folder in removed)
            raise UserError(
                f"{named} was removed after it was chosen: that run is still training and keeps its latest "
                "KEEP_CHECKPOINTS steps. Start again, or copy the step and name the copy"
            ) from error
        said = str(reason) if isinstance(reason, DamagedError) else steps.said(reason)
        named = " or ".join(f"step {folder.name} in {folder.parent}" for folder in step_folders)
        raise UserError(
            f"damaged checkpoint, {named}: {said}. `launch/run checkpoints verify RUN` lists the damaged "
            "parts of every step; name an intact one as RUN@STEP"
        ) from error


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
