"""
BHyT: a bounded tanh in place of pre-norm's norm (Byun et al., ICML 2026, arXiv 2601.09719).

x is the stream, v the mean of x^2 over the d = n_embd features, T the context length of training.

    norm       kappa = 1 / sqrt(1 - p):  P(|x| <= kappa sqrt(v)) >= p, by Chebyshev             (1)
               y = gamma * tanh((lam / kappa) x / sqrt(v + eps)),  one scalar lam per norm      (2)
    attention  reads (2) with the measured v, and gives x' = x + attention
    MLP        reads (2) with the predicted v' = v + c (lam_attention / kappa)^2                (3)
               c = |W_V W_O|_F^2 / (T d), with W_V repeated for each query head                 (4)

    bhyt            (2) to (4); c is recomputed every INTERVAL steps
    bhyt_exact      (2) with a measured v before the MLP as well
    prenorm_approx  RMSNorm in place of (2), and v' = v + c mean(gamma^2) in place of (3)       (5)

Differs from the paper and its release:
- c is recomputed every INTERVAL steps; the release does so every clamp(max_steps // 50, 1, 1000).
  The release computes its first c before the final initialisation, so that one is wrong.
- tanh and 1 / sqrt(v + eps) are float32 here; the release casts both to bfloat16.
- Not here: the release's learned corrections, gamma^2 in (3), a measured variance in the first
  blocks, and a kappa that depends on depth, all optional there.
- The output projections start scaled; the release starts all linears plain (init_out).
- The norm before the head is an RMSNorm unless bhyt_lambda has a third value above 0. The release's
  script for full fine-tuning gives lambdas (2, 1, 3), so it may have a bounded tanh there.
- The release fine-tunes for 15 epochs of LIMA and picks a checkpoint by the loss on other tasks;
  config/sft_lima.py trains for about 3 epochs and keeps the last.
- A lam that is not learned is frozen; the release still trains it. As there, (3) detaches lam.
- bhyt_unit is ours. gamma starts at kappa / lam, so that the first outputs have a variance near 1,
  like those of RMSNorm. W_V then reads gamma * tanh: c = |diag(gamma) W_V W_O|_F^2 / (T d).    (6)
- A branch scale g multiplies the output of attention by g, and the increment in (3) by g^2.
- (4) counts neither value embeddings (value_embeds) nor biases, so v' is too small with them.
- In training, val_loss is measured with the c of the last refresh. A checkpoint that is loaded for
  eval.py gets a fresh c.
"""

import torch
from torch import nn

from machine import gathered
from norms import FinalNorm, PreNorm, fusing, make_norm, refuse, upcast

P = 0.99  # at least this share of a token's features has |tanh's argument| <= lam, by Eq. 1
KAPPA = (1 - P) ** -0.5  # Eq. 1
INTERVAL = 100  # optimizer steps between refreshes of c
UP = (1.50631041e-08, 2.17741688e-05, 0.00356421217, 0.134382384, 0.99999997)
DOWN = (8.4541874e-07, 0.0003399271, 0.0261362291, 0.467715592, 1)


class Tanh(torch.autograd.Function):
    """tanh(z). Compiled code uses the fit z UP(z^2) / DOWN(z^2), and clamps z to the fitted range.

    In float32 the fit is off by less than 4e-7 and takes half the time of torch.tanh on a CPU.
    """

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


def attention_gain(w_v, w_o, n_head, n_kv_head, block_size):
    """Eq. 4, a scalar, for nn.Linear weights w_v (G D, d) and w_o (d, H D).

    Query heads of one group read the same values, so their columns of W_O add up. The norm is then
    |W_V W_O|_F^2 = sum(W_V W_V^T * W_O^T W_O): two (G D, G D) products and no (d, d) product.
    """
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
        self.start = lam
        self.eps = config.norm_eps
        self.start_of_gain = KAPPA / lam if config.bhyt_unit else 1.0

    def reset_parameters(self):
        nn.init.constant_(self.lam, self.start)
        nn.init.constant_(self.gain, self.start_of_gain)

    def forward(self, x, v=None):
        x_float = upcast(x)
        v = x_float.square().mean(-1, keepdim=True) if v is None else v
        y = Tanh.apply((self.lam / KAPPA) * torch.rsqrt(v + self.eps) * x_float)
        return (self.gain * y).to(x.dtype)


class BHyTEnds(FinalNorm):
    def __init__(self, config):
        super().__init__(config)
        lam = config.bhyt_lambda[2]
        self.norm = BoundedTanh(config, lam) if lam > 0 else make_norm(config)


class BHyTExact(PreNorm):
    settings = ("bhyt_lambda", "bhyt_learned", "bhyt_unit")
    ends = BHyTEnds
    cuda_options = fusing(reads=8, operations=100)

    def __init__(self, config, layer):
        super().__init__(config, layer)
        refuse(config, norm="rms")
        self.norm = BoundedTanh(config, config.bhyt_lambda[(layer - 1) % 2])


class PreNormApprox(PreNorm):
    settings = ("bhyt_context",)
    predicts = True
    gain_aware = False

    def __init__(self, config, layer):
        super().__init__(config, layer)
        refuse(config, norm="rms")
        self.first = layer % 2 == 1  # attention: it measures v and predicts v' for the MLP
        self.T = config.bhyt_context or config.block_size
        if self.first:
            self.register_buffer("c", torch.zeros(1))

    @torch.no_grad()
    def refresh(self, attention):
        """Eq. 4 from the current weights. In place and on the device: no sync, no recompilation."""
        linears = (attention.wv, attention.wo)
        w_v, w_o = (gathered(getattr(x, "merged", x.weight)) for x in linears)  # of adapters, too
        w_v = w_v * gathered(self.norm.gain) if self.gain_aware else w_v  # Eq. 6
        self.c.copy_(attention_gain(w_v, w_o, attention.n_head, attention.n_kv_head, self.T))

    def output_variance(self):
        return self.norm.gain.detach().square().mean()  # Eq. 5

    def read(self, stream):
        known = stream.lane is not None and not self.first  # prune.py may skip either sublayer
        v = stream.lane if known else upcast(stream.x).square().mean(-1, keepdim=True)
        return self.norm(stream.x, v), stream.replace(lane=v)

    def write(self, stream, f, gate=1.0):
        if not self.first:
            return stream.replace(x=stream.x + gate * f, lane=None)
        lane = stream.lane + gate * gate * self.c * self.output_variance()  # Eq. 3 or 5
        return stream.replace(x=stream.x + gate * f, lane=lane)


class BHyT(PreNormApprox):
    settings = (*BHyTExact.settings, *PreNormApprox.settings)
    ends = BHyTEnds
    cuda_options = BHyTExact.cuda_options

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.norm = BoundedTanh(config, config.bhyt_lambda[(layer - 1) % 2])
        self.gain_aware = config.bhyt_unit

    def output_variance(self):
        return (self.norm.lam.detach() / KAPPA).square()  # Eq. 3


RESIDUALS = {"bhyt": BHyT, "bhyt_exact": BHyTExact, "prenorm_approx": PreNormApprox}
