"""Reads conversations for fine-tuning from JSON lines; the loss covers only the answers.

A line has `messages`, which the chat template of the vocabulary formats, or `prompt` and `completion`, which are joined
as they are and followed by the end-of-document id.

  line -> text, answers (ranges of characters) -> ids, weights -> segment of at most T ids -> packed rows [R, T]

R: rows per element of a stream. T: tokens per row.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import numpy as np

from core import units
from core.errors import Problem, UserError
from core.files import paths
from tasks.streams import Stream
from tasks.text import content_hash, documents, packing, text_formats
from tasks.text.chat_answers import ASSISTANT, formatted
from tasks.text.documents import (
    VALIDATION_PERCENT,
    Corpus,
    File,
    StreamSpec,
    list_files,
    pattern_problems,
    validation_names,
)
from tasks.text.ids import ChatVocabulary, with_bos, with_eos

WINDOW_ROWS = 64
_MOST_TRIED = 1000  # lines in which a check looks for a conversation
ROLES = ("system", "developer", "user", "assistant", "tool")


class Chat(NamedTuple):
    """One conversation.

    Attributes:
      where: `file:line`, for messages.
      messages: () if the line has a prompt and a completion.
      tools, documents: for the chat template; None if the line has none.
      prompt, completion: "" if the line has messages.
    """

    where: str
    messages: tuple[Mapping[str, str], ...] = ()
    tools: list[Mapping[str, Any]] | None = None
    documents: list[Mapping[str, Any]] | None = None
    prompt: str = ""
    completion: str = ""


class _Line(NamedTuple):
    path: str
    number: int
    content: bytes

    def chat(self) -> Chat:
        found = read_chat(*self)
        assert found is not None
        return found


@dataclasses.dataclass(frozen=True)
class ChatFiles(Corpus):
    """A `documents.Corpus` of .jsonl files with a conversation on each line.

    Attributes:
      train: patterns of files.
      validation: patterns of files; (): about 5% of the training lines, chosen by hash.
      num_streams: number of streams that training reads.
    """

    train: tuple[str, ...]
    validation: tuple[str, ...]
    num_streams: int

    def named_files(self) -> tuple[str, ...]:
        return (*self.train, *self.validation)

    def open_stream(self, spec: StreamSpec) -> Stream:
        return ChatStream(self, spec)

    def lines(self, split: str) -> tuple[_Line, ...]:
        """Returns the conversations of a split. Raises UserError for an empty split."""
        found = self._splits[split]
        if not found:
            raise UserError(
                f"text.chats: no conversation for {split} in {', '.join(self.train)}; add lines, or set "
                "text.chats.validation"
            )
        return found

    @functools.cached_property
    def _splits(self) -> dict[str, tuple[_Line, ...]]:
        train, validation = (list(_lines(list_files(patterns))) for patterns in (self.train, self.validation))
        if not self.validation:
            chosen = validation_names(line.content.decode() for line in train)
            validation = [line for line in train if line.content.decode() in chosen]
            train = [line for line in train if line.content.decode() not in chosen]
        return {"train": tuple(train), "validation": tuple(validation)}

    def sample_texts(self) -> Iterator[str]:
        for line in self.lines("train"):
            chat = line.chat()
            yield "\n".join([*(message["content"] for message in chat.messages), chat.prompt + chat.completion])

    def problems(self) -> list[str]:
        if not self.train:
            return ["DATA is not set: bind it to your conversations, e.g. --gin \"DATA = '/data/chats.jsonl'\""]
        found: list[str] = []
        for name, patterns in (("train", self.train), ("validation", self.validation)):
            local = [pattern for pattern in patterns if not paths.is_remote(pattern)]
            wrong = pattern_problems(f"text.chats.{name}", local, kinds=(".jsonl",))
            files = () if wrong else list_files(tuple(local))
            first = functools.partial(documents.first_lines, read_chat)
            found += [*wrong, *documents.first_problems(files, first=first, where=f"text.chats.{name}")]
        if not found and not any(map(paths.is_remote, (*self.train, *self.validation))):
            least = {"train": self.num_streams, "validation": 1}  # the validation split is read as one stream
            try:
                found += [self._too_few(split) for split, lines in self._splits.items() if len(lines) < least[split]]
            except UserError as error:  # of a line behind those that were checked above
                found.append(str(error))
        return found

    def overlaps(self, *, remote: bool) -> list[Problem]:
        return documents.overlaps(self.train, self.validation, where="text.chats.validation", remote=remote)

    def first_conversation(self) -> Chat | None:
        """Returns a training line with messages; None if none is found, or a file is remote."""
        if any(map(paths.is_remote, (*self.train, *self.validation))):
            return None
        found = (line.chat() for line in self.lines("train")[:_MOST_TRIED])
        return next((chat for chat in found if chat.messages), None)

    def _too_few(self, split: str) -> str:
        if split == "validation":
            return f"{self.describe()}: no conversation for validation; add conversations, or set VALIDATION_DATA"
        counted = units.counted(len(self._splits[split]), "conversation")
        return (
            f"{self.describe()}: {counted} for {split} and {units.counted(self.num_streams, 'stream')}; set "
            "NUM_STREAMS lower, add conversations, or set VALIDATION_DATA"
        )

    def describe(self) -> str:
        validation = ", ".join(self.validation) or self._held_out()
        return f"text.chats: train {', '.join(self.train) or '(DATA is not set)'}; validation {validation}"

    def _held_out(self) -> str:
        try:
            splits = {} if any(map(paths.is_remote, self.train)) else self._splits
        except UserError:  # a malformed line, which `problems` reports
            splits = {}
        if not splits or not all(splits.values()):
            return f"{VALIDATION_PERCENT} % of it"
        total = units.counted(sum(map(len, splits.values())), "conversation")
        return f"{len(splits['validation']):,} of {total}, by hash (or set VALIDATION_DATA)"

    def fingerprint(self) -> str:
        train, validation = (
            [(file.name, file.size_bytes) for file in list_files(patterns)]
            for patterns in (self.train, self.validation)
        )
        listing = [train, validation] if validation else train
        return hashlib.sha256(repr(listing).encode()).hexdigest()

    def content_hash(self) -> str:
        return content_hash.of_files([f for patterns in (self.train, self.validation) for f in list_files(patterns)])


class ChatStream(packing.PackedStream):
    """A stream over every `num_streams`-th conversation of a split."""

    KINDS = MappingProxyType({"epoch": int, "next": int})

    def __init__(self, corpus: ChatFiles, spec: StreamSpec) -> None:
        super().__init__(spec)
        self._intake = documents.intake_of(corpus)
        self._lines = corpus.lines(spec.split)[spec.index :: spec.num_streams]
        if not self._lines:
            raise UserError(dataclasses.replace(corpus, num_streams=spec.num_streams)._too_few(spec.split))
        self._segments: dict[int, packing.Segment] = {}  # converted, by line; at most what fills a window
        self._room = WINDOW_ROWS * spec.length  # ids that may still be kept
        self._has_answers = False
        self._epoch = self._next = 0  # _next: place in the order of this epoch

    def _position(self) -> dict[str, int]:
        return {"epoch": self._epoch, "next": self._next}

    def _move(self, position: Mapping[str, int]) -> None:
        self._epoch, self._next = position["epoch"], position["next"]

    def _source_share(self) -> float:
        return self._next / len(self._lines)

    def _next_window(self) -> list[packing.Segment]:
        segments: list[packing.Segment] = []
        size = since = 0
        while size < WINDOW_ROWS * self._spec.length and not self._is_through():
            found = self._next_segment()
            since = 0 if found else since + 1
            if since == 2 * len(self._lines) - 1:  # contains a whole epoch, whatever the order of two successive ones
                raise self._no_answers()
            if found:
                segments.append(found)
                size += len(found.targets)
                self._has_answers = True
        if not self._has_answers:
            raise self._no_answers()
        return segments

    def _is_through(self) -> bool:
        return self._spec.once and self._next == len(self._lines)

    def _no_answers(self) -> UserError:
        purpose = " for validation" if self._spec.split == "validation" else ""
        return UserError(
            f"text.chats: none of {units.counted(len(self._lines), 'conversation')}{purpose} has an answer within "
            f"its first {self._spec.length} tokens; set LENGTH higher"
        )

    def _next_segment(self) -> packing.Segment | None:
        if self._next == len(self._lines):
            self._epoch, self._next = self._epoch + 1, 0
        found, length = self._converted(int(self._order(self._epoch)[self._next])), self._spec.length
        self._next += 1
        cut = packing.Segment(*(values[:length] for values in found))
        is_empty = not cut.weights.any()
        note = f"cut to {length} tokens" if len(found.targets) > length else None
        self._intake.count(f"skipped because no answer begins within {length} tokens" if is_empty else note)
        return None if is_empty else cut

    def _converted(self, number: int) -> packing.Segment:
        if (known := self._segments.get(number)) is not None:
            return known
        found = segment(self._lines[number].chat(), cast(ChatVocabulary, self._spec.vocabulary))
        if len(found.targets) <= self._room:
            self._segments[number] = found
            self._room -= len(found.targets)
        return found

    @functools.lru_cache(maxsize=2)  # noqa: B019 (two epochs of one stream)
    def _order(self, epoch: int) -> np.ndarray:
        spec, count = self._spec, len(self._lines)
        if spec.seed is None:
            return np.arange(count)
        return np.random.default_rng((spec.seed, spec.index, epoch)).permutation(count)


def read_chat(path: str, number: int, line: bytes) -> Chat | None:
    """Returns the conversation on a line; None if the line has only white space.

    Raises UserError if it has another format.
    """
    record, where = documents.json_line(path, number, line), f"{path}:{number}"
    if record is None and not line.strip():
        return None
    keys = set(record) if isinstance(record, dict) else set()
    if "messages" in keys:
        tools, told = (_objects(record.get(key), f"{where}: {key}") for key in ("tools", "documents"))
        return Chat(where, _messages(record["messages"], where), tools=tools, documents=told)
    if {"prompt", "completion"} <= keys:
        for key in ("prompt", "completion"):
            if not isinstance(record[key], str) or (key == "completion" and not record[key].strip()):
                raise UserError(f"{where}: {key} is {str(record[key])[:40]!r}, expected text")
            documents.encoded(record[key], where=where)
        return Chat(where, prompt=record["prompt"], completion=record["completion"])
    raise UserError(
        f"{where}: found {sorted(keys) or type(record).__name__}, expected messages, or prompt and completion"
    )


def segment(chat: Chat, vocabulary: ChatVocabulary) -> packing.Segment:
    """Converts a conversation to ids and weights. Raises UserError if the chat template fails."""
    if chat.messages:
        try:
            text, answers = formatted(chat.messages, vocabulary, tools=chat.tools, documents=chat.documents)
        except UserError as error:
            raise UserError(f"{chat.where}: {error}") from error
    else:
        text, answers = chat.prompt + chat.completion, [(len(chat.prompt), len(chat.prompt + chat.completion))]
    ids, offsets = vocabulary.encode_with_offsets(text)
    learned = [any(start < last and first < end for first, last in answers) for start, end in offsets]
    if not chat.messages:  # a template writes special tokens itself
        needs_bos = vocabulary.begins_with_bos or not chat.prompt  # the first id of the completion follows something
        begun = with_bos(ids, vocabulary) if needs_bos else ids
        learned = [False] * (len(begun) - len(ids)) + learned
        ids = with_eos(begun, vocabulary)
        learned += [True] * (len(ids) - len(begun))
    array, weights = np.asarray(ids, np.int32), np.asarray(learned, np.float32)
    return packing.Segment(array[:-1], array[1:], weights[1:])


def _messages(found: Any, where: str) -> tuple[Mapping[str, str], ...]:
    messages = found if isinstance(found, list) else []
    for number, message in enumerate(messages, 1):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in ROLES:
            raise UserError(f"{where}: message {number} has the role {role!r}, expected one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise UserError(f"{where}: message {number} has the content {str(content)[:40]!r}, expected text")
        if role == ASSISTANT and (number == 1 or not content.strip()):
            wrong = "is an answer without a question" if number == 1 else "is an empty answer"
            raise UserError(f"{where}: message {number} {wrong}; correct the line, or remove it")
        if unknown := sorted(set(message) - {"role", "content"}):
            raise UserError(
                f"{where}: message {number} has {unknown}, which would be dropped: expected role and content"
            )
        documents.encoded(content, where=where)
    if not any(message["role"] == ASSISTANT for message in messages):
        raise UserError(f"{where}: {units.counted(len(messages), 'message')} without an answer of the assistant")
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)


def _objects(found: Any, where: str) -> list[Mapping[str, Any]] | None:
    read = found
    if isinstance(found, str):
        with contextlib.suppress(ValueError):
            read = json.loads(found)
    if read is None or (isinstance(read, list) and all(isinstance(one, dict) for one in read)):
        return read
    raise UserError(f"{where} is {json.dumps(found)[:40]}, expected a list of objects")


def _lines(files: Sequence[File]) -> Iterator[_Line]:
    for file in files:
        with text_formats.opened(file.path) as stream, text_formats.reading(file.path):
            for number, content in enumerate(stream, 1):
                line = _Line(file.path, number, content.rstrip(b"\n"))
                if read_chat(*line):
                    yield line
