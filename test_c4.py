"""Prepare C4 with the real client, from a local stand-in for the hub that fails like a network."""

import glob
import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread, Timer

import pytest

import prepare_c4
from test_all import HERE, make_data

pytestmark = pytest.mark.slow

C4_DOCUMENTS = {"validation.00000": 20, "train.00000": 30, "train.00001": 5, "train.00002": 20}
C4_BLOCK = 50_000  # bytes per request, so that a file takes several requests
C4_ARGV = "--tokenizer=bytes --workers=1 --shard_tokens=2e6 --max_tokens=15e6 --max_val_tokens=1e6"


@pytest.fixture(scope="module")
def c4_files():
    """{name: content} of all files of C4. The first few have documents of 400 kB, the others none.

    The client decodes 10 MB at once. So it yields records before it fetches the end of train.00000.
    """
    rng, files = random.Random(0), {}
    for path in sum(prepare_c4.list_files("c4"), []):
        name = path.removeprefix("hf://datasets/allenai/c4/")
        lines = []
        for i in range(C4_DOCUMENTS.get(re.search(r"\w+\.\d+", name)[0], 0)):
            text = f"{name} {i} " + 40 * rng.randbytes(5000).hex()
            lines.append(json.dumps({"text": text, "timestamp": "2019-04-25", "url": "u"}))
        files[name] = gzip.compress("\n".join(lines).encode(), 1) if lines else b""
    return files


class Hub(BaseHTTPRequestHandler):
    """Answers the client's requests to the hub.

    A fault is (pattern, what happens to a request). Faults happen in order, each to the first
    request that matches its pattern after the previous fault.
    """

    def do_GET(self):
        hub, path, name = self.server.hub, self.path, self.path.split("/main/")[-1]
        content = hub.files.get(name, b"")
        first, last = map(int, re.findall(r"\d+", self.headers.get("Range", "0-0")))
        request = f"{path} {100 * first // max(1, len(content))}%"
        hub.requests.append(request)
        fault = None
        if hub.faults and re.search(hub.faults[0][0], request):
            fault = hub.faults.pop(0)[1]
        if fault == "kill":
            hub.client.kill()
        elif fault == "gone":
            hub.vanish()
            Timer(4, hub.appear).start()
        elif isinstance(fault, tuple):
            self.reply(*fault)
        elif path == "/api/datasets/allenai/c4":
            self.reply(200, {}, b'{"id": "allenai/c4", "sha": "0", "siblings": []}')
        elif path.startswith("/api/datasets/allenai/c4/tree/main/en?"):
            at = int(path.partition("cursor=")[2] or 0)
            page = list(hub.files.items())[at : at + 1000]
            tree = [{"type": "file", "path": n, "size": len(c), "oid": "0"} for n, c in page]
            link = f'<{hub.url}{path.split("?")[0]}?cursor={at + 1000}>; rel="next"'
            self.reply(200, {"Link": link} if len(page) == 1000 else {}, json.dumps(tree).encode())
        elif path.startswith("/datasets/allenai/c4/resolve/main/") and content:
            self.reply(302, {"Location": path.replace("/resolve/", "/content/")})
        elif path.startswith("/datasets/allenai/c4/content/main/"):
            span = {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
            self.reply(206, span, content[first : last + 1], cut=fault == "cut")
        else:
            self.reply(404)

    def reply(self, status, headers=None, body=b"", cut=False):
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": len(body)}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)

    def log_message(self, *args):
        pass


class StandIn:
    """A server that acts as the hub, with these files and faults."""

    def __init__(self, files, faults):
        self.files, self.faults, self.requests, self.port = files, list(faults), [], 0
        self.appear()

    def appear(self):
        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Hub)
        self.server.hub = self
        self.port = self.server.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def vanish(self):
        """Refuse connections from now on."""
        self.server.shutdown()
        self.server.server_close()

    def prepare(self, directory, *command):
        """Prepare C4 from this hub in another process. Start it again whenever it is killed."""
        env = {k: v for k, v in os.environ.items() if not re.match("HF_|.*proxy", k, re.I)}
        env |= {"HF_ENDPOINT": self.url, "HF_HOME": f"{directory}/home"}
        env |= {"FSSPEC_HF": json.dumps({"block_size": C4_BLOCK})}
        command = [sys.executable, *(command or ["prepare_c4.py"])]
        command += ["--source=c4", f"--data_dir={directory}", *C4_ARGV.split()]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        self.runs, self.status = 0, -signal.SIGKILL
        while self.status == -signal.SIGKILL:
            self.client = subprocess.Popen(command, cwd=HERE, env=env, text=True, **pipes)
            try:
                self.errors = self.client.communicate(timeout=100)[1]
            finally:
                self.client.kill()
            self.runs, self.status = self.runs + 1, self.client.returncode
        self.vanish()


