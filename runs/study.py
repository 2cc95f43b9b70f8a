"""
Train the runs of a study and keep one line of results for each, in out/STUDY.jsonl.

A run is a dict of the settings of train.py that differ from its defaults. A run is skipped if a
line of out/STUDY.jsonl or results/STUDY.jsonl has its settings, data and kind of machine. With
record = True only results/ counts, and gets the new lines. A killed run resumes where it stopped.
Each CPU core trains one run at a time, with one thread, and each GPU PER_GPU runs. Start one study
at a time: two studies do not know which cores or GPUs the other uses.

A line has: key, a hash of all settings that change the result; settings; loss, the last validation
loss, and start, that at step 0 (null: diverged, or none); curve, [step, mean of the logged training
losses since the last point]; step_s, the median seconds of a step while other runs train alongside;
where it ran; and what eval.py measured, if it was asked for.
"""

import fcntl
import gc
import hashlib
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from types import SimpleNamespace

import stats
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import bench
import checkpoint
import machine
import streams
from configurator import configure
from data import Windows, json_lines, micro_batches
from model import MODEL_SETTINGS, GPTConfig

TRAIN, EVAL = str(ROOT / "train.py"), str(ROOT / "eval.py")
# Settings that do not change what a run computes. data_dir counts by the hashes of its shards, and
# init_from by its path, which must name the run that it starts from.
OF_PLACE = set(
    "data_dir out_dir log_interval save_interval keep_interval save_best wandb_log "
    "device loss_chunk recompute shard".split()
)
TIMED = ("loss_chunk", "recompute")  # change how long a step takes, and not its result
NAMED = {"residual", "seed", "max_iters", "eval_interval", "learning_rate", "val_part"}
record = False  # keep results in results/, and read no others
PER_GPU = 1  # runs that a GPU trains at a time; more are faster if the model is small
POINTS = 40  # most points per curve
MOD = ("--what=mod", "--depth_tokens=16384")  # of a mixture of depths: how many tokens skip
ROUNDS, STEPS = 90, 4  # rounds per race, and steps of each run per round
# keys of eval.json that a line keeps
DEPTH = ("norm", "rotation", "from embedding", "update", "max/rms", "kurtosis", "sink", "dropped")
DEPTH += ("a", "norm and entropy", "norm and loss", "copying")


def parse(argv):
    """Config files and --key=value arguments -> {setting of train.py: value}."""
    given = configure({"__file__": TRAIN, "__doc__": __doc__}, GPTConfig, argv=argv)[1]
    if not any(arg.startswith("--out_dir") for arg in argv):
        given.pop("out_dir", None)  # a config file's: a study has its own folders
    if given.get("init_from") == "auto":
        del given["init_from"]  # every run continues its checkpoint
    refused = given.keys() & {"device", "flops_budget", "init_from", "out_dir", "seed"}
    if refused:
        raise SystemExit(f"{', '.join(refused)}: a study sets this by itself")
    return given


DEFAULTS = configure({"__file__": TRAIN}, GPTConfig, argv=[])[0]


def changed(settings):
    """The residual, the seed if there is one, and the settings that differ from train.py's defaults
    and change the result.
    """
    differs = lambda k, v: k == "seed" or (v != DEFAULTS[k] and k not in OF_PLACE)
    own = {k: v for k, v in settings.items() if differs(k, v)}
    return {"residual": (DEFAULTS | settings)["residual"]} | own


def key(settings):
    """Names a run by all settings that change its result, defaults included.

    Leaves out settings that are None or False, so that adding one keeps old keys, and init_from,
    unless it is a path. hc_streams counts by its number, 4 where a mode has no streams.
    """
    full = DEFAULTS | settings
    full["hc_streams"] = streams.count(SimpleNamespace(**full)) or 4
    left_out = lambda k, v: v is None or v is False or v == "scratch" or k in OF_PLACE
    kept = {k: v for k, v in full.items() if not left_out(k, v)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]


@cache
def data_hash(data_dir):
    """Names the content of both splits."""
    folder = str(ROOT / data_dir)
    return "-".join(Windows(folder, split, 1).sha256[:8] for split in ("train", "val"))


