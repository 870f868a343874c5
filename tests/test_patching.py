"""Changes to models and to libraries are undone: after `unload` all is as it was before `load`."""

from __future__ import annotations

import contextlib
import copy
import importlib
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import FAMILIES
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import GeneralInterface

from zero_inference import load
from zero_inference.api import placed_model
from zero_inference.measure import session
from zero_inference.utils.patching import Patches, SharedPatch


def test_the_last_change_is_undone_first():
    module, order = nn.Linear(2, 2), []
    attributes, x = set(vars(module)), torch.ones(1, 2)
    with Patches() as patches:
        patches.add_hooks(module.register_forward_hook(lambda *_: order.append("hook")))
        for name in ("first", "second"):
            patches.set_attr(module, "forward", lambda x, own=module.forward, name=name: order.append(name) or own(x))
            patches.callback(lambda name=name: order.append(f"undo {name}"))
        module(x)
        assert order == ["second", "first", "hook"]
        order.clear()
    assert order == ["undo second", "undo first"] and set(vars(module)) == attributes
    patches.close()
    module(x)
    assert len(order) == 2


def test_an_error_undoes_all_changes():
    module = SimpleNamespace(value=1)
    with pytest.raises(ZeroDivisionError), Patches() as patches:
        patches.set_attr(module, "value", 2)
        patches.set_attr(module, "other", 3)
        patches.callback(lambda: 1 / 0)
    assert vars(module) == {"value": 1}


def test_a_copy_undoes_its_own_changes():
    module = nn.Linear(2, 2)
    module.patches = Patches()
    module.patches.set_attr(module, "extra_repr", lambda: "patched")
    copied = copy.deepcopy(module)
    copied.patches.close()
    assert "patched" in repr(module) and "patched" not in repr(copied)


class One(SharedPatch):
    pass


class Other(SharedPatch):
    pass


class Table(GeneralInterface):
    _global_mapping = {"key": "below"}


def table_of(kind: str) -> Any:
    if kind == "dict":
        return {"key": "own"}
    table = Table()
    if kind == "local":
        table["key"] = "own"
    return table


@pytest.mark.parametrize("key", ["key", "missing"])
@pytest.mark.parametrize("kind", ["dict", "local", "global"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2), (2, 0, 3, 1)], ids=str)
def test_a_shared_entry_ends_with_its_last_user(order, kind, key):
    table = table_of(kind)
    before, local = table.get(key), dict(getattr(table, "_local_mapping", table))
    users = [Patches() for _ in order]
    kinds = [One, Other, One, Other]
    for patches, each in zip(users, kinds):
        patches.share_item(table, key, each)
    for number in order:
        assert isinstance(table[key], SharedPatch) and table[key].users
        users[number].close()
    assert table.get(key) == before and dict(getattr(table, "_local_mapping", table)) == local


LIBRARIES = ("transformers.", "torch.nn.", "accelerate.", "deepspeed.runtime.zero.partitioned_param_coordinator")


def library_state() -> dict[tuple, Any]:
    """Functions, classes and methods of imported modules that a model computes with, and transformers' tables."""
    found: dict[tuple, Any] = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith(LIBRARIES):
            continue
        for key, value in list(vars(module).items()):
            if callable(value):
                found[name, key] = value
            if isinstance(value, type) and value.__module__ == name:
                found |= {(name, key, each): method for each, method in vars(value).items() if callable(method)}
            if isinstance(value, GeneralInterface):
                for mapping in (value._local_mapping, value._global_mapping):
                    found |= {(name, key, id(mapping), each): function for each, function in mapping.items()}
                    found[name, key, id(mapping)] = len(mapping)
    return found


# of PlacedModel; what transformers notes when it reads a checkpoint; counters and a mark of DeepSpeed
IGNORED = {"tokenizer", "placement", "max_length", "generation_config", "_state", "_weight_conversions"}
IGNORED |= {"ds_grads_remaining", "applied_pre_backward_ref_cnt", "_z3_leaf"}


def model_state(model: nn.Module) -> dict[nn.Module, Any]:
    """Names of each module's attributes, and its hooks."""
    return {
        module: (vars(module).keys() - IGNORED, [*module._forward_pre_hooks.values(), *module._forward_hooks.values()])
        for module in model.modules()
    }


@pytest.fixture
def models(monkeypatch, no_gpu, tmp_path) -> list:
    """The state of each model before its engine loads weights and after it has released them."""
    monkeypatch.chdir(tmp_path)
    found, own = [], placed_model.loaded_model

    @contextlib.contextmanager
    def watched(plan, progress):
        model = plan.job.empty_model.model
        before = model_state(model)
        with own(plan, progress) as loaded:
            yield loaded
        after = model_state(model)
        found.append((before, {module: after[module] for module in before}))

    monkeypatch.setattr(placed_model, "loaded_model", watched)
    return found


