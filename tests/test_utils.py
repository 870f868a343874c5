from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import zero_inference
from zero_inference import utils
from zero_inference.config.checks import batch_advice
from zero_inference.utils import model_sizes
from zero_inference.utils.format import format_bytes, format_bytes_pair, nearest_divisor

ROOT = Path(zero_inference.__file__).resolve().parents[1]
OPT_66B = SimpleNamespace(hidden_size=9216, num_hidden_layers=64, vocab_size=50272)


def run_python(code, **options):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, **options)


def test_light_modules_load_no_heavy_package():
    done = run_python(
        "import sys, zero_inference.utils, zero_inference.records.read, zero_inference.records.write\n"
        "import zero_inference.utils.environment, zero_inference.models.built_in\n"
        "print(sorted({'torch', 'transformers', 'deepspeed', 'numpy'} & set(sys.modules)))",
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_model_bytes_of_three_fields_and_of_opt_is_the_closed_formula():
    from transformers import AutoConfig

    assert (utils.KB, utils.MB, utils.GB, utils.T) == (1024, 1024**2, 1024**3, 10**12)
    assert utils.model_bytes(OPT_66B) == 131399321792
    # by hand for h=2, L=1, V=3: 14 + 6 + 18 + 24 + 8 = 70 per layer, 9 for the vocabulary
    tiny = SimpleNamespace(hidden_size=2, num_hidden_layers=1, vocab_size=3)
    assert utils.model_bytes(tiny) == 2 * (70 + 9)
    opt = AutoConfig.for_model(
        "opt", hidden_size=2, vocab_size=3, num_hidden_layers=1, num_attention_heads=1, ffn_dim=4
    )
    assert utils.model_bytes(opt) == 2 * (70 + 9)


def tiny_llama(**changes):
    from transformers import AutoConfig

    sizes = dict(
        hidden_size=48, intermediate_size=130, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=10, vocab_size=103, tie_word_embeddings=False,
    )  # fmt: skip
    return AutoConfig.for_model("llama", **{**sizes, **changes})


LLAMA_LAYER = 48 * 60 + 2 * 48 * 20 + 60 * 48 + 3 * 48 * 130 + 2 * 48  # q, k and v, o, gated MLP, norms
TINY_LLAMA = 3 * LLAMA_LAYER + 2 * 103 * 48 + 48  # layers, embedding and head, final norm


def test_model_bytes_of_a_gated_model_is_its_exact_count():
    assert utils.model_bytes(tiny_llama()) == 2 * TINY_LLAMA
    assert utils.model_bytes(tiny_llama(tie_word_embeddings=True)) == 2 * (TINY_LLAMA - 103 * 48), "once"


def test_exact_count_is_of_whole_parameters_under_zero3():
    pytest.importorskip("deepspeed")
    from transformers.integrations import deepspeed as integration

    live = integration.HfDeepSpeedConfig({"zero_optimization": {"stage": 3}, "train_batch_size": 1})
    try:
        assert integration.is_deepspeed_zero3_enabled()
        assert utils.model_bytes(tiny_llama()) == 2 * TINY_LLAMA
        assert integration.deepspeed_config() is live.config
    finally:
        integration.unset_hf_deepspeed_config()


def test_cache_bytes_uses_the_hidden_size_where_no_heads_are_named():
    assert utils.cache_bytes(OPT_66B, 3, 7) == 2 * 3 * 7 * 64 * 9216 * 2
    assert utils.hidden_bytes(OPT_66B, 3, 7) == 3 * 7 * 9216 * 2
    named = SimpleNamespace(**vars(OPT_66B), num_attention_heads=72)
    assert model_sizes.query_heads_per_kv_head(SimpleNamespace(num_attention_heads=64, num_key_value_heads=8)) == 8
    assert model_sizes.query_heads_per_kv_head(SimpleNamespace(num_attention_heads=71, multi_query=True)) == 71
    assert utils.cache_bytes(named, 3, 7) == utils.cache_bytes(OPT_66B, 3, 7)


def test_cache_bytes_uses_the_heads_where_they_are_named():
    gemma_7b = SimpleNamespace(
        hidden_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=16, head_dim=256
    )
    assert utils.cache_bytes(gemma_7b, 64, 100) == 2 * 64 * 100 * 28 * 4096 * 2
    assert utils.cache_bytes(tiny_llama(), 5, 11) == 2 * 5 * 11 * 3 * (2 * 10) * 2


def test_sizes_of_a_multimodal_config_are_those_of_its_text_decoder():
    from transformers import AutoConfig

    text = dict(
        hidden_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=12,
        intermediate_size=50, vocab_size=97,
    )  # fmt: skip
    config = AutoConfig.for_model("gemma3", text_config=text)
    assert utils.cache_bytes(config, 2, 3) == 2 * 2 * 3 * 2 * (2 * 12) * 2
    assert utils.hidden_bytes(config, 2, 3) == 2 * 3 * 40 * 2


@pytest.mark.parametrize("arguments, expected", [
    (("facebook/opt-66b", 16, 512, 32, True, False, 1, 1, False, False), "ds-opt-66b-bs16-prompt512-gen32-n1x1-cpu"),
    (("/a/b/bloom/", 1, 2, 3, False, False, 1, 8, True, True), "ds-bloom-bs1-prompt2-gen3-n1x8-gpu-kv_offload-w_quant"),
    (("m", 1, 2, 3, True, True, 1, 1, False, 4), "ds-m-bs1-prompt2-gen3-n1x1-cpu-w_quant"),
])  # fmt: skip
def test_get_filename(arguments, expected):
    assert utils.get_filename(*arguments) == expected


def test_get_filename_takes_another_engine_as_prefix_and_names_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "my-model").mkdir()
    monkeypatch.chdir(tmp_path / "my-model")
    name = utils.get_filename(".", 1, 2, 3, False, False, 1, 1, False, False, prefix="stream")
    assert name == "stream-my-model-bs1-prompt2-gen3-n1x1-gpu"


