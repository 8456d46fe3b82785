"""Online learning: a stream of clicks whose taste drifts -> Kafka -> training -> publish -> a served model.

    # any Kafka broker, with topics "clicks" (one partition) and "ctr"
    python examples/online_learning.py --broker localhost:9092 --minutes 60

Each window of clicks is predicted by two served models before it is trained on: one follows the training, one is frozen
where the stream begins. Which ids are liked moves from window to window. Prints both AUCs of each window, and writes
them as a plot, online_learning.svg.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

import viviane as vv
from viviane.data.streaming import KafkaStream
from viviane.report.chart import Line, line_picture

NUM_USERS, NUM_ITEMS = 200, 400
SCHEMA = vv.Schema(
    labels=[{"name": "click"}],
    categorical=[{"name": "user", "num_ids": NUM_USERS}, {"name": "item", "num_ids": NUM_ITEMS}],
)


def clicks(window: float, rows: int, seed: int) -> dict[str, np.ndarray]:
    """Return clicks at a time: the taste of each user and the place of each item turn with it."""
    fixed, random = np.random.default_rng(0), np.random.default_rng(seed)
    users, items = fixed.uniform(0, 2 * np.pi, NUM_USERS), fixed.uniform(0, 2 * np.pi, NUM_ITEMS)
    speed = fixed.uniform(-0.15, 0.15, NUM_ITEMS)
    user, item = random.integers(3, NUM_USERS, rows), random.integers(3, NUM_ITEMS, rows)
    liked = 2.5 * np.cos(users[user] - items[item] - speed[item] * window)
    click = random.random(rows) < 1 / (1 + np.exp(-liked))
    return {"click": click.astype(np.float32), "user": user, "item": item}


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the area under the ROC curve."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores, kind="stable")] = np.arange(1, len(scores) + 1)
    positive = labels > 0.5
    count = int(positive.sum())
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * (len(labels) - count)))


def send(broker: str, topic: str, rows: dict[str, np.ndarray]) -> None:
    """Write rows to a topic, a JSON object each."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": broker})
    columns = {name: values.tolist() for name, values in rows.items()}
    for i in range(len(rows["click"])):
        producer.produce(topic, json.dumps({name: values[i] for name, values in columns.items()}), partition=0)
        producer.poll(0)
    if producer.flush(30):
        raise SystemExit("the broker did not confirm all clicks")


def build() -> vv.Model:
    """Return a small model that learns quickly."""
    model = vv.Model(vv.Solver(device="cpu", batch_size=256, lr=0.05), SCHEMA)
    model.add(vv.zoo.DeepFM(dim=8, deep_mlp=[16]))
    model.compile(vv.AdaGrad(lr=0.1))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--broker", required=True, help="host:port of Kafka")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--windows", type=int, help="end after so many windows, whatever the time")
    parser.add_argument("--rows", type=int, default=20_000, help="clicks of a window")
    parser.add_argument("--folder", type=Path, default=Path("online"))
    arguments = parser.parse_args()
    folder, address = arguments.folder, f"kafka://{arguments.broker}/ctr"
    model = build()
    vv.write_dataset(folder / "before", SCHEMA, [clicks(0.0, 4 * arguments.rows, 1)])
    model.fit(vv.Dataset(folder / "before"), epochs=2)
    model.save(folder / "models" / "1")
    publication = model.publish(address, outbox=folder / "outbox", every_s=1)
    tiers = {"cache": {"share": 0.5}, "host": {}, "updates": {"address": address, "visible": "publication"}}
    served = vv.InferenceSession(folder / "models", device="cpu", tables=tiers)
    frozen = vv.InferenceSession(folder / "models", device="cpu")
    end, window, sent = time.monotonic() + 60 * arguments.minutes, 0, 0
    lines: dict[str, list[tuple[float, float]]] = {"served, follows training": [], "frozen": []}
    while time.monotonic() < end and window != arguments.windows:
        window += 1
        rows = clicks(float(window), arguments.rows, 100 + window)
        for name, session in zip(lines, (served, frozen), strict=True):
            lines[name].append((window, auc(np.asarray(session.predict(rows)), rows["click"])))
        print(
            f"window {window}: " + ", ".join(f"{name} {points[-1][1]:.4f}" for name, points in lines.items()),
            flush=True,
        )
        send(arguments.broker, "clicks", rows)
        stream = KafkaStream(arguments.broker, "clicks", SCHEMA, start={0: sent}, end={0: sent + arguments.rows})
        model.fit(stream, epochs=1)
        sent += arguments.rows
        number = publication.publish()
        if not served.tables.updates.wait_for(number, 60):
            raise SystemExit("the served model has not followed within a minute")
    chart = line_picture([Line(name, points) for name, points in lines.items()], x_label="window", y_label="AUC")
    (folder / "online_learning.svg").write_text(chart)
    for name, points in lines.items():
        print(f"{name.split(',')[0]}: AUC {np.mean([value for _, value in points]):.4f}")
    publication.close()
    served.close()
    frozen.close()


if __name__ == "__main__":
    main()
