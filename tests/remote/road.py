"""The whole road on a store: data sets of two formats, damage, the ETL, training, a saved model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sample_rows import SCHEMA, columns_of, make_rows, rows_of

from viviane.config import Adam, Solver
from viviane.core.errors import ConfigError, RemoteError
from viviane.core.locations import RemotePath, location
from viviane.data import Dataset, write_dataset
from viviane.etl import EtlConfig, run
from viviane.model import Model
from viviane.zoo import DLRM


def whole_road(root: str, tmp_path: Path) -> None:
    rows = make_rows(100)
    for kind in ("parquet", "viviane"):
        url = f"{root}/sets/{kind}"
        for count in (50, 100):  # the second one replaces the first
            write_dataset(
                url, SCHEMA, [columns_of(rows[:count])], format=kind, rows_per_group=7, rows_per_file=21, overwrite=True
            )
            there = [row for batch in Dataset(url).reader(9) for row in rows_of(batch)]
            assert there == rows[:count]
    with pytest.raises(ConfigError, match="exists"):
        write_dataset(f"{root}/sets/parquet", SCHEMA, [columns_of(rows)])
    place = location(f"{root}/sets/parquet")
    assert isinstance(place, RemotePath)
    victim = next(one for one in place.files(recursive=True) if one.name == "part-00001.parquet")
    victim.write_bytes(victim.read_bytes()[:-9])
    published = (place / "published.json").read_text()
    if victim.parent.name in published:
        with pytest.raises(RemoteError, match="truncated"):
            Dataset(f"{root}/sets/parquet")
    text = "click,item\n" + "".join(f"{n % 2},i{n % 7}\n" for n in range(200))
    raw = location(f"{root}/raw/a.csv")
    assert isinstance(raw, RemotePath)
    raw.write_bytes(text.encode())
    config = EtlConfig(
        input={"columns": [{"name": "click", "type": "int"}, {"name": "item"}]},
        labels=[{"name": "click"}], categorical=[{"name": "item"}],
    )  # fmt: skip
    assert run(config, f"{root}/raw/*.csv", f"{root}/out").rows == {"train": 200}
    data = Dataset(f"{root}/out/train")
    model = Model(Solver(batch_size=32, seed=1, device="cpu"), data)
    model.add(DLRM(dim=4, bottom_mlp=[], top_mlp=[4, 1]) if not data.schema.dense else DLRM(dim=4))
    model.compile(Adam(lr=0.01))
    model.fit(data, run_folder=f"{root}/runs/a")
    model.save(f"{root}/runs/a/model")
    assert np.array_equal(Model.load(f"{root}/runs/a", device="cpu").predict(data), model.predict(data))
