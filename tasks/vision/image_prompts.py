"""How a published model reads images: their pixels, and the tokens that stand for them in a text.

"USER: <image> What?"   ->   "USER: <image><image>…<image> What?"     one token for each vector of the image
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from core import units
from core.checkpoints.image_processor import ImageInput
from core.errors import UserError
from tasks.text import chat_answers
from tasks.text.ids import Vocabulary, with_bos, with_eos
from tasks.text.tokenizer_folders import FolderTokenizer
from tasks.vision import prepared
from tasks.vision.prepared import Frames

_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"
_ONE_FRAME = Frames(np.zeros((1, 0, 0, 3), np.uint8))


@dataclasses.dataclass(frozen=True)
class ImagePrompts:
    """Prepares the images of a model's prompts, and writes their tokens.

    Attributes:
      input: how the model reads images.
      token: the text of an image token; "" if the folder has no tokenizer.
    """

    input: ImageInput
    token: str

    def prepared(self, content: bytes) -> Frames:
        """Returns a file's image as the model reads it; raises UnreadableImage."""
        return prepared.prepare(content, self.input.processor)

    def parts(self, text: str) -> list[str]:
        """Returns the texts before, between and after the image tokens of a prompt."""
        return text.split(self.token) if self.token else [text]

    def expanded(self, parts: Sequence[str], images: Sequence[Frames]) -> str:
        """Returns a prompt with as many image tokens as its images have vectors."""
        written = [*map(self._tokens, images), ""]
        return "".join(part + tokens for part, tokens in zip(parts, written, strict=True))

    def _tokens(self, frames: Frames) -> str:
        tokens = self.token * self.input.image_tokens
        if not self.input.has_frames:
            return tokens
        lines = []
        for row in range(1, frames.rows + 1):
            lines += [f"{_AROUND}<row_{row}_col_{column}>{tokens}" for column in range(1, frames.columns + 1)] + ["\n"]
        if lines:
            lines.append("\n")  # an empty line before the whole image
        return "".join([*lines, f"{_AROUND}{_WHOLE}{tokens}{_AROUND}"])


def of(images: ImageInput, vocabulary: FolderTokenizer | None) -> ImagePrompts:
    """Returns the `ImagePrompts` of a model; `vocabulary` is its tokenizer, None if it has none."""
    return ImagePrompts(images, "" if vocabulary is None else vocabulary.token_of(images.token_id))


def of_training(
    images: ImageInput, vocabulary: Vocabulary, *, image_size: int | None, image_tokens: int | None
) -> ImagePrompts:
    """Returns the `ImagePrompts` of rows for training, whose images are one frame each.

    Args:
      image_size: must be the model's, if given.
      image_tokens: None: the model's.

    Raises:
      UserError: `image_size` or `vocabulary` does not fit the model.
    """
    if image_size not in (None, images.image_size):
        raise UserError(
            f"vision.questions.image_size = {image_size!r}: the model in {images.folder} reads images of "
            f"{images.image_size} pixels; leave it out"
        )
    if not isinstance(vocabulary, FolderTokenizer):
        raise UserError(
            f"vision.questions.vocabulary is {vocabulary.describe()}: expected @vocabularies.tokenizer() with the "
            f"tokenizer and the chat template of {images.folder}, because vision.questions.image_input is set"
        )
    count = images.image_tokens if image_tokens is None else image_tokens
    processor = dataclasses.replace(images.processor, splits=False)
    return of(dataclasses.replace(images, processor=processor, image_tokens=count), vocabulary)


def row_ids(
    question: str, answer: str, prompts: ImagePrompts, vocabulary: FolderTokenizer, *, ends: bool
) -> tuple[list[int], list[int]]:
    """Returns the ids of a question about one image, with its image tokens, and those of the answer.

    Args:
      vocabulary: has the chat template that formats the texts as a conversation.
      ends: whether the end-of-document id follows an answer whose end the template does not mark.

    Raises:
      UserError: image tokens are missing, too many, or in the answer.
    """
    asked: list[dict[str, str]] = [{"type": "image"}, {"type": "text", "text": question}]
    said: list[dict[str, str]] = [{"type": "text", "text": answer}]
    messages = [{"role": "user", "content": asked}, {"role": chat_answers.ASSISTANT, "content": said}]
    text, ranges = chat_answers.formatted(messages, vocabulary)
    first, last = ranges[-1]
    parts = prompts.parts(text[:first])
    if len(parts) != 2:
        raise UserError(
            f"the chat template of {vocabulary.path} writes {units.counted(len(parts) - 1, 'image token')} "
            f"{prompts.token} for a question about one image: expected one; remove it from the question, or correct "
            "the chat_template of the folder"
        )
    before = prompts.expanded(parts, [_ONE_FRAME])
    ids, offsets = vocabulary.encode_with_offsets(before + text[first:])
    asked_ids = sum(end <= len(before) for _, end in offsets)
    until = sum(start < len(before) + last - first for start, _ in offsets)
    prompt, answered = ids[:asked_ids], ids[asked_ids:until]
    if vocabulary.begins_with_bos:
        prompt = with_bos(prompt, vocabulary)  # as processors do
    if prompts.input.token_id in answered:
        raise UserError(f"the answer contains {prompts.token}, which stands for an image: remove it from the answer")
    is_ended = answered[-1:] and answered[-1] in vocabulary.turn_ends
    return prompt, answered if is_ended or not ends else with_eos(answered, vocabulary)
