"""From a data set to predictions on one screen: DCN, layer by layer.

Make data first:  viviane generate data --rows 200000 --valid-rows 20000
Then:             python examples/quickstart.py data
"""

import sys
from pathlib import Path

import viviane as vv

folder = Path(sys.argv[1])
data = vv.Dataset(folder / "train")  # Parquet, with the schema that the ETL wrote beside it
valid = vv.Dataset(folder / "valid")

model = vv.Model(vv.Solver(batch_size=1024, lr=1e-3), data, name="dcn")
model.add(vv.Input(label="label", dense="dense", sparse="cats"))
model.add(vv.SparseEmbedding("emb", bottom="cats", dim=16, combiner="sum"))
model.add(vv.DenseLayer("flat", "Reshape", bottom="emb", shape=[-1]))
model.add(vv.DenseLayer("x0", "Concat", bottom=["flat", "dense"]))
model.add(vv.DenseLayer("cross", "MultiCross", bottom="x0", num_layers=3))
model.add(vv.DenseLayer("deep", "MLP", bottom="x0", num_outputs=[256, 128], dropout=0.1))
model.add(vv.DenseLayer("both", "Concat", bottom=["cross", "deep"]))
model.add(vv.DenseLayer("logit", "InnerProduct", bottom="both", num_output=1))
model.add(vv.DenseLayer("loss", "BinaryCrossEntropyLoss", bottom=["logit", "label"]))
model.compile(optimizer=vv.Adam(lr=1e-3), metrics=["auc"])
model.summary()

model.fit(data, validation=valid, epochs=1)
print(model.evaluate(valid))
model.save(folder / "model")

again = vv.Model.load(folder / "model")
print(again.predict(valid)[:5])
