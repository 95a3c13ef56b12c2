"""Writes and reads token caches of registered seqio tasks and mixtures; a run reads them without seqio.

The pipeline runs once, in other processes (`tasks/text/seqio_pipeline.py`), with the run's sequence lengths; each
example becomes a document of a token cache. The folder has one token cache per task, and `seqio.json`, which is written
last. Examples are read in this order:

  train, epoch 0      some examples of each shard 0 1 2 … in turn        -> documents in a fixed order
  train, epoch 1 …    only for a task whose preprocessors draw random numbers
  validation
"""

import base64
import copy
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from core import units
from core.errors import Problem, UserError
from core.files import foreign_json, paths
from core.training import run_lock
from core.types import OwnMetrics
from tasks.text import document_streams, documents, seqio_metrics, seqio_pipeline
from tasks.text.document_streams import Chunks, DocumentSource, DocumentStream
from tasks.text.documents import StreamSpec
from tasks.text.ids import Vocabulary
from tasks.text.mixed_documents import MixedChunks
from tasks.text.sentencepieces import SentencePiece
from tasks.text.seqio_pipeline import Asked, Lane
from tasks.text.token_cache import FORMAT, SPLITS, TokenCache
from tasks.text.token_writer import FILTERED, Batch, Converted, Counts, Progress, Writer
from tasks.text.vocabularies import Bytes

if TYPE_CHECKING:
    from tasks.text.beam_parts import Beam
    from tasks.text.filters import Filters

FILE = "seqio.json"
_EXAMPLES = 1024  # examples that a process returns at a time
_PARTS = re.compile("parts-[0-9a-f]{12}")  # the folder of the parts that Beam's workers made
_MOST_SHARDS = 16  # shards of a source that are read concurrently
_WORDS = run_lock.Words("token cache", "two commands cannot write one cache", "text.seqio.cache")
_KINDS = {"asked": dict, "vocabulary": dict, "tasks": dict}  # keys of `seqio.json` with their types


