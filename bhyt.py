"""
BHyT, the bounded hyperbolic tangent in place of pre-norm (Byun et al., ICML 2026, arXiv 2601.09719). x is the stream,
v the mean of its squares over the n_embd = d features, T the context length of training.

    norm       kappa = 1 / sqrt(1 - p):  by Chebyshev at least p of all |x| are below kappa sqrt(v)                 (1)
               y = gamma * tanh((lam / kappa) x / sqrt(v + eps)),  lam one scalar a norm                            (2)
    attention  reads (2) with v measured: x' = x + attention
    MLP        reads (2) with v' = v + c (lam_attention / kappa)^2, not measured again                              (3)
               c = |W_V W_O|_F^2 / (T d), W_V repeated for each query head; refreshed every bhyt_interval steps     (4)

    bhyt            as above
    bhyt_exact      measures v before the MLP too
    prenorm_approx  RMSNorm, whose second v of a block is v' = v + c mean(gamma^2): the ablation of the prediction  (5)

Beyond the paper, as a setting (bhyt_unit): gamma starts at kappa / lam, where the outputs have variance 1 as those of
RMSNorm; at 1 they are 5 and 10 times smaller. Then c = |diag(gamma) W_V W_O|_F^2 / (T d), since W_V sees gamma * tanh.
Differs from the release: lam is really frozen where it is not learned. As there, lam enters (3) detached.
"""

import torch
from torch import nn

from norms import FinalNorm, PreNorm, gathered, make_norm, refuse, upcast

UP = (1.50631041e-08, 2.17741688e-05, 0.00356421217, 0.134382384, 0.99999997)
DOWN = (8.4541874e-07, 0.0003399271, 0.0261362291, 0.467715592, 1)


class Tanh(torch.autograd.Function):
    """tanh(z) = z UP(z^2) / DOWN(z^2), fitted to |z| <= 8 and constant beyond, off by less than 4e-7 in float32. In
    what the compiler makes for a CPU, half the time of the library's, which eager models and float64 get."""

    @staticmethod
    def forward(ctx, z):
        if z.dtype == torch.float64 or not torch.compiler.is_compiling():
            t = torch.tanh(z)
        else:
            z = z.clamp(-8.0, 8.0)
            w, up, down = z * z, UP[0], DOWN[0]
            for a, b in zip(UP[1:], DOWN[1:]):
                up, down = up * w + a, down * w + b
            t = z * up / down
        ctx.save_for_backward(t)
        return t

    @staticmethod
    def backward(ctx, grad):
        (t,) = ctx.saved_tensors
        return grad * (1 - t * t)


def bounded_tanh(x, v, lam, gamma, kappa, eps=1e-6):
    """Eq. 2; gamma may be None, where fold has put it into the next linear"""
    y = Tanh.apply((lam / kappa) * torch.rsqrt(v + eps) * x)
    return y if gamma is None else gamma * y


def attention_gain(w_v, w_o, n_head, n_kv_head, block_size):
    """Eq. 4 for weights as nn.Linear stores them, (G D, d) and (d, H D), without the d x d product: what the query
    heads of a group do to the same values adds up; then |W_V W_O|_F^2 = sum(W_V W_V^T * W_O^T W_O), both (G D, G D)"""
    d = w_v.size(1)
    w_o = w_o.view(d, n_kv_head, n_head // n_kv_head, -1).sum(2).flatten(1)  # (d, G D)
    return ((w_v @ w_v.T) * (w_o.T @ w_o)).sum() / (block_size * d)


class BoundedTanh(nn.Module):
    def __init__(self, config, lam):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(config.n_embd))
        if config.bhyt_learned:
            self.lam = nn.Parameter(torch.empty(1))
        else:
            self.register_buffer("lam", torch.empty(1))
        self.start, self.kappa, self.eps = lam, (1 - config.bhyt_p) ** -0.5, config.norm_eps  # (1)
        self.start_of_gain = self.kappa / lam if config.bhyt_unit else 1.0

    def reset_parameters(self):
        nn.init.constant_(self.lam, self.start)
        nn.init.constant_(self.gain, self.start_of_gain)

    def forward(self, x, v=None):
        w = upcast(x)
        v = w.square().mean(-1, keepdim=True) if v is None else v
        return bounded_tanh(w, v, self.lam, self.gain, self.kappa, self.eps).to(x.dtype)


