"""Describes the arrays of a state, reads a step on all hosts, and distinguishes damage from failures to read.

A wrong checksum, a missing file or bytes that cannot be decoded prove that the checkpoint is damaged. A lack of memory,
a missing permission or an unreachable bucket do not: a later attempt may succeed. Only proven damage may set a step
aside, and only after an older step was restored: if no step can be read, this revision or its libraries may be at
fault.

The description of an array includes a 32-bit fingerprint, which does not depend on the sharding. Each element is hashed
together with its index in the global array, and the hashes are summed modulo 2^32 in any order. Arrays that differ in
a single element of at most 4 bytes always have different fingerprints, because the hash is a bijection (the finalizer
of MurmurHash3); other different arrays of one shape have equal fingerprints with a probability of about 2^-32.
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
    """Returns leaves by name, such as "params/decoder/linear/w".

    The name of a leaf is the same in a NamedTuple and in the dict that Orbax stores for it.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        "/".join(str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path): leaf
        for path, leaf in flat
    }


def without(state: Any, names: Collection[str]) -> Any:
    """Returns the tree with None in place of the leaves with these names (see `by_name`)."""
    found, absent = by_name(state), frozenset(names)
    assert found.keys() >= absent, f"no leaves {sorted(absent - found.keys())}"
    return jax.tree.unflatten(jax.tree.structure(state), [None if n in absent else leaf for n, leaf in found.items()])


def host_bytes(state: Any) -> int:
    """Returns the bytes of all arrays on this host, counting a shard once if several devices have it.

    Args:
      state: a tree of jax.Array, or of jax.ShapeDtypeStruct with shardings.
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
    """A problem with a source of parameters: an array in it that the model does not have."""


def differences(saved: Mapping[str, str], abstract_state: Any, *, where: str = "in the checkpoint") -> list[Problem]:
    """Returns a problem for each leaf that is missing, extra, or of another shape or dtype.

    Args:
      saved: dtypes and shapes by name, as `kind` formats them.
      abstract_state: the requested state.
      where: where the arrays of `saved` are, for the messages.
    """
    wanted = {name: kind(leaf) for name, leaf in by_name(abstract_state).items()}
    lines = [Problem(f"not {where}", setting=name, expected=wanted[name]) for name in wanted if name not in saved]
    lines += [Unused(f"{saved[name]} {where}, not expected", setting=name) for name in saved if name not in wanted]
    both = [name for name in wanted if name in saved and saved[name] != wanted[name]]
    return lines + [Problem(f"{saved[name]} {where}", setting=name, expected=wanted[name]) for name in both]


def advice(saved: Mapping[str, str], abstract_state: Any) -> list[str]:
    """Returns lines of advice, for the message about differences; [] without advice.

    There is one line, if the saved optimizer was `core.optimizers.from_optax` without `by_layer`, and the requested one
    is applied by layer.

    Args:
      saved: as in `differences`.
      abstract_state: the requested state, which has differences.
    """
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
    """Returns dtype and shape, and fingerprint, of every leaf: `{"params/w": ["float32[8, 6]", 2864434397]}`.

    All hosts must call it.
    """
    leaves = by_name(state)
    contents = fingerprints(leaves)
    return {name: [kind(leaf), contents[name]] for name, leaf in leaves.items()}


@jax.jit
def _all(leaves: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: fingerprint(leaf) for name, leaf in leaves.items()}


def fingerprints(leaves: Mapping[str, jax.Array]) -> dict[str, int]:
    """Returns the fingerprint of each array, on every host; all hosts must call it.

    Args:
      leaves: arrays of any dtype and sharding, all on the same devices.
    """
    return {name: int(found) for name, found in jax.device_get(_all(dict(leaves))).items()}


def checksum(leaves: Mapping[str, jax.Array]) -> int:
    """Returns the sum of the fingerprints of arrays modulo 2^32, on every host; all hosts must call it."""
    return sum(fingerprints(leaves).values()) % 2**32


def fingerprint_of_block(values: np.ndarray, *, origin: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Returns the contribution of a block to an array's fingerprint, computed with numpy on the host.

    The fingerprint is the sum of the contributions of all blocks modulo 2^32.

    Args:
      values: the block.
      origin: index of its first element in the array, one per axis.
      shape: shape of the array.
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
    """Returns the fingerprint of one array, [] uint32; for use inside jitted functions."""
    words = _words(x)
    place = jnp.zeros(words.shape, jnp.uint32)
    for axis, size in enumerate(words.shape):
        place = place * jnp.uint32(size % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    return jnp.sum(_mixed(words ^ (place * jnp.uint32(_SPREAD))), dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """Returns the bits of every element as uint32; elements of 8 bytes give two."""
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
    """A step could not be read, for a reason that does not prove damage."""


class _Try(NamedTuple):
    """The result of a read, or its error.

    Attributes:
      found: the result; None after an error.
      says: the error as text; "" without one.
      is_proof: whether the error proves that the step is damaged.
      is_lasting: whether a retry is pointless.
    """

    found: Any
    says: str = ""
    is_proof: bool = False
    is_lasting: bool = True


def on_all_hosts(read: Callable[[], Any]) -> tuple[Any, str]:
    """Runs `read` on all hosts. All hosts must call it.

    A read that fails without proof of damage, or because a file is missing, is retried once.

    Args:
      read: reads this host's part; must not wait for other hosts.

    Returns:
      This host's result (None if its read failed), and a description of the damage, equal on all hosts; "" if no host
        found any.

    Raises:
      UnreadableError: raised on all hosts if the read failed on any of them for a reason that does not prove damage.
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
    """Returns the problems of all hosts as one text, on every host; "" without problems. All hosts must call it.

    Args:
      says: the problems of this host; "" without problems.
    """
    answers = distributed.all_gather_text("checkpoints/agreed", says, timeout_seconds=SLOW_SECONDS)
    if len(set(answers)) == 1:
        return says
    return _listed({host: answer for host, answer in enumerate(answers) if answer})


