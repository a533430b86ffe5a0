"""A fake Hugging Face hub on loopback: the routes by which its client makes repositories, commits and loads.

POST /api/repos/create                         409 if it exists, 403 in another's namespace
GET  /api/KIND/ID[/revision/REV]               who sees it, its files, the header of its card
GET  /api/KIND/ID/tree/REV[/FOLDER]            files with sizes and hashes
POST /api/KIND/ID/paths-info/REV               the same of some paths
GET  /api/KIND/ID/auth-check/write             whether the token may write
POST /api/validate-yaml                        the header of a card
POST /api/KIND/ID/preupload/REV                which files are large
POST /ID.git/info/lfs/objects/batch, PUT /lfs/OID, POST /lfs/verify
POST /api/KIND/ID/commit/REV                   lines of JSON
GET  /[datasets/]ID/resolve/REV/FILE           a file
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from huggingface_hub.repocard_data import model_index_to_eval_results

LARGE = (".safetensors", ".parquet")
LICENCES = {"apache-2.0", "mit", "other", "llama3.1", "cc-by-4.0", "gemma"}
REPO_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
Files = dict[str, bytes]


class Refused(Exception):
    """Answer with this status and, if there is one, the hub's name for the error."""

    def __init__(self, status: int, code: str = "") -> None:
        self.status, self.code = status, code


@dataclass
class Repo:
    """A repository: its files after each commit."""

    private: bool
    commits: list[tuple[str, Files]] = field(default_factory=list)

    def add(self, files: Files) -> str:
        text = f"{len(self.commits)} {sorted(files)} {[hashlib.sha1(v).hexdigest() for v in files.values()]}"
        self.commits.append((hashlib.sha1(text.encode()).hexdigest(), files))
        return self.commits[-1][0]

    def at(self, revision: str) -> tuple[str, Files]:
        found = self.commits[-1:] if revision == "main" else [c for c in self.commits if c[0] == revision]
        if not found:
            raise Refused(404, "RevisionNotFound")
        return found[0]

    @property
    def files(self) -> Files:
        return self.commits[-1][1]


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def file_info(path: str, content: bytes) -> dict[str, Any]:
    info = {"type": "file", "path": path, "size": len(content), "oid": git_hash(content)}
    if path.endswith(LARGE):
        info["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return info


def header_of(card: str) -> dict[str, Any]:
    match = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    found = yaml.safe_load(match[1]) if match else {}
    return found if isinstance(found, dict) else {}


def faults(card: str) -> list[str]:
    """What the hub would not take in the header of a card."""
    header = header_of(card)
    listed = {name: header.get(name) or [] for name in ("base_model", "datasets", "tags", "license")}
    texts = {name: [value] if isinstance(value, str) else value for name, value in listed.items()}
    found = [f"{name} must be texts" for name, v in texts.items() if not all(isinstance(x, str) for x in v)]
    for name in ("base_model", "datasets"):
        found += [f'"{name}" with value "{x}" is not valid' for x in texts[name] if not REPO_ID.fullmatch(x)]
    found += [f'"license" must be one of the list, not "{x}"' for x in texts["license"] if x not in LICENCES]
    try:
        _, results = model_index_to_eval_results(header.get("model-index") or [{"name": "", "results": []}])
    except (KeyError, TypeError) as error:
        return [*found, f"model-index: {error!r}"]
    for result in results:
        if not (result.task_type and result.dataset_type and result.dataset_name and result.metric_type):
            found.append("model-index: task.type, dataset.type, dataset.name and metrics.type must be there")
    return found


class FakeHub:
    """The hub, in threads of a test.

    Args:
        tokens: Token -> the user that it is of; one that begins with "read" may only read.
        refused: Start of a path -> the status that its next request gets, once.
    """

    def __init__(self, tokens: dict[str, str]) -> None:
        self.tokens = tokens
        self.repos: dict[tuple[str, str], Repo] = {}
        self.large: dict[str, bytes] = {}
        self.refused: dict[str, int] = {}
        self.requests: list[str] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> FakeHub:
        Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def put(self, repo_id: str, files: dict[str, str], kind: str = "model", private: bool = False) -> Repo:
        """Make a repository of somebody."""
        self.repos[kind, repo_id] = repo = Repo(private)
        repo.add({name: text.encode() for name, text in files.items()})
        return repo

    def handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                hub.requests.append(f"{self.command} {self.path}")
                try:
                    hub.maybe_refuse(self.path)
                    status, content, headers = 200, *hub.route(self.command, self.path, body, self.user())
                except Refused as refused:
                    status, content = refused.status, b'{"error": "refused"}'
                    headers = {"X-Error-Code": refused.code} if refused.code else {}
                if isinstance(content, tuple):
                    status, content = content
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_HEAD = do_POST = do_PUT = answer

            def user(self) -> str | None:
                token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
                if token and token not in hub.tokens:
                    raise Refused(401)
                return f"{token} {hub.tokens[token]}" if token else None

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def maybe_refuse(self, path: str) -> None:
        for start in [start for start in self.refused if path.startswith(start)]:
            raise Refused(self.refused.pop(start))

    def route(self, verb: str, path: str, body: bytes, user: str | None) -> tuple[Any, dict[str, str]]:
        """Return the answer, or a status and the answer, and headers."""
        url = urlsplit(path)
        path, query = unquote(url.path), parse_qs(url.query)
        if path == "/api/repos/create":
            return self.create(json.loads(body), user), {}
        if path == "/api/validate-yaml":
            found = [{"message": fault} for fault in faults(json.loads(body)["content"])]
            return (400 if found else 200, {"errors": found, "warnings": []}), {}
        if match := re.fullmatch(r"/lfs/(\w+)", path):
            return self.take_large(verb, match[1], body), {}
        if match := re.fullmatch(r"/(datasets/)?(.+?)\.git/info/lfs/objects/batch", path):
            self.repo("dataset" if match[1] else "model", match[2], user, write=True)
            return self.batch(json.loads(body)["objects"]), {"Content-Type": "application/vnd.git-lfs+json"}
        if match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repo = self.repo("dataset" if match[1] else "model", match[2], user)
            return resolve(repo, match[3], match[4])
        if match := re.fullmatch(
            r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/([\w-]+))?(?:/([^/]+))?(?:/(.+))?", path
        ):
            kind, repo_id, action, revision, folder = match.groups()
            writes = action in ("preupload", "commit", "auth-check")
            repo = self.repo(kind, repo_id, user, write=writes)
            return self.api(repo, repo_id, action or "revision", revision or "main", folder, body, query)
        raise Refused(404)

    def repo(self, kind: str, repo_id: str, user: str | None, write: bool = False) -> Repo:
        """Return a repository if the user may read or write it."""
        token, _, name = (user or " ").partition(" ")
        repo, is_own = self.repos.get((kind, repo_id)), repo_id.startswith(f"{name}/")
        if repo is None or (repo.private and not is_own):
            raise Refused(404 if user else 401, "RepoNotFound")
        if write and (not is_own or token.startswith("read")):
            raise Refused(403)
        return repo

    def create(self, asked: dict[str, Any], user: str | None) -> Any:
        token, _, name = (user or " ").partition(" ")
        kind = asked.get("type") or "model"
        repo_id = f"{asked['organization'] or name}/{asked['name']}"
        if user is None:
            raise Refused(401)
        if not repo_id.startswith(f"{name}/") or token.startswith("read"):
            raise Refused(403)
        prefix = "datasets/" if kind == "dataset" else ""
        answer = {"url": f"{self.url}/{prefix}{repo_id}", "name": repo_id}
        if (kind, repo_id) in self.repos:
            return 409, answer
        is_private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.put(repo_id, {".gitattributes": "*.safetensors filter=lfs\n"}, kind, is_private)
        return answer

    def batch(self, objects: list[dict[str, Any]]) -> dict[str, Any]:
        """Ask for those large files that are not here yet."""
        for item in objects:
            if item["oid"] not in self.large:
                links = {"upload": f"{self.url}/lfs/{item['oid']}", "verify": f"{self.url}/lfs/verify"}
                item["actions"] = {name: {"href": link} for name, link in links.items()}
        return {"transfer": "basic", "objects": objects}

    def take_large(self, verb: str, name: str, body: bytes) -> Any:
        if verb == "PUT":
            if hashlib.sha256(body).hexdigest() != name:
                raise Refused(422)
            self.large[name] = body
        elif json.loads(body)["oid"] not in self.large:
            raise Refused(404)
        return {}

    def api(
        self,
        repo: Repo,
        repo_id: str,
        action: str,
        revision: str,
        folder: str | None,
        body: bytes,
        query: Any,
    ) -> tuple[Any, dict[str, str]]:
        sha, files = repo.at("main" if action == "auth-check" else revision)
        if action == "revision":
            siblings = [{"rfilename": name} for name in files]
            header = header_of(files.get("README.md", b"").decode())
            about = {"sha": sha, "private": repo.private, "siblings": siblings, "cardData": header}
            return {"id": repo_id, "modelId": repo_id, "tags": [], "downloads": 0, **about}, {}
        if action == "tree":
            return tree(files, folder or "", "recursive" in query and query["recursive"][0] != "False"), {}
        if action == "paths-info":
            paths = parse_qs(body.decode())["paths"]
            return [file_info(path, files[path]) for path in paths if path in files], {}
        if action == "preupload":
            return {"files": [upload_mode(item["path"], files) for item in json.loads(body)["files"]]}, {}
        if action == "commit":
            return {"commitOid": self.commit(repo, body), "commitUrl": f"{self.url}/{repo_id}"}, {}
        if action == "auth-check":
            return {}, {}
        raise Refused(404)

    def commit(self, repo: Repo, body: bytes) -> str:
        files = dict(repo.files)
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        return repo.add(files)


