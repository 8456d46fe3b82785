import math

import pytest
import torch

from viviane.core.errors import SchemaError
from viviane.nn import binary_cross_entropy, regularization_loss

T = torch.tensor


def by_hand(logits, labels, weights=None, class_weights=(1.0, 1.0), smoothing=0.0):
    weights = weights or [1.0] * len(logits)
    total = 0.0
    for z, y, w in zip(logits, labels, weights, strict=True):
        target = y * (1 - smoothing) + smoothing / 2
        # log(1 + e^z) without overflow
        softplus = max(z, 0.0) + math.log1p(math.exp(-abs(z)))
        total += w * (class_weights[1] if y else class_weights[0]) * (softplus - target * z)
    return total / sum(weights)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight": [1.0, 0.0, 2.0, 0.5]},
        {"class_weights": (0.5, 3.0)},
        {"label_smoothing": 0.1},
        {"weight": [1.0, 0.0, 2.0, 0.5], "class_weights": (0.5, 3.0), "label_smoothing": 0.2},
    ],
)
def test_binary_cross_entropy_by_hand(options):
    logits, labels = [0.3, -2.0, 5.0, 0.0], [1.0, 0.0, 0.0, 1.0]
    weight = options.get("weight")
    expected = by_hand(
        logits, labels, weight, options.get("class_weights", (1.0, 1.0)), options.get("label_smoothing", 0.0)
    )
    given = {**options, "weight": T(weight) if weight else None}
    # float32 has 24 bits; four terms near 1
    assert binary_cross_entropy(T(logits), T(labels), **given).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_logits_do_not_overflow(dtype):
    logits = T([1e4, -1e4, 1e4, -1e4], dtype=dtype, requires_grad=True)
    loss = binary_cross_entropy(logits, T([1.0, 0.0, 0.0, 1.0]))
    loss.backward()
    assert loss.item() == pytest.approx(2 * logits.detach()[0].item() / 4, rel=1e-6)  # two right, two wrong by |z|
    assert logits.grad.tolist() == [0.0, 0.0, 0.25, -0.25]


def test_the_gradient_is_prediction_minus_label_over_the_batch():
    logits = T([[0.0], [math.log(3.0)]], requires_grad=True)
    binary_cross_entropy(logits, T([[1.0], [0.0]])).backward()
    assert logits.grad.flatten().tolist() == pytest.approx([-0.25, 0.375])


def test_rows_that_all_weigh_nothing_give_no_loss():
    assert binary_cross_entropy(T([1.0]), T([1.0]), weight=T([0.0])).item() == 0.0


def test_a_logit_without_label_is_refused():
    with pytest.raises(SchemaError, match=r"one logit per label[\s\S]*3 logits, 2 labels"):
        binary_cross_entropy(torch.zeros(3), torch.zeros(2))


def test_regularizers_and_their_gradients():
    w = T([3.0, -4.0], requires_grad=True)
    loss = regularization_loss([w], "L1", 0.5, 10)
    assert loss.item() == pytest.approx(0.35)
    loss.backward()
    assert w.grad.tolist() == pytest.approx([0.05, -0.05])
    w.grad = None
    loss = regularization_loss([w], "L2", 0.5, 10)
    assert loss.item() == pytest.approx(0.625)
    loss.backward()
    assert w.grad.tolist() == pytest.approx([0.15, -0.2])
