"""Vocabularies of published models: the `tokenizer.json` of a folder, its special tokens, and its chat template.

Text is converted by the tokenizers library, which transformers uses too, so ids are the same.
Id 0 is an ordinary token.
"""

import datetime
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from core import paths, published_files, units
from core.errors import UserError
from core.published_files import CONFIG, TOKENIZER
from tasks.ids import before_end

Message = Mapping[str, str]  # {"role": "user", "content": "…"}


class FolderTokenizer:
    """The tokenizer of a published folder, local or remote, read at first use.

    Attributes:
      path: the folder.
      pad_id: None, because no id is reserved: rows are padded with 0, and their weights tell what is padding.
    """

    pad_id = None

    def __init__(self, path: str) -> None:
        self.path = path
        self._copy = published_files.copy_of(path)

    @functools.cached_property
    def folder(self) -> paths.Path:
        """The folder, or the copy of its files in the run; that of a hub is downloaded."""
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
        except Exception as error:  # the library raises Exception itself
            raise UserError(f"{self.path}/{TOKENIZER} is malformed: {error}; download it again") from error
        found.no_truncation()  # files may keep settings of their last use, which transformers ignores too
        found.no_padding()
        return found

    @functools.cached_property
    def _settings(self) -> dict[str, tuple[Any, str]]:
        """The settings of the folder, each with the file that it is from; later files override earlier ones."""
        found: dict[str, tuple[Any, str]] = {}
        for name in (CONFIG, "generation_config.json", "special_tokens_map.json", "tokenizer_config.json"):
            file = self.folder / name
            if file.exists():
                settings = published_files.read_object(file)
                found |= {key: (value, name) for key, value in settings.items() if value is not None}
        return found

    def _setting(self, key: str, *, expected: str, fits: Callable[[Any], bool]) -> Any:
        """Returns a setting; None if no file has it. Raises UserError for one that does not fit."""
        value, name = self._settings.get(key, (None, ""))
        if value is not None and not fits(value):
            raise UserError(f"{self.path}/{name}: {key} = {json.dumps(value)[:60]}: expected {expected}")
        return value

    def token(self, role: str) -> str | None:
        """Returns a special token such as "bos_token" as text; None if the folder names none."""

        def text(value: Any) -> Any:
            return value.get("content") if isinstance(value, Mapping) else value

        expected = "text, or an object with the text as content"
        return text(self._setting(role, expected=expected, fits=lambda value: isinstance(text(value), str)))

    def _id(self, role: str) -> int | None:
        """Returns the id of the special token `role` ("bos" or "eos"); None if the folder names none."""
        text = self.token(f"{role}_token")
        if text is not None:
            return self._tokenizer.token_to_id(text)
        return next(iter(self._listed_ids(role)), None)

    def _listed_ids(self, role: str) -> list[int]:
        """Returns the ids of `eos_token_id` or `bos_token_id`."""

        def listed(value: Any) -> list[Any]:
            return value if isinstance(value, list) else [value]

        def fits(value: Any) -> bool:
            return all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in listed(value))

        found = self._setting(f"{role}_token_id", expected="an id, or a list of ids", fits=fits)
        return [] if found is None else listed(found)

    @functools.cached_property
    def size(self) -> int:
        """See `Vocabulary`. Includes added tokens, unless the folder's model has no embedding for them."""
        rows = self._embedded_ids
        beyond = {i for i in self._ids if i >= rows}
        if beyond <= self._tokenizer.get_added_tokens_decoder().keys():
            return min(max(self._ids) + 1, rows)
        return max(self._ids) + 1  # larger than the model: to be refused

    @functools.cached_property
    def _ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_vocab(with_added_tokens=True).values())

    @property
    def _embedded_ids(self) -> int:
        """The ids that the folder's model has an embedding for; more than there are if the folder has no model."""
        file = self.folder / CONFIG
        config = published_files.read_object(file) if file.exists() else {}
        text = config.get("text_config") or config
        found = text.get("vocab_size") if isinstance(text, Mapping) else None
        return found if isinstance(found, int) else max(self._ids) + 1

    @functools.cached_property
    def eos_id(self) -> int:
        """See `Vocabulary`."""
        found = self._id("eos")
        if found is None:
            if text := self.token("eos_token"):
                raise UserError(f"{self.path}: eos_token is {text!r}, which {TOKENIZER} does not have")
            raise UserError(f"{self.path}: neither tokenizer_config.json nor config.json names an eos_token")
        return found

    @functools.cached_property
    def bos_id(self) -> int:
        """See `Vocabulary`. Models without a begin-of-text token, such as Qwen's, begin with the end of a document."""
        found = self._id("bos")
        return self.eos_id if found is None else found

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids after which generation ends: the end of a document, and those of `generation_config.json`."""
        return tuple(dict.fromkeys([self.eos_id, *self._listed_ids("eos")]))

    @property
    def begins_with_bos(self) -> bool:
        """Whether a text that is encoded with special tokens begins with the begin-of-text id."""
        return self._tokenizer.encode("a").ids[:1] == [self.bos_id]

    @functools.cached_property
    def hash(self) -> str:
        """See `Vocabulary`."""
        return hashlib.sha256(json.dumps([self._text, self.bos_id, self.eos_id]).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """See `Vocabulary`. Adds no special tokens, but recognises those that are written in the text."""
        return self._embedded(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See `EncodesBatches`."""
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._embedded(each.ids) for each in found]

    def _embedded(self, ids: list[int]) -> list[int]:
        """Returns the ids. Raises UserError for one that the folder's model has no embedding for."""
        if self._without_embedding and (bad := next((i for i in ids if i >= self.size), None)) is not None:
            raise UserError(
                f"the text contains {self._tokenizer.id_to_token(bad)!r} (id {bad}), for which the model of "
                f"{self.path} has no embedding: its vocab_size is {self.size}. Remove it from the text"
            )
        return ids

    @functools.cached_property
    def _without_embedding(self) -> int:
        """The number of added tokens whose id has no embedding in the folder's model, as in Gemma 3 1B."""
        return sum(i >= self.size for i in self._ids)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns what `encode` does, and for each id the first character that it covers and the one after its last."""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        return self._embedded(found.ids), found.offsets

    def decode(self, ids: Iterable[int]) -> str:
        """See `Vocabulary`."""
        return self._tokenizer.decode(before_end(ids, self), skip_special_tokens=True)

    def chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, date: datetime.date | None = None
    ) -> str:
        """Formats a conversation by the folder's chat template.

        Args:
          messages: each with a role ("system", "user", "assistant") and its content.
          add_generation_prompt: whether the text ends where the assistant's answer begins.
          date: of templates that print the date; None: today.

        Raises:
          UserError: the folder has no chat template, or the template refuses the conversation.
        """
        import jinja2

        day = datetime.datetime.now().astimezone() if date is None else date
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                strftime_now=day.strftime,
                **{name: self.token(name) or "" for name in ("bos_token", "eos_token", "pad_token", "unk_token")},
            )
        except Exception as error:  # a template is a program, and can fail like one
            said = error if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
            raise UserError(f"{self.path}: the chat template refuses this conversation: {said}") from error

    @functools.cached_property
    def _template(self) -> Any:
        """The compiled chat template."""
        import jinja2

        file = self.folder / "chat_template.jinja"
        template = _read_text(file) if file.exists() else self._template_setting()
        if template is None:
            raise UserError(f"{self.path} has no chat template: it is not a model for chats; leave --chat out")
        try:
            return _environment().from_string(template)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"{self.path}: the chat template is malformed: line {error.lineno}: {error}") from error

    def _template_setting(self) -> str | None:
        """Returns the chat template of `tokenizer_config.json`; of several, that with the name "default"."""

        def is_named(entry: Any) -> bool:
            return isinstance(entry, Mapping) and all(isinstance(entry.get(k), str) for k in ("name", "template"))

        def fits(value: Any) -> bool:
            return isinstance(value, str) or (isinstance(value, list) and all(map(is_named, value)))

        expected = "text, or a list of objects with name and template"
        found = self._setting("chat_template", expected=expected, fits=fits)
        if isinstance(found, list):
            return {entry["name"]: entry["template"] for entry in found}.get("default")
        return found

    def prepare(self, run_dir: str, *, is_host_zero: bool, sample: Callable[[], Iterable[str]]) -> None:
        """Reads the tokenizer, so that an invalid one is refused before the first step."""
        _ = self.eos_id, self._tokenizer

    def problems(self) -> list[str]:
        """See `Vocabulary`. Does not check that a remote folder exists."""
        if "://" not in self.path and not (self.folder / TOKENIZER).is_file():
            return [f"no {TOKENIZER} in {self.path!r}: set VOCABULARY to the folder of a published model"]
        return []

    def describe(self) -> str:
        """See `Vocabulary`."""
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


def _environment() -> Any:
    """Returns the environment in which chat templates run, as in transformers: sandboxed, without access to files."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals |= {"raise_exception": refuse}
    return environment
