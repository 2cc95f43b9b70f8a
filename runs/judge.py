"""
The verdict on a residual mode: is it better than pre-norm, by how much, and how sure is that?

    python runs/judge.py --residual=nag                 times steps, then says how long it takes
    python runs/judge.py --residual=nag,hc              several modes; all: every mode
    python runs/judge.py config/gpt2_124m.py --residual=nag    at another scale, on GPUs
    python runs/judge.py --residual=nag --rehearse=True        tries all of it in 90 seconds

1. Tune both modes alike, with seed 0 and a quarter of the steps, on a sample of one half of the
   validation split. Tune the learning rate first, and extend its grid while the best value is at an
   edge. Then tune the initialisation of the output projections, gate_lr and embed_lr. Last, tune
   the learning rate again at full length, because the best one depends on the length: first with
   seed 0, then among this rate, half and twice of it, by the mean loss of three seeds, and again
   around the best of these if it is another one. Last, compare all these settings with the
   defaults at the same learning rate, at full length, by the mean of three seeds.
2. Train both with new seeds for all steps. Evaluate on the other half of the validation split.
3. Differences are paired by seed, with 95% t-intervals. If an interval contains 0, the verdict is
   "undecided". The intervals leave out the noise of the tuning. A verdict is "fragile" if it would
   change against the baseline at half or twice its learning rate.
4. To compare at equal time, time the steps of all modes in turn, before any training. Also train
   the baseline for fewer and more steps, and interpolate its loss at the time of the mode. Its
   learning rate is tuned again at the shortest and the longest of these lengths.

Finished runs are kept in out/judge.jsonl. These and the recorded ones in results/judge.jsonl are
not repeated when you restart the command or judge another mode. --record=True keeps new runs in
results/, and leaves out those in out/. Other arguments are config files and settings of train.py.
"""

import math
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from itertools import product
from operator import itemgetter

import stats
import study
import torch
from stats import decided, gap_of, length_of, losses_of, plus_minus, verdict, with_range
from study import ROOT

import plot
from configurator import configure
from model import GPT, MODEL_SETTINGS, RESIDUALS, GPTConfig, init_out, settings_of_others

residual = "nag"  # modes to judge, separated by commas; all: every mode
baseline = "prenorm"  # the mode to compare with
seeds = 8  # seeds of the final runs: 1, 2, ...
threads = 1  # of the steps that are timed; runs train with one, side by side
tune_share = 0.25  # length of a tuning run, as a share of max_iters
rehearse = False  # all of it at toy size, with the changes in FEW
name = "judge"  # name of the file of results
record = False  # keep results in results/, and read no others

OWN = ("residual", "baseline", "seeds", "threads", "tune_share", "rehearse", "name", "record")
SCALE = str(ROOT / "config" / "judge_8x64.py")
TOY = "--n_layer=2 --n_embd=32 --n_head=2 --n_kv_head=None --block_size=64 --batch_size=4"
TOY += " --total_batch_tokens=None --max_iters=24 --eval_tokens=2048 --log_interval=4"
TOY += " --compile=False"
AROUND = (0.5, 1.0, 2.0)  # learning rates to try first, as multiples of one
TUNING = (0, 100, 101)  # seeds that tune; all but the last choice uses only the first
EQUAL = 0.001  # if the losses of a grid of rates differ by less, no model has learned
FACTORS = {  # multiples of a rate's default; each list is tried until one does not help
    "gate_lr": ((1 / 4, 1 / 16), (4, 16, 64)),
    "embed_lr": ((1 / 4, 1 / 16, 1 / 64),),
}
LENGTHS = (0.7, 1.4, 2.0, 2.8, 4.0)  # lengths of extra baseline runs, as shares of the whole
# A rehearsal changes these, beside TOY, unless the command line has them.
FEW = {"seeds": 2, "LENGTHS": (2.8,), "FACTORS": {"gate_lr": ((4,),), "embed_lr": ((1 / 4,),)}}
FEW |= {"TUNING": TUNING[:1]}
TUNE_TOKENS = 131072  # validation tokens of a tuning run
LOOK = ("--what=depth", "--depth_tokens=4096", "--batch_size=8")


