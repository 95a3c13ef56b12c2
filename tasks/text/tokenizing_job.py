"""The settings of `launch/run tokenize`."""

import dataclasses
from collections.abc import Sequence

from core.errors import Problem, UserError
from tasks.text.filters import Filters
from tasks.text.hub_source import HuggingFace
from tasks.text.ids import Vocabulary
from tasks.text.text_files import TextFiles
from tasks.text.tfds_source import Tfds

_FLAGS = {"text.files.train": "--data", "text.files.validation": "--validation", "VOCABULARY": "--vocabulary"}


@dataclasses.dataclass(frozen=True)
class Job:
    """The sources, the vocabulary and the output of a token cache.

    Attributes:
      data: patterns of files; or one dataset, `tfds:NAME` or `hub:OWNER/NAME`, whose split `train` is read.
      validation: patterns of files, or a split of the dataset; if empty, 5 % of the documents, chosen by hash.
      field: the JSON key, or the column, of the text.
      vocabulary: as `vocabularies.named` takes it.
      out: the folder of the cache, local or gs://.
      skip_bad: whether malformed documents are skipped and counted; otherwise they are refused.
      filters: which documents for training are left out and counted. A split by hash is made after near duplicates are
        left out.
    """

    data: tuple[str, ...]
    validation: tuple[str, ...]
    field: str
    vocabulary: str
    out: str
    skip_bad: bool
    filters: Filters

    def source(self) -> TextFiles | Tfds | HuggingFace:
        """Returns the documents; the split by hash is made later, of their texts. Raises UserError for two datasets."""
        kind, _, name = self.data[0].partition(":")
        if kind not in ("tfds", "hub"):
            return TextFiles(self.data, self.validation or self.data, self.field)
        if len(self.data) > 1 or len(self.validation) > 1:
            raise UserError(
                "--data names a dataset and something else; give one dataset, and one split as --validation"
            )
        validation = self.validation[0] if self.validation else "train"
        if kind == "tfds":
            return Tfds(name, "train", validation, self.field, None)
        return HuggingFace(name, "train", validation, self.field, True)

    def problems(self, source: TextFiles | Tfds | HuggingFace) -> Sequence[str]:
        """Returns the problems of a source that are found before it is read; documents are tried unless `skip_bad`."""
        if not isinstance(source, TextFiles):
            return source.problems()
        given = dataclasses.replace(source, validation=self.validation)
        found = given.pattern_problems() if self.skip_bad else given.problems()
        return [_with_flag(one) for one in found]

    def vocabulary_problems(self, vocabulary: Vocabulary) -> list[str]:
        """Returns why a vocabulary cannot be used."""
        if not self.vocabulary:
            return [Problem("--vocabulary is not set", fix="give a SentencePiece model, or the folder of a tokenizer")]
        return [_with_flag(one) for one in vocabulary.problems()]


def _with_flag(problem: str) -> str:
    """Names the flag of this command where a problem names a setting of an experiment."""
    if isinstance(problem, Problem) and problem.setting in _FLAGS:
        return problem.with_setting(_FLAGS[problem.setting])
    return problem
