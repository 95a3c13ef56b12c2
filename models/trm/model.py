"""The Tiny Recursive Model: completes a grid of tokens.

    x = sqrt(D) [puzzle embedding, 0 … 0 | E[inputs]]     the prefix, then the cells
    y, z = recursion(y, z, x);   logits = y U without the prefix;   q_halt, q_continue = y[0] W + b

y is the answer, z the latent states, E the embedding, U the output matrix; W and b are those of the halting head.
Jolicoeur-Martineau 2025, "Less is more: recursive reasoning with tiny networks", and its code.

B batch, S positions of a puzzle, T positions with prefix, D embed, V vocab as stored.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import ClassVar

import haiku as hk
import jax
import jax.numpy as jnp

from core import logical, random_bits
from core.types import Batch, LossOutput, Params
from models import derivatives, losses
from models.trm import halting, net, weights
from models.trm.config import Config
from models.trm.halting import Carry, Outputs
from models.trm.net import States
from models.trm.schedules import Linear
from models.trm.weights import Weights

_LOG_PROBABILITIES = {"stablemax": losses.log_stablemax, "softmax": losses.log_softmax}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TRM(Config):
    """The Tiny Recursive Model; its fields are those of `models.trm.config.Config`.

    Batches have `inputs`, `labels` [B, S] (-100 is ignored) and `puzzle_ids` [B], int32.
    """

    couples_rows: ClassVar[bool] = False

    def init(self, rng: jax.Array, batch: Batch) -> Params:
        return hk.transform(lambda: weights.make(self, self._length(batch))).init(rng)

    def init_carry(self, batch: Batch) -> Carry:
        """Returns a carry in which every row takes a new puzzle next."""
        shape = (batch["inputs"].shape[0], self._length(batch), self.embed_dim)
        zeros = jnp.zeros(shape, self.dtype)
        return halting.all_halted(batch, States(zeros, (zeros,) * self.num_latents))

    def loss(
        self, params: Params, carry: Carry, rng: jax.Array, batch: Batch, *, is_training: bool = True
    ) -> tuple[Carry, LossOutput]:
        """Runs one supervised step; returns the next carry, and the loss summed over rows.

        Accuracies and the metric `steps` are over the rows with labels that halted.
        """
        del is_training
        w = self._cast(params, batch)
        carry = halting.refill(carry, batch, w.starts)
        now = self.curriculum and self.curriculum.at(carry.trained, h_cycles=self.h_cycles, l_cycles=self.l_cycles)
        states = self._recur(w, carry.states, self._embed(w, carry.data), now=now)
        outputs = self._heads(w, states)
        steps = carry.steps + 1
        rows = random_bits.row_ids(batch)
        p = self.exploration
        exploration = p.at(carry.trained) if isinstance(p, Linear) else p
        halted = halting.halts(outputs.q_halt, steps, rng, rows, most=self.halt_max_steps, exploration=exploration)
        scores = self._score(outputs, carry.data["labels"])
        out = halting.sums(scores, outputs.q_halt, steps, rows=jnp.ones_like(halted), counted=halted & scores.labeled)
        extras = {"puzzle_table": carry.data["puzzle_ids"]} if self.puzzle_width else {}
        carry = Carry(jax.lax.stop_gradient(states), steps, halted, carry.data, carry.trained + 1)
        return carry, out._replace(extras=extras)

    def evaluate(self, params: Params, rng: jax.Array, batch: Batch) -> LossOutput:
        """Runs `halt_max_steps` steps from the initial states; sums the last step's results over rows with labels.

        Metrics include the exact accuracy after each step, as `exact_accuracy_step_03`.
        """
        del rng  # evaluation is deterministic
        w = self._cast(params, batch)
        x = self._embed(w, batch)

        def step(states: States, _: None) -> tuple[States, jax.Array]:
            states = self._recur(w, states, x)
            scores = self._score(self._heads(w, states), batch["labels"])
            return states, jnp.sum(scores.right & scores.labeled, dtype=jnp.float32)

        states, right = jax.lax.scan(step, self._fresh(w, batch), length=self.halt_max_steps)
        outputs = self._heads(w, states)
        scores = self._score(outputs, batch["labels"])
        steps = jnp.full_like(batch["puzzle_ids"], self.halt_max_steps)
        out = halting.sums(scores, outputs.q_halt, steps, rows=scores.labeled, counted=scores.labeled)
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
        """Returns the heads' outputs after `halt_max_steps` steps; a batch needs no `labels`."""
        batch = {"labels": batch["inputs"], **batch}  # which are not read
        w = self._cast(params, batch)
        x = self._embed(w, batch)
        states, _ = jax.lax.scan(
            lambda s, _: (self._recur(w, s, x), None), self._fresh(w, batch), length=self.halt_max_steps
        )
        return self._heads(w, states)

    def flops_per_row(self, length: int, *, early: int | None = None) -> float:
        """Returns the training FLOPs of one row of `length` cells in one step, without recomputation.

        `early` is the number of network calls in the cycles before the last; None: as many as without a curriculum.
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
        """Returns the training FLOPs of one cell in one step."""
        return self.flops_per_row(length) / length

    def training_flops(self, length: int, *, rows: int, steps: int) -> float:
        """Returns the FLOPs of `steps` training steps with `rows` rows of `length` cells."""
        if self.curriculum is None:
            return self.flops_per_row(length) * rows * steps
        stages = self.curriculum.stages(steps, h_cycles=self.h_cycles, l_cycles=self.l_cycles)
        each = (n * self.flops_per_row(length, early=(outer - 1) * (inner + 1)) for n, outer, inner in stages)
        return rows * sum(each)

    def shrink(self, multiples: Mapping[str, int]) -> TRM:
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

    def _length(self, batch: Batch) -> int:
        return self.prefix_length + batch["inputs"].shape[1]

    def _cast(self, params: Params, batch: Batch) -> Weights:
        return hk.transform(lambda: weights.make(self, self._length(batch))).apply(params, None)

    def _embed(self, w: Weights, data: Mapping[str, jax.Array]) -> jax.Array:
        x = derivatives.embedded(w.embedding, data["inputs"], ("batch", None), self.dtype)  # [B, S, D]
        if self.prefix_length:
            assert w.puzzle_table is not None
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
        swap = functools.partial(jax.tree.map, lambda a: jnp.swapaxes(a, 0, 1))  # [B, T, D] <-> [T, B, D]
        return swap(run(swap(states), swap(x)))

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
        log_probabilities = _LOG_PROBABILITIES[self.probabilities]
        return halting.score(outputs, labels, vocab_size=self.vocab_size, log_probabilities=log_probabilities)
