"""Train on a topic in every process that torchrun starts; rank 0 writes what it came to."""

import json
import sys
from pathlib import Path

import numpy as np

from viviane.config import Adam, Solver
from viviane.data import Dataset
from viviane.data.streaming import KafkaStream
from viviane.model import Model
from viviane.zoo import DLRM

if __name__ == "__main__":
    servers, topic, folder, most, resume = sys.argv[1:]
    data = Dataset(Path(folder) / "set")
    stream = KafkaStream(servers, topic, data.schema, end="now")
    model = Model(Solver(batch_size=16, seed=1, device="cpu", precision="fp32", max_steps=int(most)), data)
    model.add(DLRM(dim=4, bottom_mlp=[4], top_mlp=[4, 1]))
    model.compile(Adam(lr=0.01))
    history = model.fit(stream, run_folder=Path(folder) / "run", resume=resume == "resume")
    scores = model.predict(data)
    if model.trainer.group.rank == 0:
        np.save(Path(folder) / "scores.npy", scores)
        (Path(folder) / "end.json").write_text(json.dumps({"stopped": history.stopped, "step": model.trainer.step}))
