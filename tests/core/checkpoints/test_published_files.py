"""Files of published models: where they are found, which ones a run keeps, and which are uploaded."""

import base64
import fnmatch
import hashlib
import http.server
import json
import threading
import typing

import huggingface_hub
import pytest

from core.checkpoints import published_files, steps
from core.errors import UnreachableError, UserError
from core.files import paths


def test_a_model_of_the_hub_is_downloaded_once_and_errors_say_what_to_do(tmp_path, monkeypatch):
    asked = []

    def download(name, *, revision, allow_patterns):
        asked.append((name, revision, allow_patterns))
        if name == "owner/gated":
            raise PermissionError("401\nsecret")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert published_files.weights("hf://owner/name@v2") == paths.Path(tmp_path)
    assert asked == [("owner/name", "v2", [*published_files.WEIGHTS, "adapter_config.json"])]
    assert published_files.weights(str(tmp_path)) == paths.Path(tmp_path)
    with pytest.raises(UserError, match=r"hf://owner/gated: the download failed \(PermissionError: 401\)\. .*HF_TOKEN"):
        published_files.weights("hf://owner/gated")
    with pytest.raises(UserError, match="names no model"):
        published_files.weights("hf://owner")


def test_files_of_the_hub_that_only_the_index_names_are_downloaded(tmp_path, monkeypatch):
    shards = ["model.safetensors-00001-of-00002.safetensors", "model.safetensors-00002-of-00002.safetensors"]
    index = {"weight_map": {"a": shards[0], "b": shards[1], "c": shards[0]}}
    there = {"model.safetensors.index.json": json.dumps(index), "README.md": "x", **dict.fromkeys(shards, "")}

    def download(name, *, revision, allow_patterns):
        for file, content in there.items():
            if any(fnmatch.fnmatch(file, pattern) for pattern in allow_patterns):
                (tmp_path / file).write_text(content)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    published_files.weights("hf://owner/qwen")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({*there} - {"README.md"})


def test_all_files_of_a_model_are_of_the_revision_that_was_read_first(tmp_path, monkeypatch):
    """Another revision is pushed after the configuration was read."""
    asked, newest = [], ["a" * 40, "b" * 40]

    def download(name, *, revision, allow_patterns):
        asked.append(revision)
        return str(tmp_path / "snapshots" / (revision or newest.pop(0)))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert published_files.small_files("hf://owner/pinned").name == "a" * 40
    (tmp_path / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (tmp_path / "snapshots" / ("a" * 40) / "model.safetensors").write_bytes(b"")
    assert published_files.weights("hf://owner/pinned").name == "a" * 40
    assert asked == [None, "a" * 40]
    assert published_files.described("hf://owner/pinned") == f"hf://owner/pinned@{'a' * 40}"
    assert published_files.described(str(tmp_path)) == str(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["config.json", "pytorch_model.bin"], r"the weights are torch pickles \(pytorch_model.bin\).*save_pretrained"),
        (
            ["config.json", "a.gguf"],
            r"no model.safetensors, nor model.safetensors.index.json .*; it has a.gguf, config.json",
        ),
    ],
)
def test_a_model_of_the_hub_without_safetensors_is_refused_before_its_weights_are_downloaded(
    hub, tmp_path, monkeypatch, files, message
):
    hub["files"] = files
    folder = tmp_path / ("c" * 40)
    folder.mkdir()
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: asked.append(k) or str(folder))
    with pytest.raises(UserError, match=rf"hf://owner/pickles-{len(files[1])}: {message}"):
        published_files.weights(f"hf://owner/pickles-{len(files[1])}")
    assert not any("bin" in pattern for options in asked for pattern in options["allow_patterns"])


def test_a_run_with_a_checkpoint_reads_its_copies(tmp_path):
    model, run = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "model.safetensors").write_bytes(b"large")
    assert published_files.small_files(str(model)) == paths.Path(model)
    published_files.small_files(str(tmp_path))  # no published folder
    published_files.keep_copies(str(run))
    assert sorted(f.name for f in (run / "published").rglob("*.*")) == ["config.json", "copies.json"]
    (model / "config.json").write_text("changed")
    published_files.use_copies(str(run))
    assert published_files.small_files(str(model)) == paths.Path(model)  # it may start anew, from another folder
    step = run / "checkpoints" / "3"
    for name in ("state", "meta"):
        (step / name).mkdir(parents=True)
    (step / "_CHECKPOINT_METADATA").write_text("{}")
    published_files.use_copies(str(run))
    copy = published_files.small_files(str(model))
    assert copy == published_files.copy_of(str(model)) != paths.Path(model)
    assert (copy / "config.json").read_text() == '{"model_type": "llama"}'
    published_files.use_copies(None)
    assert published_files.copy_of(str(model)) is None


