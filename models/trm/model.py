"""The Tiny Recursive Model as a configuration: a grid of tokens in, the same grid solved out.

    x = sqrt(D) [puzzle vector, 0 … 0 | E[inputs]]        the prefix, then the cells
    y, z = recursion(y, z, x);   logits = y U, prefix dropped;   q_halt, q_continue = y[0] W + b

One training step is one round of recursion on a carry that goes on through training (`models.trm.halting`). Jolicoeur-
Martineau 2025, "Less is more: recursive reasoning with tiny networks". What the paper leaves open is as in its
reference code. B batch, S positions of a puzzle, P prefix, T = P + S, D embed, F mlp, H heads, K head_dim, V vocab as
stored, L layers, N puzzles as stored.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

import haiku as hk
import jax
import jax.numpy as jnp

from core import logical, random_bits
from core.types import Batch, LossOutput, Params
from models import derivatives, losses
from models.trm import halting, net, weights
from models.trm.halting import Carry, Outputs
from models.trm.net import Recursion, States
from models.trm.schedules import Curriculum, Linear
from models.trm.weights import Weights

MIXERS = ("attention", "mlp")
POSITIONS = ("rope", "learned", "none")
LOG_PROBABILITIES = {"stablemax": losses.log_stablemax, "softmax": losses.log_softmax}
_DTYPES = ("bfloat16", "float32", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TRM:
    """The Tiny Recursive Model.

    Batches have `inputs`, `labels` [B, S] (-100 is ignored) and `puzzle_ids` [B], int32.

    Attributes:
      vocab_size: tokens of a cell; stored rounded up to `vocab_multiple`.
      embed_dim, num_heads, num_layers: sizes of the one network; heads are for the attention variant.
      expansion: hidden units are expansion * 2/3 of the width, rounded up to 256.
      mixer: what mixes positions: "attention", or "mlp": a feed-forward layer over positions (5M parameters for a
        Sudoku; its weights depend on S).
      positions: "rope", "learned", "none"; "auto": rope for attention, none for the mlp.
      h_cycles, l_cycles: outer and inner repetitions of the recursion.
      latents, gradient, remat, unroll: see `models.trm.net.Recursion`.
      num_puzzles: rows of the puzzle table; stored rounded up to `puzzle_multiple`.
      puzzle_dim: width of a puzzle's vector; None: embed_dim; 0: no table.
      prefix_length: P, positions in front of the cells; the first hold the puzzle's vector.
      halt_bias: what both logits of the halting head start from; its matrix starts at zero.
      halt_max_steps: most steps for a puzzle, and the number of steps of evaluation.
      exploration: probability that a row must go on for a number of steps that is drawn; a number, or one that
        changes while it trains (`models.trm.schedules.Linear`).
      curriculum: cycles that grow to h_cycles and l_cycles while it trains; None: all of them from the start.
      probabilities: of the token loss: "stablemax" or "softmax".
      dtype: of computation, "bfloat16", "float32" or "float16"; parameters, norms, softmax and loss are float32. The
        loss is a sum over rows that is divided after the backward pass, in float32: for float16 that is a loss scale of
        the batch size, and the only one.
      rope_theta, norm_eps: constants of the rotary embedding and of RMSNorm.
      vocab_multiple, puzzle_multiple: numbers of the model, never of a mesh.

    Raises:
      ValueError: sizes or choices that do not fit together.
    """

    vocab_size: int
    embed_dim: int = 512
    num_heads: int = 8
    num_layers: int = 2
    expansion: float = 4.0
    mixer: str = "attention"
    positions: str = "auto"
    h_cycles: int = 3
    l_cycles: int = 6
    latents: str = "two"
    gradient: str = "last_cycle"
    remat: str = "none"
    unroll: int = 1
    num_puzzles: int = 1
    puzzle_dim: int | None = None
    prefix_length: int = 16
    halt_bias: float = -5.0
    halt_max_steps: int = 16
    exploration: float | Linear = 0.1
    curriculum: Curriculum | None = None
    probabilities: str = "stablemax"
    dtype: str = "bfloat16"
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    vocab_multiple: int = 1
    puzzle_multiple: int = 128

    def __post_init__(self):
        counted = ("vocab_size", "embed_dim", "num_heads", "num_layers", "h_cycles", "l_cycles", "num_puzzles")
        for field in (*counted, "halt_max_steps", "unroll", "vocab_multiple", "puzzle_multiple"):
            if getattr(self, field) < 1:
                raise ValueError(f"TRM.{field} = {getattr(self, field)}: expected at least 1")
        choices = {
            "mixer": MIXERS,
            "positions": ("auto", *POSITIONS),
            "latents": net.LATENTS,
            "gradient": net.GRADIENTS,
            "remat": net.REMAT_CHOICES,
            "probabilities": tuple(LOG_PROBABILITIES),
            "dtype": _DTYPES,
        }
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"TRM.{field} = {getattr(self, field)!r}: expected one of {', '.join(allowed)}")
        ends = (self.exploration.start, self.exploration.end) if self._anneals else (self.exploration,)
        if not all(0 <= p <= 1 for p in ends):
            raise ValueError(f"TRM.exploration = {self.exploration}: expected a probability, from 0 to 1")
        if not self.expansion > 0:
            raise ValueError(f"TRM.expansion = {self.expansion}: expected above 0")
        self._check_shapes()
        self._check_curriculum()

    def _check_curriculum(self) -> None:
        if self.curriculum is None:
            return
        if self.latents == "many":
            raise ValueError("TRM: latents = 'many' has a latent for each cycle and takes no curriculum of cycles")
        for field in ("h_cycles", "l_cycles"):
            first, last = getattr(self.curriculum, field), getattr(self, field)
            if first > last:
                raise ValueError(f"TRM: the curriculum starts with {field} = {first}, above the model's {last}")

    def _check_shapes(self) -> None:
        if self.mixer == "attention" and self.embed_dim % (2 * self.num_heads):
            raise ValueError(
                f"TRM: embed_dim = {self.embed_dim} does not divide over num_heads = {self.num_heads} of an even width"
            )
        if self.mixer == "mlp" and self.positions == "rope":
            raise ValueError("TRM: positions = 'rope' turns queries and keys, and mixer = 'mlp' has none; take 'none'")
        if self.prefix_length * self.embed_dim < self.puzzle_width:
            raise ValueError(
                f"TRM: a puzzle's vector of puzzle_dim = {self.puzzle_width} does not fit into prefix_length = "
                f"{self.prefix_length} positions of embed_dim = {self.embed_dim}"
            )
        if self.prefix_length and not self.puzzle_width:
            raise ValueError(f"TRM: puzzle_dim = 0 leaves prefix_length = {self.prefix_length} empty; set it to 0 too")

    @property
    def puzzle_width(self) -> int:
        """Width of a puzzle's vector."""
        return self.embed_dim if self.puzzle_dim is None else self.puzzle_dim

    @property
    def stored_vocab_size(self) -> int:
        """V."""
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple

    @property
    def recursion(self) -> Recursion:
        """What the network is told of repetition."""
        return Recursion(self.h_cycles, self.l_cycles, self.latents, self.gradient, self.remat, self.unroll)

    def init(self, rng: jax.Array, batch: Batch) -> Params:
        """Parameters, float32; those of the mlp over positions depend on S."""
        return hk.transform(lambda: weights.make(self, self._length(batch))).init(rng)

    def init_carry(self, batch: Batch) -> Carry:
        """Every row waits for a puzzle."""
        shape = (batch["inputs"].shape[0], self._length(batch), self.embed_dim)
        zeros = jnp.zeros(shape, self.dtype)
        return halting.all_halted(batch, States(zeros, (zeros,) * self.num_latents))

    def loss(
        self, params: Params, carry: Carry, rng: jax.Array, batch: Batch, *, is_training: bool = True
    ) -> tuple[Carry, LossOutput]:
        """One supervised step: the loss sums over all rows, metrics over those that halted; the weight is B.

        `extras` names the rows of the puzzle table that the step read. Evaluation calls `evaluate` instead.
        """
        del is_training
        w = self._cast(params, batch)
        carry = halting.refill(carry, batch, w.starts)
        now = self.curriculum and self.curriculum.at(carry.trained, h_cycles=self.h_cycles, l_cycles=self.l_cycles)
        states = self._recur(w, carry.states, self._embed(w, carry.data), now=now)
        outputs = self._heads(w, states)
        steps = carry.steps + 1
        rows = random_bits.row_ids(batch)
        exploration = self.exploration.at(carry.trained) if self._anneals else self.exploration
        halted = halting.halts(outputs.q_halt, steps, rng, rows, most=self.halt_max_steps, exploration=exploration)
        scores = self._score(outputs, carry.data["labels"])
        out = halting.sums(scores, outputs.q_halt, steps, rows=jnp.ones_like(halted), counted=halted & scores.labelled)
        extras = {"puzzle_table": carry.data["puzzle_ids"]} if self.puzzle_width else {}
        carry = Carry(jax.lax.stop_gradient(states), steps, halted, carry.data, carry.trained + 1)
        return carry, out._replace(extras=extras)

    def evaluate(self, params: Params, rng: jax.Array, batch: Batch) -> LossOutput:
        """Exactly `halt_max_steps` steps on fresh states: sums of the last one over rows that have labels.

        Metrics also hold the exact accuracy after every step, as `exact_accuracy_step_03`; extras are the answers by
        row: `inputs` and `predicted` [B, S], `puzzle_ids` [B], int32, and the logit `q_halt` [B].
        """
        del rng  # nothing is drawn
        w = self._cast(params, batch)
        x = self._embed(w, batch)

        def step(states: States, _: None) -> tuple[States, jax.Array]:
            states = self._recur(w, states, x)
            scores = self._score(self._heads(w, states), batch["labels"])
            return states, jnp.sum(scores.right & scores.labelled, dtype=jnp.float32)

        states, right = jax.lax.scan(step, self._fresh(w, batch), length=self.halt_max_steps)
        outputs = self._heads(w, states)
        scores = self._score(outputs, batch["labels"])
        steps = jnp.full_like(batch["puzzle_ids"], self.halt_max_steps)
        out = halting.sums(scores, outputs.q_halt, steps, rows=scores.labelled, counted=scores.labelled)
        by_step = {
            f"exact_accuracy_step_{i + 1:02d}": out.metrics["exact_accuracy"]._replace(total=right[i])
            for i in range(self.halt_max_steps)
        }
        answers = {
            "inputs": batch["inputs"],
            "puzzle_ids": batch["puzzle_ids"],
            "predicted": halting.tokens(outputs, vocab_size=self.vocab_size),
            "q_halt": outputs.q_halt,
        }
        return out._replace(metrics={**out.metrics, **by_step}, extras=answers)

    def predict(self, params: Params, batch: Batch) -> Outputs:
        """What the heads say after `halt_max_steps` steps on fresh states; argmax over the vocabulary is the answer."""
        w = self._cast(params, batch)
        x = self._embed(w, batch)
        states, _ = jax.lax.scan(
            lambda s, _: (self._recur(w, s, x), None), self._fresh(w, batch), length=self.halt_max_steps
        )
        return self._heads(w, states)

    def flops_per_row(self, length: int, *, early: int | None = None) -> float:
        """Training FLOPs of one row of S = `length` cells in one step: all cycles forward, the last one backward.

        `early`: calls of the network in cycles without a gradient, where it is not all of them.
        """
        d, f, t = self.embed_dim, self.mlp_width(self.embed_dim), length + self.prefix_length
        if self.mixer == "mlp":
            layer = 6.0 * d * t * self.mlp_width(t) + 6.0 * t * d * f
        else:
            layer = 2.0 * t * (4 * d * d + 3 * d * f) + 4.0 * t * t * d
        calls = self.l_cycles + 1
        early = calls * (self.h_cycles - 1) if early is None else early
        backward = 2 * (2 if self.gradient == "last_calls" else calls)
        heads = 6.0 * length * d * self.stored_vocab_size
        return (early + calls + backward) * self.num_layers * layer + heads

    def flops_per_token(self, length: int) -> float:
        """The same, by cell."""
        return self.flops_per_row(length) / length

    def training_flops(self, length: int, *, rows: int, steps: int) -> float:
        """Of a run of `steps` steps of `rows` rows, less the cycles without a gradient that a curriculum leaves out."""
        if self.curriculum is None:
            return self.flops_per_row(length) * rows * steps
        stages = self.curriculum.stages(steps, h_cycles=self.h_cycles, l_cycles=self.l_cycles)
        each = (n * self.flops_per_row(length, early=(outer - 1) * (inner + 1)) for n, outer, inner in stages)
        return rows * sum(each)

    def shrink(self, multiples: Mapping[str, int]) -> TRM:
        """The smallest model of this kind whose dimensions are multiples of `multiples`, by logical axis."""
        heads = multiples["heads"]
        unit = math.lcm(16, multiples["embed"], 2 * heads * multiples["head_dim"])
        positions = math.lcm(multiples["length"], multiples["residual_length"])
        h_cycles, l_cycles = min(self.h_cycles, 2), min(self.l_cycles, 2)
        first = self.curriculum and dataclasses.replace(
            self.curriculum,
            h_cycles=min(h_cycles, self.curriculum.h_cycles),
            l_cycles=min(l_cycles, self.curriculum.l_cycles),
        )
        return dataclasses.replace(
            self,
            embed_dim=unit,
            num_heads=heads,
            num_layers=1,
            puzzle_dim=None if self.puzzle_width else 0,
            prefix_length=math.lcm(positions, self.prefix_length) if self.prefix_length else 0,
            vocab_multiple=math.lcm(self.vocab_multiple, multiples["vocab"]),
            puzzle_multiple=math.lcm(self.puzzle_multiple, multiples["puzzles"]),
            h_cycles=h_cycles,
            l_cycles=l_cycles,
            curriculum=first,
            halt_max_steps=min(self.halt_max_steps, 4),
        )

    @property
    def _anneals(self) -> bool:
        return isinstance(self.exploration, Linear)

    @property
    def num_latents(self) -> int:
        """How many states there are beside the answer."""
        return {"two": 1, "single": 0, "many": self.l_cycles}[self.latents]

    def _length(self, batch: Batch) -> int:
        return self.prefix_length + batch["inputs"].shape[1]

    def mlp_width(self, width: int) -> int:
        """Hidden units of a feed-forward layer over `width` inputs."""
        return math.ceil(round(self.expansion * width * 2 / 3) / 256) * 256

    def _cast(self, params: Params, batch: Batch) -> Weights:
        return hk.transform(lambda: weights.make(self, self._length(batch))).apply(params, None)

    def _embed(self, w: Weights, data: Mapping[str, jax.Array]) -> jax.Array:
        """[B, T, D]: the puzzle's vector and the cells, times sqrt(D)."""
        x = derivatives.embedded(w.embedding, data["inputs"], ("batch", None), self.dtype)  # [B, S, D]
        if self.prefix_length:
            rows = w.puzzle_table[data["puzzle_ids"]].astype(self.dtype)  # [B, puzzle_dim]
            flat = jnp.pad(rows, ((0, 0), (0, self.prefix_length * self.embed_dim - self.puzzle_width)))
            x = jnp.concatenate([flat.reshape(-1, self.prefix_length, self.embed_dim), x], axis=1)  # [B, T, D]
        if w.positions is not None:
            x = math.sqrt(0.5) * (x + w.positions)
        return logical.constrain(math.sqrt(self.embed_dim) * x, "batch", "residual_length", "embed")

    def _fresh(self, w: Weights, batch: Batch) -> States:
        return halting.refill(self.init_carry(batch), batch, w.starts).states

    def _recur(self, w: Weights, states: States, x: jax.Array, *, now=None) -> States:
        run = functools.partial(net.run, w.layers, net=self._net, recursion=self.recursion, now=now)
        if self.mixer == "attention":
            return run(states, x)
        turn = functools.partial(jax.tree.map, lambda a: jnp.swapaxes(a, 0, 1))  # [B, T, D] <-> [T, B, D]
        return turn(run(turn(states), turn(x)))

    def _net(self, layers: tuple[Mapping[str, jax.Array], ...], x: jax.Array) -> jax.Array:
        for block in layers:
            if self.mixer == "attention":
                theta = self.rope_theta if self.positions in ("auto", "rope") else None
                x = net.attention_block(block, x, theta=theta, eps=self.norm_eps)
            else:
                x = net.mixing_block(block, x, eps=self.norm_eps)
        return x

    def _heads(self, w: Weights, states: States) -> Outputs:
        logits = states.z_h[:, self.prefix_length :] @ w.unembedding  # [B, S, V]
        q = (states.z_h[:, 0] @ w.halt_head + w.halt_bias).astype(jnp.float32)  # [B, 2]
        return Outputs(logical.constrain(logits, "batch", "length", "vocab"), q[:, 0], q[:, 1])

    def _score(self, outputs: Outputs, labels: jax.Array) -> halting.Scores:
        log_probabilities = LOG_PROBABILITIES[self.probabilities]
        return halting.score(outputs, labels, vocab_size=self.vocab_size, log_probabilities=log_probabilities)
