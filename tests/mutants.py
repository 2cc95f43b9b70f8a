"""
Break the code on purpose and see whether a test of `make test` notices. For kernels.py it is a test
of `make slow`.

    python tests/mutants.py                  all breaks, about 3 minutes on 2 cores
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
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# fmt: off
BREAKS = [  # (name, file, code before, code after, the test that notices)
    ("eps outside the root", "norms.py", "torch.rsqrt(v + self.eps) * self.gain)",
     "(torch.rsqrt(v) + self.eps) * self.gain)",
     "test_all.py::test_every_mode_equals_its_equation[none]"),
    ("norm over the wrong axis", "norms.py", "x_float.mean(-1,", "x_float.mean(1,",
     "test_all.py::test_every_mode_equals_its_equation[none]"),
    ("statistics in bfloat16", "norms.py",
     "x if x.dtype in (torch.float32, torch.float64) else x.float()", "x",
     "test_all.py::test_norms_compute_in_float32_and_keep_the_dtype"),
    ("branch scale inside a norm", "norms.py", "gate * self.norm_out(f)", "self.norm_out(gate * f)",
     "test_all.py::test_every_mode_equals_its_equation[perinorm]"),
    ("NAG's norm shrinks", "nag.py", "s + 0.5 * (torch.log1p", "s - 0.5 * (torch.log1p",
     "test_all.py::test_modules_equal_the_goldens"),
    ("NAG divides by rounding errors", "nag.py", "torch.maximum(gg, least)", "gg",
     "tests/test_designs.py::test_nag_survives_inputs_that_would_divide_by_zero[torch.float32]"),
    ("modulator without gradient", "nag.py", "modulator(F.linear(r, self.w), ",
     "modulator(F.linear(r, self.w).detach(), ",
     "test_all.py::test_every_mode_equals_its_equation[nag]"),
    ("the gradient of the rotation without that of its norm", "nag.py",
     "n * in_g + t * (rg + k * gg)", "n * in_g",
     "test_all.py::test_every_mode_equals_its_equation[nag]"),
    ("p for 1 - p", "bhyt.py", "(1 - P) ** -0.5", "P**-0.5",
     "test_all.py::test_modules_equal_the_goldens"),
    ("variance not scaled squared", "bhyt.py", "gate * gate * self.c", "gate * self.c",
     "test_all.py::test_every_mode_equals_its_equation[bhyt]"),
    ("tanh's gradient", "bhyt.py", "grad * (1 - t * t)", "grad * (1 - t)",
     "tests/test_designs.py::test_the_cheap_tanh_is_tanh"),
    ("stale c", "train.py", "step % bhyt.INTERVAL == 0", "step == 0",
     "test_all.py::test_two_ranks_have_the_curve_of_one_process[ddp]"),
    ("matrices leave the sphere", "ngpt.py", "weight.div_(length.clamp(min=1e-6))", "length",
     "tests/test_rivals.py::test_matrices_of_ngpt_are_on_the_sphere_after_every_step[{}]"),
    ("a step of nGPT may be negative", "ngpt.py", "self.alpha.abs()", "self.alpha",
     "tests/test_rivals.py::test_a_gate_multiplies_the_step_of_ngpt_and_all_stays_on_the_sphere"),
    ("momentum falls", "muon.py", "MOMENTUM - 0.1 * cold", "MOMENTUM - 0.1 * (1 - cold)",
     "tests/test_recipe.py::test_the_momentum_of_training_rises"),
    ("momentum without its warm-up", "train.py", 'if "momentum" in group:', "if False:",
     "tests/test_recipe.py::test_the_momentum_of_training_rises"),
    ("momentum that is not Nesterov's", "muon.py", "return p.grad.lerp(m, mu)", "return m",
     "tests/test_recipe.py::test_a_step_is_that_of_torch_with_both_polar_factors_exact"),
    ("Muon's step by the columns", "muon.py", "max(x.shape[-2:])", "x.size(-1)",
     "tests/test_recipe.py::test_a_step_is_that_of_torch_with_both_polar_factors_exact"),
    ("Muon decays at the same rate at any learning rate", "muon.py",
     'p.mul_(1 - group["lr"] * group["weight_decay"])', 'p.mul_(1 - group["weight_decay"])',
     "tests/test_recipe.py::test_a_step_is_that_of_torch_with_both_polar_factors_exact"),
    ("the last token is smeared too", "model.py", "x[:, n - k : n - k + T]",
     "x[:, n - k + 1 : n - k + 1 + T]",
     "test_all.py::test_model_equals_the_equations"),
    ("smear forgets the cache", "model.py", "cache.ids.index_copy_(1, n + at, idx)", "n + at",
     "test_all.py::test_decoding_equals_the_full_forward_and_no_logit_sees_a_later_token"),
    ("smear crosses documents", "model.py", "shifted = shifted * same[..., None]",
     "shifted = shifted * 1",
     "tests/test_lora.py::test_documents_in_a_row_do_not_see_each_other"),
    ("scores without the logit cap", "tasks.py", "model.logits(h, head)",
     "torch.nn.functional.linear(h, head)",
     "tests/test_eval.py::test_choices_score_the_same_one_by_one[nag]"),
    ("M for its transpose", "streams.py", "for column in zip(*M)", "for column in M",
     "tests/test_rivals.py::test_hyper_connections_equal_the_golden_with_gradients[mhc]"),
    ("Sinkhorn ends with rows", "streams.py", "range(2 * iters - 1)", "range(2 * iters - 2)",
     "tests/test_rivals.py::test_hyper_connections_equal_the_golden_with_gradients[mhc]"),
    ("a skipped output keeps its weight", "attnres.py",
     "s_i if ran is None else s_i.masked_fill(~ran, -math.inf)", "s_i",
     "tests/test_rivals.py::test_an_output_that_a_token_skips_gets_no_weight[attnres-None]"),
    ("a source counts by its first sublayer", "attnres.py", "old.lane | runs", "old.lane",
     "tests/test_rivals.py::test_an_output_that_a_token_skips_gets_no_weight[attnres_block-3]"),
    ("NAG's kernel without the gradient of m", "kernels.py", "of_a *= gate", "of_a *= 1",
     "tests/test_kernels.py::test_kernels_in_the_interpreter[of_nag or of_attnres]"),
    ("a skipped output keeps its weight in the kernel", "kernels.py",
     'score = tl.where(tl.load(ran_ptr), score, -float("inf"))',
     "score = score",
     "tests/test_kernels.py::test_kernels_in_the_interpreter[of_nag or of_attnres]"),
    ("threshold that looks ahead", "mod.py", "if self.training or self.look_ahead else",
     "if True else",
     "test_all.py::test_decoding_equals_the_full_forward_and_no_logit_sees_a_later_token"),
    ("score not in the output", "mod.py", "scale * q if self.learned else scale", "scale",
     "tests/test_designs.py::test_gathering_running_tokens_equals_masking_and_so_do_gradients"),
    ("share for its complement", "mod.py", "1 - np.interp(", "np.interp(",
     "tests/test_designs.py::test_tau_and_k_follow_from_the_scores[True]"),
    ("a save changes a rank's scores", "mod.py", "router.fresh.clone()", "router.fresh",
     "tests/test_designs.py::test_a_checkpoint_sums_the_scores_of_all_ranks_and_leaves_those_of_each_alone"),
    ("a skipping token's lane moves", "norms.py", "torch.where(runs, new.lane, old.lane)",
     "new.lane",
     "tests/test_designs.py::test_a_token_runs_or_skips_as_documented"),
    ("each rank balances alone", "train.py", "config.mod_rate, world)", "config.mod_rate)",
     "test_all.py::test_experts_and_routers_agree_over_ranks[none]"),
    ("expert weights not normalised", "moe.py", "w / w.sum(-1, keepdim=True) if self.k > 1 else w",
     "w",
     "test_all.py::test_every_mode_equals_its_equation[none]"),
    ("bias in the weights", "moe.py", "w = s.gather(1,", "w = (s + self.bias).gather(1,",
     "test_all.py::test_every_mode_equals_its_equation[none]"),
    ("bias favours the busy", "moe.py", "torch.sign(row.mean() - row)",
     "torch.sign(row - row.mean())",
     "tests/test_designs.py::test_the_bias_balances_experts"),
    ("rotation's sign", "attention.py", "b * cos + a * sin", "b * cos - a * sin",
     "test_all.py::test_every_mode_equals_its_equation[none]"),
    ("mask off by one", "attention.py", "<= at[..., None]", "<= at[..., None] + 1",
     "test_all.py::test_decoding_equals_the_full_forward_and_no_logit_sees_a_later_token"),
    ("documents see each other", "attention.py",
     "mask & (query_docs[:, :, None] == docs[:, None, :])", "mask",
     "tests/test_lora.py::test_documents_in_a_row_do_not_see_each_other[{'residual': 'none'}]"),
    ("compiled attention without scale", "attention.py", ".mT) * scale", ".mT)",
     "tests/test_recipe.py::test_attention_for_the_compiler_equals_sdpa[300-300]"),
    ("cached positions from 0", "model.py", "else (self.cos[at], self.sin[at])",
     "else (self.cos[:T], self.sin[:T])",
     "test_all.py::test_decoding_equals_the_full_forward_and_no_logit_sees_a_later_token"),
    ("no dropout on attention weights", "attention.py", "self.dropout * self.training", "0.0",
     "test_all.py::test_dropout_in_each_place_drops_half_and_doubles_the_rest"),
    ("no dropout on the embedding", "model.py", "e = self.drop(e)", "pass",
     "test_all.py::test_dropout_in_each_place_drops_half_and_doubles_the_rest[embedding]"),
    ("no dropout on attention", "model.py",
     "self.drop(self.attn(h, rope, docs, cache, rows, values))",
     "self.attn(h, rope, docs, cache, rows, values)",
     "test_all.py::test_dropout_in_each_place_drops_half_and_doubles_the_rest[attention]"),
    ("no dropout on the MLP", "model.py",
     "self.drop(self.mlp(h, counted))", "self.mlp(h, counted)",
     "test_all.py::test_dropout_in_each_place_drops_half_and_doubles_the_rest[mlp]"),
    ("gates decay", "model.py", '{"vectors": 0.0, "gates": 0.0}', '{"vectors": 0.0}',
     "test_all.py::test_every_parameter_is_initialised_and_trained_in_one_group[dyt]"),
    ("padding in the mean", "model.py", "(targets >= 0).sum()", "(targets > -2).sum()",
     "test_all.py::test_evaluation_does_not_touch_training_and_is_the_exact_mean"),
    ("evaluation with dropout", "model.py", "    model.eval()\n", "    pass\n",
     "test_all.py::test_evaluation_does_not_touch_training_and_is_the_exact_mean"),
    ("evaluation of one rank", "model.py", "torch.distributed.all_reduce(total)", "pass",
     "test_all.py::test_two_ranks_have_the_curve_of_one_process[ddp]"),
    ("top-p drops the likeliest", "generate.py", "p.cumsum(-1) - p >= top_p",
     "p.cumsum(-1) >= top_p",
     "test_all.py::test_sampling_follows_the_distribution"),
    ("cache does not move", "generate.py", "cache.rewind()", "pass",
     "test_all.py::test_generation"),
    ("write in place", "data.py", 'os.replace(temporary, path)',
     'open(path, "wb").write(open(temporary, "rb").read())',
     "test_all.py::test_preparation_killed_anywhere_continues_with_the_same_result[[]]"),
    ("targets not shifted", "data.py", "(tokens[:, :-1], tokens[:, 1:])",
     "(tokens[:, :-1], tokens[:, :-1])",
     "test_all.py::test_batches_depend_only_on_seed_step_and_place_and_cover_an_epoch_once"),
    ("same order in every epoch", "data.py", "default_rng((self.seed, epoch))",
     "default_rng(self.seed)",
     "test_all.py::test_batches_depend_only_on_seed_step_and_place_and_cover_an_epoch_once"),
    ("ranks read the same windows", "data.py", "* self.world + self.rank)", "* self.world)",
     "test_all.py::test_batches_depend_only_on_seed_step_and_place_and_cover_an_epoch_once"),
    ("last batch of evaluation lost", "data.py", "range(0, count, batch_size * world)",
     "range(0, count - batch_size * world + 1, batch_size * world)",
     "test_all.py::test_evaluation_does_not_touch_training_and_is_the_exact_mean"),
    ("windows from the left of each part", "data.py", "(2 * i + 1) * len(pool)",
     "2 * i * len(pool)",
     "tests/test_eval.py::test_windows_for_evaluation_are_spread_and_the_halves_do_not_overlap"),
    ("changed shards pass", "data.py", 'shard["sha256"] != file_sha256(path)', "False",
     "test_all.py::test_a_shard_that_has_changed_is_found"),
    ("no end of text", "prepare_c4.py", "np.append(tokens, eot).astype(dtype)",
     "tokens.astype(dtype)",
     "test_all.py::test_shards_hold_every_document_once_in_order_and_the_formats_agree"),
    ("documents in both splits", "prepare_c4.py", "(None, text)", "(text, text)",
     "test_all.py::test_shards_hold_every_document_once_in_order_and_the_formats_agree"),
    ("copies of validation text", "prepare_c4.py", "if digest in refused:", "if False:",
     "test_all.py::test_documents_of_validation_are_left_out_of_training"),
    ("the beginning of a cut document", "prepare_c4.py", "return {cut, *(", "return {*(",
     "test_all.py::test_documents_of_validation_are_left_out_of_training"),
    ("checkpoint may run code", "checkpoint.py", "weights_only=True, mmap",
     "weights_only=False, mmap",
     "test_all.py::test_a_damaged_file_is_refused"),
    ("optimizer not restored", "checkpoint.py", '{"state": kept, ', '{"state": {}, ',
     "test_all.py::test_stopped_and_resumed_equals_never_stopped"),
    ("best loss of other text", "train.py", 'saved["best_val_loss"] if same else math.inf',
     'saved["best_val_loss"]',
     "test_all.py::test_the_best_loss_counts_on_the_same_text_and_if_it_was_saved"),
    ("optimizer not saved", "train.py", '[opt.state_dict()["state"] for opt in optimizers]',
     "[{} for opt in optimizers]",
     "test_all.py::test_stopped_and_resumed_equals_never_stopped"),
    ("a run that goes on changes its seed", "checkpoint.py",
     'FIXED | (MODEL_SETTINGS - {"dropout"})', 'MODEL_SETTINGS - {"dropout"}',
     "test_all.py::test_a_run_that_goes_on_may_change_some_settings_and_no_others"),
    ("old settings win over given ones", "checkpoint.py", "kept |= given",
     "kept = given | kept",
     "test_all.py::test_a_run_that_goes_on_may_change_some_settings_and_no_others"),
    ("random state of a resumed run", "train.py", "hash((seed, step, rank))",
     "int(torch.randint(1 << 30, (1,)))",
     "test_all.py::test_stopped_and_resumed_equals_never_stopped"),
    ("warm-up off by one", "train.py", "(at + 1) / (warmup_iters + 1)",
     "at / (warmup_iters + 1)",
     "test_all.py::test_learning_rates_and_a_budget_of_flops"),
    ("micro-steps summed", "train.py", "repeat(1 / micro_steps)", "repeat(1.0)",
     "test_all.py::test_two_ranks_have_the_curve_of_one_process[ddp]"),
    ("all-reduce one micro-step early", "train.py", "micro == micro_steps - 1", "micro == 0",
     "test_all.py::test_two_ranks_have_the_curve_of_one_process[ddp]"),
    ("step taken with an infinite loss", "train.py",
     "good = math.isfinite(loss) and math.isfinite(norm)", "good = True",
     "test_all.py::test_bad_steps_are_skipped_and_counted_and_too_many_stop"),
    ("a bad step's scores and loads count", "train.py", "for count in () if good else counts:",
     "for count in ():",
     "test_all.py::test_bad_steps_do_not_move_routers_and_experts"),
    ("nats for bits", "eval.py", "nats * tokens / math.log(2)", "nats * tokens",
     "tests/test_eval.py::test_the_loss_of_any_text_is_exact"),
    ("context cut from the right", "tasks.py", "context[-(T + 1 - n) :]", "context[: T + 1 - n]",
     "tests/test_eval.py::test_choices_score_the_same_one_by_one[nag]"),
    ("dialled on validation text", "eval.py", 'Windows(windows.directory, "train",',
     'Windows(windows.directory, "val",',
     "tests/test_eval.py::test_eval_tells_who_skips_and_dials_the_rate"),
    ("sink sees the future", "depth.py", "is_causal=True", "is_causal=False",
     "tests/test_eval.py::test_the_sink_is_the_share_of_attention_that_the_first_token_gets"),
    ("block stays out", "depth.py", "del block.forward", "pass",
     "tests/test_eval.py::test_a_block_that_does_nothing_is_not_missed_and_has_no_gradient[prenorm]"),
    ("what was skipped stays skipped", "prune.py", "vars(block).pop(method, None)", "pass",
     "tests/test_prune.py::test_every_mode_runs_pruned_and_is_restored[none]"),
    ("a bound without its lambda", "convert.py", "bhyt.KAPPA / norm.lam", "bhyt.KAPPA",
     "tests/test_convert.py::test_converted_bounded_norms_equal_rmsnorm_to_first_order"),
    ("merge without scale", "lora.py", "self.weight + self.scale * (self.B @ self.A)",
     "self.weight + self.B @ self.A",
     "tests/test_lora.py::test_adapters_start_at_zero_and_merge_exactly"),
    ("questions are targets", "lora.py", "[False] * len(asked)", "[True] * len(asked)",
     "tests/test_lora.py::test_conversations_are_packed_whole_and_only_answers_count"),
    ("answers of one rank", "lora.py", "torch.distributed.all_reduce(total)", "pass",
     "tests/test_lora.py::test_fine_tuning_over_two_ranks_equals_one_process"),
    ("all ranks on one GPU", "machine.py", 'f"cuda:{local_rank}"', '"cuda:0"',
     "tests/test_machine.py::test_auto_takes_the_best_device_there_is"),
    ("True is an int", "configurator.py", "if type(value) in types:",
     "if isinstance(value, types):",
     "test_all.py::test_settings_refuse_with_a_line_that_says_what_to_do"),
    ("sum for the mean of seeds", "plot.py", "statistics.mean(y)", "sum(y)",
     "tests/test_eval.py::test_a_figure_shows_the_mean_of_seeds_and_a_band_from_lowest_to_highest"),
    ("evaluation ends in training mode", "model.py", "model.train(training)", "model.train()",
     "test_all.py::test_evaluation_does_not_touch_training_and_is_the_exact_mean"),
    ("documents of other queries", "attention.py", "gather_rows(docs, rows)",
     "docs[:, : rows[0].size(1)]",
     "test_all.py::test_gathered_queries_see_the_same_tokens_as_in_a_full_row[()]"),
    ("hc's outputs start small", "streams.py", "mul_(math.sqrt(count(config)))", "mul_(1.0)",
     "test_all.py::test_output_projections_of_hc_start_larger_because_its_end_sums_the_streams"),
    ("a long prompt loses its end", "generate.py", "idx[:, -size:], 0", "idx[:, :size], 0",
     "test_all.py::test_a_prompt_longer_than_the_context_keeps_its_end"),
    ("sums of outputs in their dtype", "attnres.py",
     "f.dtype if self.size == 1 else sources[0][0].dtype", "f.dtype",
     "test_all.py::test_only_sums_of_outputs_need_the_dtype_of_the_stream"),
    ("LNS's factor upside down in an export", "hf.py", "** -0.5", "** 0.5",
     "tests/test_hf.py::test_an_export_of_lns_folds_the_factor_of_each_block_into_its_gains"),
    ("smhc reads with its own map", "streams.py", "h = self.norm(read(X, pre or own))",
     "h = self.norm(read(X, own))", "test_all.py::test_every_mode_equals_its_equation[smhc]"),
    ("wide keeps everything", "streams.py", "math.log(99)", "math.log(9)",
     "tests/test_rivals.py::test_wide_starts_with_the_mean_of_parted_streams_and_keeps_999_of_1000"),
    ("a kernel mixes with the diagonal of M alone", "kernels.py", "before[k] + M[k] * x",
     "before[k] + M[j] * x", "tests/test_kernels.py::test_kernels_in_the_interpreter[streams]"),
    ("the gradient of a norm in a kernel without its second part", "kernels.py",
     "u = u * gain - k[:, None] * h", "u = u * gain",
     "tests/test_kernels.py::test_kernels_in_the_interpreter[streams]"),
    ("the gain of a kernel's norm gets the gradient of another one", "kernels.py",
     "of_gain += tl.sum(u * h, 0)", "of_gain += tl.sum(u, 0)",
     "tests/test_kernels.py::test_kernels_in_the_interpreter[a_model or dtypes]"),
    ("smhc's kernel with half of a norm's gradient", "kernels.py",
     "keepdim=True) / rho", "keepdim=True) / rho / 2",
     "tests/test_kernels.py::test_kernels_in_the_interpreter[a_model or dtypes]"),
    ("NAG's kernel ramps its rotation, but not its gradient", "kernels.py",
     "of_a *= tl.load(ramp_ptr)", "of_a *= 1",
     "tests/test_kernels.py::test_kernels_in_the_interpreter[of_nag or of_attnres]"),
    ("the maps of hc's kernel without the slope of tanh", "kernels.py", "of_z *= 1 - z * z",
     "of_z *= 1.0", "tests/test_kernels.py::test_kernels_in_the_interpreter[a_model or dtypes]"),
    ("a kernel loses the last tokens", "kernels.py", "tl.minimum(first + chunk, N), BT)",
     "tl.minimum(first + chunk, N - BT), BT)",
     "tests/test_kernels.py::test_kernels_in_the_interpreter[streams]"),
    ("unknown part runs", "bench.py", 'pick(PARTS, part, "what")', "PARTS[part]",
     "test_all.py::test_bad_input_is_one_line_and_writes_nothing"),
]
# fmt: on


def run_test(folder, test):
    """Run one test of the copy. Runs in its own process, which has imported torch already."""
    os.chdir(folder)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    options = ["-xq", "-p", "no:cacheprovider", f"--basetemp={folder}/tmp"]
    if "kernels" not in test:  # kernels have only slow tests: they need triton
        options += ["-m", "not slow"]
    raise SystemExit(pytest.main([*options, test]))


def is_caught(entry, paths):
    """Copy these files of the repository, make one break, run its test: whether the test fails."""
    name, file, before, after, test = entry
    with tempfile.TemporaryDirectory() as folder:
        for path in paths:
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
    paths = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        caught = sum(pool.map(partial(is_caught, paths=paths), chosen))
    print(f"{caught} of {len(chosen)} caught")
    return caught < len(chosen)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