# ------------------------------------------------------------------------------------------------
# The runs


def scale_for(scale, mode):
    """The scale for a mode: with its name, and without settings that belong to other modes only,
    or to those that rotate or have gates.
    """
    others = {*settings_of_others(mode)}
    if not RESIDUALS[mode].rotates:
        others.add("alpha_warmup_iters")
    if "gate_lr" in scale and not has_gates(**shape_of(scale, mode)):
        others.add("gate_lr")
    return {key: value for key, value in scale.items() if key not in others} | {"residual": mode}


def settings(scale, mode, choice, seed, length=1.0):
    """The settings of a run. The seeds of TUNING tune."""
    steps = max(1, round(length * (study.DEFAULTS | scale)["max_iters"]))
    scale = scale_for(scale, mode)
    tunes = seed in TUNING
    fixed = {"seed": seed, "val_part": "tune" if tunes else "report"}
    if tunes and not rehearse:
        fixed["eval_tokens"] = TUNE_TOKENS
    return scale | fixed | choice | {"max_iters": steps, "eval_interval": steps}


def of_seeds(scale, mode, choice, seeds, length=1.0):
    """The settings of the runs that count, one for each seed."""
    return [settings(scale, mode, choice, seed, length) for seed in range(1, seeds + 1)]


def means(scale, mode, choices, lines_of, length=None, seeds=(0,)):
    """The mean loss of each choice's tuning runs."""
    length = length or tune_share
    runs = [settings(scale, mode, *pair, length) for pair in product(choices, seeds)]
    found, n = losses_of(lines_of(runs)), len(seeds)
    return [statistics.mean(found[i : i + n]) for i in range(0, len(found), n)]


def best(scale, mode, choices, lines_of, length=None, seeds=(0,)):
    """The choice whose tuning runs have the lowest mean loss."""
    choices = choices[:2] if rehearse else choices
    losses = means(scale, mode, choices, lines_of, length, seeds)
    return choices[losses.index(min(losses))]


def with_rate(choice, rate):
    """The choice with another learning rate; gate_lr changes in proportion."""
    changed = choice | {"learning_rate": rate}
    if "gate_lr" in choice:
        changed["gate_lr"] = choice["gate_lr"] / choice["learning_rate"] * rate
    return changed


def best_rate(scale, mode, choice, lines_of, length=None, around=AROUND):
    """The choice with the best learning rate, from a grid that grows until the best is inside.

    A grid with equal losses grows to lower rates: no model learned. Prints a message if 7 rates
    have no best one inside. The grid of a rehearsal does not grow.
    """
    rates = [choice["learning_rate"] * times for times in around][: 2 if rehearse else None]
    while True:
        choices = [with_rate(choice, rate) for rate in rates]
        losses = means(scale, mode, choices, lines_of, length)
        at = losses.index(min(losses))
        equal = max(losses) - losses[at] < EQUAL
        if rehearse or 0 < at < len(rates) - 1 and not equal:
            return choices[at]
        if len(rates) == 7:
            why = "equal losses at" if equal else "the best learning rate is at the edge of"
            study.say(f"{mode}: {why} {rates}")
            return choices[at]
        rates = [rates[0] / 2, *rates] if at == 0 or equal else [*rates, rates[-1] * 2]


