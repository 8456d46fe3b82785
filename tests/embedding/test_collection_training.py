"""Forward, backward and update of every combiner, optimizer and input form against dense float64 autograd."""

import pytest
import torch
from dense_truth import DenseTruth
from hypothesis import given, settings
from hypothesis import strategies as st

from viviane.batch import Bag, Batch, Layout
from viviane.config import SGD, AdaGrad, Adam, Ftrl, RMSProp
from viviane.embedding import EmbeddingCollection, FeatureConfig, TableConfig
from viviane.embedding.table_storage import join_entries

# float32 against float64 over three steps of numbers near 1.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}
# A generous epsilon: with a tiny one Adam turns the rounding of a gradient near zero into a whole step.
RULES = [
    SGD(),
    SGD(weight_decay=0.1),
    AdaGrad(epsilon=1e-2, initial_accumulator=0.1),
    AdaGrad(epsilon=1e-2, weight_decay=0.1),
    Adam(epsilon=1e-2),
    Adam(epsilon=1e-2, weight_decay=0.1),
    Adam(epsilon=1e-2, update="lazy_global"),
    Adam(epsilon=1e-2, update="global", epsilon_inside_root=True),
    AdaGrad(epsilon=1e-2, row_wise=True, clip_row_norm=0.5),
    RMSProp(epsilon=1e-2),
    SGD(momentum=0.9),
    SGD(momentum=0.9, nesterov=True, update="global"),
    Ftrl(beta=1.0, lambda1=0.01, lambda2=0.1),
]


def rule_name(rule):
    return "-".join(f"{name}={value}" for name, value in rule.to_dict().items() if value not in (None, 0.0, False))


WIDE = {"type": "uniform", "low": -1.0, "high": 1.0}


def table(name, num_rows, dim, **options):
    return TableConfig(name=name, num_rows=num_rows, dim=dim, init=WIDE, **options)


def random_bags(generator, num_rows, size, longest, dtype, weighted):
    lengths = torch.randint(0, longest + 1, (size,), generator=generator)
    total = int(lengths.sum())
    values = torch.randint(num_rows, (total,), generator=generator).to(dtype)
    weights = torch.rand(total, generator=generator) + 0.5 if weighted else None
    return Bag(values, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]), weights)


def compare(collection, batches, forms=None, lr=0.1, close=CLOSE):
    """Train both three steps on random targets; `forms` are the batches as the collection gets them."""
    truth = DenseTruth(collection)
    generator = torch.Generator().manual_seed(7)
    for i, (bags, form) in enumerate(zip(batches, forms or batches, strict=True)):
        out, exact = collection(form), truth.forward(bags)
        torch.testing.assert_close(out.flat.double(), exact, **close)
        target = torch.randn(exact.shape, generator=generator, dtype=torch.float64)
        (out.flat * target.float() + out.flat**2).sum().backward()
        (exact * target + exact**2).sum().backward()
        if i % 2:  # who asked for the norm steps with gradients summed by row, others straight from the batch
            norm = sum(leaf.grad.square().sum() for leaf in truth.leaves.values() if leaf.grad is not None)
            torch.testing.assert_close(collection.grad_norm_squared().double(), norm, **close)
        collection.step(lr)
        truth.step(lr)
    for name in collection.tables:
        found = collection.export_table(name)
        torch.testing.assert_close(found.weight.double(), truth.weight[name], **close)
        assert found.state.keys() == truth.state[name].keys()
        for part, state in found.state.items():
            torch.testing.assert_close(state.double(), truth.state[name][part], **close)
        assert found.step == truth.steps[name]


@pytest.mark.parametrize("rule", RULES, ids=rule_name)
@pytest.mark.parametrize("combiner", ["sum", "mean", "concat"])
@pytest.mark.parametrize("weighted", [False, True])
def test_bags(rule, combiner, weighted):
    features = [
        FeatureConfig(name="a", table="x", combiner=combiner, max_length=4 if combiner == "concat" else None),
        FeatureConfig(name="b", table="y", combiner="sum"),
        FeatureConfig(name="c", table="x", combiner="mean"),
    ]
    collection = EmbeddingCollection([table("x", 11, 5, padding_id=0), table("y", 6, 5)], features, rule)
    generator = torch.Generator().manual_seed(1)
    batches = [
        {
            "a": random_bags(generator, 11, size, 4, torch.int64, weighted),
            "b": random_bags(generator, 6, size, 3, torch.int32, weighted),
            "c": random_bags(generator, 11, size, 9, torch.int64, False),
        }
        for size in (7, 1, 5)
    ]
    compare(collection, batches)