# sizes in bytes that print as 122.375, 19.125, 0.149 and 11.176 GB
VALUES = (131399321792, 20535312384, 160432128, 12000138625, 3.456, 2370.37, 52.789, 9.396, 56.245, 9.103)
BLOCK = (
    "model size: 122.375 GB\tcache size: 19.125 GB\thidden size (p): 0.149 GB\n"
    "peak gpu mem: 11.176 GB\tprefill latency: 3.456 s\tprefill throughput: 2370.370 token/s\n"
    "decode latency: 52.789 s\tdecode throughput: 9.396 token/s\n"
    "total latency: 56.245 s\ttotal throughput: 9.103 token/s"
)


def test_log_block_is_appended_below_the_older_ones(tmp_path):
    path = tmp_path / "new" / "folder" / "run.log"
    assert utils.write_benchmark_log(path, *VALUES) == BLOCK
    assert utils.write_benchmark_log(str(path), *VALUES) == BLOCK
    assert path.read_bytes().decode() == 2 * (BLOCK + "\n")


def test_an_append_that_does_not_fit_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "run.log"
    done = run_python(
        "import resource, sys\n"
        "from zero_inference.utils.files import append_bytes\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        f"append_bytes({str(path)!r}, b'a' * 59 + b'\\n')\n"
        f"append_bytes({str(path)!r}, b'b' * 59 + b'\\n')\n"
    )
    assert done.returncode == 1 and "only 40 of 60 bytes fitted" in done.stderr
    assert path.read_bytes() == b"a" * 59 + b"\n"


GIB, MIB = 1 << 30, 1 << 20


def test_amounts_have_three_digits_and_a_unit_and_two_share_it():
    sizes = (0, 353 << 10, 20.44 * GIB, 999.6 * GIB, 1511.9 * GIB)
    assert list(map(format_bytes, sizes)) == ["0 bytes", "0.345 MiB", "20.4 GiB", "1000 GiB", "1512 GiB"]
    assert format_bytes_pair(20.44 * GIB, 23.5 * GIB) == ("20.4", "23.5", "GiB")
    assert format_bytes_pair(128.2 * GIB, 128 * GIB) == ("128.20", "128.00", "GiB"), "they differ"
    assert format_bytes_pair(0, 20 * MIB) == ("0", "20", "MiB")


@pytest.mark.parametrize(
    "asked, whole, packs, found",
    [(48, 320, 1, 64), (100, 4096, 1, 128), (256, 64, 1, 64), (64, 48, 1, 16), (64, 7, 1, None), (64, 40, 16, None)],
)
def test_the_nearest_group_size_divides(asked, whole, packs, found):
    assert nearest_divisor(asked, whole, (256, 128, 64, 32, 16, 8), packs) == found


def test_a_batch_that_cannot_be_split_is_told_what_can():
    assert batch_advice(3, 2, "2 ranks") == (
        "--batch-size 3 does not divide over 2 ranks; use 2 or 4, or 1 of the GPUs"
    )
    assert "; use 4 or 8, or 3 of the GPUs" in batch_advice(6, 4, "4 ranks")
