"""Finds the assistant's answers in a formatted conversation, and the tokens that end them."""

import datetime
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from core.errors import UserError
from tasks.text.chat_templates import Message, Range
from tasks.text.ids import ChatVocabulary

ASSISTANT = "assistant"
DATE = datetime.date(2024, 7, 26)  # for templates that print today's date; Llama 3's default
_PROBE = ("What swims?", "Seven swans.", "And what flies?", "Nine geese.")  # messages of user and assistant in turns


def formatted(
    messages: Sequence[Message],
    vocabulary: ChatVocabulary,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
) -> tuple[str, list[Range]]:
    """Returns a formatted conversation, and the range of characters of each answer.

    If the chat template has `{% generation %}` tags, they mark the ranges.

    Args:
      messages: the conversation.
      vocabulary: has the chat template.
      tools, documents: objects for the template; None: none.

    Raises:
      UserError: the template fails, or its answers cannot be found.
    """
    given: dict[str, Any] = {"date": DATE, "tools": tools, "documents": documents}
    if (marked := vocabulary.marked_chat(messages, **given)) is not None:
        text, answers = marked
        if not any(first < last for first, last in answers):
            raise UserError(
                "the chat template has {% generation %} tags, but they mark nothing of this conversation; correct the "
                "chat_template of the folder"
            )
    else:
        text = vocabulary.chat(messages, add_generation_prompt=False, **given)
        answers = _between_prompts(text, messages, vocabulary, given)
    if text.split() == "".join(f" {message['content']} " for message in messages).split():
        raise UserError(
            "the chat template shows the contents of messages without their roles, so that a model could not tell "
            "questions from answers; correct the chat_template of the folder"
        )
    return text, answers


def _between_prompts(
    text: str, messages: Sequence[Message], vocabulary: ChatVocabulary, given: Mapping[str, Any]
) -> list[Range]:
    """Returns the range of each answer in `text`: from the end of its prompt to the end of its turn."""
    answers = []
    for index, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before = vocabulary.chat(messages[:index], add_generation_prompt=True, **given)
        until = vocabulary.chat(messages[: index + 1], add_generation_prompt=False, **given)
        if not until.startswith(before) or not text.startswith(until):
            raise UserError(
                f"the chat template formats message {index + 1} differently when others follow it, so its tokens "
                "cannot be found; write one line per answer, with the messages before it"
            )
        answers.append((len(before), len(until.rstrip())))
    return answers


def turn_ends(vocabulary: ChatVocabulary) -> tuple[int, ...]:
    """Returns the ids that end an answer in the chat template's format; () if none is found."""
    # Templates of models of images read lists of parts. With two messages: some format the last answer differently.
    for in_parts, count in itertools.product((False, True), (len(_PROBE), 2)):
        contents: list[Any] = [[{"type": "text", "text": text}] if in_parts else text for text in _PROBE[:count]]
        messages = [{"role": ("user", ASSISTANT)[i % 2], "content": content} for i, content in enumerate(contents)]
        try:
            text, answers = formatted(messages, vocabulary)
        except UserError:
            continue
        found = [_end(text, answer, answers, vocabulary) for answer in _PROBE[1:count:2]]
        if ends := tuple(dict.fromkeys(end for end in found if end is not None)):
            return ends
    return ()


def _end(text: str, content: str, answers: Sequence[Range], vocabulary: ChatVocabulary) -> int | None:
    if (place := text.rfind(content)) < 0:
        return None
    start = place + len(content)
    stop = next((last for first, last in answers if first < start <= last), start)
    spans = zip(*vocabulary.encode_with_offsets(text), strict=True)
    after = [i for i, (first, last) in spans if first >= start and last <= stop and text[first:last].strip()]
    special = [i for i in after if i == vocabulary.eos_id or i in vocabulary.added_ids]
    return next(iter(special or (after if len(after) == 1 else ())), None)
