"""Finds the files of published models: local, gs://, or hf://OWNER/NAME[@REVISION], which is downloaded.

A run keeps copies of their small files (configuration and tokenizer), and reads the copies from its first checkpoint
on.

    copies.json   {"FOLDER as it was written": "0"}
    0/config.json, 0/tokenizer.json …
"""

import contextlib
import functools
import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from core.errors import UnreachableError, UserError
from core.files import foreign_json, paths

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
PROCESSOR, PREPROCESSOR = "processor_config.json", "preprocessor_config.json"  # of models that read images
CHAT_TEMPLATE = "chat_template.json"  # of their older folders
TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"  # folder of named ones, such as tool_use.jinja
TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    GENERATION_CONFIG,
    TEMPLATE,
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
PROCESSOR_FILES = (PROCESSOR, PREPROCESSOR, CHAT_TEMPLATE)
SMALL_FILES = (CONFIG, *TOKENIZER_FILES, *PROCESSOR_FILES)
WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"  # of the library PEFT
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
FOLDER, _LIST = "published", "copies.json"

HUB = "hf://"

_commits: dict[str, str] = {}  # revisions of models of the hub that this process has read, by their text
_used: dict[str, paths.Path] = {}  # folders whose small files this process has read, by their text
_run_dir: str | None = None  # of the run that this process works on


def small_files(text: str) -> paths.Path:
    """Returns the folder with a model's configuration and tokenizer, or its copy in the run."""
    if copy := copy_of(text):
        return copy
    _used[text] = _fetched(text, (*SMALL_FILES, f"{MORE_TEMPLATES}/*.jinja"))
    return _used[text]


def read_object(file: paths.Path) -> dict[str, Any]:
    """Reads a JSON file that holds an object; raises UserError if it is malformed."""
    try:
        return foreign_json.load_object(file.read_bytes(), strict=False)
    except (foreign_json.MalformedError, IsADirectoryError) as error:
        raise UserError(f"{file}: malformed JSON ({error}); download it again") from error


def copy_of(text: str) -> paths.Path | None:
    """Returns the copy of a folder's small files in the run, or None."""
    return _copies(_run_dir).get(text) if _run_dir else None


@functools.lru_cache(maxsize=1)
def _copies(run_dir: str) -> dict[str, paths.Path]:
    from core.checkpoints import steps  # which imports jax

    folder = paths.resolve(run_dir)
    try:
        if not steps.complete(folder / steps.FOLDER) or not (folder / FOLDER / _LIST).exists():
            return {}
        listed = foreign_json.load_object((folder / FOLDER / _LIST).read_bytes())
        if outside := [name for name in listed.values() if not (isinstance(name, str) and name.isdecimal())]:
            raise foreign_json.MalformedError(f"{_LIST} names {outside[0]!r}, expected the number of a folder")
    except UnreachableError:
        raise
    except Exception as error:  # a bucket's client has exception types of its own
        raise UserError(f"cannot read the run directory {run_dir}: {_said(error)}") from error
    return {text: folder / FOLDER / name for text, name in listed.items()}


def weights(text: str) -> paths.Path:
    """Returns the folder with the weights of a model, downloaded if it is on the hub.

    Raises UserError for an adapter, or a download that fails or lacks safetensors.
    """
    folder = _fetched(text, (*WEIGHTS, ADAPTER_CONFIG))
    if text.startswith(HUB) and (index := folder / WEIGHTS[2]).exists():  # which may name its files in another way
        named = read_object(index).get("weight_map", {})
        names = {name for name in named.values() if isinstance(name, str)} if isinstance(named, dict) else set()
        missing = sorted(name for name in names if not (folder / name).exists())
        folder = _fetched(text, tuple(missing)) if missing else folder
    if adapters := [name for name in (ADAPTER_CONFIG, ADAPTER) if (folder / name).exists()]:
        raise UserError(
            f"{text} has {' and '.join(adapters)}: an adapter beside a model would change what it computes, and is not "
            "read; merge the adapter (merge_and_unload of the library PEFT), or take the files out of the folder"
        )
    if text.startswith(HUB) and not any(folder.glob("*.safetensors")):
        raise UserError(f"{text}: {without_safetensors(_listed(text))}")
    return folder


def without_safetensors(names: Collection[str]) -> str:
    """Says, for an error message, which files a folder has in place of safetensors."""
    if pickles := sorted(name for name in names if name.endswith(_PICKLES)):
        return (
            f"the weights are torch pickles ({', '.join(pickles)}), which can run any code when they are read, and are "
            "not supported; save the model again with transformers: model.save_pretrained(folder)"
        )
    return f"no {WEIGHTS[0]}, nor {WEIGHTS[2]} with its files; it has {', '.join(sorted(names)[:10]) or 'no files'}"


def _listed(text: str) -> list[str]:
    import huggingface_hub

    name, revision = _name_and_revision(text)
    try:
        return huggingface_hub.HfApi().list_repo_files(name, revision=revision)
    except Exception as error:  # of many types: the hub's, the network's
        raise UserError(f"{text}: no {WEIGHTS[0]} was downloaded, and listing it failed ({_said(error)})") from error


def is_published(text: str) -> bool:
    """Returns whether a text names the folder of a published model.

    Raises UserError if a model's folder has no config.json.
    """
    folder = small_files(text)
    if (folder / CONFIG).exists():
        return True
    parts = (TOKENIZER, "*.safetensors", "pytorch_model*.bin")
    found = sorted(file.name for pattern in parts for file in folder.glob(pattern)) if folder.is_dir() else []
    if found or text.startswith(HUB):
        raise UserError(
            f"{text} has no {CONFIG} (it has {', '.join(found) or 'nothing'}): expected a published model, "
            f"with {CONFIG}, *.safetensors and {TOKENIZER}; download the whole folder"
        )
    return False