@pytest.mark.parametrize("rule", RULES, ids=rule_name)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dims", [(3, 3), (3, 8)])
def test_one_hot_of_mixed_widths_order_and_rules(rule, dtype, dims):
    tables = [
        table("x", 9, dims[0], padding_id=0),
        table("y", 4, dims[1], optimizer=Adam(epsilon=1e-2)),
        table("z", 5, dims[0], optimizer=SGD()),
    ]
    features = [
        FeatureConfig(name="f1", table="z"),
        FeatureConfig(name="f2", table="y", combiner="mean"),
        FeatureConfig(name="f3", table="x"),
        FeatureConfig(name="f4", table="x", combiner="concat"),
        FeatureConfig(name="bag", table="y"),
    ]
    collection = EmbeddingCollection(tables, features, rule)
    layout = Layout((), (), ("unused", "f3", "f4", "f1", "f2"), ("bag",))
    generator = torch.Generator().manual_seed(2)
    forms, batches = [], []
    for size in (6, 1, 4):
        sizes = torch.tensor([99, 9, 9, 5, 4])
        ids = (torch.rand(size, 5, generator=generator) * sizes).to(dtype)
        bag = random_bags(generator, 4, size, 3, dtype, weighted=False)
        empty = torch.zeros(size, 0)
        batch = Batch(layout, empty, empty, ids, {"bag": bag})
        forms.append(batch)
        batches.append({name: batch.bag(name) for name in collection.features})
    compare(collection, batches, forms)


def test_tensors_are_ids_and_matrices_of_ids():
    collection = EmbeddingCollection(
        [table("x", 9, 4)],
        [FeatureConfig(name="one", table="x"), FeatureConfig(name="two", table="x")],
        AdaGrad(epsilon=0.01),
    )
    ids, matrix = torch.tensor([8, 0, 8]), torch.tensor([[1, 8], [2, 2], [0, 3]])
    bags = {"one": Bag(ids, torch.arange(4)), "two": Bag(matrix.view(-1), torch.tensor([0, 2, 4, 6]))}
    compare(collection, [bags] * 3, [{"one": ids, "two": matrix}] * 3)


@given(
    st.lists(st.lists(st.integers(0, 6), max_size=4), min_size=1, max_size=6),
    st.sampled_from(["sum", "mean", "concat"]),
    st.sampled_from([None, 0, 3]),
    st.sampled_from([1, 3, 8, 17]),  # a kernel is compiled for each width
)
@settings(deadline=None, max_examples=50)
def test_any_bags(lists, combiner, padding_id, dim):
    feature = FeatureConfig(name="f", table="x", combiner=combiner, max_length=4 if combiner == "concat" else None)
    collection = EmbeddingCollection([table("x", 7, dim, padding_id=padding_id)], [feature], AdaGrad(epsilon=0.01))
    # Gradients of an id that comes several times are sums of numbers near 9, which cancel; AdaGrad keeps their squares.
    compare(collection, [{"f": Bag.from_lists(lists)}] * 2, close={"rtol": 2e-5, "atol": 2e-5})


def test_accumulated_passes_equal_one_pass_over_all_rows():
    def fresh():
        features = [FeatureConfig(name="f", table="x", combiner="mean"), FeatureConfig(name="g", table="x")]
        return EmbeddingCollection([table("x", 8, 4)], features, Adam(epsilon=0.01))

    lists_f, lists_g = [[1, 2], [2], [], [7, 7, 1]], [[3], [2], [2], [0, 1]]
    whole, halves = fresh(), fresh()
    whole({"f": Bag.from_lists(lists_f), "g": Bag.from_lists(lists_g)}).flat.square().sum().backward()
    for part in (slice(0, 2), slice(2, 4)):
        out = halves({"f": Bag.from_lists(lists_f[part]), "g": Bag.from_lists(lists_g[part])})
        out.flat.square().sum().backward()
    whole.step(0.1)
    halves.step(0.1)
    assert halves.export_table("x").step == 1
    torch.testing.assert_close(whole.export_table("x").weight, halves.export_table("x").weight, **CLOSE)


def test_scale_multiplies_gradients_and_own_rates_follow_the_factor():
    def moved(optimizer, **options):
        collection = EmbeddingCollection(
            [TableConfig(name="x", num_rows=2, dim=1, init="zero")], [FeatureConfig(name="f", table="x")], optimizer
        )
        collection({"f": torch.tensor([1])}).flat.sum().backward()
        collection.step(0.5, **options)
        return collection.export_table("x").weight.flatten().tolist()

    assert moved(SGD()) == [0.0, -0.5]
    assert moved(SGD(), scale=0.5) == [0.0, -0.25]
    assert moved(SGD(), scale=torch.tensor(0.25)) == [0.0, -0.125]
    assert moved(SGD(), factor=0.5) == [0.0, -0.5]
    assert moved(SGD(lr=2.0), factor=0.25) == [0.0, -0.5]


