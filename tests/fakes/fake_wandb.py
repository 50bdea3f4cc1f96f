"""A strict fake of the Weights & Biases routes that `monitor` uses: other requests are rejected and recorded."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "0123456789abcdef" * 2 + "01234567"


@dataclass
class FakeRun:
    """A run as the server keeps it; `files` are what was uploaded with it."""

    name: str
    display: str
    job_type: str
    rows: list[dict[str, Any]]
    group: str | None = None
    state: str = "finished"
    created: str = "2026-01-02T03:04:05"
    files: dict[str, bytes] = field(default_factory=dict)

    def node(self) -> dict[str, Any]:
        """The fields of the client's light fragment."""
        return {
            "id": f"id-{self.name}",
            "projectId": 7,
            "tags": [],
            "name": self.name,
            "displayName": self.display,
            "sweepName": None,
            "state": self.state,
            "group": self.group,
            "jobType": self.job_type,
            "commit": None,
            "readOnly": False,
            "createdAt": self.created,
            "heartbeatAt": self.created,
            "description": None,
            "notes": None,
            "config": "{}",
            "summaryMetrics": "{}",
            "systemMetrics": "{}",
            "historyKeys": None,
            "historyLineCount": len(self.rows),
            "user": {"name": "Ada", "username": "ada"},
        }


@dataclass
class FakeWandb:
    """One entity with one project; `refused` lists every request that was not expected."""

    runs: list[FakeRun]
    entity: str = "ada"
    project: str = "prime-rl"
    url: str = ""
    asked: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The `data` of a GraphQL operation; `KeyError` for an unknown one."""
        match = re.search(r"(?:query|mutation)\s+(\w+)", query)
        operation = match[1] if match else query[:80]
        self.asked.append(operation)
        return {"Runs": self.list_runs, "Run": self.one_run, "RunFullHistory": self.history, "RunFiles": self.file_list,
                "Viewer": self.viewer, "GetDefaultEntity": self.viewer}[operation](query, variables)  # fmt: skip

    def viewer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        return {"viewer": {"id": "u1", "entity": self.entity, "username": "ada", "name": "Ada", "flags": "{}",
                           "email": None, "admin": False, "deletedAt": None, "teams": {"edges": []},
                           "apiKeys": {"edges": []}}}  # fmt: skip

    def list_runs(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        if (variables["entity"], variables["project"]) != (self.entity, self.project):
            return {"project": None}
        expected = json.loads(variables["filters"] or "{}")
        assert set(expected) <= {"group"}, expected
        found = [run for run in self.runs if all(run.group == value for value in expected.values())]
        newest = sorted(found, key=lambda run: run.created, reverse=variables["order"].startswith("-"))
        start = int(variables.get("cursor") or 0)
        page = newest[start : start + variables["perPage"]]
        end = start + len(page)
        edges = [{"node": run.node(), "cursor": str(start + i + 1)} for i, run in enumerate(page)]
        info = {"endCursor": str(end), "hasNextPage": end < len(newest)}
        runs = {"edges": edges, "pageInfo": info}
        return {"project": {"internalId": "7", "runCount": len(newest), "readOnly": False, "runs": runs}}

    def one_run(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        run = self.find(variables)
        return {"project": {"run": run.node() if run else None}}

    def history(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        run = self.find(variables)
        assert run is not None
        assert variables["samples"] >= len(run.rows), "a longer history would be thinned out"
        return {"project": {"run": {"history": [json.dumps(row) for row in run.rows]}}}

    def file_list(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        run = self.find(variables)
        assert run is not None
        names = [name for name in run.files if name in variables["fileNames"]]
        edges = [
            {
                "cursor": name,
                "node": {
                    "id": name,
                    "name": name,
                    "url": f"{self.url}/files/{run.name}/{name}",
                    "directUrl": f"{self.url}/files/{run.name}/{name}",
                    "sizeBytes": len(run.files[name]),
                    "mimetype": "application/json",
                    "updatedAt": run.created,
                    "md5": "",
                },
            }
            for name in names
        ]
        files = {"edges": edges, "pageInfo": {"endCursor": "", "hasNextPage": False}}
        return {"project": {"internalId": "7", "run": {"fileCount": len(edges), "files": files}}}

    def find(self, variables: dict[str, Any]) -> FakeRun | None:
        if (variables["entity"], variables["project"]) != (self.entity, self.project):
            return None
        name = variables.get("name", variables.get("run"))
        return next((run for run in self.runs if run.name == name), None)


@contextmanager
def serve_wandb(fake: FakeWandb) -> Iterator[FakeWandb]:
    """Serve it on a free port of this machine while the body runs."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def respond(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path != "/graphql" or "Authorization" not in self.headers:
                fake.refused.append(f"POST {self.path}")
                return self.respond(404, b"{}")
            body = json.loads(sent)
            try:
                data = fake.answer(body["query"], body.get("variables") or {})
            except (KeyError, AssertionError) as error:
                fake.refused.append(f"{error!r}: {body['query'][:300]}")
                return self.respond(400, json.dumps({"errors": [{"message": f"unexpected {error!r}"}]}).encode())
            self.respond(200, json.dumps({"data": data}).encode())

        def do_GET(self) -> None:
            run, _, name = self.path.removeprefix("/files/").partition("/")
            found = next((r.files[name] for r in fake.runs if r.name == run and name in r.files), None)
            if found is None:
                fake.refused.append(f"GET {self.path}")
            self.respond(404 if found is None else 200, found or b"")

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