@dataclasses.dataclass(frozen=True)
class SeqioCache(DocumentSource):
    """A `documents.Corpus` of the cached examples of a registered task or mixture.

    Attributes:
      asked: the task or mixture.
      path: the folder of the cache, local or gs://.
      epochs: number of epochs to cache if preprocessors draw random numbers; None: they must draw none.
    """

    asked: Asked
    path: str
    epochs: int | None = None

    def named_files(self) -> tuple[str, ...]:
        return (self.path,) if paths.is_remote(self.path) else ()

    @functools.cached_property
    def saved(self) -> Mapping[str, Any] | None:
        """The content of `seqio.json`; None before it is written.

        Raises UserError if it is damaged or does not fit the task.
        """
        file = paths.resolve(self.path) / FILE
        try:
            found = foreign_json.load_object(file.read_bytes(), _KINDS)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except foreign_json.MalformedError as error:
            raise UserError(f"{file} is damaged: {error}; remove {self.path}, and start again") from error
        self._require_same(found["asked"], f"{self.path} was written")
        if self._is_changed(found["asked"]) and (changed := self._changed(found)):
            module, written = self.asked.module, found["asked"].get("module")
            is_same = written == module
            was = f"before the module {module} was changed" if is_same else f"with the module {written}, not {module}"
            raise UserError(
                f"{self.path} was written {was}, and {changed}: remove it, or give another "
                "text.seqio.cache, so that the changed tasks are cached; or restore the module"
            )
        return found

    @functools.cached_property
    def definition(self) -> Mapping[str, Any]:
        """The vocabulary and the tasks; read from the cache once it is written."""
        return self.saved or self._now()

    def _now(self) -> Mapping[str, Any]:
        found, problem = self._answer
        if problem:
            raise UserError(problem)
        return found

    @functools.cached_property
    def _answer(self) -> tuple[Mapping[str, Any], str]:
        """The definition as the module has it, and why there is none; asked once, because it starts a process."""
        try:
            return _definition(self.asked), ""
        except UserError as error:
            return {}, str(error)

    def problems(self) -> list[str]:
        try:
            if self.saved:
                return []
            drawing = [name for name, about in self.definition["tasks"].items() if about["draws"]]
        except UserError as error:
            return [str(error)]
        except Exception as error:  # bucket clients raise their own types
            if not paths.is_remote(self.path):
                raise
            return [Problem(f"cannot read {self.path}: {type(error).__name__}: {error}", file=self.path)]
        if drawing and self.epochs is None:
            return [
                f"text.seqio.epochs is not set, and the preprocessors of {drawing[0]} draw other random numbers in "
                "each epoch: set it to the number of epochs to cache, or read the task live (text.seqio.live = True)"
            ]
        return []

    def example_problems(self, length: int) -> list[str]:
        return [] if self.saved else self.definition["problems"]

    def fill(
        self,
        *,
        processes: int | None = None,
        say: Callable[[str], None] = print,
        report: Callable[[Counts], None] | None = None,
        beam: "Beam | None" = None,
        filters: "Filters | None" = None,
    ) -> None:
        """Writes the cache, or the missing part of it.

        Args:
          processes: number of processes that run the pipeline; None: one per core.
          say: called with messages.
          report: called with the progress; None: `say` gets a line every 10 s.
          beam: options of Apache Beam; None: the pipeline runs without Beam.
          filters: which examples are left out; None: none, but an existing cache may have any filters.

        Raises:
          UserError: the task cannot be cached, or the existing cache does not fit.
        """
        # Another host may have written it, and the module may have changed.
        for read in ("saved", "definition", "_answer"):
            self.__dict__.pop(read, None)
        if filters:
            filters = self._checked(filters)
        if self.saved is None:
            if found := self.problems():
                raise UserError("\n".join(found))
            start = time.monotonic()
            lock = run_lock.RunLock.acquire(self.path, say=say, words=_WORDS)
            try:
                check = functools.partial(lock.check, now=True)
                most = processes or len(os.sched_getaffinity(0))
                self._write(most, beam, filters, say=say, report=report, check=check)
            finally:
                lock.release()
                seqio_pipeline.PROCESSES.close()
            self.__dict__.pop("saved", None)
            say(f"{self.describe()}: cached in {time.monotonic() - start:.0f} s")

    def _checked(self, filters: "Filters") -> "Filters | None":
        from tasks.text import tokenizing

        if excluded := filters.excluded():
            filters = dataclasses.replace(filters, digest=excluded.digest)
        for cache in self._opened if self.saved else ():
            tokenizing.require_same_filters(self.path, cache.about, filters.described())
        if not filters.leave_out:
            return None
        if drawing := [name for name, about in self.definition["tasks"].items() if about["draws"]]:
            raise UserError(
                f"--deduplicate and --exclude compare the texts of examples, which differ between the epochs of "
                f"{drawing[0]}, whose preprocessors draw random numbers: leave these flags out, and filter its source"
            )
        if self.saved is None:
            seqio_pipeline.answer(seqio_pipeline.PROCESSES.submit(0, seqio_pipeline.require_texts, self.asked))
        return filters

    def _write(
        self,
        processes: int,
        beam: "Beam | None",
        filters: "Filters | None",
        *,
        check: Callable[[], None],
        say: Callable[[str], None],
        report: Callable[[Counts], None] | None,
    ) -> None:
        definition, folder, asked = self.definition, paths.resolve(self.path), self._identity()
        jobs = [
            _TaskJob(self, name, about, str(folder / _folder(number, name)), filters)
            for number, (name, about) in enumerate(definition["tasks"].items())
        ]
        known = {run_lock.FILE, *(paths.resolve(job.out).name for job in jobs)}
        names = {path.name for path in folder.iterdir() if not _PARTS.fullmatch(path.name)}
        if others := sorted(names - known):
            found = ", ".join(units.shortened(others, most=3))
            raise UserError(f"{self.path} has other files than the cache of {self.asked.name} ({found}): name another")
        submit = self._make_parts(jobs, filters, beam.arguments(processes)) if beam else seqio_pipeline.PROCESSES.submit
        for job in jobs:
            job.write(processes, submit, check=check, say=say, report=report or Progress(say))
        saved = {key: value for key, value in definition.items() if key != "problems"} | {"asked": asked}
        for split in SPLITS:
            if not any(cache.about["splits"][split]["documents"] for cache in self._caches(definition)):
                kept = " that --exclude and --deduplicate keep" if filters else ""
                raise UserError(f"text.seqio: {self.asked.name} has no example for {split}{kept}")
        paths.write_text_atomically(folder / FILE, json.dumps(saved, indent=1))
        for parts in [path for path in folder.iterdir() if _PARTS.fullmatch(path.name)]:
            parts.rmtree()

    def _make_parts(
        self, jobs: Sequence["_TaskJob"], filters: "Filters | None", arguments: Sequence[str]
    ) -> Callable[..., Any]:
        """Makes the parts of all jobs on Apache Beam; returns the function that reads them."""
        from tasks.text import beam_parts

        def identity() -> str:
            tasks = {n: {k: v for k, v in t.items() if k != "metrics"} for n, t in self.definition["tasks"].items()}
            made = [self._identity(), self.definition["vocabulary"], tasks]  # includes checksums of the first examples
            made += [filters.described()] if filters else []
            return json.dumps([*made, [job.sources() for job in jobs]])

        before = identity()
        digest = hashlib.sha256(before.encode()).hexdigest()
        parts = beam_parts.Parts(str(paths.resolve(self.path) / f"parts-{digest[:12]}"))
        parts.make(self.asked, [lane for job in jobs for lane in job.lanes()], _EXAMPLES, filters, arguments)
        if identity() != before:
            raise UserError(f"a source of {self.asked.name} was changed while it was read: run the same command again")
        return parts.submit

    def _identity(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self.asked), "epochs": self.epochs, "module_hash": _module_hash(self.asked.module)}

    def _require_same(self, saved: Mapping[str, Any], what: str) -> None:
        for key, value in self._identity().items():
            if key in ("module", "module_hash") or saved.get(key) == value:  # `_changed` compares the modules' tasks
                continue
            setting = {"inputs": "inputs_length", "targets": "the length of targets"}.get(key, key)
            raise UserError(f"{what} with {setting} = {saved.get(key)}, now {value}: give another text.seqio.cache")

    def _is_changed(self, saved: Mapping[str, Any]) -> bool:
        return _module_hash(self.asked.module) not in (None, saved.get("module_hash"))

    def _changed(self, saved: Mapping[str, Any]) -> str:
        """Says how the task differs from that of the cache, or what is wrong with its first examples; "": neither."""
        try:
            now = self._now()
        finally:
            seqio_pipeline.PROCESSES.close()
        if now["problems"]:
            return now["problems"][0]
        if _same_ids(now["vocabulary"]) != _same_ids(saved["vocabulary"]):
            return "its vocabulary is another"
        if now["tasks"].keys() != saved["tasks"].keys():
            return f"{self.asked.name} has the tasks {', '.join(now['tasks'])}, not {', '.join(saved['tasks'])}"
        said = {"rate": "another rate", "first": "other first examples"}
        for name, about in now["tasks"].items():
            if "first" not in saved["tasks"][name]:
                return "it has no record of its first examples"
            for key, value in about.items():
                was = saved["tasks"][name].get(key)
                if key == "files":  # in whatever folder
                    value, was = (sorted(documents.names_below(each).values()) for each in (value, was or ()))
                if key != "metrics" and was != value:
                    return f"{name} has {said.get(key, f'other {key}')}"
        return ""

    def _caches(self, definition: Mapping[str, Any]) -> list[TokenCache]:
        folder = paths.resolve(self.path)
        names = [str(folder / _folder(number, name)) for number, name in enumerate(definition["tasks"])]
        return [TokenCache(name, DefinedVocabulary(self), False) for name in names]

    @functools.cached_property
    def _opened(self) -> list[TokenCache]:
        if self.saved is None:
            raise UserError(f"no token cache at {self.path!r} (no {FILE}): the start of a run on this host writes it")
        return self._caches(self.saved)

    def open_stream(self, spec: StreamSpec) -> DocumentStream:
        # A window of a small task has all its ids once, so that the first batch does not wait for many epochs.
        ids = sum(cache.about["splits"][spec.split]["tokens"] for cache in self._opened) // spec.num_streams
        return DocumentStream(self.chunks(spec), spec, window_ids=min(document_streams.WINDOW_IDS, ids + 1))

    @property
    def packing(self) -> int:
        """3 for several tasks, since every stream draws from each of them; see `mixed_documents.slot_of`."""
        return 3 if len(self.definition["tasks"]) > 1 else 2

    def chunks(self, spec: StreamSpec) -> Chunks:
        rates = [about["rate"] for about in self.definition["tasks"].values()]
        found = [
            (cache.chunks(spec), rate)
            for cache, rate in zip(self._opened, rates, strict=True)
            if cache.about["splits"][spec.split]["documents"]
        ]
        chunks = [each for each, _ in found]
        return chunks[0] if len(chunks) == 1 else MixedChunks(chunks, [rate for _, rate in found], spec)

    def sample_texts(self) -> Iterator[str]:
        return iter(())

    def describe(self) -> str:
        inputs = f", inputs of up to {self.asked.inputs} ids" if self.asked.inputs else ""
        try:
            if paths.is_remote(self.path) or self.saved is None:
                return f"text.seqio: {self.asked.name}{inputs}, cached in {self.path}"
        except UserError:  # `problems` reports it
            return f"text.seqio: {self.asked.name}"
        splits = [cache.about["splits"] for cache in self._opened]
        examples, tokens = (sum(each[s][kind] for each in splits for s in SPLITS) for kind in ("documents", "tokens"))
        changed = f", whose module is now another: its first {seqio_pipeline.FIRST} examples are the same"
        return (
            f"text.seqio: {self.asked.name}{inputs} ({examples:,} examples, {tokens:,} tokens in {self.path}"
            f"{changed if self._is_changed(self.saved['asked']) else ''})"
        )

    def left_out(self) -> dict[str, int]:
        """Returns how many examples the filters left out of the cache, by reason."""
        found = {reason: [cache.about["left_out"][reason] for cache in self._opened] for reason in FILTERED}
        return {reason: n for reason, each in found.items() if (n := sum(one["documents"] for one in each))}

    def train_tokens(self) -> int | None:
        return None if self.saved is None or len(self._opened) > 1 else self._opened[0].train_tokens()

    def own_metrics(self, most: int) -> OwnMetrics:
        tasks = [about for about in self.definition["tasks"].values() if "validation" in about["shards"]]
        found = [kind for about in tasks for kind in about.get("metrics", ())]
        if not self.saved or (found and not self._is_changed(self.saved["asked"])):
            seqio_metrics.require_kinds(self.asked.name, found)
        return self.asked.measured(most)

    def fingerprint(self) -> str:
        splits = [
            [[cache.about["splits"][split][kind] for kind in ("documents", "tokens", "digest")] for split in SPLITS]
            for cache in self._opened
        ]
        rates = [about["rate"] for about in self.definition["tasks"].values()]
        return hashlib.sha256(json.dumps([self.asked.name, splits, rates, self.epochs]).encode()).hexdigest()


