"""Criteo click logs, from raw text to AUC, with DCN and DLRM.

    python examples/criteo.py                                  generated logs in Criteo's format: a minute to see it run
    python examples/criteo.py --data train.txt --min-count 10  the Kaggle contest's file, or days of the 1 TB set

A line is: label, 13 numbers, 26 categories in hexadecimal, separated by tabs, without a header.
"""

import argparse
from pathlib import Path

import viviane as vv
import viviane.etl
from viviane.data.synthetic import SyntheticConfig, generate

parser = argparse.ArgumentParser(description="Criteo with DCN and DLRM.")
parser.add_argument("--data", nargs="+", type=Path, help="files in Criteo's format, gzip or not, the oldest first")
parser.add_argument("--folder", type=Path, default=Path("criteo"), help="where everything is written")
parser.add_argument("--rows", type=int, default=200_000, help="rows to generate where there is no data")
parser.add_argument("--min-count", type=int, default=6, help="rarer categories become one unknown id")
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--device", default="cpu", help="cpu or cuda")
arguments = parser.parse_args()
folder = arguments.folder

files = arguments.data
if files is None:
    raw = folder / "raw.txt"
    if not raw.exists():
        folder.mkdir(parents=True, exist_ok=True)
        settings = SyntheticConfig(rows=arguments.rows, num_dense=13, num_categorical=26, seed=1)
        print(f"generated logs: no model can exceed AUC {generate(settings, raw, 'criteo').best_auc:.4f}")
    files = [raw]

# Clean: numbers become logarithms, categories become ids by falling count. The last tenths are newer than the first.
config = viviane.etl.criteo(min_count=arguments.min_count)
summary = viviane.etl.run(config, files, folder / "data", split="rows:train=0.8,valid=0.1,test=0.1", overwrite=True)
print(f"rows {summary.rows}, ids {sum(summary.num_ids.values()):,}")
train, valid, test = (vv.Dataset(folder / "data" / part) for part in ("train", "valid", "test"))

models = {
    "DCN": vv.zoo.DCN(dim=16, num_cross_layers=3, deep_mlp=[128, 64]),
    "DLRM": vv.zoo.DLRM(dim=16, bottom_mlp=[64, 32], top_mlp=[128, 64]),
}
for name, recipe in models.items():
    solver = vv.Solver(batch_size=arguments.batch_size, lr=2e-3, epochs=arguments.epochs, device=arguments.device)
    model = vv.Model(solver, train, name=name.lower())
    model.add(recipe)
    model.compile(vv.Adam(), metrics=["auc", "log_loss"])
    model.fit(train, validation=valid)
    result = model.evaluate(test)
    model.save(folder / name.lower())
    print(f"{name}: AUC {result['auc']:.4f}, log loss {result['log_loss']:.4f}")
