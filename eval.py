"""
Ask a checkpoint: its loss, what its stream does through depth, and a sample of text.

    python eval.py --out_dir=out --what=loss,depth,sample --prompt='def main():'
"""

import codecs
import json
import math
import os
import sys
from collections import defaultdict

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule

import bhyt
import mod
from configurator import configure
from generate import stream_tokens
from model import GPT, Attention, GPTConfig
from norms import wide
from prepare_c4 import Windows, meta_tokenizer, to_batch, write_json

out_dir = "out"  # where the run is; eval.json goes there too
checkpoint = "ckpt.pt"  # which of its checkpoints: ckpt.pt, ckpt_best.pt or one that was kept
data_dir: str | None = None  # shards with a val split; None: those it was trained on
what: str | None = None  # parts, separated by commas: loss, depth, variance, mod, sample; None: all that apply
eval_tokens: int | None = None  # validation tokens for the loss; None: all
depth_tokens = 16384  # validation tokens for depth and variance
mod_rate: float | None = None  # let this share of the tokens skip, in place of what it was trained with
batch_size = 16  # windows at once
prompt = "def "  # what the sample begins with, and the text that mod maps
max_new_tokens = 200  # length of the sample
temperature = 0.8  # of the sample; 0: greedy
top_k: int | None = None  # sample from the likeliest so many; None: all
top_p: float | None = None  # sample from the likeliest that hold so much; None: all
seed = 1337  # of the sample
device = "cpu"  # cpu, cuda, cuda:1, ...


def load(path, device="cpu"):
    """A checkpoint of train.py and the model in it"""
    if not os.path.exists(path):
        raise SystemExit(f"{path}: no such checkpoint")
    state = torch.load(path, map_location="cpu", weights_only=True)
    model = GPT(GPTConfig(**state["config"])).to(device)
    model.load_state_dict(state["model"])
    model.refresh()
    return state, model.eval()


def eval_batches(windows, count, batch_size, device, rank=0, world=1):
    """Inputs and targets of this rank's share of the first count windows, padded to batch_size with targets of -1, so
    that every rank has as many batches and no shape ever changes"""
    for first in range(0, count, batch_size * world):
        mine = range(first + rank, first + batch_size * world, world)
        x, y = (t.to(device) for t in to_batch([windows[i % count] for i in mine], device))
        y[[i >= count for i in mine]] = -1
        yield x, y


def count_windows(windows, tokens):
    """How many whole windows there are in so many tokens, at least one; all of them for None"""
    return len(windows) if tokens is None else min(len(windows), max(1, tokens // windows.T))


@torch.no_grad()
def evaluate(model, windows, tokens, batch_size, device, rank=0, world=1):
    """Mean loss over the first `tokens` tokens of a split (all, if None), in whole windows: the same ones every time,
    and the same number whatever the batch size and the number of ranks."""
    total, training = torch.zeros(2, dtype=torch.float64, device=device), model.training
    model.eval()
    for x, y in eval_batches(windows, count_windows(windows, tokens), batch_size, device, rank, world):
        logits = model(x)[0].float()
        total[0] += F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1), ignore_index=-1, reduction="sum")
        total[1] += (y >= 0).sum()
    model.train(training)
    if world > 1:
        torch.distributed.all_reduce(total)
    return float(total[0] / total[1])


@torch.no_grad()
def walk(model, x):
    """The forward in eval mode, by sublayer: (sublayer, its residual, what it read, the stream before and behind)"""
    rope, sharded = (model.cos[: x.size(1)], model.sin[: x.size(1)]), isinstance(model, FSDPModule)
    if sharded:
        model.unshard()
    stream = model.ends.embed(model.embed(x))._replace(at=torch.arange(x.size(1), device=x.device)[:, None])
    for block in model.blocks:
        if sharded:
            block.unshard()
        for sublayer, residual in ((block.attn, block.attn_residual), (block.mlp, block.mlp_residual)):
            h, before = residual.read(stream)
            stream = block.attend(stream, rope) if sublayer is block.attn else block.feed(stream)
            yield sublayer, residual, h, before, stream
        if sharded:
            block.reshard()


