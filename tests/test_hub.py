"""Models that come from a hub: which files are fetched, what is enough without a network, and what an error says."""

from __future__ import annotations

import json
import os
import shutil
import socket

import pytest
from conftest import VOCAB, free_port
from forks import PROGRAM, ForkServer
from hub_server import COMMIT, Hub

SHORT = "--prompt-len 8 --gen-len 3 --loops 1 --warmup 0 --dtype float32 --engine resident".split()
TOKENIZER = {"tokenizer.json", "tokenizer_config.json"}
READ_ON_IMPORT = ("HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE")  # by the hub's libraries


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home") / "cache"


@pytest.fixture
def cache(home):
    """An empty cache, in one place for all tests, so that a process which has imported the libraries serves them all."""
    shutil.rmtree(home, ignore_errors=True)
    return home


@pytest.fixture(scope="module")
def copied():
    """environment -> the process that has imported all of a run in it."""
    servers: dict[tuple[str, ...], ForkServer] = {}
    return lambda env: servers.setdefault(
        tuple(env[name] for name in READ_ON_IMPORT), ForkServer(PROGRAM, os.environ | env)
    )


@pytest.fixture
def run_model(run_model, copied, hub):
    def start(*options, env):
        return run_model(*options, env=env, server=copied(env) if env["HF_ENDPOINT"] == hub.endpoint else None)

    return start


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Hub(tmp_path_factory.mktemp("hub")) as running:
        yield running


@pytest.fixture
def hub(checkpoints, tmp_path, server):
    """A hub with `some/llama`: shards with their index, a tokenizer, code, and the same weights in other formats beside them."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "hub" / "some" / "llama"
    shutil.copytree(checkpoints("llama"), folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    words = Tokenizer(WordLevel({"<unk>": 0} | {f"w{number}": number for number in range(1, VOCAB)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    for other in ("pytorch_model.bin", "model.gguf", "original/tokenizer.model", "onnx/config.json", "modeling_own.py"):
        (folder / other).parent.mkdir(exist_ok=True)
        (folder / other).write_bytes(b"not to be fetched")
    server.root, server.files, server.commit = tmp_path / "hub", [], COMMIT
    return server


def shards(hub) -> set[str]:
    index = json.loads((hub.root / "some" / "llama" / "model.safetensors.index.json").read_text())
    return set(index["weight_map"].values())


def test_a_run_fetches_config_tokenizer_and_the_shards_of_the_index_once(hub, run_model, cache):
    done = run_model("--model", "some/llama", *SHORT, env=hub.environment(cache))
    assert done.code == 0, done.stderr
    assert len(shards(hub)) > 1
    assert sorted(hub.files) == sorted({"config.json", "model.safetensors.index.json"} | TOKENIZER | shards(hub))
    assert done.record["load_s"] > 0 and "[0] " in done.stdout

    hub.files.clear()
    for change in ({}, {"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}"}, {"HF_HUB_OFFLINE": "1"}):
        run = run_model("--model", "some/llama", *SHORT, env=hub.environment(cache, **change))
        assert run.code == 0, run.stderr
        assert run.record["output_ids_sha256"] == done.record["output_ids_sha256"]
    assert hub.files == []


@pytest.mark.parametrize(
    "options, fetched", [([], set()), (["--prompt", "w1"], TOKENIZER), (["--trust-remote-code"], {"modeling_own.py"})]
)
def test_a_dry_run_fetches_no_weights_and_code_only_where_it_is_trusted(hub, run_model, options, fetched, cache):
    done = run_model("--model", "some/llama", *SHORT, "--dry-run", *options, env=hub.environment(cache))
    assert done.code == 0 and "It fits." in done.stdout, done.stderr
    assert set(hub.files) == {"config.json"} | fetched


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_weights_in_one_file_or_in_torch_files(hub, run_model, checkpoints, cache, kind):
    import torch
    from safetensors.torch import load_file, save_file

    folder = hub.root / "some" / "other"
    folder.mkdir()
    shutil.copy(hub.root / "some" / "llama" / "config.json", folder)
    loaded = [load_file(shard) for shard in checkpoints("llama").glob("*.safetensors")]
    tensors = {key: value for shard in loaded for key, value in shard.items()}
    stored = "pytorch_model-1.bin" if kind.endswith(".json") else kind
    if kind.endswith(".json"):
        (folder / kind).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, stored)}))
    if kind == "model.safetensors":
        save_file(tensors, folder / stored, {"format": "pt"})
        (folder / "pytorch_model.bin").write_bytes(b"not to be fetched")
    else:
        torch.save(tensors, folder / stored)
    done = run_model("--model", "some/other", *SHORT, env=hub.environment(cache))
    assert done.code == 0, done.stderr
    assert set(hub.files) == {"config.json", kind, stored} and "no tokenizer" in done.stderr


def error_of(done) -> str:
    assert done.code == 2 and done.record is None, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in done.stderr
    return lines[0]


@pytest.mark.parametrize("part, token", [("config", ""), ("tokenizer", ""), ("weights", "hf_made_up")])
def test_a_gated_repository(hub, run_model, checkpoints, cache, part, token):
    """The config of many on the hub can be read."""
    name = "locked/config" if part == "config" else "locked/weights"
    shutil.copytree(checkpoints("llama"), hub.root / name)
    if part == "weights":
        (hub.root / name / "generation_config.json").unlink()
    message = error_of(run_model("--model", name, *SHORT, env=hub.environment(cache, HF_TOKEN=token)))
    assert f"{name} is gated" in message and f"its {part}" in message and f"{hub.endpoint}/{name}" in message
    assert "HF_TOKEN" in message and "cannot be reached" not in message


@pytest.mark.parametrize(
    "missing, cached",
    [
        ("config.json", ["tokenizer.json"]),
        ("tokenizer", ["config.json", "weights"]),
        ("weights", ["config.json", *sorted(TOKENIZER), "first shard"]),
    ],
)
def test_offline_nothing_is_said_about_a_hub_that_was_not_asked(hub, run_model, cache, missing, cached):
    """A cache as older clients and downloads of single files leave it, without the list of the commit's files."""
    repository = cache / "hub" / "models--some--llama"
    snapshot = repository / "snapshots" / hub.commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(hub.commit)
    index, several = "model.safetensors.index.json", sorted(shards(hub))
    groups = {"weights": [index, *several], "first shard": [index, several[0]]}
    for file in (file for entry in cached for file in groups.get(entry, [entry])):
        shutil.copy(hub.root / "some" / "llama" / file, snapshot)
    environment = hub.environment(cache)
    message = error_of(run_model("--model", "some/llama", *SHORT, env=environment | {"HF_HUB_OFFLINE": "1"}))
    assert f"its {missing} is not in the local cache" in message, message
    assert "HF_HUB_OFFLINE" in message and "on the hub" not in message and "not complete" not in message

    if "first shard" in cached:
        done = run_model("--model", "some/llama", *SHORT, env=environment)  # a hub that is asked brings what is missing
        assert done.code == 0, done.stderr


