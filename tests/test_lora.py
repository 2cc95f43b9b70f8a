"""The tests of fine-tuning: adapters, conversations, documents in a row. See test_all.py."""

import json
import math
import os
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import data as data_file
import lora
import mod
import model as model_file
import moe
from checkpoint import load_model
from model import RESIDUALS
from test_all import (
    EXTRAS,
    HERE,
    TINY_RUN,
    assert_close,
    cases,
    checkpoint,
    log_of,
    ranks,
    refuses,
    resume,
    script,
    shaken,
    some_ids,
    tiny,
    train,
)


@cases("changes, targets", [
    *((dict(residual=r), "wq,wk,wv,wo,up,down") for r in RESIDUALS),
    (dict(activation="swiglu", bias=True), "wq,wk,wv,wo,up,gate,down"),
    (dict(moe_experts=8), "wq,wk,wv,wo"),
    (dict(moe_experts=8, moe_shared=32), "wq,wk,wv,wo,up,down"),
    (dict(mod_on="both", mod_rate=0.8), "wq,wk,wv,wo,up,down"),
])  # fmt: skip
def test_adapters_start_at_zero_and_merge_exactly(changes, targets):
    model, idx = shaken(tiny(**changes)).eval(), some_ids()
    before, weights = model(idx)[0].detach(), {k: v.clone() for k, v in model.state_dict().items()}
    dense, frozen = model.flops_per_token(), model.requires_grad_(False).flops_per_token()
    assert 2 * dense / 3 <= frozen < 0.8 * dense  # attention scores always need gradients
    model.blocks[0].attn.wk.requires_grad_()
    assert model.flops_per_token() - frozen == 2 * 32 * 32
    with pytest.raises(ValueError, match=f"'wx': choose one of {targets.replace(',', ', ')}$"):
        lora.adapt(model, 4, 8.0, "wq,wx")
    lora.adapt(model, 4, 8.0, targets)
    assert torch.equal(model.eval()(idx)[0], before)
    trained = [p for p in model.parameters() if p.requires_grad]
    adapters = [module for module in model.modules() if isinstance(module, lora.Adapted)]
    assert len(trained) == 2 * len(adapters) == 4 * len(targets.split(","))
    assert len(model.optimizers("adamw", 1, {}, 0)) == 1
    for p in trained:
        torch.nn.init.normal_(p, std=0.1)
    out, first, x = model(idx)[0].detach(), model.blocks[0].attn.wq, torch.randn(3, 32)
    expected = F.linear(x, first.weight, first.bias) + 8.0 / 4 * x @ first.A.T @ first.B.T
    assert_close(first(x), expected)
    assert not torch.equal(out, before)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in weights.items())
    assert_close(F.linear(x, first.merged, first.bias), expected)
    with torch.no_grad():
        for module in adapters:
            module.weight.copy_(module.merged)
            module.B.zero_()
    assert_close(model.eval()(idx)[0], out, atol=2e-5, rtol=1e-4)


def test_bhyt_predicts_with_the_adapters():
    ours, theirs = tiny(residual="bhyt"), tiny(residual="bhyt")
    lora.adapt(ours, 4, 8.0, "wv,wo")
    for a, b in zip(ours.blocks, theirs.blocks):
        for name in ("wv", "wo"):
            adapted = getattr(a.attn, name)
            torch.nn.init.normal_(adapted.B)
            getattr(b.attn, name).weight.data.copy_(adapted.merged)
    before = ours.blocks[0].attn_residual.c.clone()
    ours.refresh(), theirs.refresh()
    c, other = (model.blocks[0].attn_residual.c for model in (ours, theirs))
    assert_close(c, other)
    assert not torch.equal(c, before)


def write_conversations(path, n=40):
    """Odd numbers are asked about twice."""
    turns = [(f"What is {i}?", f"It is {i}.", "Sure?", "Yes.")[: 2 + 2 * (i % 2)] for i in range(n)]
    path.write_text("".join(json.dumps({"conversations": t}) + "\n" for t in turns))
    return path


