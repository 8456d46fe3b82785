"""From raw logs to a served answer: clean, train, save, serve, ask.

python examples/serve.py

The logs are made up here: some items sell better than others, and cheap ones better than dear ones. Any CSV or Parquet
log is read in the same way. The server is the one that `viviane serve shop/model` starts.
"""

import argparse
import json
import random
import shutil
import urllib.request
from pathlib import Path

import viviane as vv
from viviane.etl import EtlConfig, run
from viviane.serving import ModelEntry, RepositorySettings, SessionSettings
from viviane.serving.server import InferenceServer, ServerSettings

CONFIG = {
    "input": {
        "columns": [
            {"name": "bought", "type": "int"},
            {"name": "price", "type": "float"},
            {"name": "user"},
            {"name": "item"},
            {"name": "seen", "separator": "|"},
        ]
    },
    "labels": [{"name": "bought"}],
    "dense": [{"name": "price", "operators": [{"type": "fill", "value": 0}, {"type": "log"}]}],
    "categorical": [
        {"name": "user"},
        {"name": "item", "vocabulary": "items"},
        {"name": "seen", "kind": "multi_hot", "vocabulary": "items"},
    ],
}


def write_log(file: Path, rows: int) -> None:
    draw = random.Random(1)
    lines = ["bought,price,user,item,seen"]
    for _ in range(rows):
        item, price = draw.randrange(30), draw.uniform(1, 100)
        seen = [item, *draw.sample(range(30), 2)]
        bought = draw.random() < (0.8 if item < 10 else 0.2) * (1.2 - price / 100)
        lines.append(
            f"{int(bought)},{price:.2f},user{draw.randrange(50)},item{item},{'|'.join(f'item{one}' for one in seen)}"
        )
    file.write_text("\n".join(lines) + "\n")


def ask(url: str, rows: list[dict[str, object]]) -> list[float]:
    request = urllib.request.Request(
        f"{url}/v1/models/shop:predict", json.dumps({"instances": rows}).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)["predictions"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("shop"))
    parser.add_argument("--rows", type=int, default=20_000)
    options = parser.parse_args()
    folder = options.folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    write_log(folder / "log.csv", options.rows)
    run(EtlConfig.from_dict(CONFIG), folder / "log.csv", folder / "data")
    data = vv.Dataset(folder / "data" / "train")
    model = vv.Model(vv.Solver(batch_size=256, device="cpu"), data, name="shop")
    model.add(vv.zoo.DeepFM(dim=8, deep_mlp=[32]))
    model.compile(optimizer=vv.Adam(lr=1e-2), metrics=["auc"])
    model.fit(data, epochs=2)
    saved = model.save(folder / "model")

    entry = ModelEntry(name="shop", path=str(saved), session=SessionSettings(device="cpu"))
    settings = ServerSettings(http_port=0, grpc_port=0, inference=RepositorySettings(models=(entry,)))
    rows = [
        {"price": 20, "user": "user7", "item": "item3", "seen": "item3|item9"},
        {"price": 20, "user": "user7", "item": "item23", "seen": "item23|item9"},
        {"price": None, "user": "somebody new", "item": "an item never seen", "seen": None},
    ]
    with InferenceServer(settings) as server:
        answers = ask(server.http_url, rows)
    for row, answer in zip(rows, answers, strict=True):
        print(f"{answer:.3f}  {row}")
    with vv.InferenceSession(saved, device="cpu") as session:
        same = [float(one) for one in session.predict(rows)] == answers
    print(f"the bits of the session: {same}")


if __name__ == "__main__":
    main()
