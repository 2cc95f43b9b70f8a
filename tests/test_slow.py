"""The tests of `make slow`: C4 from a failing hub, kills, lm-eval, bench, documented commands."""

import glob
import gzip
import json
import math
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread, Timer
from types import SimpleNamespace

import gpu
import numpy as np
import pytest
import torch
from test_designs import some_lanes
from test_lora import write_conversations

import bhyt
import checkpoint as checkpoints
import data as data_file
import nag
import prepare_c4
import tasks
from test_all import (
    HERE,
    TINY_RUN,
    assert_same_state,
    cases,
    evaluated,
    log_of,
    make_data,
    ranks,
    refuses,
    script,
    shaken,
    tiny,
    train,
    write_texts,
)

pytestmark = pytest.mark.slow


# ------------------------------------------------------------------------------------------------
# C4

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
            assert line.endswith("gave up after 2 s; start again to continue")
        else:
            assert line.endswith("set HF_TOKEN to a token that may read it") and not others, others


# ------------------------------------------------------------------------------------------------
# Training in several processes


@cases("more, close", [
    ({}, 2e-4), ({"optimizer": "muon"}, 2e-4), ({"moe_experts": 4}, 3e-3),
])  # fmt: skip
def test_a_run_resumes_on_any_number_of_ranks(data, tmp_path, more, close):
    """Some of the runs are compiled. All have the loss curve of one eager process."""
    one, run = tmp_path / "a", tmp_path / "b"
    how = dict(min_lr=4e-3, total_batch_tokens=256)  # a constant rate
    train(data, one, **how, **more, max_iters=9)
    for last, world, shard, compile in (
        (2, 2, "fsdp", False), (3, 1, "none", False), (5, 4, "fsdp", False), (7, 2, "none", True),
        (9, 2, "fsdp", True),
    ):  # fmt: skip
        start = dict(init_from="auto", world=world, shard=shard, compile=compile)
        ranks(data, run, **start, **how, **more, max_iters=last)
    assert log_of(run).losses == pytest.approx(log_of(one).losses, abs=close)
    states = (checkpoints.load_model(path)[1].state_dict() for path in (run, one))
    torch.testing.assert_close(*states, rtol=1e-2, atol=10 * close)


@cases("world, shard, kills", [(1, "none", 4), (2, "none", 4), (2, "fsdp", 8)])
def test_kill_9_of_everything_changes_nothing(data, tmp_path, world, shard, kills):
    """All ranks are killed and started again."""
    one, two, rng = tmp_path / "one", tmp_path / "two", random.Random(0)
    how = dict(world=world, shard=shard, eval_interval=0, total_batch_tokens=256)
    how |= dict(max_iters=6 * kills + 20)
    ranks(data, one, **how)  # saves every 30 s and at its end
    how |= dict(save_interval=1, init_from="auto")
    for kill in range(1, kills + 1):
        started, newest, goal = ranks(data, two, **how, join=False), None, 6 * kill
        goal += rng.randrange(4)
        while newest is None or checkpoints.load(newest)["step"] < goal:
            assert all(process.is_alive() for process in started.processes), "see the ranks' files"
            time.sleep(0.02 + rng.random() * 0.05)
            newest = checkpoints.newest(str(two))
        for process in started.processes:
            process.kill()
        for process in started.processes:
            process.join()
    ranks(data, two, **how)
    assert_same_state(one, two)
    assert log_of(two).losses == log_of(one).losses and len(log_of(two).headers) == kills + 1


def test_ctrl_c_while_compiling_ends_a_run_at_once(data, tmp_path):
    command = [sys.executable, "train.py", *TINY_RUN[:-1], "--compile=True"]
    command += [f"--data_dir={data}", f"--out_dir={tmp_path}"]
    how = dict(cwd=HERE, env=os.environ | {"TORCH_WARM_POOL": "1"}, stdout=subprocess.PIPE)
    with subprocess.Popen(command, **how, text=True) as run:
        assert any(line.startswith("compiling") for line in run.stdout)
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=10) == -signal.SIGINT
    assert checkpoints.load(checkpoints.newest(str(tmp_path)))["step"] == 0


# ------------------------------------------------------------------------------------------------
# lm-eval's harness


