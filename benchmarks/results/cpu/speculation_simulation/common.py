"""smollm2-135m in plain float32 torch, whose drafts continue the KV cache of the full model, as `--speculate self` does."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.nn.functional as F

import zero_inference
from zero_inference.models.built_in import smollm2_checkpoint
from zero_inference.models.prompts import encode_prompts

torch.set_num_threads(1)
torch.set_grad_enabled(False)
PROMPT, GEN = 96, 64
STEPS = GEN - 1  # tokens after the one of the prefill
HEADS, KV, DIM = 9, 3, 64
START = time.monotonic()


def say(*what):
    print(*what, flush=True)


def clock():
    return f"{time.monotonic() - START:.0f} s"


class Model:
    def __init__(self, hf):
        cfg = hf.config
        self.n, self.eps = cfg.num_hidden_layers, cfg.rms_norm_eps
        theta = cfg.rope_parameters["rope_theta"]
        inv = 1.0 / theta ** (torch.arange(0, DIM, 2).float() / DIM)
        at = torch.outer(torch.arange(PROMPT + GEN).float(), inv)
        self.cos, self.sin = torch.cat([at, at], 1).cos(), torch.cat([at, at], 1).sin()
        self.embed, self.norm = hf.model.embed_tokens.weight.data, hf.model.norm.weight.data
        self.layers = []
        for layer in hf.model.layers:
            own, mlp = layer.self_attn, layer.mlp
            self.layers.append(
                {
                    "n1": layer.input_layernorm.weight.data,
                    "n2": layer.post_attention_layernorm.weight.data,
                    "q": own.q_proj.weight.data,
                    "k": own.k_proj.weight.data,
                    "v": own.v_proj.weight.data,
                    "o": own.o_proj.weight.data,
                    "g": mlp.gate_proj.weight.data,
                    "u": mlp.up_proj.weight.data,
                    "d": mlp.down_proj.weight.data,
                }
            )

    def rounded(self, bits, group=None):
        """A copy with linear weights rounded symmetrically to `bits`, a scale for each row or for `group` weights of it."""
        new = object.__new__(Model)
        new.__dict__ |= self.__dict__
        most = 2 ** (bits - 1) - 1

        def round_(w):
            parts = w.reshape(w.shape[0], -1, group or w.shape[1])
            scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-8) / most
            return ((parts / scale).round().clamp(-most, most) * scale).reshape(w.shape)

        new.layers = [{k: round_(w) if w.ndim == 2 else w for k, w in each.items()} for each in self.layers]
        return new

    def rms(self, x, w):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * w

    def rope(self, x, pos):  # x [..., heads, DIM], pos [...]
        cos, sin = self.cos[pos].unsqueeze(-2), self.sin[pos].unsqueeze(-2)
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    def qkv(self, w, x, pos):
        h = self.rms(x, w["n1"])
        q = self.rope((h @ w["q"].T).unflatten(-1, (HEADS, DIM)), pos)
        k = self.rope((h @ w["k"].T).unflatten(-1, (KV, DIM)), pos)
        return q, k, (h @ w["v"].T).unflatten(-1, (KV, DIM))

    def finish(self, w, x, attended):
        x = x + attended @ w["o"].T
        h = self.rms(x, w["n2"])
        return x + (F.silu(h @ w["g"].T) * (h @ w["u"].T)) @ w["d"].T

    def block(self, layer, x, past=None):
        """x [B, T, H] after the positions of `past` (k, v [B, S, KV, DIM]); returns x and all k, v."""
        w, begin = self.layers[layer], 0 if past is None else past[0].shape[1]
        pos = torch.arange(begin, begin + x.shape[1])
        q, k, v = self.qkv(w, x, pos)
        if past is not None:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        mask = torch.arange(k.shape[1]) <= pos[:, None]
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, enable_gqa=True
        )
        return self.finish(w, x, out.transpose(1, 2).flatten(2)), (k, v)

    def logits(self, x):
        return self.rms(x, self.norm) @ self.embed.T


def ready():
    """Return the model, names of the texts, ids [12, PROMPT + GEN], its keys and values [layer][k, v], hidden states of each layer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2_checkpoint()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    files = sorted((Path(zero_inference.__file__).parent.parent / "benchmarks" / "prompts").glob("*.txt"))
    rows = [(f"{file.stem} {i + 1}", line) for file in files for i, line in enumerate(file.read_text().splitlines())]
    names = [name for name, _ in rows]
    saved = Path("texts.pt")
    if saved.exists():
        ids = torch.load(saved)
    else:
        ids = torch.cat([encode_prompts(tokenizer, [line], PROMPT) for _, line in rows])
        cache, fed = None, ids
        for _ in range(GEN):
            out = hf(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, fed = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, fed], 1)
        torch.save(ids, saved)
    model = Model(hf)
    x, hidden, kv = model.embed[ids[:, :-1]], [], []
    for layer in range(model.n):
        hidden.append(x)
        x, each = model.block(layer, x)
        kv.append(each)
    hidden.append(x)
    own = model.logits(x[:, PROMPT - 1 :]).argmax(-1)
    say(f"own forward equals generated tokens: {(own == ids[:, PROMPT:]).float().mean():.4f}  ({clock()})")
    return model, names, ids, kv, hidden