def tune(scale, mode, lines_of):
    """{setting: best value}, tuned one at a time: step 1 above.

    Recorded runs without the last comparison keep the tuned settings.
    """
    pick_best = partial(best, scale, mode, lines_of=lines_of)
    usual = (study.DEFAULTS | scale)["learning_rate"]
    chosen = best_rate(scale, mode, {"learning_rate": usual}, lines_of)
    starts = [chosen | {"init_out": start} for start in other_starts(scale, mode)]
    chosen = pick_best([chosen, *starts])
    for setting in FACTORS if has_gates(**shape_of(scale, mode)) else ("embed_lr",):
        usual = (study.DEFAULTS | scale)[setting] or chosen["learning_rate"]
        for factors in FACTORS[setting]:
            for factor in factors:
                before, chosen = chosen, pick_best([chosen, chosen | {setting: usual * factor}])
                if chosen == before:
                    break
    tuned = rate_of_three(scale, mode, chosen, lines_of, around=(1 / 4, 1 / 2, 1))
    plain = {"learning_rate": tuned["learning_rate"]}
    if tuned != plain:
        with suppress(study.NotFinished):
            if best(scale, mode, [tuned, plain], lines_of, 1.0, TUNING) == plain:
                return rate_of_three(scale, mode, plain, lines_of)
    return tuned


def rate_of_three(scale, mode, choice, lines_of, around=AROUND):
    """The choice with the learning rate that is best at full length: of the first seed's best rate,
    half and twice of it, by the mean of three seeds. If another rate wins, again around that one,
    four times at most. Recorded runs without these keep the rate chosen before.
    """
    choice = best_rate(scale, mode, choice, lines_of, 1.0, around)
    with suppress(study.NotFinished):
        for _ in range(1 if rehearse else 4):
            before, choice = choice, best(scale, mode, nearby(choice), lines_of, 1.0, TUNING)
            if choice == before:
                break
    return choice


def nearby(choice):
    """The choice with half its learning rate, as it is, and with twice its learning rate."""
    return [with_rate(choice, choice["learning_rate"] * times) for times in AROUND]


def shape_of(scale, mode):
    """The settings of a mode's model."""
    names = MODEL_SETTINGS & scale.keys() - settings_of_others(mode).keys()
    return {name: scale[name] for name in names} | {"residual": mode}


def other_starts(scale, mode):
    """Initialisations of the output projections that the mode allows, except the one it has."""
    shape = shape_of(scale, mode)
    own = init_out(GPTConfig(**shape))
    others = [start for start in ("scaled", "plain", "zero") if start != own]
    return [start for start in others if not refusal(**shape | {"init_out": start})]


@cache
def refusal(**shape):
    """Why there is no model with these settings, or None."""
    try:
        with torch.device("meta"):
            GPT(GPTConfig(**shape))
    except ValueError as error:
        return str(error)


@cache
def has_gates(**shape):
    with torch.device("meta"):
        return bool(GPT(GPTConfig(**shape)).param_groups()["gates"])


def lengths(ratios):
    """The extra baseline lengths to train. ratios: {mode: interval of its time ratio}."""
    slowest = max(interval[-1] for interval in ratios.values())
    return LENGTHS[: 2 + sum(length < slowest for length in LENGTHS[1:])]


def train(scale, mode, lines_of, seeds, extra=()):
    """Tune a mode and train its seeds, also for extra lengths.

    Returns (tuned settings, {length: lines}). Of the baseline, "half" and "twice" are lengths, too:
    the whole length with another learning rate.
    """
    choice = tune(scale, mode, lines_of)
    found = {1.0: lines_of(of_seeds(scale, mode, choice, seeds), LOOK)}
    for length, own in choices_at(scale, mode, choice, lines_of, extra).items():
        found[length] = lines_of(of_seeds(scale, mode, own, seeds, length))
    if extra:
        for name, own in other_rates(choice).items():
            found[name] = lines_of(of_seeds(scale, mode, own, seeds))
    return choice, found


def other_rates(choice):
    half, _, twice = nearby(choice)
    return {"half": half, "twice": twice}


def choices_at(scale, mode, choice, lines_of, lengths):
    """{length: choice}. The learning rate is tuned again at the shortest and longest length.

    A length between them takes the rate of the nearest tuned length. 1.0 is tuned, too.
    """
    tuned = {1.0: choice}
    for length in {min(lengths), max(lengths)} if lengths else ():
        tuned[length] = best_rate(scale, mode, choice, lines_of, length)

    nearest = lambda length: min(tuned, key=lambda known: abs(math.log(known / length)))
    return {length: tuned[nearest(length)] for length in lengths}