def test_conversations_are_packed_whole_and_only_answers_count(tmp_path):
    encoding, path = data_file.get_tokenizer("bytes"), write_conversations(tmp_path / "c.jsonl")
    packed = lambda split, T=160: lora.Conversations(path, split, encoding, T)
    for split, count in (("train", 36), ("val", 4)):
        for x, y, docs in (packed(split)[i] for i in range(len(packed(split)))):
            assert (y[docs == 0] == -1).all()
            count -= docs.max()
            for doc in range(1, docs.max() + 1):
                ids, targets = x[docs == doc].tolist(), y[docs == doc].tolist()
                number = re.search(r"What is (\d+)", encoding.decode(ids))[1]
                turns = [f"User: What is {number}?\n\nAssistant:", f" It is {number}.<|endoftext|>"]
                turns += ["User: Sure?\n\nAssistant:", " Yes.<|endoftext|>"] * (int(number) % 2)
                assert encoding.decode([*ids, 256]) == "<|endoftext|>" + "".join(turns)
                assert encoding.decode([t for t in targets if t >= 0]) == "".join(turns[1::2])
                assert all(t in (-1, after) for t, after in zip(targets, [*ids[1:], 256]))
        assert count == 0
    narrow = packed("train", 29)  # answers about numbers of two digits begin after the cut
    assert narrow.kept > 0 < narrow.dropped and narrow.kept + narrow.dropped == 36
    refuses("no answer for train begins within block_size=20", packed, "train", 20)
    short = packed("train", 40)
    assert 0 < short.cut <= short.kept and all((short[i][1] >= 0).any() for i in range(len(short)))
    for n, val in ((2, 1), (3, 1), (15, 2)):
        write_conversations(path, n)
        assert (packed("train").kept, packed("val").kept) == (n - val, val)
    refuses("1 different conversations, at least 2", packed, write_conversations(path, 1) and "val")
    for bad in ('{"text": "x"}', '[{"conversations": ["a", "b"]}]', "[", '{"conversations": "ab"}'):
        path.write_text(bad + "\n")
        refuses("record 0 is not", packed, "val")
    path.unlink()
    path.write_bytes(b'{"conversations": ["\xff", "b"]}')
    refuses("c.jsonl cannot be read", packed, "val")
    path.unlink()
    refuses("c.jsonl': no such file", packed, "val")
    refuses("sft_data='': no such file, and no OWNER/NAME", lora.split_conversations, "", "val")


def test_an_answer_begins_with_one_space_if_the_tokenizer_puts_one_before_each_text():
    encode = lambda text: [*map(ord, "▁" + text.replace(" ", "▁"))]  # as SentencePiece does
    encoding = SimpleNamespace(encode_ordinary=encode, eot_token=0, start=[1])
    ids, is_answer = lora.encode(["a b", "c", "d", "e"], encoding)
    texts = ["User: a b\n\nAssistant: c", "User: d\n\nAssistant: e"]
    assert ids == [1, *encode(texts[0]), 0, *encode(texts[1]), 0]
    answers = "".join(chr(i) for i, answer in zip(ids, is_answer) if answer)
    assert answers == "▁c\0▁e\0" and len(ids) == len(is_answer)


def test_conversations_on_the_hub_are_read_by_name_or_as_a_file(monkeypatch):
    asked, record = [], {"conversations": ["a", "b"]}
    monkeypatch.setattr("datasets.load_dataset", lambda **how: asked.append(how) or [record])
    file = "hf://datasets/GAIR/lima/train.jsonl"
    assert [*lora.read_conversations("a/b")] == [*lora.read_conversations(file)] == [["a", "b"]]
    assert asked == [{"path": "a/b", "split": "train"},
                     {"path": "json", "data_files": file, "split": "train"}]  # fmt: skip


@cases("error, reason", [
    (RuntimeError("no scripts, but found lima.py\nmore lines"), "no scripts, but found lima.py"),
    (EOFError("no records"), "no records"), (ConnectionError(), "ConnectionError"),
])  # fmt: skip
def test_a_dataset_that_cannot_be_read_is_one_line(monkeypatch, error, reason):
    def fails(**how):
        raise error

    monkeypatch.setattr("datasets.load_dataset", fails)
    why = f"a/b cannot be read: {reason}; HF_TOKEN may help, or the path of a file: hf://"
    refuses(why, lambda: [*lora.read_conversations("a/b")])


@cases("n, val", [(2, 1), (16, 2), (30, 3)])
def test_copies_of_a_conversation_are_in_one_split(tmp_path, n, val):
    path = write_conversations(tmp_path / "c.jsonl", n)
    path.write_text(path.read_text() * 3)
    train, held_out = (lora.split_conversations(path, split) for split in ("train", "val"))
    assert (len(train), len(held_out)) == (3 * (n - val), 3 * val)
    assert not {*map(tuple, train)} & {*map(tuple, held_out)}
    path.write_text((path.read_text().splitlines()[0] + "\n") * 5)
    refuses("1 different conversations, at least 2", lora.split_conversations, path, "val")