def place(settings):
    """What runs must share to be compared: the data, and how the machine computes."""
    full = DEFAULTS | settings
    device = machine.pick_device(full["device"]).type
    code = "compiled" if compiles(full) else "eager"
    computes = f"{device} {machine.pick_dtype(full['dtype'], device)} {code}"
    return {"data": data_hash(full["data_dir"]), "computes": computes}


def compiles(full):
    """Whether a run with these settings compiles its model."""
    known = full["compile"]
    return machine.can_compile(machine.pick_device(full["device"]).type) if known is None else known


def name_of(settings):
    """Runs with equal names have equal results."""
    at = place(settings)
    return key(settings), at["data"], at["computes"]


def files_of(study):
    """The files that hold lines of a study. New lines go to the last one."""
    folders = ("results",) if record else ("results", "out")
    return [ROOT / folder / f"{study}.jsonl" for folder in folders]


def read(study):
    """The lines of a study. Skips a line that a kill has cut."""
    states = [(path, path.stat()) for path in files_of(study) if path.exists()]
    return [line for path, at in states for line in lines_in(path, at.st_size, at.st_mtime_ns)]


@lru_cache(32)  # tables.py reads the same files hundreds of times
def lines_in(path, *state):
    return [*json_lines(path)]


def finished(study):
    """{name: line} of all finished runs."""
    lines = (line for line in read(study) if "key" in line)
    return {(line["key"], line["data"], line["computes"]): line for line in lines}


