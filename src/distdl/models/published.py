"""Fetches weights by their name: `python -P -m distdl.models.published timm:resnet18.a1_in1k`.

A process of its own, since timm and torchvision import torch, and the command line does not. It
prints one line of JSON: `path`, `file`, `sha256` and `source`, or `problem`, the four fields of
a `Problem`. Downloads are those of Hugging Face's client and of torch.hub, into their own caches:
what another program has fetched is not fetched again. Either takes a file only when it is complete,
and this module only with the right hash:

- timm: SHA-256 of the whole file, which Hugging Face states for every file of weights (LFS);
- torchvision: its first digits, which are part of the file's name.

A token for Hugging Face is used as its client does: $HF_TOKEN or `hf auth login`, for the server of
$HF_ENDPOINT alone. torchvision's server gets none; $DISTDL_TORCHVISION_URL names a mirror of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from distdl.config.published import KEY, TIMM, TORCHVISION
from distdl.util.digests import sha256_of
from distdl.util.errors import Problem, UserError
from distdl.util.suggest import did_you_mean_word

MIRROR = "DISTDL_TORCHVISION_URL"
PUBLISHER = "https://download.pytorch.org/models"
HASH = re.compile(r"[-_]([0-9a-f]{8,64})\.pth")
# In the order of preference.
FILES = ("model.safetensors", "pytorch_model.bin")
SECONDS = 60.0  # without a byte
OTHERWISE = "or fetch the file on another machine: model.weights=FILE"


def fetched(name: str) -> dict[str, str]:
    """The file of a name, from the cache or from its publisher.

    Raises:
        UserError: There is no such name, the publisher cannot be reached, or it gives something
            else than what it promises.
    """
    if name.startswith(TIMM):
        return _of_timm(name.removeprefix(TIMM))
    return _of_torchvision(name.removeprefix(TORCHVISION))


def _of_torchvision(name: str) -> dict[str, str]:
    import torch
    from torchvision import models

    try:
        url = models.get_weight(name).url
    except (ValueError, KeyError):
        enums = [models.get_model_weights(model) for model in models.list_models()]
        known = sorted(str(each) for enum in enums for each in enum)
        hint = did_you_mean_word(name, known) or "ResNet50_Weights.IMAGENET1K_V2 is one"
        raise _no_such_name(f"torchvision has no weights {name!r}", hint) from None
    hashed = HASH.search(url)
    if hashed is None:
        raise _without_hash(name, url)
    mirror = os.environ.get(MIRROR)
    address = f"{mirror.rstrip('/')}{url.removeprefix(PUBLISHER)}" if mirror else url
    target = Path(torch.hub.get_dir(), "checkpoints", url.rpartition("/")[2])
    digest = sha256_of(target) if target.is_file() else ""
    if not digest.startswith(hashed[1]):
        target.parent.mkdir(parents=True, exist_ok=True)
        _say(f"{TORCHVISION}{name}", address)
        socket.setdefaulttimeout(SECONDS)
        try:
            bar = sys.stderr.isatty()
            torch.hub.download_url_to_file(address, str(target), hashed[1], progress=bar)
        except HTTPError as error:
            raise _refused(address, f"HTTP {error.code}") from None
        except (URLError, OSError) as error:
            raise _unreachable(address, getattr(error, "reason", error)) from None
        except RuntimeError as error:  # torch's, of a hash
            raise UserError.at(
                KEY,
                what=f"what {_shown(address)} sent for {name} is damaged or cut off: {error}",
                remedy="try again",
                code="damaged-file",
            ) from None
        digest = sha256_of(target)
    return {"path": str(target), "file": target.name, "sha256": digest, "source": url}


def _of_timm(name: str) -> dict[str, str]:
    import huggingface_hub as hub
    from timm import models

    try:
        entry = models.get_pretrained_cfg(name, allow_unregistered=False)
        assert entry is not None
    except RuntimeError:
        hint = did_you_mean_word(name, models.list_pretrained()) or "resnet18.a1_in1k is one"
        raise _no_such_name(f"timm has no weights {name!r}", hint) from None
    if not entry.hf_hub_id:
        raise _without_hash(name, entry.url or "timm")
    repository, _, revision = entry.hf_hub_id.partition("@")
    names = (entry.hf_hub_filename,) if entry.hf_hub_filename else FILES
    for file in names:
        known = hub.try_to_load_from_cache(repository, file, revision=revision or None)
        # Where the disk has links, the file's own name is its hash.
        if isinstance(known, str) and (found := _checked(Path(known), Path(known).resolve().name)):
            return _of_hub(name, Path(known), found, hub.hf_hub_url(repository, file))
    url = ""
    with _hubs_errors(name, repository):
        for file in names:
            url = hub.hf_hub_url(repository, file, revision=revision or None)
            with contextlib.suppress(hub.errors.RemoteEntryNotFoundError):
                stated = hub.get_hf_file_metadata(url).etag or ""
                _say(f"{TIMM}{name}", url)
                path = Path(hub.hf_hub_download(repository, file, revision=revision or None))
                break
        else:
            raise _refused(url, f"{repository} has none of {', '.join(names)}")
    if not (found := _checked(path, stated)):
        raise UserError.at(
            KEY,
            what=(
                f"what {_shown(url)} sent for {name} has another hash than it states: "
                "it is not kept"
            ),
            remedy="try again",
            code="damaged-file",
        )
    return _of_hub(name, path, found, url)


def _of_hub(name: str, path: Path, digest: str, url: str) -> dict[str, str]:
    # All are called model.safetensors: a run's file says which one it is.
    file = f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}-{digest[:8]}{path.suffix}"
    return {"path": str(path), "file": file, "sha256": digest, "source": url}


def _checked(path: Path, stated: str) -> str:
    """The SHA-256 of a file in Hugging Face's cache; "" if it has another hash than `stated`, and
    then it is removed."""
    blob = path.resolve()
    digest = sha256_of(blob)
    if len(stated) == 40:  # a file that is not in LFS has git's hash
        with blob.open("rb") as file:
            head = f"blob {blob.stat().st_size}\0".encode()
            actual = hashlib.sha1(head + file.read(), usedforsecurity=False).hexdigest()
    else:
        actual = digest
    if actual == stated:
        return digest
    blob.unlink()
    path.unlink(missing_ok=True)
    return ""


@contextlib.contextmanager
def _hubs_errors(name: str, repository: str) -> Iterator[None]:
    from huggingface_hub import constants, errors

    server = constants.ENDPOINT
    try:
        yield
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        offline = constants.HF_HUB_OFFLINE
        why = "HF_HUB_OFFLINE is set" if offline else _reason(error)
        raise _unreachable(server, f"{name} is not in the cache, and {why}") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            what = f"HTTP {status} for {repository}: it needs a token, or does not take yours"
            raise _refused(server, what) from None
        raise _refused(server, f"HTTP {status} for {repository}") from None
    except UserError:
        raise
    except Exception as error:  # its client's, of the network, and of a body that is too short
        raise _unreachable(server, _reason(error)) from None


def _reason(error: BaseException) -> str:
    text = str(error.__cause__ or error).strip() or type(error).__name__
    return text.splitlines()[0]


def _say(name: str, url: str) -> None:
    print(f"weights    {name} from {_shown(url)}", file=sys.stderr, flush=True)


def _shown(url: str) -> str:
    """An address without what may be a secret: a user, a signature."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _no_such_name(what: str, hint: str) -> UserError:
    return UserError.at(KEY, what=what, remedy=hint, code="wrong-choice")


def _without_hash(name: str, url: object) -> UserError:
    return UserError.at(
        KEY,
        what=f"{name} cannot be checked, as {url} states no hash",
        remedy="if you trust it: fetch it yourself, and model.weights=FILE",
        code="unsupported",
    )


def _refused(url: str, what: str) -> UserError:
    return UserError.at(
        KEY, what=f"{_shown(url)} answers {what}", remedy=OTHERWISE, code="platform-refuses"
    )


def _unreachable(url: str, why: object) -> UserError:
    return UserError.at(
        KEY,
        what=f"{_shown(url)} cannot be reached: {why}",
        remedy=f"try again, {OTHERWISE}",
        code="unreachable",
    )


def main() -> None:
    """Prints the answer; what anything else prints goes to stderr."""
    answer: dict[str, object]
    with contextlib.redirect_stdout(sys.stderr):
        try:
            answer = dict(fetched(sys.argv[1]))
        except UserError as error:
            problem: Problem = error.problems[0]
            answer = {"problem": [problem.path, problem.what, problem.remedy, problem.code]}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
