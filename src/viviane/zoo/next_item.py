"""What the models of the next item have in common: lookups, the softmax over items, and the vectors for retrieval."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from viviane.core.errors import SchemaError
from viviane.model.nodes import DenseLayer, Node, SparseEmbedding
from viviane.schema import Schema
from viviane.zoo.recipe import ZooModel, begin
from viviane.zoo.roles import Names, Pair, history_pairs

_RAW_ID_BUCKETS = 2**20


class NextItemModel(ZooModel):
    """Base of the models that predict which item follows a history.

        u = encoder(h_1, ..., h_n) at the last place         "user_vector", (B, dim)
        v = the item's vector, of the same table              "item_vector", (B, dim)
        s = u . v / temperature                               the prediction of a row is sigmoid(s)

    With `cosine`, u and v are unit vectors. The loss is a softmax over items at each place of the history, see
    `viviane.nn.NextItemSoftmax`. `Model.tensor("user_vector", rows)` and "item_vector" give the vectors for retrieval.

    Args:
        history: the column of the items so far, oldest first; None takes the schema's sequence.
        item: the column of the item to predict, of the same vocabulary; None finds it by the vocabulary.
        softmax: "all" compares with every item, the best where the catalogue has up to some 100,000 items; "sampled"
            with the items of the batch, and those of `negatives`, corrected by how often they come up.
        targets: "every" trains each place of the history to predict the item after it, for one row a user; "last" the
            row's item alone, for a row for every event.
        negatives: for "sampled", a bag column of sampled items with max_length.
        rate: for "sampled", weight of the newest gap in the estimate of how often an item comes up.
        cosine: unit vectors; wants a temperature of 0.03 to 0.1.
        temperature: divides the scores.
        num_blocks: number of blocks.
        num_heads: attention heads of a block.
    """

    history: str | None = None
    item: str | None = None
    softmax: Literal["all", "sampled"] = "all"
    targets: Literal["every", "last"] = "every"
    negatives: str | None = None
    rate: float = Field(default=0.01, gt=0, le=1)
    cosine: bool = False
    temperature: float = Field(default=1.0, gt=0)
    num_blocks: int = Field(default=2, ge=1)
    num_heads: int = Field(default=2, ge=1)

    @model_validator(mode="after")
    def _check(self) -> NextItemModel:
        if self.dim % self.num_heads:
            raise ValueError(f"dim {self.dim} is not a multiple of num_heads {self.num_heads}")
        if self.negatives is not None and self.softmax == "all":
            raise ValueError("negatives are for softmax='sampled'; 'all' compares with every item")
        return self

    def encoder(self, x: str, schema: Schema) -> tuple[list[Node], str]:
        """Return the nodes from vectors (B, L, dim) to states (B, L, dim), and their output; "held" is the mask."""
        raise TypeError(f"{type(self).__name__} does not define encoder")

    def more_inputs(self, schema: Schema) -> dict[str, Names]:
        """Return groups of columns that the encoder reads as ids."""
        return {}

    def other_sequences(self) -> tuple[str, ...]:
        """Return sequence columns that are no histories."""
        return ()

    def pair(self, schema: Schema) -> Pair:
        """Return the columns of the history and of the item to predict.

        Raises:
            SchemaError: there is none, or a choice of several.
        """
        given = [self.history] if self.history else None
        if given is None and self.other_sequences():
            names = [one.name for one in schema.categorical if one.kind == "sequence"]
            given = [name for name in names if name not in self.other_sequences()] or None
        first, *more = history_pairs(schema, given, [self.item] if self.item else None)
        if more:
            value = ", ".join(one.name for one, _ in [first, *more])
            raise SchemaError("which column is the history?", value=value, fix="name it: history='clicked_items'")
        return first

    def nodes(self, schema: Schema) -> list[Node]:
        """Return the graph."""
        history, item = self.pair(schema)
        columns = (history.name, item.name, *((self.negatives,) if self.negatives else ()))
        if self.negatives is not None:
            bag = schema.categorical_column(self.negatives)
            if bag.table != item.table or bag.kind == "one_hot" or bag.max_length is None:
                fix = "give the column max_length and the item's vocabulary"
                raise SchemaError("sampled negatives are a bag of the item's ids", value=self.negatives, fix=fix)
        length = history.max_length or 0
        whole = {"all_rows": "table"} if self.softmax == "all" else {}
        nodes: list[Node] = [
            begin(schema, {"sequence": columns, **self.more_inputs(schema)}),
            SparseEmbedding(
                "emb", "sequence", self.dim, combiner="concat", mask="places", init=self.init,
                out_of_range=self.out_of_range, dynamic=self.dynamic, **whole,
            ),
            DenseLayer("held", "Slice", "places", ranges=[[0, length]]),
            DenseLayer("history", "Select", "emb", dim=1, index=list(range(length))),
        ]  # fmt: skip
        encoder, states = self.encoder(self._thin(nodes, "history", self.embedding_dropout), schema)
        nodes += encoder
        items, table = "emb", "table"
        if self.cosine:
            nodes += [DenseLayer(f"{one}_unit", "L2Normalize", one) for one in (states, items)]
            states, items = f"{states}_unit", f"{items}_unit"
            if self.softmax == "all":
                nodes.append(DenseLayer("table_unit", "L2Normalize", table))
                table = "table_unit"
        nodes += [
            DenseLayer("user_vector", "LastPlace", [states, "held"]),
            DenseLayer("item_vector", "Reshape", items, selected=[length]),
        ]
        inputs = ["user_vector", "item_vector", states, items, "places", "sequence"]
        params: dict[str, Any] = {"targets": self.targets, "temperature": self.temperature}
        if self.softmax == "all":
            inputs.append(table)
            reserved = 0 if item.num_ids is None else schema.reserved.first
            params |= {"candidates": "all", "first_item": reserved}
        else:
            first = 1 if self.targets == "every" else length
            counts = {"num_buckets": item.num_ids or _RAW_ID_BUCKETS, "rate": self.rate, "first_counted": first}
            nodes.append(DenseLayer("log_q", "LogFrequency", "sequence", params=counts))
            inputs.append("log_q")
        return [
            *nodes,
            DenseLayer("softmax", "NextItemSoftmax", inputs, params=params),
            DenseLayer("loss", "SampledSoftmaxLoss", ["softmax", "label"]),
        ]

    def _thin(self, nodes: list[Node], x: str, rate: float) -> str:
        """Append a dropout of x where there is one, and return the output."""
        if not rate:
            return x
        nodes.append(DenseLayer(f"{x}_drop", "Dropout", x, dropout_rate=rate))
        return f"{x}_drop"