def ranks_from_each_start(model, skipped, ids, kv, depths, mistakes, worst=8):
    """The rank (1: likeliest) of the target's token among the draft's, [texts, STEPS, depths], 99 where not computed.

    A generation of the draft starts after each of the STEPS tokens, with the target's keys and values before it and its own from there.
    It is fed the target's tokens, which are its own as long as the rank is 1, or those of a tree's branch, and ends after `mistakes`
    ranks above 1, or one above `worst`.
    """
    texts = ids.shape[0]
    ranks = torch.full((texts, STEPS, depths), 99, dtype=torch.int64)
    b, s = torch.meshgrid(torch.arange(texts), torch.arange(STEPS), indexing="ij")
    b, s = b.flatten(), s.flatten()
    wrong = torch.zeros_like(b)
    kept = [each for each in range(model.n) if each not in skipped]
    own = {each: None for each in kept}
    group = HEADS // KV
    for depth in range(depths):
        pos = PROMPT + s + depth
        x = model.embed[ids[b, pos]]
        for layer in kept:
            w = model.layers[layer]
            q, k, v = model.qkv(w, x, pos)
            before = own[layer]
            keys = k[:, None] if before is None else torch.cat([before[0], k[:, None]], 1)
            values = v[:, None] if before is None else torch.cat([before[1], v[:, None]], 1)
            own[layer] = (keys, values)
            q = q.unflatten(1, (KV, group)) / DIM**0.5
            recent = torch.einsum("rkgd,rtkd->rkgt", q, keys)
            out = torch.empty_like(q)
            for text in range(texts):
                at = (b == text).nonzero()[:, 0]
                if not len(at):
                    continue
                qt = q[at].permute(1, 0, 2, 3).flatten(1, 2)  # KV, rows * group, DIM
                old_k, old_v = (each[text].transpose(0, 1) for each in kv[layer])  # KV, S, DIM
                scores = (qt @ old_k.transpose(1, 2)).unflatten(1, (len(at), group)).transpose(0, 1)
                hide = torch.arange(old_k.shape[1]) >= (PROMPT + s[at])[:, None]
                scores = scores.masked_fill(hide[:, None, None], float("-inf"))
                p = torch.cat([scores, recent[at]], -1).softmax(-1)
                pt = p[..., : old_k.shape[1]].transpose(0, 1).flatten(1, 2)
                far = (pt @ old_v).unflatten(1, (len(at), group)).transpose(0, 1)
                out[at] = far + torch.einsum("rkgt,rtkd->rkgd", p[..., old_k.shape[1] :], values[at])
            x = model.finish(w, x, out.flatten(1))
        logits = model.logits(x)
        target = ids[b, pos + 1]
        rank = 1 + (logits > logits.gather(1, target[:, None])).sum(1)
        ranks[b, s, depth] = rank
        wrong += rank > 1
        go = (wrong < mistakes) & (rank <= worst) & (s + depth + 1 < STEPS)
        b, s, wrong = b[go], s[go], wrong[go]
        own = {each: (k[go], v[go]) for each, (k, v) in own.items()}
        if not len(b):
            break
    return ranks


def walk(accepted):
    """Passes to decode STEPS tokens, where accepted[s] proposals of a pass after token s are accepted; and their starts."""
    at, starts = 0, []
    while at < STEPS:
        starts.append(at)
        at += int(accepted[at]) + 1
    return starts


def tokens_per_pass(accepted):
    """Mean over texts of STEPS / passes, and STEPS * texts / all passes; accepted [texts, STEPS]."""
    passes = [len(walk(each)) for each in accepted.tolist()]
    return sum(STEPS / each for each in passes) / len(passes), STEPS * len(passes) / sum(passes)


def chain_accepted(ranks, n):
    return (ranks[..., :n] == 1).long().cumprod(-1).sum(-1)
