"""Initial values, settings, output views, state, copies and conversions."""

import copy
import math
import pickle

import pytest
import torch

from viviane.config import SGD, AdaGrad, Adam
from viviane.core.errors import CheckpointError, ConfigError
from viviane.embedding import DynamicTableConfig, EmbeddingCollection, FeatureConfig, TableConfig, TableState


def build(optimizer=None, seed=0, order=("x", "y", "z")):
    tables = {
        "x": TableConfig(name="x", num_rows=50, dim=4),
        "y": TableConfig(name="y", num_rows=7, dim=4, optimizer=AdaGrad()),
        "z": TableConfig(name="z", num_rows=9, dim=2, trainable=False),
    }
    features = [FeatureConfig(name=f"f{name}", table=name) for name in order]
    return EmbeddingCollection([tables[name] for name in order], features, optimizer or Adam(), seed=seed)


def train(collection, steps=2, offset=0):
    for i in range(steps):
        keys = {f"f{name}": torch.tensor([i + offset, 3, 3]) for name in "xyz"}
        collection(keys).flat.square().sum().backward()
        collection.step(0.1)


def test_initial_values_depend_on_seed_and_name_alone():
    a, b, c = build(), build(order=("z", "x", "y")), build(seed=1)
    for name in "xyz":
        assert torch.equal(a.export_table(name).weight, b.export_table(name).weight)
        assert not torch.equal(a.export_table(name).weight, c.export_table(name).weight)


def test_a_row_begins_the_same_in_a_table_of_any_size_and_in_a_dynamic_one():
    def table(*configs):
        return EmbeddingCollection(configs, [FeatureConfig(name="f", table="t")], SGD(), seed=7)

    for init in ("normal", {"type": "uniform", "low": -2.0, "high": 3.0}):
        # 3 * 2^21 numbers: more than one piece is drawn
        large = table(TableConfig(name="t", num_rows=1 << 21, dim=3, init=init)).table_rows("t")
        small = table(TableConfig(name="t", num_rows=9, dim=3, init=init)).table_rows("t")
        dynamic = table(DynamicTableConfig(name="t", dim=3, init=init)).dynamic_table("t")
        assert torch.equal(large[:9], small)
        keys = torch.tensor([8, (1 << 21) - 1, 0])
        dynamic.find_or_insert(keys)
        assert torch.equal(dynamic.find(keys)[0], large[keys])


@pytest.mark.parametrize(
    ("init", "low", "high"),
    [
        ("uniform", -0.01, 0.01),  # sqrt(1 / 10,000)
        ({"type": "uniform", "low": 0.5, "high": 0.75}, 0.5, 0.75),
        ("xavier", -math.sqrt(6 / 10_008), math.sqrt(6 / 10_008)),
        ("zero", 0.0, 0.0),
        ({"type": "constant", "value": 3.0}, 3.0, 3.0),
    ],
)
def test_initial_ranges(init, low, high):
    table = TableConfig(name="t", num_rows=10_000, dim=8, init=init, padding_id=5)
    weight = EmbeddingCollection([table], [FeatureConfig(name="f", table="t")], SGD()).export_table("t").weight
    assert weight[5].tolist() == [0.0] * 8
    weight = torch.cat([weight[:5], weight[6:]])
    assert low <= weight.min() <= weight.max() <= high
    # 80,000 even draws: the ends are reached within a thousandth of the range, the mean within 1%.
    assert weight.min() <= low + (high - low) * 1e-3
    assert weight.max() >= high - (high - low) * 1e-3
    assert abs(weight.mean() - (low + high) / 2) <= (high - low) * 0.01


def test_small_tables_start_within_five_hundredths_and_normal_has_its_spread():
    features = [FeatureConfig(name="f", table="t")]
    small = EmbeddingCollection([TableConfig(name="t", num_rows=3, dim=100)], features, SGD())
    assert 0.045 < small.export_table("t").weight.abs().max() <= 0.05
    normal = TableConfig(name="t", num_rows=1000, dim=20, init={"type": "normal", "mean": 1.0, "std": 0.5})
    weight = EmbeddingCollection([normal], features, SGD()).export_table("t").weight
    assert weight.mean().item() == pytest.approx(1.0, abs=0.02)  # standard error 0.0035
    assert weight.std().item() == pytest.approx(0.5, abs=0.015)


