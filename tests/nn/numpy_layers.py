"""Every layer once more, in plain NumPy and float64: (inputs, weights, parameters) -> outputs."""

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(z, small=0.0):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / (e.sum(-1, keepdims=True) + small)


def softplus(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def linear(x, w, b=0.0):
    return np.einsum("...k,nk->...n", x, w) + b


def mlp(x, w, p):
    for name in sorted({int(key.split(".")[1]) for key in w}):
        a, b = w[f"layers.{name}.weight"], w[f"layers.{name}.bias"]
        if a.ndim == 1:  # a layer norm, which stands between a product and its activation
            x = np.maximum(layer_norm(x, a, b), 0)
            continue
        x = linear(x, a, b)
        is_output = p.get("activations", ["relu"])[-1] == "none" and len(a) == p["num_outputs"][-1]
        if not is_output and not p.get("layer_norm"):
            x = np.maximum(x, 0)
    return x


def layer_norm(x, gamma, beta):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return gamma * (x - mean) / np.sqrt(var + 1e-5) + beta


def multi_cross(x, w, p):
    x0 = x
    for i in range(p["num_layers"]):
        a, b = w[f"weights.{i}"], w[f"biases.{i}"]
        if p.get("projection_dim"):
            x = x0 * (linear(linear(x, w[f"projections.{i}"]), a) + b) + x
        elif p.get("full_rank"):
            x = x0 * linear(x, a, b) + x
        else:
            x = x0 * (x * a).sum(1, keepdims=True) + b + x
    return x


def fm(x, d):
    e = x.reshape(len(x), -1, d)
    s = e.shape[1]
    return sum((e[:, i] * e[:, j] for i in range(s) for j in range(i)), np.zeros((len(x), d)))


def interaction(inputs, p):
    z = inputs[-1] if len(inputs) == 1 else np.concatenate([inputs[0][:, None], inputs[1]], 1)
    columns = [(z[:, i] * z[:, j]).sum(1) for i in range(z.shape[1]) for j in range(i)]
    parts = [np.stack(columns, 1)]
    parts = [inputs[0], *parts] if len(inputs) == 2 else parts
    return np.concatenate([*parts, np.zeros((len(z), int(p.get("pad", True))))], 1)


def reshape(x, p):
    slots = p.get("selected_slots") or (p.get("selected") if isinstance(p.get("selected"), list) else None)
    if slots is not None:
        return np.concatenate([x[:, slot] for slot in slots], 1)
    if "shape" in p:
        return x.reshape(len(x), *p["shape"])
    return x.reshape(-1, *([p["time_step"]] if "time_step" in p else []), p["leading_dim"])


def attention(inputs, p):
    heads = p.get("num_attention_heads", 1)
    if len(inputs) == 2:
        a, b = inputs
        if p.get("transpose_b"):
            return np.einsum("bhmd,bhkd->bhmk", a, b)
        product = np.einsum("bhmk,bhkd->bhmd", a, b)
        return np.concatenate(list(product.transpose(1, 0, 2, 3)), -1)
    q, k, v = inputs[:3]
    d = q.shape[-1] // heads
    results, all_scores, values = [], [], []
    for head in range(heads):
        part = slice(head * d, (head + 1) * d)
        scores = np.einsum("bqd,bkd->bqk", q[..., part], k[..., part])
        all_scores.append(scores)
        values.append(v[..., part])
        z = scores / np.sqrt(d)
        if len(inputs) == 4:
            z = z - 10000 * (1 - inputs[3][:, 0])
        results.append(softmax(z, 1e-6) @ v[..., part])
    if p.get("scores"):
        return [np.stack(all_scores, 1), np.stack(values, 1)]
    return np.concatenate(results, -1)


def sequence_mask(inputs, p):
    b = len(inputs[0])
    if len(inputs) == 1:
        out = np.zeros((b, 1, 1, p["max_sequence_len"]))
        for i in range(b):
            out[i, 0, 0, : int(inputs[0][i, 0])] = 1
        return out
    out = np.zeros((b, 1, p["max_sequence_len_from"], p["max_sequence_len_to"]))
    for i in range(b):
        out[i, 0, : int(inputs[0][i, 0]), : int(inputs[1][i, 0])] = 1
    return out


def gru(x, w, p):
    n = p["num_output"]
    flat = x.ndim == 2
    x = x.reshape(len(x), p["SeqLength"], p["vector_size"]) if flat else x
    h, states = np.zeros((len(x), n)), []
    for t in range(x.shape[1]):
        a, u = linear(x[:, t], w["weight"], w["bias"]), linear(h, w["recurrent"])
        r, z = sigmoid(a[:, :n] + u[:, :n]), sigmoid(a[:, n : 2 * n] + u[:, n : 2 * n])
        h = (1 - z) * np.tanh(a[:, 2 * n :] + r * u[:, 2 * n :]) + z * h
        states.append(h)
    out = np.stack(states, 1)
    return out.reshape(len(x), -1) if flat else out


def dice(x, w, p):
    mean, var = (w["running_mean"], w["running_var"]) if "factor" in p else (x.mean(0), (x**2).mean(0) - x.mean(0) ** 2)
    s = sigmoid((x - mean) / np.sqrt(var + 1e-5))
    return s * x + (1 - s) * p["elu_alpha"] * x


def group_fused(x, w, p):
    for i, _ in enumerate(p["num_outputs"]):
        x = linear(x, w[f"layers.{i}.weight"], w[f"layers.{i}.bias"])
        if i + 1 < len(p["num_outputs"]) or p.get("last_act_type", "relu") == "relu":
            x = np.maximum(x, 0)
    return x


def multi_cross_entropy(z, y, p):
    total = 0.0
    for b in range(len(z)):
        for j, t in enumerate(p["target_weight_vec"]):
            if y[b, j] >= -0.5:
                total += t * (softplus(z[b, j]) - y[b, j] * z[b, j])
    return total / z.size


def cross_entropy(z, y):
    return -np.mean([np.log(softmax(z))[b, int(y[b, 0])] for b in range(len(z))])


def product(inputs):
    out = inputs[0]
    for one in inputs[1:]:
        out = out * one
    return out


def matrix_multiply(a, b):
    return np.einsum("bn,bnk->bk", a, b) if (a.ndim, b.ndim) == (2, 3) else np.matmul(a, b)


def weight_multiply(x, w):
    return np.stack([np.concatenate([v * row for v, row in zip(r, w, strict=True)]) for r in x])


def mean_places(x, held):
    return np.stack([one[h > 0].mean(0) if h.any() else 0 * one[0] for one, h in zip(x, held, strict=True)])


def time_embedding(x, times, w, p):
    out = x.copy()
    for b, i in np.ndindex(times.shape):
        if times[b, i] != -(2.0**63) and times[b, -1] != -(2.0**63):
            age = int(max(times[b, -1] - times[b, i], 0)) // p["unit"]
            out[b, i] += w[min((1 + age).bit_length() - 1, p["num_buckets"] - 1)]
    return out


def pair_inner_product(h, t, w):
    t = np.repeat(t, len(h) // max(len(t), 1), 0)
    return linear(np.concatenate([h, t, h - t, h * t], 1), w["weight"], w["bias"])


def position(inputs, w):
    x, held = inputs[0], inputs[1] if len(inputs) > 1 else None
    if held is None:
        return x + w
    out = x.copy()
    for b, i in np.argwhere(held):
        out[b, i] += w[int(held[b, i + 1 :].sum())]
    return out


def sampled_softmax(inputs, p):
    u, v, ids = inputs[0], inputs[1].reshape(len(inputs[0]), -1, inputs[0].shape[1]), inputs[2]
    q = inputs[3] if len(inputs) > 3 else np.zeros(ids.shape)
    out = np.zeros((len(u), 2))
    for b in range(len(u)):
        score = u[b] @ v[b, 0] / p["temperature"]
        total = np.exp(score - q[b, 0])
        for c, j in np.ndindex(ids.shape):
            if ids[c, j] not in (ids[b, 0], -(2.0**63)) and (j or p.get("in_batch", True)):
                total += np.exp(u[b] @ v[c, j] / p["temperature"] - q[c, j])
        out[b] = score, score - q[b, 0] - np.log(total)
    return out


def log_frequency(ids, w, p):
    d, c = w["running_interval"], w["running_count"]
    places = np.vectorize(lambda one: int(one) % p["num_buckets"])(ids)
    found = np.log(np.where(c[places] > 0, c[places], 1.0)) - np.log(np.maximum(d[places], 1.0))
    return np.where(ids == -(2.0**63), 0.0, found)


def silu(x):
    return x * sigmoid(x)


def causal_mask(mask):
    out = np.zeros((len(mask), 1, mask.shape[1], mask.shape[1]))
    for b, i, j in np.ndindex(len(mask), mask.shape[1], mask.shape[1]):
        out[b, 0, i, j] = i == j or (j < i and mask[b, j] > 0)
    return out


def last_place(x, mask):
    return np.stack([one[np.flatnonzero(m)[-1]] if m.any() else 0 * one[0] for one, m in zip(x, mask, strict=True)])


def pointwise_attention(inputs, w, p):
    q, k, v, mask = inputs[:4]
    heads = p.get("num_attention_heads", 1)
    length, d, e = q.shape[1], q.shape[2] // heads, v.shape[2] // heads
    out = np.zeros(v.shape)
    for b, i, j, h in np.ndindex(len(q), length, length, heads):
        if j > i or not mask[b, j] > 0:
            continue
        z = q[b, i, h * d : (h + 1) * d] @ k[b, j, h * d : (h + 1) * d] + w["position"][i - j]
        if len(inputs) == 5 and inputs[4][b, i] != -(2.0**63) and inputs[4][b, j] != -(2.0**63):
            age = int(max(inputs[4][b, i] - inputs[4][b, j], 0)) // p["unit"]
            z += w["time"][min((1 + age).bit_length() - 1, p["num_buckets"] - 1)]
        out[b, i, h * e : (h + 1) * e] += silu(z) / length * v[b, j, h * e : (h + 1) * e]
    return out


def next_item(inputs, p):
    user, item, states, items, mask, ids = inputs[:6]
    length, full = states.shape[1], p.get("candidates") == "all"
    t = p.get("temperature", 1.0)
    q = np.zeros(ids.shape) if full or len(inputs) < 7 else inputs[6]
    first = 1 if p.get("targets", "every") == "every" else length
    pool = []
    if full:
        pool = [(n, inputs[6][n], 0.0) for n in range(p["first_item"], len(inputs[6]))]
    else:
        for c, j in np.ndindex(ids.shape):
            if j >= first and mask[c, j] > 0:
                pool.append((ids[c, j], items[c, j], q[c, j]))
    out = np.zeros((len(states), 2))
    for b in range(len(states)):
        out[b, 0] = user[b] @ item[b] / t
        held = [i for i in range(length) if mask[b, i] > 0]
        for n, i in enumerate(held):
            following = held[n + 1] if n + 1 < len(held) else length
            if not mask[b, following] > 0 or (first == length and following != length):
                continue
            own = states[b, i] @ items[b, following] / t - q[b, following]
            others = [states[b, i] @ v / t - c for one, v, c in pool if one != ids[b, following]]
            out[b, 1] += own - np.log(np.exp([own, *others]).sum())
    return out


REFERENCES = {
    "SiLU": lambda i, w, p: silu(i[0]),
    "CausalMask": lambda i, w, p: causal_mask(i[0]),
    "LastPlace": lambda i, w, p: last_place(*i),
    "PointwiseAttention": pointwise_attention,
    "NextItemSoftmax": lambda i, w, p: next_item(i, p),
    "L2Normalize": lambda i, w, p: i[0] / np.sqrt((i[0] ** 2).sum(-1, keepdims=True)),
    "LogFrequency": lambda i, w, p: log_frequency(i[0], w, p),
    "MaskPlaces": lambda i, w, p: i[0] * i[1][:, :, None],
    "LeakyReLU": lambda i, w, p: np.where(i[0] > 0, i[0], p["slope"] * i[0]),
    "MeanPlaces": lambda i, w, p: mean_places(*i),
    "TimeEmbedding": lambda i, w, p: time_embedding(*i, w["weight"], p),
    "PairInnerProduct": lambda i, w, p: pair_inner_product(*i, w),
    "PositionEmbedding": lambda i, w, p: position(i, w["weight"]),
    "SampledSoftmax": lambda i, w, p: sampled_softmax(i, p),
    "SampledSoftmaxLoss": lambda i, w, p: -np.mean(i[0][:, 1] * i[1][:, 0]),
    "InnerProduct": lambda i, w, p: linear(i[0], w["weight"], w["bias"]),
    "MLP": lambda i, w, p: mlp(i[0], w, p),
    "MultiCross": lambda i, w, p: multi_cross(i[0], w, p),
    "FmOrder2": lambda i, w, p: fm(i[0], p["out_dim"]),
    "WeightMultiply": lambda i, w, p: weight_multiply(i[0], w["weight"]),
    "Multiply": lambda i, w, p: weight_multiply(i[0], w["weight"]),
    "ElementwiseMultiply": lambda i, w, p: product(i),
    "DotProduct": lambda i, w, p: product(i),
    "Concat": lambda i, w, p: np.concatenate(i, p.get("axis", 1)),
    "Reshape": lambda i, w, p: reshape(i[0], p),
    "Slice": lambda i, w, p: [i[0][..., a:b] for a, b in p["ranges"]],
    "Dropout": lambda i, w, p: i[0],
    "ReLU": lambda i, w, p: np.maximum(i[0], 0),
    "ReLUHalf": lambda i, w, p: np.maximum(i[0], 0),
    "ELU": lambda i, w, p: np.where(i[0] > 0, i[0], p["elu_alpha"] * np.expm1(np.minimum(i[0], 0))),
    "Sigmoid": lambda i, w, p: sigmoid(i[0]),
    "Interaction": lambda i, w, p: interaction(i, p),
    "Add": lambda i, w, p: sum(i),
    "Sub": lambda i, w, p: i[0] - i[1],
    "ReduceSum": lambda i, w, p: i[0].sum(p.get("axis", 1), keepdims=True),
    "ReduceMean": lambda i, w, p: i[0].mean(p.get("axis", 1), keepdims=True),
    "BatchNorm": lambda i, w, p: (
        w["norm.weight"] * (i[0] - w["norm.running_mean"]) / np.sqrt(w["norm.running_var"] + 1e-5) + w["norm.bias"]
    ),
    "LayerNorm": lambda i, w, p: layer_norm(i[0], w["weight"], w["bias"]),
    "FusedInnerProduct": lambda i, w, p: np.maximum(
        linear(i[0], w["weight"], w["bias"]), -np.inf if p.get("act_type") == "none" else 0
    ),
    "GroupFusedInnerProduct": lambda i, w, p: group_fused(i[0], w, p),
    "Select": lambda i, w, p: np.take(i[0], p["index"], p["dim"]),
    "Gather": lambda i, w, p: i[0][p["indices"]],
    "Cast": lambda i, w, p: i[0],
    "MatrixMultiply": lambda i, w, p: matrix_multiply(*i),
    "MultiHeadAttention": lambda i, w, p: attention(i, p),
    "SequenceMask": lambda i, w, p: sequence_mask(i, p),
    "Softmax": lambda i, w, p: softmax(i[0]) if len(i) == 1 else softmax(i[0] * p["factor"] - 10000 * (1 - i[1]), 1e-6),
    "GRU": lambda i, w, p: gru(i[0], w, p),
    "PReLU_Dice": lambda i, w, p: dice(i[0], w, p),
    "Scale": lambda i, w, p: np.repeat(i[0], p["factor"], 1 - p["axis"]),
    "FusedReshapeConcat": lambda i, w, p: [
        np.concatenate([row[:-1] for row in np.concatenate(i, 2)]),
        np.concatenate(i, 2)[:, -1],
    ],
    "FusedReshapeConcatGeneral": lambda i, w, p: np.concatenate(list(np.concatenate(i, 2))),
    "BinaryCrossEntropyLoss": lambda i, w, p: np.mean(softplus(i[0]) - i[0] * i[1]),
    "CrossEntropyLoss": lambda i, w, p: cross_entropy(*i),
    "MultiCrossEntropyLoss": lambda i, w, p: multi_cross_entropy(*i, p),
    "MeanSquaredErrorLoss": lambda i, w, p: np.mean((i[0] - i[1]) ** 2),
}


def reference(name, parameters, weights, inputs):
    """Return the outputs as a list of float64 arrays."""
    out = REFERENCES[name](inputs, weights, parameters)
    return [np.asarray(one) for one in (out if isinstance(out, list) else [out])]
