"""Models on the hub: a run fetches the files that it reads and no others, and says in words what keeps them away."""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from zero_inference.errors import RunError, UsageError
from zero_inference.models.files import WEIGHT_FILES, checkpoint_files, has_tokenizer, shards
from zero_inference.models.preset_table import find_preset, near_names
from zero_inference.runtime.text import first_line

# Of the top folder only: `original/` and `onnx/` hold other formats. Classes name their vocabulary as they like, hence the patterns.
TOKENIZER_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
NO_TOKENIZER_FILES = ["*/*", "*.index.json"]
ANOTHER = "give a repository or folder in transformers' format"
LOG_IN = "log in with `hf auth login` or set HF_TOKEN"


@dataclass(frozen=True)
class Snapshot:
    """One commit of a hub repository in the local cache. Everything comes from this commit, whatever is pushed meanwhile.

    Attributes:
        asked: what --model said.
        name: the repository.
        folder: its place in the cache, named after the commit; holds config.json and what was fetched since.
    """

    asked: str
    name: str
    folder: Path

    def fetch_code(self) -> None:
        """The repository's Python files. Raises UsageError, as the others do."""
        with _explained(self.asked, self.name, "its code"):
            self._fetch(["*.py"])

    def fetch_tokenizer(self) -> Path:
        """The folder, with the tokenizer's files where the repository has any."""
        from huggingface_hub.errors import LocalEntryNotFoundError

        with _explained(self.asked, self.name, "its tokenizer"):
            try:
                _need_listing(self.name, self.folder.name)
                self._fetch(TOKENIZER_FILES, NO_TOKENIZER_FILES)
            except (
                LocalEntryNotFoundError
            ):  # no network: what an earlier run needed is enough, if not all that there is
                if not has_tokenizer(self.folder):
                    raise
        return self.folder

    def fetch_weights(self) -> Path:
        """The folder, with one complete set of weights: of the first kind in `WEIGHT_FILES`, in one file or as its index names them."""
        try:
            checkpoint_files(self.folder)
            return self.folder  # a commit does not change
        except RunError:
            pass
        with _explained(self.asked, self.name, "its weights"):
            _need_listing(self.name, self.folder.name)
            self._fetch([glob.escape(name) for name in self._weight_names()])
            try:
                checkpoint_files(self.folder)
            except RunError as error:
                raise UsageError(f"--model {self.asked}: the repository is not complete: {error}") from error
        return self.folder

    def _weight_names(self) -> list[str]:
        for single, index in WEIGHT_FILES:
            self._fetch([single])
            if (self.folder / single).is_file():
                return [single]
            self._fetch([index])
            if (self.folder / index).is_file():
                return shards(self.folder / index)
        names = " or ".join(single for single, _ in WEIGHT_FILES)
        raise UsageError(f"--model {self.asked}: {self.name} has no {names} (nor their index) on the hub; {ANOTHER}.")

    def _fetch(self, patterns: list[str], but: list[str] | None = None) -> None:
        from huggingface_hub import snapshot_download

        snapshot_download(self.name, revision=self.folder.name, allow_patterns=patterns, ignore_patterns=but)


def open_snapshot(asked: str, name: str) -> Snapshot:
    """The newest commit of repository `name`, with its config.json; without a network the newest one in the cache.

    Raises:
        UsageError: there is none, no access to it, or no network; says which and what to change.
    """
    from huggingface_hub import snapshot_download

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    with _explained(asked, name, "its config.json"):
        folder = Path(
            snapshot_download(name, allow_patterns=["config.json"])
        )  # for one file too: it does not retry a dead network
        if not (folder / "config.json").is_file():
            _need_listing(name, folder.name)
            raise UsageError(f"--model {asked}: {name} has no config.json on the hub; {ANOTHER}.")
    return Snapshot(asked, name, folder)


def _need_listing(name: str, commit: str) -> None:
    """Make sure that the files of the commit are known: where they are not, `snapshot_download` returns the cached ones as if they
    were all, and a missing one may well be on the hub.

    Raises:
        LocalEntryNotFoundError: the cache has no list of them (an older client filled it) and the hub did not give one.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError, LocalEntryNotFoundError

    try:
        snapshot_download(name, revision=commit, allow_patterns=[], dry_run=True)
    except DryRunError as error:
        raise LocalEntryNotFoundError(str(error)) from error


@contextmanager
def _explained(asked: str, name: str, what: str) -> Iterator[None]:
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # the hub's client raises its own classes and those of its HTTP library
        raise UsageError(f"--model {asked}: {_reason(asked, name, what, error)}") from error


def _reason(asked: str, name: str, what: str, error: Exception) -> str:
    """What is wrong and what to change, in one or two lines."""
    from huggingface_hub import errors, get_token

    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    causes = list(_causes(error))
    answer = next((cause for cause in causes if isinstance(cause, errors.HfHubHTTPError)), None)
    instead = _instead(asked, what)
    if isinstance(answer, errors.GatedRepoError):
        if get_token():
            return (
                f"{name} is gated, and the token that was sent has no access to {what}: ask for access on {endpoint}/{name}, "
                "or use another token (`hf auth login` or HF_TOKEN)."
            )
        return (
            f"{name} is gated, and no token was sent for {what}: accept its terms on {endpoint}/{name}, then {LOG_IN}."
        )
    if isinstance(answer, errors.RepositoryNotFoundError):
        if get_token():
            return (
                f"there is no repository {name} that the token in use may read; {_correct(asked)} or use another token."
            )
        return f"there is no public repository {name}; {_correct(asked)}, or if it is private, {LOG_IN}."
    if answer is not None:
        status = answer.response.status_code
        if status in (401, 403):
            return f"the hub refuses the token that was sent ({status}); {LOG_IN} to one that is valid."
        return f"{what} could not be fetched, {endpoint} answered {status}; try again later, or {instead}."
    if any(isinstance(cause, errors.HFValidationError) for cause in causes):
        return f"not a folder, a preset or a valid name on the hub; {_correct(asked)}."
    if any(isinstance(cause, errors.OfflineModeIsEnabled) for cause in causes):
        return (
            f"{what} is not in the local cache, and HF_HUB_OFFLINE forbids fetching it; unset that, "
            f"{_correct(asked)}, or {instead}."
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        return (
            f"{what} is not in the local cache, and {endpoint} cannot be reached ({first_line(causes[-1])}); "
            f"connect this machine or set HF_ENDPOINT to a mirror, or {instead}."
        )
    return f"{what} could not be fetched from {endpoint} ({first_line(error)}); try again, or {instead}."


def _correct(asked: str) -> str:
    near = [] if find_preset(asked) else near_names(asked)
    return "correct the name" + (f" (did you mean {', '.join(near)}?)" if near else "")


def _instead(asked: str, what: str) -> str:
    dummy = find_preset(asked) is not None or what == "its weights"
    return "give a local folder" + (", or --dummy for random weights of its shape" if dummy else "")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
