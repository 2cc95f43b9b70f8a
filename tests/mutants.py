"""
Break the code on purpose and see whether a test of `make test` notices.

    python tests/mutants.py                  all breaks, about 5 minutes on 2 cores
    python tests/mutants.py NAME [NAME ...]  some of them

Each break in BREAKS is a mistake that people make: a wrong sign, a mask that is off by one, a
detached tensor. The script copies the repository, replaces one fragment of code, and runs the one
test that should fail then.
"""

import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# fmt: off
BREAKS = [  # (name, file, code before, code after, the test that notices)
    ("eps outside the root", "norms.py", "torch.rsqrt(v + self.eps) * self.gain)",
     "(torch.rsqrt(v) + self.eps) * self.gain)", "equation"),
    ("norm over the wrong axis", "norms.py", "x_float.mean(-1,", "x_float.mean(1,", "equation"),
    ("statistics in bfloat16", "norms.py",
     "x if x.dtype in (torch.float32, torch.float64) else x.float()", "x", "keep_the_dtype"),
    ("branch scale inside a norm", "norms.py", "gate * self.norm_out(f)", "self.norm_out(gate * f)",
     "equation"),
    ("NAG's norm shrinks", "nag.py", "s + 0.5 * (torch.log1p", "s - 0.5 * (torch.log1p", "golden"),
    ("NAG divides by rounding errors", "nag.py", "torch.maximum(gg, least)", "gg",
     "divide_by_zero"),
    ("modulator without gradient", "nag.py", "return a * modulator(products, ",
     "return a * modulator(products.detach(), ", "equation"),
    ("the products of NAG's modulator without gradient", "nag.py",
     "torch.addmm(total, rows, w.to(grad.dtype))", "total", "equation"),
    ("the gradient of the rotation without that of its norm", "nag.py",
     "n * in_g + t * (rg + k * gg)", "n * in_g", "equation"),
    ("p for 1 - p", "bhyt.py", "(1 - P) ** -0.5", "P**-0.5", "golden"),
    ("variance not scaled squared", "bhyt.py", "gate * gate * self.c", "gate * self.c", "equation"),
    ("tanh's gradient", "bhyt.py", "grad * (1 - t * t)", "grad * (1 - t)", "tanh"),
    ("stale c", "train.py", "step % bhyt.INTERVAL == 0", "step == 0",
     "over_ranks or two_ranks_have"),
    ("matrices leave the sphere", "ngpt.py", "weight.div_(length.clamp(min=1e-6))", "length",
     "on_the_sphere"),
    ("a step of nGPT may be negative", "ngpt.py", "self.alpha.abs()", "self.alpha",
     "gate_multiplies"),
    ("momentum falls", "muon.py", "MOMENTUM - 0.1 * cold", "MOMENTUM - 0.1 * (1 - cold)",
     "momentum_of_training"),
    ("momentum without its warm-up", "train.py", 'if "momentum" in group:', "if False:",
     "momentum_of_training"),
    ("momentum that is not Nesterov's", "muon.py", "return p.grad.lerp(m, mu)", "return m",
     "a_step_is_that_of_torch"),
    ("Muon's step by the columns", "muon.py", "max(x.shape[-2:])", "x.size(-1)",
     "a_step_is_that_of_torch"),
    ("Muon decays at the same rate at any learning rate", "muon.py",
     'p.mul_(1 - group["lr"] * group["weight_decay"])', 'p.mul_(1 - group["weight_decay"])',
     "a_step_is_that_of_torch"),
    ("the last token is smeared too", "model.py", "x[:, n - k : n - k + T]",
     "x[:, n - k + 1 : n - k + 1 + T]", "equation"),
    ("smear forgets the cache", "model.py", "cache.ids.index_copy_(1, n + at, idx)", "n + at",
     "decoding_equals"),
    ("smear crosses documents", "model.py", "shifted = shifted * same[..., None]",
     "shifted = shifted * 1", "documents"),
    ("scores without the logit cap", "tasks.py", "model.logits(h, head)",
     "torch.nn.functional.linear(h, head)", "choices"),
    ("M for its transpose", "streams.py", "for column in zip(*M)", "for column in M",
     "golden"),
    ("Sinkhorn ends with rows", "streams.py", "scaled(scaled(M, 1), 0)",
     "scaled(scaled(M, 0), 1)", "golden"),
    ("a skipped output keeps its weight", "streams.py",
     "score if ran is None else score.masked_fill(~ran, -math.inf)", "score", "gets_no_weight"),
    ("a source counts by its first sublayer", "streams.py", "old.lane | runs", "old.lane",
     "gets_no_weight"),
    ("threshold that looks ahead", "mod.py", "if self.training or self.look_ahead else",
     "if True else", "no_logit_sees"),
    ("score not in the output", "mod.py", "scale * q if self.learned else scale", "scale",
     "gathering"),
    ("share for its complement", "mod.py", "1 - np.interp(", "np.interp(",
     "tau_and_k"),
    ("a save changes a rank's scores", "mod.py", "router.fresh.clone()", "router.fresh",
     "scores_of_all_ranks"),
    ("a skipping token's lane moves", "norms.py", "torch.where(runs, new.lane, old.lane)",
     "new.lane", "gathering or skips"),
    ("each rank balances alone", "train.py", "config.mod_rate, world)", "config.mod_rate)",
     "experts_and_routers"),
    ("expert weights not normalised", "moe.py", "w / w.sum(-1, keepdim=True) if self.k > 1 else w",
     "w", "equation"),
    ("bias in the weights", "moe.py", "w = s.gather(1,", "w = (s + self.bias).gather(1,",
     "equation"),
    ("bias favours the busy", "moe.py", "torch.sign(row.mean() - row)",
     "torch.sign(row - row.mean())", "bias_bal"),
    ("rotation's sign", "attention.py", "b * cos + a * sin", "b * cos - a * sin", "equation"),
    ("mask off by one", "attention.py", "<= at[..., None]", "<= at[..., None] + 1",
     "no_logit_sees"),
    ("documents see each other", "attention.py",
     "mask & (query_docs[:, :, None] == docs[:, None, :])", "mask", "documents_in"),
    ("compiled attention without scale", "attention.py", ".mT) * scale", ".mT)",
     "for_the_compiler"),
    ("cached positions from 0", "model.py", "else (self.cos[at], self.sin[at])",
     "else (self.cos[:T], self.sin[:T])", "decoding_equals"),
    ("no dropout on attention weights", "attention.py", "self.dropout * self.training", "0.0",
     "dropout_in_each"),
    ("no dropout on the embedding", "model.py", "e = self.drop(e)", "pass", "dropout_in_each"),
    ("no dropout on attention", "model.py",
     "self.drop(self.attn(h, rope, docs, cache, rows, values))",
     "self.attn(h, rope, docs, cache, rows, values)", "dropout_in_each"),
    ("no dropout on the MLP", "model.py",
     "self.drop(self.mlp(h if rows is None else gather_rows(h, rows)))",
     "self.mlp(h if rows is None else gather_rows(h, rows))", "dropout_in_each"),
    ("gates decay", "model.py", '{"vectors": 0.0, "gates": 0.0}', '{"vectors": 0.0}', "one_group"),
    ("padding in the mean", "model.py", "(targets >= 0).sum()", "(targets > -2).sum()",
     "evaluation_does"),
    ("evaluation with dropout", "model.py", "    model.eval()\n", "    pass\n", "evaluation_does"),
    ("evaluation of one rank", "model.py", "torch.distributed.all_reduce(total)", "pass",
     "two_ranks_have"),
    ("top-p drops the likeliest", "generate.py", "p.cumsum(-1) - p >= top_p",
     "p.cumsum(-1) >= top_p", "sampling"),
    ("cache does not move", "generate.py", "cache.rewind()", "pass", "generation"),
    ("write in place", "data.py", 'os.replace(temporary, path)',
     'open(path, "wb").write(open(temporary, "rb").read())', "preparation_killed"),
    ("targets not shifted", "data.py", "(tokens[:, :-1], tokens[:, 1:])",
     "(tokens[:, :-1], tokens[:, :-1])", "batches_depend"),
    ("same order in every epoch", "data.py", "default_rng((self.seed, epoch))",
     "default_rng(self.seed)", "batches_dep"),
    ("ranks read the same windows", "data.py", "* self.world + self.rank)", "* self.world)",
     "batches_dep"),
    ("last batch of evaluation lost", "data.py", "range(0, count, batch_size * world)",
     "range(0, count - batch_size * world + 1, batch_size * world)", "evaluation_does"),
    ("windows from the left of each part", "data.py", "(2 * i + 1) * len(pool)",
     "2 * i * len(pool)", "are_spread"),
    ("changed shards pass", "data.py", 'shard["sha256"] != file_sha256(path)', "False",
     "shard_that_has"),
    ("no end of text", "prepare_c4.py", "np.append(tokens, eot).astype(dtype)",
     "tokens.astype(dtype)", "shards_hold"),
    ("documents in both splits", "prepare_c4.py", "(None, text)", "(text, text)", "shards_hold"),
    ("copies of validation text", "prepare_c4.py", "if digest in refused:", "if False:",
     "left_out_of"),
    ("the beginning of a cut document", "prepare_c4.py", "return {cut, *(", "return {*(",
     "left_out_of"),
    ("checkpoint may run code", "checkpoint.py", "weights_only=True, mmap",
     "weights_only=False, mmap", "damaged"),
    ("optimizer not restored", "checkpoint.py", '{"state": kept, ', '{"state": {}, ',
     "never_stopped"),
    ("best loss of other text", "train.py", 'saved["best_val_loss"] if same else math.inf',
     'saved["best_val_loss"]', "best_loss_counts"),
    ("optimizer not saved", "train.py", '[opt.state_dict()["state"] for opt in optimizers]',
     "[{} for opt in optimizers]", "never_stopped"),
    ("a run that goes on changes its seed", "checkpoint.py",
     'FIXED | (MODEL_SETTINGS - {"dropout"})', 'MODEL_SETTINGS - {"dropout"}', "goes_on"),
    ("old settings win over given ones", "checkpoint.py", "kept |= given",
     "kept = given | kept", "goes_on"),
    ("random state of a resumed run", "train.py", "hash((seed, step, rank))",
     "int(torch.randint(1 << 30, (1,)))", "never_stopped"),
    ("warm-up off by one", "train.py", "(at + 1) / (warm + 1)", "at / (warm + 1)",
     "learning_rates"),
    ("micro-steps summed", "train.py", "repeat(1 / micro_steps)", "repeat(1.0)", "two_ranks_have"),
    ("all-reduce one micro-step early", "train.py", "micro == micro_steps - 1", "micro == 0",
     "two_ranks_have"),
    ("step taken with an infinite loss", "train.py",
     "good = math.isfinite(loss) and math.isfinite(norm)", "good = True", "bad_steps"),
    ("a bad step's scores and loads count", "train.py", "for count in () if good else counts:",
     "for count in ():", "bad_steps_do_not_move"),
    ("nats for bits", "eval.py", "nats * tokens / math.log(2)", "nats * tokens", "any_text"),
    ("context cut from the right", "tasks.py", "context[-(T + 1 - n) :]", "context[: T + 1 - n]",
     "choices_score"),
    ("dialled on validation text", "eval.py", 'Windows(windows.directory, "train",',
     'Windows(windows.directory, "val",', "dials"),
    ("sink sees the future", "depth.py", ".triu(1)", ".triu(2)", "sink"),
    ("block stays out", "depth.py", "del block.forward", "pass", "not_missed"),
    ("what was skipped stays skipped", "prune.py", "vars(block).pop(method, None)", "pass",
     "is_restored"),
    ("a bound without its lambda", "convert.py", "bhyt.KAPPA / norm.lam", "bhyt.KAPPA",
     "bounded_norms"),
    ("merge without scale", "lora.py", "self.weight + self.scale * (self.B @ self.A)",
     "self.weight + self.B @ self.A", "adapters_start"),
    ("questions are targets", "lora.py", "[False] * len(asked)", "[True] * len(asked)",
     "conversations_are"),
    ("answers of one rank", "lora.py", "torch.distributed.all_reduce(total)", "pass",
     "fine_tuning_over"),
    ("all ranks on one GPU", "machine.py", 'f"cuda:{local_rank}"', '"cuda:0"', "auto_takes"),
    ("True is an int", "configurator.py", "if type(value) in types:",
     "if isinstance(value, types):", "refuse_with"),
    ("sum for the mean of seeds", "plot.py", "sum(points[at]) / len(points[at])", "sum(points[at])",
     "figure"),
    ("evaluation ends in training mode", "model.py", "model.train(training)", "model.train()",
     "evaluation_does_not"),
    ("documents of other queries", "attention.py", "gather_rows(docs, rows)",
     "docs[:, : rows[0].size(1)]", "gathered_queries"),
    ("hc's outputs start small", "streams.py", "mul_(math.sqrt(config.hc_streams))", "mul_(1.0)",
     "output_projections_of_hc"),
    ("a long prompt loses its end", "generate.py", "idx[:, -size:], 0", "idx[:, :size], 0",
     "prompt_longer"),
    ("sums of outputs in their dtype", "streams.py",
     "f.dtype if self.size == 1 else sources[0][0].dtype", "f.dtype", "sums_of_outputs"),
    ("LNS's factor upside down in an export", "hf.py", "** -0.5", "** 0.5", "export_of_lns"),
    ("unknown part runs", "bench.py", 'pick(PARTS, part, "what")', "PARTS[part]", "bad_input"),
]
# fmt: on