def upload_mode(path: str, files: Files) -> dict[str, Any]:
    info = file_info(path, files[path]) if path in files else {}
    oid = info["lfs"]["oid"] if "lfs" in info else info.get("oid")
    mode = "lfs" if path.endswith(LARGE) else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": False, **({"oid": oid} if oid else {})}


def tree(files: Files, folder: str, recursive: bool) -> list[dict[str, Any]]:
    start = f"{folder}/" if folder else ""
    inside = {name: content for name, content in files.items() if name.startswith(start)}
    if folder and not inside:
        raise Refused(404, "EntryNotFound")
    folders = sorted({start + n.removeprefix(start).split("/")[0] for n in inside if "/" in n[len(start) :]})
    shown = [name for name in inside if recursive or "/" not in name[len(start) :]]
    listed = [{"type": "directory", "path": name, "oid": git_hash(name.encode())} for name in folders]
    return listed + [file_info(name, files[name]) for name in shown]


def resolve(repo: Repo, revision: str, name: str) -> tuple[bytes, dict[str, str]]:
    sha, files = repo.at(revision)
    if name not in files:
        raise Refused(404, "EntryNotFound")
    info = file_info(name, files[name])
    etag = info["lfs"]["oid"] if "lfs" in info else info["oid"]
    return files[name], {"X-Repo-Commit": sha, "ETag": f'"{etag}"'}