CHOICES = [
    {"q": f"{a} and {b} is", "choices": [str(a + b), str(a), "no"], "gold": 0}
    for a, b in ((1, 2), (3, 4), (2, 2))
]
TASKS = {  # the three kinds
    "tiny_choice": dict(output_type="multiple_choice", doc_to_text="{{q}}", doc_to_target="gold",
                        doc_to_choice="{{choices}}"),
    "tiny_rolling": dict(output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{q}}",
                         metric_list=[{"metric": "byte_perplexity"}]),
    "tiny_writing": dict(output_type="generate_until", doc_to_text="{{q}}",
                         doc_to_target="{{choices[0]}}", metric_list=[{"metric": "exact_match"}],
                         generation_kwargs={"until": [" "], "max_gen_toks": 5}),
}  # fmt: skip


def write_tasks(directory):
    directory.mkdir()
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHOICES))
    files = {"data_files": {"test": f"{directory}/rows.jsonl"}}
    where = dict(dataset_path="json", dataset_kwargs=files, test_split="test")
    for name, task in TASKS.items():  # JSON is YAML too
        (directory / f"{name}.yaml").write_text(json.dumps({"task": name} | where | task))
    return directory


def test_the_scores_of_the_harness_equal_those_of_a_loop(runs, tmp_path, monkeypatch, capsys):
    pytest.importorskip("lm_eval", reason="make slow installs lm-eval")
    run, how = runs / "a", dict(task_dir=write_tasks(tmp_path / "tasks"))
    report = evaluated(run, "tasks", tasks=",".join(TASKS), **how)
    _, model = checkpoints.load_model(run)
    choice, rolling, writing, versions = report["tasks"].values()
    assert "tiny_choice" in capsys.readouterr().out and set(versions) == {"lm_eval", "datasets"}

    def score(context, continuation):
        ids, n = [256, *(context + continuation).encode()], len(continuation.encode())
        logp = model(torch.tensor([ids[-33:-1]]))[0][0, -n:].detach().log_softmax(-1)
        return logp[range(n), [*continuation.encode()]].sum().item()

    scores = [[score(row["q"], " " + choice) for choice in row["choices"]] for row in CHOICES]
    lengths = [[len(choice) for choice in row["choices"]] for row in CHOICES]
    assert choice["acc,none"] == np.mean(np.argmax(scores, axis=1) == 0)
    assert choice["acc_norm,none"] == np.mean(np.argmax(np.divide(scores, lengths), axis=1) == 0)
    assert choice["acc_stderr,none"] >= 0 and writing["exact_match,none"] == 0
    nats, length = (sum(f("", row["q"]) for row in CHOICES) for f in (score, lambda _, q: len(q)))
    assert rolling["byte_perplexity,none"] == pytest.approx(math.exp(-nats / length), rel=1e-5)
    half = evaluated(run, "tasks", tasks="tiny_choice", limit=2, num_fewshot=0, **how)["tasks"]
    assert half["tiny_choice"]["acc,none"] in (0, 0.5, 1)
    asked, none = {}, lambda *_, **options: asked.update(options) or {"results": {}}
    with monkeypatch.context() as patch:
        patch.setattr("lm_eval.simple_evaluate", none)
        evaluated(run, "tasks", tasks="tiny_choice", seed=5, **how)
    assert [value for key, value in asked.items() if key.endswith("seed")] == [5] * 4
    refuses("no chioce; there is tiny_choice", evaluated, run, "tasks", tasks="chioce", **how)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    refuses("pip install lm-eval", evaluated, run, "tasks")


def test_writing_stops_at_stop_strings_and_end_of_text(monkeypatch):
    encoding, asked = data_file.get_tokenizer("bytes"), []
    model = SimpleNamespace(config=SimpleNamespace(block_size=32))

    def written(ids, context, *how):
        stream = lambda *args, **how: asked.append(args[1]) or (torch.tensor([[i]]) for i in ids)
        monkeypatch.setattr(tasks, "stream_tokens", stream)
        return tasks.write_until(model, encoding, context, *how, {}, "cpu")

    assert written(b"so it is.\nQ: more", "x" * 99, ["Q:", "\n"], 256) == "so it is."
    assert len(asked[0][0]) == 16  # half a window of the context stays
    assert written([97, 98, 256], "x", ["Q:"], 9) == "ab"
    encoding.start, encoding.stops = [], [256, 98]  # as an imported tokenizer may have them
    assert written([97, 256], "", [], 9) == "a" and asked[-1].tolist() == [[256]]
    assert written([97, 98, 99], "x", [], 9) == "a"
    encoding.stops = [98]
    assert written([97, 256, 99], "x", [], 9) == "ac"  # special tokens are no text
    assert written([97, 256, 99], "x", ["", "<|endoftext|>"], 9) == "a"