@cases("changes", [*(dict(residual=r) for r in RESIDUALS), None, EXTRAS])
def test_documents_in_a_row_do_not_see_each_other(changes):
    model = shaken(tiny(**(changes or dict(mod_on="both", mod_rate=0.3, moe_experts=4)))).eval()
    idx, docs = some_ids(1), torch.tensor([[1] * 10 + [2] * 15 + [0] * 7])
    packed, other = model(idx, None, docs)[0], idx.clone()
    assert_close(packed[:, :10], model(idx[:, :10])[0], atol=1e-5, rtol=1e-4)
    other[:, :10] = some_ids(1, seed=5)[:, :10]
    changed = model(other, None, docs)[0]
    assert_close(changed[:, 10:], packed[:, 10:], atol=1e-5, rtol=1e-4)
    scaled = RESIDUALS[model.config.residual].attention  # after the rotation
    if changes and not scaled:  # rotary positions are relative
        assert_close(packed[:, 10:25], model(idx[:, 10:25])[0], atol=1e-4, rtol=1e-3)
    (grad,) = torch.autograd.grad(model.train()(idx, idx, docs)[1], model.embed.weight)
    assert grad.isfinite().all()


def test_routers_and_experts_do_not_count_padding():
    model = tiny(residual="nag", mod_on="both", mod_rate=0.3, moe_experts=4, moe_balance="loss")
    docs = torch.tensor([[1] * 10 + [2] * 15 + [0] * 7, [1] * 20 + [0] * 12])
    model(some_ids(), some_ids(), docs)
    assert [int(router.fresh.sum()) for router in mod.routers(model)] == [45] * 4
    layer, h = moe.layers(tiny(moe_experts=4, moe_balance="loss"))[0], torch.randn(2, 32, 32)
    penalties, loads = [], []
    for given in ((h, docs), (h[docs > 0],)):
        layer(*given)
        penalties, loads = [*penalties, layer.penalty], [*loads, layer.load.tolist()]
        layer.penalty = None
        layer.load.zero_()
    assert loads[0] == loads[1] and sum(loads[0]) == 2 * 45
    assert_close(*penalties)
    experts = moe.layers(model)  # they get the tokens that run, with their documents
    assert all(0 < int(layer.load.sum()) <= 2 * 45 for layer in experts)
    model = tiny(mod_on="mlp", mod_rate=0.3, moe_experts=4)
    model(some_ids(), some_ids(), torch.zeros_like(docs))
    assert all(int(layer.load.sum()) == 0 for layer in moe.layers(model))


OF_EACH_KIND = "prenorm keel x0mix bhyt ngpt ihc hc smhc gated wide attnres_block".split()


@cases("model", [
    dict(residual="nag"), *(pytest.param(model, marks=pytest.mark.slow) for model in [
        *(dict(residual=residual) for residual in OF_EACH_KIND),
        dict(residual="nag", mod_on="both", mod_rate=0.3), dict(residual="lns", moe_experts=4),
        dict(residual="bhyt", mod_on="mlp", mod_rate=0.3, mod_router="learned", moe_experts=4),
    ])])  # fmt: skip