# ------------------------------------------------------------------------------------------------
# The verdict


def compare(mode, choice, lines, theirs, ratios):
    """A mode beside the baseline: a dict of mode, choice, params, ratio; n, the number of pairs;
    loss, its mean; steps, the interval at equal steps; fragile, True or False;
    worth, how many times as many steps the baseline needs for the same loss, from length_of; times,
    the intervals at the three ratios; timed, the number of seeds of each; diverged, a text or None.

    theirs: {length: lines of the baseline}. ratios: median_interval of the time ratio. At equal
    time, the baseline's loss is interpolated for each seed. times is empty if the baseline was not
    trained for as short or as long. Each comparison takes the seeds that both sides have.
    """
    n = min(len(lines), len(theirs[1.0]))
    ours, others = losses_of(lines[:n]), losses_of(theirs[1.0][:n])
    found = {"mode": mode, "choice": choice, "params": lines[0]["params"], "ratio": ratios[1]}
    found |= {"n": n, "loss": None, "steps": None, "fragile": False, "worth": (), "times": []}
    found["diverged"] = None
    for who, each in ((mode, ours), (baseline, others)):
        if math.inf in each:
            count = f"{each.count(math.inf)} of {len(each)}"
            return found | {"diverged": f"{count} runs of {who} diverged"}
    gap = gap_of(lines, theirs[1.0])
    found |= {"loss": statistics.mean(ours), "steps": gap}
    at_rates = [gap_of(lines, theirs[name]) for name in ("half", "twice") if name in theirs]
    found["fragile"] = any(each and verdict([each]) != verdict([gap]) for each in at_rates)
    wanted = {1.0, *lengths({mode: ratios})} & theirs.keys()
    by_length = {length: losses_of(theirs[length][:n]) for length in wanted}
    by_length = {length: each for length, each in by_length.items() if math.inf not in each}
    found["worth"] = length_of(ours, by_length)
    if min(by_length) <= ratios[0] and ratios[-1] <= max(by_length):
        by_ratio = [stats.differences_at(ratio, ours, by_length) for ratio in ratios]
        found |= {"times": [*map(stats.interval, by_ratio)], "timed": [*map(len, by_ratio)]}
    return found


def compared(trained, ratios):
    """Compare all modes with the baseline. trained: {mode: what train returns}."""
    for mode, (choice, lines) in trained.items():
        if mode != baseline and mode in ratios:
            yield compare(mode, choice, lines[1.0], trained[baseline][1], ratios[mode])


HEAD = ("mode", "parameters", "loss", "at equal steps", "verdict")
HEAD += ("worth in steps", "step time", "at equal time", "verdict at equal time", "tuned settings")


def cells(found):
    """A row of the table, as text, of what compare returned.

    The verdict at equal time must be the same at both ends of the ratio's interval.
    """
    row = (found["mode"], f"{found['params']:,}")
    ratio, tuned = f"{found['ratio']:.2f}", study.written(found["choice"])
    if found["diverged"]:
        return [*row, "", found["diverged"], "", "", ratio, "", "", tuned]
    too_far = "no baseline run this short or long", ""
    at_time = decided(found["times"]) if found["times"] else too_far
    if found["times"] and verdict(found["times"]) != verdict(found["times"][1:2]):
        at_time = at_time[0], f"{at_time[1]} (differs within the time ratio's interval)"
    fragile = ", fragile" if found["fragile"] else ""
    at_steps = plus_minus(found["steps"]), verdict([found["steps"]]) + fragile
    worth = with_range(found["worth"])
    return [*row, f"{found['loss']:.4f}", *at_steps, worth, ratio, *at_time, tuned]


