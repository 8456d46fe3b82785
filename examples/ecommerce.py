"""E-commerce behaviour: will what a visitor puts into the cart be bought? Sessions, crosses, target encoding, DLRM.

    python examples/ecommerce.py                          generated events in the format of the public set
    python examples/ecommerce.py --data 2019-Oct.csv.gz   the public set's months: "eCommerce behavior data from
                                                          multi category store" (REES46)

Events are: event_time, event_type (view, cart, purchase), product_id, category_id, category_code, brand, price,
user_id, user_session. The training loop is written out by hand.
"""

import argparse
from pathlib import Path

import ecommerce_events
import viviane as vv
import viviane.etl

parser = argparse.ArgumentParser(description="E-commerce behaviour with DLRM.")
parser.add_argument("--data", nargs="+", type=Path, help="months of events, CSV, gzip or not, the oldest first")
parser.add_argument("--folder", type=Path, default=Path("ecommerce"), help="where everything is written")
parser.add_argument("--users", type=int, default=1000, help="users to generate where there is no data")
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--device", default="cpu", help="cpu or cuda")
arguments = parser.parse_args()
folder = arguments.folder
folder.mkdir(parents=True, exist_ok=True)

files = arguments.data
if files is None:
    files = [ecommerce_events.generate(folder / "events.csv", arguments.users)]

# 1. Events to rows: one for each product that a user put into the cart within a session, which ends with half an hour's
#    pause. Whether it was bought follows from the session's events; everything else is known when it is put there.
TEXT = [{"name": name} for name in ("event_type", "category_code", "brand")]
NUMBERS = [{"name": name, "type": "int"} for name in ("product_id", "user_id")]
events = viviane.etl.SequenceConfig(
    input={"columns": [
        *TEXT, *NUMBERS, {"name": "event_time", "type": "timestamp"}, {"name": "price", "type": "float"},
    ]},
    by=["user_id", "product_id"],
    order_by="event_time",
    gap=1800,
    columns=[
        {"name": "carted", "source": "event_type", "take": "count", "where": {
            "column": "event_type", "keep": "==", "value": "cart"}},
        {"name": "bought", "source": "event_type", "take": "count", "where": {
            "column": "event_type", "keep": "==", "value": "purchase"}},
        {"name": "time", "source": "event_time", "take": "first"},
        *({"name": name, "take": "first"} for name in ("category_code", "brand", "price")),
    ],
)  # fmt: skip
print(viviane.etl.sequences(events, files, folder / "carts", overwrite=True))

# 2. Features, learned on the earlier rows only. Crosses are hashed: no vocabulary of pairs is kept.
HASH = {"type": "hash", "num_ids": 10_000}
BY_USER = {"by": "user_id", "order_by": "time"}
config = viviane.etl.EtlConfig(
    input={"columns": [
        {"name": "user_id", "type": "int"}, {"name": "product_id", "type": "int"}, {"name": "category_code"},
        {"name": "brand"}, {"name": "price", "type": "float"}, {"name": "time", "type": "timestamp"},
        {"name": "carted", "type": "int"}, {"name": "bought", "type": "int"},
    ]},
    filters=[{"column": "carted", "keep": ">", "value": 0}],
    derived=[
        {"type": "date_part", "name": "hour", "source": "time", "part": "hour"},
        {"type": "date_part", "name": "weekday", "source": "time", "part": "weekday"},
        {"type": "difference_lag", "name": "since", "source": "time", **BY_USER},
        {"type": "history", "name": "earlier", "source": "product_id", "last": 10, **BY_USER},
        {"type": "history", "name": "owned", "source": "brand", "last": 5, **BY_USER,
         "where": {"column": "bought", "keep": ">", "value": 0}},
        {"type": "count", "name": "popularity", "by": "product_id"},
        {"type": "target_encode", "name": "brand_rate", "by": "brand", "target": "purchase"},
        {"type": "target_encode", "name": "user_rate", "by": "user_id", "target": "purchase"},
        {"type": "target_encode", "name": "brand_hour_rate", "by": ["brand", "hour"], "target": "purchase"},
    ],
    labels=[{"name": "purchase", "source": "bought", "operators": [{"type": "threshold", "at": 1}]}],
    dense=[
        {"name": "price", "operators": [{"type": "log"}, {"type": "standardize"}, {"type": "fill", "value": 0}]},
        {"name": "since", "operators": [{"type": "log"}, {"type": "standardize"}, {"type": "fill", "value": 0}]},
        {"name": "popularity", "operators": [{"type": "log"}]},
        *({"name": name} for name in ("brand_rate", "user_rate", "brand_hour_rate")),
    ],
    categorical=[
        {"name": "user_id", "encoding": {"type": "categorify", "min_count": 3}},
        {"name": "product_id", "vocabulary": "product"},
        {"name": "earlier", "kind": "multi_hot", "max_length": 10, "vocabulary": "product"},
        {"name": "brand", "vocabulary": "brand"},
        {"name": "owned", "kind": "multi_hot", "max_length": 5, "vocabulary": "brand"},
        *({"name": name} for name in ("category_code", "hour", "weekday")),
        {"name": "brand_category", "source": ["brand", "category_code"], "encoding": HASH},
        {"name": "brand_weekday", "source": ["brand", "weekday"], "encoding": HASH},
    ],
)  # fmt: skip
(folder / "etl.svg").write_text(viviane.etl.picture(config))
summary = viviane.etl.run(
    config, folder / "carts", folder / "data", split="time:time:train=0.8,test=0.2", overwrite=True
)
train, test = vv.Dataset(folder / "data" / "train"), vv.Dataset(folder / "data" / "test")
print(f"rows {summary.rows}, ids {summary.num_ids}")

# 3. DLRM, step by step: the same numbers as model.fit, with room for whatever has to happen between two steps.
LEARNING_RATE = 3e-3
steps = -(-len(train) // arguments.batch_size) * arguments.epochs
solver = vv.Solver(batch_size=arguments.batch_size, lr=LEARNING_RATE, device=arguments.device)
model = vv.Model(solver, train, name="dlrm")
model.add(vv.zoo.DLRM(dim=8, bottom_mlp=[64], top_mlp=[64, 32], init={"type": "normal", "std": 0.05}))
model.compile(vv.Adam(), metrics=["auc"])
trainer = model.trainer
for epoch in range(arguments.epochs):
    total = 0.0
    with trainer.switches(), train.reader(arguments.batch_size, shuffle=True, seed=0, epoch=epoch) as reader:
        for batch in reader:
            decayed = LEARNING_RATE * (1 - trainer.step / steps)
            total += float(trainer.train_step(batch, lr=decayed))
    print(f"epoch {epoch}: loss {total / len(reader):.4f}, test AUC {model.evaluate(test)['auc']:.4f}")
model.save(folder / "dlrm")
print(f"DLRM: AUC {model.evaluate(test)['auc']:.4f}")