def unknown(text: str) -> str:
    """Returns the message for a text that names neither a run nor a published model."""
    from core.checkpoints import steps  # it imports jax, which takes a second

    folder = paths.resolve(steps.split(text)[0])
    found = f"has neither checkpoints nor {CONFIG}" if folder.exists() else "does not exist"
    return (
        f"{text!r} is neither a run nor a published model: {folder} {found}. Give a run (runs/first), a step of it "
        f"(runs/first@1000), the folder of a published model ({CONFIG}, *.safetensors) or {HUB}OWNER/NAME"
    )


def keep_copies(run_dir: str) -> None:
    """Copies small files that this process has used into a run directory; for host 0."""
    folder = paths.resolve(run_dir) / FOLDER
    listed: dict[str, str] = {}
    for text, found in sorted(_used.items()):
        names = [name for name in SMALL_FILES if (found / name).exists()]
        if not {CONFIG, TOKENIZER} & set(names):
            continue  # a run that parameters came from
        listed[text] = str(len(listed))
        (folder / listed[text]).mkdir(parents=True, exist_ok=True)
        for name in SMALL_FILES:  # a copy of another folder may be there, from a start before the first checkpoint
            copy = folder / listed[text] / name
            if name in names:
                copy.write_bytes((found / name).read_bytes())
            elif copy.exists():
                copy.unlink()
        copy_templates(found, folder / listed[text])
    if listed:
        paths.write_text_atomically(folder / _LIST, json.dumps(listed, indent=1) + "\n")


def copy_templates(folder: paths.Path, to: paths.Path) -> None:
    """Copies the named chat templates of a model's folder, and removes others."""
    found, copies = ((place / MORE_TEMPLATES) for place in (folder, to))
    named = {file.name: file for file in found.glob("*.jinja")} if found.exists() else {}
    for copy in copies.glob("*.jinja") if copies.exists() else ():
        if copy.name not in named:
            copy.unlink()
    for name, file in named.items():
        copies.mkdir(exist_ok=True)
        (copies / name).write_bytes(file.read_bytes())


def use_copies(run_dir: str | None) -> None:
    """Makes this process read small files from the copies in a run, or, for None, from their folders."""
    global _run_dir  # a folder is named deep inside of a configuration, and a process has one run
    _run_dir = run_dir
    _copies.cache_clear()
    _used.clear()


def look_again() -> None:
    """Makes this process look again for copies in its run, if it reads them."""
    use_copies(_run_dir)


@contextlib.contextmanager
def copies_of(run_dir: str) -> Iterator[None]:
    """Context in which small files are read from the copies of another run."""
    own, used = _run_dir, dict(_used)
    use_copies(run_dir)
    try:
        yield
    finally:
        use_copies(own)
        _used.update(used)


def described(text: str) -> str:
    """Returns where a model is, such as an absolute path or hf://OWNER/NAME@COMMIT."""
    if not text.startswith(HUB):
        return str(paths.resolve(text))
    name, revision = _name_and_revision(text)
    return f"{HUB}{name}@{revision}" if revision else text


def _fetched(text: str, patterns: Sequence[str]) -> paths.Path:
    if not text.startswith(HUB):
        return paths.resolve(text)
    name, revision = _name_and_revision(text)
    import huggingface_hub

    try:
        folder = huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=list(patterns))
    except Exception as error:  # of many types: the hub's, the network's, the disk's
        raise UserError(
            f"{text}: the download failed ({_said(error)}). Is the name right, "
            "is HF_TOKEN set for a gated model, and does this host reach the hub?"
        ) from error
    found = paths.Path(folder)
    if re.fullmatch("[0-9a-f]{40}", found.name):
        _commits.setdefault(text, found.name)
    return found


def _name_and_revision(text: str) -> tuple[str, str | None]:
    """Returns OWNER/NAME and the revision: the commit that this process read first, or that of the text."""
    name, _, revision = text.removeprefix(HUB).strip("/").partition("@")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UserError(f"the path {text!r} names no model; expected hf://OWNER/NAME or hf://OWNER/NAME@REVISION")
    return name, _commits.get(text) or revision or None


def check_name(name: str) -> None:
    """Raises UserError if `name` does not have the form OWNER/NAME."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise UserError(f"{name!r} is not the name of a repository on the Hugging Face Hub; expected OWNER/NAME")


def push(folder: paths.Path, name: str) -> str:
    """Uploads a folder to a repository of the Hugging Face Hub; returns its address.

    The repository OWNER/NAME is created (private) if it does not exist; weights that the upload replaces are deleted.
    Raises UserError if `name` is malformed or the upload fails.
    """
    check_name(name)
    import huggingface_hub

    hub: Any = huggingface_hub.HfApi()
    try:
        address = hub.create_repo(name, private=True, exist_ok=True)
        earlier = [ADAPTER_CONFIG, ADAPTER]
        if not (folder / ADAPTER_CONFIG).exists():  # a model replaces models and adapters, an adapter only adapters
            earlier += [CONFIG, *WEIGHTS]
        hub.upload_folder(repo_id=name, folder_path=str(folder), commit_message="Export", delete_patterns=earlier)
    except Exception as error:  # of many types: the hub's, the network's, the disk's
        raise UserError(
            f"--push {name}: the upload failed ({_said(error)}); {folder} is complete. Is HF_TOKEN set to a token that "
            "may write there, and does this machine reach the hub?"
        ) from error
    return str(address)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
