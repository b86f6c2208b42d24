"""Artifacts from the hub, and to it."""

from collections.abc import Collection
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download

from kvtransfer.errors import ArtifactError
from kvtransfer.hf.hub import unreachable
from kvtransfer.hf.spec import first_line


def snapshot(name: str, *, revision: str | None, what: str) -> Path:
    """A local copy of a repository on the hub.

    Args:
        name: Its id.
        revision: A branch, tag or commit; None for the main branch.
        what: What is looked for, for the error.

    Raises:
        ArtifactError: there is no such repository, or the hub gives no answer.
    """
    try:
        found = snapshot_download(name, revision=revision, local_files_only=unreachable())
    except Exception as error:  # the client and what it stands on raise a dozen kinds
        raise ArtifactError(
            f"no {what} at {name}: neither a folder nor on the hub ({first_line(error)})",
            hint="check the path or the id; a private repository needs a token",
        ) from error
    return Path(found)


def upload(
    folder: Path, name: str, *, private: bool, token: str | None, ignore: Collection[str] = ()
) -> str:
    """Upload a folder to a repository, which is made where there is none.

    Returns:
        The address of the commit.

    Raises:
        ArtifactError: the hub gives no answer, or refuses.
    """
    api = HfApi(token=token)
    try:
        api.create_repo(name, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=name, folder_path=folder, ignore_patterns=list(ignore))
    except Exception as error:
        raise ArtifactError(
            f"{name} cannot be written on the hub: {first_line(error)}",
            hint="log in (`hf auth login`), and name a repository of yours: user/name",
        ) from error
    return str(commit.commit_url)
