"""Models on the hub: fetch the files that a run reads and no others; explain what prevents it."""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from zero_inference.errors import RunError, UsageError
from zero_inference.models.built_in import find_preset, similar_presets
from zero_inference.models.checkpoint_files import QUANT_CONFIG, WEIGHT_FILES, find_shards, has_tokenizer, read_index
from zero_inference.utils.format import first_line
from zero_inference.utils.progress import current_progress, is_reporting

# In the top folder only: `original/` and `onnx/` hold other formats. Patterns, because vocabularies have any name.
TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
NO_TOKENIZER_FILES = ["*/*", "*.index.json"]
ANOTHER = "give a repository or folder in transformers' format"
ANNOUNCED_S = 1.0  # a look-up that takes longer is announced


@dataclass(frozen=True)
class Snapshot:
    """One commit of a hub repository in the local cache. Methods raise UsageError if files cannot be fetched."""

    asked: str  # the value of --model
    name: str
    folder: Path  # in the cache; holds config.json and what was fetched since
    unreachable: str | None = None  # why the hub did not answer in time, if so; then only the cache is used

    def fetch_code(self) -> None:
        with _hub_errors(self.asked, self.name, "its code", self.unreachable):
            self._fetch(["*.py"])

    def fetch_tokenizer(self) -> Path:
        """Fetch the tokenizer's files, if the repository has any, and return the folder."""
        from huggingface_hub.errors import LocalEntryNotFoundError

        announced = current_progress().slow(f"fetching the tokenizer of {self.name}", ANNOUNCED_S)
        with _hub_errors(self.asked, self.name, "its tokenizer", self.unreachable), announced:
            try:
                _need_listing(self.name, self.folder.name)
                self._fetch(TOKENIZER_FILES, NO_TOKENIZER_FILES)
            except LocalEntryNotFoundError:  # no network: what an earlier run fetched is enough
                if not has_tokenizer(self.folder):
                    raise
        return self.folder

    def fetch_weights(self) -> Path:
        """Fetch one complete set of weights, of the first kind in `WEIGHT_FILES`, and return the folder."""
        with suppress(RunError):
            find_shards(self.folder)
            return self.folder  # a commit does not change
        with _hub_errors(self.asked, self.name, "its weights", self.unreachable):
            _need_listing(self.name, self.folder.name)
            for name in WEIGHT_FILES:
                self._fetch([name])
                if (found := self.folder / name).is_file():
                    break
            else:
                raise UsageError(
                    f"--model {self.asked}: {self.name} has no model.safetensors or pytorch_model.bin (nor their index) on "
                    f"the hub; {ANOTHER}."
                )
            names = sorted(set(read_index(found).values())) if found.suffix == ".json" else [name]
            current_progress().say(f"fetching the weights of {self.name} ...")
            self._fetch([glob.escape(name) for name in names])
            try:
                find_shards(self.folder)
            except RunError as error:
                raise UsageError(f"--model {self.asked}: the repository is not complete: {error}") from error
        return self.folder

    def _fetch(self, patterns: list[str], ignored: list[str] | None = None) -> None:
        from huggingface_hub import snapshot_download

        snapshot_download(self.name, revision=self.folder.name, allow_patterns=patterns, ignore_patterns=ignored)


def open_snapshot(asked: str, name: str) -> Snapshot:
    """Fetch config.json of the newest commit of repository `name`; if the hub does not answer, use the newest commit in the cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if is_reporting() and not current_progress().enabled:
        disable_progress_bars()
    with current_progress().slow(f"looking up {name} on the hub", ANNOUNCED_S):
        unreachable = _why_unreachable(name)
        with _hub_errors(asked, name, "its config.json", unreachable):
            # not hf_hub_download, which retries a dead network
            folder = Path(snapshot_download(name, allow_patterns=["config.json", QUANT_CONFIG]))
            if not (folder / "config.json").is_file():
                _need_listing(name, folder.name)
                raise UsageError(
                    f"--model {asked}: {name} has no config.json on the hub (GGUF is not read); {ANOTHER}."
                )
    return Snapshot(asked, name, folder, unreachable)


def _why_unreachable(name: str) -> str | None:
    """Return a reason if the hub does not answer in time: the client sets no limit, and a firewall may drop packets for minutes."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return None
    limit_s = constants.HF_HUB_ETAG_TIMEOUT
    try:
        HfApi().model_info(name, timeout=limit_s)
    except Exception as error:  # other errors are explained when the same request is made again
        # by name: the client raises httpx's or httpx2's, depending on its version
        if any(kind.__name__ == "TimeoutException" for kind in type(error).__mro__):
            return f"no answer within {limit_s:g} s; HF_HUB_ETAG_TIMEOUT sets another limit"
    return None


def _need_listing(name: str, commit: str) -> None:
    """Raise LocalEntryNotFoundError if the commit's list of files, without which cached files pass for all, cannot be had."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError, LocalEntryNotFoundError

    try:
        snapshot_download(name, revision=commit, allow_patterns=[], dry_run=True)
    except DryRunError as error:
        raise LocalEntryNotFoundError(str(error)) from error


@contextmanager
def _hub_errors(asked: str, name: str, what: str, unreachable: str | None) -> Iterator[None]:
    """Turn errors of the hub's client into UsageError; with `unreachable` only its cache is used, as with HF_HUB_OFFLINE=1."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or unreachable is not None
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # the hub's client raises its own classes and those of its HTTP library
        raise UsageError(f"--model {asked}: {_explain(asked, name, what, error, unreachable)}") from error
    finally:
        constants.HF_HUB_OFFLINE = before


def _explain(asked: str, name: str, what: str, error: Exception, unreachable: str | None) -> str:
    from huggingface_hub import errors

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    similar = [] if find_preset(asked) else similar_presets(asked)
    did_you_mean = f" (did you mean {', '.join(similar)}?)" if similar else ""
    local = f"correct the name{did_you_mean} or give a local folder; --dummy uses random weights"
    log_in = "log in with `hf auth login` or set HF_TOKEN"
    causes: list[BaseException] = [error]
    while following := causes[-1].__cause__ or causes[-1].__context__:
        causes.append(following)
    kinds = {kind for cause in causes for kind in type(cause).__mro__}
    if errors.GatedRepoError in kinds:
        return f"{name} is gated: for {what}, accept its terms on {endpoint}/{name}, then {log_in}."
    if errors.RepositoryNotFoundError in kinds:
        return f"the hub has no repository {name} that you may read; {local}, or if it is private, {log_in}."
    if errors.HFValidationError in kinds:
        return f"not a folder, a preset or a valid name on the hub; {local}."
    if unreachable is None and errors.OfflineModeIsEnabled in kinds:
        return f"{what} is not in the local cache, and HF_HUB_OFFLINE forbids fetching it; unset that, {local}."
    answer = next((cause for cause in causes if isinstance(cause, errors.HfHubHTTPError)), None)
    if answer is None and (unreachable or isinstance(error, errors.LocalEntryNotFoundError)):
        reason = unreachable or first_line(causes[-1])
        return (
            f"{what} is not in the local cache, and {endpoint} cannot be reached ({reason}); connect this machine, "
            f"set HF_ENDPOINT to a mirror, {local}."
        )
    reason = first_line(answer or error)
    return f"{what} could not be fetched from {endpoint} ({reason}); try again later, {log_in}, or {local}."
