"""Parameters and optimizer state per chip, against arithmetic by hand: every strategy, every optimizer.

The sizes of the model, the number of pieces of each axis and what an optimizer keeps are written out here; nothing is
read from tables, layouts or states.
"""

import math

import jax
import optax
import optax.contrib
import pytest

from core import optimizers, slices
from models.decoder import transformer
from parallel.compiled import report
from parallel.partitioner import Partitioner
from parallel.verify import agreement
from tasks import streams

L, D, F, H, N, K, V = 4, 256, 512, 8, 4, 128, 384  # layers, embed, mlp, heads, kv_heads, head_dim, vocab as stored
MODEL = transformer.Transformer(
    vocab_size=300, num_layers=L, embed_dim=D, mlp_dim=F, num_heads=H, num_kv_heads=N, head_dim=K
)
SIZES = {
    "layers": L,
    "embed": D,
    "mlp": F,
    "heads": H,
    "kv_heads": N,
    "head_dim": K,
    "vocab": V,
    "norm": D,
    "heads x head_dim": H * K,
    "kv_heads x head_dim": N * K,
    "one": 1,
    "each": L,
}
MATRICES = {
    "query": ("layers", "embed", "heads", "head_dim"),
    "key": ("layers", "embed", "kv_heads", "head_dim"),
    "value": ("layers", "embed", "kv_heads", "head_dim"),
    "output": ("layers", "heads", "head_dim", "embed"),
    "gate": ("layers", "embed", "mlp"),
    "up": ("layers", "embed", "mlp"),
    "down": ("layers", "mlp", "embed"),
}
OTHERS = {
    "attention_norm": ("layers", "norm"),
    "mlp_norm": ("layers", "norm"),
    "final_norm": ("norm",),
    "embedding": ("vocab", "embed"),
    "unembedding": ("embed", "vocab"),
}
PARAMS = [*MATRICES.values(), *OTHERS.values()]

BY_4 = dict.fromkeys(("mlp", "heads", "kv_heads", "vocab"), 4)
BY_2 = dict.fromkeys(BY_4, 2)
PIECES = {  # strategy: into how many pieces each axis of a parameter is cut
    "data_parallel": {},
    "zero1": {},
    "fsdp": {"embed": 16},
    "fsdp_overlapped": {"embed": 16},
    "hsdp": {"embed": 4},
    "tensor": BY_4,
    "fsdp_tensor": {"embed": 4, **BY_4},
    "sequence_tensor": {"embed": 4, **BY_4},
    "context": {"embed": 16},
    "context_ring": {"embed": 16},
    "mesh3d": {"embed": 4, **BY_2},
    "multislice": {"embed": 8},
    "experts": {"embed": 4, **BY_2, "head_dim": 2},
    "pipeline": {"layers": 4, "vocab": 4},
    "pipeline_data": {"layers": 2, "vocab": 2},
    "pipeline_fsdp": {"layers": 4, "vocab": 4, "embed": 4},
    "pipeline_experts": {**BY_2, "layers": 2, "vocab": 4, "embed": 2, "head_dim": 2},
    "pipeline_fsdp_tensor": {**BY_4, "layers": 2, "vocab": 8, "embed": 2},
}
PIECES = {name: p | {f"{a} x head_dim": p.get(a, 1) for a in ("heads", "kv_heads")} for name, p in PIECES.items()}
OPTIMIZER_PIECES = PIECES | {"zero1": PIECES["zero1"] | {"embed": 16}}

# What Adafactor keeps of each: rows and columns of a matrix, and one number where it keeps nothing, for each layer of a
# stack: the numbers are on every chip. Heads and their dimensions are one axis of a factor, which is cut between heads
# alone: pieces of each head's dimension would not lie side by side.
FACTORED = [
    *([("layers", "embed"), ("layers", "heads x head_dim"), ("each", "one")] * 2),  # query and output
    *([("layers", "embed"), ("layers", "kv_heads x head_dim"), ("each", "one")] * 2),
    *([("layers", "embed"), ("layers", "mlp"), ("each", "one")] * 3),
    *([("layers", "norm"), ("each", "one"), ("each", "one")] * 2),
    *[("norm",), ("one",), ("one",)],
    *([("vocab",), ("embed",), ("one",)] * 2),
]
RATE = optimizers.constant(1e-3)


