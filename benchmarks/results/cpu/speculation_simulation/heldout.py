"""The greedy search on half of the texts, measured on the other half; after its first step only among the 12 best layers of the step before."""
import json
from pathlib import Path

import torch
from common import *

model, names, ids, kv, _ = ready()
order = json.loads(Path("skip_layers.json").read_text())["order"]
inputs, targets = ids[:, PROMPT:-1], ids[:, PROMPT + 1 :]


def agreement(skipped, own, x=None, begin=0):
    x = model.embed[inputs[own]] if x is None else x
    for layer in range(begin, model.n):
        if layer not in skipped:
            x, _ = model.block(layer, x, tuple(each[own][:, :PROMPT] for each in kv[layer]))
    return float((model.logits(x).argmax(-1) == targets[own]).float().mean())


own, other = slice(0, None, 2), slice(1, None, 2)
skipped, pool = [], range(model.n)
for k in range(1, 9):
    scores, x = {}, model.embed[inputs[own]]
    for layer in range(model.n):
        if layer in skipped:
            continue
        if layer in pool:
            scores[layer] = agreement(skipped, own, x, layer + 1)
        x, _ = model.block(layer, x, tuple(each[own][:, :PROMPT] for each in kv[layer]))
    ranked = sorted(scores, key=scores.get, reverse=True)
    skipped.append(ranked[0])
    pool = ranked[1:13]
    if k in (1, 2, 4, 8):
        text = f"k {k} {sorted(skipped)}: agreement of the texts searched {scores[ranked[0]]:.3f}, of the others {agreement(skipped, other):.3f}"
        text += f" (search on all texts: {agreement(order[:k], other):.3f})"
        for label, chosen in (("", skipped), ("search on all texts: ", order[:k])):
            ranks = ranks_from_each_start(model, set(chosen), ids[other], [(a[other], b[other]) for a, b in kv], 8, 1)
            text += f"; {label}tokens/pass of the others n=4 {tokens_per_pass(chain_accepted(ranks, 4))[0]:.2f}, n=8 {tokens_per_pass(chain_accepted(ranks, 8))[0]:.2f}"
        say(text + f" ({clock()})")
