"""The settings of `launch/run tokenize`."""

import dataclasses

from core.errors import UserError
from tasks import decontamination
from tasks.catalogue import Tfds
from tasks.decontamination import Excluded
from tasks.huggingface import HuggingFace
from tasks.text_files import TextFiles


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
      exclude: patterns of files of evaluation sets (`decontamination.read`); documents for training that share text
        with them are left out and counted.
      exclude_words, exclude_characters: how much they share; see `decontamination.Excluded`.
      near_duplicates: the similarity at which a document repeats an earlier one (`near_duplicates.Seen`) and is left
        out; None keeps all. Documents of `validation` are not compared.
    """

    data: tuple[str, ...]
    validation: tuple[str, ...]
    field: str
    vocabulary: str
    out: str
    skip_bad: bool
    exclude: tuple[str, ...] = ()
    exclude_words: int | None = None
    exclude_characters: int | None = None
    near_duplicates: float | None = None

    def excluded(self) -> Excluded | None:
        """Reads the evaluation sets. Raises UserError, of `decontamination`."""
        if not self.exclude:
            return None
        texts = decontamination.read(self.exclude)
        return Excluded(texts, words=self.exclude_words, characters=self.exclude_characters)

    def source(self) -> TextFiles | Tfds | HuggingFace:
        """Returns the documents; the split by hash is made later, of their texts. Raises UserError for two datasets."""
        kind, _, name = self.data[0].partition(":")
        if kind not in ("tfds", "hub"):
            return TextFiles(self.data, self.validation or self.data, self.field)
        if len(self.data) > 1 or len(self.validation) > 1:
            raise UserError(
                "--data names a dataset and something else; give one dataset, and one split as --validation"
            )
        splits = ("train", *(self.validation or ("train",)))
        if kind == "tfds":
            return Tfds(name, *splits, self.field, None)
        return HuggingFace(name, *splits, self.field, True)

    def problems(self, source: TextFiles | Tfds | HuggingFace) -> list[str]:
        """Returns the problems of a source that are found before it is read; documents are tried unless `skip_bad`."""
        if not isinstance(source, TextFiles):
            return source.problems()
        given = dataclasses.replace(source, validation=self.validation)
        return given.pattern_problems() if self.skip_bad else given.problems()

    def as_flags(self, message: str) -> str:
        """Returns a message about `text.files` with the names of this command's flags."""
        flags = {
            "text.files.train": "--data",
            "text.files.validation": "--validation",
            "text.files.field": "--field",
            "VOCABULARY is not set: bind it to": "--vocabulary is not set: give",
            "set VOCABULARY to": "set --vocabulary to",
        }
        for name, flag in flags.items():
            message = message.replace(name, flag)
        return message