def shards(directory):
    paths = glob.glob(os.path.join(directory, "*.bin"))
    return {os.path.basename(path): open(path, "rb").read() for path in paths}


LATER = (429, {"Retry-After": "0"})
C4_FAULTS = {
    "failures": [
        (r"/tree/", (520,)),
        (r"/c4 ", (500,)),
        *[(r"resolve.*train.00000.* 9\d%", LATER)] * 6,  # the client gives up at the sixth
        (r"content.*train.00001", "cut"),
    ],
    "deaths": [
        (r"/tree/", (429,)),
        (r"validation.00000", (503,)),
        (r"train.00001", "kill"),
        (r"train.00000.* 9\d%", "gone"),
        (r"train.00002", LATER),
    ],
}


def test_c4_from_a_hub_that_fails_equals_c4_from_disk(c4_files, tmp_path):
    for name, content in c4_files.items():
        if content:
            (tmp_path / os.path.basename(name)).write_bytes(content)
    hubs = {name: StandIn(c4_files, faults) for name, faults in C4_FAULTS.items()}
    with ThreadPoolExecutor() as threads:
        runs = [threads.submit(hub.prepare, tmp_path / name) for name, hub in hubs.items()]
        argv = [f"--source={tmp_path}/c4-train*", f"--val_source={tmp_path}/c4-validation*"]
        whole = shards(make_data(tmp_path / "whole", *argv, *C4_ARGV.split()))
    assert len(whole) == 1 + 8 and [run.result() for run in runs] == [None, None]
    for name, hub in hubs.items():
        assert (hub.status, hub.faults) == (0, []), hub.errors
        assert shards(tmp_path / name) == whole, name
        # Two requests for the data set and two listings of two pages, for any number of files. A
        # second process would double that. A fault adds one request.
        asked = [r for r in hub.requests if r.startswith("/api/datasets/")]
        faults = sum(pattern in ("/c4 ", "/tree/") for pattern, _ in C4_FAULTS[name])
        assert len(asked) <= hub.runs * 6 + faults, asked
        # Each block is fetched once for the columns and once for the records, with a redirect each.
        fetched = [r for r in hub.requests if "train.00002" in r]
        size = len(next(content for n, content in c4_files.items() if "train.00002" in n))
        assert len(fetched) <= 2 * 2 * (size // C4_BLOCK + 1) + 1, fetched
    assert [hub.runs for hub in hubs.values()] == [1, 2]


def test_a_hub_that_refuses_for_good_ends_preparation_with_one_line(c4_files, tmp_path):
    impatient = "import sys, data, prepare_c4 as p; data.PATIENCE = 2; "
    impatient += "p.prepare(p.configure(vars(p), argv=sys.argv[1:])[0])"
    hubs = {
        "FileNotFoundError": StandIn({}, []),
        "404 Not Found": StandIn(c4_files, [("/tree/", (404,))]),
        "401 Client Error": StandIn(c4_files, [("/c4 ", (401, {"X-Error-Code": "RepoNotFound"}))]),
        "Connection refused": StandIn(c4_files, []),
    }
    hubs["Connection refused"].vanish()
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda name: hubs[name].prepare(tmp_path / name, "-c", impatient), hubs))
    for reason, hub in hubs.items():
        *others, line = hub.errors.strip().split("\n")
        assert hub.status == 1 and "Traceback" not in hub.errors, hub.errors
        assert line.startswith("hf://datasets/allenai/c4/en/c4-validation.00000-of-00008.json.gz: ")
        assert reason in line
        if reason == "Connection refused":
            assert line.endswith("gave up after 2 s; start again to go on")
        else:
            assert line.endswith("set HF_TOKEN to a token that may read it") and not others, others