def of_optax(transformation, **options):
    return optimizers.from_optax(transformation=transformation, **options)


KEPT = {  # optimizer: itself, the arrays it keeps, bytes of counters and constants beside them
    "adamw": (optimizers.adamw(learning_rate=RATE), PARAMS * 2, 4 + 4),
    "adafactor": (optimizers.adafactor(learning_rate=RATE), FACTORED, 4 * L + 4 + 4),
    "adam_atan2": (optimizers.adam_atan2(learning_rate=RATE), PARAMS * 2, 4 + 4),
    "lion": (optimizers.lion(learning_rate=RATE), PARAMS, 4 + 4),
    "muon": (optimizers.muon(learning_rate=RATE), PARAMS + list(OTHERS.values()), (4 + 12) * L + 4 + 4),
}
VECTORS = 4 * sum(SIZES[a] for axes in OTHERS.values() for a in axes if "layers" not in axes)  # not of the layers
LAYER_VECTORS = 4 * L * sum(SIZES[a] for axes in PARAMS if "layers" in axes for a in axes[1:])
KEPT |= {  # of optax: SM3 stores a vector for each dimension of a parameter, on every chip
    "adan": (of_optax(optax.adan(1e-3)), PARAMS * 4, 4),
    "prodigy": (of_optax(optax.contrib.prodigy()), PARAMS * 4, 4 * 3),
    "schedule_free": (of_optax(optax.contrib.schedule_free_adamw(1e-3)), PARAMS * 2, 4 * 5),
    "sm3": (of_optax(optax.sm3(1e-3), by_layer=True), PARAMS, VECTORS + LAYER_VECTORS),
    "lamb": (of_optax(optax.lamb(1e-3), by_layer=True), PARAMS * 2, 4 * L + 4),
}
QUICK = {("muon", "telling")}  # has matrices that are stored otherwise, and AdamW for the rest
# Every axis that a strategy cuts is cut by one of these, and all axes that one cuts together.
TELLING = ("zero1", "fsdp", "fsdp_tensor", "context", "experts", "pipeline_fsdp", "pipeline_experts")
GROUPS = {"telling": TELLING, "others": tuple(name for name in PIECES if name not in TELLING)}
SPEC = streams.batch_spec(16, length=8)


def bytes_of(arrays, pieces):
    assert all(SIZES[a] % pieces.get(a, 1) == 0 for axes in arrays for a in axes)
    return sum(4 * math.prod(SIZES[a] // pieces.get(a, 1) for a in axes) for axes in arrays)


def whole_bytes(arrays, pieces):
    """Of arrays that no axis cuts."""
    return bytes_of([axes for axes in arrays if all(pieces.get(a, 1) == 1 for a in axes)], {})


def bind(name, optimizer):
    slice_name, tables = agreement.EXAMPLES[name]
    bound = Partitioner(tables, slice=slices.get(slice_name), devices=jax.devices())
    return bound.program(MODEL, optimizer, SPEC, seed=0)


def replicated(rows, part):
    return sum(row.bytes_per_chip for row in rows if row.replicated and row.path.startswith(part))


def test_every_strategy_is_here():
    assert set(PIECES) == set(agreement.EXAMPLES)


@pytest.mark.covers("M06", "M07", "M08", "M17")
@pytest.mark.parametrize(
    ("kept", "group"),
    [
        pytest.param(kept, group, marks=[] if (kept, group) in QUICK else pytest.mark.slow)
        for kept in KEPT
        for group in GROUPS
    ],
)
def test_bytes_per_chip_are_those_of_the_formula(kept, group):
    optimizer, arrays, beside = KEPT[kept]
    for name in GROUPS[group]:
        program, pieces = bind(name, optimizer), PIECES[name]
        sizes, rows = report.totals(program), report.rows(program)
        assert sizes.params == bytes_of(PARAMS, pieces), name
        assert sizes.opt_state == bytes_of(arrays, OPTIMIZER_PIECES[name]) + beside, name
        assert sizes.whole == bytes_of(PARAMS + arrays, {}) + beside + 4, name  # 4: the number of the step
        assert replicated(rows, "params/") == whole_bytes(PARAMS, pieces), name
        assert replicated(rows, "opt_state/") == whole_bytes(arrays, OPTIMIZER_PIECES[name]) + beside, name
