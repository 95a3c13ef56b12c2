"""Emulates the JSON API of Google Cloud Storage on 127.0.0.1, in memory, with errors on demand.

As in the service, an object appears as a whole or not at all, a write or a removal may require a generation, a listing
is sorted and paged, and an upload may come in parts. Permissions are not checked.

    python -m tests.lab.gcs_server   prints its port, then serves until it is killed
    GET  /stand-in/errors?rate=0.05    from now on one request in twenty is answered with 503 or 429 (except those with
                                       the header Of-The-Stand-In); &seconds=0.1 delays each by so much
    GET  /stand-in/errors              {"answered": number of requests, "refused": those answered with 503 or 429}
    GET  /stand-in/ranges              [["BUCKET/NAME", start, stop], …]: content sent since this was last asked
"""

import email
import http.server
import json
import random
import re
import threading
import time
import urllib.parse
import uuid
from typing import Any, NamedTuple

_BUSY = ((503, "backendError"), (429, "rateLimitExceeded"))  # clients are to ask again


class Object(NamedTuple):
    """An object; every write gives it a new generation."""

    content: bytes
    generation: int


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, code: int, reason: str):
        super().__init__(reason)
        self.code, self.reason = code, reason


class Store:
    """The objects of all buckets. Every method is a transaction."""

    def __init__(self):
        self._lock = threading.RLock()
        self._objects: dict[tuple[str, str], Object] = {}
        self._uploads: dict[str, tuple[str, str, dict[str, str], bytearray]] = {}
        self._generation = 1000
        self.rate, self.seconds, self.answered, self.refused = 0.0, 0.0, 0, 0
        self.sent: list[tuple[str, int, int]] = []

    def put(self, bucket: str, name: str, content: bytes, query: dict[str, str]) -> dict[str, Any]:
        """Writes an object and returns its metadata."""
        with self._lock:
            self._require(self._objects.get((bucket, name)), query)
            self._generation += 1
            self._objects[bucket, name] = Object(bytes(content), self._generation)
            return about(bucket, name, self._objects[bucket, name])

    def get(self, bucket: str, name: str, query: dict[str, str]) -> Object:
        """Returns the object. Raises Refused if it does not exist or the query requires another generation."""
        with self._lock:
            found = self._objects.get((bucket, name))
            if found is None:
                raise Refused(404, "notFound")
            self._require(found, query)
            if query.get("ifGenerationNotMatch") == str(found.generation):
                raise Refused(304, "notModified")
            return found

    def delete(self, bucket: str, name: str, query: dict[str, str]) -> None:
        """Removes the object; raises as `get` does."""
        with self._lock:
            self.get(bucket, name, {})
            self._require(self._objects[bucket, name], query)
            del self._objects[bucket, name]

    def move(self, bucket: str, name: str, to_name: str) -> dict[str, Any]:
        """Renames an object and returns its metadata."""
        with self._lock:
            moved = self.put(bucket, to_name, self.get(bucket, name, {}).content, {})
            self.delete(bucket, name, {})
            return moved

    def list(self, bucket: str, query: dict[str, str]) -> dict[str, Any]:
        """Returns a page of names with a prefix, in order; with a delimiter, also folders."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        begin, end = query.get("startOffset", ""), query.get("endOffset") or None
        after, most = query.get("pageToken", ""), int(query.get("maxResults", 1000))
        items, prefixes, last = [], {}, ""
        with self._lock:
            for name in sorted(n for b, n in self._objects if b == bucket and n.startswith(prefix)):
                folder = _folder(name, prefix, delimiter)
                if name < begin or (end is not None and name >= end) or name <= after:
                    continue
                if len(items) + len(prefixes) >= most and folder not in prefixes:
                    return _listing(items, prefixes) | {"nextPageToken": last}
                if folder is not None:
                    prefixes[folder] = None
                    last = folder + "\uffff"
                else:
                    items.append(about(bucket, name, self._objects[bucket, name]))
                    last = name
        return _listing(items, prefixes)

    def begin_upload(self, bucket: str, name: str, query: dict[str, str]) -> str:
        """Begins an upload in parts and returns its key."""
        with self._lock:
            upload = uuid.uuid4().hex
            self._uploads[upload] = (bucket, name, query, bytearray())
            return upload

    def upload(self, upload: str, content: bytes, content_range: str) -> dict[str, Any] | int:
        """Adds a part of an upload; returns the object once complete, else how many bytes have arrived."""
        with self._lock:
            if upload not in self._uploads:
                raise Refused(404, "noSuchUpload")
            bucket, name, query, so_far = self._uploads[upload]
            place = re.match(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", content_range)
            if place and place[1] is not None:
                so_far[int(place[1]) :] = content
            elif not place:
                so_far += content
            if place and (place[2] == "*" or int(place[2]) != len(so_far)):
                return len(so_far)
            return self.put(bucket, name, bytes(so_far), query)

    def _require(self, there: Object | None, query: dict[str, str]) -> None:
        wanted = query.get("ifGenerationMatch")
        if wanted is not None and int(wanted) != (there.generation if there else 0):
            raise Refused(412, "conditionNotMet")


def _folder(name: str, prefix: str, delimiter: str | None) -> str | None:
    rest = name[len(prefix) :]
    if not delimiter or delimiter not in rest:
        return None
    return prefix + rest.split(delimiter)[0] + delimiter


def _listing(items: list, prefixes: dict[str, None]) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": "storage#objects"}
    return found | ({"items": items} if items else {}) | ({"prefixes": list(prefixes)} if prefixes else {})


def about(bucket: str, name: str, found: Object) -> dict[str, Any]:
    """Returns the metadata of an object."""
    when = "2026-01-01T00:00:00.000Z"
    return {
        "kind": "storage#object",
        "id": f"{bucket}/{name}/{found.generation}",
        "bucket": bucket,
        "name": name,
        "size": str(len(found.content)),
        "generation": str(found.generation),
        "metageneration": "1",
        "contentType": "application/octet-stream",
        "storageClass": "STANDARD",
        "timeCreated": when,
        "updated": when,
        "etag": str(found.generation),
    }


class Handler(http.server.BaseHTTPRequestHandler):
    """Handles the requests of one connection in turn."""

    protocol_version = "HTTP/1.1"
    store: Store

    def log_message(self, *_: Any) -> None:
        """Logs nothing, because errors are in the answers."""

    def handle_one_request(self) -> None:
        """Handles a request; a client may disconnect."""
        try:
            super().handle_one_request()
        except ConnectionError:  # the client was killed
            self.close_connection = True

    def answer(self) -> None:
        """Answers a request: of the test itself, with an injected error, or from the store."""
        address = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(address.query, keep_blank_values=True))
        content = self._body()
        if address.path == "/stand-in/errors":
            self.store.rate = float(query.get("rate", self.store.rate))
            self.store.seconds = float(query.get("seconds", self.store.seconds))
            self._send(200, {"answered": self.store.answered, "refused": self.store.refused})
            return
        if address.path == "/stand-in/ranges":
            sent, self.store.sent = self.store.sent, []
            self._send(200, sent)
            return
        self.store.answered += 1
        try:
            if "Of-The-Stand-In" not in self.headers:
                time.sleep(self.store.seconds)
            if "Of-The-Stand-In" not in self.headers and random.random() < self.store.rate:
                self.store.refused += 1
                raise Refused(*random.choice(_BUSY))
            self._route(address.path, query, content)
        except Refused as refused:
            said = {"code": refused.code, "message": refused.reason, "errors": [{"reason": refused.reason}]}
            self._send(refused.code, {"error": said})

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = answer

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, code: int, body: Any = b"", **headers: str) -> None:
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        body = b"" if code in (204, 304) else body
        self.send_response(code)
        for name, value in ({"Content_Type": kind, "Content_Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _route(self, path: str, query: dict[str, str], content: bytes) -> None:
        if path.startswith("/batch"):
            self._batch(content)
        elif found := re.fullmatch(r"(?:/resumable)?/upload/storage/v1/b/([^/]+)/o", path):
            self._upload(found[1], query, content)
        elif found := re.fullmatch(r"/storage/v1/b/([^/]+)/o/([^/]+)/(rewrite|copy)To/b/([^/]+)/o/([^/]+)", path):
            self._copy(found[3], *(urllib.parse.unquote(found[i]) for i in (1, 2, 4, 5)), query)
        elif found := re.fullmatch(r"/storage/v1/b/([^/]+)/o/([^/]+)/moveTo/o/([^/]+)", path):
            bucket, name, to_name = map(urllib.parse.unquote, found.groups())
            self._send(200, self.store.move(bucket, name, to_name))
        elif found := re.fullmatch(r"/storage/v1/b/([^/]+)/o/?", path):
            self._send(200, self.store.list(found[1], query))
        elif found := re.fullmatch(r"(?:/download)?/storage/v1/b/([^/]+)/o/(.+)", path):
            self._object(found[1], urllib.parse.unquote(found[2]), query)
        elif found := re.fullmatch(r"/storage/v1/b/([^/]+)(/storageLayout)?", path):
            self._send(200, {"kind": "storage#bucket", "name": found[1], "location": "US", "locationType": "region"})
        elif path.count("/") > 1 and self.command == "GET":  # the older form of an object's address
            bucket, name = path.removeprefix("/").split("/", 1)
            self._object(bucket, urllib.parse.unquote(name), {**query, "alt": "media"})
        else:
            raise Refused(501, f"the emulator does not support {self.command} {path}")

    def _object(self, bucket: str, name: str, query: dict[str, str]) -> None:
        if self.command == "DELETE":
            self.store.delete(bucket, name, query)
            self._send(204)
            return
        found = self.store.get(bucket, name, query)
        if query.get("alt") != "media":
            self._send(200, about(bucket, name, found))
            return
        size = len(found.content)
        says = {"x-goog-generation": str(found.generation), "x-goog-stored-content-length": str(size)}
        place = re.match(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
        if not place:
            self.store.sent.append((f"{bucket}/{name}", 0, size))
            self._send(200, found.content, **says)
            return
        begin = int(place[1]) if place[1] else max(0, size - int(place[2]))
        end = min(int(place[2]), size - 1) if place[1] and place[2] else size - 1
        if begin >= size:
            raise Refused(416, "requestedRangeNotSatisfiable")
        self.store.sent.append((f"{bucket}/{name}", begin, end + 1))
        self._send(206, found.content[begin : end + 1], Content_Range=f"bytes {begin}-{end}/{size}", **says)

    def _upload(self, bucket: str, query: dict[str, str], content: bytes) -> None:
        kind = query.get("uploadType")
        if "upload_id" in query:
            done = self.store.upload(query["upload_id"], content, self.headers.get("Content-Range", ""))
            if isinstance(done, int):
                self._send(308, **({"Range": f"bytes=0-{done - 1}"} if done else {}))
            else:
                self._send(200, done)
        elif kind == "media":
            self._send(200, self.store.put(bucket, query["name"], content, query))
        elif kind == "resumable":
            name = query.get("name") or json.loads(content)["name"]
            address = f"http://{self.headers['Host']}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id="
            self._send(200, {}, Location=address + self.store.begin_upload(bucket, name, query))
        elif kind == "multipart":
            said, body = _parts(self.headers["Content-Type"], content)
            name = query.get("name") or json.loads(said)["name"]
            self._send(200, self.store.put(bucket, name, body, query))
        else:
            raise Refused(400, f"uploadType {kind}")

    def _copy(self, how: str, bucket: str, name: str, to_bucket: str, to_name: str, query: dict[str, str]) -> None:
        copied = self.store.put(to_bucket, to_name, self.store.get(bucket, name, {}).content, query)
        size = {"totalBytesRewritten": copied["size"], "objectSize": copied["size"]}
        done = {"kind": "storage#rewriteResponse", "done": True, **size, "resource": copied}
        self._send(200, copied if how == "copy" else done)

    def _batch(self, content: bytes) -> None:
        """Answers a batch, which may only have removals; each gets its own answer, as from the service."""
        said = b"Content-Type: " + self.headers["Content-Type"].encode() + b"\r\n\r\n"
        answers = ""
        for part in email.message_from_bytes(said + content).get_payload():
            command, address = part.get_payload().split()[:2]
            found = re.search(r"/b/([^/]+)/o/([^?]+)", address)
            code = 204
            try:
                if command != "DELETE":
                    raise Refused(501, f"the emulator does not support {command} in a batch")
                self.store.delete(found[1], urllib.parse.unquote(found[2]), {})
            except Refused as refused:
                code = refused.code
            asked = (part["Content-ID"] or "<1>").removeprefix("<")
            answers += f"--answer\r\nContent-Type: application/http\r\nContent-ID: <response-{asked}\r\n\r\n"
            answers += f"HTTP/1.1 {code} said\r\nContent-Length: 0\r\n\r\n\r\n"
        self._send(200, f"{answers}--answer--\r\n".encode(), Content_Type="multipart/mixed; boundary=answer")


def _parts(content_type: str, content: bytes) -> tuple[bytes, bytes]:
    """Returns the metadata and the content of a multipart upload."""
    boundary = b"--" + re.search(r"boundary=[\"']?([^\"';]+)", content_type)[1].encode()
    found = []
    for part in content.split(boundary)[1:3]:
        part = part.lstrip(b"\r\n") if not found else part.removeprefix(b"\r\n").removeprefix(b"\n")
        mark = b"\r\n\r\n" if b"\r\n\r\n" in part else b"\n\n"
        found.append(part.partition(mark)[2].removesuffix(b"\n").removesuffix(b"\r"))
    return found[0], found[1]


class Server(http.server.ThreadingHTTPServer):
    """Serves several clients at once."""

    daemon_threads = True
    request_queue_size = 256


if __name__ == "__main__":
    Handler.store = Store()
    server = Server(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
