"""
Mixture of Depths: a token runs a sublayer or skips it (Raposo et al. 2024, arXiv 2404.02258; with NAG's own geometry as
router, Figliolia & Millidge 2026, arXiv 2606.16112). Every token gets a score q in [0, 1] before any expensive work:

    nag       q = atan(a) / atan(alpha_l), the share of the sublayer's largest rotation that the token would make   (1)
    learned   q = sigmoid(<w, h> + b) on what the sublayer reads h; what it writes is multiplied by q               (2)
    random    q is a random number, in evaluation one of the position: the control

A token that skips passes unchanged; with NAG's router and mod_fallback it turns by the same a towards a learned v_l.
Keys and values are made for all tokens; queries, scores, output projection, MLP and experts for those that run. In
evaluation, attention is computed for as many rows of each text of a batch as of the one with most; a compiled model,
where no shape may follow from the data, computes all rows and uses those that run.

Training: of T tokens those k with the highest q run, gathered, so that what is skipped is not computed. Looking for the
highest looks ahead, so evaluation and generation use a threshold instead: a token runs where q >= tau.              (3)
After the first step and then every BALANCE steps tau and k follow from a running histogram of q. One tau for all
sublayers (mod_budget global): the mean share below it is mod_rate, and each sublayer keeps the share that is above; or
each its own (layer).                                                                                                (4)

Differs from the papers: k is the same for all sequences of a batch and moves with the histogram, not with every step;
the fallback is off unless asked for: it is not shown to help (README, Mixture of depths).
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from attention import gather_rows
from norms import upcast

BALANCE = 10  # steps between updates of tau and k
BINS = 1024  # of the histogram
MEMORY = 0.35  # what a histogram keeps of itself at each of them


class Router(nn.Module):
    def __init__(self, config, residual, layer):
        super().__init__()
        self.pointwise = layer % 2 == 0  # an MLP or experts: a row is computed without the others
        self.rate, self.kind = config.mod_rate, config.mod_router
        self.geometric, self.learned = self.kind == "nag", self.kind == "learned"
        if self.geometric and not hasattr(residual, "turn"):
            raise ValueError(
                "mod_router='nag' needs residual='nag': the others have no rotation to go by"
            )
        self.v = (
            nn.Parameter(torch.empty(config.n_embd))
            if self.geometric and config.mod_fallback
            else None
        )
        if self.learned:
            self.w, self.b = nn.Parameter(torch.empty(config.n_embd)), nn.Parameter(torch.empty(1))
        if self.geometric and not config.nag_directions:
            raise ValueError(
                "mod_router='nag' needs nag_directions above 0: without a modulator all tokens turn alike"
            )
        if config.mod_fallback and not self.geometric:
            raise ValueError(
                f"mod_router={self.kind!r} does not use mod_fallback: leave it at False"
            )
        if self.kind == "random":
            g = torch.Generator("cpu").manual_seed(layer)
            table = (
                torch.randperm(config.block_size, generator=g, device="cpu") + 0.5
            ) / config.block_size
            self.register_buffer("table", table, persistent=False)
        self.register_buffer("histogram", torch.zeros(BINS))
        self.register_buffer(
            "fresh", torch.zeros(BINS, dtype=torch.int64)
        )  # this rank's scores since the last balance
        self.register_buffer("tau", torch.zeros(1))
        self.register_buffer(
            "share", torch.full((1,), 1.0 - self.rate)
        )  # of the tokens, that run in training
        self.collect = False  # fill the histogram in evaluation too
        self.look_ahead = False  # choose in evaluation as in training: to be compared with, never what is reported
        self.T = config.block_size
        self.update_k()
        self.register_load_state_dict_post_hook(lambda module, keys: module.update_k())

    def update_k(self):
        """k as a Python int: shapes stay static and no device sync is needed."""
        self.k = (
            self.T
            if self.share.device.type == "meta"
            else max(1, round(float(self.share) * self.T))
        )

    def reset_parameters(self):
        if self.v is not None:
            nn.init.normal_(
                self.v, std=0.02
            )  # only its direction matters; at std 1 Adam's steps hardly turn it
        if self.learned:
            nn.init.normal_(self.w, std=self.w.numel() ** -0.5)
            nn.init.zeros_(self.b)

    def score(self, h, stream, residual, scale, turn=None):
        """q (B, T) from the sublayer's input h (B, T, C) and the stream that it was read from."""
        if self.geometric:
            turn = residual.turn(stream.x) if turn is None else turn
            a, most = scale * turn, scale * residual.ramp * residual.alpha
            return (torch.atan(a.abs()) / (torch.atan(most.abs()) + 1e-12))[..., 0]  # (1)
        if self.learned:
            return torch.sigmoid((upcast(h) * self.w).sum(-1) + self.b)  # (2)
        if self.training:
            return torch.rand(h.shape[:2], device=h.device)
        return self.table[stream.at[:, 0]].expand(h.shape[:2])

    def forward(self, sublayer, residual, h, stream, scale):
        """Run the sublayer on some of the tokens and write its output to the stream.

        sublayer: (h, rows) -> (B, k, C), with rows as in attention.gather_rows, or (h, None) -> (B, T, C).
        """
        turn = residual.turn(stream.x) if self.geometric else None
        q = self.score(h, stream, residual, scale, turn)
        if self.training or self.collect:
            self.count(q)
        choose_and_run = self.run_top_k if self.training or self.look_ahead else self.run_above_tau
        f, runs = choose_and_run(sublayer, h, q)
        return self.write(residual, f, runs[..., None], q[..., None], stream, scale, turn)

    def run_top_k(self, sublayer, h, q):
        """Training: the k tokens of each sequence with the highest scores run."""
        k = min(q.size(1), -(-self.k * q.size(1) // self.T))
        chosen = q.topk(k, dim=1, sorted=False).indices.sort(1).values  # (B, k)
        runs = torch.zeros_like(q, dtype=torch.bool).scatter(1, chosen, True)
        return self.run_rows(sublayer, h, chosen), runs

    def run_above_tau(self, sublayer, h, q):
        """Evaluation: the tokens with scores of tau or more run, however many these are."""
        runs = q >= self.tau  # (3)
        if (
            torch.compiler.is_compiling()
        ):  # shapes must not depend on the data, so all tokens run; write drops some
            return sublayer(h, None), runs
        rows, flags = (h.flatten(0, 1)[None], runs.view(1, -1)) if self.pointwise else (h, runs)
        k = int(flags.sum(1).max())  # sequences in which fewer tokens run compute a few in vain
        chosen = (
            flags.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :k].sort(1).values
        )
        return self.run_rows(sublayer, rows, chosen).view_as(h), runs

    def run_rows(self, sublayer, h, chosen):
        """The sublayer's output (B, T, C): computed for the chosen tokens (B, k), zero for the others."""
        places = torch.arange(chosen.size(1), device=chosen.device).expand_as(chosen)
        back = chosen.new_full(h.shape[:2], -1).scatter(
            1, chosen, places
        )  # where each token is among the chosen
        f = sublayer(h, (chosen, back))
        return gather_rows(f, (back, chosen))

    def write(self, residual, f, runs, q, stream, scale, turn):
        known = {} if turn is None else {"turn": turn}
        if self.v is not None:  # a token that skips turns by the same angle, towards v
            return residual.write(stream, torch.where(runs, f, self.v.to(f.dtype)), scale, **known)
        new = residual.write(stream, f, scale * q if self.learned else scale, **known)
        lane = None if new.lane is None else torch.where(runs, new.lane, stream.lane)
        return new._replace(x=torch.where(runs, new.x.to(stream.x.dtype), stream.x), lane=lane)

    @torch.no_grad()
    def count(self, q):
        """Add scores to the histogram of this rank."""
        bins = (q.flatten().float() * BINS).long().clamp(0, BINS - 1)
        self.fresh.index_add_(0, bins, torch.ones_like(bins))


def routers(model):
    return [module for module in model.modules() if isinstance(module, Router)]


@torch.no_grad()
def balance(routers, shared, rate, world=1, memory=MEMORY):
    """Eq. 4: tau, and the share that runs in training, of every router, from what all ranks have scored"""
    fresh = torch.stack([router.fresh for router in routers])
    if world > 1:
        dist.all_reduce(fresh)
    for router, counts in zip(routers, fresh):
        router.histogram.mul_(memory).add_(counts)
        router.fresh.zero_()
    histograms = torch.stack([router.histogram for router in routers]).cpu().double()
    below = (histograms / histograms.sum(1, keepdim=True)).cumsum(
        1
    )  # (routers, BINS): share up to each edge
    below = torch.cat([torch.zeros_like(below[:, :1]), below], dim=1)
    overall = below.mean(0, keepdim=True).expand_as(below) if shared else below
    edge = (overall <= rate).sum(1, keepdim=True).clamp(
        max=BINS
    ) - 1  # the last one with no more than rate below it
    low, high = overall.gather(1, edge), overall.gather(1, edge + 1)
    part = (rate - low) / (high - low).clamp(min=1e-12)
    share = 1 - torch.lerp(below.gather(1, edge), below.gather(1, edge + 1), part)
    for router, tau, kept in zip(
        routers, ((edge + part) / BINS)[:, 0].tolist(), share[:, 0].tolist()
    ):
        router.tau.fill_(tau if rate > 0 else 0.0)
        router.share.fill_(kept)
        router.update_k()


def skipped(routers):
    """Share of the scores collected since the last balance that are below tau, as exactly as a histogram knows"""
    fresh = torch.stack([router.fresh for router in routers])  # (routers, BINS)
    at = (torch.arange(BINS, device=fresh.device) + 0.5) / BINS
    return float(
        (fresh * (at < torch.stack([router.tau for router in routers]))).sum()
        / fresh.sum().clamp(min=1)
    )


def scores_of_all_ranks(model, world):
    """The part of a checkpoint's state that each rank has its own of"""
    state = {}
    for name, router in ((n, m) for n, m in model.named_modules() if isinstance(m, Router)):
        state[name + ".fresh"] = fresh = router.fresh.clone()
        if world > 1:
            dist.all_reduce(fresh)
    return {key: fresh.cpu() for key, fresh in state.items()}


@contextmanager
def switched(model, what):
    """`collect` or `look_ahead`, in evaluation, on for a while in all routers, which forget what they had collected"""
    for router in routers(model):
        router.fresh.zero_()
        setattr(router, what, True)
    try:
        yield
    finally:
        for router in routers(model):
            setattr(router, what, False)


@torch.no_grad()
def calibrate(model, batches, shared, rate):
    """Turn a trained model to another rate by its thresholds alone. What a layer skips moves the scores of the next
    ones, so this is done again until it settles."""
    training = model.training
    model.eval()
    for _ in range(4):
        with switched(model, "collect"):
            for x in batches:
                model(x)
        balance(routers(model), shared, rate, memory=0.0)
    model.train(training)