def test_output_views():
    features = [FeatureConfig(name="a", table="x"), FeatureConfig(name="b", table="x")]
    emb = EmbeddingCollection([TableConfig(name="x", num_rows=9, dim=4)], features, SGD())
    out = emb({"a": torch.tensor([1, 2]), "b": torch.tensor([3, 4])})
    assert out.flat.is_contiguous()
    assert out.stacked.shape == (2, 2, 4)
    assert torch.equal(out.stacked[:, 1], out["b"])
    assert out["a"].data_ptr() == out.flat.data_ptr()
    assert list(out) == ["a", "b"]
    assert emb.width == 8
    with pytest.raises(ConfigError, match=r"no such feature in the output[\s\S]*'c'"):
        out["c"]
    with pytest.raises(ConfigError, match="only features with combiner 'concat' have a mask"):
        out.mask("a")
    with pytest.raises(ConfigError, match=r"different widths cannot be stacked[\s\S]*fz 2"):
        _ = build()({f"f{n}": torch.tensor([1]) for n in "xyz"}).stacked


def test_state_dict_is_logical_and_goes_on_bit_for_bit():
    one = build()
    train(one)
    names = ["x.weight", "x.m", "x.v", "x.step", "y.weight", "y.accumulator", "y.step", "z.weight", "z.step"]
    assert list(one.state_dict()) == names
    saved = {name: value.clone() for name, value in one.state_dict().items()}
    other = build(seed=9, order=("z", "y", "x"))
    wrapped = torch.nn.ModuleDict({"emb": other})
    wrapped.load_state_dict({f"emb.{name}": value for name, value in saved.items()})
    train(one, offset=2)
    train(other, offset=2)
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name
    assert not torch.equal(saved["x.weight"], one.state_dict()["x.weight"])


def test_loading_what_does_not_fit_names_the_key():
    state = build().state_dict()
    del state["x.m"]
    state["y.weight"] = torch.zeros(3, 4)
    state["w.weight"] = torch.zeros(3, 4)
    with pytest.raises(RuntimeError) as caught:
        build().load_state_dict(state)
    assert 'Missing key(s) in state_dict: "x.m"' in str(caught.value)
    assert 'Unexpected key(s) in state_dict: "w.weight"' in str(caught.value)
    assert "y.weight has shape (3, 4), the table (7, 4)" in str(caught.value)


def test_export_and_import_of_a_table():
    one, other = build(), build(seed=4)
    train(one)
    content = one.export_table("x")
    assert set(content.state) == {"m", "v"}
    other.import_table("x", content)
    other.import_table("y", TableState(torch.ones(7, 4)))
    content.weight.zero_()  # a copy: changes nothing
    for part, value in one.export_table("x").state.items():
        assert torch.equal(other.export_table("x").state[part], value)
    assert other.export_table("x").step == 2
    assert other.export_table("y").step == 0
    assert other.export_table("y").state["accumulator"].count_nonzero() == 0


def test_import_refuses_and_changes_nothing():
    emb = build()
    before = emb.export_table("x")
    with pytest.raises(
        CheckpointError, match=r"the shape differs[\s\S]*table 'x', weight[\s\S]*\(2, 4\)[\s\S]*\(50, 4\)"
    ):
        emb.import_table("x", TableState(torch.zeros(2, 4)))
    with pytest.raises(CheckpointError, match=r"another optimizer's state[\s\S]*table 'x'[\s\S]*accumulator"):
        emb.import_table("x", TableState(torch.zeros(50, 4), {"accumulator": torch.zeros(50, 4)}))
    state = {"m": torch.zeros(50, 4), "v": torch.zeros(50, 3)}
    with pytest.raises(CheckpointError, match=r"table 'x', v"):
        emb.import_table("x", TableState(torch.zeros(50, 4), state))
    assert torch.equal(emb.export_table("x").weight, before.weight)
    with pytest.raises(ConfigError, match=r"no such table in the collection[\s\S]*'xx'"):
        emb.export_table("xx")


