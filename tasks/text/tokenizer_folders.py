"""Vocabularies of published models: a folder's `tokenizer.json`, special tokens, and chat template."""

import contextlib
import datetime
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from core import units
from core.checkpoints import published_files
from core.checkpoints.published_files import CONFIG, GENERATION_CONFIG, TOKENIZER
from core.errors import Problem, UserError
from core.files import paths
from tasks.text import chat_answers
from tasks.text.chat_templates import Message, Range
from tasks.text.ids import ChatVocabulary, before_end
from tasks.text.template_process import TemplateError, TemplateProcess

# Special tokens that templates use by name.
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class FolderTokenizer(ChatVocabulary):
    """The tokenizer of a published model's folder, local or remote, read at first use.

    Attributes:
      path: the folder's path, or its name on Hugging Face.
      pad_id: None, because no id is reserved.
    """

    pad_id = None

    def __init__(self, path: str) -> None:
        self.path = path
        self._copy = published_files.copy_of(path)

    @functools.cached_property
    def folder(self) -> paths.Path:
        """The folder to read: the run's copy if there is one, else `path`, downloaded if it is on Hugging Face."""
        return self._copy or published_files.small_files(self.path)

    @functools.cached_property
    def _text(self) -> str:
        try:
            return _read_text(self.folder / TOKENIZER)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UserError(
                f"no {TOKENIZER} in {self.path!r}: set VOCABULARY to the folder of a published model; older "
                "folders that have only tokenizer.model are converted by transformers: AutoTokenizer.from_pretrained(…)"
                ".save_pretrained(…)"
            ) from error

    @functools.cached_property
    def _tokenizer(self) -> Any:
        import tokenizers

        text = self._text
        try:
            found = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"{self.path}/{TOKENIZER} is malformed: {error}; download it again") from error
        found.no_truncation()  # files may contain settings of their last use, which transformers also ignores
        found.no_padding()
        return found

    @functools.cached_property
    def _settings(self) -> dict[str, tuple[Any, str]]:
        names = [CONFIG, GENERATION_CONFIG, "special_tokens_map.json", "tokenizer_config.json"]
        read = {n: published_files.read_object(self.folder / n) for n in names if (self.folder / n).exists()}
        if "added_tokens_decoder" not in read.get(names[-1], {}):
            names[-2:] = reversed(names[-2:])  # an older folder, whose map overrides
        found: dict[str, tuple[Any, str]] = {}
        for name in names:
            found |= {key: (value, name) for key, value in read.get(name, {}).items() if value is not None}
        return found

    def _setting(self, key: str, *, expected: str, fits: Callable[[Any], bool]) -> Any:
        """Returns a setting; None if no file has it. Raises UserError, with `expected`, unless `fits(value)`."""
        value, name = self._settings.get(key, (None, ""))
        if value is not None and not fits(value):
            raise UserError(f"{self.path}/{name}: {key} = {json.dumps(value)[:60]}: expected {expected}")
        return value

    def token(self, role: str) -> str | None:
        """Returns the text of a special token such as "bos_token"; None if there is none."""

        def text(value: Any) -> Any:
            return value.get("content") if isinstance(value, Mapping) else value

        expected = "text, or an object with the text as content"
        return text(self._setting(role, expected=expected, fits=lambda value: isinstance(text(value), str)))

    def _id(self, role: str) -> int | None:
        text = self.token(f"{role}_token")
        if text is not None:
            return self._tokenizer.token_to_id(text)
        return next(iter(self._listed_ids(role)), None)

    def _listed_ids(self, role: str) -> list[int]:
        def listed(value: Any) -> list[Any]:
            return value if isinstance(value, list) else [value]

        def fits(value: Any) -> bool:
            return all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in listed(value))

        found = self._setting(f"{role}_token_id", expected="an id, or a list of ids", fits=fits)
        return [] if found is None else listed(found)

    @functools.cached_property
    def size(self) -> int:
        rows = self._embedded_ids
        if {i for i in self._ids if i >= rows} <= self.added_ids:
            return min(max(self._ids) + 1, rows)
        return max(self._ids) + 1  # larger than the model, which is an error elsewhere

    @functools.cached_property
    def added_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    @functools.cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_vocab(with_added_tokens=True).values())

    @property
    def _embedded_ids(self) -> int:
        """The number of ids that the folder's model has embeddings for; otherwise the highest id + 1."""
        file = self.folder / CONFIG
        config = published_files.read_object(file) if file.exists() else {}
        text = config.get("text_config") or config
        found = text.get("vocab_size") if isinstance(text, Mapping) else None
        return found if isinstance(found, int) else max(self._ids) + 1

    @functools.cached_property
    def eos_id(self) -> int:
        found = self._id("eos")
        if found is None:
            if text := self.token("eos_token"):
                raise UserError(f"{self.path}: eos_token is {text!r}, which {TOKENIZER} does not have")
            raise UserError(f"{self.path}: neither tokenizer_config.json nor config.json names an eos_token")
        return found

    @functools.cached_property
    def bos_id(self) -> int:
        """The begin-of-text id; the end-of-document id if there is none."""
        found = self._id("bos")
        return self.eos_id if found is None else found

    @functools.cached_property
    def turn_ends(self) -> tuple[int, ...]:
        return chat_answers.turn_ends(self)

    def token_of(self, token_id: int) -> str:
        found = self._tokenizer.id_to_token(token_id)
        if found is None:
            raise UserError(
                f"{self.path}/{TOKENIZER} has no token with the id {token_id}: download the whole folder again"
            )
        return str(found)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end generation: the end-of-document id, the folder's `eos_token_id`s, and ends of answers."""
        return tuple(dict.fromkeys([self.eos_id, *self._listed_ids("eos"), *self.turn_ends]))

    @property
    def begins_with_bos(self) -> bool:
        """Whether transformers puts the begin-of-text id before a text.

        Its Llama tokenizers take that from `add_bos_token`, whatever the template in `tokenizer.json` says.
        """
        kind = self._setting("tokenizer_class", expected="text", fits=lambda value: isinstance(value, str)) or ""
        is_added = self._setting("add_bos_token", expected="a boolean", fits=lambda value: isinstance(value, bool))
        if kind.startswith("LlamaTokenizer") and is_added is not None:
            return is_added and self._id("bos") is not None
        return self._tokenizer.encode("a").ids[:1] == [self.bos_id]

    @functools.cached_property
    def hash(self) -> str:
        return hashlib.sha256(json.dumps([self._text, self.bos_id, self.eos_id]).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Converts text to ids; adds no special tokens, but recognizes those written in the text."""
        return self._embedded(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._embedded(each.ids) for each in found]

    def _embedded(self, ids: list[int]) -> list[int]:
        if self._without_embedding and (bad := next((i for i in ids if i >= self.size), None)) is not None:
            raise UserError(
                f"the text contains {self._tokenizer.id_to_token(bad)!r} (id {bad}), for which the model of "
                f"{self.path} has no embedding: its vocab_size is {self.size}. Remove it from the text"
            )
        return ids

    @functools.cached_property
    def _without_embedding(self) -> int:
        """The number of added tokens whose ids have no embedding in the folder's model."""
        return sum(i >= self.size for i in self._ids)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return self._embedded(found.ids), found.offsets

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(before_end(ids, self), skip_special_tokens=True)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        date: datetime.date | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Formats a conversation by the folder's chat template, like transformers' `apply_chat_template`."""
        template = self._template("tool_use" if tools is not None else None)
        variables = {"add_generation_prompt": add_generation_prompt, "tools": tools, "documents": documents}
        with self._refusing():
            return template.render(messages, now=_now(date), **variables, **self._named_tokens)

    def marked_chat(
        self,
        messages: Sequence[Message],
        *,
        date: datetime.date | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> tuple[str, list[Range]] | None:
        """Returns a formatted conversation, and the ranges of characters within `{% generation %}` tags.

        None if the template has no such tags.
        """
        template = self._template("tool_use" if tools is not None else None)
        if not template.marks_answers:
            return None
        variables = {"add_generation_prompt": False, "tools": tools, "documents": documents}
        with self._refusing():
            return template.marked(messages, now=_now(date), **variables, **self._named_tokens)

    @property
    def _named_tokens(self) -> dict[str, str]:
        return {name: text for name in _NAMED if (text := self.token(name)) is not None}

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except TemplateError as error:
            raise UserError(f"{self.path}: the chat template refuses this conversation: {error}") from error

    @functools.cache  # noqa: B019 (a tokenizer lives as long as its process)
    def _template(self, name: str | None) -> TemplateProcess:
        file, older = self.folder / "chat_template.jinja", self.folder / published_files.CHAT_TEMPLATE
        own = self.folder / published_files.MORE_TEMPLATES / f"{name}.jinja"
        file = own if name is not None and own.exists() else file
        source = _read_text(file) if file.exists() else self._template_setting(name)
        if not file.exists() and older.exists():
            source = published_files.read_object(older).get("chat_template", source)
        if source is None:
            raise UserError(f"{self.path} has no chat template: it is not a model for chats; leave --chat out")
        try:
            return TemplateProcess(source)
        except TemplateError as error:
            raise UserError(f"{self.path}: the chat template is malformed: {error}") from error

    def _template_setting(self, name: str | None) -> str | None:
        def is_named(entry: Any) -> bool:
            return isinstance(entry, Mapping) and all(isinstance(entry.get(k), str) for k in ("name", "template"))

        def fits(value: Any) -> bool:
            return isinstance(value, str) or (isinstance(value, list) and all(map(is_named, value)))

        expected = "text, or a list of objects with name and template"
        found = self._setting("chat_template", expected=expected, fits=fits)
        if isinstance(found, list):
            templates = {entry["name"]: entry["template"] for entry in found}
            return templates.get(name or "default", templates.get("default"))
        return found

    def prepare(self, run_dir: str, *, is_host_zero: bool, sample: Callable[[], Iterable[str]]) -> None:
        _ = self.eos_id, self._tokenizer

    def problems(self) -> list[str]:
        if "://" not in self.path and not (self.folder / TOKENIZER).is_file():
            said = f"no {TOKENIZER} in {self.path!r}"
            return [Problem(said, setting="VOCABULARY", file=self.path, fix="give the folder of a published model")]
        return []

    def describe(self) -> str:
        if self.problems():
            return f"tokenizer of {self.path} (absent)"
        beyond = (
            f" without {units.counted(self._without_embedding, 'token')} that the model lacks"
            if self._without_embedding
            else ""
        )
        return f"tokenizer of {self.path} ({self.size} ids{beyond}, sha256 {self.hash[:12]})"


def _read_text(file: paths.Path) -> str:
    try:
        return file.read_text()
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is malformed: {error}; download it again") from error


def _now(date: datetime.date | None) -> datetime.date:
    return datetime.datetime.now().astimezone().replace(tzinfo=None) if date is None else date
