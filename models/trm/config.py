"""The configuration of the Tiny Recursive Model."""

import dataclasses
import math

from core.errors import UserError
from models.trm import net
from models.trm.net import Recursion
from models.trm.schedules import Curriculum, Linear

MIXERS = ("attention", "mlp")
POSITIONS = ("rope", "learned", "none")
PROBABILITIES = ("stablemax", "softmax")
_DTYPES = ("bfloat16", "float32", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The configuration of a Tiny Recursive Model.

    Attributes:
      vocab_size: number of different tokens that a cell can have.
      embed_dim, num_heads, num_layers: sizes of the network; num_heads is read by attention only.
      expansion: a feed-forward layer has expansion * 2/3 hidden units per input, rounded up to a multiple of 256.
      mixer: "attention", or "mlp": a feed-forward layer over positions.
      positions: how cells know their position: "rope", "learned" or "none"; "auto": "rope" for attention, else "none".
      h_cycles, l_cycles: outer and inner cycles of the recursion.
      latents, gradient, remat, unroll: see `models.trm.net.Recursion`.
      num_puzzles: number of puzzle ids.
      puzzle_dim: width of the embedding of a puzzle id; None: embed_dim; 0: ids have no embeddings.
      prefix_length: positions before the cells, for the puzzle's embedding; 0 if puzzle_dim is 0.
      halt_bias: initial bias of the halting head.
      halt_max_steps: most steps for a puzzle in training, and the number of steps in evaluation.
      exploration: probability that a row may not halt before a drawn number of steps.
      curriculum: how the cycles grow to h_cycles and l_cycles; None: all cycles from the start.
      probabilities: how the token loss turns logits into probabilities: "stablemax" or "softmax".
      dtype: compute dtype, "bfloat16", "float32" or "float16".
      rope_theta, norm_eps: constants of the rotary embedding and of RMSNorm.
      vocab_multiple, puzzle_multiple: the tables of tokens and puzzles are padded to multiples of these numbers of
        rows.
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
                raise UserError(f"TRM.{field} = {getattr(self, field)}: expected at least 1")
        choices = {
            "mixer": MIXERS,
            "positions": ("auto", *POSITIONS),
            "latents": net.LATENTS,
            "gradient": net.GRADIENTS,
            "remat": net.REMAT_CHOICES,
            "probabilities": PROBABILITIES,
            "dtype": _DTYPES,
        }
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise UserError(f"TRM.{field} = {getattr(self, field)!r}: expected one of {', '.join(allowed)}")
        p = self.exploration
        ends = (p.start, p.end) if isinstance(p, Linear) else (p,)
        if not all(0 <= p <= 1 for p in ends):
            raise UserError(f"TRM.exploration = {self.exploration}: expected a probability in [0, 1]")
        if not self.expansion > 0:
            raise UserError(f"TRM.expansion = {self.expansion}: expected a positive number")
        self._check_shapes()
        self._check_curriculum()

    def _check_curriculum(self) -> None:
        if self.curriculum is None:
            return
        if self.latents == "many":
            raise UserError("TRM: latents = 'many' has one latent per cycle and does not support a curriculum")
        for field in ("h_cycles", "l_cycles"):
            first, last = getattr(self.curriculum, field), getattr(self, field)
            if first > last:
                raise UserError(f"TRM: the curriculum starts with {field} = {first}, above the model's {last}")

    def _check_shapes(self) -> None:
        if self.mixer == "attention" and self.embed_dim % (2 * self.num_heads):
            raise UserError(
                f"TRM: embed_dim = {self.embed_dim} does not divide into num_heads = {self.num_heads} heads of even "
                "size"
            )
        if self.mixer == "mlp" and self.positions == "rope":
            raise UserError(
                "TRM: positions = 'rope' rotates queries and keys, but mixer = 'mlp' has none; use positions = 'none'"
            )
        if self.prefix_length * self.embed_dim < self.puzzle_width:
            raise UserError(
                f"TRM: a puzzle embedding of puzzle_dim = {self.puzzle_width} does not fit into prefix_length = "
                f"{self.prefix_length} positions of embed_dim = {self.embed_dim}"
            )
        if self.prefix_length and not self.puzzle_width:
            raise UserError(f"TRM: puzzle_dim = 0 leaves prefix_length = {self.prefix_length} empty; set it to 0 too")

    @property
    def puzzle_width(self) -> int:
        """The width of a puzzle's embedding; 0: there is no puzzle table."""
        return self.embed_dim if self.puzzle_dim is None else self.puzzle_dim

    @property
    def stored_vocab_size(self) -> int:
        """The size of the vocabulary, rounded up to a multiple of `vocab_multiple`."""
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple

    @property
    def recursion(self) -> Recursion:
        """The structure of the recursion."""
        return Recursion(self.h_cycles, self.l_cycles, self.latents, self.gradient, self.remat, self.unroll)

    @property
    def anneals(self) -> bool:
        """Whether the exploration probability follows a schedule."""
        return isinstance(self.exploration, Linear)

    @property
    def effective_depth(self) -> int:
        """The number of layers applied in sequence in one step, with all cycles."""
        return self.h_cycles * (self.l_cycles + 1) * self.num_layers

    @property
    def num_latents(self) -> int:
        """The number of latent states z."""
        return {"two": 1, "single": 0, "many": self.l_cycles}[self.latents]

    def mlp_width(self, width: int) -> int:
        """Returns the number of hidden units of a feed-forward layer over `width` inputs."""
        return math.ceil(round(self.expansion * width * 2 / 3) / 256) * 256
