"""What scripts compute, against plain NumPy in float64: shared and sized tables, files, JSON there and back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from viviane.compat.hugectr.symbols import modules
from viviane.core.errors import CheckpointError, KeyRangeError

hugectr: Any = modules()["hugectr"]
LAYER = hugectr.Layer_t
KEYS = np.array([[0, 3, 3], [2, 3, 6], [0, 4, 5], [1, 5, 6], [2, 4, 5]])  # 3 slots of sizes 3, 3, 2; offsets 0, 3, 6


def norm_file(folder: Path, keys: np.ndarray, *, wide: bool = True) -> str:
    random = np.random.default_rng(1)
    rows = b"".join(
        np.array([i % 2, *random.random(2)], "<f4").tobytes()
        + b"".join(np.array([1], "<i4").tobytes() + np.array([k], "<i8" if wide else "<u4").tobytes() for k in row)
        for i, row in enumerate(keys)
    )
    header = np.array([0, len(keys), 1, 2, keys.shape[1], 0, 0, 0], "<i8").tobytes()
    (folder / "rows.data").write_bytes(header + rows)
    (folder / "list.txt").write_text("1\nrows.data\n")
    return str(folder / "list.txt")


def build(
    source: str, sizes: list[int], optimizer: Any, *, batchsize: int = 5, wide: bool = True, placed: Any = None
) -> Any:
    solver = hugectr.CreateSolver(
        batchsize=batchsize, batchsize_eval=5, max_eval_batches=1, lr=0.5, seed=4, i64_input_key=wide
    )
    reader = hugectr.DataReaderParams(hugectr.DataReaderType_t.Norm, source, eval_source=source)
    model = hugectr.Model(solver, reader, optimizer)
    sparse = hugectr.DataReaderSparseParam("keys", 1, True, 3)
    model.add(
        hugectr.Input(
            label_dim=1, label_name="label", dense_dim=2, dense_name="dense", data_reader_sparse_param_array=[sparse]
        )
    )
    model.add(
        hugectr.SparseEmbedding(
            embedding_type=placed or hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash,
            embedding_vec_size=2,
            combiner="sum",
            sparse_embedding_name="table",
            bottom_name="keys",
            slot_size_array=sizes,
        )
    )
    for kind, bottoms, top, more in (
        (LAYER.Reshape, ["table"], "flat", {"leading_dim": 6}),
        (LAYER.Concat, ["flat", "dense"], "all", {}),
        (LAYER.InnerProduct, ["all"], "logit", {"num_output": 1}),
        (LAYER.BinaryCrossEntropyLoss, ["logit", "label"], "loss", {}),
    ):
        model.add(hugectr.DenseLayer(layer_type=kind, bottom_names=bottoms, top_names=[top], **more))
    model.compile()
    return model


def sgd() -> Any:
    return hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.SGD, update_type=hugectr.Update_t.Local)


def read_files(prefix: str) -> tuple[dict[int, np.ndarray], np.ndarray, float]:
    keys = np.fromfile(f"{prefix}0_sparse_0.model/key", "<i8")
    vectors = np.fromfile(f"{prefix}0_sparse_0.model/emb_vector", "<f4").reshape(-1, 2).astype(np.float64)
    dense = np.fromfile(f"{prefix}_dense_0.model", "<f4").astype(np.float64)
    return dict(zip(keys.tolist(), vectors, strict=True)), dense[:-1], dense[-1]


def logits(table: dict[int, np.ndarray], weight: np.ndarray, bias: float, keys: np.ndarray) -> np.ndarray:
    dense = np.random.default_rng(1).random(2 * len(keys)).astype(np.float32).reshape(-1, 2)
    rows = [np.concatenate([*(table[k] for k in row), dense[i]]) for i, row in enumerate(keys.tolist())]
    return np.array(rows) @ weight + bias


@pytest.mark.parametrize("sizes", [[], [3, 3, 2]])
def test_a_step_of_sgd_by_hand_from_the_files(
    sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = KEYS.copy()
    keys[:, 2] = np.where(keys[:, 2] % 2, 6, 7)  # the last slot's are 6 and 7
    if not sizes:
        keys[:, 2] = keys[:, 0]  # slots share keys, and so rows; key 0 is one of them
    model = build(norm_file(tmp_path, keys), sizes, sgd())
    model.lr = 0.0  # the first step only lets keys come in
    model.train()
    model.save_params_to_files("before")
    model.start_data_reading()
    model.set_learning_rate(0.5)
    model.train()
    loss = model.get_current_loss()
    model.save_params_to_files("after")
    table, weight, bias = read_files("before")
    z = logits(table, weight, bias, keys)
    y = np.arange(5) % 2
    # float32 sums of a few numbers near 1
    assert loss == pytest.approx(np.mean(np.log1p(np.exp(z)) - y * z), abs=1e-6)
    error = (1 / (1 + np.exp(-z)) - y) / 5
    moved, new_weight, new_bias = read_files("after")
    for row, share in zip(keys.tolist(), error, strict=True):
        for place, key in enumerate(row):
            table[key] = table[key] - 0.5 * share * weight[2 * place : 2 * place + 2]
    assert moved.keys() == table.keys()
    for key, vector in table.items():
        np.testing.assert_allclose(moved[key], vector, atol=1e-6)
    assert new_bias == pytest.approx(bias - 0.5 * error.sum(), abs=1e-6)
    assert not np.array_equal(new_weight, weight)


def test_keys_of_any_size_and_pretrained_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keys = KEYS * (2**60 // 7)  # the largest needs 60 bits, the smallest is 0
    model = build(norm_file(tmp_path, keys), [], sgd())
    folder = tmp_path / "given"
    folder.mkdir()
    distinct = np.unique(keys)
    vectors = np.random.default_rng(2).random((len(distinct), 2)).astype("<f4")
    distinct.astype("<i8").tofile(folder / "key")
    vectors.tofile(folder / "emb_vector")
    model.load_sparse_weights({"table": str(folder)})
    model.eval()
    found = model._scores.last[0][:, 0]
    model.save_params_to_files("same")
    table, weight, bias = read_files("same")
    assert {k: v.tolist() for k, v in table.items()} == dict(
        zip(distinct.tolist(), vectors.astype(np.float64).tolist(), strict=True)
    )
    expected = 1 / (1 + np.exp(-logits(table, weight, bias, keys)))
    np.testing.assert_allclose(found, expected, atol=1e-6)  # float32 sums of 8 numbers
    vectors[1:].tofile(folder / "emb_vector")
    with pytest.raises(CheckpointError, match="do not match"):
        model.load_sparse_weights([str(folder)])


def test_a_key_outside_its_slot_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("viviane.compat.hugectr.capacity._ROWS", 1)  # the first row's keys fit, the second one's do not
    model = build(norm_file(tmp_path, KEYS[[1, 0, 2, 3, 4]]), [3, 3, 2], sgd())  # 3 is no key of the last slot
    with pytest.raises(KeyRangeError, match="keys_2"):
        model.train()


def test_sizes_of_a_hash_table_do_not_bound_the_keys_of_norm_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = build(norm_file(tmp_path, KEYS), [3, 3, 2], sgd())
    assert "keys of keys_2 are not in the range of slot_size_array, 6 to 7" in capsys.readouterr().out
    model.train()
    model.save_params_to_files("any")
    assert sorted(np.fromfile("any0_sparse_0.model/key", "<i8").tolist()) == sorted(set(KEYS.ravel().tolist()))


def test_global_adam_moves_rows_that_rest_only_where_all_rows_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = np.array([[0, 3, 6], [1, 4, 7], [1, 4, 7]])
    model = build(norm_file(tmp_path, keys), [3, 3, 2], hugectr.CreateOptimizer(), batchsize=1)
    model.train()  # row 0 of the file: keys 0, 3, 6
    model.save_params_to_files("one")
    model.train()
    model.save_params_to_files("two")
    one, two = read_files("one")[0], read_files("two")[0]
    assert not np.array_equal(one[0], two[0])  # rests, and moves by its moments
    np.testing.assert_array_equal(one[2], two[2])  # never had a gradient


def test_global_momentum_without_sizes_moves_rows_of_the_batch_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    momentum = hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.MomentumSGD, momentum_factor=0.9)
    build(norm_file(tmp_path, KEYS), [], momentum).train()
    assert "Warning: SparseEmbedding 'table': Update_t.Global of MomentumSGD" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        {"layer_type": LAYER.MultiCross, "num_layers": 2, "projection_dim": 3},
        {"layer_type": LAYER.Reshape, "selected": True, "selected_slots": [0, 2]},
        {"layer_type": LAYER.Reshape, "shape": [2, -1]},
        {"layer_type": LAYER.Select, "dim": 1, "index": [2, 0]},
        {"layer_type": LAYER.PReLU_Dice, "elu_alpha": 0.3, "eps": 1e-8},
        {"layer_type": LAYER.FusedInnerProduct, "num_output": 3, "pos_type": hugectr.FcPosition_t.Tail},
        {"layer_type": LAYER.MLP, "num_outputs": [4, 1], "act_type": hugectr.Activation_t.Non, "use_bias": False},
        {"layer_type": LAYER.MLP, "num_outputs": [4, 1], "activations": ["Relu", hugectr.Activation_t.Non]},
        {"layer_type": LAYER.BinaryCrossEntropyLoss, "use_regularizer": True, "lambda": 0.1},
    ],
)
def test_layers_survive_json(arguments: dict[str, Any]) -> None:
    from viviane.compat.hugectr.json_layers import layer_from_json, layer_to_json

    layer = hugectr.DenseLayer(bottom_names=["a"], top_names=["b"], **arguments)
    written = json.loads(json.dumps(layer_to_json(layer)))
    again = layer_from_json(written)
    assert layer_to_json(again) == written
    assert again.to_node(set()) == layer.to_node(set())


def test_json_has_hugectrs_word_for_no_activation() -> None:
    from viviane.compat.hugectr.json_layers import layer_from_json, layer_to_json

    for word in ("None", "Non"):  # the latter is what earlier versions of this package wrote
        given = {"num_outputs": [4, 1], "activations": ["Relu", word]}
        layer = layer_from_json({"type": "MLP", "bottom": "a", "top": "b", "mlp_param": given})
        assert layer_to_json(layer)["mlp_param"]["activations"] == ["Relu", "None"]