DEAD = 0.01  # a NAG sublayer that turns by less than this, some half a degree, does nothing


@torch.no_grad()
def gate_health(model, x):
    """NAG on one batch: mean |a| of every sublayer, the share of all turns that are below DEAD, the sublayers whose
    mean is"""
    training = model.training
    model.eval()
    a = torch.stack([residual.turn(before.x).abs() for _, residual, _, before, _ in walk(model, x)])
    model.train(training)
    mean = a.flatten(1).mean(1)  # of (2 n_layer, B, T, 1)
    return {"a": mean.tolist(), "floor": float((a < DEAD).float().mean()), "dead": int((mean < DEAD).sum())}


def degrees(x, y):
    """Angle between vectors, averaged; exact for small ones, as the arc cosine is not"""
    x, y = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
    return torch.rad2deg(2 * torch.atan2((x - y).norm(dim=-1), (x + y).norm(dim=-1))).mean()


def sink(attention, h, rope):
    """Attention that goes to the first token, averaged over heads and all queries that could look elsewhere"""
    q, (k, _) = attention.query(h, rope), attention.key_value(h, rope)
    k = k.repeat_interleave(q.size(1) // k.size(1), dim=1)
    scores = wide(q @ k.mT) / q.size(-1) ** 0.5  # (B, H, T, T)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=h.device).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1)[:, :, 1:, 0].mean()


def look(model, x, y):
    """One batch: {quantity: its mean behind the embedding and every block, or for every sublayer or attention}, and of
    every token the log of the last stream's rms, the entropy of the prediction and the loss"""
    seen, first = defaultdict(list), None

    def shape_of(s):
        centred, square = s - s.mean(-1, keepdim=True), s.square().mean(-1)
        variance, largest = centred.square().mean(-1), s.abs().amax(-1)
        seen["variance"].append(s.var(-1).mean())
        seen["norm"].append(s.norm(dim=-1).mean())
        seen["max"].append(largest.mean())
        seen["max/rms"].append((largest / square.sqrt()).mean())
        seen["kurtosis"].append((centred.pow(4).mean(-1) / variance.square()).mean())

    for sublayer, residual, h, before, stream in walk(model, x):
        old, new = model.ends.additive(before), model.ends.additive(stream)
        if first is None:
            first = old
            shape_of(first)
        seen["rotation"].append(degrees(old, new))
        seen["from embedding"].append(degrees(first, new))
        if hasattr(residual, "turn"):
            seen["alpha"].append(residual.alpha[0])
            seen["a"].append(residual.turn(before.x).abs().mean())
        if isinstance(sublayer, Attention):
            seen["sink"].append(sink(sublayer, h, (model.cos[: x.size(1)], model.sin[: x.size(1)])))
        else:
            shape_of(new)
    logp = F.linear(*model.ends.readout(stream, model.head.weight)).float().log_softmax(-1)
    entropy, loss = -(logp.exp() * logp).sum(-1), -logp.gather(-1, y[..., None])[..., 0]
    return {k: torch.stack(v) for k, v in seen.items()}, torch.stack([new.square().mean(-1).log() / 2, entropy, loss])


@torch.no_grad()
def depth(model, windows, tokens, batch_size, device):
    """What the stream does through depth; for NAG, the additive stream that its lanes stand for"""
    sums, n, of_tokens = defaultdict(float), 0, []
    for x, y in eval_batches(windows, count_windows(windows, tokens), batch_size, device):
        real = y[:, 0] >= 0
        seen, scalars = look(model, x[real], y[real])
        for key, values in seen.items():
            sums[key] = sums[key] + values * int(real.sum())
        n += int(real.sum())
        of_tokens.append(scalars.flatten(1))
    report = {key: (total / n).tolist() for key, total in sums.items()}
    norm, entropy, loss = torch.cat(of_tokens, dim=1)
    flat = norm.std() < 1e-4  # post-norm's is the same for all tokens
    for name, other in (("norm and entropy", entropy), ("norm and loss", loss)):
        report[name] = None if flat else float(torch.corrcoef(torch.stack([norm, other]))[0, 1])
    return report


def fit(predicted, measured):
    """How well one vector predicts another"""

    def correlation(x, y):
        return float(torch.corrcoef(torch.stack([x, y]))[0, 1])

    error = (predicted - measured).square().mean()
    ranks = [x.argsort().argsort().double() for x in (predicted, measured)]
    return {
        "RMSE": float(error.sqrt()), "R2": float(1 - error / measured.var(correction=0)),
        "Pearson": correlation(predicted, measured), "Spearman": correlation(*ranks),
    }  # fmt: skip


def added_variance(block, T):
    """What the attention of a BHyT or prenorm_approx block is predicted to add at each position: {variant: (T,)}"""
    norm, attn = block.attn_residual.norm, block.attn
    shape = attn.n_head, attn.n_kv_head, T
    c = bhyt.attention_gain(attn.wv.weight, attn.wo.weight, *shape)
    aware = bhyt.attention_gain(attn.wv.weight * norm.gain, attn.wo.weight, *shape)
    bounded, causal = hasattr(norm, "lam"), T / torch.arange(1, T + 1, device=c.device)
    spread = (norm.lam / norm.kappa) ** 2 if bounded else norm.gain.square().mean()
    paper, aware = (block.scale**2 * x.expand(T) for x in (c * spread, aware * spread if bounded else aware))
    return {"paper": paper, "gain aware": aware, "causal": paper * causal, "both": aware * causal}


def mlp_variance(mlp, gain, spread):
    """Mean square of an MLP's output features, were its inputs independent normals of variance spread * gain^2, and its
    hidden units uncorrelated (which they are not, relu's least of all: some percent)"""
    nodes, weights = (torch.tensor(v, dtype=torch.float32) for v in np.polynomial.hermite_e.hermegauss(32))

    def std(linear):
        return (spread * (linear.weight * gain).square().sum(1)).sqrt().cpu()  # of each hidden unit

    through = mlp.up if mlp.gate is None else mlp.gate
    hidden = (mlp.act(std(through)[:, None] * nodes).square() * weights).sum(1) / weights.sum()
    hidden = hidden if mlp.gate is None else hidden * std(mlp.up).square()
    return float((mlp.down.weight.square().sum(0).cpu() * hidden).sum() / mlp.down.out_features)


def recursion(model, start):
    """The recursion of the paper's Theorem 3.5 at rho = 0: the variance before every MLP, if what is added were
    uncorrelated with the stream, between the bounds of a norm's output (for inputs below kappa standard deviations)"""
    grown = {"least": [], "most": []}
    for bound, values in grown.items():
        v = start
        for block in model.blocks:
            norms = (block.attn_residual.norm, block.mlp_residual.norm)
            spreads = [(float(n.lam) / n.kappa if bound == "most" else math.tanh(n.lam) / n.kappa) ** 2 for n in norms]
            paper = added_variance(block, model.config.block_size)["paper"][0] * spreads[0]
            v += float(paper / (norms[0].lam / norms[0].kappa) ** 2)
            values.append(v)
            v += block.scale**2 * mlp_variance(block.mlp, norms[1].gain, spreads[1])
    return grown


@torch.no_grad()
def variance(model, windows, tokens, batch_size, device):
    """The mean square of a token's stream before the MLP, against its prediction, block by block. For BHyT also, norm
    by norm, the share of inputs beyond lambda, the variance of the output between its bounds, and the recursion."""
    parts, of_norms, n = [], torch.zeros(2, 2 * model.config.n_layer), 0
    for x, y in eval_batches(windows, count_windows(windows, tokens), batch_size, device):
        x, squares = x[y[:, 0] >= 0], []
        for i, (sublayer, residual, _, before, stream) in enumerate(walk(model, x)):
            v = before.x.square().mean(-1, keepdim=True)
            if isinstance(sublayer, Attention):
                squares.append(torch.stack([v[..., 0], stream.x.square().mean(-1)]))
            if isinstance(residual.norm, bhyt.BoundedTanh):
                known = v if before.lane is None else before.lane  # predicted, before the MLP of bhyt
                z, kappa = before.x * torch.rsqrt(known), residual.norm.kappa
                out = torch.tanh(residual.norm.lam / kappa * z)
                of_norms[:, i] += torch.stack([(z.abs() > kappa).float().mean(), out.square().mean()]).cpu() * len(x)
        parts.append(torch.stack(squares))  # (n_layer, 2, B, T)
        n += len(x)
    before, behind = torch.cat(parts, dim=2).double().unbind(1)
    report = {"measured": behind.mean((1, 2)).tolist()}
    added = [added_variance(block, windows.T) for block in model.blocks]
    for variant in added[0]:
        predicted = before + torch.stack([a[variant] for a in added])[:, None]
        fits = [fit(p.flatten(), m.flatten()) for p, m in zip(predicted, behind)]
        report[variant] = {"predicted": predicted.mean((1, 2)).tolist(), **{k: [f[k] for f in fits] for k in fits[0]}}
    norms = [norm for block in model.blocks for norm in (block.attn_residual.norm, block.mlp_residual.norm)]
    if isinstance(norms[0], bhyt.BoundedTanh):
        report["saturated"], report["output"] = (of_norms / n).tolist()
        report["output, at most"] = [(float(norm.lam) / norm.kappa) ** 2 for norm in norms]
        report["output, at least"] = [(math.tanh(norm.lam) / norm.kappa) ** 2 for norm in norms]
        if not model.config.moe_experts:
            report["recursion"] = recursion(model, float(before[0].mean()))
    return report


@torch.no_grad()
def skipping(model, windows, tokens, batch_size, device, ids):
    """Who skips what: the share that skips each sublayer that has a router, under the causal rule; the loss under that
    rule and under training's, which looks ahead; and for one text which of its tokens ran where"""
    routers, skipped, n = mod.routers(model), 0.0, 0

    def runs(x):
        chosen = []
        for i, (_, residual, h, before, _) in enumerate(walk(model, x)):
            router = (model.blocks[i // 2].attn_router, model.blocks[i // 2].mlp_router)[i % 2]
            if router is not None:
                chosen.append(router.choose(router.score(h, before, residual))[1])
        return torch.stack(chosen)  # (routers, B, T)

    for x, y in eval_batches(windows, count_windows(windows, tokens), batch_size, device):
        x = x[y[:, 0] >= 0]
        skipped, n = skipped + (~runs(x)).float().mean((1, 2)) * len(x), n + len(x)
    report = {"skipped": (skipped / n).tolist(), "rate": float(skipped.mean() / n)}
    report["causal loss"] = evaluate(model, windows, tokens, batch_size, device)
    for router in routers:
        router.look_ahead = True
    report["look-ahead loss"] = evaluate(model, windows, tokens, batch_size, device)
    for router in routers:
        router.look_ahead = False
    where = [f"{kind} {b}" for b, block in enumerate(model.blocks) for kind in ("attn", "mlp")
             if getattr(block, kind + "_router") is not None]  # fmt: skip
    map_of = runs(torch.tensor([ids], device=device))[:, 0].int().tolist()
    return report | {"where": where, "tokens": ids, "map": map_of}


def show_skipping(report):
    print(
        f"skipped {report['rate']:.1%}; loss {report['causal loss']:.4f}, {report['look-ahead loss']:.4f} looking ahead"
    )
    for where, share, row in zip(report["where"], report["skipped"], report["map"]):
        print(f"{where:<9} {share:>6.1%} " + "".join(".#"[ran] for ran in row[:96]))


def show_variance(report):
    for variant in ("paper", "gain aware", "causal", "both"):
        rows = report[variant]
        print(f"{variant:<12}" + "  ".join(f"{k} {sum(v) / len(v):.4g}" for k, v in rows.items() if k != "predicted"))
    if "saturated" in report:
        print(f"inputs beyond lambda: {max(report['saturated']):.3%} at most")


def sample(model, encoding, device):
    """Print a continuation of the prompt as it is made."""
    torch.manual_seed(seed)
    ids = encoding.encode_ordinary(prompt) or [encoding.eot_token]
    made = stream_tokens(
        model, torch.tensor([ids], device=device), max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        stop=encoding.eot_token, n_vocab=encoding.n_vocab,
    )  # fmt: skip
    characters = codecs.getincrementaldecoder("utf-8")("replace")  # a character can be several tokens
    print(prompt, end="", flush=True)
    for token in made:
        ids.append(int(token))
        print(characters.decode(encoding.decode_single_token_bytes(ids[-1])), end="", flush=True)
    print()
    return encoding.decode(ids)


TABLES = {  # what has a value behind the embedding and each block, for each sublayer, for each attention
    "block": ("variance", "norm", "max", "max/rms", "kurtosis"),
    "sublayer": ("rotation", "from embedding", "alpha", "a"),
    "attention": ("sink",),
}


def show_depth(report):
    for title, names in TABLES.items():
        rows = {name: report[name] for name in names if name in report}
        print(f"{title:<9}" + "".join(f"  {name:>14}" for name in rows))
        for i, values in enumerate(zip(*rows.values())):
            print(f"{i:<9}" + "".join(f"  {v:>14.4g}" for v in values))
    for name in ("norm and entropy", "norm and loss"):
        print(f"correlation of the last {name}: {report[name]}")


def main():
    settings = configure(globals(), argv=sys.argv[1:])
    state, model = load(os.path.join(out_dir, checkpoint), device)
    known = ["loss", "depth", "variance", "mod", "sample"]
    if model.config.residual not in bhyt.RESIDUALS:
        known.remove("variance")
    if not mod.routers(model):
        known.remove("mod")
    parts = known if what is None else what.split(",")
    unknown = set(parts) - set(known)
    if unknown:
        raise SystemExit(f"what={what!r}: {', '.join(unknown)} is not one of {', '.join(known)}")
    windows = Windows(data_dir or state["settings"]["data_dir"], "val", model.config.block_size)
    if windows.meta["tokenizer_sha256"] != state["meta"]["tokenizer_sha256"]:
        raise SystemExit("the data's tokenizer is not the one that the checkpoint was trained with")
    encoding = meta_tokenizer(data_dir or state["settings"]["data_dir"], windows.meta)
    shared = model.config.mod_budget == "global"
    if mod_rate is not None:
        if not 0 <= mod_rate < 1:
            raise SystemExit(f"mod_rate={mod_rate}: give a share, 0 <= mod_rate < 1")
        if "mod" not in known:
            raise SystemExit(f"mod_rate={mod_rate}: in {out_dir} no token may skip anything")
        batches = [x.to(device) for x, _ in eval_batches(windows, count_windows(windows, 32768), batch_size, device)]
        mod.calibrate(model, batches, shared, mod_rate)
    path, report = os.path.join(out_dir, "eval.json"), {"checkpoint": checkpoint, "step": state["step"]}
    if os.path.exists(path):  # parts that were asked of the same checkpoint before stay
        old = json.load(open(path))
        report = old if old.items() >= report.items() else report
    report["settings"] = report.get("settings", {}) | dict.fromkeys(parts, settings)
    if "loss" in parts:
        report["loss"] = evaluate(model, windows, eval_tokens, batch_size, device)
        print(f"loss {report['loss']:.4f} nats a token")
    if "depth" in parts:
        report["depth"] = depth(model, windows, depth_tokens, batch_size, device)
        show_depth(report["depth"])
    if "variance" in parts:
        report["variance"] = variance(model, windows, depth_tokens, batch_size, device)
        show_variance(report["variance"])
    if "mod" in parts:
        ids = encoding.encode_ordinary(prompt) or [encoding.eot_token]
        report["mod"] = skipping(model, windows, depth_tokens, batch_size, device, ids[: model.config.block_size])
        show_skipping(report["mod"])
    if "sample" in parts:
        if model.config.residual in ("bhyt", "bhyt_exact"):
            bhyt.fold(model)  # last, since it is for good
        report["sample"] = sample(model, encoding, device)
    write_json(path, report)


if __name__ == "__main__":
    main()
