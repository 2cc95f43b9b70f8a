"""Muon against its equations, the exact polar factor and torch's own implementation."""

import numpy as np
import pytest
import torch

import muon

EXACT = ((15 / 8, -10 / 8, 3 / 8),) * 20  # converges to 1 from any singular value below 1.5
SHAPES = [(16, 16), (8, 40), (40, 8), (12, 20)]


def matrix(shape, singular_values):
    """U S V^T with random U and V, and the two"""
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.linalg.qr(torch.randn(n, n, generator=generator).double())[0]
    n, u, v = min(shape), draw(shape[0]), draw(shape[1])
    return u[:, :n] @ torch.diag(singular_values) @ v[:, :n].T, u[:, :n], v[:, :n]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_polar_changes_the_singular_values_alone(shape):
    s = torch.logspace(-1.7, 0, min(shape), dtype=torch.float64)
    x, u, v = matrix(shape, 7 * s)
    found = u.T @ muon.polar(x[None])[0] @ v
    assert 0.73 < found.diagonal().min() and found.diagonal().max() < 1.27
    torch.testing.assert_close(found, torch.diag(found.diagonal()), rtol=0, atol=1e-9)
    torch.testing.assert_close(muon.polar(x[None], EXACT)[0], u @ v.T, rtol=0, atol=1e-6)
    noise = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    low, high = muon.polar(noise.bfloat16()), muon.polar(noise)
    assert low.dtype == torch.bfloat16 and (low - high).norm() < 0.25 * high.norm()
    assert muon.polar(0 * x[None]).abs().max() == 0


def test_each_polynomial_is_the_best_for_the_interval_that_the_one_before_leaves():
    x = np.linspace(0.01, 1, 10001)
    for a, b, c in muon.POLAR_EXPRESS:
        y = a * x + b * x**3 + c * x**5
        assert y.min() + y.max() == pytest.approx(2, abs=1e-3)  # the error is as large both ways
        x = np.linspace(y.min(), y.max(), 10001)
    assert y.min() > 0.73


def trained(kind, shape, steps=4, **how):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(shape))
    optimizer = kind([p], lr=0.1, **how)
    for step in range(steps):
        p.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_is_that_of_torch_with_both_polar_factors_exact(shape):
    theirs = dict(ns_coefficients=EXACT[0], ns_steps=20, adjust_lr_fn="match_rms_adamw")
    ours = trained(muon.Muon, shape, coefficients=EXACT)
    theirs = trained(torch.optim.Muon, shape, **theirs)  # in bfloat16
    assert (ours - theirs).norm() < 0.03 * (ours - trained(muon.Muon, shape, steps=0)).norm()


def test_stacks_are_updated_matrix_by_matrix():
    experts = trained(muon.Muon, (3, 8, 20), momentum=0.5, weight_decay=0.2)
    torch.manual_seed(0)
    start = torch.randn(3, 8, 20)
    for e in range(3):
        p = torch.nn.Parameter(start[e].clone())
        other = torch.nn.Parameter(torch.zeros(8, 20))  # shares the stack
        optimizer = muon.Muon([p, other], lr=0.1, momentum=0.5, weight_decay=0.2)
        for step in range(4):
            gradient = torch.randn(3, 8, 20, generator=torch.Generator().manual_seed(step))
            p.grad, other.grad = gradient[e], gradient[e - 1]
            optimizer.step()
        torch.testing.assert_close(p.detach(), experts[e], rtol=1e-2, atol=1e-3)
