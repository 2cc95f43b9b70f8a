"""
Mixture of experts in place of the MLP: many MLPs of which a token passes k, chosen by a router. Nothing is dropped.

    s = softmax(W_router h),   chosen: the k largest of s_e + bias_e                                                (1)
    y = shared(h) + sum over the chosen of w_e expert_e(h),   w = s over the sum of the chosen s                    (2)

With k = 1, w = s: of a weight that is always 1 the router would learn nothing.

Balance, so that no expert starves, by one of two means (moe_balance):
    bias   after every step bias_e += rate * sign(mean load - load_e); it moves choices, never outputs (2408.15664) (3)
    loss   rate * E sum_e (share of all choices that fell on e) (mean s_e) joins the loss (2101.03961)     (4)

The weights of all experts are one parameter (E, out, in) for each matrix. Tokens are sorted by expert and multiplied
group by group: in one kernel in bfloat16, in a loop in other dtypes, for which torch has no kernel.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from norms import upcast


def grouped(x, w, ends):
    """Rows ends[e-1] to ends[e] of x (M, I) times the transpose of w[e], w (E, O, I): (M, O)"""
    if x.dtype == torch.bfloat16 and x.size(1) % 8 == 0 and w.size(1) % 8 == 0:
        return F.grouped_mm(x, w.mT, offs=ends)
    return grouped_loop(x, w, ends)


def spans(ends):
    ends = ends.tolist()
    return enumerate(zip([0, *ends], ends))


@torch.library.custom_op("residual::grouped_loop", mutates_args=())
def grouped_loop(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return torch.cat([x[a:b] @ w[e].T for e, (a, b) in spans(ends)])


@torch.library.custom_op("residual::grouped_outer", mutates_args=())
def grouped_outer(y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """The gradient of w: y^T x of every group, (E, O, I)"""
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
        self.act, self.E, self.k, self.rate, self.shared = (
            act,
            E,
            config.moe_top_k,
            config.moe_rate,
            shared,
        )
        self.by_loss = config.moe_balance == "loss"
        self.router = nn.Linear(C, E, bias=False)
        self.up = nn.Parameter(torch.empty(E, hidden, C))
        self.down = nn.Parameter(torch.empty(E, C, hidden))
        self.gate = nn.Parameter(torch.empty(E, hidden, C)) if gated else None
        self.register_buffer("bias", torch.zeros(E))
        load = torch.zeros(E, dtype=torch.int64)  # tokens of each expert since the last balance
        self.register_buffer("load", load, persistent=False)
        self.penalty = None  # (4), of this forward, in training

    def forward(self, h):
        x = h.flatten(0, -2)  # (N, C)
        with torch.autocast(
            x.device.type, enabled=False
        ):  # in float32, so that choices do not depend on autocast
            s = F.linear(upcast(x), upcast(self.router.weight)).softmax(-1)  # (N, E)
        chosen = (
            (s + self.bias).topk(self.k).indices
        )  # (N, k)                                                     (1)
        pairs, order = chosen.flatten().sort(
            stable=True
        )  # (N k,): experts in order, and which pair that was
        w = s.gather(1, chosen)
        w = w / w.sum(-1, keepdim=True) if self.k > 1 else w
        load = torch.zeros_like(self.load).index_add_(0, pairs, torch.ones_like(pairs))
        ends, rows = load.cumsum(0).to(torch.int32), order // self.k
        if self.training:
            self.load += load
            if self.by_loss:
                penalty = self.rate * self.E * (load / len(pairs) * s.mean(0)).sum()  # (4)
                self.penalty = (
                    penalty if self.penalty is None else self.penalty
                )  # recomputation makes a second one
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        up, down, gate = (
            None if w is None else w.to(dtype) for w in (self.up, self.down, self.gate)
        )
        x_rows = x.to(dtype)[rows]
        inner = self.act(grouped(x_rows, up if gate is None else gate, ends))
        inner = inner if gate is None else inner * grouped(x_rows, up, ends)
        y = grouped(inner, down, ends) * w.flatten()[order, None].to(dtype)
        y = torch.zeros_like(x, dtype=dtype).index_add_(0, rows, y).view(h.shape)  # (2)
        return y if self.shared is None else y + self.shared(h)


def layers(model):
    return [module for module in model.modules() if isinstance(module, MoE)]


def reset_penalties(model):
    """Drop the balance losses of the previous forward, in training."""
    for moe in layers(model) if model.training else ():
        moe.penalty = None


@torch.no_grad()
def balance(experts, world=1):
    """Eq. 3, behind an optimizer step, the same on every rank. Returns how the tokens were spread, (layers, E)"""
    load = torch.stack([moe.load for moe in experts]).float()
    if world > 1:
        dist.all_reduce(load)
    for moe, row in zip(experts, load):
        if not moe.by_loss:
            moe.bias += moe.rate * torch.sign(row.mean() - row)
        moe.load.zero_()
    return load / load.sum(1, keepdim=True).clamp(min=1)