def test_a_task_decides_how_its_texts_are_sampled(monkeypatch):
    pytest.importorskip("lm_eval", reason="make slow installs lm-eval")
    encoding, asked = data_file.get_tokenizer("bytes"), []
    monkeypatch.setattr(tasks, "write_until", lambda *how: asked.append(how[3:6]) or "")
    lm = tasks.harness(tiny(vocab_size=257), encoding, 1, "cpu")
    write = lambda **how: lm.generate_until([SimpleNamespace(args=("x", {"until": ["a"]} | how))])
    write(temperature=1.0, do_sample=False, max_gen_toks=5)
    write(do_sample=True, top_k=3, top_p=0.9, num_beams=1)
    write(temperature=0.5, top_k=0)
    stops, one = ["a", "<|endoftext|>"], {"temperature": 1.0, "top_k": 3, "top_p": 0.9}
    half = {"temperature": 0.5, "top_k": None, "top_p": None}
    assert asked == [(stops, 5, {"temperature": 0.0}), (stops, 256, one), (stops, 256, half)]
    for name, value in (("repetition_penalty", 1.2), ("num_beams", 2)):
        refuses(f"a task asks for {{'{name}': {value}}}", write, **{name: value})


# ------------------------------------------------------------------------------------------------
# Studies, speed, README, GUIDE


