"""The layers on Keras' three backends: one process each runs `scenarios.py`, and these tests judge what it found."""

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

SCENARIOS = Path(__file__).parent / "scenarios.py"
# Each backend takes half a minute of a CPU; continuous integration runs the first.
BACKENDS = ("torch", pytest.param("jax", marks=pytest.mark.slow), pytest.param("tensorflow", marks=pytest.mark.slow))


@cache
def results(backend: str) -> dict[str, Any]:
    environment = {**os.environ, "KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1",
                   "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(SCENARIOS)], capture_output=True, text=True, env=environment, timeout=280, check=False
    )
    found = dict(json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT "))
    assert found, done.stderr[-3000:]
    return found


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    for library in ("keras", name):
        if find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    return name


def result(backend: str, name: str) -> Any:
    found = results(backend)
    assert name in found, f"the process ended before {name}"
    assert "error" not in found[name], found[name]["error"]
    return found[name]


# float32 values near 1: AdaGrad and Adam take roots of numbers that Keras rounds in another order.
@pytest.mark.parametrize(
    ("scenario", "steps", "bits"),
    [
        ("sgd", 50, True),
        ("adagrad", 50, False),
        ("adam", 50, False),
        ("sgd_twice", 10, True),
        ("schedule", 10, True),
        ("momentum", 10, False),
        ("rmsprop", 10, False),
        ("adamax", 10, False),
        ("adadelta", 10, False),
    ],
)
def test_steps_equal_those_of_the_stock_layer(backend: str, scenario: str, steps: int, bits: bool) -> None:
    found = result(backend, scenario)
    for form in ("layer", "fast"):
        one = found[form]
        assert one["updates"] == steps
        assert one["loss"] <= 1e-6
        assert one["rows"] <= 1e-6
        if bits and backend != "tensorflow":  # which rounds lr g before it subtracts; all others round once
            assert one["bits"]


def test_a_layer_called_twice_updates_once_a_step(backend: str) -> None:
    found = result(backend, "shared")["layer"]
    assert found["updates"] == 10
    assert found["loss"] <= 1e-6
    assert found["rows"] <= 1e-6


def test_callbacks_that_set_the_rate_reach_the_table(backend: str) -> None:
    found = result(backend, "rate_callback")
    assert found["rate"] == pytest.approx(0.025)
    assert found["own_rate"] == 0.5  # an array that a user assigns is taken where the layer follows no optimizer
    assert found["rows"] <= 1e-6


def test_ftrl_of_touched_rows_is_that_of_the_stock_layer(backend: str) -> None:
    assert result(backend, "ftrl")["rows"] <= 2e-6  # roots of n and of n + 2^-23


def test_epochs_and_single_batches(backend: str) -> None:
    found = result(backend, "epochs")
    assert found["updates"] == 13
    assert found["rate"] == pytest.approx(0.1)


def test_an_update_that_nothing_differentiates_raises(backend: str) -> None:
    lost = result(backend, "lost_update")
    assert "got no gradient" in lost["raised"]
    assert lost["updates"] == 0
    assert (
        "would not be updated" in (raised := result(backend, "undifferentiated")["raised"]) or "no gradient" in raised
    )


def test_nothing_is_updated_in_evaluation_and_frozen_layers(backend: str) -> None:
    assert result(backend, "evaluation") == {"same": True, "updates": 0}
    assert result(backend, "frozen") == {"same": True, "updates": 0}


def test_a_saved_model_goes_on_bit_by_bit(backend: str) -> None:
    found = result(backend, "saving")
    assert found["rows"]
    assert found["predictions"] == 0.0
    assert found["params"] == 400 * 4 + 3


def test_the_summary_counts_rows(backend: str) -> None:
    assert "1,603" in result(backend, "summary")["text"]


def test_rows_of_16_bits_train_and_are_saved(backend: str) -> None:
    assert result(backend, "sixteen_bits") == {"finite": True, "same": True, "type": "torch.bfloat16"}


def test_mixed_float16_divides_by_the_loss_scale(backend: str) -> None:
    for form, found in result(backend, "mixed").items():
        assert found["updates"] == 20, form
        assert found["rows"] < 2e-3, form  # gradients pass through float16
        assert found["loss"] < 5e-3, form


def test_dynamic_tables_take_64_bit_keys_or_refuse_to_cut_them(backend: str) -> None:
    found = result(backend, "dynamic")
    assert found["same_keys"]
    assert found["updates"] == 5
    assert ("JAX cuts 64-bit numbers" in found["refused"]) == (backend == "jax")


def test_bags_pool_as_by_hand(backend: str) -> None:
    found = result(backend, "bags")
    assert len(found) == 6
    assert max(found.values()) < 1e-6, found


def test_configurations_of_keras_rs_give_its_numbers(backend: str) -> None:
    found = result(backend, "keras_rs_configs")
    assert found["layer"] < 1e-5
    assert found["fast"] < 1e-5
    assert found["loaded"] == 0.0


def test_own_configurations_with_a_dynamic_table(backend: str) -> None:
    found = result(backend, "own_configs")
    assert found == {"keys": 20, "updates": 10}


def test_a_key_out_of_range_raises(backend: str) -> None:
    raised = result(backend, "out_of_range")["raised"]
    assert "key out of range" in raised
    assert "400" in raised


def test_l2_moves_touched_rows_alone(backend: str) -> None:
    assert result(backend, "regularizer")["rows"] == [1.0, 1.0, 0.75, 1.0, 1.0]


def test_layers_without_a_rate_take_that_of_the_model(backend: str) -> None:
    moved = [1.0, 1.0, 0.75, 1.0, 1.0]  # by the decay alone
    assert result(backend, "rate_of_the_model") == {"regularizer": moved, "settings": moved}


def test_the_fast_step_is_compiled_once_for_a_model(backend: str) -> None:
    found = result(backend, "fit_again")
    assert found["same"]
    assert found["compiled"] > 0
    if backend != "torch":  # which runs the step as it is
        assert found["new"] == 0


def test_jit_compile(backend: str) -> None:
    found = result(backend, "jit")
    if backend != "torch":  # on TensorFlow Keras leaves XLA off for the layer form, and says so
        assert found == {"layer": 2, "fast": 2}


def test_unaligned_memory_is_copied(backend: str) -> None:
    found = result(backend, "unaligned")
    assert backend != "tensorflow" or found["same"]


def test_a_data_set_of_vivianes_is_input_of_fit(backend: str) -> None:
    found = result(backend, "dataset")
    assert found["losses"][1] < found["losses"][0]
    assert found["fast"][0] < found["losses"][1]


def test_strings_by_keras_lookup(backend: str) -> None:
    found = result(backend, "strings")
    assert backend != "tensorflow" or found == {"updates": 1}


def test_a_step_that_lacks_one_of_its_gradients_raises(backend: str) -> None:
    assert "got no gradient" in result(backend, "partly_lost")["raised"]


def test_a_loop_without_training_raises_when_it_differentiates(backend: str) -> None:
    assert "was not in training" in result(backend, "outside_of_training")["raised"]


def test_a_step_that_is_differentiated_twice_raises(backend: str) -> None:
    assert "a gradient came for a lookup that does not wait" in result(backend, "persistent_tape")["raised"]


def test_several_devices_of_one_process_are_refused(backend: str) -> None:
    assert "several" in result(backend, "several_devices")["raised"]


def test_weights_in_memory_bring_the_rows_back(backend: str) -> None:
    found = result(backend, "weights_in_memory")
    assert found["own"] == [True, 0.0, 0.0]
    assert found["stock"] == [True, 0.0, 0.0]
    assert "without the rows" in found["refused"]


def test_early_stopping_restores_the_best_rows(backend: str) -> None:
    found = result(backend, "early_stopping")
    assert found.keys() == {"fixed layer", "fixed fast", "dynamic layer", "dynamic fast"}
    for form, (epochs, is_best, is_last) in found.items():
        assert 3 <= epochs < 9, form
        assert is_best, form
        assert not is_last, form


def test_weights_of_a_dynamic_table_are_its_keys_and_rows(backend: str) -> None:
    found = result(backend, "keys_and_rows")
    assert found["keys"]
    assert found["shape"] == [48, 4]
    assert found["again"] == found["kept"] == [[5, 7], [[1.0] * 4] * 2]
    assert "not a whole number" in found["messages"][0]
    assert "differ in their shapes" in found["messages"][1]
    assert "twice" in found["messages"][2]
    assert "more keys than the table may hold" in found["messages"][3]
    assert "keys are no array" in found["messages"][4]
    assert "rows are no array" in found["messages"][5]


def test_a_loaded_model_and_its_tables_have_one_rate(backend: str) -> None:
    assert result(backend, "rate_after_loading") == {"same": True, "updates": 1}


def test_eager_steps_and_several_steps_a_call(backend: str) -> None:
    for way, found in result(backend, "ways_to_run").items():
        assert found["rows"] <= 1e-6, way
        assert found["updates"] == 6, way


def test_the_fast_form_has_the_figures_of_fit(backend: str) -> None:
    found = result(backend, "fast_metrics")
    assert found["rows"] <= 1e-6
    assert set(found["logs"]) == {"loss", "mae", "val_loss", "val_mae"}
    assert max(found["logs"].values()) <= 1e-6


def test_computed_keys_have_the_figures_of_given_ones(backend: str) -> None:
    found = result(backend, "computed_keys")
    assert found["column"] == 0
    # With Hashing JAX runs the step eagerly, and XLA rounds sums of a compiled one in another order.
    assert found.get("hash", 0) <= (1e-6 if backend == "jax" else 0)


def test_a_64_bit_key_is_not_cut(backend: str) -> None:
    for way, raised in result(backend, "wide_keys").items():
        assert ("would be cut to 32" if backend == "jax" else "key out of range") in raised, way
        assert "4294967297" in raised


BAD_KEYS = {
    "fraction": ("a key is not a whole number", "row 1 of the batch, column 1", "1.5"),
    "nan": ("a key is NaN", "row 1 of the batch, column 2", "nan"),
    "infinity": ("a key is infinite", "row 0 of the batch, column 1", "-inf"),
    "rounded": ("a key may have been rounded", "row 1 of the batch, column 0", "16777216.0"),
    "double": ("a key is not a whole number", "row 0 of the batch, column 2", "2.5"),
    "rounded_double": ("a key may have been rounded", "row 0 of the batch, column 2", "9007199254740992.0"),
    "half": ("a key may have been rounded", "row 0 of the batch, column 2", "2048.0"),
    "unsigned": ("a key is beyond 64 bits", "row 0 of the batch, column 2", "9223372036854775813"),
    "truth": ("keys are whole numbers", "layer 'embedding", "'bool'"),
    "text": ("keys are whole numbers", "layer 'embedding", "str"),
    "object": ("keys are whole numbers", "layer 'embedding", "'object'"),
    "complex": ("keys are whole numbers", "layer 'embedding", "'complex64'"),
    "out_of_range": ("key out of range", "'embedding", "400"),
    "negative": ("key out of range", "'embedding", "-1"),
}


@pytest.mark.parametrize("name", BAD_KEYS)
def test_keys_that_are_no_whole_numbers_are_refused(backend: str, name: str) -> None:
    found = result(backend, "refused_keys")
    for way, raised in found.items():
        if name not in raised and way != "eager":  # a type that the framework's tensors do not have
            assert name in ("text", "object", "unsigned", "double", "rounded_double"), way
            continue
        for part in (*BAD_KEYS[name], "do:"):
            assert part in raised[name], way
    assert {"fraction", "nan", "infinity", "rounded", "negative", "out_of_range"} <= set(found["traced"])


def test_training_with_such_keys_changes_nothing(backend: str) -> None:
    for form, found in result(backend, "refused_in_training").items():
        assert "a key is not a whole number" in found["raised"], form
        assert found["same"], form


def test_every_type_that_holds_keys_is_taken(backend: str) -> None:
    assert result(backend, "taken_keys")["wrong"] == []


def test_floats_beside_large_integers(backend: str) -> None:
    found = result(backend, "mixed_types")
    assert found["same"]
    assert "feature 'b'" in found["raised"]
    assert "3.5" in found["raised"]


def test_options_of_fit_give_the_figures_of_the_stock_layer(backend: str) -> None:
    found = result(backend, "fit_options")
    assert len(found) == (16 if backend == "torch" else 7)
    for name, one in found.items():
        assert one["layer"] <= 1e-6, name
        assert one["fast"] <= 1e-6, name
        assert one["seen"] <= 1e-6, name
    assert found["early_stop"]["epochs"] == 2


def test_options_that_cannot_be_are_refused(backend: str) -> None:
    found = result(backend, "fit_refusals")
    assert len(found) == 36
    for name, raised in found.items():
        assert raised, f"{name}: nothing was raised"
        assert not raised.startswith("NOT OURS"), name
        assert any(part in raised for part in ("  do:", "  allowed:")), name


def test_rows_that_a_model_does_not_use_raise(backend: str) -> None:
    """JAX dropped the lookup, and with it its error: nothing was trained, and nothing said so."""
    for where, raised in result(backend, "unused_output").items():
        assert "got no gradient" in raised, where


def test_files_of_weights_load_into_another_model(backend: str) -> None:
    """The table's name is the layer's, by which rows were not found."""
    found = result(backend, "files_of_weights")
    assert found["names"]
    assert found["own"] == found["stock"] == found["memory"] == 0.0
    assert ".keras" in found["hdf5"]


def test_weights_of_a_bag_are_an_input(backend: str) -> None:
    assert result(backend, "weighted_bag")["row"] == [3.5] * 4


def test_batches_of_torch_in_both_forms(backend: str) -> None:
    assert result(backend, "batches_of_torch")["same"]


def test_ragged_and_sparse_keys_are_refused(backend: str) -> None:
    found = result(backend, "uneven_rows")
    assert set(found) == {"Embedding", "EmbeddingBag"}
    assert all("to_tensor" in one for one in found.values())


def test_a_sequential_in_both_forms(backend: str) -> None:
    found = result(backend, "sequential")
    assert found["same"]
    assert "as one list" in found["raised"]


def test_files_that_keras_or_others_have_changed_are_refused(backend: str) -> None:
    """Rows of another type were converted: complex ones lost a half, fractions of whole ones were zero."""
    found = result(backend, "crafted_files")
    for kind in ("int64", "complex64", "float64", "bool"):
        assert "another type" in found[kind]
    assert "lacks a part" in found["missing"]
    assert all("made" not in one for one in found.values())


def test_the_fast_form_follows_the_graph_around_its_layers(backend: str) -> None:
    """Keys that are columns of inputs, and vectors that one layer joins, take shorter ways with the same figures."""
    found = result(backend, "ways_through_graphs")
    # XLA and TensorFlow may add up the products of a Dense layer in another order where its input is made otherwise.
    most = 0.0 if backend == "torch" else 1e-6
    assert all(apart <= most for apart in found["apart"].values()), found["apart"]
    assert "another shape" in found["shape"]
    assert "'ids'" in found["shape"]
    assert "one for each feature" in found["matrix"]


def test_subclassed_models_train_and_load(backend: str) -> None:
    """On torch Keras traced them with tables that could not be made there yet, and loaded no rows."""
    found = result(backend, "subclassed")
    assert found["apart"] <= 1e-6
    assert found["loaded"] == {"stock": 0.0, "own": 0.0}
    assert "no gradient reaches" in found["raised"]  # such rows stayed as they were when the step was compiled
    assert found["shape"] == [400, 4]


def test_options_of_the_stock_layer(backend: str) -> None:
    found = result(backend, "options_of_the_stock_layer")
    assert "no effect" in found["input_length"]
    assert found["none"] == ""
    assert "'lora_rank'" in found["lora_rank"]
    assert "allowed: float32, float16, bfloat16" in found["dtype"]


def test_keys_of_the_rank_that_keras_takes(backend: str) -> None:
    found = result(backend, "rank_of_keys")
    assert found["same"]
    assert "to_tensor" in found["ragged"]


def test_a_stock_copy_predicts_the_same(backend: str) -> None:
    found = result(backend, "stock_copies")
    assert found["apart"].keys() == {"embedding", "bags", "distributed"}
    for kind, apart in found["apart"].items():
        assert len(apart) == (3 if backend == "tensorflow" else 2)
        assert max(apart) <= 1e-6, kind  # means are sums in another order
    assert "dynamic table" in found["refused"][0]
    assert "out_of_range='hash'" in found["refused"][1]