def run_test(folder, test):
    """Run one test of the copy. Runs in its own process, which has imported torch already."""
    os.chdir(folder)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    options = ["-xq", "-m", "not slow", "-p", "no:cacheprovider", f"--basetemp={folder}/tmp"]
    raise SystemExit(pytest.main([*options, test]))


def is_caught(entry):
    """Copy the repository, make one break, run its test: whether the test fails."""
    name, file, before, after, test = entry
    with tempfile.TemporaryDirectory() as folder:
        listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
        for path in listed:
            os.makedirs(os.path.dirname(f"{folder}/{path}"), exist_ok=True)
            shutil.copyfile(ROOT / path, f"{folder}/{path}")
        Path(folder, file).write_text((ROOT / file).read_text().replace(before, after))
        process = multiprocessing.get_context("forkserver").Process(
            target=run_test, args=(folder, test)
        )
        process.start()
        process.join()
    caught = process.exitcode == pytest.ExitCode.TESTS_FAILED
    print(f"{name:<50} {'caught' if caught else 'NOT CAUGHT'} by {test}", flush=True)
    return caught


def main(names):
    chosen = [entry for entry in BREAKS if entry[0] in names or not names]
    if len(chosen) < len(names):
        raise SystemExit(f"names: choose from {', '.join(entry[0] for entry in BREAKS)}")
    for name, file, before, *_ in chosen:
        assert (ROOT / file).read_text().count(before) == 1, f"{name}: {file} has changed"
    os.environ["OMP_NUM_THREADS"] = "1"
    multiprocessing.set_forkserver_preload(["torch", "torch._dynamo", "numpy", "pytest"])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        caught = sum(pool.map(is_caught, chosen))
    print(f"{caught} of {len(chosen)} caught")
    return caught < len(chosen)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
