"""Every reference model: learns a planted signal, survives JSON, takes every kind of schema, matches its formula."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from viviane.batch import Batch
from viviane.config import SGD, Adam, Solver
from viviane.core.errors import ConfigError, SchemaError
from viviane.data import Dataset
from viviane.data.synthetic import SyntheticConfig, generate
from viviane.model import GraphModule, Model, plan_graph
from viviane.schema import Schema
from viviane.zoo import DCN, DLRM, ZOO, DCNv2, DeepFM, WideDeep

DENSE = [{"name": "x"}, {"name": "v", "dim": 2}]
CATEGORICAL = [{"name": "a", "num_ids": 20}, {"name": "b", "num_ids": 10}]
BAG = [
    {"name": "m", "num_ids": 20, "kind": "multi_hot"},
    {"name": "s", "num_ids": 9, "kind": "sequence", "max_length": 3},
]
LABEL = [{"name": "y"}]
# The models that take any columns; those with roles have files of their own.
SMALL = {
    "wide_deep": {"deep_mlp": [32, 16]},
    "dcn": {"deep_mlp": [32, 16]},
    "dcn_v2": {"deep_mlp": [32, 16]},
    "dlrm": {"bottom_mlp": [16], "top_mlp": [32, 16]},
    "deepfm": {"deep_mlp": [32, 16]},
}
SCHEMAS = {
    "all kinds": Schema(labels=LABEL, dense=DENSE, categorical=CATEGORICAL + BAG),
    "no dense": Schema(labels=LABEL, categorical=CATEGORICAL),
    "one column": Schema(labels=LABEL, categorical=CATEGORICAL[:1]),
    "one of each": Schema(labels=LABEL, dense=DENSE[:1], categorical=BAG[:1]),
}


def batch_of(schema: Schema, rows: int = 6) -> Batch:
    rng = np.random.default_rng(0)
    columns = {"y": rng.integers(0, 2, rows)}
    for column in schema.dense:
        columns[column.name] = rng.normal(size=(rows, column.dim)).astype("float32")
    for column in schema.one_hot:
        columns[column.name] = rng.integers(0, column.num_ids, rows)
    for column in schema.bags:
        columns[column.name] = [rng.integers(3, column.num_ids, length).tolist() for length in rng.integers(0, 4, rows)]
    return Batch.from_columns(schema, columns)


def module_of(recipe, schema: Schema) -> GraphModule:
    return GraphModule(plan_graph(recipe.nodes(schema), schema), SGD()).eval()


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> tuple[Dataset, Dataset, float]:
    folder = tmp_path_factory.mktemp("planted")
    columns = {
        "num_dense": 3,
        "cardinalities": (50, 100, 20),
        "bags": [{"name": "M1", "cardinality": 30}],
        "signal": 2.0,
    }
    generate(SyntheticConfig(rows=20_000, **columns), folder / "train")
    made = generate(SyntheticConfig(rows=5_000, **columns), folder / "valid", part="valid")
    return Dataset(folder / "train"), Dataset(folder / "valid"), made.best_auc


@pytest.mark.parametrize("name", SMALL)
def test_learns_most_of_a_planted_signal(name, planted) -> None:
    train, valid, best = planted
    model = Model(Solver(batch_size=256, lr=3e-3, epochs=2, device="cpu"), train)
    model.add(ZOO[name](dim=8, **SMALL[name]))
    model.compile(Adam())
    auc = model.fit(train, valid).best("auc")
    # 0.5 is nothing, `best` is all there is; a model without its embeddings or its dense part stays below half way
    assert auc > 0.5 + 0.6 * (best - 0.5), f"{auc:.4f} of {best:.4f}"


OPTIONS = {"combiner": "mean", "embedding_dropout": 0.2, "dropout": 0.3, "batch_norm": True, "init": "normal"}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
@pytest.mark.parametrize("name", SMALL)
def test_every_schema_and_option_survives_json(name, options, schema, tmp_path: Path) -> None:
    recipe = ZOO[name](dim=4, **SMALL[name], **options)
    assert ZOO[name].from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    model = Model(Solver(device="cpu"), schema, name=name)
    model.add(recipe)
    again = Model.from_json(json.loads(model.to_json()), Solver(device="cpu"), schema)
    batch = batch_of(schema)
    for one in (model, again):
        one.compile()
        one.trainer.train_step(batch)
    predictions = model.predict(batch)
    assert predictions.shape == (6, 1)
    assert np.isfinite(predictions).all()
    assert np.array_equal(again.predict(batch), predictions)
    assert model.plan().unused == ()


# Formulas, from the weights by name --------------------------------------------------------------------------


def weights(module: GraphModule) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in module.state_dict().items()}


def rows_of(w: dict, table: str, batch: Batch, column: int) -> torch.Tensor:
    return w[f"{table}.weight"][batch.one_hot[:, column].long()]


SCHEMA = Schema(labels=LABEL, dense=DENSE, categorical=CATEGORICAL)


def mlp(w: dict, name: str, x: torch.Tensor) -> torch.Tensor:
    for key in sorted(key for key in w if key.startswith(f"{name}.layers.") and key.endswith("weight")):
        x = torch.relu(x @ w[key].T + w[key.replace("weight", "bias")])
    return x


def line(w: dict, name: str, x: torch.Tensor) -> torch.Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # other orders of float32 sums


def test_wide_deep_formula() -> None:
    batch = batch_of(SCHEMA)
    module = module_of(WideDeep(dim=4, deep_mlp=[8, 5]), SCHEMA)
    w = weights(module)
    wide = rows_of(w, "wide_weights.a", batch, 0) + rows_of(w, "wide_weights.b", batch, 1)
    wide = wide + line(w, "wide_dense", batch.dense)
    x = torch.cat([rows_of(w, "emb.a", batch, 0), rows_of(w, "emb.b", batch, 1), batch.dense], 1)
    close(module(batch), wide + line(w, "deep_logit", mlp(w, "deep", x)))


def test_wide_columns_are_taken_out_of_the_deep_part_unless_named() -> None:
    def sparse(**options) -> dict:
        return WideDeep(**options).nodes(SCHEMA)[0].sparse

    assert sparse() == {"wide_cats": ("a", "b"), "deep_cats": ("a", "b")}
    assert sparse(wide=["a"]) == {"wide_cats": ("a",), "deep_cats": ("b",)}
    assert sparse(wide=["a"], deep=["a", "b"]) == {"wide_cats": ("a",), "deep_cats": ("a", "b")}
    assert sparse(wide=["a", "b"]) == {"wide_cats": ("a", "b"), "deep_cats": ("a", "b")}
    assert sparse(deep=["b"]) == {"wide_cats": ("a", "b"), "deep_cats": ("b",)}
    with pytest.raises(SchemaError, match=r"(?s)no such column.*'aa'"):
        sparse(wide=["aa"])


@pytest.mark.parametrize("version", ["v1", "full", "rank", "stacked"])
def test_dcn_formulas(version) -> None:
    batch = batch_of(SCHEMA)
    recipe = {
        "v1": DCN(dim=4, num_cross_layers=2, deep_mlp=[8, 5]),
        "full": DCNv2(dim=4, num_cross_layers=2, deep_mlp=[8, 5]),
        "rank": DCNv2(dim=4, num_cross_layers=2, deep_mlp=[8, 5], rank=3),
        "stacked": DCNv2(dim=4, num_cross_layers=2, deep_mlp=[8, 5], structure="stacked"),
    }[version]
    module = module_of(recipe, SCHEMA)
    w = weights(module)
    first = torch.cat([rows_of(w, "emb.a", batch, 0), rows_of(w, "emb.b", batch, 1), batch.dense], 1)
    x = first
    for i in range(2):
        matrix, bias = w[f"cross.weights.{i}"], w[f"cross.biases.{i}"]
        if version == "v1":
            x = first * (x @ matrix).unsqueeze(1) + bias + x
        elif version == "rank":
            x = first * (x @ w[f"cross.projections.{i}"].T @ matrix.T + bias) + x
        else:
            x = first * (x @ matrix.T + bias) + x
    if version == "stacked":
        close(module(batch), line(w, "logit", mlp(w, "deep", x)))
    else:
        close(module(batch), line(w, "logit", torch.cat([x, mlp(w, "deep", first)], 1)))


def test_dlrm_formula() -> None:
    batch = batch_of(SCHEMA)
    module = module_of(DLRM(dim=4, bottom_mlp=[6], top_mlp=[8, 5]), SCHEMA)
    w = weights(module)
    bottom = mlp(w, "bottom", batch.dense)
    a, b = rows_of(w, "emb.a", batch, 0), rows_of(w, "emb.b", batch, 1)
    dots = torch.stack([(a * bottom).sum(1), (b * bottom).sum(1), (b * a).sum(1)], 1)
    close(module(batch), line(w, "logit", mlp(w, "top", torch.cat([bottom, dots], 1))))


def test_dlrm_with_concatenated_embeddings() -> None:
    batch = batch_of(SCHEMA)
    module = module_of(DLRM(dim=4, bottom_mlp=[6], top_mlp=[8, 5], concat_embeddings=True), SCHEMA)
    w = weights(module)
    bottom = mlp(w, "bottom", batch.dense)
    a, b = rows_of(w, "emb.a", batch, 0), rows_of(w, "emb.b", batch, 1)
    dots = torch.stack([(a * bottom).sum(1), (b * bottom).sum(1), (b * a).sum(1)], 1)
    close(module(batch), line(w, "logit", mlp(w, "top", torch.cat([bottom, dots, a, b], 1))))


@pytest.mark.parametrize("model", [DeepFM, WideDeep])
def test_linear_tables_begin_at_zero_and_have_their_own_rule(model) -> None:
    rule = {"type": "sgd", "lr": 0.5, "weight_decay": 0.01}
    nodes = model(dim=4, init="normal", linear_optimizer=rule).nodes(SCHEMA)
    linear, vectors = (node for node in nodes if node.node == "SparseEmbedding")
    assert (linear.dim, linear.init.type, linear.optimizer) == (1, "zero", SGD(lr=0.5, weight_decay=0.01))
    assert (vectors.dim, vectors.init.type, vectors.optimizer) == (4, "normal", None)


def test_layer_norm_reaches_the_hidden_layers() -> None:
    module = module_of(DCN(dim=4, deep_mlp=[8, 6], layer_norm=True), SCHEMA)
    assert [part.normalized_shape for part in module.modules() if isinstance(part, torch.nn.LayerNorm)] == [(8,), (6,)]


def test_dlrm_without_bottom_layers_has_one_to_the_width_of_a_vector() -> None:
    (bottom,) = (
        node for node in DLRM(dim=4, bottom_mlp=[]).nodes(SCHEMA) if node.node == "DenseLayer" and node.name == "bottom"
    )
    assert bottom.params["num_outputs"] == [4]


def test_deepfm_formula() -> None:
    batch = batch_of(SCHEMA)
    module = module_of(DeepFM(dim=4, deep_mlp=[8, 5]), SCHEMA)
    w = weights(module)
    fields = [rows_of(w, "emb.a", batch, 0), rows_of(w, "emb.b", batch, 1)]
    fields += [batch.dense[:, j : j + 1] * w["dense_vectors.weight"][j] for j in range(3)]
    first = rows_of(w, "first_weights.a", batch, 0) + rows_of(w, "first_weights.b", batch, 1)
    first = first + line(w, "first_dense", batch.dense)
    pairs = sum((fields[i] * fields[j]).sum(1, keepdim=True) for i in range(5) for j in range(i))
    close(module(batch), first + pairs + line(w, "deep_logit", mlp(w, "deep", torch.cat(fields, 1))))


# Mistakes ---------------------------------------------------------------------------------------------------

MISTAKES = [
    (lambda: ZOO["dlmr"], "did you mean 'dlrm'"),
    (lambda: DLRM(bottom=[4]), "did you mean 'bottom_mlp'"),
    (lambda: DLRM(dropout=1.0), "dropout"),
    (lambda: DCNv2(structure="serial"), "structure"),
    (lambda: DCN(combiner="concat"), "combiner"),
    (lambda: DCN(deep_mlp=[]), "deep_mlp"),
]


@pytest.mark.parametrize(("make", "message"), MISTAKES)
def test_mistakes_are_named(make, message) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        make()


@pytest.mark.parametrize("name", SMALL)
def test_labels_and_columns_that_do_not_fit_are_refused(name) -> None:
    two = Schema(labels=[{"name": "y"}, {"name": "z"}], categorical=CATEGORICAL)
    with pytest.raises(SchemaError, match=r"(?s)predict one label.*y, z.*select"):
        ZOO[name]().nodes(two)
    with pytest.raises(SchemaError, match="need categorical columns"):
        ZOO[name]().nodes(Schema(labels=LABEL, dense=DENSE))


def test_each_model_is_short() -> None:
    import viviane.zoo

    for file in Path(viviane.zoo.__file__).parent.glob("*.py"):
        assert len(file.read_text().splitlines()) < 150, file