def generate(model) -> torch.Tensor:
    ids = torch.arange(3, 13).reshape(2, 5)
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, min_new_tokens=6, do_sample=False)


CPU = {"dtype": "float32", "verbose": 0, "batch_size": 2, "max_length": 16}
ENGINES = {
    "resident": {"engine": "resident"},
    "stream": {"gpu_memory": 0, "ring_depth": 2},
    "stream, int4": {"gpu_memory": 0, "quant_bits": 4, "quant_group_size": 32},
    "stream, CPU": {"gpu_memory": 0, "cpu_compute": 1, "quant_bits": 8, "quant_group_size": 32},
    "stream, graphs": {"gpu_memory": 0, "cpu_compute": 0.5, "decode_graph": "on"},
    "stream, KV cache in host memory": {"kv_offload": True},
    "stream, CPU attention": {"kv_offload": True, "cpu_compute": 1.0},
    "accelerate": {"engine": "accelerate", "cpu_offload": True},
    "accelerate, disk": {"engine": "accelerate", "disk_offload": True},
    "deepspeed": {"engine": "deepspeed", "cpu_offload": True},
    "deepspeed, int8": {"engine": "deepspeed", "cpu_offload": True, "quant_bits": 8, "quant_group_size": 32},
}


@pytest.mark.parametrize(
    "engine, family",
    [
        *((engine, "llama") for engine in ENGINES),
        ("stream, CPU attention", "bloom"),
        ("stream, CPU", "mixtral"),
        ("stream, graphs", "gpt_oss"),
        ("stream, CPU attention", "gpt_oss"),
    ],
)
def test_unloading_undoes_all_changes(engine, family, checkpoints, models, monkeypatch):
    """With norm, rotary and routing kernels, whose references a CPU computes."""
    if "deepspeed" in engine and torch.cuda.is_available():
        pytest.skip("DeepSpeed uses the GPU: CUDA_VISIBLE_DEVICES=")
    sinks = dict(model_type="gpt_oss", num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=4)
    monkeypatch.setitem(FAMILIES, "gpt_oss", FAMILIES["llama"] | sinks)
    monkeypatch.setattr(session, "prepare_norm_kernels", lambda *_: None)
    monkeypatch.setattr(session, "has_kernels", lambda *_: True)
    generate(AutoModelForCausalLM.from_pretrained(checkpoints(family)))  # imports its modules
    if "deepspeed" in engine:
        importlib.import_module(LIBRARIES[-1])
    before = library_state()
    with load(checkpoints(family), **ENGINES[engine] | CPU) as model:
        generate(model)
        if family == "gpt_oss":
            assert isinstance(sys.modules[type(model).__module__].eager_attention_forward, SharedPatch)
        facts = model._state.loaded.facts
        if family != "gpt_oss":  # whose norms are not patched
            assert facts["norm_modules_patched"] == sum("Norm" in type(each).__name__ for each in model.modules())
        if family == "mixtral":
            assert "forward" in vars(model.model.layers[0].mlp.gate)
            assert isinstance(sys.modules[type(model).__module__].apply_rotary_pos_emb, SharedPatch)
    after = library_state()
    assert not [name for name, value in before.items() if value is not after.get(name)]
    for original, left in models:
        for module, (attributes, hooks) in left.items():
            assert attributes == original[module][0], type(module)
            assert hooks == original[module][1], type(module)


@pytest.mark.parametrize("engine", ["stream, CPU", "resident"])
def test_unloading_undoes_all_changes_below_an_adapter(engine, checkpoints, models):
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    with load(checkpoints("llama"), **ENGINES[engine] | CPU) as model:
        generate(model)
        generate(get_peft_model(model, settings).eval())
        mlp = model.model.layers[0].mlp
        mlp.register_forward_hook(hook := lambda *_: None)
        generate(model)
    ((original, left),) = models
    for module, (attributes, hooks) in left.items():
        assert attributes - original[module][0] <= {"peft_config"}, type(module)
        assert hooks == original[module][1] + [hook] * (module is mlp)


def test_models_that_share_an_attention_function_are_unloaded_in_any_order(checkpoints, models):
    name, options = "sdpa", ENGINES["stream, CPU attention"] | CPU
    before = ALL_ATTENTION_FUNCTIONS[name]
    first, second = (load(checkpoints("llama"), **options) for _ in range(2))
    expected = generate(first)
    assert ALL_ATTENTION_FUNCTIONS[name] is not before
    first.unload()
    assert ALL_ATTENTION_FUNCTIONS[name] is not before and torch.equal(generate(second), expected)
    second.unload()
    assert ALL_ATTENTION_FUNCTIONS[name] is before and name not in ALL_ATTENTION_FUNCTIONS._local_mapping