def test_a_study_trains_and_measures_a_real_run(data, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(os.path.join(HERE, "runs"))
    import study

    monkeypatch.setattr(study, "ROOT", tmp_path)
    argv = [arg for arg in TINY_RUN if not arg.startswith("--device")]
    settings = study.parse([*argv, f"--data_dir={data}"])
    look = ("--what=depth", "--depth_tokens=256")
    (line,) = study.run("toy", [settings], look)
    assert line["loss"] < 6 and line["steps"] == 6 and len(line["curve"]) == 6
    assert len(line["depth"]["norm"]) == settings["n_layer"] + 1
    assert line["settings"]["residual"] == "nag" and "data_dir" not in line["settings"]
    assert study.run("toy", [settings], look) == study.find("toy", [settings]) == [line]
    left = (tmp_path / "out" / "study").glob(f"toy-{line['key']}-*")
    assert [path.suffix for path in left] == [".lock"]
    step, start = study.probe(settings, steps=4)
    assert 0 < step < 60 and 0 <= start < 60
    assert not list((tmp_path / "out" / "study").glob("probe-*"))


@torch.no_grad()
def test_the_theory_of_bhyt_holds_for_independent_inputs():
    model = tiny(residual="bhyt", n_embd=64, n_head=4, n_kv_head=2, bhyt_unit=True)
    block = shaken(model).blocks[0]
    residual, norm = block.attn_residual, block.attn_residual.norm
    x = torch.randn(4000, 32, 64) * norm.gain * norm.lam / bhyt.KAPPA
    v = block.attn.wv(x).mean(1).view(-1, 2, 1, 16).expand(-1, 2, 2, 16)  # uniform attention
    sampled = block.attn.wo(v.flatten(1)).square().mean().item()
    added = residual.c * residual.output_variance()
    assert added.item() == pytest.approx(sampled, rel=0.05)


def test_nag_compiles_to_one_kernel_forward_and_one_backward():
    from torch._inductor.utils import run_and_get_code

    lanes = some_lanes(4, 16, 64, dtype=torch.float32)
    compiled, grads = torch.compile(nag.rotate, fullgraph=True), [x.detach() for x in lanes[:2]]
    _, codes = run_and_get_code(lambda: torch.autograd.backward(compiled(*lanes), grads))
    assert [len(re.findall(r"^cpp_fused\w+ = ", code, re.M)) for code in codes] == [1, 1]


def test_gpu_py_measures_in_turn_and_goes_on_after_a_failure(tmp_path, monkeypatch, capsys):
    shape = "--n_layer=1 --n_head=2 --n_embd=16 --block_size=16 --vocab_size=32 --batch_size=2"
    small = f"{HERE}/config/plain.py {shape} --rounds=3 --what=residual"
    processes = {
        "bad name": f"{small} --modes=nothing",
        "fails in its turn": f"{small},nanogpt --modes=prenorm",
        "good": f"{small} --modes=prenorm,lns",
    }
    for name, value in (("DEVICE", "cpu"), ("FOLDER", tmp_path), ("PROCESSES", processes)):
        monkeypatch.setattr(gpu, name, value)
    (tmp_path / "model.py").write_text("GPT = GPTConfig = None")
    monkeypatch.setattr(gpu, "nanogpt_model", str(tmp_path / "model.py"))
    monkeypatch.setattr(gpu, "RESULT", tmp_path / "all.json")
    monkeypatch.setattr(gpu.bench, "floors", lambda *how: (1e9, 1e9))
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    (tmp_path / "all.json").write_text('{"bad name": 1, "good": 2}')
    gpu.main()
    found = json.loads((tmp_path / "all.json").read_text())
    assert [*found] == ["bad name", "good"] and found["bad name"] == 1  # measured before
    assert [*found["good"]["residual"]] == [*found["good"]["kernels"]] == ["prenorm", "lns"]
    assert capsys.readouterr().out.count("failed, exit code 1") == 2
    with pytest.raises(SystemExit, match="no name starts so"):
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--only=x"])
        gpu.main()


def test_bench_keeps_every_number(tmp_path, capsys, quick_compiler):
    how = dict(n_layer=1, n_head=2, n_embd=32, block_size=32, batch_size=2, rounds=3, quick=True)
    how |= dict(prompt_tokens=8, new_tokens=4, batches_of=2, rates="0,0.4")
    how |= dict(modes="nag,nag", out=tmp_path / "bench.json")
    script("bench.py", what="forward,residual,train,memory,generate,mod", **how)
    printed, report = capsys.readouterr().out, json.load(open(how["out"]))
    assert set(report["forward"]) == set(report["train"]) == {"nag", "nag again"}
    assert [*report["residual"]] == ["nag", "nag again"]
    train = report["train"]["nag"]
    assert train["first"] > train["median"] > 0
    prompt, decoding, forwards = report["generate"]
    assert prompt == "prompt, 2 at once" and forwards == "a token, no cache, " + decoding
    assert decoding == "4 new, 2 at once"
    named = [f"{kind}, rate {rate}" for kind in ("forward", "step") for rate in ("0", "0.4")]
    assert [*report["mod"]] == named
    assert [*report["generate"][decoding]] == ["nag", "nag again", "the weights"]
    timed = [report[part] for part in ("forward", "residual", "train", "mod")]
    for part in (*timed, *report["generate"].values()):
        first = next(iter(part.values()))
        assert first["ratio"] == [1, 1, 1] and len(first["seconds"]) == 3
    memory = report["memory"]["nag"]
    assert 0 < memory["optimizer"] < 3 * memory["weights"] < memory["peak"]
    assert min(report["copy_bytes_s"], report["matmul_flops_s"]) > 1e8
    texts = ("tokens/s", "of reading the weights", "of the FLOPs", "the first step took")
    assert all(text in printed for text in texts)


LIKE_NANOGPT = """
import torch
from collections import namedtuple

GPTConfig = namedtuple("GPTConfig", "n_layer n_head n_embd block_size vocab_size dropout bias")


class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head = torch.nn.Embedding(config.vocab_size, config.vocab_size)

    def forward(self, idx, targets):
        return None, torch.nn.functional.cross_entropy(self.head(idx).mT, targets)

    def configure_optimizers(self, decay, rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=rate, betas=betas)
"""


def test_bench_races_nanogpt(tmp_path, quick_compiler):
    (tmp_path / "model.py").write_text(LIKE_NANOGPT)
    how = dict(n_layer=1, n_head=2, n_embd=32, block_size=32, batch_size=2, rounds=3, quick=True)
    how |= dict(what="nanogpt", modes="prenorm", nanogpt_model=tmp_path / "model.py")
    script("bench.py", **how, out=tmp_path / "bench.json")
    report = json.load(open(tmp_path / "bench.json"))["nanogpt"]
    assert [*report] == ["nanoGPT", "prenorm", "prenorm, one graph"]


def test_every_break_of_the_mutants_still_applies():
    """Here, and not in the suite that the breaks are tried on: this would notice all of them."""
    for name, file, before, after, test in runpy.run_path(f"{HERE}/tests/mutants.py")["BREAKS"]:
        path, _, function = test.partition("[")[0].partition("::")
        assert f"def {function}(" in open(os.path.join(HERE, path)).read(), f"{name}: no {test}"
        code = open(os.path.join(HERE, file)).read()
        assert code.count(before) == 1, f"{name}: {file} has changed"
        compile(code.replace(before, after), file, "exec")  # a mistake, but no syntax error


FEW_RUNS = """
import runpy
import sys

sys.path[:0] = ["runs", "."]
import study

train = study.train


def of_those_that_count(settings, device, folder, look, lock=None):
    if look or "probe-" in str(folder):
        return train(settings, device, folder, look, lock)
    return {"loss": 5 + settings["learning_rate"], "steps": settings["max_iters"], "params": 1}


study.train = of_those_that_count
runpy.run_path("runs/judge.py", run_name="__main__")
"""  # the judge, with invented losses in place of the runs that tune


def at_toy_size(command, corpus, tasks):
    """A documented command at a small size. A run from a checkpoint takes the shape from it."""
    new_run = " ".join([*TINY_RUN[2:], "--vocab_size=257", "--total_batch_tokens=128"])
    for text, toy in (
        (r"\bpython\b", sys.executable), ("torchrun", f"{sys.executable} -m torch.distributed.run"),
        ("nproc_per_node=8", "nproc_per_node=2"), ("10e9", "10e4"), ("=2500", "=8"),
        ("keep_interval=500", "keep_interval=1"), ("ckpt_000500", "ckpt_000001"),
        ("--source=c4", f"--source={corpus} --data_dir=data/c4 --tokenizer=bytes"),
        ("Qwen/Qwen3-0.6B", f"{corpus.parent}/hub"),
        (r"(.*judge\.py(?!.*rehearse).*)", r"\1 --rehearse=True"),
        (r"runs/judge\.py", f"{corpus.parent}/few_runs.py"),
        ("--tasks=winogrande,boolq", f"--tasks=tiny_choice --task_dir={tasks}"),
        ("make train", f"make train ARGS='{new_run}'"),
        ("(.*sft_lima.*)", r"\1 --max_iters=2 --eval_tokens=512 --compile=False"),
        (r"(.*train\.py(?!.*(--help|=resume|branch_from|sft_lima)).*)", rf"\1 {new_run}"),
        ("(.*eval.py.*)", r"\1 --max_new_tokens=5 --eval_tokens=512 --depth_tokens=512"),
        ("--what=train,memory", "--what=memory --quick=True"),
        (r"(.*bench\.py(?!.*--what=(size|memory)).*)", r"\1 --modes=lns --what=residual"),
        (r"(.*bench\.py(?!.*--what=size).*)", r"\1 --n_layer=1 --n_head=2 --n_embd=64 --rounds=3"),
        ("(.*--what=size.*)", r"\1 --n_layer=2"),
        ("(.*--n_embd=64.*)", r"\1 --n_kv_head=2"),
    ):  # fmt: skip
        command = re.sub(text, toy, command)
    return command


def test_every_documented_command_runs_at_toy_size(tmp_path):
    for package in ("lm_eval", "transformers"):
        pytest.importorskip(package, reason=f"make slow installs {package}")
    from test_hf import write_llama

    corpus, tasks, clone = tmp_path / "a.jsonl", write_tasks(tmp_path / "tasks"), tmp_path / "clone"
    write_texts(tmp_path)
    listed = subprocess.run(["git", "ls-files"], cwd=HERE, capture_output=True, text=True).stdout
    for file in listed.split():
        (clone / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.join(HERE, file), clone / file)
    write_conversations(clone / "chat.jsonl")
    (tmp_path / "few_runs.py").write_text(FEW_RUNS)
    (clone / "my.txt").write_text("".join(f"{i} green bottles\n" for i in range(2000)))
    write_llama(tmp_path / "hub")
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / ".venv" / "bin" / "python").symlink_to(sys.executable)
    (clone / ".venv" / "ready").touch()  # the Makefile makes it after pip
    packages = os.path.dirname(os.path.dirname(torch.__file__))
    env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": packages}
    how = dict(cwd=clone, env=os.environ | env, capture_output=True, text=True)
    documents = "".join(open(clone / name).read() for name in ("README.md", "GUIDE.md"))
    commands = "".join(re.findall(r"```sh\n(.*?)```", documents, re.S)).splitlines()
    assert {"make train", "make test"} <= set(commands) and len(commands) > 15
    commands = [command for command in commands if command not in ("make test", "make slow")]
    small = [at_toy_size(command, corpus, tasks) for command in commands]
    for command in dict.fromkeys(small):  # each of them once, in the order of the pages
        ran = subprocess.run(["bash", "-c", command], **how)
        assert ran.returncode == 0, f"{command}\n{ran.stdout[-1500:]}\n{ran.stderr[-3000:]}"
