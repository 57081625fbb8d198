"""Publish a folder of saved weights on the Hub, with huggingface_hub's own client.

Where (`HF_ENDPOINT`), as whom (`HF_TOKEN`, or `hf auth login`) and whether at all (`HF_HUB_OFFLINE`) is settled as for
every tool of that library. A token is no argument here, so it is in no shell history and in no log.
"""

from __future__ import annotations

import importlib.resources
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, ModelCard, errors
from safetensors import SafetensorError, safe_open
from yaml import YAMLError

from hf_ssm.cards import published_card
from hf_ssm.convert import read_config
from hf_ssm.registry import ARCHITECTURES

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class HubError(OSError):
    """The Hub refused, or could not be reached; one line that says what to do."""


def push(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool = False,
    code: bool = False,
    revision: str | None = None,
    license: str | None = None,
    base_model: str | None = None,
) -> str:
    """Publish what `save_pretrained` or a training has left in `folder`, and return the address of the commit.

    All becomes visible in one commit, when every file is there. Interrupted, the same call goes on with the files that
    are missing. The folder is not changed; hidden files and a Trainer's checkpoints in it stay behind.

    Args:
        folder: config.json and safetensors weights, in shards or not, with what belongs to them.
        repo_id: "name" or "owner/name"; made if it does not exist.
        private: make the repository private. One that exists and is public is refused.
        code: the files of this architecture in `hf_ssm.modeling` travel, too, and config.json says so (`auto_map`):
            `trust_remote_code=True` then loads the model without `import hf_ssm`, if hf-ssm is installed.
        revision: a branch, made if it does not exist; main if None.
        license: an identifier such as "apache-2.0". Needed if the folder's README.md has none, or there is none.
        base_model: name of the model that this one was made from, for a card that is written here.

    Raises:
        FileNotFoundError; ValueError for a folder that is no whole model of ours, or a card that is not in order;
        HubError.
    """
    folder = Path(folder)
    config = _saved_config(folder)
    parameters = _count_parameters(folder)
    files = _files(folder)
    if code:
        files |= _code(config)
    if "README.md" in files:
        files["README.md"] = _licensed(folder / "README.md", license)
    elif license is not None:
        card = published_card(
            config, repo_id, parameters=parameters, license=license, base_model=base_model, with_code=code
        )
        files["README.md"] = str(card).encode()
    else:
        raise ValueError(
            "the folder has no model card, and only you know its licence: say --license, with an identifier such as "
            "apache-2.0, or other"
        )
    return _commit(files, repo_id, private, revision)


# --- what is published -----------------------------------------------------------------------------------------------


def _saved_config(folder: Path) -> dict[str, Any]:
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no config.json: give a folder written by save_pretrained")
    config = read_config(folder / "config.json")
    if config.get("model_type") not in ARCHITECTURES:
        raise ValueError(
            f"{folder / 'config.json'}: model_type is {config.get('model_type')!r}, expected one of "
            f"{', '.join(ARCHITECTURES)}; `hf-ssm convert` rewrites folders of the authors' code"
        )
    return config


def _count_parameters(folder: Path) -> int:
    """Of all weights; ValueError unless every file of them is there and whole."""
    names = {WEIGHTS}
    if (folder / INDEX).is_file():
        names = set(read_config(folder / INDEX).get("weight_map", {}).values())
    count = 0
    for name in sorted(names):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} holds no {name}: save the model again, as safetensors")
        try:
            with safe_open(folder / name, framework="pt") as file:
                count += sum(math.prod(file.get_slice(key).get_shape()) for key in file.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{folder / name} is not whole, or no safetensors file: {error}") from error
    return count


def _files(folder: Path) -> dict[str, Path | bytes]:
    """What is published, by its path in the repository: a file, or its content."""
    files: dict[str, Path | bytes] = {}
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part.startswith((".", "checkpoint-", "__pycache__")) for part in parts):
            files["/".join(parts)] = path
    return files


