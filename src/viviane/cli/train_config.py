"""The file behind `viviane train`: data, solver, optimizers, model, metrics, run folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from viviane.config import Adam, OptimizerSettings, Solver
from viviane.config.base import Settings, load_json
from viviane.core.digits import number_in
from viviane.core.errors import ConfigError, suggest
from viviane.core.json_files import json_or_text
from viviane.data import DataPasses, Dataset, NegativeDataset, Negatives
from viviane.data.negative_dataset import schema_with_negatives
from viviane.data.negatives import check_negatives
from viviane.data.streaming import KafkaStream
from viviane.model import Model, ModelFile, read_model_file
from viviane.model.nodes import Name
from viviane.schema import Schema
from viviane.zoo import ZOO, ZooModel

_FORMS = ("zoo", "nodes", "file")


class RunNegatives(Negatives):
    """Negatives that a run draws.

    Args:
        seen: folders or URLs of more data sets whose pairs of user and item are never drawn; those of the training rows
            never are, for the validation rows neither.
        validation: draw for the validation rows too. False: they have rows of label 0 of their own.
    """

    seen: tuple[str, ...] = ()
    validation: bool = True

    @model_validator(mode="after")
    def _check_run(self) -> RunNegatives:
        if self.seen and self.user is None:
            raise ValueError("seen are pairs of user and item: name the user's column")
        if not self.validation and self.column is not None:
            raise ValueError(f"the model reads {self.column!r} of validation rows too: leave out validation")
        return self

    def wrap(self, data: Dataset, *more: Dataset) -> NegativeDataset:
        """Return the data with negatives; pairs of `more` are not drawn either."""
        others = [*more, *(Dataset(url) for url in self.seen)] if self.user is not None else []
        return NegativeDataset(data, Negatives.from_dict(self.model_dump(exclude={"seen", "validation"})), others)


class DataConfig(Settings):
    """What a run reads.

    Args:
        train: folder or URL of a data set, or of a stream: kafka://host:9092/topic. A list of folders is trained on in
            passes, one after another in each epoch.
        validation: folder or URL of a data set; may be left out.
        negatives: to draw beside the rows, each of which is then a positive.
        stream_schema: of a stream's rows: schema.json, or a folder with it.
        stream_etl: instead, the etl.zip that a stream's raw rows go through.
    """

    train: Annotated[str, Field(min_length=1)] | Annotated[tuple[str, ...], Field(min_length=1)]
    validation: str | None = None
    negatives: RunNegatives | None = None
    stream_schema: str | None = None
    stream_etl: str | None = None

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        if self.negatives is not None and self.first.startswith("kafka://"):
            raise ValueError("negatives are drawn from the items of a data set, which a stream has not: leave them out")
        if self.negatives is not None and not isinstance(self.train, str):
            raise ValueError(
                "the keys of drawn negatives are not known before a pass: leave them out, or train on one folder"
            )
        if not isinstance(self.train, str) and any(one.startswith("kafka://") for one in self.train):
            raise ValueError("passes are data sets, not streams: name folders under train")
        return self

    @property
    def first(self) -> str:
        """The training rows, or the first sub-data-set of them."""
        return self.train if isinstance(self.train, str) else self.train[0]

    def open_validation(self) -> Dataset | None:
        """Open the validation rows, with negatives where the run draws them."""
        if self.validation is None:
            return None
        data = Dataset(self.validation)
        if self.negatives is None or not self.negatives.validation:
            return data
        return self.negatives.wrap(data, Dataset(self.first))

    def train_schema(self) -> Schema:
        """The schema of the training rows of a data set, negatives included; goes through no rows."""
        schema = Schema.load(self.first)
        if self.negatives is None:
            return schema
        check_negatives(self.negatives, schema)
        return schema_with_negatives(schema, self.negatives)

    def open_train(self) -> Dataset | DataPasses | KafkaStream:
        """Open the training rows.

        Raises:
            ConfigError: a schema or an ETL of a stream for data that are none.
            DataError, SchemaError: see `Dataset` and `KafkaStream`.
        """
        if not self.first.startswith("kafka://"):
            if self.stream_schema is not None or self.stream_etl is not None:
                fix = "leave it out: a data set has its own"
                raise ConfigError("stream_schema and stream_etl belong to a stream", where="data", fix=fix)
            if not isinstance(self.train, str):
                return DataPasses([Dataset(one) for one in self.train])
            data = Dataset(self.train)
            return data if self.negatives is None else self.negatives.wrap(data)
        from viviane.etl import FittedEtl

        schema = None if self.stream_schema is None else Schema.load(self.stream_schema)
        etl = None if self.stream_etl is None else FittedEtl.load(self.stream_etl)
        return KafkaStream.from_url(self.first, schema, etl=etl)


class TrainConfig(Settings):
    """A run, as one JSON file.

    Args:
        name: of the model.
        data: training and validation data sets.
        solver, optimizer, embedding_optimizer: as in Python.
        model: {"zoo": "dcn_v2", ...} with the model's own settings, {"nodes": [...]} with a whole graph, or
            {"file": "model.json"}, a graph that `Model.to_json` wrote.
        metrics: names; the first one leads. Left out: "auc" and "log_loss".
        run_folder: where the run's files go; left out: runs/<name>.

    Example:
        >>> config = TrainConfig.from_dict({"data": {"train": "d"}, "model": {"zoo": "dlrm", "dim": 8}})
        >>> config.recipe()
        DLRM(dim=8, ...)
    """

    name: Name = "model"
    data: DataConfig
    solver: Solver = Solver()
    optimizer: OptimizerSettings = Adam()
    embedding_optimizer: OptimizerSettings | None = None
    model: dict[str, Any]
    metrics: tuple[str, ...] | None = None
    run_folder: str | None = None

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        self.recipe()
        return self

    def recipe(self) -> ZooModel | ModelFile:
        """Return the validated content of `model`.

        Raises:
            ConfigError: naming the key and the nearest known one.
        """
        forms = [form for form in _FORMS if form in self.model]
        if len(forms) != 1:
            unknown = next(iter(self.model.keys() - set(_FORMS)), "")
            fix = suggest(unknown, _FORMS) if not forms and unknown else None
            allowed = '{"zoo": name, ...}, {"nodes": [...]} or {"file": path}'
            raise ConfigError("a model takes exactly one form", where="model", allowed=allowed, fix=fix)
        rest = {key: value for key, value in self.model.items() if key != forms[0]}
        if forms[0] == "zoo":
            return ZOO[str(self.model["zoo"])].from_dict(rest, where="model")
        if rest:
            fix = "leave it out; parameters belong to the nodes"
            raise ConfigError("unknown key beside the graph", where="model", value=next(iter(rest)), fix=fix)
        if forms[0] == "file":
            return read_model_file(str(self.model["file"]))
        return ModelFile.from_dict({"nodes": self.model["nodes"]}, where="model")

    def build(self, schema: Schema) -> Model:
        """Return the model, not yet compiled."""
        model = Model(self.solver, schema, name=self.name)
        recipe = self.recipe()
        if isinstance(recipe, ModelFile):
            model.nodes.extend(recipe.nodes)
        else:
            model.add(recipe)
        return model


def read_train_config(path: Path, changes: Sequence[str] = ()) -> TrainConfig:
    """Read a config file, after changes such as "solver.lr=0.01".

    Raises:
        ConfigError: the file or the change, the key and the nearest known one.
    """
    data = load_json(path)
    for change in changes:
        change_settings(data, change)
    try:
        return TrainConfig.from_dict(data, where=str(path))
    except ConfigError as error:
        for changed in [change.partition("=")[0] for change in changes]:
            if f"{error.where}.".startswith(f"{path}, {changed}."):
                where = f"--set {str(error.where).removeprefix(f'{path}, ')}"
                shown: dict[str, Any] = {} if error.value is None else {"value": error.value}
                raise ConfigError(error.what, where=where, fix=error.fix, **shown) from None
        raise


def change_settings(data: Any, change: str) -> None:
    """Put one value into nested data; JSON where it is JSON, else text."""
    path, equals, text = change.partition("=")
    if not equals or not path.strip("."):
        raise ConfigError("not a change", where="--set", value=change, allowed="path=value, such as solver.lr=0.01")
    value = json_or_text(text, where=f"--set {path}")
    *way, last = path.split(".")
    place = data
    for part in way:
        place = _step(place, part, path)
        if place is None:
            raise ConfigError("there is nothing to change below this", where=f"--set {path}", value=part)
    if isinstance(place, list):
        place[_index(place, last, path)] = value
    elif isinstance(place, dict):
        place[last] = value
    else:
        raise ConfigError("there is nothing to change below this", where=f"--set {path}", value=place)


def _step(place: Any, part: str, path: str) -> Any:
    if isinstance(place, list):
        return place[_index(place, part, path)]
    if isinstance(place, dict):
        if place.get(part) is None:
            place[part] = {}
        return place[part]
    return None


def _index(place: list[Any], part: str, path: str) -> int:
    number = number_in(part)
    if number is None or number >= len(place):
        allowed = f"a number below {len(place)}"
        raise ConfigError("no such element of the list", where=f"--set {path}", value=part, allowed=allowed)
    return number
