"""
The skip oracle: how much does the loss rise if one token skips one sublayer, and which score
predicts it?

    python runs/oracle.py --out_dir=out/default    about 4,000 tokens; writes OUT_DIR/oracle.json

For a trained model without a mixture of depths. The rise of a token at a sublayer is the rise of
the whole sequence's loss when only this token skips only this sublayer. As in mod.py, other tokens
still attend to its keys and values. A router should skip the tokens with the lowest rises. It
compares these scores; the first two are known before the sublayer runs:

    turn       NAG's a, the router of its mixture of depths
    probe      a linear function of the sublayer's input, fitted to the ranks of the rises on half
               of the text
    update     |new - old| / |old| of the stream
    angle      between the old and the new stream
    random     a control

On the other half, for each sublayer: the rank correlation of score and rise, and the regret at
`rate`: the mean rise of the tokens that the score skips, minus the lowest possible mean.
"""

import os
import sys

import torch
import torch.nn.functional as F

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import mod
from checkpoint import load_model
from configurator import configure
from data import Windows, eval_batches, spread, write_json
from norms import Stream

out_dir = "out"  # folder of the run
data_dir: str | None = None  # folder with shards; None: as in training
oracle_tokens = 4096  # validation tokens
rate = 0.4  # share of tokens that skip, for the regret

SCORES = ("turn", "probe", "update", "angle", "random")


def sublayers(model, idx):
    """[(residual, function from its input to its output)] for the tokens idx (B, T)."""
    rope, found = (model.cos[: idx.size(1)], model.sin[: idx.size(1)]), []
    for b, block in enumerate(model.blocks):
        values = model.values(b, idx)
        attend = lambda h, attn=block.attn, values=values: attn(h, rope, values=values)
        found += [(block.attn_residual, attend), (block.mlp_residual, block.mlp)]
    return found


def apply(sublayer, stream, scale, runs=None):
    """(input of the sublayer, stream it was read from, new stream). runs (B, T, 1): which run."""
    residual, run = sublayer
    h, before = residual.read(stream)
    after = residual.write(before, run(h), scale)
    return h, before, after if runs is None else mod.skip(residual, before, after, runs)


def losses(model, stream, y):
    """Loss of each sequence, (B,): the sum over its tokens."""
    logits = model.logits(*model.ends.readout(stream, model.head.weight)).float()
    return F.cross_entropy(logits.mT, y, reduction="none").sum(-1)


def copies(stream, n):
    """n copies of a stream of one sequence."""
    expand = lambda x: None if x is None else x.expand(n, *x.shape[1:])
    sources = tuple(expand(x) for x in stream.sources)
    return Stream(expand(stream.x), expand(stream.lane), stream.at, sources)


@torch.no_grad()
def look(model, x, y):
    """For one sequence x (1, T): rises (L, T), and a dict of scores (L, T) and inputs (L, T, C)."""
    T, scale = x.size(1), model.blocks[0].scale
    stream = model.begin(x, torch.arange(T, device=x.device))
    one, many = sublayers(model, x), sublayers(model, x.expand(T, T))
    runs = ~torch.eye(T, dtype=torch.bool, device=x.device)[..., None]  # copy t: token t skips
    rises, seen = [], {name: [] for name in ("turn", "update", "angle", "input")}
    for layer, sublayer in enumerate(one):
        h, before, after = apply(sublayer, stream, scale)
        changed = apply(many[layer], copies(stream, T), scale, runs)[-1]
        for later in many[layer + 1 :]:
            changed = apply(later, changed, scale)[-1]
        rises.append(losses(model, changed, y.expand(T, T)))

        residual, (old, new) = sublayer[0], map(model.ends.additive, (before, after))
        turn = residual.turn(before.x)[0, :, 0] if hasattr(residual, "turn") else torch.zeros(T)
        seen["turn"].append(turn.abs())
        seen["update"].append(((new - old).norm(dim=-1) / old.norm(dim=-1))[0])
        cosine = F.cosine_similarity(old, new, dim=-1)[0].clamp(-1, 1)
        seen["angle"].append(cosine.acos())
        seen["input"].append(h[0].float())
        stream = after
    return torch.stack(rises) - losses(model, stream, y), {
        k: torch.stack(v) for k, v in seen.items()
    }


def ranks(x):
    return x.argsort().argsort().double()


def rank_correlation(x, y):
    return float(torch.corrcoef(torch.stack([ranks(x), ranks(y)]))[0, 1])


def regret(score, rise):
    """Mean rise of the tokens with the lowest scores, minus that of the lowest rises."""
    k = max(1, round(rate * len(rise)))
    return float(rise[score.argsort()[:k]].mean() - rise.sort().values[:k].mean())


def probe(inputs, rise, test_inputs):
    """Least squares with a small ridge, on the ranks of the rises: they have long tails."""
    with_one = lambda h: F.pad(h.double(), (0, 1), value=1.0)
    A, ridge = with_one(inputs), 1e-3 * len(inputs)
    w = torch.linalg.solve(A.T @ A + ridge * torch.eye(A.size(1)), A.T @ ranks(rise))
    return with_one(test_inputs) @ w


def compare(rises, seen):
    """{score: {"rank correlation", "regret": one value per sublayer}}, on the second half."""
    half, report = rises.size(1) // 2, {}
    generator = torch.Generator().manual_seed(0)
    scores = {k: v[:, half:] for k, v in seen.items() if k != "input"}
    scores["random"] = torch.rand(rises[:, half:].shape, generator=generator)
    fitted = zip(seen["input"], rises)
    scores["probe"] = torch.stack([probe(h[:half], r[:half], h[half:]) for h, r in fitted])
    for name in SCORES:
        if scores[name].std() > 0:
            pairs = [*zip(scores[name], rises[:, half:])]
            report[name] = {
                "rank correlation": [rank_correlation(*pair) for pair in pairs],
                "regret": [regret(*pair) for pair in pairs],
            }
    return report


def main():
    configure(globals(), argv=sys.argv[1:])
    state, model = load_model(out_dir)
    if state["config"]["mod_rate"]:
        raise SystemExit(f"{out_dir}: give a model without a mixture of depths")
    windows = Windows(data_dir or state["settings"]["data_dir"], "val", model.config.block_size)
    found = [
        look(model, x, y)
        for x, y in eval_batches(windows, spread(windows, oracle_tokens), 1, "cpu")
    ]
    rises = torch.cat([each for each, _ in found], dim=1)
    seen = {k: torch.cat([each[k] for _, each in found], dim=1) for k in found[0][1]}
    scores = compare(rises, seen)
    for name, row in scores.items():
        means = {k: sum(v) / len(v) for k, v in row.items()}
        print(f"{name:<8} " + ", ".join(f"{k} {v:+.4f}" for k, v in means.items()))
    rise = rises[:, rises.size(1) // 2 :].mean(1).tolist()
    report = {"tokens": rises.size(1), "rate": rate, "rise": rise, "scores": scores}
    write_json(os.path.join(out_dir, "oracle.json"), report)


if __name__ == "__main__":
    main()
