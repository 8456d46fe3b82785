"""HugeCTR's files by bytes laid out by hand: tables of both layouts, optimizer state, keysets, a server's JSON."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from viviane.compat.hugectr.beside import packages
from viviane.compat.hugectr.files import load_dense, write_folder
from viviane.compat.hugectr.symbols import modules
from viviane.compat.hugectr.tables import TableRows
from viviane.config import Solver
from viviane.core.errors import CheckpointError, ConfigError, DataError, VivianeError
from viviane.model import DenseLayer, Input, Model
from viviane.schema import Schema

from .test_hugectr_numbers import KEYS, build, norm_file, read_files, sgd

MADE = modules()
hugectr: Any = MADE["hugectr"]
inference: Any = MADE["hugectr.inference"]
DISTINCT = np.unique(KEYS)
VECTORS = np.random.default_rng(2).random((len(DISTINCT), 2)).astype("<f4")


@pytest.mark.parametrize("sizes", [[], [3, 3, 2]])
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("localized", [True, False])
def test_a_table_of_before_3_1_is_one_file_of_rows(
    sizes: list[int], wide: bool, localized: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = np.minimum(KEYS, 7)
    model = build(norm_file(tmp_path, keys, wide=wide), sizes, sgd(), wide=wide)
    kind = "<i8" if wide else "<u4"
    rows = b"".join(
        np.array([key], kind).tobytes()
        + (np.array([min(key // 3, 2)], "<u8").tobytes() if localized else b"")
        + vector.tobytes()
        for key, vector in zip(DISTINCT[:-1].tolist(), VECTORS, strict=False)
    )
    Path("flat.model").write_bytes(rows)
    model.load_sparse_weights(["flat.model"])
    model.save_params_to_files("again")
    table = read_files("again")[0]
    for key, vector in zip(DISTINCT[:-1].tolist(), VECTORS, strict=False):
        np.testing.assert_array_equal(table[key], vector)
    Path("flat.model").write_bytes(rows[:-1])
    with pytest.raises(CheckpointError, match="not a table of this width"):
        model.load_sparse_weights(["flat.model"])


def adam() -> Any:
    return hugectr.CreateOptimizer(optimizer_type=hugectr.Optimizer_t.Adam, update_type=hugectr.Update_t.Local)


@pytest.mark.parametrize("sizes", [[], [3, 3, 2]])
def test_optimizer_state_by_hand(sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keys = np.minimum(KEYS, np.array([2, 5, 7]))
    keys[:, 2] = np.maximum(keys[:, 2], 6)
    model = build(norm_file(tmp_path, keys), sizes, adam())
    present = np.arange(8) if sizes else np.unique(keys)
    count, room = len(present), 11  # HugeCTR's buffer has more rows than there are keys
    Path("t.model").mkdir()
    present.astype("<i8")[::-1].tofile("t.model/key")
    np.zeros((count, 2), "<f4").tofile("t.model/emb_vector")
    m, v = (np.random.default_rng(i).random((room, 2)).astype("<f4") for i in range(2))
    Path("t_opt.model").write_bytes(m.tobytes() + v.tobytes())
    dense_m, dense_v = (np.random.default_rng(i).random(9).astype("<f4") for i in (5, 6))  # 8 weights and a bias
    Path("d_opt.model").write_bytes(dense_m.tobytes() + dense_v.tobytes())
    weight = np.arange(9, dtype="<f4") / 10
    weight.tofile("d.model")
    model.load_dense_weights("d.model")
    model.load_sparse_weights(["t.model"])
    model.load_dense_optimizer_states("d_opt.model")
    model.load_sparse_optimizer_states({"table": "t_opt.model"})
    model.save_params_to_files("now", 3)
    assert Path("now_opt_dense_3.model").read_bytes() == dense_m.tobytes() + dense_v.tobytes()
    order = np.fromfile("now0_sparse_3.model/key", "<i8").tolist()
    stored = np.fromfile("now0_opt_sparse_3.model", "<f4").reshape(2, len(order), 2)
    place = {int(key): i for i, key in enumerate(present[::-1])}
    for i, key in enumerate(order):
        np.testing.assert_array_equal(stored[:, i], [m[place[key]], v[place[key]]])
    Path("t_opt.model").write_bytes(m.tobytes())
    with pytest.raises(CheckpointError, match="wrong number of states"):
        model.load_sparse_optimizer_states(["t_opt.model"])
    with pytest.raises(CheckpointError, match="wrong number of states"):
        model.load_dense_optimizer_states("t_opt.model")


def test_slots_are_those_in_which_the_data_have_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = norm_file(tmp_path, KEYS + [[0, 0, 10]] * 5)  # the keys of each slot are its own
    localized = hugectr.Embedding_t.LocalizedSlotSparseEmbeddingHash
    for kind in (localized, hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash):
        model = build(source, [], adam(), placed=kind)
        model.train()
        model.save_params_to_files(kind.name, 0)
    keys = np.fromfile(f"{localized.name}0_sparse_0.model/key", "<i8")
    slots = np.fromfile(f"{localized.name}0_sparse_0.model/slot_id", "<u8")
    assert dict(zip(keys.tolist(), slots.tolist(), strict=True)) == {
        0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1, 13: 2, 15: 2, 16: 2,
    }  # fmt: skip
    assert not Path("DistributedSlotSparseEmbeddingHash0_sparse_0.model/slot_id").exists()
    again = build(source, [], adam(), placed=localized)
    again.load_sparse_weights([f"{localized.name}0_sparse_0.model"])
    norm_file(tmp_path, np.zeros((5, 3), np.int64))  # other data: the slots of the keys are unknown
    again.save_params_to_files("unknown", 0)
    assert not Path("unknown0_sparse_0.model/slot_id").exists()


def test_a_loaded_state_moves_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = norm_file(tmp_path, np.minimum(KEYS, 7))
    first = build(source, [], adam())
    for _ in range(3):
        first.train()
    first.save_params_to_files("a", 3)
    again = build(source, [], adam())
    again.load_dense_weights("a_dense_3.model")
    again.load_sparse_weights(["a0_sparse_3.model"])
    again.load_dense_optimizer_states("a_opt_dense_3.model")
    again.load_sparse_optimizer_states(["a0_opt_sparse_3.model"])
    again.save_params_to_files("b", 3)
    for name in ("_dense_3.model", "_opt_dense_3.model", "0_sparse_3.model/key", "0_opt_sparse_3.model"):
        assert Path("a" + name).read_bytes() == Path("b" + name).read_bytes()
    assert np.fromfile("a0_opt_sparse_3.model", "<f4").any()


def test_files_of_an_optimizer_without_states_are_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = build(norm_file(tmp_path, np.minimum(KEYS, 7)), [], hugectr.CreateOptimizer(hugectr.Optimizer_t.SGD))
    model.train()
    model.save_params_to_files("s", 1)
    assert Path("s0_opt_sparse_1.model").read_bytes() == b""
    model.load_sparse_optimizer_states(["s0_opt_sparse_1.model"])
    model.load_dense_optimizer_states("s_opt_dense_1.model")
    Path("s0_opt_sparse_1.model").write_bytes(bytes(16))
    with pytest.raises(CheckpointError, match="wrong number of states"):
        model.load_sparse_optimizer_states(["s0_opt_sparse_1.model"])


def test_optimizer_state_of_mixed_precision_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keys = KEYS.copy()
    keys[:, 2] = np.where(keys[:, 2] % 2, 6, 7)
    source = norm_file(tmp_path, keys)
    first, again = (build(source, [3, 3, 2], adam()) for _ in range(2))
    for _ in range(3):
        first.train()
    first.save_params_to_files("a", 3)
    for name in ("a_opt_dense_3.model", "a0_opt_sparse_3.model"):
        np.fromfile(name, "<f4").astype("<f2").tofile(f"half_{name}")
    again.load_dense_weights("a_dense_3.model")
    again.load_sparse_weights(["a0_sparse_3.model"])
    again.load_dense_optimizer_states("half_a_opt_dense_3.model")
    again.load_sparse_optimizer_states(["half_a0_opt_sparse_3.model"])
    again.save_params_to_files("b", 3)
    for name in ("_opt_dense_3.model", "0_opt_sparse_3.model"):
        found, half = np.fromfile("b" + name, "<f4"), np.fromfile("a" + name, "<f4").astype("<f2")
        assert half.any()
        np.testing.assert_array_equal(found, half.astype("<f4"))


def test_keysets_are_keys_alone(tmp_path: Path) -> None:
    source = norm_file(tmp_path, KEYS)
    solver = hugectr.CreateSolver(batchsize=5, batchsize_eval=5, i64_input_key=True, repeat_dataset=False, seed=1)
    (tmp_path / "keyset").write_bytes(np.array([0, 3, 99], "<i8").tobytes())
    (tmp_path / "broken").write_bytes(b"123")
    reader = hugectr.DataReaderParams(hugectr.DataReaderType_t.Norm, [source], [str(tmp_path / "keyset")], source)
    model = hugectr.Model(solver, reader, sgd(), hugectr.CreateMOS(train_from_scratch=True, use_host_memory_ps=False))
    done = build(source, [], sgd())
    for one in done.added:
        model.add(one)
    model.compile()
    with pytest.raises(DataError, match="contains only keys"):
        model.get_model_oversubscriber().update(str(tmp_path / "broken"))
    model.fit(num_epochs=1, display=0, eval_interval=0)
    ((keys, vectors),) = model.get_incremental_model()
    assert sorted(keys.tolist()) == [0, 3]  # 99 never came
    assert vectors.shape == (2, 2)
    with pytest.raises(ConfigError, match="Kafka"):
        model.dump_incremental_model_2kafka()


def server(tmp_path: Path, **model: Any) -> Any:
    folder = tmp_path / "table.model"
    folder.mkdir(exist_ok=True)
    np.array([7, 2**40, 0], "<i8").tofile(folder / "key")
    np.arange(6, dtype="<f4").tofile(folder / "emb_vector")
    content = {
        "supportlonglong": True,
        "volatile_db": {"type": "parallel_hash_map", "initial_cache_rate": 1.0},
        "models": [
            {
                "model": "m", "sparse_files": [str(folder)], "dense_file": "", "num_of_worker_buffer_in_pool": 3,
                "deployed_device_list": [0], "max_batch_size": 64, "embedding_vecsize_per_table": [2],
                "default_value_for_each_table": [0.5], "hit_rate_threshold": 0.9, "gpucacheper": 0.2, "gpucache": True,
                **model,
            }
        ],
    }  # fmt: skip
    (tmp_path / "ps.json").write_text(json.dumps(content))
    return inference.HPS(str(tmp_path / "ps.json"))


def test_a_layer_of_hps_torch_answers_exactly(tmp_path: Path) -> None:
    server(tmp_path)
    layer = packages()["hps_torch"].LookupLayer(str(tmp_path / "ps.json"), "m", 0, 2)
    keys = torch.tensor([[2**40, 0], [1, 7]])
    assert layer(keys).tolist() == [[[2, 3], [4, 5]], [[0.5, 0.5], [0, 1]]]
    narrow = packages()["hps_torch"].LookupLayer(str(tmp_path / "ps.json"), "m", 0, 3)
    with pytest.raises(ConfigError, match="width of the table differs"):
        narrow(keys)


def test_a_parameter_server_answers_exactly(tmp_path: Path) -> None:
    found = server(tmp_path)
    expected = [[2, 3], [4, 5], [0.5, 0.5], [0, 1]]
    assert found.lookup([2**40, 0, 1, 7], "m", 0).tolist() == expected
    out = torch.zeros(4, 2)
    found.lookup_fromdlpack(
        torch.utils.dlpack.to_dlpack(torch.tensor([2**40, 0, 1, 7])), torch.utils.dlpack.to_dlpack(out), "m", 0
    )
    assert out.tolist() == expected
    with pytest.raises(ConfigError, match="no such table"):
        found.lookup([1], "m", 1)
    with pytest.raises(ConfigError, match="no such model"):
        found.lookup([1], "n", 0)
    with pytest.raises(CheckpointError, match="do not match"):
        server(tmp_path, embedding_vecsize_per_table=[3])


def test_capsules_of_dlpack_can_be_read_after_the_lookup(tmp_path: Path) -> None:
    """torch's from_dlpack uses a capsule up, HugeCTR leaves it to the script, which reads the vectors from it."""
    found, pack = server(tmp_path), torch.utils.dlpack.to_dlpack
    keys, out = pack(torch.tensor([0, 2**40])), pack(torch.zeros(1, 4))
    for _ in range(2):
        found.lookup_fromdlpack(keys, out, "m", 0)
    assert torch.utils.dlpack.from_dlpack(keys).tolist() == [0, 2**40]
    assert torch.utils.dlpack.from_dlpack(out).tolist() == [[4, 5, 2, 3]]
    values = np.zeros((2, 2), np.float32)  # what has __dlpack__ is taken, too
    found.lookup_fromdlpack(np.array([7, 0]), values, "m", 0)
    assert values.tolist() == [[0, 1], [4, 5]]


