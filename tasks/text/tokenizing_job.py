"""The settings of `launch/run tokenize`."""

import dataclasses
from collections.abc import Sequence

from core.errors import Problem, UserError
from tasks.text.filters import Filters
from tasks.text.hub_source import HuggingFace
from tasks.text.ids import Vocabulary
from tasks.text.text_files import TextFiles
from tasks.text.tfds_source import Tfds

_FLAGS = {
    "text.files.train": "--data",
    "text.files.validation": "--validation",
    "text.tfds.validation_split": "--validation",
    "text.huggingface.validation_split": "--validation",
    "VOCABULARY": "--vocabulary",
}


@dataclasses.dataclass(frozen=True)
class Job:
    """The sources, the vocabulary and the output of a token cache.

    Attributes:
      data: patterns of files; or one dataset (`tfds:NAME`, `hub:OWNER/NAME`), whose split `train` is read.
      validation: patterns of files, or a split of the dataset; (): 5% of the documents, chosen by hash.
      field: the JSON key, or the column, that has the text.
      vocabulary: the name of the vocabulary (`vocabularies.named`).
      out: the folder of the cache, local or gs://.
      skip_bad: whether malformed documents are skipped; otherwise the first one is an error.
      filters: which training documents are left out.
    """

    data: tuple[str, ...]
    validation: tuple[str, ...]
    field: str
    vocabulary: str
    out: str
    skip_bad: bool
    filters: Filters

    def source(self) -> TextFiles | Tfds | HuggingFace:
        """Returns the source; without `validation`, both of its splits are `data`.

        Raises UserError if a dataset is given with other data or several validation splits.
        """
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
        """Returns the problems of the source."""
        given = dataclasses.replace(source, validation=self.validation) if isinstance(source, TextFiles) else source
        found = given.pattern_problems() if isinstance(given, TextFiles) and self.skip_bad else given.problems()
        if self.validation:
            found = found or list[str](given.overlaps(remote=True))
        return [_with_flag(one) for one in found]

    def vocabulary_problems(self, vocabulary: Vocabulary) -> list[str]:
        """Returns the problems of this job's vocabulary, or that none is named."""
        if not self.vocabulary:
            return [Problem("--vocabulary is not set", fix="give a SentencePiece model, or the folder of a tokenizer")]
        return [_with_flag(one) for one in vocabulary.problems()]


def _with_flag(problem: str) -> str:
    """Returns a problem in which a flag of this command replaces the experiment's setting."""
    if isinstance(problem, Problem) and problem.setting in _FLAGS:
        return problem.with_setting(_FLAGS[problem.setting])
    return problem
