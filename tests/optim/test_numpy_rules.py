"""Dense optimizers and the schedule against plain NumPy in float64, written from the formulas once more."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from viviane.config import SGD, Adadelta, AdaGrad, Adam, Adamax, AdamW, Ftrl, Lamb, RMSProp, Solver
from viviane.optim import LearningRateSchedule, build_dense_optimizer

LR, SMALL = 0.05, 2.0**-23


def sgd(w, g, s, t):
    return w - LR * g


def momentum(w, g, s, t):
    s["a"] = 0.9 * s.get("a", 0.0) - LR * g
    return w + s["a"]


def nesterov(w, g, s, t):
    old = s.get("a", 0.0)
    s["a"] = 0.9 * old - LR * g
    return w - 0.9 * old + 1.9 * s["a"]


def adagrad(w, g, s, t):
    s["s"] = s.get("s", 0.1) + g**2
    return w - LR * g / (np.sqrt(s["s"]) + 1e-7)


def rmsprop(w, g, s, t):
    s["s"] = 0.9 * s.get("s", 0.0) + 0.1 * g**2
    return w - LR * g / (np.sqrt(s["s"]) + 1e-7)


def adam(w, g, s, t):
    s["m"] = 0.9 * s.get("m", 0.0) + 0.1 * g
    s["v"] = 0.999 * s.get("v", 0.0) + 0.001 * g**2
    return w - LR * math.sqrt(1 - 0.999**t) / (1 - 0.9**t) * s["m"] / (np.sqrt(s["v"]) + 1e-7)


def adamax(w, g, s, t):
    s["m"] = 0.9 * s.get("m", 0.0) + 0.1 * g
    s["u"] = np.maximum(0.99 * s.get("u", 0.0), np.abs(g))
    return w - LR / (1 - 0.9**t) * s["m"] / (s["u"] + 1e-7)


def adadelta(w, g, s, t):
    s["s"] = 0.95 * s.get("s", 0.0) + 0.05 * g**2
    d = np.sqrt(s.get("r", 0.0) + 1e-7) / np.sqrt(s["s"] + 1e-7) * g
    s["r"] = 0.95 * s.get("r", 0.0) + 0.05 * d**2
    return w - LR * d


def adamw(w, g, s, t):
    return adam(w * (1 - LR * 0.2), g, s, t)


def lamb(w, g, s, t):
    s["m"] = 0.9 * s.get("m", 0.0) + 0.1 * g
    s["v"] = 0.999 * s.get("v", 0.0) + 0.001 * g**2
    u = s["m"] / (1 - 0.9**t) / (np.sqrt(s["v"] / (1 - 0.999**t)) + 1e-6) + 0.2 * w
    norms = np.linalg.norm(w), np.linalg.norm(u)
    return w - LR * (norms[0] / norms[1] if all(norms) else 1.0) * u


def ftrl(w, g, s, t):
    before = s.get("n", 0.1)
    s["n"] = before + g**2
    s["z"] = s.get("z", 0.0) + g + (np.sqrt(before + SMALL) - np.sqrt(s["n"] + SMALL)) * w / LR
    divisor = np.sqrt(s["n"] + SMALL) / LR + 0.2 + 0.5 / LR
    return np.where(np.abs(s["z"]) <= 0.3, 0.0, (np.sign(s["z"]) * 0.3 - s["z"]) / divisor)


RULES = {
    "sgd": (SGD(), sgd),
    "momentum": (SGD(momentum=0.9), momentum),
    "nesterov": (SGD(momentum=0.9, nesterov=True), nesterov),
    "adagrad": (AdaGrad(initial_accumulator=0.1), adagrad),
    "rmsprop": (RMSProp(decay=0.9), rmsprop),
    "adam": (Adam(), adam),
    "adamax": (Adamax(beta2=0.99), adamax),
    "adadelta": (Adadelta(), adadelta),
    "adamw": (AdamW(weight_decay=0.2), adamw),
    "lamb": (Lamb(weight_decay=0.2), lamb),
    "ftrl": (Ftrl(initial_accumulator=0.1, beta=0.5, lambda1=0.3, lambda2=0.2), ftrl),
}


@pytest.mark.parametrize("size", [(1,), (3, 7), (33, 100)])
@pytest.mark.parametrize("name", RULES)
def test_twenty_steps(name, size):
    settings, rule = RULES[name]
    rng = np.random.default_rng(0)
    weight = rng.normal(size=size)
    parameter = torch.nn.Parameter(torch.tensor(weight))
    optimizer = build_dense_optimizer(settings, [parameter], LR)
    state: dict = {}
    for t in range(1, 21):
        gradient = rng.normal(size=size) * rng.choice([0.0, 1e-3, 1.0], size=size)  # zeros and tiny ones among them
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        weight = rule(weight, gradient, state, t)
        # float64 on both sides; FTRL subtracts roots that are near each other, which leaves 2^-52 / LR
        np.testing.assert_allclose(parameter.detach().numpy(), weight, rtol=1e-9, atol=1e-11)


@given(st.integers(1, 9), st.integers(0, 12), st.integers(1, 9), st.sampled_from([0.5, 1.0, 2.0]), st.floats(0.0, 0.5))
def test_the_schedule_step_by_step(warmup, start, length, power, end):
    schedule = LearningRateSchedule(
        Solver(lr=0.5, warmup_steps=warmup, decay_start=start, decay_steps=length, decay_power=power, end_lr=end)
    )
    for n in range(1, 40):
        if n < warmup:
            expected = 0.5 * n / warmup
        elif not start or n < start:
            expected = 0.5
        elif n < start + length:
            expected = max(end, 0.5 * ((start + length - n) / length) ** power)
        else:
            expected = end
        assert schedule.lr(n) == pytest.approx(expected, rel=1e-12)