def cells_of_baseline(choice, lines):
    params, loss = lines[1.0][0]["params"], statistics.mean(losses_of(lines[1.0]))
    row = [baseline, f"{params:,}", f"{loss:.4f}", "", "the baseline", "1.00", "1.00"]
    return [*row, "", "", study.written(choice)]


def draw(path, comparisons, names):
    """Draw both differences, from the best mode to the worst. names: {mode: its name in words}"""
    shown = sorted((each for each in comparisons if each["steps"]), key=itemgetter("steps"))
    words = lambda mode: names.get(mode, mode)
    rows = [(words(each["mode"]), each["steps"], (each["times"] or [None] * 3)[1])
            for each in shown]  # fmt: skip
    if rows:
        plot.differences(path, rows, words(baseline))


def main():
    own = [arg for arg in sys.argv[1:] if arg.strip("-").partition("=")[0] in (*OWN, "h", "help")]
    rest = [arg for arg in sys.argv[1:] if arg not in own]
    _, asked = configure(globals(), argv=own)
    files = [arg for arg in rest if not arg.startswith("--")] or [SCALE]
    given = [arg for arg in rest if arg.startswith("--")]
    warning = "REHEARSAL, ignore these numbers."
    if rehearse:
        globals().update(FEW | asked, name=f"rehearsal_{name}")
        study.ROUNDS = 15
        given = TOY.split() + given
        study.say(warning)
    scale = study.parse([*files, *given])
    if scale.get("min_lr") is not None:
        raise SystemExit("the judge tries many learning rates: give --min_lr=None, a tenth of each")
    modes = [*RESIDUALS] if residual == "all" else residual.split(",")
    everyone = [*dict.fromkeys([baseline, *modes])]
    if not 2 <= seeds < 100:  # from 100 on, seeds tune
        raise SystemExit(f"{seeds=}: give 2 to 99")
    if len(everyone) < 2:
        raise SystemExit(f"{residual=}: give a mode that is not the baseline")
    for mode in everyone:
        shape = shape_of(scale, mode) if mode in RESIDUALS else {"residual": mode}
        if why := refusal(**shape):
            raise SystemExit(why)
    used = set().union(*(scale_for(scale, mode) for mode in everyone))
    unused = sorted(study.changed(scale).keys() - used)
    if unused:
        raise SystemExit(f"{', '.join(unused)}: no setting of {' or '.join(everyone)}")

    study.begin(record and not rehearse)
    study.say(f"timing the steps of {', '.join(everyone)}")
    timed = {mode: scale_for(scale, mode) for mode in everyone}
    ratios = study.race(name, timed, threads=threads)
    extra = dict.fromkeys(everyone, ()) | {baseline: lengths(ratios)}

    def trained_by(run):
        judged = lambda mode: train(scale, mode, partial(run, name), seeds, extra[mode])
        with ThreadPoolExecutor(len(study.devices())) as pool:
            return dict(zip(everyone, pool.map(judged, everyone)))

    ratio_of = lambda run: ratios[run["residual"]][1]
    usual = settings(scale, baseline, {}, 1)
    progress = study.Progress(study.to_train(trained_by), ratio_of, usual)
    trained = trained_by(partial(study.run, progress=progress))
    comparisons = [*compared(trained, ratios)]
    draw(study.ROOT / "out" / f"{name}.png", comparisons, {"prenorm": "pre-norm"})

    rows = [cells_of_baseline(*trained[baseline]), *map(cells, comparisons)]
    study.say(study.aligned(row[:-1] for row in (HEAD, *rows)))
    for mode, *_, tuned in rows:
        study.say(f"{mode} was tuned to {tuned}")
    study.say(f"±: 95% interval over {seeds} seeds; out/{name}.png shows the differences")
    able = [stats.detectable(each["steps"][1], each["n"]) for each in comparisons if each["steps"]]
    if able:
        words = "would be found in 4 of 5 such studies; smaller ones are mostly missed"
        study.say(f"at equal steps, a true difference of {max(able):.3f} {words}")
    if rehearse:
        study.say(warning)


if __name__ == "__main__":
    main()
