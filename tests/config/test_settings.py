import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from viviane.config import SGD, AdaGrad, Adam, Settings, Solver, load_json
from viviane.config.optimizers import optimizer_from_dict
from viviane.core.errors import ConfigError


class Inner(Settings):
    width: int = 1


class Outer(Settings):
    name: str
    inner: Inner = Inner()
    items: tuple[Inner, ...] = ()
    optimizer: SGD | Adam | None = None


def message(**data: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        Outer(**data)
    return str(caught.value)


def test_an_unknown_key_is_answered_with_the_nearest_at_its_level() -> None:
    assert message(name="a", iner={}).endswith("where:   iner\n  value:   {}\n  do:      did you mean 'inner'?")
    text = message(name="a", inner={"widht": 2})
    assert "Outer: unknown key\n  where:   inner.widht" in text
    assert "did you mean 'width'?" in text
    assert "where:   items.1.with\n" in message(name="a", items=[{}, {"with": 1}])


def test_missing_and_wrong_values_are_named() -> None:
    assert message() == "Outer: a required key is missing\n  where:   name"
    text = message(name="a", inner={"width": "wide"})
    assert "where:   inner.width\n  value:   'wide'" in text


def test_further_problems_are_counted() -> None:
    assert "(and 1 more problem(s))" in message(name=1, inner={"width": "wide"})


def test_settings_are_frozen_and_equal_by_value() -> None:
    one = Outer(name="a")
    with pytest.raises(ValidationError, match="frozen"):
        one.name = "b"  # type: ignore[misc]
    assert one == Outer(name="a")
    assert Outer.from_dict(one.to_dict()) == one


@pytest.mark.parametrize("lr", [float("nan"), float("inf"), 0.0, -1.0])
def test_learning_rates_are_positive_and_finite(lr: float) -> None:
    with pytest.raises(ConfigError, match="where:   lr"):
        Solver(lr=lr)


def test_solver_refuses_contradictions() -> None:
    with pytest.raises(ConfigError, match=r"end_lr \(0\.1\) must not exceed lr \(0\.01\)"):
        Solver(lr=0.01, end_lr=0.1)
    with pytest.raises(ConfigError, match="class_weights must not be negative"):
        Solver(class_weights=(1.0, -1.0))


def test_optimizers_are_chosen_by_type() -> None:
    assert optimizer_from_dict({"type": "adam", "lr": 0.5}) == Adam(lr=0.5)
    assert optimizer_from_dict({"type": "adagrad", "epsilon": 1.0}) == AdaGrad(epsilon=1.0)
    with pytest.raises(ConfigError, match="'sgd', 'adagrad', 'rmsprop', 'adam', 'adamw'"):
        optimizer_from_dict({"type": "adamx"})
    with pytest.raises(ConfigError) as caught:
        optimizer_from_dict({"type": "adam", "bet1": 0.5}, where="config.json")
    assert "config.json, adam.bet1" in str(caught.value)
    assert "did you mean 'beta1'?" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": 1, "a": 2}', r"the same key occurs twice(.|\n)*value:   'a'"),
        ('{"a": NaN}', r"not a JSON number(.|\n)*'NaN'"),
        ('{"a": 1,\n "b" 2}', r"not valid JSON: .*(.|\n)*line 2, column 6"),
        ("", "line 1, column 1"),
    ],
)
def test_json_is_strict(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem) as caught:
        load_json(path)
    assert str(path) in str(caught.value)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    for absent in ("absent.json", "absent.yaml"):
        with pytest.raises(ConfigError, match=r"(?s)no such file.*absent"):
            load_json(tmp_path / absent)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read the JSON file"):
        load_json(tmp_path / "binary.json")


def test_settings_come_back_from_their_file(tmp_path: Path) -> None:
    solver = Solver(batch_size=16, class_weights=(1.0, 3.0), target={"auc": 0.8})
    (tmp_path / "solver.json").write_text(json.dumps(solver.to_dict()))
    assert Solver.from_json_file(tmp_path / "solver.json") == solver


class Section(Settings):
    epochs: int = 1
    lr: float = 0.1


class OtherSection(Settings):
    lr: float = 0.1
    decay: float = 0.0


class Sections(Settings):
    name: str = ""
    metrics: tuple[str, ...] = ()
    solver: Section = Section()
    optimizer: Section | OtherSection = Section()


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({"epochs": 2}, "did you mean solver.epochs or optimizer.epochs?"),
        ({"learning_rate": 1.0}, "did you mean solver.lr or optimizer.lr?"),
        ({"solver": {"metrics": ["auc"]}}, "did you mean 'metrics' at the top level?"),
        ({"solver": {"decay": 0.5}}, "did you mean optimizer.decay?"),
        ({"solver": {"epoch": 2}}, "did you mean 'epochs'?"),
        ({"metric": ["auc"]}, "did you mean 'metrics'?"),
        ({"nonsense": 1}, "choose one of: metrics, name, optimizer, solver"),
    ],
)
def test_a_key_of_another_section_is_sent_there(given: dict[str, object], advice: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Sections.from_dict(given)
    assert caught.value.fix == advice
