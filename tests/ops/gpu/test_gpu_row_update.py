"""Row updates on a GPU against the plain truth in float64."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from viviane.config import SGD, Adadelta, AdaGrad, Adam, Adamax, AdamW, Ftrl, Lamb, RMSProp, RowWiseAdam
from viviane.core.errors import VivianeError
from viviane.ops.dispatch import use_implementation
from viviane.ops.row_update import (
    Entries,
    Scratch,
    gpu,
    initial_state,
    norm_squared,
    reference,
    rounding,
    sort_entries,
    state_shape,
)
from viviane.ops.triton_parts.arithmetic import rounded

ON_GPU = torch.cuda.is_available()
MANY = 700 if ON_GPU else 200  # the interpreter is slow; spans of 16 make several levels still
# Sums of some dozens of float32 numbers near 1, quotients and roots within 2 units in the last place, three steps.
# The rules have an epsilon of 0.01: a smaller one would multiply errors of sums that cancel.
CLOSE = {"rtol": 2e-5, "atol": 1e-5}
RULES = {
    "sgd": SGD(),
    "clip and decay": SGD(clip_row_norm=0.5, weight_decay=0.1),
    "momentum": SGD(momentum=0.9),
    "nesterov, global": SGD(momentum=0.9, nesterov=True, update="global", weight_decay=0.1),
    "adagrad": AdaGrad(epsilon=0.01, initial_accumulator=0.1, clip_row_norm=2.0),
    "adagrad, epsilon inside": AdaGrad(epsilon=0.01, epsilon_inside_root=True),
    "row-wise adagrad": AdaGrad(row_wise=True, epsilon=0.01, weight_decay=0.1),
    "rmsprop": RMSProp(epsilon=0.01),
    "adam": Adam(epsilon=0.01),
    "adam, beta 0": Adam(beta1=0.0, epsilon=0.01, epsilon_inside_root=True, update="lazy_global"),
    "adam, global": Adam(epsilon=0.01, update="global"),
    "adam, lazy": Adam(epsilon=0.01, update="lazy_global"),
    "adamax": Adamax(epsilon=0.01),
    "adadelta": Adadelta(epsilon=0.01),
    "adamax, global": Adamax(epsilon=0.01, update="global"),
    "adamw, global": AdamW(epsilon=0.01, weight_decay=0.1, update="global"),
    "row-wise adam": RowWiseAdam(epsilon=0.01, weight_decay=0.1),
    "lamb": Lamb(epsilon=0.01, weight_decay=0.1, clip_row_norm=1.0),
    "ftrl": Ftrl(lambda1=0.01, lambda2=0.1, beta=1.0),
}


@pytest.fixture(autouse=True)
def small_spans(monkeypatch):
    """Spans of 16 entries, so that few entries make several levels of partial sums."""
    monkeypatch.setattr(gpu, "span_shape", lambda dim, num_states=0: gpu.SpanShape(4, 16, 1))
    monkeypatch.setattr(gpu, "slot_shape", lambda dim: gpu.SpanShape(4, 8, 1))
    monkeypatch.setattr(gpu, "join_shape", lambda dim: (2, 1))
    monkeypatch.setattr(gpu, "_MOST_JOINED", (3, 2))


def random(seed):
    return torch.Generator().manual_seed(seed)


def make_entries(device, count, num_rows, dim, *, seed=0, hot=0.3, weighted=True, spread=True, dtype=torch.float32):
    g = random(seed)
    rows = torch.randint(-2, num_rows + 3, (count,), generator=g, dtype=torch.int32)
    rows[torch.rand(count, generator=g) < hot] = 4
    gradients = torch.randn(count * dim, generator=g).to(dtype)
    sources = (torch.randperm(count, generator=g) * dim).to(torch.int32) if spread else None
    weights = torch.rand(count, generator=g) if weighted else None
    parts = [None if part is None else part.to(device) for part in (rows, gradients, sources, weights)]
    return Entries(*parts, aligned=dim & -dim)


def double(entries):
    return Entries(entries.rows, entries.gradients.double(), entries.sources, entries.weights)


def new_state(weight, rule):
    return {
        name: torch.full(state_shape(name, weight, rule), start, device=weight.device)
        for name, start in initial_state(rule).items()
    }


@pytest.mark.parametrize("name", RULES)
def test_every_rule(device, name):
    rule, num_rows, dim = RULES[name], 12, 5
    weight = torch.randn(num_rows, dim, generator=random(1)).to(device)
    state, scratch = new_state(weight, rule), Scratch()
    truth, true_state = weight.double(), {k: s.double() for k, s in state.items()}
    # The second step leaves rows untouched, which the third makes up for where the rule does that.
    for step, count in ((1, 70), (3, 5), (7, 40)):
        entries = make_entries(device, count, num_rows, dim, seed=step)
        settings = {"lr": 0.1, "step": step, "scale": 0.5, "first_row": 2}
        gpu.update_rows(weight, state, entries, rule, scratch=scratch, **settings)
        reference.update_rows(truth, true_state, double(entries), rule, **settings)
    torch.testing.assert_close(weight.double(), truth, **CLOSE)
    for part, values in state.items():
        torch.testing.assert_close(values.double(), true_state[part], **CLOSE)


@pytest.mark.parametrize("dim", [1, 3, 7, 16, 33, 100])
@pytest.mark.parametrize(
    "rule",
    [SGD(clip_row_norm=0.5), AdaGrad(row_wise=True, epsilon=0.01), Lamb(epsilon=0.01)],
    ids=lambda rule: rule.type,
)
def test_widths(device, dim, rule, monkeypatch):
    monkeypatch.setattr(gpu, "span_shape", lambda dim, num_states=0: gpu.SpanShape(4, 8, 1))
    weight = torch.randn(6, dim, generator=random(1)).to(device)
    state = new_state(weight, rule)
    truth, true_state = weight.double(), {k: s.double() for k, s in state.items()}
    entries = make_entries(device, 30, 6, dim, weighted=False)
    gpu.update_rows(weight, state, entries, rule, lr=0.1, step=1, scratch=Scratch())
    reference.update_rows(truth, true_state, double(entries), rule, lr=0.1, step=1)
    torch.testing.assert_close(weight.double(), truth, **CLOSE)


def exact_entries(device, count, num_rows, dim, dtype=torch.float32):
    """Gradients whose sums and products float32 holds exactly, so that the order of sums does not matter."""
    g = random(3)
    rows = torch.randint(num_rows, (count,), generator=g)
    gradients = torch.randint(-8, 9, (count * dim,), generator=g).to(dtype) / 64
    return Entries(rows.to(device), gradients.to(device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("gradient_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_16_bits_are_rounded_bit_by_bit_as_written(device, dtype, gradient_dtype):
    weight = torch.randn(9, 12, generator=random(1)).to(dtype).to(device)
    truth = weight.clone()
    entries = exact_entries(device, 40, 9, 12, gradient_dtype)
    for step in (1, 2**20):
        settings = {"lr": 0.125, "step": step, "seed": 2**32 - 5}
        gpu.update_rows(weight, {}, entries, SGD(), scratch=Scratch(), **settings)
        reference.update_rows(truth, {}, Entries(entries.rows, entries.gradients.float()), SGD(), **settings)
    assert torch.equal(weight, truth)


@triton.jit
def round_kernel(values, out, start, rows: tl.constexpr, dim: tl.constexpr):
    row, column = tl.arange(0, rows), tl.arange(0, dim)
    at = row[:, None] * dim + column[None, :]
    tl.store(out + at, rounded(tl.load(values + at), out.dtype.element_ty, start, row.to(tl.int64), column))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of overflows that are meant
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_of_every_kind_of_number(device, dtype):
    values = torch.randint(-(2**31), 2**31 - 1, (64, 64), generator=random(0), dtype=torch.int32).view(torch.float32)
    near = torch.randn(64, 64, generator=random(1)) * 2.0 ** torch.randint(-30, 18, (64, 64), generator=random(2))
    values[::2] = near[::2]
    limits = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 65504.0, 65520.0, -65536.0, 3.4e38, 2.0**-14]
    values[0, :10] = torch.tensor(limits)
    out = torch.zeros(64, 64, dtype=dtype, device=device)
    round_kernel[(1,)](values.to(device), out, 12345, 64, 64)
    random_bits = rounding.noise(12345, 0, torch.arange(64), 64)
    truth = (rounding.round_float16 if dtype == torch.float16 else rounding.round_bfloat16)(values, random_bits)
    same = (out.cpu() == truth) | (out.cpu().isnan() & truth.isnan())
    assert same.all(), values[~same]
    assert torch.equal(out.cpu().signbit()[0, :2], truth.signbit()[0, :2])


def test_the_scale_may_be_on_the_device(device):
    found = []
    for scale in (0.3, torch.tensor(0.3).to(device)):
        weight = torch.ones(12, 5, device=device)
        entries = make_entries(device, 20, 12, 5)
        gpu.update_rows(weight, {}, entries, SGD(), lr=0.1, step=1, scale=scale, scratch=Scratch())
        found.append(weight)
    assert torch.equal(*found)
    assert not torch.equal(found[0], torch.ones_like(found[0]))


@pytest.mark.parametrize("name", RULES)
def test_numbers_on_the_device_give_the_bits_of_numbers(device, name):
    rule = RULES[name]
    weights = [torch.randn(12, 5, generator=random(1)).to(torch.bfloat16).to(device) for _ in range(2)]
    states = [new_state(weight, rule) for weight in weights]
    for step, lr in ((1, 0.1), (2, 0.07), (1000, 1e-3)):
        entries, seed = make_entries(device, 40 if ON_GPU else 18, 12, 5, seed=step), 2**32 - 7
        held = [torch.tensor(number, device=device, dtype=torch.float64) for number in (lr, step, seed)]
        gpu.update_rows(weights[0], states[0], entries, rule, lr=lr, step=step, seed=seed, scratch=Scratch())
        rate, age, start = held[0], held[1].to(torch.int64), held[2].to(torch.int64)
        gpu.update_rows(weights[1], states[1], entries, rule, lr=rate, step=age, seed=start, scratch=Scratch())
    assert torch.equal(*weights)
    assert all(torch.equal(states[0][part], states[1][part]) for part in states[0])


@pytest.mark.parametrize("rule", ["sgd", "adam", "row-wise adagrad"])
def test_rows_in_other_places_get_the_same_bits_in_a_given_order(device, rule):
    """Law: with `order`, sums depend on the order of the entries alone, and not on the numbers of the rows."""
    rule, num_rows, dim = RULES[rule], 12, 5
    entries = make_entries(device, MANY, num_rows, dim)
    places = torch.randperm(num_rows, generator=random(3)).to(device)
    found = []
    for place in (torch.arange(num_rows, device=device), places):
        weight = torch.zeros(num_rows, dim, device=device)
        state = {
            name: torch.full(state_shape(name, weight, rule), value, device=device)
            for name, value in initial_state(rule).items()
        }
        rows, order = sort_entries(entries.rows)
        known = (rows >= 0) & (rows < num_rows)
        rows = torch.where(known, place.to(rows.dtype)[rows.clamp(0, num_rows - 1).to(torch.int64)], rows)
        moved = replace(entries, rows=rows, order=order)
        with use_implementation("gpu"):
            gpu.update_rows(weight, state, moved, rule, lr=0.1, step=1, scratch=Scratch())
            sums = torch.zeros(num_rows, dim, device=device)
            own, summed = gpu.sum_rows(moved, dim, first_row=0, num_rows=num_rows, scratch=Scratch())
        sums[own] = summed
        found.append([one[place] for one in (weight, sums, *state.values())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("count", [1, 31, 1024, 1025, 53_248, 200_001, 1_048_570, 2_100_000])
@pytest.mark.parametrize("bits", [1, 9, 10, 25, 31, None])
def test_sorting_equals_a_stable_sort(device, count, bits):
    bound = None if bits is None else 2**bits - (bits > 1)
    low, high = (-(2**31), 2**31 - 1) if bound is None else (0, bound)
    rows = torch.randint(low, high, (count,), generator=random(count)).to(torch.int32).to(device)
    rows[:: 3 if count % 2 else 5] = high - 1
    truth = torch.sort(rows, stable=True)
    for spare in (0, 16, 1000):
        found = gpu.sort_entries(rows, Scratch(), bound, spare=spare)
        assert torch.equal(found[0], truth[0])
        assert torch.equal(found[1].to(torch.int64), truth[1])


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("count", [1, 1025, 53_248, 1_048_570, 2_100_000, 4_500_000])
@pytest.mark.parametrize("bound", [3, 500, 2**20, 2**26 + 7])
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_rows_that_nobody_updates_are_left_out_of_a_sort(device, count, bound, share):
    rng = random(count)
    rows = torch.randint(0, bound - 2, (count,), generator=rng)
    null = torch.rand(count, generator=rng) < share
    rows = torch.where(null, bound - 2 + torch.randint(0, 2, (count,), generator=rng), rows).to(torch.int32).to(device)
    truth = torch.sort(rows, stable=True)
    some = int((rows < bound - 2).sum())
    for beside, spare in ((False, 0), (True, 0), (True, 16), (False, 1000)):
        found = gpu.sort_entries(rows, Scratch(), bound, skipped=2, beside=beside, spare=spare)
        assert torch.equal(found[0][:some], truth[0][:some])
        assert torch.equal(found[1][:some].to(torch.int64), truth[1][:some])
        assert bool((found[0][some:] == bound - 2).all())
        assert bool(((found[1][some:] >= 0) & (found[1][some:] < count)).all())


@pytest.mark.parametrize("dim", [1, 128] if ON_GPU else [1])
def test_one_row_a_hundred_thousand_times(device, dim, monkeypatch):
    monkeypatch.undo()
    if not ON_GPU:
        monkeypatch.setattr(gpu, "span_shape", lambda dim, num_states=0: gpu.SpanShape(64, 512, 1))
        monkeypatch.setattr(gpu, "slot_shape", lambda dim: gpu.SpanShape(4, 8, 1))
    rows = torch.full((100_007 if ON_GPU else 4_007,), 3, dtype=torch.int32)  # the interpreter is slow
    rows[5], rows[-7], rows[-1] = 2, 4, 0
    entries = Entries(rows.to(device), torch.randn(len(rows) * dim, generator=random(0)).to(device))
    weights = [torch.zeros(5, dim, device=device) for _ in range(2)]
    for weight in weights:
        gpu.update_rows(weight, {}, entries, SGD(), lr=1.0, step=1, scratch=Scratch())
    assert torch.equal(*weights)
    truth = torch.zeros(5, dim, dtype=torch.float64, device=device)
    reference.update_rows(truth, {}, double(entries), SGD(), lr=1.0, step=1)
    # Sums of up to 100,000 numbers near 1, each addition rounded by 2^-24 of a sum below 1000.
    torch.testing.assert_close(weights[0].double(), truth, rtol=1e-4, atol=1e-2)


def test_sums_by_row(device):
    entries = make_entries(device, 90, 10, 5)
    rows, sums = gpu.sum_rows(entries, 5, first_row=1, num_rows=10, scratch=Scratch())
    true_rows, truth = reference.sum_rows(double(entries), 5, first_row=1, num_rows=10)
    assert torch.equal(rows, true_rows)
    torch.testing.assert_close(sums.double(), truth, **CLOSE)
    outside = gpu.sum_rows(entries, 5, first_row=1000, num_rows=10, scratch=Scratch())
    assert [part.shape for part in outside] == [(0,), (0, 5)]


@pytest.mark.parametrize(
    ("count", "first_row", "num_rows"), [(90, 1, 10), (MANY, 0, 1000), (MANY, 1000, 10), (0, 0, 5)]
)
def test_sums_by_row_without_a_wait_have_zeros_behind(device, count, first_row, num_rows):
    entries = make_entries(device, count, 12, 5)
    found = gpu.all_sums(entries, 5, first_row=first_row, num_rows=num_rows, scratch=Scratch())
    rows, sums = gpu.sum_rows(entries, 5, first_row=first_row, num_rows=num_rows, scratch=Scratch())
    assert found.shape == (min(count, num_rows), 5)
    assert torch.equal(found[: len(rows)], sums)
    assert not found[len(rows) :].any()
    with use_implementation("auto" if device.type == "cuda" else "gpu"):
        norm = norm_squared(entries, 5, first_row=first_row, num_rows=num_rows)
    torch.testing.assert_close(norm, sums.double().square().sum(), rtol=1e-12, atol=0)  # sums of 5,000 float64 numbers


def test_no_entries(device):
    none = Entries(torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, device=device))
    weight = torch.ones(3, 2, device=device)
    gpu.update_rows(weight, {}, none, SGD(), lr=0.1, step=1, scratch=Scratch())
    assert (weight == 1).all()
    rule = SGD(momentum=0.5, update="global")
    state = {"momentum": torch.ones(3, 2, device=device)}
    gpu.update_rows(weight, state, none, rule, lr=0.1, step=1, scratch=Scratch())
    assert (weight == 1.5).all()
    rows, sums = gpu.sum_rows(none, 2, num_rows=3, scratch=Scratch())
    assert (rows.shape, sums.shape) == ((0,), (0, 2))


def test_not_a_number_stays_in_its_row(device):
    entries = make_entries(device, 60, 12, 5, weighted=False, spread=False)
    place = int((entries.rows == 4).nonzero()[3])
    entries.gradients[place * 5 + 2] = float("nan")
    weight = torch.zeros(12, 5, device=device)
    gpu.update_rows(weight, {}, entries, SGD(), lr=0.1, step=1, scratch=Scratch())
    assert weight.isnan().nonzero().tolist() == [[4, 2]]


def test_rows_sorted_ahead_are_taken_until_they_change(device):
    scratch, rows = Scratch(), torch.tensor([5, 1, 5, 0], dtype=torch.int32, device=device)
    first = gpu.sort_entries(rows, scratch)
    assert gpu.sort_entries(rows.view(2, 2).view(-1), scratch)[0] is first[0]
    assert gpu.sort_entries(rows.clone(), scratch)[0] is not first[0]
    rows[0] = 0
    found, order = gpu.sort_entries(rows, scratch)
    assert (found.tolist(), order.tolist()) == ([0, 0, 1, 5], [0, 3, 1, 2])


def test_malformed_entries_are_named(device):
    weight, rows = torch.ones(3, 2, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    for entries, message in (
        (Entries(rows.float(), torch.zeros(4, device=device)), "rows must be"),
        (Entries(rows, torch.zeros(4, dtype=torch.float64, device=device)), "gradients must be"),
        (Entries(rows.to("meta"), torch.zeros(4, device=device)), "one device"),
    ):
        with pytest.raises(VivianeError, match=message):
            gpu.update_rows(weight, {}, entries, SGD(), lr=0.1, step=1, scratch=Scratch())


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("name", ["sgd", "row-wise adagrad", "adam, global", "adam, lazy"])
def test_a_captured_update_replays_to_the_same_bits(device, name, monkeypatch):
    monkeypatch.undo()
    rule = RULES[name]
    entries = make_entries(device, 50_000, 3000, 64)
    tables = [torch.ones(3000, 64, device=device) for _ in range(2)]
    states = [new_state(table, rule) for table in tables]

    def update(i):
        gpu.update_rows(tables[i], states[i], entries, rule, lr=0.1, step=1, scratch=Scratch())

    update(0)
    update(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update(1)
    graph.replay()
    graph.replay()
    assert torch.equal(*tables)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 64, 128, 100])
@pytest.mark.parametrize("name", ["sgd", "adagrad", "row-wise adagrad", "adam, lazy", "ftrl"])
def test_large_inputs_with_the_shapes_in_use(device, name, dim, dtype, monkeypatch):
    monkeypatch.undo()
    rule, num_rows = RULES[name], 20_000
    weight = torch.randn(num_rows, dim, generator=random(1)).to(dtype).to(device)
    state = new_state(weight, rule)
    truth, true_state = weight.double(), {k: s.double() for k, s in state.items()}
    entries = make_entries(device, 200_000, num_rows, dim, hot=0.2)
    gpu.update_rows(weight, state, entries, rule, lr=0.1, step=1, scratch=Scratch())
    reference.update_rows(truth, true_state, double(entries), rule, lr=0.1, step=1)
    # 40,000 entries of one row; bfloat16 is rounded up or down by 2^-7 of a number at most.
    close = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(weight.double(), truth, **close)
    for part, values in state.items():
        torch.testing.assert_close(values.double(), true_state[part], rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_table_of_more_than_two_to_the_31_numbers(device):
    weight = torch.zeros(2**24 + 2**20, 128, dtype=torch.float16, device=device)
    rows = torch.full((2,), len(weight) - 1, dtype=torch.int32, device=device)
    gpu.update_rows(weight, {}, Entries(rows, torch.ones(256, device=device)), SGD(), lr=1.0, step=1, scratch=Scratch())
    assert (weight[-1] == -2).all()
    assert (weight[0] == 0).all()


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("dim", [5, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_in_slots_are_rounded_by_their_names(device, dtype, dim, held):
    """A table whose rows lie in another order gets the bits that its rows get in place."""
    count, first = 30, 1000
    weight = torch.randn(count, dim, generator=random(1)).to(dtype)
    order = torch.randperm(count, generator=random(2))
    entries = make_entries(torch.device("cpu"), 20, 1, dim, weighted=False, seed=3)
    rows = torch.randperm(count, generator=random(4))[:20].to(torch.int32)
    slot_of = torch.empty(count, dtype=torch.int32)
    slot_of[order] = torch.arange(count, dtype=torch.int32)
    found = []
    for slots, names in ((None, None), (slot_of, order + first)):
        table = (weight if slots is None else weight[order]).clone().to(device)
        own = rows if slots is None else slots[rows.long()]
        given = replace(entries, rows=own.to(device), gradients=entries.gradients.to(device))
        given = replace(given, sources=entries.sources.to(device))
        lr, step = (torch.tensor(0.1, dtype=torch.float64, device=device), torch.tensor(3, device=device))
        gpu.update_rows(
            table, {}, given, SGD(), scratch=Scratch(), seed=11, lr=lr if held else 0.1, step=step if held else 3,
            names=None if names is None else names.to(device), first_name=first,
        )  # fmt: skip
        found.append(table.cpu() if slots is None else table.cpu()[slots.long()])
    assert torch.equal(*found)
    moved = (found[0] != weight).any(1)
    assert set(rows.tolist()) >= set(moved.nonzero().view(-1).tolist())
    assert moved.sum() >= 19