def test_tensors_of_dlpack_may_outlive_the_lookup(tmp_path: Path) -> None:
    """An error's traceback keeps the tensors; to free them torch reads a struct that must still be there."""
    found, pack = server(tmp_path), torch.utils.dlpack.to_dlpack
    keys, out = pack(torch.tensor([0, 1])), pack(torch.zeros(3))
    for _ in range(50):
        with pytest.raises(ConfigError, match="does not fit the vectors") as caught:
            found.lookup_fromdlpack(keys, out, "m", 0)
        taken = [b"\xff" * size for size in range(30, 100) for _ in range(50)]  # what was freed is written over
        del caught, taken


def test_wrong_capsules_of_dlpack_are_refused(tmp_path: Path) -> None:
    found, pack = server(tmp_path), torch.utils.dlpack.to_dlpack
    used = pack(torch.zeros(4))
    torch.utils.dlpack.from_dlpack(used)
    for wrong in (used, 3, None, "x"):
        with pytest.raises(ConfigError, match="lookup_fromdlpack, output"):
            found.lookup_fromdlpack(pack(torch.tensor([0, 1])), wrong, "m", 0)
    for wrong in (torch.zeros(3), torch.zeros(4, dtype=torch.float64), torch.zeros(4, 2)[:, 0]):
        with pytest.raises(ConfigError, match="does not fit the vectors"):
            found.lookup_fromdlpack(pack(torch.tensor([0, 1])), pack(wrong), "m", 0)