def test_a_run_directory_that_cannot_be_reached_now_says_that_another_start_can_help(monkeypatch):
    def unreachable(folder):
        raise UnreachableError("no route")

    monkeypatch.setattr(steps, "complete", unreachable)
    published_files.use_copies("gs://bucket/run")
    with pytest.raises(UnreachableError, match="no route"):
        published_files.small_files("a_model")


class Hub(http.server.BaseHTTPRequestHandler):
    """The requests of an upload: creating a repository, and one commit with small and large files; and a listing."""

    protocol_version = "HTTP/1.1"
    seen: typing.ClassVar[dict] = {}

    def do_GET(self):
        if "/tree/" in self.path:
            files = [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in self.seen["files"]]
            return self._send(files)
        return self._send({"siblings": [], "sha": "0" * 40, "id": "owner/name"})

    def do_PUT(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.seen.setdefault("objects", {})[self.path.rsplit("/", 1)[1]] = content
        self._send({})

    def do_POST(self):
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.seen.setdefault("tokens", set()).add(self.headers.get("Authorization"))
        if self.headers.get("Authorization") != "Bearer hf_right":
            self._send({"error": "Invalid token"}, code=401)
        elif self.path.endswith("/api/repos/create"):
            self.seen["created"] = json.loads(content)
            self._send({"url": f"http://{self.headers['Host']}/owner/name"})
        elif "/preupload/" in self.path:
            files = json.loads(content)["files"]
            modes = [{"path": f["path"], "uploadMode": _mode(f["path"]), "shouldIgnore": False} for f in files]
            self._send({"files": modes})
        elif self.path.endswith("/info/lfs/objects/batch"):
            self._send({"transfer": "basic", "objects": [self._upload(o) for o in json.loads(content)["objects"]]})
        elif "/commit/" in self.path:
            self.seen["commit"] = [json.loads(line) for line in content.splitlines()]
            self._send({"commitUrl": f"http://{self.headers['Host']}/owner/name/commit/1", "commitOid": "1" * 40})
        else:
            self._send({})

    def _upload(self, wanted):
        href = f"http://{self.headers['Host']}/objects/{wanted['oid']}"
        return {**wanted, "actions": {"upload": {"href": href, "header": {}}}}

    def _send(self, answer, code=200):
        body = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/vnd.git-lfs+json" if "lfs" in self.path else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        """Says nothing."""


def _mode(name):
    return "lfs" if name.endswith(".safetensors") else "regular"


@pytest.fixture
def hub(monkeypatch):
    """A fake of the hub's API on this machine, and the client pointed to it."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Hub.seen = {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    real = huggingface_hub.HfApi
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: real(endpoint=address))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    yield Hub.seen
    server.shutdown()
    server.server_close()


@pytest.fixture
def exported(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return paths.Path(tmp_path)


@pytest.mark.covers("C17")
def test_an_export_is_uploaded_and_its_token_is_shown_nowhere(hub, exported, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    earlier = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "adapter_config.json"]
    hub["files"] = [*earlier, "config.json", "model.safetensors", "README.md", "tokenizer.json"]
    assert published_files.push(exported, "owner/name").endswith("/owner/name")
    assert hub["created"]["visibility"] == "private"
    assert (hub["created"]["organization"], hub["created"]["name"]) == ("owner", "name")
    assert hub["objects"] == {hashlib.sha256(b"weights").hexdigest(): b"weights"}
    deleted = [line["value"]["path"] for line in hub["commit"] if line["key"] == "deletedFile"]
    assert sorted(deleted) == sorted(earlier)
    written = [line["value"] for line in hub["commit"] if line["key"] in ("file", "lfsFile")]
    files = {value["path"]: value for value in written}
    assert base64.b64decode(files["config.json"]["content"]) == b"{}"
    assert files["model.safetensors"]["oid"] == hashlib.sha256(b"weights").hexdigest()
    said = capsys.readouterr()
    assert "hf_right" not in said.out + said.err


def test_an_adapter_that_is_uploaded_leaves_the_model_that_is_there(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    (tmp_path / "adapter_config.json").write_text("{}")
    hub["files"] = ["config.json", "model.safetensors", "adapter_model.safetensors"]
    published_files.push(paths.Path(tmp_path), "owner/name")
    deleted = [line["value"]["path"] for line in hub["commit"] if line["key"] == "deletedFile"]
    assert deleted == ["adapter_model.safetensors"]


def test_a_refused_upload_leaves_the_folder_and_shows_no_token(hub, exported, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    hub["files"] = []
    with pytest.raises(
        UserError, match=r"--push owner/name: the upload failed .*is complete\. Is HF_TOKEN set"
    ) as caught:
        published_files.push(exported, "owner/name")
    assert "hf_wrong" not in str(caught.value)
    assert "commit" not in hub
    with pytest.raises(UserError, match="expected OWNER/NAME"):
        published_files.push(exported, "name")