def test_copies_and_pickles_are_independent():
    one = build()
    train(one)
    for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert torch.equal(other.export_table("x").weight, one.export_table("x").weight)
        train(other)
        assert not torch.equal(other.export_table("x").weight, one.export_table("x").weight)
        assert other.export_table("x").step == 4
    assert one.export_table("x").step == 2


def test_no_parameter_and_no_conversion_of_rows():
    emb = build()
    assert list(emb.parameters()) == []
    with pytest.raises(ConfigError, match="embedding tables keep their type and cannot be converted"):
        torch.nn.Sequential(emb).half()
    emb({f"f{n}": torch.tensor([1]) for n in "xyz"}).flat.sum().backward()
    with pytest.raises(ConfigError, match="gradients wait for a step"):
        emb.to("meta")
    emb.discard_gradients()
    assert emb.float() is emb


def test_summary():
    lines = {line.name: line for line in build().summary()}
    assert lines["x"].num_parameters == 200
    assert (lines["x"].weight_bytes, lines["x"].state_bytes, lines["x"].optimizer) == (800, 1600, "adam")
    assert (lines["y"].state_bytes, lines["y"].optimizer) == (7 * 4 * 4, "adagrad")
    assert (lines["z"].state_bytes, lines["z"].trainable, lines["z"].features) == (0, False, ("fz",))


def test_tables_share_one_storage_with_state_where_it_is_needed():
    emb = build()
    shapes = sorted(tuple(buffer.shape) for buffer in emb.buffers() if buffer.dim() == 2)
    # width 4: 50 + 7 rows and two zero rows, Adam's state for 50, AdaGrad's for 7; width 2: 9 rows and two zero rows
    assert shapes == [(7, 4), (11, 2), (50, 4), (50, 4), (59, 4)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding_id": 4}, "padding_id 4 is not below num_rows 4"),
        ({"default_id": 1}, "default_id needs out_of_range='default'"),
        ({"init": {"type": "uniform", "low": 1.0}}, "takes both low and high, or neither"),
        ({"init": {"type": "uniform", "low": 1.0, "high": 0.0}}, "needs low < high"),
        ({"dtype": "float64"}, "'float32', 'float16' or 'bfloat16'"),
        ({"num_rows": 0}, "greater than or equal to 1"),
    ],
)
def test_table_settings_are_checked(options, message):
    with pytest.raises(ConfigError, match=message):
        TableConfig(**{"name": "x", "num_rows": 4, "dim": 2, **options})


def test_collection_settings_are_checked():
    table, feature = TableConfig(name="x", num_rows=4, dim=2), FeatureConfig(name="f", table="x")
    with pytest.raises(ConfigError, match=r"two tables of one name[\s\S]*'x'"):
        EmbeddingCollection([table, table], [feature], SGD())
    with pytest.raises(ConfigError, match=r"two features of one name[\s\S]*'f'"):
        EmbeddingCollection([table], [feature, feature], SGD())
    with pytest.raises(ConfigError, match=r"no such table[\s\S]*feature 'g'[\s\S]*'xy'[\s\S]*did you mean|choose"):
        EmbeddingCollection([table], [FeatureConfig(name="g", table="xy")], SGD())
    with pytest.raises(ConfigError, match="at least one feature"):
        EmbeddingCollection([table], [], SGD())
    with pytest.raises(ConfigError, match="max_length needs combiner='concat'"):
        FeatureConfig(name="f", table="x", max_length=3)
    with pytest.raises(ConfigError, match=r"no optimizer state[\s\S]*'z'"):
        build().unfreeze("z")


def test_settings_survive_json():
    table = TableConfig(name="x", num_rows=4, dim=2, init="normal", optimizer=AdaGrad(lr=0.5), padding_id=0)
    assert TableConfig.from_dict(table.to_dict()) == table