_definitions: dict[tuple[Asked, str | None], Mapping[str, Any]] = {}  # with the hash of the user's module


def _definition(asked: Asked) -> Mapping[str, Any]:
    """Returns `seqio_pipeline.definition` in a process that has imported the user's module as its file is now."""
    key, processes = (asked, _module_hash(asked.module)), seqio_pipeline.PROCESSES
    if former := [one for one in _definitions if one[0].module == asked.module and one[1] != key[1]]:
        processes.close()
        for one in former:
            del _definitions[one]
    if key in _definitions:
        return _definitions[key]
    is_sound = False
    try:
        found = seqio_pipeline.answer(processes.submit(0, seqio_pipeline.definition, asked))
        is_sound = not found["problems"]
    finally:
        if not is_sound:
            processes.close()  # so that a later call imports the module anew
    if is_sound:
        _definitions[key] = found
    return found


def _same_ids(vocabulary: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a described vocabulary without the hash of one whose ids only the first examples can compare."""
    return {name: value for name, value in vocabulary.items() if name != "hash" or vocabulary["kind"] != "other"}


class _TaskJob:
    def __init__(
        self, cache: SeqioCache, name: str, about: Mapping[str, Any], out: str, filters: "Filters | None"
    ) -> None:
        self.out, self._filters = out, filters
        self._cache, self._name, self._about = cache, name, about
        self._progress: dict[str, Any] = {
            "phase": 0, "lane": 0, "read": [], "ended": [], "documents": {split: [] for split in SPLITS}
        }  # fmt: skip

    def sources(self) -> list[dict[str, Any]]:
        from tasks.text import tokenizing

        return tokenizing.listing({name: paths.resolve(name).stat().length for name in self._about["files"]})

    def write(self, processes: int, submit: Callable[..., Any], **options: Any) -> None:
        from tasks.text import tokenizing

        vocabulary = {key: value for key, value in self._cache.definition["vocabulary"].items() if key != "model"}
        begun = {
            "format": FORMAT,
            "vocabulary": {"name": self._name, "described": f"the vocabulary of {self._name}"} | vocabulary,
            "dtype": "uint16" if vocabulary["size"] <= 2**16 else "uint32",
            "field": "",
            "by_hash": False,
            "excluded": "",
            "near_duplicates": None,
            "has_prompts": self._cache.asked.inputs is not None,
            "seqio": self._cache._identity() | ({"draws": True} if self._about["draws"] else {}),
        } | (self._filters.described() if self._filters else {})
        tokenizing.write(
            self.out,
            begun,
            self.sources(),
            functools.partial(self._converted, functools.partial(self._submit, processes, submit)),
            require=self._record_examples,
            seen=self._filters.seen() if self._filters else None,
            quiet=True,
            **options,
        )

    def _phases(self) -> list[tuple[str, int, int]]:
        """Returns (split, epoch, number of lanes) of what is read, in order."""
        epochs = (self._cache.epochs or 1) if self._about["draws"] else 1
        most = 1 if self._about["draws"] else _MOST_SHARDS  # the random numbers are those of an undivided source
        return [
            (split, epoch, max(min(shards, most), 1))
            for split, shards in self._about["shards"].items()
            for epoch in range(epochs if split == "train" else 1)
        ]

    def lanes(self) -> list[Lane]:
        return [lane for phase in self._phases() for lane in self._lanes(*phase)]

    def _lanes(self, split: str, epoch: int, count: int) -> list[Lane]:
        return [Lane(self._name, split, epoch, lane, count, self._about["draws"]) for lane in range(count)]

    def _converted(
        self, submit: Callable[[Lane], Any], files: Sequence[Mapping[str, Any]], position: Any
    ) -> Generator[tuple[Batch, Converted]]:
        """Yields the examples from a position on (None: from the start), some of each lane in turn."""
        now = self._progress = position or self._progress
        phases, names = self._phases(), frozenset(entry["path"] for entry in files)
        local = frozenset(name for name in names if not paths.is_remote(name))  # objects: checked once per split
        while now["phase"] < len(phases):
            split, epoch, count = phases[now["phase"]]
            if not now["read"]:
                now |= {"read": [0] * count, "ended": [False] * count, "lane": 0}
                now["documents"][split].append(0)
            lanes = self._lanes(split, epoch, count)
            running = {lane: submit(lanes[lane]) for lane in range(count) if not now["ended"][lane]}
            while running:
                lane, now["lane"] = now["lane"], (now["lane"] + 1) % count
                if lane not in running:
                    continue
                found = seqio_pipeline.answer(running.pop(lane))
                now["read"][lane] += found.read
                now["ended"][lane] = found.is_end
                if not found.is_end:
                    running[lane] = submit(lanes[lane])
                kept = len(found.converted.sizes)
                now["documents"][split][-1] += kept
                fraction = (now["phase"] + sum(now["ended"]) / count) / len(phases)
                if not running:
                    now |= {"phase": now["phase"] + 1, "read": [], "ended": []}
                read = local if running else names
                yield Batch([], split, read, copy.deepcopy(now), 0, found.read - kept, fraction), found.converted

    def _submit(self, processes: int, submit: Callable[..., Any], lane: Lane) -> Any:
        begin, call = self._progress["read"][lane.index], seqio_pipeline.convert
        return submit(lane.index % processes, call, self._cache.asked, lane, begin, _EXAMPLES, self._filters)

    def _record_examples(self, writer: Writer) -> None:
        for split, sizes in self._progress["documents"].items():
            about = writer.counts.splits[split]
            about["epochs"] = sizes if len(sizes) > 1 else [about["documents"]]  # filters need a single epoch


class DefinedVocabulary(Vocabulary):
    """The vocabulary of a registered task, made from the task's definition."""

    bos_id = 0  # the first input in seqio's decoder features

    def __init__(self, corpus: SeqioCache) -> None:
        self.corpus = corpus

    @property
    def _about(self) -> Mapping[str, Any]:
        return self.corpus.definition["vocabulary"]

    @property
    def size(self) -> int:
        return self._about["size"]

    @property
    def pad_id(self) -> int | None:
        return self._about["pad_id"]

    @property
    def eos_id(self) -> int:
        return self._about["eos_id"]

    @property
    def hash(self) -> str:
        return self._about["hash"]

    @functools.cached_property
    def _converter(self) -> Any:
        match self._about["kind"]:
            case "bytes":
                return Bytes()
            case "sentencepiece":
                return SentencePiece.of_model(base64.b64decode(self._about["model"]))
        from tasks.text import seqio_tasks

        return seqio_tasks.SeqioVocabulary(self.corpus.asked.name, self.corpus.asked.module)

    def encode(self, text: str) -> list[int]:
        return self._converter.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        if self._about["kind"] == "bytes":
            ids = [i for i in ids if i < Bytes.size]  # ids beyond the vocabulary have no text
        return self._converter.decode(ids)

    def prepare(self, run_dir: str, *, is_host_zero: bool, sample: Callable[[], Iterable[str]]) -> None:
        """Does nothing."""

    def problems(self) -> list[str]:
        return []  # the task reports them

    def describe(self) -> str:
        return f"the vocabulary of {self.corpus.asked.name}"


def _folder(number: int, name: str) -> str:
    return f"{number:02d}_{re.sub(r'[^A-Za-z0-9.-]', '_', name)}"


def _module_hash(module: str | None) -> str | None:
    """Returns the SHA-256 of a module's file, without importing it; None if there is no such file on this machine."""
    parts, places, spec = (module or "").split("."), None, None
    for end in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:end]), places)
        if spec is None:
            return None
        places = spec.submodule_search_locations
    if spec is None or not spec.origin or not pathlib.Path(spec.origin).is_file():
        return None
    return hashlib.sha256(pathlib.Path(spec.origin).read_bytes()).hexdigest()
