"""The settings of `models.decoder.chunk_planner`."""

import dataclasses

from core.errors import UserError, check_integer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planner:
    """A planner over chunks of a row (experimental, `models.decoder.chunk_planner`).

    Attributes:
      chunk: number of positions that are summarized together.
      layers: number of layers of each of the two stacks, low and high.
      high_steps: number of steps of the high stack.
      low_steps: number of steps of the low stack for each step of the high one.
      causal: must be True.
    """

    chunk: int
    layers: int = 1
    high_steps: int = 2
    low_steps: int = 2
    causal: bool = True

    def __post_init__(self):
        for field in ("chunk", "layers", "high_steps", "low_steps"):
            check_integer(getattr(self, field), where=f"Planner.{field}", least=1)
        if not self.causal:
            raise UserError(
                "Planner.causal = False: a plan of whole rows shows a language model the tokens to be predicted; "
                "set causal = True"
            )
