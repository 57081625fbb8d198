"""A small Hub on the loopback interface: the HTTP requests that huggingface_hub makes to create, upload, list and
download models, answered from memory.

Every repository is a list of commits per branch; a commit is a dictionary of files. Faults can be asked for: a
connection that ends in the middle of an upload or a download.
"""

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

OWNER, WRITER, READER = "somebody", "hf_" + "w" * 34, "hf_" + "r" * 34  # a user, and two tokens of theirs
LARGE = 20_000  # bytes, from which on a file that is not safetensors goes to the large file storage, too


@dataclass
class File:
    content: bytes
    large: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def oid(self) -> str:
        """git's name of the file, or of the pointer to a large one."""
        stored = self.content
        if self.large:
            stored = (
                f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(stored)}\n".encode()
            )
        return hashlib.sha1(b"blob %d\0" % len(stored) + stored).hexdigest()


@dataclass
class Commit:
    files: dict[str, File]
    parent: str
    message: str = ""

    @property
    def sha(self) -> str:
        state = [self.parent, self.message, sorted((name, file.oid) for name, file in self.files.items())]
        return hashlib.sha1(json.dumps(state).encode()).hexdigest()


@dataclass
class Repository:
    private: bool
    branches: dict[str, list[Commit]] = field(default_factory=lambda: {"main": [Commit({}, "", "initial commit")]})

    def find(self, revision: str) -> Commit | None:
        if revision in self.branches:
            return self.branches[revision][-1]
        return next((c for commits in self.branches.values() for c in commits if c.sha == revision), None)