def test_slots_of_an_earlier_table_are_removed(tmp_path: Path) -> None:
    rows = TableRows(np.arange(3), np.ones((3, 2), np.float32), np.arange(3))
    write_folder(tmp_path / "t", rows)
    assert (tmp_path / "t/slot_id").exists()
    write_folder(tmp_path / "t", TableRows(rows.keys[:1], rows.vectors[:1]))
    assert sorted(one.name for one in (tmp_path / "t").iterdir()) == ["emb_vector", "key"]


@pytest.mark.parametrize(
    "change", [{"mean": 1.0}, {"mean": [1.0]}, {"var": [1.0, None, 2.0]}, {"mean": [{}, 1.0, 2.0]},
               {"var": [float("nan"), 1.0, 2.0]}, {"mean": [True, 1.0, 2.0]}, {"mean": "abc"}],
)  # fmt: skip
def test_statistics_that_do_not_fit_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    """Torch would repeat a single number over all columns."""
    model = Model(Solver(batch_size=4, device="cpu"), Schema(labels=[{"name": "y"}], dense=[{"name": "d", "dim": 3}]))
    model.add(Input(label="y", dense="d"))
    model.add(DenseLayer("bn", "BatchNorm", bottom="d"))
    model.add(DenseLayer("logit", "InnerProduct", bottom="bn", num_output=1))
    model.add(DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["logit", "y"]))
    model.compile()
    file = tmp_path / "m_dense_1.model"
    np.ones(10, np.float32).tofile(file)
    right = {"type": "BatchNorm", "mean": [1.0, 2.0, 3.0], "var": [1, 1, 2]}
    for statistics in (right, right | change):
        Path(f"{file}.ntp.json").write_text(json.dumps({"layers": [statistics]}))
        if statistics == right:
            load_dense(model, str(file))
        else:
            with pytest.raises(VivianeError, match=r"one finite number per column|JSON"):
                load_dense(model, str(file))
    assert model.module.get_submodule("bn.norm").running_mean.tolist() == [1.0, 2.0, 3.0]
