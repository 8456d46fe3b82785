"""Every rule's arithmetic, worked out by hand, in the reference that other implementations are held against."""

import pytest
import torch

from viviane.config import SGD, Adadelta, AdaGrad, Adam, Adamax, AdamW, Ftrl, Lamb, RMSProp, RowWiseAdam
from viviane.ops.row_update import Entries, initial_state, reference, state_shape

# Numbers below have eight digits; an epsilon of 1e-7 moves the seventh.
CLOSE = {"rtol": 2e-6, "atol": 1e-7}
HALF = {"beta1": 0.5, "beta2": 0.75}


def moved(rule, gradients, *, state=None, lr=0.1, first_step=1):
    """A row of ones after one step for each gradient (its numbers, or None for a step without the row)."""
    dim = next(len(g) for g in gradients if g is not None)
    weight = torch.ones(1, dim, dtype=torch.float64)
    own = {
        name: torch.full(state_shape(name, weight, rule), start, dtype=torch.float64)
        for name, start in {**initial_state(rule), **(state or {})}.items()
    }
    for step, g in enumerate(gradients, first_step):
        entries = Entries(
            torch.zeros(0 if g is None else 1, dtype=torch.int64), torch.tensor(g or [], dtype=torch.float64)
        )
        reference.update_rows(weight, own, entries, rule, lr=lr, step=step)
    return weight[0], own


