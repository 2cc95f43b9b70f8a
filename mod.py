"""
Mixture of Depths: a token runs a sublayer or skips it (Raposo et al. 2024, arXiv 2404.02258).
NAG's own rotation can be the router (Figliolia & Millidge 2026, arXiv 2606.16112).

A router gives each token a score q in [0, 1] before any expensive work:

    nag       q = atan(a) / atan(alpha_l), the rotation as a share of the sublayer's largest    (1)
    learned   q = sigmoid(<w, h> + b) for the sublayer's input h; q multiplies the update       (2)
    random    q is random in training and a fixed function of the position otherwise: a control

Evaluation and generation are causal. A token runs where q >= tau.                              (3)

Training runs the k tokens of a sequence with the highest q. They are gathered, so that the
others are not computed. Top-k looks at later tokens: eval.py reports its loss apart from the loss.
Which of several equal scores it takes depends on the device. In the first sublayer, equal tokens
after equal tokens have equal scores.

A running histogram of q sets tau and k, after the first step and then every BALANCE steps.     (4)
With mod_budget "global", all sublayers share one tau, below which on average mod_rate of the scores
lie. Each sublayer's k follows from its own scores above tau. With "layer", each has its own tau.

A token that skips gets no update (x0mix mixes before a block for all tokens). With the nag router
and mod_fallback, it rotates by the same a towards a learned v_l. Keys and values are computed for
all tokens. Queries, scores (on CUDA sometimes for all: attention.py), the output projection, the
MLP and the experts are computed only for running tokens. In evaluation, sequences are padded to the
number of queries of the sequence with the most running tokens. There a compiled model computes all
tokens and masks the output: its shapes cannot depend on the data. So eager decoding of one sequence
saves the time of what a token skips, and compiled decoding saves none.

Differs from the papers:
- The learned router is for single sublayers, and a token that skips still gives keys and values. In
  its paper it is for every second block, and such a token gives none.
- k is the same for all sequences of a batch, and changes only when the histogram is read.
- Raposo et al. multiply the update by <w, h> itself, and train a predictor for evaluation. Here q
  has a sigmoid, and evaluation compares it with tau.
- The fallback is off by default, because our first runs did not show that it helps.
"""

from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from attention import gather_rows
from norms import upcast

BALANCE = 10  # steps between updates of tau and k
BINS = 1024  # bins of the histogram
MEMORY = 0.35  # the weight of the old histogram at each update


