"""Whether there is a model at a path, which SGLang finds out after a minute of retries."""

from __future__ import annotations

import os
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

SECONDS = 5
"""How long the hub may take to say whether it has a model."""


def find_file(model_path: str, name: str, revision: str | None = None) -> Path | None:
    """Find a file of a model on this machine: in its folder, or in Hugging Face's cache."""
    folder = Path(model_path).expanduser()
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    try:
        found = huggingface_hub.try_to_load_from_cache(model_path, name, revision=revision)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def require_model(model_path: str, revision: str | None = None) -> None:
    """Check within seconds that there is a model: in a folder, in the cache, or on the hub.

    Raises:
        FileNotFoundError: there is none; the message says where it was looked for.
    """
    if find_file(model_path, "config.json", revision):
        return
    asked = f"--model-path {model_path}"
    folder = Path(model_path).expanduser()
    is_local = folder.is_absolute() or model_path.startswith(".") or model_path.count("/") > 1
    if is_local or folder.exists():
        raise FileNotFoundError(
            f"{asked}: this does not exist or has no config.json. "
            "Pass a model folder or a Hugging Face repository id."
        )
    if os.environ.get("SGLANG_USE_MODELSCOPE", "").lower() in ("1", "true"):
        return
    looked = f"{asked}: there is no such folder, and no such model in {constants.HF_HUB_CACHE}"
    if constants.HF_HUB_OFFLINE:
        raise FileNotFoundError(f"{looked}. Unset HF_HUB_OFFLINE, or pass the model's folder.")
    try:
        url = huggingface_hub.hf_hub_url(model_path, "config.json", revision=revision)
        huggingface_hub.get_hf_file_metadata(url, timeout=SECONDS)
    except (RepositoryNotFoundError, HFValidationError):
        raise FileNotFoundError(
            f"{looked}, and {constants.ENDPOINT} has none that you may read. "
            "Check its spelling, or set HF_TOKEN."
        ) from None
    except HfHubHTTPError:
        return  # the hub answers, and SGLang may read other files than config.json
    except Exception as error:
        raise FileNotFoundError(
            f"{looked}, and {constants.ENDPOINT} does not answer ({type(error).__name__}). "
            "Check its spelling and the network, or pass the model's folder."
        ) from None