def test_nothing_is_kept_without_autograd_in_eval_and_for_frozen_tables():
    features = [FeatureConfig(name="f", table="x"), FeatureConfig(name="g", table="y")]
    collection = EmbeddingCollection([table("x", 3, 2), table("y", 3, 2, trainable=False)], features, AdaGrad())
    keys = {"f": torch.tensor([1, 1]), "g": torch.tensor([1, 2])}
    before = collection.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert not collection(keys).flat.requires_grad
    assert not collection.eval()(keys).flat.requires_grad
    collection.train().freeze("x")
    assert not collection(keys).flat.requires_grad
    collection.step(0.1)
    for name, value in collection.state_dict().items():
        assert torch.equal(value, before[name]), name
    collection.unfreeze("x")
    collection(keys).flat.sum().backward()
    collection.step(0.1)
    found = collection.state_dict()
    changed = [name for name, value in found.items() if not torch.equal(value, before[name])]
    assert changed == ["x.weight", "x.accumulator", "x.step"]
    assert "y.accumulator" not in found


def test_discarded_gradients_leave_no_trace():
    collection = EmbeddingCollection([table("x", 3, 2)], [FeatureConfig(name="f", table="x")], Adam())
    before = collection.export_table("x").weight
    collection({"f": torch.tensor([0, 1])}).flat.sum().backward()
    collection.discard_gradients()
    assert collection.grad_norm_squared() == 0
    collection.step(1.0)
    assert torch.equal(collection.export_table("x").weight, before)
    assert collection.export_table("x").step == 0


def test_nonfinite_gradients_name_their_feature():
    features = [FeatureConfig(name=name, table=f"t{name}") for name in "abc"]
    collection = EmbeddingCollection([table(f"t{name}", 4, 2, padding_id=0) for name in "abc"], features, SGD())
    keys = {"a": torch.tensor([1, 2]), "b": torch.tensor([3, 0]), "c": torch.tensor([1, 1])}
    out = collection(keys)
    gradient = torch.ones_like(out.flat)
    gradient[0, 2] = float("nan")  # feature b, key 3
    gradient[1, 2] = float("inf")  # feature b, padding: never reaches a row
    out.flat.backward(gradient)
    assert collection.nonfinite_gradients() == ["b"]
    collection.discard_gradients()
    out = collection(keys)
    gradient[0, 2] = 0.0
    out.flat.backward(gradient)
    assert collection.nonfinite_gradients() == []
    assert bool(torch.isfinite(collection.grad_norm_squared()))


def test_same_bits_run_to_run_and_with_one_or_two_threads():
    generator = torch.Generator().manual_seed(5)
    ids = (torch.rand(3000, 2, generator=generator) ** 8 * 5000).long()
    bag = random_bags(generator, 5000, 3000, 20, torch.int64, weighted=True)
    gradient = torch.randn(3000, 48, generator=generator)

    def train(threads):
        torch.set_num_threads(threads)
        features = [FeatureConfig(name=n, table="x") for n in "ab"] + [
            FeatureConfig(name="c", table="x", combiner="mean")
        ]
        collection = EmbeddingCollection([table("x", 5000, 16)], features, Adam())
        for _ in range(3):
            collection({"a": ids[:, 0], "b": ids[:, 1], "c": bag}).flat.backward(gradient)
            collection.step(0.01)
        return collection.export_table("x").weight

    before = torch.get_num_threads()
    try:
        results = [train(threads) for threads in (1, 2, 2)]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[1], results[2])


def test_one_key_100_000_times():
    collection = EmbeddingCollection(
        [TableConfig(name="x", num_rows=10, dim=3, init="zero")], [FeatureConfig(name="f", table="x")], SGD()
    )
    collection({"f": torch.full((100_000,), 9)}).flat.sum().backward()
    collection.step(2.0**-10)
    # 100,000 ones sum exactly in float32; so does the product with a power of two.
    assert collection.export_table("x").weight[9].tolist() == [-100_000 / 1024] * 3


def test_empty_batch():
    features = [FeatureConfig(name="f", table="x"), FeatureConfig(name="g", table="x", combiner="concat", max_length=2)]
    collection = EmbeddingCollection([table("x", 3, 2)], features, AdaGrad())
    out = collection({"f": torch.zeros(0, dtype=torch.int64), "g": Bag.from_lists([])})
    assert out.flat.shape == (0, 6)
    assert out["g"].shape == (0, 2, 2)
    out.flat.sum().backward()
    collection.step(0.1)
    assert collection.nonfinite_gradients() == []


def test_parts_of_a_storage_share_one_gradient_that_is_not_copied():
    features = [FeatureConfig(name="one", table="x"), FeatureConfig(name="bag", table="x")]
    collection = EmbeddingCollection([table("x", 9, 4)], features, SGD())
    collection({"one": torch.tensor([1, 2]), "bag": Bag.from_lists([[3], [4, 5]])}).flat.sum().backward()
    (storage,) = collection.all_storages()
    assert len(list(storage.waiting_gradients())) == 1
    before = next(storage.waiting_gradients()).data_ptr()
    joined = join_entries([one.entries for one in storage._pending])
    assert joined.gradients.data_ptr() == before
    assert len(joined.rows) == 5
