"""A decoder with mixtures of experts and a balancing loss (Fedus et al. 2022), and a strategy that spreads the experts.

B batch, T length, D embed, F mlp, H heads, K head_dim, V vocab, E experts, C tokens of a row that an expert takes.
"""

import dataclasses

import haiku as hk
import jax
import jax.numpy as jnp

from core import logical, stack
from core.types import WeightedSum
from models import losses
from models.decoder.attention import attention
from models.haiku_model import HaikuModel
from parallel import strategies

logical.declare("expert", "experts of a mixture")
INIT = hk.initializers.TruncatedNormal(0.02)


def experts_over_tensor(*, tensor: int) -> strategies.Strategy:
    """Like fsdp_tensor, but each chip of `tensor` holds whole experts, not a slice of every expert.

    In[E_t, B_f, D] · gather_f(Up[E_t, D_f, F]) → H[E_t, B_f, F];   H · gather_f(Down) → Out[B_f, D]  (summed over t)
    """
    return strategies.override(strategies.fsdp_tensor(tensor=tensor), {"expert": "tensor", "mlp": None})


@dataclasses.dataclass(frozen=True)
class Experts(HaikuModel):
    """Each token passes through one expert of every layer."""

    vocab_size: int
    num_layers: int = 4
    num_experts: int = 4
    num_heads: int = 4
    embed_dim: int = 64
    mlp_dim: int = 128
    capacity: float = 1.5
    balance: float = 0.01

    def sums(self, batch, *, is_training):
        """Cross-entropy, summed over supervised tokens, and the balancing loss, summed over layers."""
        table = logical.param("table", (self.vocab_size, self.embed_dim), ("vocab", "embed"), INIT)
        layers = stack.layer_stack(self._block, self.num_layers, outputs="summed")
        x, imbalance = layers(table[batch["inputs"]], batch["segment_ids"])
        sums = losses.cross_entropy(x @ table.T, batch["targets"], batch["weights"], vocab_size=self.vocab_size)
        metrics = {**sums.metrics, "imbalance": WeightedSum(imbalance / self.num_layers, sums.weight_sum)}
        return sums._replace(loss_sum=sums.loss_sum + self.balance * imbalance, metrics=metrics)

    def _block(self, x, segment_ids):
        shape = (self.embed_dim, 3, self.num_heads, self.embed_dim // self.num_heads)
        qkv = logical.param("qkv", shape, ("embed", None, "heads", "head_dim"), INIT)
        out = logical.param("out", (*shape[2:], self.embed_dim), ("heads", "head_dim", "embed"), INIT, in_dims=2)
        q, k, v = jnp.einsum("btd,dshk->sbthk", jax.nn.standardize(x), qkv)
        x += jnp.einsum("bthk,hkd->btd", attention.attend(q, k, v, segment_ids), out)
        y, imbalance = self._mixture(jax.nn.standardize(x), segment_ids > 0)
        return x + y, imbalance

    def _mixture(self, x, real):
        e, d, f = self.num_experts, self.embed_dim, self.mlp_dim
        router = logical.param("router", (d, e), ("embed", None), INIT)
        up = logical.param("up", (e, d, f), ("expert", "embed", "mlp"), INIT, stacked=1)
        down = logical.param("down", (e, f, d), ("expert", "mlp", "embed"), INIT, stacked=1)
        gates = jax.nn.softmax(x @ router) * real[..., None]  # [B, T, E]; padding goes to no expert
        chosen = jax.nn.one_hot(jnp.argmax(gates, axis=-1), e) * real[..., None]
        place = (jnp.cumsum(chosen, axis=1) - 1) * chosen  # of a token among those of its row and expert
        sent = jax.nn.one_hot(place, int(self.capacity * x.shape[1] / e)) * chosen[..., None]  # [B, T, E, C]
        taken = logical.constrain(jnp.einsum("btd,btec->ebcd", x, sent), "expert", "expert_batch", None, None)
        hidden = logical.constrain(jnp.einsum("ebcd,edf->ebcf", taken, up), "expert", "expert_batch", None, "mlp")
        y = jnp.einsum("ebcf,efd,btec->btd", jax.nn.gelu(hidden), down, sent * gates[..., None])
        per_row = jnp.sum(chosen.sum(1) * gates.sum(1), axis=-1) / jnp.maximum(real.sum(1), 1)
        return y, e * jnp.sum(per_row)  # for each token 1 if balanced, up to E if one expert takes all
