"""
Convert a trained pre-norm model into a model of another residual mode. The conversion needs no
training. Further training recovers most of what it loses.

    python convert.py out/ckpt.pt out/nag.pt --residual=nag    settings of the new mode, --data_dir
                                                               and --seed may follow
    python train.py --init_from=out/nag.pt --out_dir=out/nag

x is the stream of the pre-norm model, x <- x + F(g x / rms(x)), and g is the gain of a norm.

    bhyt, bhyt_exact    gamma = g kappa / lam: Eq. 2 of bhyt.py is then g x / sqrt(v + eps), with an
                        error of third order in lam x / (kappa sqrt(v + eps))                   (1)
    prenorm_approx      keeps its norms
    nag                 W <- W diag(g) for all weights that read the stream, and for the head   (2)
                        alpha_l = mean(rms(f) / rms(x - mean(x))) / mean(m), with f after Eqs. 2
                        and 3 of nag.py, x - mean(x) in place of r, means over tokens           (3)
                        g_dec keeps the standard deviation of the logits; both deviations are
                        weighted by pre-norm's probabilities                                    (4)

A converted BHyT has bhyt_unit=True, so that c counts gamma (Eq. 6 of bhyt.py). A conversion to NAG
loses the norms of the head's rows, the mean of the stream, the part of f along r, and how
rms(f) / rms(x) differs between tokens. A tied head also loses the gain of the final norm: (2)
leaves it as it is, because it is the embedding. NAG measures (3) and (4) on TOKENS tokens of
training text.
"""

import sys
from dataclasses import replace

import torch
import torch.nn.functional as F

import bhyt
import checkpoint
from configurator import configure, usage
from data import Windows, eval_batches, spread
from depth import walk
from model import GPT, RESIDUALS, GPTConfig
from norms import pick, readers, weight_of

data_dir: str | None = None  # nag: folder with shards of text; None: that of the model's training
seed = 1337  # nag: seed of the weights that pre-norm does not have

TOKENS = 8192  # of text, for Eqs. 3 and 4
LONGEST = 1024  # tokens of its longest window: Eq. 4 keeps the logits of a window


def to_bhyt(model, source, batches):
    """Eq. 1. RMSNorm and BoundedTanh both call their gain `gain`, so it is copied already."""
    for norm in model.modules():
        if isinstance(norm, bhyt.BoundedTanh):
            norm.gain.mul_(bhyt.KAPPA / norm.lam)


def to_nag(model, source, batches):
    """Eqs. 2 to 4. batches: (inputs, targets) of text. Targets of -1 do not count."""
    for block, old in zip(model.blocks, source.blocks):
        gains = (old.attn_residual.norm.gain, old.mlp_residual.norm.gain)
        for gain, layers in zip(gains, readers(block)):
            for layer in layers:
                weight_of(layer).mul_(gain)  # Eq. 2
    if not model.config.tied:
        model.head.weight.mul_(source.ends.norm.gain)

    residuals = [r for block in model.blocks for r in (block.attn_residual, block.mlp_residual)]
    for of_sublayer, alpha in zip(residuals, measured_alphas(residuals, source, batches)):
        of_sublayer.alpha.fill_(alpha)

    model.ends.g_dec.zero_()
    theirs, ours = logit_variances(source, model, batches)
    model.ends.g_dec.fill_((theirs / ours).log() / 2)  # Eq. 4


def measured_alphas(residuals, source, batches):
    """Eq. 3 for every sublayer, (2 n_layer,)."""
    sums = torch.zeros(len(residuals), 2)
    for of_sublayer in residuals:
        of_sublayer.alpha.fill_(1.0)  # so that turn returns m
    for x, y in batches:
        counted = y >= 0
        for total, of_sublayer, step in zip(sums, residuals, walk(source, x)):
            _, _, _, before, after = step
            f = (after.x - before.x) / source.blocks[0].scale
            r, a = direction_and_turn(before.x, f, **of_sublayer.parts)
            total += torch.stack([a[counted].sum(), of_sublayer.turn(r)[counted].sum()])
    return sums[:, 0] / sums[:, 1]