def _listed(says: Mapping[int, str]) -> str:
    return "; ".join(f"host {host}: {text}" for host, text in says.items())


def _tried(read: Callable[[], Any]) -> _Try:
    """Runs `read` and converts an exception to text, so that its traceback keeps nothing in memory."""
    try:
        return _Try(read())
    except Exception as error:  # files, formats, buckets and devices raise many types
        reason = _first_cause(error)
        is_proof = is_proof_of_damage(reason)
        is_lasting = is_proof and not library_errors.is_not_found(reason)
        return _Try(None, steps.said(reason), is_proof, is_lasting=is_lasting)


def is_proof_of_damage(error: BaseException) -> bool:
    """Returns True if an error proves that the step is damaged, and not only that it could not be read."""
    if isinstance(error, DamagedError):
        return True
    return isinstance(error, _PROOFS) and not library_errors.is_of_reader(error)


@contextlib.contextmanager
def refusing_damage(*step_folders: paths.Path) -> Iterator[None]:
    """Context in which a command reads these steps, and reports proven damage as a `UserError`.

    Raises:
      UserError: an exception in the context proves that a step is damaged; others are passed on.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = _first_cause(error)
        if not is_proof_of_damage(reason):
            raise
        said = str(reason) if isinstance(reason, DamagedError) else steps.said(reason)
        named = " or ".join(f"step {folder.name} in {folder.parent}" for folder in step_folders)
        raise UserError(
            f"damaged checkpoint, {named}: {said}. `launch/run checkpoints verify RUN` lists the damaged "
            "parts of every step; name an intact one as RUN@STEP"
        ) from error


def _first_cause(error: BaseException) -> BaseException:
    """Returns the exception that libraries have wrapped."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error