def _code(config: dict[str, Any]) -> dict[str, Path | bytes]:
    """The files of the architecture, and a config.json that says where in them each Auto class finds its own."""
    model_type = config["model_type"]
    architecture = ARCHITECTURES[model_type]
    auto_map = {"AutoConfig": f"configuration_{model_type}.{architecture.config}"}
    auto_map |= {auto: f"modeling_{model_type}.{model}" for auto, model in architecture.models.items()}
    package = Path(str(importlib.resources.files(f"hf_ssm.modeling.{model_type}")))
    return {
        "config.json": (json.dumps(config | {"auto_map": auto_map}, indent=2) + "\n").encode(),
        **{name: package / name for name in (f"configuration_{model_type}.py", f"modeling_{model_type}.py")},
    }


def _licensed(path: Path, license: str | None) -> Path | bytes:
    """A folder's card as it is, or with the licence that it lacks. ValueError if there is none, or there are two."""
    try:
        card = ModelCard.load(path)
    except YAMLError as error:
        raise ValueError(f"README.md: its metadata are no YAML: {str(error).splitlines()[0]}") from error
    stated = card.data.get("license")
    if stated is None and license is None:
        raise ValueError("README.md states no licence: add `license:` to its metadata, or say --license")
    if stated is not None and license not in (None, stated):
        raise ValueError(f"README.md states the licence {stated}, and --license {license}: which of them is it?")
    if stated is not None:
        return path
    card.data.license = license
    return str(card).encode()


# --- the way there ---------------------------------------------------------------------------------------------------


def _commit(files: dict[str, Path | bytes], repo_id: str, private: bool, revision: str | None) -> str:
    """One commit, not `upload_folder`, which may make several: nobody shall find half of a model. Large files are sent
    before it; what has arrived is not sent again."""
    api = HfApi(library_name="hf-ssm")
    with _one_line_errors(api.endpoint, repo_id):
        repo_id = api.create_repo(repo_id, private=private or None, exist_ok=True).repo_id
        if private and not api.repo_info(repo_id).private:
            raise HubError(f"{repo_id} exists and is public: leave --private out, or choose another name")
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        additions = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=file) for name, file in files.items()]
        return api.create_commit(repo_id, additions, commit_message="Upload with hf-ssm", revision=revision).commit_url


@contextmanager
def _one_line_errors(endpoint: str, repo_id: str) -> Iterator[None]:
    """What the client raises, in one line of what happened and what to do."""
    try:
        yield
    except (HubError, ValueError, errors.OfflineModeIsEnabled):
        raise
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{endpoint} has no repository {repo_id} for you: check its name, and that your token may see it"
        ) from error
    except Exception as error:
        for cause in _causes(error):
            if isinstance(cause, errors.HfHubHTTPError):
                raise HubError(_refusal(cause, endpoint, repo_id)) from error
        if connection_broke(error):
            raise HubError(
                f"the connection to {endpoint} broke: {repo_id} shows nothing of this upload; the same command goes "
                "on with what is missing"
            ) from error
        raise


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it came from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def connection_broke(error: BaseException) -> bool:
    """Whether an error came from a connection that could not be made or did not last."""
    for cause in _causes(error):
        # by name: huggingface_hub has changed its HTTP client twice
        names = {f"{base.__module__.split('.')[0]}.{base.__name__}" for base in type(cause).__mro__}
        offline = isinstance(cause, errors.OfflineModeIsEnabled)
        if not offline and names & {"httpx.TransportError", "httpx2.TransportError", "builtins.ConnectionError"}:
            return True
    return False


def _refusal(error: Any, endpoint: str, repo_id: str) -> str:
    status = error.response.status_code
    if status == 401:
        return f"{endpoint} does not know you: log in with `hf auth login`, or set HF_TOKEN"
    if status == 403:
        return f"your token may not write to {repo_id} on {endpoint}: it needs the right to write there"
    said = error.server_message or error.response.reason_phrase
    return f"{endpoint} refused {repo_id} with {status}: {said}"