def test_fine_tuning_learns_to_answer_reports_forgetting_and_resumes(
    data, tmp_path, model, monkeypatch
):
    run, full, merged, base = (tmp_path / name for name in ("run", "full", "merged.pt", "base"))
    train(data, base, **model)
    config, chat = os.path.join(HERE, "config", "sft_lima.py"), tmp_path / "chat.jsonl"
    sft = dict(init_from=base, sft_data=write_conversations(chat), learning_rate=3e-2, max_iters=20)
    sft |= dict(block_size=64, batch_size=32, total_batch_tokens=2048, eval_interval=10)
    sft |= dict(eval_tokens=512, dtype="float32", compile=False)
    monkeypatch.setattr(lora, "TARGETS", "wq,wv")
    script("train.py", config, **sft, keep_interval=10, out_dir=run)
    script("train.py", config, **sft, lora_rank=0, out_dir=full)
    first, *_, last = (r for r in log_of(run).records if r["val_loss"] is not None)
    assert log_of(full).val_losses[-1] < first["val_loss"] - 0.2
    assert last["val_loss"] < first["val_loss"] - 0.02  # nGPT's frozen alpha and s_z allow no more
    state, (_, tuned) = checkpoint(run), load_model(run)
    assert state["config"] | {"block_size": 32, "bhyt_context": None} == checkpoint(base)["config"]
    assert os.path.getsize(run / "ckpt.pt") < os.path.getsize(base / "ckpt.pt") / 2
    assert not {*state["model"]} & {*dict(load_model(base)[1].named_parameters())}
    before = checkpoint(base)["model"]
    for name in (name for name in before if name.endswith("mlp.bias")):  # of experts: frozen, too
        assert torch.equal(tuned.state_dict()[name], before[name])
    windows = data_file.Windows(data, "val", 64)
    batches = data_file.eval_batches(windows, data_file.spread(windows, 512), 4, "cpu")
    forgot = model_file.evaluate(tuned, batches)
    assert first["pretraining_loss"] != last["pretraining_loss"] == pytest.approx(forgot, abs=0.01)
    script("lora.py", run / "ckpt.pt", merged)
    assert torch.equal(load_model(merged)[1](some_ids())[0], tuned(some_ids())[0])
    os.replace(run / "ckpt_000010.pt", run / "ckpt.pt")
    monkeypatch.undo()  # a resumed run keeps the targets and the dropout of its checkpoint
    resume(run)
    assert_close(checkpoint(run)["model"], state["model"], rtol=0, atol=0)
    how = dict(lora_rank=4, optimizer="muon", flops_budget=1e8)
    train(data, tmp_path / "muon", **how, **model, init_from=merged)
    log, header = log_of(tmp_path / "muon"), log_of(tmp_path / "muon").headers[0]
    assert log.steps[-1] == header["max_iters"] == math.ceil(1e8 / header["flops_per_step"])
    assert header["params"]["trained"] < header["params"]["all"] / 4
    refuses("was trained with lora_rank=8, not 3", resume, run, lora_rank=3)
    for rank in (0, 4):
        how = dict(init_from=run, lora_rank=rank)
        refuses("holds adapters: merge them first", resume, tmp_path / "x", **how)
    refuses("with bias=False, not True", resume, tmp_path / "x", init_from=base, bias=True)
    branch = dict(branch_from=merged, out_dir=tmp_path / "x")
    refuses("has no optimizer state", script, "train.py", **branch)
    os.rename(base, tmp_path / "away")
    refuses(f"belong to {base}/ckpt.pt, which is gone or has changed", load_model, run)


def test_a_run_says_that_it_repeats_few_rows_in_each_step(data, runs, tmp_path, capsys):
    how = dict(sft_data=write_conversations(tmp_path / "c.jsonl"), init_from=runs / "a")
    train(data, tmp_path / "few", **how, max_iters=1)
    told = capsys.readouterr().out
    rows = int(re.search(r"train: \d+ conversations in (\d+) rows", told)[1])
    assert "times a step" not in told
    train(data, tmp_path / "often", **how, max_iters=1, total_batch_tokens=3 * 32 * rows)
    often = f"each of the {rows} rows of training data comes 3 times a step"
    assert f"{often}: with --total_batch_tokens={32 * rows} it" in capsys.readouterr().out


def test_fine_tuning_over_two_ranks_equals_one_process(data, runs, tmp_path):
    how = dict(sft_data=write_conversations(tmp_path / "c.jsonl"), init_from=runs / "a")
    how |= dict(lora_rank=4, learning_rate=1e-2, total_batch_tokens=64)
    train(data, tmp_path / "one", **how, batch_size=2)
    train(data, tmp_path / "accumulated", **how, batch_size=1)  # rows have unequal weights
    ranks(data, tmp_path / "two", **how, batch_size=1)
    one, *others = (log_of(tmp_path / name).losses for name in ("one", "accumulated", "two"))
    assert others == [pytest.approx(one, abs=1e-4)] * 2


@cases("size, context", [(16, 32), (32, None)])
def test_fine_tuning_at_another_block_size_keeps_the_c_of_bhyt(data, tmp_path, size, context):
    train(data, tmp_path / "a", residual="bhyt")
    how = dict(learning_rate=1e-9, block_size=size, init_from=tmp_path / "a")
    script("train.py", *TINY_RUN[7:], **how, out_dir=tmp_path / "b", max_iters=1)
    fresh = load_model(tmp_path / "a")[1].state_dict()
    old, new = (checkpoint(tmp_path / name)["model"] for name in "ab")
    assert checkpoint(tmp_path / "b")["config"]["bhyt_context"] == context
    for key in ("blocks.0.attn_residual.c", "blocks.1.attn_residual.c"):
        assert new[key].item() == pytest.approx(fresh[key].item(), rel=1e-3)
        assert new[key].item() != pytest.approx(old[key].item(), rel=1e-6)
