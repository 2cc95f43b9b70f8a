"""
Muon: each matrix moves along the orthogonal matrix nearest to its momentum (Jordan et al. 2024,
kellerjordan.github.io/posts/muon).

    m <- mu m + (1 - mu) G,  U = mu m + (1 - mu) G     Nesterov momentum of the gradient G       (1)
    O ~ polar(U) = (U U^T)^(-1/2) U                    all singular values become 1              (2)
    W <- (1 - lr decay) W - lr 0.2 sqrt(max(rows, columns)) O                                    (3)

The factor in (3) gives updates the size of AdamW's, so that both can share a learning rate (Liu et
al. 2025, arXiv 2502.16982). Odd polynomials of X approximate (2), as in Polar Express (Amsel et al.
2025, arXiv 2505.16932). Each is optimal for the singular values that the one before it leaves.

    X <- P X,  where P = a I + b A + c A^2 and A = X X^T                                         (4)
    X starts as U / |(U U^T)^2|^(1/4), so that its singular values are at most 1                 (5)
    Q <- P Q,  A <- P A P,  and O = Q X at the end: cheaper for wide matrices, where A is small  (6)

The code divides by another 1.01, because of rounding. Three iterations map the singular values from
0.01 to 1 into the interval from 0.73 to 1.27. Five iterations of the original Muon map them to
between 0.68 and 1.13.

Matrices of one shape are stacked and updated together. If FSDP shards them, each rank computes (2)
for a part of the stack and receives the other parts.
"""

import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from machine import gathered, shard_like

MOMENTUM = 0.95  # mu after its warm-up
WARMUP = 300  # steps over which mu grows by 0.1, to MOMENTUM
POLAR_EXPRESS = (  # (a, b, c) of each iteration, for singular values from 0.01 to 1
    (8.093369, -23.62043, 17.446152),
    (3.636586, -2.721927, 0.536546),
    (2.661300, -1.977155, 0.452616),
)


def polar(x):
    """Eq. 2 for a stack of matrices (n, rows, columns)."""
    if x.size(-2) > x.size(-1):
        return polar(x.mT).mT
    x = x / (norm(x) + 1e-7)
    A = x @ x.mT
    AA = A @ A
    s = (1.01 * norm(AA).sqrt().sqrt()).clamp(min=1e-3)  # Eq. 5; norm(AA) rounds to 0 for tiny U
    x, A, AA = x / s, A / s**2, AA / s**4

    wide, Q = x.size(-1) > 2 * x.size(-2), None
    for i, (a, b, c) in enumerate(POLAR_EXPRESS, 1):
        P = b * A + c * AA
        P.diagonal(dim1=-2, dim2=-1).add_(a)
        if wide:
            Q = P if Q is None else P @ Q  # Eq. 6
        else:
            x = P @ x  # Eq. 4
        if i < len(POLAR_EXPRESS):
            A = P @ A @ P if wide else x @ x.mT
            AA = A @ A
    return Q @ x if wide else x


def polar_over_ranks(x, mesh):
    """polar of a stack that all ranks of a device mesh have, each for a part of it."""
    mine = distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None).to_local()
    mine = polar(mine) if len(mine) else mine
    parts = DTensor.from_local(
        mine.contiguous(), mesh, [Shard(0)], shape=x.shape, stride=x.stride()
    )
    return parts.full_tensor()


def norm(x):
    return x.norm(dim=(-2, -1), keepdim=True)


def momentum_at(step):
    """mu of a step. It starts lower, because the first gradients are soon out of date."""
    cold = max(0, 1 - step / WARMUP)
    return MOMENTUM - 0.1 * cold


class Muon(torch.optim.Optimizer):
    """For matrices (rows, columns), and stacks of them such as experts (E, rows, columns).

    dtype: the dtype of the products in Eqs. 4 to 6.
    """

    def __init__(self, params, lr, momentum=MOMENTUM, weight_decay=0.1, dtype=None):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.dtype = dtype

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for params in shapes.values():
                self.update(params, group)

    def update(self, params, group):
        """Eqs. 1 to 3 for parameters of one shape."""
        mu = group["momentum"]
        x = torch.stack([gathered(self.nesterov(p, mu)).to(self.dtype) for p in params])
        size = group["lr"] * 0.2 * max(x.shape[-2:]) ** 0.5
        if isinstance(params[0], DTensor):
            updates = polar_over_ranks(x.flatten(0, -3), params[0].device_mesh)
        else:
            updates = polar(x.flatten(0, -3))
        for p, o in zip(params, updates.view_as(x)):
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.add_(shard_like(o.to(p.dtype), p, from_rank=None), alpha=-size)  # Eq. 3

    def nesterov(self, p, mu):
        """Eq. 1."""
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        m = state["momentum_buffer"].lerp_(p.grad, 1 - mu)
        return p.grad.lerp(m, mu)