class Hub:
    """Use as a context manager; `endpoint` is its address."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.stored: dict[str, bytes] = {}  # large files, by sha256
        self.requests: list[str] = []  # "METHOD path"
        self.drop_uploads_after: int | None = None  # bytes of a large file
        self.drop_downloads_after: int | None = None  # bytes of any file
        self.part_size: int | None = None  # of a large file that is to be sent in parts
        self.parts: dict[str, dict[int, bytes]] = {}
        handler = type("Handler", (_Handler,), {"hub": self})
        # large files come from an origin of their own, as from the Hub: its client stops at a redirect that leaves it
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for _ in range(2)]
        self.endpoint, self.storage = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)

    def __enter__(self) -> "Hub":
        for server in self._servers:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exc) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        commit = self.repositories[repo_id].find(revision)
        assert commit is not None
        return {name: file.content for name, file in commit.files.items()}

    def uploads(self) -> int:
        """How often a large file, or a part of one, was sent."""
        return sum(request.startswith("PUT ") for request in self.requests)


class _Refused(Exception):
    def __init__(self, status: int, message: str, code: str | None = None):
        self.status, self.message, self.code = status, message, code


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        self.answer()

    do_HEAD = do_POST = do_PUT = do_GET

    # --- what every answer needs

    def answer(self) -> None:
        split = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(split.query).items()}
        self.parts = [unquote(part) for part in split.path.strip("/").split("/")]
        self.hub.requests.append(f"{self.command} {split.path}")
        self.token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        try:
            if self.token not in (None, WRITER, READER):
                raise _Refused(401, "Invalid credentials in Authorization header")
            self.route()
        except _Refused as refused:
            headers = {"X-Error-Message": refused.message} | ({"X-Error-Code": refused.code} if refused.code else {})
            self.json({"error": refused.message}, refused.status, headers)

    def route(self) -> None:
        match self.command, self.parts:
            case "POST", ["api", "repos", "create"]:
                self.create(self.body_json())
            case "POST", ["api", "validate-yaml"]:
                self.validate_card(self.body_json()["content"])
            case "GET", ["api", "models", owner, name]:
                self.info(f"{owner}/{name}", "main")
            case "GET", ["api", "models", owner, name, "revision", revision]:
                self.info(f"{owner}/{name}", revision)
            case "GET", ["api", "models", owner, name, "tree", revision, *folder]:
                self.tree(f"{owner}/{name}", revision, "/".join(folder))
            case "POST", ["api", "models", owner, name, "branch", branch]:
                self.branch(f"{owner}/{name}", branch)
            case "POST", ["api", "models", owner, name, "preupload", revision]:
                self.preupload(f"{owner}/{name}", revision)
            case "POST", ["api", "models", owner, name, "commit", revision]:
                self.commit(f"{owner}/{name}", revision)
            case "POST", [owner, name, "info", "lfs", "objects", "batch"]:
                self.batch(f"{owner}/{name.removesuffix('.git')}")
            case "PUT", ["storage", sha256, *part]:
                self.store(sha256, int(part[0]) if part else None)
            case "POST", ["storage", sha256, "complete"]:
                self.body_json()
                self.hub.stored[sha256] = b"".join(data for _, data in sorted(self.hub.parts.pop(sha256).items()))
                self.json({})
            case (("GET" | "HEAD"), ["storage", sha256]):
                self.send(self.hub.stored[sha256])
            case (("GET" | "HEAD"), [owner, name, "resolve", revision, *path]):
                self.resolve(f"{owner}/{name}", revision, "/".join(path))
            case _:
                raise _Refused(404, f"this hub knows no {self.command} {self.path}")

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def body_json(self):
        return json.loads(self.body())

    def json(self, value, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        if self.command == "PUT" and status >= 400:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def send(self, content: bytes, headers: dict[str, str] | None = None) -> None:
        start = int((self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").split("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        for name, text in (headers or {}).items():
            self.send_header(name, text)
        self.end_headers()
        if self.command == "HEAD":
            return
        most = self.hub.drop_downloads_after
        if most is not None and len(content) > most:
            self.wfile.write(content[start:most])
            self.hang_up()
        else:
            self.wfile.write(content[start:])

    def hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(2)

    # --- repositories

    def repository(self, repo_id: str, write: bool = False) -> Repository:
        found = self.hub.repositories.get(repo_id)
        if found is None or (found.private and self.token is None):
            status = 404 if self.token else 401
            raise _Refused(
                status, "Repository not found" if self.token else "Invalid username or password.", "RepoNotFound"
            )
        if write and (self.token != WRITER or not repo_id.startswith(f"{OWNER}/")):
            raise _Refused(401 if self.token is None else 403, "Forbidden: you need write access")
        return found

    def at(self, repo_id: str, revision: str) -> Commit:
        found = self.repository(repo_id).find(revision)
        if found is None:
            raise _Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found

    def create(self, asked) -> None:
        if self.token is None:
            raise _Refused(401, "Invalid username or password.")
        owner = asked["organization"] or OWNER
        repo_id = f"{owner}/{asked['name']}"
        if self.token != WRITER or owner != OWNER:
            raise _Refused(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
        url = {"url": f"{self.hub.endpoint}/{repo_id}"}
        if repo_id in self.hub.repositories:
            self.json(url | {"error": "You already created this model repo"}, 409)
            return
        self.hub.repositories[repo_id] = Repository(asked.get("visibility") == "private")
        self.json(url)

    def validate_card(self, content: str) -> None:
        try:
            metadata = yaml.safe_load(content.split("---")[1]) if content.startswith("---") else {}
        except yaml.YAMLError as error:
            self.json({"errors": [{"message": str(error)}], "warnings": []}, 400)
            return
        missing = [] if metadata else [{"message": "empty or missing yaml metadata in repo card"}]
        self.json({"errors": [], "warnings": missing})

    def info(self, repo_id: str, revision: str) -> None:
        commit, repository = self.at(repo_id, revision), self.repository(repo_id)
        siblings = [{"rfilename": name} for name in sorted(commit.files)]
        known = {"id": repo_id, "modelId": repo_id, "sha": commit.sha, "private": repository.private}
        self.json(known | {"siblings": siblings, "tags": [], "downloads": 0, "likes": 0})

    def tree(self, repo_id: str, revision: str, folder: str) -> None:
        entries = []
        for name, file in sorted(self.at(repo_id, revision).files.items()):
            if folder and not name.startswith(folder + "/"):
                continue
            entry = {"type": "file", "path": name, "size": len(file.content), "oid": file.oid}
            if file.large:
                entry["lfs"] = {"oid": file.sha256, "size": len(file.content), "pointerSize": 130}
            entries.append(entry)
        if folder and not entries:
            raise _Refused(404, f"{folder} does not exist", "EntryNotFound")
        self.json(entries)

    def branch(self, repo_id: str, branch: str) -> None:
        repository = self.repository(repo_id, write=True)
        self.body()
        if branch in repository.branches:
            raise _Refused(409, "Reference already exists")
        repository.branches[branch] = list(repository.branches["main"])
        self.json({})

    # --- uploads

    def preupload(self, repo_id: str, revision: str) -> None:
        asked = self.body_json()["files"]
        self.repository(repo_id, write=True)
        held = self.at(repo_id, revision).files
        files = []
        for file in asked:
            large = file["size"] >= LARGE or file["path"].endswith(".safetensors")
            mode = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            there = held.get(file["path"])
            files.append(mode | ({"oid": there.sha256 if there.large else there.oid} if there else {}))
        self.json({"files": files})

    def batch(self, repo_id: str) -> None:
        asked = self.body_json()
        self.repository(repo_id, write=True)
        objects = []
        for thing in asked["objects"]:
            sha256, size, part = thing["oid"], thing["size"], self.hub.part_size
            answer = {"oid": sha256, "size": size}
            if sha256 not in self.hub.stored:
                upload = {"href": f"{self.hub.storage}/storage/{sha256}"}
                if part is not None and size > part:
                    urls = {str(n + 1): f"{upload['href']}/{n + 1}" for n in range(-(-size // part))}
                    upload = {"href": upload["href"] + "/complete", "header": {"chunk_size": str(part), **urls}}
                answer["actions"] = {"upload": upload}
            objects.append(answer)
        self.json({"transfer": "basic", "objects": objects})

    def store(self, sha256: str, part: int | None) -> None:
        length, most = int(self.headers["Content-Length"]), self.hub.drop_uploads_after
        if most is not None and length > most:
            self.rfile.read(most)
            self.hang_up()
            return
        data = self.rfile.read(length)
        if part is not None:
            self.hub.parts.setdefault(sha256, {})[part] = data
        elif hashlib.sha256(data).hexdigest() == sha256:
            self.hub.stored[sha256] = data
        else:
            raise _Refused(400, "the content does not have this sha256")
        self.json({}, headers={"ETag": f'"{hashlib.md5(data).hexdigest()}"'})

    def commit(self, repo_id: str, revision: str) -> None:
        lines = [json.loads(line) for line in self.body().splitlines()]
        repository = self.repository(repo_id, write=True)
        before = self.at(repo_id, revision)
        files = dict(before.files)
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = File(base64.b64decode(value["content"]), large=False)
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.stored:
                    raise _Refused(400, f"{value['path']} has not been uploaded")
                files[value["path"]] = File(self.hub.stored[value["oid"]], large=True)
            else:
                raise _Refused(400, f"this hub cannot {line['key']}")
        commit = Commit(files, before.sha, lines[0]["value"]["summary"])
        repository.branches[revision].append(commit)
        url = f"{self.hub.endpoint}/{repo_id}/commit/{commit.sha}"
        self.json({"success": True, "commitOid": commit.sha, "commitUrl": url, "hookOutput": ""})

    # --- downloads

    def resolve(self, repo_id: str, revision: str, path: str) -> None:
        commit = self.at(repo_id, revision)
        headers = {"X-Repo-Commit": commit.sha}
        file = commit.files.get(path)
        if file is None:
            raise _Refused(404, "Entry not found", "EntryNotFound")
        if not file.large:
            self.send(file.content, headers | {"ETag": f'"{file.oid}"'})
            return
        self.send_response(302)
        elsewhere = {"Location": f"{self.hub.storage}/storage/{file.sha256}", "Content-Length": "0"}
        linked = {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(len(file.content))}
        for name, text in (headers | elsewhere | linked).items():
            self.send_header(name, text)
        self.end_headers()