class BHyTEnds(FinalNorm):
    def __init__(self, config):
        super().__init__(config)
        lam = config.bhyt_lambda[2]
        self.norm = BoundedTanh(config, lam) if lam > 0 else make_norm(config)


class BHyTExact(PreNorm):
    settings = ("bhyt_p", "bhyt_lambda", "bhyt_learned", "bhyt_unit")
    ends = BHyTEnds

    def __init__(self, config, layer):
        super().__init__(config, layer)
        refuse(config, "bhyt_exact", norm="rms")
        self.norm = BoundedTanh(config, config.bhyt_lambda[(layer - 1) % 2])


class PreNormApprox(PreNorm):
    settings = ("bhyt_context",)
    gain_aware = False

    def __init__(self, config, layer):
        super().__init__(config, layer)
        refuse(config, config.residual, norm="rms")
        self.first, self.T = (
            layer % 2 == 1,
            config.bhyt_context or config.block_size,
        )  # attention comes first in a block
        if self.first:
            self.register_buffer("c", torch.zeros(1))

    @torch.no_grad()
    def refresh(self, attention):
        """Eq. 4 from the weights as they are now. In place and on the device, so that nothing waits or recompiles."""
        if self.norm.gain is None:  # folded: c is what it is
            return
        w_v, w_o = (gathered(linear.weight) for linear in (attention.wv, attention.wo))
        w_v = w_v * gathered(self.norm.gain) if self.gain_aware else w_v
        self.c.copy_(attention_gain(w_v, w_o, attention.n_head, attention.n_kv_head, self.T))

    def output_variance(self):
        return self.norm.gain.detach().square().mean()  # (5)

    def read(self, stream):
        v = upcast(stream.x).square().mean(-1, keepdim=True) if stream.lane is None else stream.lane
        return self.norm(stream.x, v), stream._replace(lane=v)

    def write(self, stream, f, gate=1.0):
        if not self.first:
            return stream._replace(x=stream.x + gate * f, lane=None)
        lane = stream.lane + gate * gate * self.c * self.output_variance()  # (3)
        return stream._replace(x=stream.x + gate * f, lane=lane)


class BHyT(PreNormApprox):
    settings = (*BHyTExact.settings, *PreNormApprox.settings)
    ends = BHyTEnds

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.norm = BoundedTanh(config, config.bhyt_lambda[(layer - 1) % 2])
        self.gain_aware = config.bhyt_unit

    def output_variance(self):
        return (self.norm.lam.detach() / self.norm.kappa).square()


RESIDUALS = {"bhyt": BHyT, "bhyt_exact": BHyTExact, "prenorm_approx": PreNormApprox}


def fold(model):
    """For inference, in place and for good: gamma of every block into the columns of the linears that read it, lam
    frozen. The norm before the head stays as it is: a tied head is the embedding too."""
    norm = getattr(model.blocks[0].attn_residual, "norm", None)
    if not isinstance(norm, BoundedTanh) or norm.gain is None:
        raise ValueError(f"residual={model.config.residual!r} has nothing to fold, or is folded")
    for block in model.blocks:
        mlps = [mlp for mlp in (block.mlp, getattr(block.mlp, "shared", None)) if mlp is not None]
        readers = [getattr(mlp, name, None) for mlp in mlps for name in ("router", "up", "gate")]
        for residual, router, linears in (
            (block.attn_residual, block.attn_router, [block.attn.wq, block.attn.wk, block.attn.wv]),
            (
                block.mlp_residual,
                block.mlp_router,
                [linear for linear in readers if linear is not None],
            ),
        ):
            norm = residual.norm
            weights = [
                linear if isinstance(linear, nn.Parameter) else linear.weight for linear in linears
            ]
            weights += [router.w] if router is not None and router.learned else []
            if any(hasattr(linear, "plain") and linear.plain is None for linear in linears):
                raise ValueError(
                    "an adapter reads what it has learnt to, gamma included: merge it first"
                )
            with torch.no_grad():
                for w in weights:
                    w.mul_(norm.gain)
            norm.gain = None
            lam = norm.lam.detach()
            del norm.lam
            norm.register_buffer("lam", lam)
    return model.eval()
