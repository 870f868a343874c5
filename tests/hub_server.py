"""A hub of one machine: serves folders as repositories by the protocol of huggingface_hub, and notes which files were asked for.

A repository's name may tell how the hub answers: `locked/...` is gated, `broken/...` is down, and what has no folder is missing.
Like the hub, it says 401 for a missing repository to those who send no token and 404 to those who do.
"""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """`with Hub(root) as hub`: repositories are root/<owner>/<name>; `hub.files` are those whose content was sent, in order."""

    def __init__(self, root: Path):
        self.root, self.files, self.commit = root, [], COMMIT
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error) -> None:
        self.server.shutdown()
        self.server.server_close()

    def environment(self, cache: Path, **more: str) -> dict[str, str]:
        """What makes a process use this hub, with a cache of its own and no token."""
        return {"HF_ENDPOINT": self.endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(cache), "HF_TOKEN": "", **more}


def _handler(hub: Hub):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            parts = unquote(urlparse(self.path).path).strip("/").split("/")
            asks_api = parts[:2] == ["api", "models"]
            name, rest = "/".join(parts[2:4] if asks_api else parts[:2]), parts[4:] if asks_api else parts[2:]
            with_token = self.headers.get("Authorization", "").startswith("Bearer ")
            folder, file = hub.root / name, "/".join(rest[2:])
            if name.startswith("broken/"):
                self.send(501)
            elif not folder.is_dir():
                self.refuse(404 if with_token else 401, "RepoNotFound", "Repository not found")
            elif asks_api:
                self.list_files(folder, rest)
            elif name.startswith("locked/") and not (name.endswith("/weights") and rest[-1] == "config.json"):
                self.refuse(403 if with_token else 401, "GatedRepo", "Access is restricted")
            elif not (folder / file).is_file():
                self.refuse(404, "EntryNotFound", "Entry not found")
            else:
                content = (folder / file).read_bytes()
                if self.command == "GET":
                    hub.files.append(file)
                self.send(200, content, {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'})

        def list_files(self, folder: Path, rest: list[str]) -> None:
            files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
            names = [{"rfilename": name} for name in files]
            answer: object = {"id": folder.name, "sha": hub.commit, "siblings": names}
            if rest[:1] == ["tree"]:
                contents = {name: path.read_bytes() for name, path in files.items()}
                answer = [
                    {"type": "file", "path": name, "size": len(each), "oid": hashlib.sha1(each).hexdigest()}
                    for name, each in contents.items()
                ]
            self.send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

        def refuse(self, status: int, code: str, message: str) -> None:
            self.send(status, headers={"X-Error-Code": code, "X-Error-Message": message})

        def send(self, status: int, content: bytes = b"", headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            more = {"X-Repo-Commit": hub.commit, "Content-Length": str(len(content))}
            for key, value in {**(headers or {}), **more}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    return Handler
