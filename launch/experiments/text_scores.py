"""Computes likelihoods of texts, and continuations up to a stop string, for language model benchmarks."""

import functools
from collections.abc import Sequence
from typing import Any

from core.errors import UserError
from core.types import LimitsCache, can
from launch.loaded_model import LoadedModel
from parallel.generation.likelihood import Likelihood, Pair, Scorer, windows
from parallel.generation.sampling import GREEDY, Sampling
from tasks.text.ids import with_bos as beginning_with_bos
from tasks.text.tokenizer_folders import FolderTokenizer

ROWS = 16  # prompts that are continued together


class TextScores:
    """Computes likelihoods and continuations with a loaded model.

    Attributes:
      model: the model, with a vocabulary.
    """

    def __init__(self, model: LoadedModel):
        """Raises UserError if the model has no vocabulary."""
        if model.vocabulary is None:
            raise UserError(
                f"{model.where} has no vocabulary, so it cannot be evaluated on texts: expected a model of text"
            )
        self.model = model

    @functools.cached_property
    def scorer(self) -> Scorer:
        """The scorer of likelihoods."""
        return Scorer(self.model.program, self.model.params)

    def encoded(self, text: str, *, with_bos: bool | None = None) -> list[int]:
        """Converts text to ids.

        `with_bos`: whether to begin with the begin-of-text id; None: as this model's texts begin.
        """
        vocabulary = self.model.vocabulary
        found = vocabulary.encode(text)
        begins = self.model.begins_with_bos if with_bos is None else with_bos
        return beginning_with_bos(found, vocabulary) if begins else found

    def likelihoods(self, pairs: Sequence[Pair]) -> list[Likelihood]:
        """Returns the likelihood of each continuation, given pairs of ids: context and continuation."""
        return self.scorer.score(pairs)

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """Returns the log-likelihood of each whole text in nats, given the begin-of-text id.

        A text longer than the model's positions is cut into parts, each with as much context before it as fits.
        """
        prefix, length = self.model.vocabulary.bos_id, self.scorer.max_length
        parts = [windows(self.encoded(text, with_bos=False), prefix=prefix, length=length) for text in texts]
        found = iter(self.likelihoods([pair for part in parts for pair in part]))
        return [sum(next(found).log_likelihood for _ in part) for part in parts]

    def continued(
        self,
        prompts: Sequence[str],
        *,
        until: Sequence[str],
        max_tokens: int,
        sampling: Sampling = GREEDY,
        seed: int = 0,
    ) -> list[str]:
        """Continues each prompt, and cuts the continuation before the first stop string.

        The beginning of a prompt that is too long for the model is cut off.

        Args:
          prompts: the prompts, as text.
          until: stop strings; empty ones are ignored.
          max_tokens: most new ids per prompt.
          sampling: how ids are drawn; by default, the most likely one is taken.
          seed: seed of the draws.

        Raises:
          UserError: `max_tokens` leaves no position for a prompt.
        """
        most = self.model.generator.max_positions
        if most is not None and max_tokens >= most:
            raise UserError(
                f"{max_tokens} new tokens need more than the {most} positions of {self.model.where}: expected at most "
                f"{most - 1}"
            )
        until = [text for text in until if text]
        ids = [self.encoded(prompt) or [self.model.vocabulary.bos_id] for prompt in prompts]
        ids = ids if most is None else [one[-(most - max_tokens) :] for one in ids]
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))  # batches are padded to their longest prompt
        texts: dict[int, str] = {}
        of_model: Any = self.model.program.model
        waits = can(of_model, LimitsCache) and of_model.max_cached_positions is not None
        for first in range(0, len(order), ROWS):
            batch = order[first : first + ROWS]
            [found] = self.model.batches(
                [ids[i] for i in batch],
                rows=len(batch),
                max_tokens=max_tokens,
                sampling=sampling,
                seed=seed + first,
                on_tokens=_StopsEveryRow(self.model, until, [ids[i] for i in batch], waits=waits).add,
                stop_ids=self._special(until),
            )
            texts |= {i: cut(one.text, until) for i, one in zip(batch, found, strict=True)}
        return [texts[i] for i in range(len(ids))]

    def _special(self, until: Sequence[str]) -> list[int]:
        """Returns the ids of stop strings that are special tokens, which decoded text leaves out."""
        vocabulary = self.model.vocabulary
        if not isinstance(vocabulary, FolderTokenizer):
            return []
        encoded = [(text, vocabulary.encode(text)) for text in until]
        alone = [(text, ids[0]) for text, ids in encoded if len(ids) == 1 and not self.model.decoded(ids)]
        return [i for text, i in alone if vocabulary.token_of(i) == text]


class _StopsEveryRow:
    def __init__(self, model: LoadedModel, until: Sequence[str], prompts: Sequence[Sequence[int]], *, waits: bool):
        """`waits`: whether rows may begin after others have ended."""
        self._model, self._until, self._prompts = model, until, prompts
        self._ids: list[list[int]] = [[] for _ in prompts]
        self._stopped = [False] * len(prompts)
        self._waits = waits

    def add(self, ids: Sequence[int | None]) -> bool:
        for row, new in enumerate(ids):
            if new is None:  # the row has ended or, where rows wait for others, has not begun
                self._stopped[row] |= bool(self._ids[row]) or not self._waits
            elif not self._stopped[row]:
                self._ids[row].append(new)
                text = self._model.decoded(self._ids[row], after=self._prompts[row])
                self._stopped[row] = any(stop in text for stop in self._until)
        return all(self._stopped)


def cut(text: str, until: Sequence[str]) -> str:
    """Returns the text before the first of the stop strings; the whole text without one."""
    return text[: min((found for stop in until if (found := text.find(stop)) >= 0), default=len(text))]