class Router(nn.Module):
    def __init__(self, config, residual, layer):
        super().__init__()
        check(config, residual)
        self.pointwise = layer % 2 == 0  # an MLP or experts, where tokens do not depend on others
        self.rate, self.kind = config.mod_rate, config.mod_router
        self.geometric = self.kind == "nag"
        self.learned = self.kind == "learned"
        self.v = nn.Parameter(torch.empty(config.n_embd)) if config.mod_fallback else None
        if self.learned:
            self.w = nn.Parameter(torch.empty(config.n_embd))
            self.b = nn.Parameter(torch.empty(1))
        self.T = config.block_size
        if self.kind == "random":
            generator = torch.Generator("cpu").manual_seed(layer)
            order = torch.randperm(self.T, generator=generator, device="cpu")
            self.register_buffer("table", (order + 0.5) / self.T, persistent=False)
        self.register_buffer("histogram", torch.zeros(BINS))
        # this rank's scores since the last balance; a GPU adds int32, but would sort int64
        self.register_buffer("fresh", torch.zeros(BINS, dtype=torch.int32))
        self.register_buffer("tau", torch.zeros(1))
        share = torch.tensor([1.0 - self.rate])  # share of tokens that run in training
        self.register_buffer("share", share)
        self.collect = False  # fill the histogram in evaluation too
        self.look_ahead = False  # use training's top-k in evaluation, for comparison only
        self.update_k()
        self.register_load_state_dict_post_hook(lambda module, keys: module.update_k())

    def update_k(self):
        """k as a Python int: shapes stay static and no device sync is needed."""
        meta = self.share.device.type == "meta"
        self.k = self.T if meta else max(1, round(float(self.share) * self.T))

    def reset_parameters(self):
        if self.v is not None:  # small, because only its direction counts and Adam must turn it
            nn.init.normal_(self.v, std=0.02)
        if self.learned:
            nn.init.normal_(self.w, std=self.w.numel() ** -0.5)
            nn.init.zeros_(self.b)

    def score(self, h, stream, residual, scale, turn=None):
        """q (B, T), from the sublayer's input h (B, T, C) and the stream it was read from."""
        if self.geometric:
            turn = residual.turn(stream.x) if turn is None else turn
            a = scale * turn
            largest = scale * residual.ramp * residual.alpha
            return (torch.atan(a.abs()) / (torch.atan(largest.abs()) + 1e-12))[..., 0]  # Eq. 1
        if self.learned:
            return torch.sigmoid((upcast(h) * self.w).sum(-1) + self.b)  # Eq. 2
        if self.training:
            return torch.rand(h.shape[:2], device=h.device)
        return self.table[stream.at[:, 0]].expand(h.shape[:2])

    def forward(self, sublayer, residual, h, stream, scale, docs=None):
        """Run the sublayer on some of the tokens and write its output to the stream.

        sublayer: (h, rows) -> (B, k, C), with rows as in attention.gather_rows, or (h, None) ->
        (B, T, C).
        """
        turn = residual.turn(stream.x) if self.geometric else None
        q = self.score(h, stream, residual, scale, turn)
        if self.training or self.collect:
            self.count(q, docs)
        choose_and_run = self.run_top_k if self.training or self.look_ahead else self.run_above_tau
        f, runs = choose_and_run(sublayer, h, q)
        runs, q = runs[..., None], q[..., None]  # (B, T, 1)
        known = {} if turn is None else {"turn": turn}
        if self.v is not None:  # fallback: a skipping token has the same a, but rotates towards v
            return residual.write(stream, torch.where(runs, f, self.v.to(f.dtype)), scale, **known)
        new = residual.write(stream, f, scale * q if self.learned else scale, **known)
        return residual.skip(stream, new, runs)

    def run_top_k(self, sublayer, h, q):
        """Training: run the k tokens of each sequence with the highest scores."""
        k = min(q.size(1), -(-self.k * q.size(1) // self.T))
        rows = _, inverse = highest(q, k)
        return self.run_rows(sublayer, h, rows), inverse >= 0

    def run_above_tau(self, sublayer, h, q):
        """Evaluation: run every token whose score is tau or more."""
        runs = q >= self.tau  # Eq. 3
        if torch.compiler.is_compiling():  # run all tokens, since shapes cannot depend on the data
            return sublayer(h, None), runs
        tokens, flags = (h.flatten(0, 1)[None], runs.view(1, -1)) if self.pointwise else (h, runs)
        k = int(flags.sum(1).max())  # sequences with fewer running tokens are padded with others
        if k == flags.size(1):
            return sublayer(h, None), runs
        if k == 0 and self.pointwise:  # attention must still store keys and values
            return torch.zeros_like(h), runs
        rows = highest(flags.to(torch.int8), k)
        return self.run_rows(sublayer, tokens, rows).view_as(h), runs

    def run_rows(self, sublayer, h, rows):
        """Run the tokens that rows names, and scatter the output into zeros: (B, T, C)."""
        chosen, inverse = rows
        return gather_rows(sublayer(h, rows), (inverse, chosen))

    @torch.no_grad()
    def count(self, q, docs=None):
        """Add scores to the histogram of this rank. Padding, where docs is 0, does not count.

        A recomputed forward counts all scores twice.
        """
        bins = (q.flatten().float() * BINS).long().clamp(0, BINS - 1)
        real = torch.ones_like(bins) if docs is None else docs.flatten() > 0
        self.fresh.index_add_(0, bins, real.to(torch.int32))


def highest(scores, k):
    """Rows for attention.gather_rows: the k tokens with the highest scores (B, T), in any order."""
    chosen = scores.topk(k, dim=1, sorted=False).indices
    places = torch.arange(k, dtype=torch.int32, device=scores.device)
    inverse = places.new_full(scores.shape, -1)
    return chosen, inverse.scatter(1, chosen, places.expand_as(chosen))


def check(config, residual):
    kind = config.mod_router
    if kind == "nag" and not residual.rotates:
        raise ValueError("mod_router='nag' needs residual='nag': others take learned or random")
    if kind == "nag" and not config.nag_directions:
        raise ValueError("mod_router='nag' needs nag_directions above 0: else all q are equal")
    if kind != "nag" and config.mod_fallback:
        raise ValueError(f"mod_router={kind!r} does not use mod_fallback: leave it at False")


def routers(model):
    return [module for module in model.modules() if isinstance(module, Router)]


@torch.no_grad()
def balance(routers, shared, rate, world=1, memory=MEMORY):
    """Eq. 4: set tau, share and k of every router from the scores of all ranks."""
    fresh = torch.stack([router.fresh for router in routers])
    if world > 1:
        dist.all_reduce(fresh)
    for router, counts in zip(routers, fresh):
        router.histogram.mul_(memory).add_(counts)
        router.fresh.zero_()
    histograms = torch.stack([router.histogram for router in routers]).cpu().double()
    below = (histograms / histograms.sum(1, keepdim=True)).cumsum(1)
    below = torch.cat([torch.zeros_like(below[:, :1]), below], dim=1)  # share below each bin edge
    overall = below.mean(0, keepdim=True).expand_as(below) if shared else below

    edges = np.linspace(0, 1, BINS + 1)
    for router, own, used in zip(routers, below.numpy(), overall.numpy()):
        tau = np.interp(rate, used, edges)  # a share `rate` of the scores used lies below tau
        router.tau.fill_(tau if rate > 0 else 0.0)
        router.share.fill_(1 - np.interp(tau, edges, own))
        router.update_k()


def scores_of_all_ranks(model, world):
    """State for a checkpoint: {buffer name: fresh scores, summed over the ranks}."""
    state = {}
    for name, router in model.named_modules():
        if isinstance(router, Router):
            state[name + ".fresh"] = fresh = router.fresh.clone()
            if world > 1:
                dist.all_reduce(fresh)
    return {key: fresh.cpu() for key, fresh in state.items()}


@contextmanager
def switched(model, flag):
    """In a with block: clear the fresh scores and set `collect` or `look_ahead` in all routers."""
    for router in routers(model):
        router.fresh.zero_()
        setattr(router, flag, True)
    try:
        yield
    finally:
        for router in routers(model):
            setattr(router, flag, False)


@torch.no_grad()
def calibrate(model, batches, shared, rate):
    """Set the thresholds of a trained model for another rate, without training.

    The tokens that one sublayer skips change the scores of later ones, so this is repeated.
    """
    training = model.training
    model.eval()
    for _ in range(4):
        with switched(model, "collect"):
            for x in batches:
                model.hidden(x)
        balance(routers(model), shared, rate, memory=0.0)
    model.train(training)
