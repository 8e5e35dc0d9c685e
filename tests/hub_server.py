"""A stand-in of the Hub on the loopback: the few routes that the real client needs to make a repository, commit, read."""

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Repositories in memory.

    Attributes:
        url: where it listens.
        files: (repository, path) -> bytes, of all branches alike.
        requests: "METHOD /path" of everything that was asked.
        commits: header of each commit, with the branch.
        created: what was asked for in `create_repo`.
    """

    def __init__(self):
        self.files, self.blobs = {}, {}
        self.requests, self.commits, self.created = [], [], []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def answer(self, status, body=b"", **headers):
                body = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in {"Content-Length": len(body), **headers}.items():
                    self.send_header(name.replace("_", "-"), str(value))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def handle_one(self):
                path = unquote(urlparse(self.path).path)
                hub.requests.append(f"{self.command} {path}")
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.answer(*hub.respond(self.command, path, body)) if self.command not in ("GET", "HEAD") else (
                    self.read(path)
                )

            do_POST = do_PUT = do_GET = do_HEAD = handle_one

            def read(self, path):
                repo, _, rest = path.strip("/").partition("/resolve/")
                data = hub.files.get((repo, rest.partition("/")[2]))
                if data is None:
                    self.answer(404, b"", X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
                else:
                    etag = f'"{hashlib.sha1(data).hexdigest()}"'
                    self.answer(200, data, ETag=etag, X_Repo_Commit=COMMIT, Content_Type="application/octet-stream")

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def respond(self, method, path, body):
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            asked = self.created[-1]
            return 200, {"url": f"{self.url}/{asked['organization']}/{asked['name']}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if "/branch/" in path:
            return 200, {}
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = [
                {"path": n, "uploadMode": "lfs" if n.endswith(".safetensors") else "regular", "shouldIgnore": False}
                for n in names
            ]
            return 200, {"files": modes}
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**o, "actions": {"upload": {"href": f"{self.url}/lfs/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects}
        if path.startswith("/lfs/") and method == "PUT":
            assert hashlib.sha256(body).hexdigest() == path.removeprefix("/lfs/")
            self.blobs[path.removeprefix("/lfs/")] = body
            return 200, b""
        if "/commit/" in path:
            repo, _, branch = path.removeprefix("/api/models/").partition("/commit/")
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "header":
                    self.commits.append({**value, "branch": branch})
                elif entry["key"] == "file":
                    self.files[repo, value["path"]] = base64.b64decode(value["content"])
                else:
                    self.files[repo, value["path"]] = self.blobs[value["oid"]]
            url = f"{self.url}/{repo}/commit/{COMMIT}"
            return 200, {"success": True, "commitOid": COMMIT, "commitUrl": url}
        return 404, {"error": f"the stand-in has no {method} {path}"}
