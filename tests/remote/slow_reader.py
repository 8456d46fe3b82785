"""Read a topic slowly; after each batch, a line with its rows and the place of the next one. Made to be killed."""

import json
import sys
import time
from pathlib import Path

from viviane.data.streaming import KafkaStream
from viviane.schema import Schema

if __name__ == "__main__":
    servers, topic, schema, out = sys.argv[1:]
    reader = KafkaStream(servers, topic, Schema.load(Path(schema)), end="now").reader(16)
    with Path(out).open("a") as file:
        for batch in reader:
            file.write(json.dumps({"xs": batch.dense[:, 0].int().tolist(), "state": reader.state()}) + "\n")
            file.flush()
            time.sleep(0.02)