CASES = {
    "sgd": (SGD(), [[0.5]], {}, [0.95]),
    "weight decay": (SGD(weight_decay=0.2), [[0.5]], {}, [0.93]),
    "clip by row": (SGD(clip_row_norm=1.0), [[3.0, 4.0]], {}, [0.94, 0.92]),
    "clip leaves short rows": (SGD(clip_row_norm=6.0), [[3.0, 4.0]], {}, [0.7, 0.6]),
    "momentum": (SGD(momentum=0.9), [[0.5], [0.5]], {}, [0.855]),
    "momentum rests": (SGD(momentum=0.9), [[0.5], None], {}, [0.95]),
    "momentum, global": (SGD(momentum=0.9, update="global"), [[0.5], None], {}, [0.905]),
    "nesterov": (SGD(momentum=0.9, nesterov=True), [[0.5], [0.5]], {}, [0.7695]),
    "adagrad": (AdaGrad(initial_accumulator=0.75), [[0.5]], {}, [0.95]),
    "adagrad, epsilon inside": (AdaGrad(epsilon=0.75, epsilon_inside_root=True), [[0.5]], {}, [0.95]),
    "adagrad, epsilon outside": (AdaGrad(epsilon=0.5), [[0.5]], {}, [0.95]),
    "row-wise adagrad": (AdaGrad(row_wise=True), [[3.0, 1.0]], {}, [0.86583593, 0.95527864]),
    "rmsprop": (RMSProp(), [[0.5]], {}, [0.68377243]),
    "adam": (Adam(), [[0.5]], {}, [0.9]),
    # u: 0.5, then max(0.9 * 0.5, 0.1); m: 0.25, then 0.175; w -= 0.1 m / (1 - 0.5^t) / u
    "adamax": (Adamax(beta1=0.5, beta2=0.9), [[0.5], [0.1]], {}, [0.84814815]),
    # then m = 0.125, u = 0.45: w -= 0.1 * 0.125 / (1 - 0.25) / 0.45
    "adamax, global": (Adamax(beta1=0.5, beta2=0.9, update="global"), [[0.5], None], {}, [0.86296296]),
    # s: 0.125, its half while the row rests, then 0.15625
    "rmsprop, global": (RMSProp(decay=0.5, update="global"), [[0.5], None, [0.5]], {}, [0.73208754]),
    # s = 0.25 / 20 = epsilon: d = sqrt(1 / 2) g
    "adadelta": (Adadelta(epsilon=0.0125), [[0.5]], {}, [0.96464466]),
    # w = 1 - 0.1 * 0.2, then Adam's first step of 0.1
    "adamw": (AdamW(weight_decay=0.2), [[0.5]], {}, [0.88]),
    "adamw, a row that rests keeps its weight": (AdamW(weight_decay=0.2), [[0.5], None], {}, [0.88]),
    "adamw, global": (AdamW(weight_decay=0.2, beta1=0.0, update="global"), [[0.5], None], {}, [0.8624]),
    # m = 0.1 g, v = 0.001 * 5, a = 0.1 sqrt(0.001) / 0.1: w -= 0.1 g / sqrt(5)
    "row-wise adam": (RowWiseAdam(), [[3.0, 1.0]], {}, [0.86583593, 0.95527864]),
    # u = g / |g| + 0.5 w = [1.5, -0.5]; r = sqrt(2) / sqrt(2.5)
    "lamb": (Lamb(epsilon=1e-9, weight_decay=0.5), [[3.0, -1.0]], {}, [0.86583593, 1.04472136]),
    "lamb, no gradient, no decay": (Lamb(), [[0.0, 0.0]], {}, [1.0, 1.0]),
    "ftrl": (Ftrl(beta=1.0), [[0.5]], {}, [0.29976988]),
    # n: 0.1 to 0.35; z = 0.5 + (sqrt(0.1) - sqrt(0.35)) / 0.1; w = -z / (sqrt(0.35) / 0.1)
    "ftrl, initial accumulator": (Ftrl(initial_accumulator=0.1), [[0.5]], {}, [0.3809621]),
    "ftrl, sparse": (Ftrl(beta=1.0, lambda1=5.0), [[0.5]], {}, [0.0]),
    "ftrl, lambda2": (Ftrl(beta=1.0, lambda2=15.0), [[0.5]], {}, [0.14988494]),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rule(case) -> None:
    rule, gradients, state, expected = case
    torch.testing.assert_close(moved(rule, gradients, state=state)[0], torch.tensor(expected).double(), **CLOSE)


def test_global_adam_moves_a_row_that_the_batch_lacks() -> None:
    # m = 0.1, v = 0.03, a = 0.1 * 0.5 / 0.5
    weight = torch.ones(2, 1, dtype=torch.float64)
    state = {name: torch.full((2, 1), start, dtype=torch.float64) for name, start in (("m", 0.2), ("v", 0.04))}
    entries = Entries(torch.tensor([1]), torch.zeros(1, dtype=torch.float64))
    reference.update_rows(weight, state, entries, Adam(**HALF, update="global"), lr=0.1, step=1)
    torch.testing.assert_close(weight, torch.full((2, 1), 0.94226497).double(), **CLOSE)
    torch.testing.assert_close(state["v"], torch.full((2, 1), 0.03).double(), **CLOSE)


def test_lazy_global_adam_makes_up_for_the_steps_it_rested() -> None:
    # Touched at steps 1 and 4, so it rested 2: a = 0.1 sqrt(1 - 0.75^4) / (1 - 0.5^4) = 0.08819171, first
    # w -= a 0.5 (1 - 0.25) / 0.5 * 0.2 / 0.2, m = 0.05, v = 0.0225; then the step: m = 0.275, v = 0.079375.
    rule = Adam(**HALF, update="lazy_global")
    state = {"m": 0.2, "v": 0.04, "last_step": 1.0}
    weight, own = moved(rule, [[0.5]], state=state, first_step=4)
    torch.testing.assert_close(weight, torch.tensor([0.84777300]).double(), **CLOSE)
    torch.testing.assert_close(own["m"], torch.tensor([[0.275]]).double(), **CLOSE)
    assert own["last_step"].tolist() == [4.0]


def test_lazy_global_is_local_for_a_row_of_every_step() -> None:
    gradients = [[0.5], [-0.25], [0.125]]
    lazy, local = (moved(Adam(update=update), gradients)[0] for update in ("lazy_global", "local"))
    assert torch.equal(lazy, local)


def test_a_row_of_16_bits_keeps_small_steps_on_average() -> None:
    # A step of 2^-12 is a 32nd of bfloat16's spacing at 1: to nearest, no row would ever move.
    weight = torch.ones(20_000, 1, dtype=torch.bfloat16)
    entries = Entries(torch.arange(20_000), torch.full((20_000,), 2.0**-12))
    for step in range(1, 5):
        reference.update_rows(weight, {}, entries, SGD(), lr=1.0, step=step, seed=3)
    # Below 1 the spacing is 2^-8: four steps of one chance in 16 each; the mean of 20,000 has 7e-6 to spare.
    assert float(1 - weight.double().mean()) == pytest.approx(4 * 2.0**-12, abs=5e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_keeps_what_16_bits_can_hold(dtype) -> None:
    values = torch.tensor([0.0, 1.0, -2.5, 2.0**-24 if dtype == torch.float16 else 2.0**-130, 240.0, float("nan")])
    weight = values.to(dtype).unsqueeze(1)
    entries = Entries(torch.arange(6), torch.zeros(6))
    reference.update_rows(weight, {}, entries, SGD(), lr=1.0, step=1, seed=9)
    assert torch.equal(weight.squeeze(1)[:5], values.to(dtype)[:5])
    assert weight[5].isnan()
