"""
Mixture of experts in place of the MLP. Each expert is an MLP, and a router sends each token to k.

    s = softmax(W_router h);  chosen: the k experts with the largest s_e + bias_e               (1)
    y = shared(h) + sum over the chosen e of w_e expert_e(h),  w = s / sum of the chosen s      (2)
        with k = 1, w = s: a weight that is always 1 would give the router no gradient; modes that
        normalise y alone remove this weight, so they refuse k = 1 without shared(h)

The setting moe_balance chooses how the load of the experts is balanced:
    bias   after every step, bias_e += RATE * sign(mean load - load_e)    arXiv 2408.15664      (3)
    loss   the loss gains RATE * E sum_e (share of choices on e) (mean s_e)    arXiv 2101.03961 (4)

One parameter (E, out, in) holds a matrix of all experts. Tokens are sorted by expert and multiplied
group by group: one kernel in bfloat16 if 8 divides the widths, else a loop, because torch has no
kernel there. With `bias`, a shared expert has biases, the others have none.

Differs from the papers: no expert has a capacity limit, so no token is dropped. (3) acts on softmax
scores, where the paper has sigmoids. (4) counts all k choices of a token.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from norms import upcast

RATE = 1e-3  # step of the bias, or weight of the loss
# of an op that waits for the device, so that no CUDA graph may hold it
SYNCS = dict(mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))


def grouped(x, w, ends):
    """Multiply rows ends[e-1] to ends[e] of x (M, I) by w[e].T, for w (E, O, I): (M, O)."""
    if x.dtype == torch.bfloat16 and x.size(1) % 8 == 0 and w.size(1) % 8 == 0:
        return F.grouped_mm(x, w.mT, offs=ends)
    return grouped_loop(x, w, ends)


def spans(ends):
    """(expert, (first row, end)) for every group. Syncs with the device."""
    ends = ends.tolist()
    return enumerate(zip([0, *ends], ends))


@torch.library.custom_op("residual::grouped_loop", **SYNCS)
def grouped_loop(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return torch.cat([x[a:b] @ w[e].T for e, (a, b) in spans(ends)])


@torch.library.custom_op("residual::grouped_outer", **SYNCS)
def grouped_outer(y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """The gradient of w: y^T x of every group, (E, O, I)."""
    return torch.stack([y[a:b].T @ x[a:b] for _, (a, b) in spans(ends)])


grouped_loop.register_fake(lambda x, w, ends: x.new_empty(x.size(0), w.size(1)))
grouped_outer.register_fake(lambda y, x, ends: x.new_empty(ends.size(0), y.size(1), x.size(1)))


def grouped_backward(ctx, grad):
    x, w, ends = ctx.saved_tensors
    grad = grad.contiguous()
    return grouped_loop(grad, w.mT, ends), grouped_outer(grad, x, ends), None


grouped_loop.register_autograd(
    grouped_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


class MoE(nn.Module):
    def __init__(self, config, act, gated, hidden, shared):
        super().__init__()
        E, C = config.moe_experts, config.n_embd
        self.act, self.shared = act, shared
        self.E, self.k = E, config.moe_top_k
        self.by_loss = config.moe_balance == "loss"
        self.router = nn.Linear(C, E, bias=False)
        self.up = nn.Parameter(torch.empty(E, hidden, C))
        self.down = nn.Parameter(torch.empty(E, C, hidden))
        self.gate = nn.Parameter(torch.empty(E, hidden, C)) if gated else None
        self.register_buffer("bias", torch.zeros(E))
        load = torch.zeros(E, dtype=torch.int32)  # choices of each expert since the last balance
        self.register_buffer("load", load, persistent=False)
        self.penalty = None  # Eq. 4 of this forward, in training

    def forward(self, h, docs=None):
        """h (..., C) -> (..., C). Tokens whose docs (...) are 0 are padding, and not counted."""
        x = h.flatten(0, -2)  # (N, C)
        s, chosen = self.route(x)
        experts, order = chosen.flatten().sort(stable=True)  # (N k,): choices grouped by expert
        w = s.gather(1, chosen)  # (N, k)
        w = w / w.sum(-1, keepdim=True) if self.k > 1 else w
        ones = torch.ones_like(experts, dtype=torch.int32)  # a GPU adds int32, but sorts int64
        load = torch.zeros_like(self.load).index_add_(0, experts, ones)
        if self.training:
            counted, mean = load, s.mean(0)
            if docs is not None:
                real = docs.flatten() > 0
                ones = real[order // self.k].to(torch.int32)
                counted = torch.zeros_like(load).index_add_(0, experts, ones)
                mean = (s * real[:, None]).sum(0) / real.sum().clamp(min=1)
            self.load += counted
            if self.by_loss:
                share = counted / counted.sum().clamp(min=1)
                penalty = RATE * self.E * (share * mean).sum()  # Eq. 4
                # recomputation runs this again, but must keep the first penalty. Compiled, the
                # second run would need another graph: train.py refuses that
                self.penalty = penalty if self.penalty is None else self.penalty
        y = self.run_experts(x, order, w, load).view(h.shape)
        return y if self.shared is None else y + self.shared(h)

    def route(self, x):
        """Eq. 1: scores (N, E) and chosen experts (N, k). Autocast is off: choices need float32."""
        with torch.autocast(x.device.type, enabled=False):
            s = F.linear(upcast(x), upcast(self.router.weight)).softmax(-1)
        return s, (s + self.bias).topk(self.k).indices

    def run_experts(self, x, order, w, load):
        """Eq. 2 without shared(h), (N, C). order (N k,) groups the choices by expert. w (N, k)."""
        ends = load.cumsum(0).to(torch.int32)
        rows = order // self.k  # (N k,): tokens
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        weights = (self.up, self.down, self.gate)
        up, down, gate = (None if weight is None else weight.to(dtype) for weight in weights)
        x_rows = x.to(dtype)[rows]
        units = grouped(x_rows, up, ends)
        if gate is None:
            inner = self.act(units)
        else:
            inner = self.act(grouped(x_rows, gate, ends)) * units
        y = grouped(inner, down, ends) * w.flatten()[order, None].to(dtype)
        return torch.zeros_like(x, dtype=dtype).index_add_(0, rows, y)


def layers(model):
    return [module for module in model.modules() if isinstance(module, MoE)]


def penalty(model):
    """The sum of the balance losses of the last forward."""
    return sum(layer.penalty for layer in layers(model) if layer.penalty is not None)


def reset_penalties(model):
    """Drop the balance losses of the previous training forward."""
    for layer in layers(model) if model.training else ():
        layer.penalty = None


@torch.no_grad()
def balance(experts, world=1, move=True):
    """Eq. 3 if move, after an optimizer step, on every rank. Returns each expert's share of the
    tokens, (layers, E)."""
    load = torch.stack([layer.load for layer in experts]).float()
    if world > 1:
        dist.all_reduce(load)
    for layer, row in zip(experts, load):
        if move and not layer.by_loss:
            layer.bias += RATE * torch.sign(row.mean() - row)
        layer.load.zero_()
    return load / load.sum(1, keepdim=True).clamp(min=1)