def append(study, line):
    path = files_of(study)[-1]
    path.parent.mkdir(exist_ok=True)
    with open(path, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        cut = size > 0 and file.read(1) != b"\n"
        file.write(b"\n" * cut + json.dumps(line).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


# ------------------------------------------------------------------------------------------------
# One run


def summary(folder):
    """What to keep of a run's log, or None if the run is not finished."""
    log = folder / "log.jsonl"
    records = [*json_lines(log)] if log.exists() else []
    header = next((r["run"] for r in records if "run" in r), None)
    last = next((r for r in reversed(records) if "step" in r), None)
    if last is None:
        return None
    steps = [r for r in records if r.get("tok_s")]
    diverged = last.get("bad_steps", 0) >= header["resolved"]["max_bad_steps"]
    if last["step"] < header["max_iters"] and not diverged:
        return None
    loss = last["val_loss"] or math.inf
    times = [header["tokens_per_step"] / r["tok_s"] for r in steps[1:] or steps]
    every = header["settings"]["log_interval"]
    kept = [r for r in steps if r["step"] % every == 0 or r is last]  # not where it was stopped
    return {
        "loss": loss if math.isfinite(loss) and not diverged else None,
        "start": next((r["val_loss"] for r in records if r.get("step") == 0), None),
        "curve": thinned([(r["step"], r["loss"]) for r in kept if r["loss"] is not None]),
        "step_s": round(statistics.median(times), 5) if times else None,
        "steps": last["step"],
        "tokens": last["tokens"],
        "flops": last["flops"],
        "params": header["params"]["all"],
        "commit": header["git"],
        "machine": header["device"],
        "torch": header["versions"]["torch"],
    }


def thinned(curve):
    """At most POINTS points: the mean loss of each part of the curve, at the part's last step."""
    size = math.ceil(len(curve) / POINTS) or 1
    parts = (curve[i : i + size] for i in range(0, len(curve), size))
    return [[part[-1][0], round(statistics.mean(y for _, y in part), 4)] for part in parts]


def train(settings, device, folder, look, lock=None):
    """Train one run, or continue it.

    look: arguments of eval.py, not for mixtures of depths.
    lock: a locked file. The children hold it too: if only this process is killed, a second start
    waits for them.
    """
    env = os.environ | {"OMP_NUM_THREADS": "1"} if device == "cpu" else None
    how = dict(cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    how["pass_fds"] = () if lock is None else (lock.fileno(),)

    def fails(*argv):
        done = subprocess.run([sys.executable, *argv], **how)
        if done.returncode and not stopped.is_set():
            say(done.stderr.strip())
        return done.returncode

    given = settings | {"device": device, "out_dir": str(folder)}
    if checkpoint.newest(folder) or "init_from" not in settings:
        given["init_from"] = "auto"
    failed = fails(TRAIN, *(f"--{k}={v}" for k, v in given.items()))  # a finished run ends at once
    found = summary(folder)
    if found is None or (failed and found["loss"] is not None):
        raise SystemExit(f"{folder} did not finish: see the message of train.py above")
    look = MOD if settings.get("mod_on", "none") != "none" else look
    if look and found["loss"] is not None:
        if fails(EVAL, f"--out_dir={folder}", f"--device={device}", *look):
            raise SystemExit(f"{folder} was not evaluated: see the message of eval.py above")
        four_digits = lambda text: float(f"{float(text):.4g}")
        report = json.loads((folder / "eval.json").read_text(), parse_float=four_digits)
        if "depth" in report:
            found["depth"] = {k: report["depth"][k] for k in DEPTH if k in report["depth"]}
        if "mod" in report:
            found["skipped"] = report["mod"]["rate"]
    return found


# ------------------------------------------------------------------------------------------------
# A study


@cache
def devices():
    """The devices that train in parallel. Each CPU core counts as one."""
    kind = machine.pick_device(DEFAULTS["device"]).type
    if kind == "cuda":
        return [f"cuda:{i}" for i in range(torch.cuda.device_count())] * PER_GPU
    return [kind] * (machine.cores() if kind == "cpu" else 1)


@cache
def free_devices():
    """A queue of free devices, shared by all threads of this process."""
    queue = SimpleQueue()
    for device in devices():
        queue.put(device)
    return queue


stopped = Event()  # set when a run fails or Ctrl-C stops it


def begin(recording):
    """What a script does first. recording: the value of record."""
    global record
    record = recording
    signal.signal(signal.SIGINT, stop)
    stats.scipy()  # without it, stop now and not when all is trained


def stop(*_):
    """Handles Ctrl-C. The runs receive it, too, and save."""
    stopped.set()
    say("stopped: the same command continues, and repeats no finished run")
    raise SystemExit(130)


def say(text):
    print(text, flush=True)


def duration(seconds):
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes / 60:.1f} hours"


def size_of(settings):
    """Proportional to the time of a step, approximately."""
    full = DEFAULTS | settings
    return tokens_of(full) * full["n_layer"]


class Progress:
    """How much of the work is done, and how long the rest will take. Says first how long all will.

    That estimate, from measuring one run, counts like having trained a tenth of the runs.
    size(settings): proportional to the time of a step. like: the run to measure, else the largest.
    """

    def __init__(self, runs, size=size_of, like=None):
        self.done, self.total = 0, len(runs)
        if not runs:
            return
        like = like or max(runs, key=size)
        of_step, others = probe(like)
        of_size = of_step / size(like)
        self.price = lambda run: (DEFAULTS | run)["max_iters"] * of_size * size(run) + others
        self.left = sum(map(self.price, runs))
        n, names = len(devices()), sorted({(DEFAULTS | run)["residual"] for run in runs})
        about = f"about {duration(self.left / n)} to train {len(runs)} runs of {', '.join(names)}"
        say(f"{about}, {n} at a time")
        self.paid, self.began = self.left / 10, time.monotonic() - self.left / n / 10

    def finish(self, settings):
        self.done += 1
        # Tuning can need more runs than planned, and the seeds follow it.
        self.total = max(self.total, self.done + (settings.get("val_part") == "tune"))
        self.paid += self.price(settings)
        self.left = max(0.0, self.left - self.price(settings))

    def __str__(self):
        seconds = (time.monotonic() - self.began) * self.left / self.paid
        return f"{self.done} of {self.total}, {duration(seconds)} left"


def described(settings, runs):
    """A run in words, with the settings that differ between these runs."""
    full = DEFAULTS | settings
    tunes = full["val_part"] == "tune"
    what = f"{'tune' if tunes else 'seed'} {full['seed']}  {full['max_iters']} steps"
    own = {k: v for k, v in settings.items() if k not in NAMED | OF_PLACE}
    varied = {k: v for k, v in own.items() if any(run.get(k) != v for run in runs)}
    words = (f"{full['residual']:<8}", what, f"rate {full['learning_rate']:g}", written(varied))
    return "  ".join(filter(None, words))


def written(settings):
    return " ".join(f"{k}={v:g}" if type(v) is float else f"{k}={v}" for k, v in settings.items())


def to_train(procedure):
    """The runs that a procedure would train now. procedure(run): calls run(study, runs, look).

    Of runs without a result, it expects that the middle one is best, so that no grid grows.
    """
    left = {}

    def guess(study, runs, look=()):
        known, names = finished(study), [name_of(settings) for settings in runs]
        left.update((name, run) for name, run in zip(names, runs) if name not in known)
        guesses = ({"loss": 1000.0 + abs(2 * i - len(runs) + 1)} for i in range(len(runs)))
        return [known.get(name, line) for name, line in zip(names, guesses)]

    procedure(guess)
    return [*left.values()]


def run(study, runs, look=(), progress=None):
    """Train the runs that have no result yet. Returns one line per run, in the order of runs.

    look: as for train. progress: the Progress of a larger plan that includes these runs. Without
    one, says first how long they will take.
    """
    lines, named = finished(study), {name_of(settings): settings for settings in runs}
    missing = {name: settings for name, settings in named.items() if name not in lines}
    progress = progress or Progress([*missing.values()])

    def job(name):
        device = free_devices().get()
        try:
            if stopped.is_set():
                raise SystemExit(f"{study}: stopped")
            lines[name] = line = locked(study, name, missing[name], device, look)
        except BaseException:
            stopped.set()  # start no other run
            raise
        finally:
            free_devices().put(device)
        progress.finish(missing[name])
        loss = "diverged" if line["loss"] is None else f"loss {line['loss']:.3f}"
        say(f"{described(missing[name], runs)}  {loss}   {progress}")

    with ThreadPoolExecutor(len(devices())) as pool:
        list(pool.map(job, missing))
    return [lines[name_of(settings)] for settings in runs]


class NotFinished(SystemExit):
    """A run has no result yet."""


def find(study, runs, look=()):
    """As run, but trains nothing: an error if a run has not finished, or if the runs of a seed do
    not share what place returns. look is not used.
    """
    keys = [key(settings) for settings in runs]
    lines = {name: line for name, line in finished(study).items() if name[0] in keys}
    places = {(line["settings"].get("seed"), *name[1:]) for name, line in lines.items()}
    seeds = {seed for seed, *_ in places}
    if len(places) > len(seeds):
        text = "runs of a seed have different data, devices, dtypes or compilation"
        raise SystemExit(f"{study}: {text}")
    by_key = {name[0]: line for name, line in lines.items()}
    if by_key.keys() != set(keys):
        raise NotFinished(f"{study}: some of these runs have not finished")
    return [by_key[each] for each in keys]


def probe(settings, steps=30):
    """Seconds of a step, and the other seconds of a run, while all devices train.

    The runs are short and leave no result. They evaluate as often as the runs of the judge.
    """
    brief = settings | {"max_iters": steps, "eval_interval": steps, "log_interval": 5}
    folder = ROOT / "out" / "study" / f"probe-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)  # of a killed process with this number

    def measured(i):
        began = time.monotonic()
        step_s = train(brief, devices()[i], folder / str(i), ())["step_s"]
        return step_s, time.monotonic() - began - steps * step_s

    with ThreadPoolExecutor(len(devices())) as pool:
        found = [*pool.map(measured, range(len(devices())))]
    shutil.rmtree(folder)
    return tuple(map(statistics.mean, zip(*found)))


def locked(study, name, settings, device, look):
    """Train a run, unless another process has. Returns its line.

    Each study has its own folders: a new name does not continue runs of an older design.
    """
    folder = ROOT / "out" / "study" / "-".join((study, *name)).replace(" ", "-")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if name in (lines := finished(study)):
            return lines[name]
        line = {"key": name[0], "settings": changed(settings)}
        line |= train(settings, device, folder, look, lock) | place(settings)
        append(study, line)
        shutil.rmtree(folder, ignore_errors=True)
    return line


# ------------------------------------------------------------------------------------------------
# Times


def race(study, runs, measure=True, threads=1):
    """Time runs against the first. runs: {name: settings}. Returns {name: median_interval}.

    The ratio is seconds per token over the first run's. Runs take turns in this process, STEPS
    steps at a time; keep the machine quiet. Results are kept as lines with "race", both keys, and
    "ratio". measure=False: return only kept results, which must be of one kind of machine.
    """
    names = [timed(settings) for settings in runs.values()]
    pairs = {name: (names[0], other) for name, other in zip(runs, names)}
    lines = [line for line in read(study) if tuple(line.get("race", ())) in pairs.values()]
    lines = [line for line in lines if line["threads"] == threads]
    if measure:
        computes = place(next(iter(runs.values())))["computes"]
        device = machine.pick_device(DEFAULTS["device"])
        here = {"computes": computes, "machine": machine.device_name(device)}
        lines = [line for line in lines if here.items() <= line.items()]
    elif len({(line["machine"], line["computes"]) for line in lines}) > 1:
        raise SystemExit(f"{study}: its times are of different machines, dtypes or compilation")
    known = {tuple(line["race"]): line["ratio"] for line in lines}
    missing = [name for name, pair in pairs.items() if pair not in known]
    if missing and measure:
        first = next(iter(runs))
        settings = {name: DEFAULTS | runs[name] for name in dict.fromkeys([first, *missing])}
        machine.prepare_process(device)
        torch.set_num_threads(threads)
        torch._dynamo.config.recompile_limit = 256
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        candidates = {name: stepper(full, str(device)) for name, full in settings.items()}
        times = bench.race(candidates, ROUNDS)
        del candidates
        gc.collect()  # compiled modules refer to themselves
        torch.cuda.empty_cache()  # the runs train in other processes
        where = here | {"threads": threads, "commit": machine.commit(), "torch": torch.__version__}
        for name in missing:
            per_token = tokens_of(settings[first]) / tokens_of(settings[name])
            ratios = [a / b * per_token for a, b in zip(times[name], times[first])]
            ratio = [round(r, 4) for r in stats.median_interval(ratios)]
            known[pairs[name]] = ratio
            given = [changed(runs[each]) for each in (first, name)]
            append(study, {"race": pairs[name], "runs": given, "ratio": ratio} | where)
    return {name: known[pair] for name, pair in pairs.items() if pair in known}


def timed(settings):
    """The key of a run, and those settings that change only the time of its steps."""
    own = {k: v for k, v in settings.items() if k in TIMED and v != DEFAULTS[k]}
    return f"{key(settings)} {written(own)}".strip()


def tokens_of(full):
    """Tokens of an optimizer step."""
    return full["total_batch_tokens"] or full["batch_size"] * full["block_size"]


def stepper(full, device):
    """A function that runs STEPS optimizer steps, each with the micro-steps that train.py takes."""
    config = GPTConfig(**{name: full[name] for name in MODEL_SETTINGS})
    share = tokens_of(full) // config.block_size
    sequences, micro_steps = micro_batches(share, full["batch_size"])
    how = (machine.pick_dtype(full["dtype"], torch.device(device).type), full["optimizer"])
    how += (micro_steps, compiles(full))
    step, model, _ = bench.stepper(config, sequences, device, *how)
    model.loss_chunk, model.recompute = full["loss_chunk"], full["recompute"]
    return lambda: [step() for _ in range(STEPS)]


def aligned(rows):
    """A table for a terminal."""
    columns = [[str(cell) for cell in column] for column in zip(*rows)]
    padded = [[cell.ljust(max(map(len, column))) for cell in column] for column in columns]
    return "\n".join("  ".join(row).rstrip() for row in zip(*padded))