def test_a_hub_that_cannot_be_reached_is_down_or_has_no_such_repository_or_format(hub, run_model, cache):
    environment = hub.environment(cache, HF_TOKEN="")
    nobody = f"http://127.0.0.1:{free_port()}"
    message = error_of(run_model("--model", "some/llama", *SHORT, env=environment | {"HF_ENDPOINT": nobody}))
    assert nobody in message and "cannot be reached" in message and "refused" in message, message
    message = error_of(run_model("--model", "some/llama", *SHORT, env=environment | {"HF_HUB_OFFLINE": "1"}))
    assert "HF_HUB_OFFLINE" in message and "cannot be reached" not in message
    message = error_of(run_model("--model", "some/lama", *SHORT, env=environment))
    assert "no repository some/lama" in message and "gated" not in message and "cannot be reached" not in message
    message = error_of(run_model("--model", "broken/llama", *SHORT, env=hub.environment(cache)))
    assert "501" in message and hub.endpoint in message
    (hub.root / "some" / "gguf").mkdir()
    (hub.root / "some" / "gguf" / "model.gguf").write_bytes(b"")
    message = error_of(run_model("--model", "some/gguf", *SHORT, env=hub.environment(cache)))
    assert "some/gguf has no config.json" in message
    shutil.copy(hub.root / "some" / "llama" / "config.json", hub.root / "some" / "gguf")
    hub.commit = hub.commit[::-1]
    message = error_of(run_model("--model", "some/gguf", *SHORT, env=hub.environment(cache)))
    assert "model.safetensors or pytorch_model.bin" in message


@pytest.fixture
def silent_hub(cache, monkeypatch):
    """This process asks a hub that takes connections and never answers, with an empty cache, and waits a fifth of a second."""
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        settings = {"ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache / "hub"), "HF_HUB_OFFLINE": False}
        settings |= {"HF_HUB_ETAG_TIMEOUT": 0.2, "HUGGINGFACE_CO_URL_TEMPLATE": template}
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value)
        yield


def test_a_hub_that_does_not_answer_is_given_up_and_the_cache_has_to_do(silent_hub, cache):
    from huggingface_hub import constants

    from zero_inference.errors import UsageError
    from zero_inference.models.hub import open_snapshot

    unreachable = "is not in the local cache, and .* cannot be reached .no answer"
    with pytest.raises(UsageError, match=f"its config.json {unreachable}"):
        open_snapshot("some/llama", "some/llama")
    with pytest.raises(UsageError, match=r"\(did you mean opt-125m, "):
        open_snapshot("opt125m", "opt125m")
    repository = cache / "hub" / "models--some--llama"
    folder = repository / "snapshots" / COMMIT
    for path, text in ((repository / "refs" / "main", COMMIT), (folder / "config.json", "{}")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    snapshot = open_snapshot("some/llama", "some/llama")
    assert snapshot.folder == folder.resolve()
    for fetch, what in ((snapshot.fetch_tokenizer, "tokenizer"), (snapshot.fetch_weights, "weights")):
        with pytest.raises(UsageError, match=f"its {what} {unreachable}"):
            fetch()  # without asking again: each request would wait
    (folder / "tokenizer.json").write_text("{}")
    assert snapshot.fetch_tokenizer() == snapshot.folder
    assert constants.HF_HUB_OFFLINE is False