def direction_and_turn(x, f, centre, orthogonal):
    """The r of an additive stream x (..., d), and rms(f) / rms(x) after Eqs. 2 and 3 of nag.py."""
    if centre:
        x, f = (z - z.mean(-1, keepdim=True) for z in (x, f))
    if orthogonal:
        f = f - (f * x).sum(-1, keepdim=True) / (x * x).sum(-1, keepdim=True) * x
    rms_x, rms_f = (z.square().mean(-1, keepdim=True).sqrt() for z in (x, f))
    return x / rms_x, rms_f / rms_x


def logit_variances(source, model, batches):
    """The two variances of Eq. 4, (2,): of the logits of source, then of model."""
    sums = torch.zeros(2)
    for x, y in batches:
        both = [F.linear(*each.hidden(x))[y >= 0] for each in (source, model)]  # (N, V)
        p = both[0].softmax(-1)
        means = [(p * logits).sum(-1, keepdim=True) for logits in both]
        parts = [(p * (logits - mean).square()).sum() for logits, mean in zip(both, means)]
        sums += torch.stack(parts)
    return sums


MODES = {  # name: (function, settings that a converted model must have)
    "nag": (to_nag, {"nag_first_logits": 0.75}),  # Eq. 4 replaces the start that this sets
    "bhyt": (to_bhyt, {"bhyt_unit": True}),
    "bhyt_exact": (to_bhyt, {"bhyt_unit": True}),
    "prenorm_approx": (lambda model, source, batches: None, {}),  # it has pre-norm's parameters
}


@torch.no_grad()
def convert(source, batches, residual, **settings):
    """A model of another mode from the pre-norm model source."""
    function, fixed = pick(MODES, residual, "residual")
    needed = {"residual": "prenorm", "norm": "rms", "mod_on": "none"}
    for name, value in needed.items():
        if getattr(source.config, name) != value:
            has = f"the model has {name}={getattr(source.config, name)!r}"
            raise ValueError(f"{has}: a conversion needs {name}={value!r}")
    for name, value in settings.items():
        if name not in RESIDUALS[residual].settings:
            raise ValueError(f"{name}={value!r}: a conversion changes only settings of {residual}")
        if fixed.get(name, value) != value:
            raise ValueError(f"a conversion to {residual} needs {name}={fixed[name]!r}")
    if residual == "nag" and not source.config.qk_norm:
        fixed = fixed | {"norm_eps": 1e-6}  # the default: no norm is left that would use it
    model = GPT(replace(source.config, residual=residual, **settings | fixed))
    model.to(source.embed.weight.dtype)
    model.load_state_dict(source.state_dict(), strict=False)  # all weights that both have
    function(model.eval(), source, batches)
    model.refresh()
    return model


def text_of(state, config):
    """TOKENS tokens of training text as a list of (inputs, targets)."""
    folder = data_dir or state["settings"]["data_dir"]
    if folder is None:
        raise ValueError("the model was imported without shards: give --data_dir")
    windows = Windows(folder, "train", min(config.block_size, LONGEST))
    windows.refuse_other_tokenizer(state["meta"], config.vocab_size)
    return [*eval_batches(windows, spread(windows, TOKENS), 1, "cpu")]


def main(path, to, *argv):
    _, given = configure(globals(), GPTConfig, argv=argv)
    checkpoint.prepare_folder(to)
    state, source = checkpoint.load_model(path)
    residual = given.get("residual")
    own = ("residual", "data_dir", "seed") if residual == "nag" else ("residual",)
    others = {k: v for k, v in given.items() if k not in own}
    torch.manual_seed(seed)
    batches = text_of(state, source.config) if residual == "nag" else []
    model = convert(source, batches, residual, **others)

    checkpoint.save_start(to, state, model)
    print(f"{to}: {residual}; train it further with --init_from={to}")


if __name__ == "__main__":
    usage(__doc__, sys.argv, len(sys.argv) >= 3)
    try:
        main(*sys.argv[1:])
    except ValueError as error:
        raise SystemExit(f"convert.py: {error}")
